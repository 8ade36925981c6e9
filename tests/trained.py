"""What the tests of training share: a small text, small experiments, and what two runs have to have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from qkform.training import Experiment

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
EVERYTHING = {
    "attention": "decoupled",
    "self_score_init": "spread",
    "init": "skew",
    "qk_lr_ratio": 4,
    "optimizer": "adamw",
    "conflict": True,
}
CLOCKS = ("seconds", "per_second")


def write_text(path: Path, words: int = 6000, seed: int = 0) -> Path:
    """A text with something to learn: words of a small language, each of which likes to follow some others."""
    rng = np.random.default_rng(seed)
    vocabulary = ["".join(rng.choice(list("aeioklmnrst"), rng.integers(2, 7))) for _ in range(90)]
    follows = rng.integers(0, 90, (90, 4))
    word, said = 0, []
    for i in range(words):
        word = int(follows[word, rng.integers(4)])
        said.append(vocabulary[word] + (".\n\n" if i % 60 == 59 else ""))
    paragraphs = [part for part in " ".join(said).split("\n\n") if part.strip()]
    path.mkdir(parents=True, exist_ok=True)
    for i in range(0, len(paragraphs), 10):
        (path / f"{i:03}.txt").write_text("\n".join(paragraphs[i : i + 10]))
    return path


def small(text: Path, **over: Any) -> Experiment:
    """Two layers of width 32, eight sequences of 24 tokens, an update in milliseconds."""
    options: dict[str, Any] = {
        "data": (str(text),),
        "config": {**({} if "model" in over else SMALL), **over.pop("config", {})},
        "vocabulary": 300,
        "seq_len": 24,
        "batch_size": 8,
        "held_out": 8,
        "warmup_steps": 2,
        "steps": 8,
        "track_every": 2,
        "save_every": 3,
    }
    return Experiment(**{**options, **over})


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(folder / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    """Bit for bit."""
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def farthest(one: Path, other: Path) -> float:
    """The largest difference of any weight."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The tracked steps of a record, without what a clock decides."""
    read = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not any(clock in name for clock in CLOCKS)}
        for line in read
        if "event" not in line
    ]


def events(folder: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [line for line in read if "event" in line]


def command(
    *arguments: str, processes: int = 1, threads: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`qkform` with these arguments, in one process or in several as torchrun starts them."""
    start = [sys.executable, "-W", "error::UserWarning"]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    return subprocess.run(
        [*start, "-m", "qkform", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), **environment},
    )


def flags(experiment: Experiment, folder: Path) -> list[str]:
    """The experiment in a file, and the rest of the command that trains it in the folder."""
    file = folder.with_suffix(".yaml")
    file.write_text(experiment.to_yaml())
    return ["train", str(file), "--out", str(folder)]
