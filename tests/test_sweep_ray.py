"""A sweep on Ray: the same runs in the same folders, also when a worker is killed in the middle of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qkform.errors import MissingExtra, TrainingError
from qkform.training.grid import Grid
from qkform.training.on_ray import ray_sweep
from tests.test_sweep import ARMS, BASE, STUB, Desk, soon

GRID = Grid.from_dict({"base": BASE, "arms": ARMS, "seeds": [0, 1]})


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Ray on this machine with two CPUs, its files in a folder of the test's with a short path."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80_000_000,
        _temp_dir=os.environ.get("RAY_TMPDIR") or str(tmp_path_factory.mktemp("r")),
    )
    yield psutil
    ray.shutdown()


def test_without_ray_the_extra_is_named(desk, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"qkform\[ray\]"):
        ray_sweep(GRID, desk.out)


@pytest.mark.slow
def test_no_cluster_is_a_message(desk):
    pytest.importorskip("ray", reason="ray is not installed")
    with pytest.raises(TrainingError, match=r"--ray 127\.0\.0\.1:1: no cluster there"):
        ray_sweep(GRID, desk.out, address="127.0.0.1:1")


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_run(desk, cluster):
    """The task's worker dies by SIGKILL while both workers train; its process lives on, and is waited for."""
    killed = []

    def watch(line: str) -> None:
        desk.said.append(line)

    import threading

    def kill() -> None:
        soon(lambda: len(desk.noted()) == 2)
        stub = cluster.Process(desk.noted()[0]["pid"])
        killed.append(stub.parent().pid)
        os.kill(stub.parent().pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    ended = ray_sweep(
        GRID,
        desk.out,
        workers=2,
        command=STUB,
        environment={**desk.environment, "STUB_PAUSE": "0.5"},
        say=watch,
    )
    thread.join()
    assert killed
    assert [(one.name, one.state, one.step) for one in ended] == [
        (f"{arm}/seed-{seed}", "finished", 4) for seed in (0, 1) for arm in ARMS
    ]
    begun = [one["name"] for one in desk.noted()]
    assert {one["code"] for one in desk.noted("end")} == {0}
    assert {one["threads"] for one in desk.noted()} == {"1"}
    for one in ended:
        lines = (Path(one.folder) / "record.jsonl").read_text().splitlines()
        assert sum('"held_out": ' in line and '"event"' not in line for line in lines) == 5
    # what is finished does not run again, here or there
    again = ray_sweep(GRID, desk.out, workers=2, command=STUB, environment=desk.environment)
    assert {(one.state, one.attempts) for one in again} == {("finished", 0)}
    assert [one["name"] for one in desk.noted()] == begun
    assert {one.state for one in desk.sweep()} == {"finished"}


@pytest.mark.slow
def test_a_run_that_fails_on_the_cluster_is_tried_again_and_reported(desk, cluster):
    ended = ray_sweep(
        GRID,
        desk.out,
        workers=2,
        command=STUB,
        environment={**desk.environment, "STUB_FAIL": "matched/seed-0=1,matched/seed-1=9"},
    )
    assert [(one.name, one.state, one.attempts) for one in ended] == [
        ("standard/seed-0", "finished", 1),
        ("matched/seed-0", "finished", 2),
        ("standard/seed-1", "finished", 1),
        ("matched/seed-1", "failed", 2),
    ]
    assert "no space left on the moon" in ended[-1].message


@pytest.mark.slow
def test_an_interrupt_ends_the_runs_on_the_cluster(desk, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # in the background it is ignored
        "from qkform.training import Grid, ray_sweep\n"
        f"grid = Grid.from_dict({ {'base': BASE, 'arms': ARMS, 'seeds': [0]}!r})\n"
        f"ray_sweep(grid, {str(desk.out)!r}, address='local', workers=2, threads=1, command={STUB!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**desk.environment, "STUB_PAUSE": "1"})
    soon(lambda: desk.noted())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    soon(lambda: len(desk.noted("end")) == len(desk.noted()), 10)
    assert {one["code"] for one in desk.noted("end")} == {130}
    assert {one.state for one in desk.sweep(seeds=[0])} == {"finished"}
