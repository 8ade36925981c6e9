"""What the decoupled score costs: against stock attention and the score matrix, in memory, and in a training step.

Ratios within one run, medians, the sides in turn. On two CPU cores:
python benchmarks/attention.py [kernels] [memory] [step] [--quick] [--save FOLDER] [--device cuda]

* kernels: one call, forward and forward+backward, causal and bidirectional, over N: `flash` (the fused kernels),
  `reference` (the score matrix, its diagonal replaced: what eager code does) and the relatives, each over
  `scaled_dot_product_attention`. On CUDA also FlexAttention, compiled, with the diagonal as its score_mod, and
  milliseconds with the share of the rate of a large matrix product, measured in the same run. Some lengths again with
  every second sequence padded: on the left where causal, else on the right.
* memory: peak of one forward+backward over N, each point in a process of its own: bytes per token.
* step: forward, loss, backward and AdamW of BERT- and GPT-2-type models, attention dropout 0, after `decouple_` against
  before: the sizes of the presets mini (4 layers of width 256, 8 sequences of 512) and base (12 of 768, one sequence),
  the first also with padded batches; and two sequences of 512 in models of width 256, where what a call costs beside
  its products weighs most.

The implementations are compared before they are timed, outputs and gradients, up to the longest matrix of scores.

What is promised, and judged at the end of a whole run: on a CPU with two threads, float32, forward+backward, N from 256
on: `flash` over SDPA and the score matrix over `flash`; the growth of memory with N, and `flash` over SDPA in memory; a
step of the presets' sizes without padding. On CUDA: bfloat16, forward+backward, N = 4096: `flash` over SDPA, and faster
than FlexAttention. The rest (forward alone, N = 128, bfloat16 on a CPU, padding, small batches, the relatives) is
reported without a promise. A run with --quick or with another number of threads judges nothing. Exits with a list of
the promises that the run did not keep.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import qkform as qk
from machine import machine

PARTS = ("kernels", "memory", "step")
D_HEAD = 64
SIZES = {  # N: batch, heads
    128: (4, 8),
    256: (4, 8),
    512: (4, 8),
    1024: (4, 8),
    2048: (1, 8),
    4096: (1, 4),
}
SIZES_ON_CUDA = dict.fromkeys(SIZES, (4, 16))
LONGEST_MATRIX = 2048  # of the reference, whose scores are a matrix

THREADS = 2  # that the promises for a CPU are made for
# promises for float32 on a CPU; forward and backward together
OVER_SDPA = {256: 1.35, 512: 1.15, 1024: 1.15, 2048: 1.15, 4096: 1.15}
EAGER_OVER_FLASH = {1024: 2.5}
STEP = 1.06
GROWTH = (
    1.25  # of bytes per token from the shortest to the longest: 1 is linear, the ratio of lengths quadratic
)
FLASH_BYTES = 2.0  # over those of SDPA
# promises on CUDA, for bfloat16; forward and backward together
CUDA_OVER_SDPA = {4096: 1.15}
CUDA_OVER_FLEX = {4096: 1.0}
PADDED = (256, 512, 1024, 2048)
TOLERANCES = {
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
}  # of outputs and gradients, over the largest where that is > 1
MEMORY_LENGTHS, MEMORY_HEADS = (2048, 4096, 8192, 16384), 2


# ---- timing -------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any], calls: int, device: str) -> float:
    """Of one call, of `calls` in a row."""
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def in_turn(
    works: dict[str, Callable[[], Any]],
    device: str,
    budget: float,
    chief: tuple[str, ...],
    least: int = 5,
    most: int = 31,
) -> dict[str, list[float]]:
    """Seconds of each piece of work, one after the other, in rounds.

    Those named in `chief` are in every round, `least` to `most` of them, which take about `budget` seconds together;
    the others in 3 or more.
    """
    for work in works.values():
        work()
    once = {name: seconds(work, 1, device) for name, work in works.items()}
    calls = {name: max(1, math.ceil(0.01 / max(taken, 1e-5))) for name, taken in once.items()}
    cost = {name: calls[name] * once[name] for name in works}
    rounds = min(most, max(least, int(budget / sum(cost[name] for name in works if name in chief))))
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds):
        for name in works if i % 2 else reversed(works):
            if name in chief or i < max(3, int(budget / len(works) / cost[name])):
                times[name].append(seconds(works[name], calls[name], device))
    return times


def ratio(above: list[float], below: list[float]) -> float:
    """Of the rounds that both were in: the first ones."""
    return statistics.median(a / b for a, b in zip(above, below, strict=False))


# ---- one call -----------------------------------------------------------------------------------------------------

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


CHIEF = ("sdpa", "flash", "flex")


def implementations(causal: bool, device: str, n: int, padding: Tensor | None = None) -> dict[str, Attention]:
    """Each with the same arguments (q, k, v, self_score); standard attention and the relatives leave the last.

    `padding` (B, 1, 1, N) is True where a key is a token.
    """
    options: dict[str, Any] = {"is_causal": causal, "attn_mask": padding}
    standard = dict(options)
    if causal and padding is not None:  # together, made once, and no row without keys: as models hand it over
        past = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        itself = torch.eye(n, dtype=torch.bool, device=device)
        standard = {"attn_mask": past & padding | itself}

    def decoupled(impl: str) -> Attention:
        return lambda q, k, v, own: qk.attention.decoupled_attention(q, k, v, own, impl=impl, **options)

    found: dict[str, Attention] = {
        "sdpa": lambda q, k, v, own: scaled_dot_product_attention(q, k, v, **standard),
        "flash": decoupled("flash"),
        "reference": decoupled("reference"),
        "no-diagonal": lambda q, k, v, own: qk.attention.no_diagonal_attention(q, k, v, **options),
        "exclusive": lambda q, k, v, own: qk.attention.exclusive_attention(q, k, v, **options),
    }
    if device == "cuda" and padding is None:
        found["flex"] = flex(causal, n)
    if n > LONGEST_MATRIX:
        del found["reference"]
    return found


def flex(causal: bool, n: int) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda") if causal else None

    def attention(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])

        def replaced(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i == j, own[b, h, i] * scale, score)  # scores come to a score_mod scaled

        return compiled(q, k, v, score_mod=replaced, block_mask=blocks)  # type: ignore[no-any-return]

    return attention


def arguments(n: int, dtype: torch.dtype, device: str, batch: int, heads: int) -> list[Tensor]:
    """q, k, v, self_score and a gradient of the output; heads transposed as a projection leaves them."""
    make = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": make, "device": device}
    q, k, v, back = (
        torch.randn(batch, n, heads, D_HEAD, **options).to(dtype).transpose(1, 2) for _ in range(4)
    )
    return [q, k, v, torch.randn(batch, heads, n, **options), back]


def padding_of(causal: bool, batch: int, n: int, device: str) -> Tensor:
    """(B, 1, 1, N): every second sequence, from the last on, is a quarter of padding."""
    keys = torch.arange(n, device=device)
    tokens = keys >= n // 4 if causal else keys < n - n // 4
    padded = torch.arange(batch, device=device).flip(0) % 2 == 0
    return (tokens | ~padded[:, None])[:, None, None]


def works(found: dict[str, Attention], inputs: list[Tensor], backward: bool) -> dict[str, Callable[[], Any]]:
    *leaves, back = inputs

    def forward_of(attention: Attention) -> Callable[[], Any]:
        def run() -> None:
            with torch.no_grad():
                attention(*leaves)

        return run

    def both_of(attention: Attention) -> Callable[[], Any]:
        wanted = [x.detach().requires_grad_() for x in leaves]

        def run() -> None:
            torch.autograd.grad(attention(*wanted), wanted, back, allow_unused=True)

        return run

    return {name: (both_of if backward else forward_of)(work) for name, work in found.items()}


def check(found: dict[str, Attention], inputs: list[Tensor], where: str) -> dict[str, float] | None:
    """The largest differences of the decoupled implementations from the definition; ends the run where it is large."""
    if "reference" not in found:
        return None
    *tensors, back = inputs
    names = ("output", "query", "key", "value", "self_score")

    def values(attention: Attention) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention(*leaves)
        return [x.detach().float() for x in (out, *torch.autograd.grad(out, leaves, back))]

    truth = values(found["reference"])
    largest = dict.fromkeys(names, 0.0)
    for which in ("flash", "flex"):
        if which not in found:
            continue
        for name, a, b in zip(names, values(found[which]), truth, strict=True):
            difference = float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
            if not difference < TOLERANCES[inputs[0].dtype]:
                what = name if name == "output" else f"gradient of {name}"
                sys.exit(f"{where}: the {what} of {which} differs from the definition's by {difference:.1e}")
            largest[name] = max(largest[name], difference)
    return largest


def operations(causal: bool, n: int, heads: int, backward: bool) -> float:
    """Floating-point operations of the matrix products: 2 forward, 5 backward (the scores again); `heads` in all."""
    one = 2.0 * heads * n * n * D_HEAD
    return one * (7 if backward else 2) / (2 if causal else 1)


def rate_of_a_large_product(device: str, dtype: torch.dtype) -> float:
    """Operations per second."""
    side = 8192 if device == "cuda" else 2048
    a = torch.randn(side, side, device=device).to(dtype)
    times = in_turn({"product": lambda: a @ a}, device, 1.0, ("product",))["product"]
    return 2.0 * side**3 / statistics.median(times)


def measure_kernels(device: str, budget: float, lengths: tuple[int, ...]) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    peaks = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        peaks[name] = rate_of_a_large_product(device, dtype)
        for n in lengths:
            print(f"measuring {name}, N = {n} ...", file=sys.stderr)
            for causal in (True, False):
                for backward in (False, True):
                    points.append(measure_point(device, budget, dtype, n, causal, backward, False))
                if dtype == torch.float32 and n in PADDED:
                    points.append(measure_point(device, budget, dtype, n, causal, True, True))
    for point in points:
        milliseconds = point["milliseconds"]
        point["share_of_peak"] = {
            which: point["operations"] / (1e-3 * taken) / peaks[point["dtype"]]
            for which, taken in milliseconds.items()
        }
    return {
        "points": points,
        "gflops_of_a_large_product": {name: 1e-9 * rate for name, rate in peaks.items()},
    }


def measure_point(
    device: str, budget: float, dtype: torch.dtype, n: int, causal: bool, backward: bool, padded: bool
) -> dict[str, Any]:
    batch, heads = (SIZES_ON_CUDA if device == "cuda" else SIZES)[n]
    inputs = arguments(n, dtype, device, batch, heads)
    found = implementations(causal, device, n, padding_of(causal, batch, n, device) if padded else None)
    name = str(dtype).removeprefix("torch.")
    kind = f"{name}, {'causal' if causal else 'bidirectional'}, N = {n}{', padded' if padded else ''}"
    differences = check(found, inputs, kind) if backward else None
    about = {"dtype": name, "n": n, "causal": causal, "backward": backward, "padded": padded}
    if promised(about, device) is None:
        budget /= 2
    times = in_turn(works(found, inputs, backward), device, budget, CHIEF)
    return {
        **about,
        "batch": batch,
        "heads": heads,
        "rounds": len(times["sdpa"]),
        "largest_differences": differences,
        "over_sdpa": {w: ratio(t, times["sdpa"]) for w, t in times.items() if w != "sdpa"},
        "reference_over_flash": ratio(times["reference"], times["flash"]) if "reference" in times else None,
        "flash_over_flex": ratio(times["flash"], times["flex"]) if "flex" in times else None,
        "milliseconds": {w: 1e3 * statistics.median(t) for w, t in times.items()},
        "operations": operations(causal, n, batch * heads, backward),  # as if nothing were padding
    }


# ---- memory -------------------------------------------------------------------------------------------------------


def peak_bytes(which: str, n: int, causal: bool, device: str) -> float:
    """Peak memory of one forward and backward, inputs and gradients included. To be run in a process of its own."""
    attention = implementations(causal, device, n)[which]
    works({which: attention}, arguments(64, torch.float32, device, 1, MEMORY_HEADS), True)[
        which
    ]()  # what is set up once
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = _peak(device, reset=True)
    works({which: attention}, arguments(n, torch.float32, device, 1, MEMORY_HEADS), True)[which]()
    return _peak(device) - before


def _peak(device: str, *, reset: bool = False) -> float:
    """Bytes at most so far; `reset` lets the count begin at what is held now."""
    if device == "cuda":
        torch.cuda.synchronize()
        return float(torch.cuda.memory_allocated() if reset else torch.cuda.max_memory_allocated())
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024.0 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure_memory(device: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    points = []
    for causal in (True, False):
        for which in ("sdpa", "flash", "reference"):
            for n in lengths if which != "reference" else lengths[:1]:
                print(f"memory of {which}, N = {n} ...", file=sys.stderr)
                command = [
                    sys.executable,
                    __file__,
                    "--device",
                    device,
                    "--peak",
                    which,
                    str(n),
                    str(int(causal)),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                points.append(
                    {"which": which, "n": n, "causal": causal, "bytes_per_token": float(done.stdout) / n}
                )
    return points


# ---- a training step ----------------------------------------------------------------------------------------------


def models() -> Iterator[tuple[str, Any, int, str | None, bool]]:
    """Name, model, sequences of a batch, the side of it that is padded, and whether a promise is made for it."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    for layers, width, batch, kept in (
        (4, 256, 8, True),
        (12, 768, 1, True),
        (4, 256, 2, False),
        (12, 256, 2, False),
    ):
        bert = BertConfig(
            vocab_size=2048,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // D_HEAD,
            intermediate_size=4 * width,
            max_position_embeddings=512,
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        )
        gpt2 = GPT2Config(
            vocab_size=2048,
            n_embd=width,
            n_layer=layers,
            n_head=width // D_HEAD,
            n_positions=512,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        padded = batch == 8
        for side in (None, "right") if padded else (None,):
            yield f"BERT type, {layers} layers of {width}", BertForMaskedLM(bert), batch, side, kept
        for side in (None, "left") if padded else (None,):
            yield f"GPT-2 type, {layers} layers of {width}", GPT2LMHeadModel(gpt2), batch, side, kept


def measure_step(device: str, budget: float, least: int) -> list[dict[str, Any]]:
    n = 512
    results = []
    for name, model, batch, side, kept in models():
        print(f"a step of {name}, padded: {side} ...", file=sys.stderr)
        torch.manual_seed(0)
        tokens = torch.randint(0, 2048, (batch, n), device=device)
        padding = None
        if side is not None:
            padding = padding_of(side == "left", batch, n, device)[:, 0, 0].long()
        standard = model.to(device).train()
        decoupled = qk.surgery.decouple_(copy.deepcopy(standard))
        steps = {
            "standard": step_of(standard, tokens, padding),
            "decoupled": step_of(decoupled, tokens, padding),
        }
        # A step takes so long that other work on the machine falls into some of them: the promise takes many rounds.
        most = 101 if side is None else 31
        times = in_turn(steps, device, budget, tuple(steps), least, most)
        results.append(
            {
                "model": name,
                "batch": batch,
                "n": n,
                "padded": side,
                "promised": STEP if kept and side is None else None,
                "rounds": len(times["standard"]),
                "decoupled_over_standard": ratio(times["decoupled"], times["standard"]),
                "milliseconds": {which: 1e3 * statistics.median(t) for which, t in times.items()},
            }
        )
    return results


def step_of(model: Any, tokens: Tensor, padding: Tensor | None) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = tokens if padding is None else tokens.masked_fill(padding == 0, -100)

    def step() -> None:
        model(input_ids=tokens, attention_mask=padding, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- what is printed ----------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    m = result["machine"]
    lines = [
        f"{m['device']}, {m['cores']} cores, {m['threads']} threads, Python {m['python']}, torch {m['torch']}",
        "Medians of ratios within one run.",
    ]
    if m["device_type"] == "cpu":
        lines.append(
            f"Promised with {THREADS} threads: float32, forward+backward, N >= {min(OVER_SDPA)}, no padding; memory; "
            f"a step without padding."
        )
    else:
        lines.append(f"Promised: bfloat16, forward+backward, N = {', '.join(map(str, CUDA_OVER_SDPA))}.")
    if why := result.get("not_judged"):
        lines.append(f"Not judged: {why}.")
    if "kernels" in result:
        lines += report_kernels(result["kernels"], m["device_type"])
    if "memory" in result:
        lines += report_memory(result["memory"])
    if "step" in result:
        lines += report_step(result["step"])
    return "\n".join(lines)


def report_kernels(kernels: dict[str, Any], device: str) -> list[str]:
    lines = []
    names = list(kernels["points"][0]["over_sdpa"])
    timed = ("sdpa", "flash", "flex") if device == "cuda" else ("sdpa", "flash")
    for dtype, rate in kernels["gflops_of_a_large_product"].items():
        for causal in (True, False):
            for backward, padded in ((False, False), (True, False), (True, True)):
                chosen = [
                    p
                    for p in kernels["points"]
                    if (p["dtype"], p["causal"], p["backward"], p["padded"])
                    == (dtype, causal, backward, padded)
                ]
                if not chosen:
                    continue
                kind = f"{'causal' if causal else 'bidirectional'}, forward{'+backward' if backward else ''}"
                if padded:
                    kind += f", padded on the {'left' if causal else 'right'}"
                lines += [
                    "",
                    f"{dtype}, {kind}: over the time of SDPA; milliseconds and share of a large product's rate, "
                    f"{rate:,.0f} GFLOP/s",
                    f"{'N':>6}{'batch, heads':>14}"
                    + "".join(f"{name:>13}" for name in names)
                    + f"{'promised':>10}{'reference/flash':>17}"
                    + "".join(f"{name:>10} ms{'':>6}" for name in timed),
                ]
                for p in chosen:
                    promise = promised(p, device) or ""
                    matrix = p["reference_over_flash"]
                    lines.append(
                        f"{p['n']:>6}{p['batch']:>10}, {p['heads']:>2}"
                        + "".join(
                            f"{p['over_sdpa'][name]:>13.2f}" if name in p["over_sdpa"] else f"{'-':>13}"
                            for name in names
                        )
                        + (f"{promise:>10}{matrix:>17.2f}" if matrix else f"{promise:>10}{'-':>17}")
                        + "".join(
                            f"{p['milliseconds'][x]:>13.2f}{p['share_of_peak'][x]:>6.0%}"
                            for x in timed
                            if x in p["milliseconds"]
                        )
                    )
    return lines


def report_memory(points: list[dict[str, Any]]) -> list[str]:
    lines = []
    for causal in (True, False):
        kind = "causal" if causal else "bidirectional"
        lines += [
            "",
            f"peak bytes per token and head, float32, {kind}, forward+backward, inputs and gradients included "
            f"(promised: flash at most {FLASH_BYTES} times SDPA, and growing by at most {GROWTH})",
        ]
        for which in ("sdpa", "flash", "reference"):
            found = [p for p in points if (p["which"], p["causal"]) == (which, causal)]
            lines.append(
                f"{which:>10}"
                + "".join(f"   N {p['n']:>5}:{p['bytes_per_token'] / MEMORY_HEADS:>9,.0f}" for p in found)
            )
    return lines


def report_step(steps: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        f"a training step, decoupled over standard; what is promised is for {THREADS} CPU threads",
    ]
    for s in steps:
        ms = s["milliseconds"]
        side = f"padded {s['padded']}" if s["padded"] else ""
        lines.append(
            f"{s['model']:<30}{side:<14}{s['batch']} x {s['n']}{s['decoupled_over_standard']:>8.3f}"
            f"{'' if s['promised'] is None else s['promised']:>8}"
            f"{ms['standard']:>10.1f} ms standard{ms['decoupled']:>10.1f} ms decoupled"
        )
    return lines


def promised(point: dict[str, Any], device: str) -> float | None:
    """The most that flash may take over SDPA here."""
    if point["padded"] or not point["backward"]:
        return None
    dtype, most = ("float32", OVER_SDPA) if device == "cpu" else ("bfloat16", CUDA_OVER_SDPA)
    return most.get(point["n"]) if point["dtype"] == dtype else None


def broken_promises(result: dict[str, Any], device: str) -> list[str]:
    missed = []
    for p in result.get("kernels", {}).get("points", ()):
        most = promised(p, device)
        if most is None:
            continue
        name = f"{'causal' if p['causal'] else 'bidirectional'}, N = {p['n']}"
        if p["over_sdpa"]["flash"] > most:
            missed.append(f"{name}: {p['over_sdpa']['flash']:.2f} times SDPA, promised {most}")
        least = EAGER_OVER_FLASH.get(p["n"], 0.0)
        if device == "cpu" and least and p["reference_over_flash"] < least:
            faster = f"{p['reference_over_flash']:.2f} times faster than the score matrix"
            missed.append(f"{name}: {faster}, promised {least}")
        if device == "cuda" and p["flash_over_flex"] > CUDA_OVER_FLEX[p["n"]]:
            missed.append(
                f"{name}: {p['flash_over_flex']:.2f} times FlexAttention, promised {CUDA_OVER_FLEX[p['n']]}"
            )
    if device == "cpu":
        missed += broken_promises_of_memory(result.get("memory", []))
        for s in result.get("step", ()):
            if s["promised"] is not None and s["decoupled_over_standard"] > s["promised"]:
                over = f"{s['decoupled_over_standard']:.3f}, promised {s['promised']}"
                missed.append(f"a step of {s['model']}: {over}")
    return missed


def broken_promises_of_memory(points: list[dict[str, Any]]) -> list[str]:
    missed = []
    for causal in (True, False):
        kind = f"memory, {'causal' if causal else 'bidirectional'}"
        per_token = {
            which: {
                p["n"]: p["bytes_per_token"] for p in points if (p["which"], p["causal"]) == (which, causal)
            }
            for which in ("flash", "sdpa")
        }
        flash = list(per_token["flash"].values())
        if flash and flash[-1] > GROWTH * flash[0]:
            missed.append(f"{kind}: grows by {flash[-1] / flash[0]:.2f}, promised {GROWTH}")
        for n, taken in per_token["flash"].items():
            over = taken / per_token["sdpa"][n]
            if over > FLASH_BYTES:
                missed.append(f"{kind}, N = {n}: {over:.2f} times SDPA, promised {FLASH_BYTES}")
    return missed


def why_not_judged(quick: bool, device: str) -> str | None:
    """Why this run says nothing about the promises."""
    if quick:
        return "--quick measures too little"
    if device == "cpu" and torch.get_num_threads() != THREADS:
        return f"the promises are for {THREADS} threads, and this run has {torch.get_num_threads()}"
    return None


def save(result: dict[str, Any], folder: Path) -> None:
    """Write both files; parts that this run left out stay as they were recorded, where the machine is the same."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "attention.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    if all(earlier.get(name) == result[name] for name in ("machine", "not_judged")):
        result = result | {part: earlier[part] for part in PARTS if part in earlier and part not in result}
    path.write_text(json.dumps(result, indent=1) + "\n")
    (folder / "attention.txt").write_text(report(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the decoupled score costs, as ratios within one run.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and lengths; judges nothing")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--save", type=Path, help="write attention.txt and attention.json into this folder")
    parser.add_argument(
        "--peak", nargs=3, help=argparse.SUPPRESS
    )  # implementation, N, causal: one point of memory
    options = parser.parse_args()
    if options.peak:
        which, n, causal = options.peak
        print(peak_bytes(which, int(n), causal == "1", options.device))
        return
    parts = options.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    about = {**machine(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    about["device_type"] = options.device
    about["device"] = torch.cuda.get_device_name() if options.device == "cuda" else about["cpu"]
    why = why_not_judged(options.quick, options.device)
    result: dict[str, Any] = {"benchmark": "attention", "machine": about, "not_judged": why}
    budget = 0.4 if options.quick else 3.0
    if "kernels" in parts:
        lengths = (256, 1024) if options.quick else tuple(SIZES)
        result["kernels"] = measure_kernels(options.device, budget, lengths)
    if "memory" in parts:
        result["memory"] = measure_memory(
            options.device, MEMORY_LENGTHS[:2] if options.quick else MEMORY_LENGTHS
        )
    if "step" in parts:
        result["step"] = measure_step(options.device, 15 * budget, 3 if options.quick else 21)
    print(report(result))
    if options.save:
        save(result, options.save)
    missed = [] if why else broken_promises(result, options.device)
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
