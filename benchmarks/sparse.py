"""Checkpoints of real shapes, Q and K numbers and the other weights holes; and what scanning one costs."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Shape:
    """A LLaMA-type model in bfloat16, head size 128. `real` layers have numbers in Q and K, the others holes."""

    d_model: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    real: int
    shards: int
    vocabulary: int = 128256

    def tensors(self) -> dict[str, tuple[int, ...]]:
        d, kv = self.d_model, 128 * self.kv_heads
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, d)}
        for i in range(self.layers):
            p = f"model.layers.{i}"
            out |= {f"{p}.self_attn.{n}_proj.weight": (kv if n in "kv" else d, d) for n in "qkvo"}
            out |= {f"{p}.mlp.{n}_proj.weight": (self.hidden, d) for n in ("gate", "up")}
            out |= {f"{p}.mlp.down_proj.weight": (d, self.hidden)}
            out |= {f"{p}.{n}_layernorm.weight": (d,) for n in ("input", "post_attention")}
        return out | {"model.norm.weight": (d,), "lm_head.weight": (self.vocabulary, d)}


LLAMA = {
    "8B": Shape(4096, 32, 32, 8, 14336, real=32, shards=1),
    "70B": Shape(8192, 80, 64, 8, 28672, real=80, shards=30),
    "405B": Shape(16384, 126, 128, 8, 53248, real=4, shards=191),
}


def write(folder: Path, shape: Shape) -> Path:
    """The checkpoint as files: one, or shards of about equal size with an index."""
    import ml_dtypes

    folder.mkdir()
    tensors = shape.tensors()
    sizes = {name: 2 * int(np.prod(s)) for name, s in tensors.items()}
    limit = sum(sizes.values()) / shape.shards
    shards: list[list[str]] = [[]]
    for name in tensors:
        if sum(sizes[n] for n in shards[-1]) >= limit:
            shards.append([])
        shards[-1].append(name)
    rng = np.random.default_rng(0)
    places: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for name in names:
            header[name] = {
                "dtype": "BF16",
                "shape": list(tensors[name]),
                "data_offsets": [at, at + sizes[name]],
            }
            at += sizes[name]
            places[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
            for name in names:
                if (".q_proj." in name or ".k_proj." in name) and int(name.split(".")[2]) < shape.real:
                    out.seek(8 + len(text) + header[name]["data_offsets"][0])
                    for rows in np.array_split(np.arange(tensors[name][0]), 8):
                        part = 0.02 * rng.standard_normal((len(rows), shape.d_model), dtype=np.float32)
                        out.write(part.astype(ml_dtypes.bfloat16).tobytes())
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama",
        "hidden_size": shape.d_model,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_PEAK = """
import sys, time
import numpy, array_api_compat.numpy, ml_dtypes, safetensors
import qkform as qk, qkform.scanner, qkform.checkpoints.safetensors
def peak():  # of this process alone: ru_maxrss starts at what the parent had
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
before = peak()
begin = time.perf_counter()
table = qk.scan(sys.argv[1])
taken = time.perf_counter() - begin
null = sum(row["symmetry"] is None and bool(row["reason"]) for row in table.layers)
print(before, peak(), taken, len(table), table.models[0].bytes_read, len(table.layers), null)
"""


def peak_of_scan(source: Path, layers: int) -> dict[str, float]:
    """Time, bytes read and peak memory of scanning `source`, every column, in a process of its own."""
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(source)], check=True, capture_output=True, text=True
    )
    before, after, taken, rows, read, scored, null = (float(x) for x in done.stdout.split())
    if scored != layers:
        raise RuntimeError(f"{scored:.0f} layers were scored, the file has {layers}")
    return {
        "file_gb": size / 1e9,
        "read_gb": read / 1e9,
        "rows": rows,
        "layers": layers,
        "null_layers": null,
        "seconds": taken,
        "seconds_per_layer": taken / layers,
        "imports_mb": before / 1024,
        "peak_mb": after / 1024,
        "beyond_imports_mb": (after - before) / 1024,
    }
