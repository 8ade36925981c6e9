"""Symmetric starts: each arm begins as it promises, in W and in the score, and leaves the rest of the model alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkform as qk
from qkform import sites
from tests import truth

transformers = pytest.importorskip("transformers")
PROMISES = {"matched": 1.0, "indefinite": 1.0, "skew": -1.0}
FOUR = (*PROMISES, "orthogonal")


def tiny(name: str, **settings: Any) -> Any:
    """A new model of a case of the truth test, initialised as its own class does, in float32."""
    case = next(c for c in truth.CASES if c.name == name)
    truth.quiet()
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**case.settings, **settings})
    return getattr(transformers, case.build)._from_config(config).eval()


@pytest.mark.parametrize("arm", PROMISES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gptj", "modernbert", "vit", "whisper", "qwen3"])
def test_the_scan_shows_what_an_arm_promises(name: str, arm: str) -> None:
    model = tiny(name)
    starts = qk.surgery.symmetrize_(model, arm=arm)
    rows = {row["module"]: row for row in qk.scan(model).layers if row["attention"] == "self"}
    assert [start.path for start in starts] == list(rows)
    for start in starts:
        assert start.promised == PROMISES[arm]
        assert start.symmetry == rows[start.path]["symmetry"] == pytest.approx(PROMISES[arm], abs=1e-6)
        assert start.norm == rows[start.path]["norm"]
