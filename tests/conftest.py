"""Shared by all tests: tiny checkpoints written the way real ones are, and the count of skips at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

# One BLAS thread in xdist's workers and in the commands that tests start: two of each fight over two cores.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# No test waits for a network; those of the hub serve their own, and say so.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A loaded machine is slow, not wrong; and what CI runs must not depend on luck.
settings.register_profile("qkform", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("qkform")


def bert_tensors(
    rng: np.random.Generator, layers: int = 2, d: int = 12, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    tensors = {}
    for i in range(layers):
        for name in ("query", "key", "value"):
            path = f"encoder.layer.{i}.attention.self.{name}"
            tensors[f"{path}.weight"] = rng.normal(size=(d, d)).astype(dtype)
            tensors[f"{path}.bias"] = rng.normal(size=d).astype(dtype)
    return tensors


BERT_CONFIG = {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Write tensors and a config as a model folder; returns its path."""

    def write(tensors: dict[str, np.ndarray], config: Any = BERT_CONFIG, name: str = "my-model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (folder / "config.json").write_text(text)
        return folder

    return write


@pytest.fixture
def bert(write_model: Callable[..., Path]) -> Path:
    """A random two-layer BERT."""
    return write_model(bert_tensors(np.random.default_rng(0)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped, each with its reason above")
