"""Records of runs that no model trained: made up by their schema, `qkform.run/1`, for tests of what shows them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("symmetry", "directionality", "norm", "entropy", "normalised_entropy", "largest")


def start(
    layers: int = 2, heads: int = 3, d_model: int = 48, name: str = "layers.{}.attn", **experiment: Any
) -> dict[str, Any]:
    return {
        "event": "start",
        "schema": "qkform.run/1",
        "step": 0,
        "experiment": {"preset": "tiny", "objective": "clm", "seed": 0, "lr": 0.003, **experiment}
        if experiment
        else None,
        "environment": {"python": "3.12.1", "torch": "2.13.0", "threads": 1, "device": "cpu"},
        "model": {"class": "TinyModel", "model_type": "tiny"},
        "layers": [
            {
                "module": name.format(i),
                "layer": i,
                "part": None,
                "mask": "causal",
                "n_heads": heads,
                "n_kv_heads": heads,
                "d_model": d_model,
                "d_head": 16,
            }
            for i in range(layers)
        ],
        "probe": {"sha256": "0" * 64, "sequences": 4, "tokens": 256},
    }


def lines(
    of: dict[str, Any],
    steps: int = 20,
    every: int = 10,
    rise: float = 0.1,
    seed: int = 0,
    conflict: bool = False,
) -> list[dict[str, Any]]:
    """One line per tracked step: a loss that falls from 5.5, symmetry that rises by `rise`, attention that sharpens."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(steps):
        done = 1 - math.exp(-3 * i / max(steps - 1, 1))
        rows = []
        for place, about in enumerate(of["layers"]):
            n, sd = about["n_heads"], 1.4 / about["d_model"]
            many = {
                "symmetry": rise * done * (1 + 0.3 * place) + 0.03 * rng.normal(size=n + 1),
                "directionality": -0.4 * done + 0.05 * rng.normal(size=n + 1),
                "norm": 2 + done + 0.1 * rng.random(n + 1),
                "normalised_entropy": 0.95 - 0.3 * done - 0.05 * rng.random(n + 1),
                "largest": 0.05 + 0.4 * done + 0.05 * rng.random(n + 1),
            }
            many["entropy"] = 4 * many["normalised_entropy"]
            row = {"module": about["module"], "layer": about["layer"]}
            row |= {name: float(values[0]) for name, values in many.items()}
            row |= {"null_sd": sd, "symmetry_z": (float(many["symmetry"][0]) - 1 / about["d_model"]) / sd}
            row["heads"] = {name: values[1:].tolist() for name, values in many.items()}
            row["heads"] |= {"null_sd": [sd] * n, "symmetry_z": ((many["symmetry"][1:] - 0.02) / sd).tolist()}
            null = -0.3 - 0.1 * rng.random(n)
            cosine = null - 0.2 * done + 0.02 * rng.normal(size=n)
            row["conflict"] = (
                {
                    "cosine": cosine.tolist(),
                    "null_mean": null.tolist(),
                    "null_sd": [0.03] * n,
                    "excess": (cosine - null).tolist(),
                    "share": [0.2] * n,
                }
                if conflict
                else None
            )
            rows.append(row)
        step = i * every
        out.append(
            {
                "step": step,
                "loss": None if i == 0 else 5.5 - 2.5 * done + 0.05 * float(rng.normal()),
                "held_out": 5.6 - 2.4 * done,
                "tokens": step * 4096,
                "rates": {"qk": 0.012 * (1 - i / steps), "rest": 0.003 * (1 - i / steps)},
                "layers": rows,
                "seconds": 0.2 * step,
                "tracker_seconds": 0.001 * step,
                "tokens_per_second": 20480.0 if i else None,
            }
        )
    return out


def write(folder: Path, *parts: dict[str, Any], torn: str = "") -> Path:
    """A run folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in parts)
    (folder / "record.jsonl").write_text(text + torn, encoding="utf-8")
    return folder


def run(folder: Path, *, steps: int = 20, rise: float = 0.1, conflict: bool = False, **options: Any) -> Path:
    """A finished run, resumed once, with an experiment of these options."""
    shape = {name: options.pop(name) for name in ("layers", "heads", "d_model", "name") if name in options}
    first = start(**shape, **options)
    found = lines(first, steps, rise=rise, seed=options.get("seed", 0), conflict=conflict)
    resume = {
        "event": "resume",
        "step": found[len(found) // 2]["step"],
        "exact": True,
        "reason": None,
        "environment": {},
    }
    end = {"event": "end", "step": found[-1]["step"], "reason": "finished"}
    return write(folder, first, *found[: len(found) // 2], resume, *found[len(found) // 2 :], end)
