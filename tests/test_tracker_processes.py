"""Several processes that train one model: one record, whole losses and tokens; sharded models are gathered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qkform.dynamics import Tracker
from qkform.runs import RunRecord
from tests import tracker_processes as alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes recorded, each way of training together after the other."""
    folder, world = tmp_path_factory.mktemp("together"), 2
    logs = [folder / f"{rank}.log" for rank in range(world)]
    running = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.tracker_processes", str(rank), str(world), str(folder)]
        with log.open("w") as file:
            root = Path(__file__).parent.parent
            running.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=root))
    try:
        codes = [each.wait(timeout=280) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert codes == [0] * world, "\n".join(log.read_text() for log in logs)
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_have_the_record_of_one(kind, folder, tmp_path):
    found = RunRecord.load(folder / f"{kind}.jsonl")
    net = alone.model()
    alone.train(net, Tracker(net, every=2, path=tmp_path / "alone.jsonl", probe={"src": alone.tokens(99)}))
    expected = RunRecord.load(tmp_path / "alone.jsonl")
    assert found.layers == expected.layers
    assert found.series("tokens") == expected.series("tokens") == ([0, 2, 3], [0, 40, 60])
    assert found.start["environment"]["world_size"] == 2
    assert found.end["reason"] == "finished"
    columns = ("loss", "symmetry", "symmetry_z", "directionality", "norm", "entropy", "largest")
    for row, other in zip(found.rows, expected.rows, strict=True):
        for name in columns:
            np.testing.assert_allclose(
                row[name] or 0.0, other[name] or 0.0, rtol=2e-4, atol=1e-5, err_msg=name
            )
    assert all(row["entropy"] > 0 for row in found.rows)
    assert found.series("loss")[1][1] is not None
    for rank in range(2):  # the second process knows too what went wrong in the first
        assert "holds a run already, up to step 3" in (folder / f"{kind}-{rank}.error").read_text()
