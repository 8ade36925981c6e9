"""What the decoupled score costs: against stock attention and the score matrix, in memory, and in a training step.

Ratios within one run, medians, the sides in turn. On two CPU cores:
python benchmarks/attention.py [kernels] [memory] [step] [--quick] [--save FOLDER] [--device cuda]

* kernels: one call, forward and forward+backward, causal and bidirectional, over N: `flash` (the fused kernels),
  `reference` (the score matrix, its diagonal replaced: what eager code does) and the relatives, each over
  `scaled_dot_product_attention`. On CUDA also FlexAttention, compiled, with the diagonal as its score_mod, and
  milliseconds with the share of the rate of a large matrix product, measured in the same run.
* memory: peak of one forward+backward over N, each point in a process of its own: bytes per token.
* step: forward, loss, backward and AdamW of tiny BERT- and GPT-2-type models of 4 and 12 layers, attention dropout
  0, after `decouple_` against before.

Exits with a list of the promises that the run did not keep.
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

# promises for float32 on two CPU cores; forward and backward together
OVER_SDPA = {256: 1.35, 512: 1.15, 1024: 1.15, 2048: 1.15, 4096: 1.15}
EAGER_OVER_FLASH = {1024: 2.5}
STEP = 1.06
GROWTH = (
    1.25  # of bytes per token from the shortest to the longest: 1 is linear, the ratio of lengths quadratic
)
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
) -> dict[str, list[float]]:
    """Seconds of each piece of work, one after the other, in rounds that take about `budget` seconds together.

    Those named in `chief` are in every round, `least` to 31 of them; the others in 3 or more.
    """
    for work in works.values():
        work()
    once = {name: seconds(work, 1, device) for name, work in works.items()}
    calls = {name: max(1, math.ceil(0.01 / max(taken, 1e-5))) for name, taken in once.items()}
    cost = {name: calls[name] * once[name] for name in works}
    rounds = min(31, max(least, int(budget / sum(cost.values()))))
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


def implementations(causal: bool, device: str, n: int) -> dict[str, Attention]:
    """Each with the same arguments (q, k, v, self_score); standard attention and the relatives leave the last."""

    def decoupled(impl: str) -> Attention:
        return lambda q, k, v, own: qk.attention.decoupled_attention(
            q, k, v, own, is_causal=causal, impl=impl
        )

    found: dict[str, Attention] = {
        "sdpa": lambda q, k, v, own: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "flash": decoupled("flash"),
        "reference": decoupled("reference"),
        "no-diagonal": lambda q, k, v, own: qk.attention.no_diagonal_attention(q, k, v, is_causal=causal),
        "exclusive": lambda q, k, v, own: qk.attention.exclusive_attention(q, k, v, is_causal=causal),
    }
    if device == "cuda":
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


def check(found: dict[str, Attention], inputs: list[Tensor]) -> float | None:
    """The largest difference of the decoupled implementations from the definition."""
    if "reference" not in found:
        return None
    with torch.no_grad():
        truth = found["reference"](*inputs[:4]).float()
        others = [name for name in ("flash", "flex") if name in found]
        largest = max(float((found[name](*inputs[:4]).float() - truth).abs().max()) for name in others)
    allowed = 1e-4 if inputs[0].dtype == torch.float32 else 5e-2
    assert largest < allowed, f"the implementations differ by {largest}"
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
            batch, heads = (SIZES_ON_CUDA if device == "cuda" else SIZES)[n]
            inputs = arguments(n, dtype, device, batch, heads)
            for causal in (True, False):
                found = implementations(causal, device, n)
                difference = check(found, inputs)
                for backward in (False, True):
                    times = in_turn(works(found, inputs, backward), device, budget, CHIEF)
                    median = {which: statistics.median(t) for which, t in times.items()}
                    count = operations(causal, n, batch * heads, backward)
                    points.append(
                        {
                            "dtype": name,
                            "n": n,
                            "batch": batch,
                            "heads": heads,
                            "causal": causal,
                            "backward": backward,
                            "rounds": len(times["sdpa"]),
                            "largest_difference": difference,
                            "over_sdpa": {
                                w: ratio(t, times["sdpa"]) for w, t in times.items() if w != "sdpa"
                            },
                            "reference_over_flash": ratio(times["reference"], times["flash"])
                            if "reference" in times
                            else None,
                            "milliseconds": {w: 1e3 * t for w, t in median.items()},
                            "share_of_peak": {w: count / t / peaks[name] for w, t in median.items()},
                        }
                    )
    return {
        "points": points,
        "gflops_of_a_large_product": {name: 1e-9 * rate for name, rate in peaks.items()},
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


def models() -> Iterator[tuple[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    for layers in (4, 12):
        bert = BertConfig(
            vocab_size=2048,
            hidden_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=512,
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        )
        yield f"BERT type, {layers} layers", BertForMaskedLM(bert)
        gpt2 = GPT2Config(
            vocab_size=2048,
            n_embd=256,
            n_layer=layers,
            n_head=4,
            n_positions=512,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        yield f"GPT-2 type, {layers} layers", GPT2LMHeadModel(gpt2)


def measure_step(device: str, budget: float, least: int) -> list[dict[str, Any]]:
    batch, n = 2, 512
    results = []
    for name, model in models():
        print(f"a step of {name} ...", file=sys.stderr)
        torch.manual_seed(0)
        tokens = torch.randint(0, 2048, (batch, n), device=device)
        standard = model.to(device).train()
        decoupled = qk.surgery.decouple_(copy.deepcopy(standard))
        steps = {"standard": step_of(standard, tokens), "decoupled": step_of(decoupled, tokens)}
        times = in_turn(steps, device, budget, tuple(steps), least)
        results.append(
            {
                "model": name,
                "batch": batch,
                "n": n,
                "rounds": len(times["standard"]),
                "decoupled_over_standard": ratio(times["decoupled"], times["standard"]),
                "milliseconds": {which: 1e3 * statistics.median(t) for which, t in times.items()},
            }
        )
    return results


def step_of(model: Any, tokens: Tensor) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
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
            for backward in (False, True):
                kind = f"{'causal' if causal else 'bidirectional'}, forward{'+backward' if backward else ''}"
                lines += [
                    "",
                    f"{dtype}, {kind}: over the time of SDPA; milliseconds and share of a large product's rate, "
                    f"{rate:,.0f} GFLOP/s",
                    f"{'N':>6}{'batch, heads':>14}"
                    + "".join(f"{name:>13}" for name in names)
                    + f"{'promised':>10}{'reference/flash':>17}"
                    + "".join(f"{name:>10} ms{'':>6}" for name in timed),
                ]
                for p in kernels["points"]:
                    if (p["dtype"], p["causal"], p["backward"]) != (dtype, causal, backward):
                        continue
                    promise = OVER_SDPA.get(p["n"], "") if promised(p) else ""
                    matrix = p["reference_over_flash"]
                    lines.append(
                        f"{p['n']:>6}{p['batch']:>10}, {p['heads']:>2}"
                        + "".join(
                            f"{p['over_sdpa'][name]:>13.2f}" if name in p["over_sdpa"] else f"{'-':>13}"
                            for name in names
                        )
                        + (f"{promise:>10}{matrix:>17.2f}" if matrix else f"{promise:>10}{'-':>17}")
                        + "".join(
                            f"{p['milliseconds'][x]:>13.2f}{p['share_of_peak'][x]:>6.0%}" for x in timed
                        )
                    )
    return lines


def report_memory(points: list[dict[str, Any]]) -> list[str]:
    lines = []
    for causal in (True, False):
        kind = "causal" if causal else "bidirectional"
        lines += [
            "",
            f"peak bytes per token and head, float32, {kind}, forward+backward, inputs and gradients included",
        ]
        for which in ("sdpa", "flash", "reference"):
            found = [p for p in points if (p["which"], p["causal"]) == (which, causal)]
            lines.append(
                f"{which:>10}"
                + "".join(f"   N {p['n']:>5}:{p['bytes_per_token'] / MEMORY_HEADS:>9,.0f}" for p in found)
            )
    return lines


def report_step(steps: list[dict[str, Any]]) -> list[str]:
    lines = ["", f"a training step, decoupled over standard (promised {STEP} on two CPU cores)"]
    for s in steps:
        ms = s["milliseconds"]
        lines.append(
            f"{s['model']:<24}{s['batch']} x {s['n']}{s['decoupled_over_standard']:>8.3f}"
            f"{ms['standard']:>10.1f} ms standard{ms['decoupled']:>10.1f} ms decoupled"
        )
    return lines


def promised(point: dict[str, Any]) -> bool:
    return bool(point["backward"] and point["dtype"] == "float32")


def broken_promises(result: dict[str, Any]) -> list[str]:
    """On a CPU: the promises were made for two cores."""
    missed = []
    for p in filter(promised, result.get("kernels", {}).get("points", ())):
        name = f"{'causal' if p['causal'] else 'bidirectional'}, N = {p['n']}"
        if p["over_sdpa"]["flash"] > OVER_SDPA.get(p["n"], math.inf):
            missed.append(f"{name}: {p['over_sdpa']['flash']:.2f} times SDPA")
        if p["n"] in EAGER_OVER_FLASH and p["reference_over_flash"] < EAGER_OVER_FLASH[p["n"]]:
            missed.append(f"{name}: {p['reference_over_flash']:.2f} times faster than the score matrix")
    flash = [p for p in result.get("memory", ()) if p["which"] == "flash"]
    for causal in (True, False):
        per_token = [p["bytes_per_token"] for p in flash if p["causal"] == causal]
        if per_token and per_token[-1] > GROWTH * per_token[0]:
            missed.append(
                f"memory, {'causal' if causal else 'bidirectional'}: {per_token[-1] / per_token[0]:.2f}"
            )
    for s in result.get("step", ()):
        if s["decoupled_over_standard"] > STEP:
            missed.append(f"a step of {s['model']}: {s['decoupled_over_standard']:.3f}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description="What the decoupled score costs, as ratios within one run.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and lengths")
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
    result: dict[str, Any] = {"benchmark": "attention", "machine": about}
    budget = 0.4 if options.quick else 3.0
    if "kernels" in parts:
        lengths = (256, 1024) if options.quick else tuple(SIZES)
        result["kernels"] = measure_kernels(options.device, budget, lengths)
    if "memory" in parts:
        result["memory"] = measure_memory(
            options.device, MEMORY_LENGTHS[:2] if options.quick else MEMORY_LENGTHS
        )
    if "step" in parts:
        result["step"] = measure_step(options.device, 4 * budget, 3 if options.quick else 11)
    text = report(result)
    print(text)
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "attention.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.save / "attention.txt").write_text(text + "\n")
    missed = broken_promises(result) if options.device == "cpu" else []
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
