"""How fast a scan is: against the full-matrix way, against the roofline, at start-up, and in memory.

Ratios within one run, medians, the two sides in turn. Run: python benchmarks/scan.py [--quick] [--save FOLDER]

* full matrix: every head's W = W_Q W_K^T formed, d x d, and both axes (symmetry, directionality) read from it,
  heads and layer; ours: the same scores from `BilinearForm`. Weights in memory, float32, as a Linear layer stores them.
* roofline: the operations that the formulas need (a symmetric product counts half), over the rate of matrix products
  measured in the same run; or the bytes of Q and K over the rate of reading them from a warm file cache; the larger.
  The rate is taken twice: from the same products at their own shapes (a head is 64 or 128 wide), and from one large
  product. Compared with the scores from weights in memory, and with reading a file of several layers and scoring.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import qkform as qk
from machine import machine
from sparse import LLAMA, peak_of_scan, write

SHAPES = {  # d_model, heads, kv heads: the ratio to the full-matrix way that we promise
    (768, 12, 12): 2.0,
    (1024, 16, 16): 2.5,
    (4096, 32, 8): 20.0,
    (4096, 32, 32): 3.0,
}
ROOFLINE = 2.0
MEMORY_MB = 600.0
START_SECONDS = 0.5
GEMM = 2048  # side of the matrices whose product gives the rate


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_turn(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Times of each piece of work, one after the other, `rounds` times, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 1):
        for name, work in works.items():
            taken = seconds(work)
            if i:
                times[name].append(taken)
    return times


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# ---- the full-matrix way ------------------------------------------------------------------------------------------


def axes_of_matrix(w: np.ndarray) -> tuple[float, float]:
    """Symmetry and directionality from W, as one would write it."""
    square = w * w
    norm2 = square.sum(dtype=np.float64)
    symmetry = float((w * w.T).sum(dtype=np.float64) / norm2)
    excesses = []
    for axis in (1, 0):
        norms = np.sqrt(square.sum(axis=axis, dtype=np.float64))
        threshold = norms.mean() + 2.0 * norms.std(ddof=1)
        excesses.append(float((norms[norms > threshold] - threshold).sum()))
    both = excesses[0] + excesses[1]
    return symmetry, (excesses[0] - excesses[1]) / both if both else 0.0


def full_matrix_way(w_q: np.ndarray, w_k: np.ndarray) -> list[tuple[float, float]]:
    group = w_q.shape[0] // w_k.shape[0]
    total, out = None, []
    for h in range(w_q.shape[0]):
        w = w_q[h] @ w_k[h // group].T
        out.append(axes_of_matrix(w))
        total = w if total is None else np.add(total, w, out=total)
    assert total is not None
    out.append(axes_of_matrix(total))
    return out


def our_way(form: qk.BilinearForm) -> list[tuple[float, float]]:
    total = form.total()
    heads = list(zip(form.symmetry().tolist(), form.directionality().tolist(), strict=True))
    return [*heads, (float(total.symmetry()[0]), float(total.directionality()[0]))]


def operations(d: int, n: int, g: int) -> dict[str, float]:
    """Floating-point operations of the products that both axes need; G_Q and G_K are symmetric and count half."""
    k = d // n
    heads = n * (1 + 2 + 2 + 2) * d * k**2 + g * d * k**2  # G_Q, C, rows, columns; G_K
    wide = g * k
    factors = 8.0 * d * wide**2
    dense = 2.0 * d * d * wide
    return {"heads": float(heads), "layer": min(factors, dense)}


def products_alone(w_q: np.ndarray, w_k: np.ndarray) -> None:
    """Nothing but the matrix products of the factor formulas, at their shapes, and W for the layer or its factors."""
    group = w_q.shape[0] // w_k.shape[0]
    grams = [k.T @ k for k in w_k]
    for h, q in enumerate(w_q):
        k = w_k[h // group]
        gram = q.T @ q
        _ = k.T @ q
        _ = grams[h // group] @ q.T
        _ = gram @ k.T
    d = w_q.shape[1]
    stacked = np.swapaxes(w_q, 1, 2)
    q = stacked.reshape(w_k.shape[0], group, -1, d).sum(axis=1).reshape(-1, d)
    k = np.swapaxes(w_k, 1, 2).reshape(-1, d)
    if 8 * q.shape[0] < 2 * d:
        gram_q, gram_k = q @ q.T, k @ k.T
        _ = k @ q.T
        _ = gram_k @ q
        _ = gram_q @ k
    else:
        _ = q.T @ k


# ---- measurements -------------------------------------------------------------------------------------------------


def model_file(folder: Path, d: int, n: int, g: int, layers: int) -> Path:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    k = d // n
    tensors = {
        f"model.layers.{i}.self_attn.{name}_proj.weight": 0.02
        * rng.standard_normal((heads * k, d), dtype=np.float32)
        for i in range(layers)
        for name, heads in (("q", n), ("k", g))
    }
    config = {
        "model_type": "llama",
        "hidden_size": d,
        "num_attention_heads": n,
        "num_key_value_heads": g,
        "num_hidden_layers": layers,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure_shape(folder: Path, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    d, n, g = shape
    layers = 12 if d < 4096 else 2
    source = model_file(folder / f"{d}-{n}-{g}", d, n, g, layers)
    size = (source / "model.safetensors").stat().st_size
    form = next(iter(qk.layers(source))).form
    w_q, w_k = form.w_q, form.w_k

    def fresh() -> qk.BilinearForm:
        return qk.BilinearForm(w_q, w_k)

    def read_whole() -> None:
        with (source / "model.safetensors").open("rb", buffering=0) as file:
            buffer = np.empty(size, dtype=np.uint8)
            file.readinto(memoryview(buffer))  # type: ignore[attr-defined]

    def read_and_score() -> None:
        for layer in qk.layers(source):
            our_way(layer.form)

    largest = max(
        abs(a - b)
        for ours, theirs in zip(our_way(fresh()), full_matrix_way(w_q, w_k), strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    assert largest < 1e-3, f"the two ways differ by {largest}"
    square = np.random.default_rng(1).standard_normal((GEMM, GEMM), dtype=np.float32)
    times = in_turn(
        {
            "ours": lambda: our_way(fresh()),
            "gemm": lambda: square @ square,
            "full": lambda: full_matrix_way(w_q, w_k),
            "products": lambda: products_alone(w_q, w_k),
            "read": read_whole,
            "scan": read_and_score,
            "all columns": lambda: qk.scan(source),
        },
        rounds if d < 4096 else max(3, rounds // 3),
    )
    median = {name: statistics.median(t) for name, t in times.items()}
    flops = operations(d, n, g)
    compute = [
        sum(flops.values()) * t / (2.0 * GEMM**3) for t in times["gemm"]
    ]  # seconds of one layer, at best
    bound = [max(layers * c, r) for c, r in zip(compute, times["read"], strict=True)]
    own = [max(layers * p, r) for p, r in zip(times["products"], times["read"], strict=True)]
    return {
        "d_model": d,
        "n_heads": n,
        "n_kv_heads": g,
        "layers_in_file": layers,
        "gflops_of_these_products": 1e-9 * sum(flops.values()) / median["products"],
        "gflops_of_a_large_product": 2e-9 * GEMM**3 / median["gemm"],
        "largest_difference": largest,
        "full_over_ours": ratio(times["full"], times["ours"]),
        "promised_full_over_ours": SHAPES[shape],
        "operations_per_layer": flops,
        "bytes": size,
        "roofline": "operations" if layers * statistics.median(compute) >= median["read"] else "bytes",
        "ours_over_roofline": ratio(times["ours"], times["products"]),
        "scan_over_roofline": ratio(times["scan"], own),
        "ours_over_large_product_roofline": ratio(times["ours"], compute),
        "scan_over_large_product_roofline": ratio(times["scan"], bound),
        "all_columns_over_axes": ratio(times["all columns"], times["scan"]),
        "all_columns_over_roofline_of_axes": ratio(times["all columns"], own),
        "milliseconds": {name: 1e3 * t for name, t in median.items()},
    }


def measure_start(rounds: int) -> dict[str, float]:
    """Seconds that `qkform --help` takes beyond `import numpy`."""

    def command(*arguments: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    times = in_turn(
        {"help": command("-m", "qkform", "--help"), "numpy": command("-c", "import numpy")}, rounds
    )
    median = {name: statistics.median(t) for name, t in times.items()}
    return {
        "help_seconds": median["help"],
        "numpy_seconds": median["numpy"],
        "beyond_numpy_seconds": median["help"] - median["numpy"],
    }


def measure_memory(folder: Path) -> dict[str, float]:
    return peak_of_scan(write(folder / "llama-3-8b-shape", LLAMA["8B"]), LLAMA["8B"].layers)


def report(result: dict[str, Any]) -> str:
    m = result["machine"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, Python {m['python']}, numpy {m['numpy']}, {m['blas']}",
        "Medians of ratios within one run; files in the page cache. Both axes, heads and layer:",
        "",
        f"{'':<18}{'full / ours':>13}{'promised':>10}{'roofline at own shapes':>26}{'at a large product':>22}"
        f"{'every column':>15}{'GFLOP/s':>14}",
        f"{'':<18}{'':>13}{'':>10}{'ours':>16}{'scan':>10}{'ours':>12}{'scan':>10}{'/ axes':>15}{'own, large':>14}",
    ]
    for s in result["shapes"]:
        name = f"{s['d_model']} x {s['n_heads']}, {s['n_kv_heads']} kv"
        rates = f"{s['gflops_of_these_products']:.0f}, {s['gflops_of_a_large_product']:.0f}"
        lines.append(
            f"{name:<18}{s['full_over_ours']:>13.1f}{s['promised_full_over_ours']:>10.1f}"
            f"{s['ours_over_roofline']:>16.2f}{s['scan_over_roofline']:>10.2f}"
            f"{s['ours_over_large_product_roofline']:>12.2f}{s['scan_over_large_product_roofline']:>10.2f}"
            f"{s['all_columns_over_axes']:>15.1f}{rates:>14}   bound: {s['roofline']}"
        )
    start = result["start"]
    lines += [
        "",
        f"qkform --help: {start['beyond_numpy_seconds']:.2f} s beyond import numpy (promised {START_SECONDS})",
    ]
    if "memory" in result:
        mem = result["memory"]
        lines.append(
            f"{mem['file_gb']:.1f} GB, LLaMA-3-8B shape, every column: {mem['beyond_imports_mb']:.0f} MB beyond the "
            f"interpreter with its imports (promised {MEMORY_MB:.0f}), {mem['read_gb']:.2f} GB read, "
            f"{mem['seconds_per_layer']:.2f} s per layer"
        )
    return "\n".join(lines)


def broken_promises(result: dict[str, Any]) -> list[str]:
    missed = []
    for s in result["shapes"]:
        name = f"{s['d_model']} x {s['n_heads']}, {s['n_kv_heads']} kv"
        if s["full_over_ours"] < s["promised_full_over_ours"]:
            missed.append(f"{name}: {s['full_over_ours']:.1f} times the full-matrix way")
        for which in ("ours_over_roofline", "scan_over_roofline"):
            if s[which] > ROOFLINE:
                missed.append(f"{name}: {which} {s[which]:.2f}")
    if result["start"]["beyond_numpy_seconds"] > START_SECONDS:
        missed.append("start-up")
    if result.get("memory", {}).get("beyond_imports_mb", 0.0) > MEMORY_MB:
        missed.append("memory")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of a scan within one run.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no 16 GB file")
    parser.add_argument("--save", type=Path, help="write scan.txt and scan.json into this folder")
    options = parser.parse_args()
    rounds = 5 if options.quick else 15
    result: dict[str, Any] = {"benchmark": "scan", "machine": machine()}
    with tempfile.TemporaryDirectory(prefix="qkform-bench-") as folder:
        result["shapes"] = []
        for shape in SHAPES:
            print(f"measuring {shape} ...", file=sys.stderr)
            result["shapes"].append(measure_shape(Path(folder), shape, rounds))
        result["start"] = measure_start(rounds)
        if not options.quick:
            result["memory"] = measure_memory(Path(folder))
    text = report(result)
    print(text)
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "scan.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.save / "scan.txt").write_text(text + "\n")
    missed = broken_promises(result)
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
