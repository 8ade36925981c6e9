"""What benchmarks/attention.py judges, and that it compares before it times."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

SIZES = {"dtype": "float32", "n": 1024, "causal": True, "backward": True, "padded": False}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("attention")


def result(**changes: Any) -> dict[str, Any]:
    """One point of each part that keeps every promise, changed."""
    point = {**SIZES, "over_sdpa": {"flash": 1.1}, "reference_over_flash": 3.0, "flash_over_flex": 0.9}
    point |= {name: changes.pop(name) for name in list(changes) if name in point}
    sizes = ((which, n) for which in ("sdpa", "flash") for n in (2048, 4096))
    memory = [{"which": w, "n": n, "causal": True, "bytes_per_token": 1.0} for w, n in sizes]
    memory[3]["bytes_per_token"] = changes.get("bytes", 1.0)
    step = {
        "model": "BERT",
        "padded": changes.get("side"),
        "promised": None if changes.get("side") else 1.06,
        "decoupled_over_standard": changes.get("step", 1.0),
    }
    return copy.deepcopy({"kernels": {"points": [point]}, "memory": memory, "step": [step]})


SLOW = {"over_sdpa": {"flash": 1.3}}
LONG = {"n": 4096, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("device", "changes", "missed"),
    [
        ("cpu", {}, []),
        ("cpu", SLOW, ["causal, N = 1024: 1.30 times SDPA"]),
        ("cpu", {**SLOW, "n": 256}, []),
        ("cpu", {**SLOW, "n": 128}, []),
        ("cpu", {**SLOW, "backward": False}, []),
        ("cpu", {**SLOW, "padded": True}, []),
        ("cpu", {**SLOW, "dtype": "bfloat16"}, []),
        ("cpu", {"reference_over_flash": 2.0}, ["2.00 times faster"]),
        ("cpu", {"bytes": 1.3}, ["grows by 1.30"]),
        ("cpu", {"bytes": 2.1}, ["grows by 2.10", "2.10 times SDPA"]),
        ("cpu", {"step": 1.1}, ["a step of BERT: 1.100"]),
        ("cpu", {"step": 1.1, "side": "right"}, []),
        ("cuda", {**LONG}, []),
        ("cuda", {**LONG, **SLOW}, ["1.30 times SDPA"]),
        ("cuda", {**LONG, "flash_over_flex": 1.05}, ["1.05 times FlexAttention"]),
        ("cuda", {**SLOW, "step": 1.1}, []),
    ],
)
def test_a_promise_that_was_not_kept_is_named(
    script: Any, device: str, changes: dict[str, Any], missed: list[str]
) -> None:
    found = script.broken_promises(result(**changes), device)
    assert len(found) == len(missed)
    assert all(part in text for part, text in zip(missed, found, strict=True))


def test_quick_runs_and_other_numbers_of_threads_are_not_judged(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert script.why_not_judged(False, "cpu") is None
    assert "--quick" in script.why_not_judged(True, "cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert "3" in script.why_not_judged(False, "cpu")
    assert script.why_not_judged(False, "cuda") is None


@pytest.mark.parametrize("causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_one_point_compares_and_is_reported(
    script: Any, causal: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.SIZES, 24, (2, 1))
    point = script.measure_point("cpu", 0.0, torch.float32, 24, causal, True, padded)
    assert max(point["largest_differences"].values()) < 1e-5
    point["share_of_peak"] = dict.fromkeys(point["milliseconds"], 0.5)
    kernels = {"points": [point], "gflops_of_a_large_product": {"float32": 1.0}}
    text = "\n".join(script.report_kernels(kernels, "cpu"))
    assert ("padded on the left" in text) == (padded and causal)
    assert ("padded on the right" in text) == (padded and not causal)


@pytest.mark.parametrize("wrong", [0, 3], ids=["output", "self_score"])
def test_implementations_that_differ_end_the_run(script: Any, wrong: int) -> None:
    inputs = script.arguments(24, torch.float32, "cpu", 1, 2)
    found = script.implementations(True, "cpu", 24)
    flash = found["flash"]
    if wrong == 0:
        found["flash"] = lambda *x: flash(*x) * 1.01
    else:
        found["flash"] = lambda q, k, v, own: flash(q, k, v, 0.9 * own + 0.1 * own.detach())
    with pytest.raises(
        SystemExit, match=("output" if wrong == 0 else "gradient of self_score") + " of flash"
    ):
        script.check(found, inputs, "here")


def test_a_part_that_a_run_leaves_out_stays_as_this_machine_recorded_it(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "report", lambda result: f"{sorted(result)}")
    here, there = ({"cpu": name, "device_type": "cpu"} for name in ("this", "that"))
    script.save({"machine": here, "not_judged": None, "memory": [1], "step": [1]}, tmp_path)
    script.save({"machine": here, "not_judged": None, "step": [2]}, tmp_path)
    kept = json.loads((tmp_path / "attention.json").read_text())
    assert (kept["memory"], kept["step"]) == ([1], [2])
    assert "memory" in (tmp_path / "attention.txt").read_text()
    script.save({"machine": there, "not_judged": None, "step": [3]}, tmp_path)
    assert "memory" not in json.loads((tmp_path / "attention.json").read_text())
