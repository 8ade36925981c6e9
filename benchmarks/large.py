"""What scanning the largest open models costs: LLaMA-3-70B and 405B shapes in bfloat16, as sparse local shards.

70B: Q and K of all 80 layers are numbers (12 GB). 405B: those of four layers; the other 122 are holes, which are read
as zeros and come out as rows of nulls with the reason.
Run: python benchmarks/large.py [70B] [405B] [--save FOLDER] [--folder SCRATCH]
Needs 15 GB of disk under SCRATCH.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine
from sparse import LLAMA, peak_of_scan, write

PEAK_MB = 1500.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Scan sparse checkpoints of the largest shapes.")
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="70B, 405B; both by default")
    parser.add_argument(
        "--save", type=Path, help="write large.txt and large.json into this folder; other shapes stay"
    )
    parser.add_argument("--folder", type=Path, help="where to put the files meanwhile")
    options = parser.parse_args()
    shapes = options.shapes or ["70B", "405B"]
    for name in shapes:
        if name not in LLAMA:
            parser.error(f"unknown shape {name!r}; known: {', '.join(LLAMA)}")
    missed = []
    for name in shapes:
        with tempfile.TemporaryDirectory(prefix="qkform-large-", dir=options.folder) as folder:
            shape = LLAMA[name]
            cost = peak_of_scan(write(Path(folder) / name, shape), shape.layers)
        result = {"machine": machine(), **cost}
        print(line(name, result), flush=True)
        if options.save:
            save(options.save, name, result)
        if cost["peak_mb"] > PEAK_MB or cost["null_layers"] != shape.layers - shape.real:
            missed.append(name)
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


def line(name: str, cost: dict[str, Any]) -> str:
    """One shape in words."""
    shape = LLAMA[name]
    size = f"{cost['file_gb']:.0f} GB in {shape.shards} shards, {cost['read_gb']:.1f} GB read"
    taken = f"{cost['seconds']:.0f} s, {cost['seconds_per_layer']:.1f} s per layer, every column"
    peak = f"peak {cost['peak_mb']:.0f} MB (promised {PEAK_MB:.0f})"
    null = f"{cost['null_layers']:.0f} of {shape.layers} layers null with a reason"
    where = ", ".join(f"{k} {v}" for k, v in cost["machine"].items())
    return f"LLaMA-3-{name} shape: {size}; {taken}; {peak}; {null} ({where})"


def save(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Put one shape into the recorded results, beside what is there of others."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "large.json"
    results = json.loads(record.read_text()) if record.exists() else {}
    results[name] = result
    record.write_text(json.dumps(results, indent=1) + "\n")
    (folder / "large.txt").write_text("\n".join(line(n, r) for n, r in results.items()) + "\n")


if __name__ == "__main__":
    main()
