"""A sweep: what a grid comes to, that finished runs rest, failed ones are tried again, and a killed sweep goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qkform.cli import main
from qkform.errors import ExperimentError, TrainingError
from qkform.training import sweeping as sweeps
from qkform.training.comparing import compare
from qkform.training.grid import Grid
from qkform.training.sweeping import listing, sweep

ROOT = Path(__file__).parent.parent
STUB = (sys.executable, "-S", str(ROOT / "tests" / "stub_train.py"))
BASE = {"preset": "tiny", "steps": 4}
ARMS = {"standard": {}, "matched": {"init": "matched"}}
pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="the stand-in for training locks as POSIX does"
)


class Desk:
    """A folder to sweep into, and what the stand-in for training noted there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.log = folder / "runs", folder / "log"
        self.log.touch()
        self.environment = {**os.environ, "STUB_LOG": str(self.log)}
        monkeypatch.setenv("STUB_LOG", str(self.log))
        self.said: list[str] = []

    def sweep(self, seeds: Any = (0, 1), arms: Any = ARMS, base: Any = BASE, **more: Any) -> list[Any]:
        environment = {**self.environment, **more.pop("environment", {})}
        grid = Grid.from_dict({"base": base, "arms": arms, "seeds": list(seeds)})
        return sweep(grid, self.out, command=STUB, environment=environment, say=self.said.append, **more)

    def noted(self, what: str = "begin") -> list[dict[str, Any]]:
        return [one for one in map(json.loads, self.log.read_text().splitlines()) if one["what"] == what]

    def started(self, **environment: str) -> subprocess.Popen[bytes]:
        """The same sweep in a process of its own, two at a time."""
        code = (
            "import sys, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from qkform.training.grid import Grid; from qkform.training.sweeping import sweep\n"
            f"grid = Grid.from_dict({ {'base': BASE, 'arms': ARMS, 'seeds': [0, 1]}!r})\n"
            f"sweep(grid, {str(self.out)!r}, command={STUB!r}, workers=2)\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code], env={**self.environment, **environment}, stderr=subprocess.DEVNULL
        )


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path, monkeypatch)


def soon(true: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


def overlaps(desk: Desk) -> int:
    """The most processes that were there at one moment."""
    moments = sorted(
        (one["at"], 1 if one["what"] == "begin" else -1) for w in ("begin", "end") for one in desk.noted(w)
    )
    here = most = 0
    for _, change in moments:
        here += change
        most = max(most, here)
    return most


def test_every_arm_is_trained_with_every_seed_and_once(desk):
    first = desk.sweep()
    assert [one.name for one in first] == [
        "standard/seed-0",
        "matched/seed-0",
        "standard/seed-1",
        "matched/seed-1",
    ]
    assert {(one.state, one.attempts, one.step) for one in first} == {("finished", 1, 4)}
    assert sorted(one["name"] for one in desk.noted()) == sorted(one.name for one in first)
    again = desk.sweep()
    assert {(one.state, one.attempts) for one in again} == {("finished", 0)}
    assert len(desk.noted()) == 4
    assert desk.said[-1] == "matched/seed-1: finished before at step 4, held-out loss 4.190"
    desk.sweep(seeds=(0, 1, 2))  # a seed more: its runs alone
    assert len(desk.noted()) == 6
    table = compare([desk.out])
    assert [(pair["arm"], pair["baseline"], pair["seeds"]) for pair in table.pairs] == [
        ("matched", "standard", [0, 1, 2])
    ]


def test_workers_and_threads_are_what_was_asked_for(desk):
    desk.sweep(workers=2, threads=3, devices=["4", "7"], environment={"STUB_PAUSE": "0.1"})
    assert overlaps(desk) == 2
    assert {one["threads"] for one in desk.noted()} == {"3"}
    assert {one["device"] for one in desk.noted()} == {"4", "7"}
    share = sweeps.surroundings({"A": "b"}, 2, None)
    assert share == {"A": "b", "OMP_NUM_THREADS": "2"}
    assert sweeps.cores() >= 1


@pytest.mark.parametrize("name", ["seed-0.log", "seed-0.lock", "seed-0/experiment.yaml"])
@pytest.mark.timeout(60)
def test_what_has_the_name_of_a_file_of_the_sweep_is_refused_and_not_waited_for(desk, name):
    file = desk.out / "standard" / name
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    with pytest.raises(TrainingError, match=re.escape(f"{file}: a folder, pipe or device")):
        desk.sweep(seeds=[0], arms={"standard": {}})
    file.unlink()
    file.mkdir()
    with pytest.raises(TrainingError, match=re.escape(str(file))):
        desk.sweep(seeds=[0], arms={"standard": {}})


def test_the_threads_that_a_person_has_set_are_those_of_the_runs(desk):
    desk.environment["OMP_NUM_THREADS"] = "7"
    desk.sweep(seeds=[0], arms={"standard": {}})
    assert [one["threads"] for one in desk.noted()] == ["7"]


def test_a_long_run_is_told_of_on_the_way(desk, monkeypatch):
    monkeypatch.setattr(sweeps.jobs, "TOLD_SECONDS", 0.05)
    desk.sweep(seeds=[0], arms={"standard": {}}, environment={"STUB_PAUSE": "0.3"})
    on_the_way = desk.said[1:-1]
    assert on_the_way == sorted(set(on_the_way)), "each step once, in order"
    assert re.fullmatch(r"standard/seed-0: step [1-4] of 4, held-out loss 4\.\d{3}", on_the_way[-1])


def test_a_run_that_fails_is_tried_again_from_where_it_was(desk):
    ended = {one.name: one for one in desk.sweep(environment={"STUB_FAIL": "matched/seed-0=1"})}
    assert (ended["matched/seed-0"].state, ended["matched/seed-0"].attempts) == ("finished", 2)
    tries = [one["resume"] for one in desk.noted() if one["name"] == "matched/seed-0"]
    assert tries == [False, True]
    record = (desk.out / "matched" / "seed-0" / "record.jsonl").read_text()
    assert [json.loads(line)["step"] for line in record.splitlines() if '"event"' not in line] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_run_that_goes_on_failing_is_reported_and_the_others_finish(desk):
    ended = {one.name: one for one in desk.sweep(environment={"STUB_FAIL": "matched/seed-0=9"}, retries=2)}
    failed = ended.pop("matched/seed-0")
    assert (failed.state, failed.attempts) == ("failed", 3)
    assert failed.message.startswith("it ended with exit code 1\n")
    assert "TrainingError: no space left on the moon" in failed.message
    assert {one.state for one in ended.values()} == {"finished"}
    later = {one.name: one for one in desk.sweep()}  # the fault was mended meanwhile
    assert (later["matched/seed-0"].state, later["matched/seed-0"].attempts) == ("finished", 1)


def test_a_loss_that_is_no_number_is_not_tried_again(desk):
    (one,) = desk.sweep(
        seeds=[0], arms={"standard": {}}, environment={"STUB_NAN": "standard/seed-0"}, retries=5
    )
    assert (one.state, one.attempts) == ("failed", 1)


def test_what_a_killed_sweep_left_is_waited_for_and_not_trained_twice(desk):
    process = desk.started(STUB_PAUSE="0.3")
    soon(lambda: len(desk.noted()) == 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    standing = listing(Grid.from_dict({"base": BASE, "arms": ARMS, "seeds": [0, 1]}), desk.out)
    assert [one.state for one in standing] == ["running", "running", "new", "new"]
    ended = {one.name: one for one in desk.sweep(workers=2)}
    assert {one.state for one in ended.values()} == {"finished"}
    assert [one.attempts for one in ended.values()] == [0, 0, 1, 1]  # the first two ended by themselves
    assert any("a process that an earlier sweep left is training it" in line for line in desk.said)
    assert len(desk.noted()) == 4
    assert {one["code"] for one in desk.noted("end")} == {0}
    for one in ended.values():
        record = (Path(one.folder) / "record.jsonl").read_text()
        assert [json.loads(line)["step"] for line in record.splitlines() if '"event"' not in line] == [
            0,
            1,
            2,
            3,
            4,
        ]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_the_runs_and_the_next_sweep_goes_on(desk, number):
    process = desk.started(STUB_PAUSE="0.3")
    soon(lambda: len(desk.noted()) == 2)
    process.send_signal(number)
    assert process.wait() != 0
    assert [one["code"] for one in desk.noted("end")] == [130, 130]
    ended = desk.sweep(workers=2)
    assert {one.state for one in ended} == {"finished"}
    assert sorted(one["resume"] for one in desk.noted()[2:]) == [False, False, True, True]


def test_a_second_interrupt_ends_runs_that_do_not_listen(desk):
    process = desk.started(STUB_PAUSE="0.3", STUB_DEAF="1")
    soon(lambda: len(desk.noted()) == 2)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert desk.noted("end") == []


def test_two_sweeps_of_one_folder_are_refused(desk):
    with sweeps.held(desk.out), pytest.raises(TrainingError, match="another sweep works in this folder"):
        desk.sweep()


def test_another_experiment_in_a_folder_is_refused_before_anything_starts(desk):
    desk.sweep(seeds=[0])
    with pytest.raises(
        ExperimentError, match=r"matched/seed-0 holds another experiment: init: 'matched' there, 'skew'"
    ):
        desk.sweep(seeds=[5, 0], arms={"standard": {}, "matched": {"init": "skew"}})
    assert len(desk.noted()) == 2
    desk.sweep(seeds=[0], base={**BASE, "save_every": 3})  # how often it is saved is no other experiment
    assert len(desk.noted()) == 2


def test_axes_are_every_combination():
    grid = Grid.from_dict(
        {"axes": {"attention": ["standard", "decoupled"], "qk_lr_ratio": [1, 0.25]}, "seeds": 3}
    )
    assert [run.name for run in grid.runs()] == [
        "attention=standard,qk_lr_ratio=1/seed-3",
        "attention=standard,qk_lr_ratio=0.25/seed-3",
        "attention=decoupled,qk_lr_ratio=1/seed-3",
        "attention=decoupled,qk_lr_ratio=0.25/seed-3",
    ]
    last = grid.runs()[-1].experiment
    assert (last.attention, last.qk_lr_ratio, last.seed) == ("decoupled", 0.25, 3)


def test_what_an_arm_says_of_the_config_goes_over_the_base():
    base = {"config": {"hidden_size": 64, "num_hidden_layers": 2}}
    grid = Grid.from_dict(
        {"base": base, "arms": {"deep": {"config": {"num_hidden_layers": 3}}}, "seeds": [0]}
    )
    assert dict(grid.runs()[0].experiment.config) == {"hidden_size": 64, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arms": ARMS, "axes": {"init": ["skew"]}, "seeds": [0]}, "either arms, .* or axes"),
        ({"seeds": [0]}, "either arms, .* or axes"),
        ({"arms": ARMS}, "seeds: expected a list of whole numbers"),
        ({"arms": ARMS, "seeds": [0, 0]}, "one is there twice"),
        ({"arms": ARMS, "seeds": [-1]}, "whole numbers from 0"),
        ({"arms": {}, "seeds": [0]}, "arms: expected names"),
        ({"arms": {"../up": {}}, "seeds": [0]}, "is the name of a folder too"),
        ({"arms": {"a": ["init"]}, "seeds": [0]}, "arms: a: .* expected options"),
        ({"arms": {"a": {"seed": 3}}, "seeds": [0]}, "arms: a: seed: the seeds of a grid"),
        ({"arms": {"a": {"inti": "skew"}}, "seeds": [0]}, "arm a: inti: .* did you mean init?"),
        ({"arm": ARMS, "seeds": [0]}, "arm: a grid has no such part; did you mean arms?"),
        ({"steps": 3, "arms": ARMS, "seeds": [0]}, "options of all runs go under base"),
        ({"axes": {"init": "skew"}, "seeds": [0]}, "axes: init: .* expected a list"),
        ({"axes": {"data": [["a b"], ["a-b"]]}, "seeds": [0]}, "two combinations are called"),
    ],
)
def test_a_grid_that_cannot_be_is_told_by_name(values, message, tmp_path):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(ExperimentError, match=message):
        Grid.load(tmp_path / "grid.yaml").runs()


def test_a_listing_starts_nothing(desk, tmp_path, capsys):
    desk.sweep(seeds=[0])
    (desk.out / "matched" / "seed-0" / "model").rmdir()
    (tmp_path / "grid.yaml").write_text(
        yaml.safe_dump({"base": BASE, "arms": ARMS, "seeds": [0, 1]}, sort_keys=False)
    )
    assert (
        main(["sweep", str(tmp_path / "grid.yaml"), "--out", str(desk.out), "--list", "--format", "json"])
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "qkform.sweep/1"
    assert [(one["name"], one["state"], one["step"]) for one in document["runs"]] == [
        ("standard/seed-0", "finished", 4),
        ("matched/seed-0", "begun", 4),
        ("standard/seed-1", "new", None),
        ("matched/seed-1", "new", None),
    ]
    assert len(desk.noted()) == 2
    assert main(["sweep", str(tmp_path / "grid.yaml"), "--out", str(desk.out), "--list"]) == 0
    assert "standard/seed-1   new" in capsys.readouterr().out
    assert not (desk.out / "standard" / "seed-1").exists()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert listing(Grid.load(tmp_path / "grid.yaml"), tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_command_trains_and_tells(desk, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweeps, "COMMAND", STUB)
    monkeypatch.setenv("STUB_FAIL", "matched/seed-0=9")
    (tmp_path / "grid.yaml").write_text(
        yaml.safe_dump({"base": BASE, "arms": ARMS, "seeds": [0]}, sort_keys=False)
    )
    assert main(["sweep", str(tmp_path / "grid.yaml"), "--out", str(desk.out), "--workers", "2"]) == 2
    shown = capsys.readouterr()
    assert "error: matched/seed-0 failed: it ended with exit code 1" in shown.err
    assert "matched/seed-0    failed" in shown.out
    assert "standard/seed-0   finished      4" in shown.out
    assert main(["sweep", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    ["--workers=0", "--threads=0", "--threads=-2", "--retries=-1", "--gpus=nan", "--gpus=-1", "--gpus=inf"],
)
@pytest.mark.parametrize("how", [["--list"], []])
def test_a_number_that_cannot_be_is_refused_by_name(desk, tmp_path, capsys, option, how):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({"base": BASE, "arms": ARMS, "seeds": [0]}))
    assert main(["sweep", str(tmp_path / "grid.yaml"), "--out", str(desk.out), option, *how]) == 2
    name, value = option.split("=")
    shown = str(float(value)) if name == "--gpus" else value
    assert f"{name} {shown}: expected" in capsys.readouterr().err
    assert not desk.out.exists()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"arms": {"a": {}, "b": {}}}, "arms a and b are one experiment"),
        (
            {"arms": {"a": {}, "b": {"seq_len": 128}, "A": {"lr": 0.1}}},
            "a and A are one folder on some disks",
        ),
        ({"arms": {"a" * 201: {}}}, "at most 200 letters"),
        ({"axes": {f"option{i:03}": [0.25] for i in range(20)}}, "too long for a folder"),
    ],
)
def test_arms_are_told_apart_and_have_folders(parts, message):
    with pytest.raises(ExperimentError, match=message):
        Grid.from_dict({"base": BASE, "seeds": [0], **parts}).runs()


def test_a_run_that_ends_well_without_an_end_says_so(desk):
    quick = (sys.executable, "-S", "-c", "pass")
    grid = Grid.from_dict({"base": BASE, "arms": {"standard": {}}, "seeds": [0]})
    (one,) = sweep(grid, desk.out, command=quick, retries=0)
    assert one.state == "failed"
    assert (
        one.message
        == f"it ended with exit code 0, and {desk.out.absolute()}/standard/seed-0/record.jsonl has no end"
    )


def test_a_place_that_is_no_folder_is_an_error_that_names_it(desk):
    desk.out.mkdir()
    (desk.out / "standard").write_text("mine")
    with pytest.raises(TrainingError, match="standard: cannot be written to"):
        desk.sweep(seeds=[0])
    assert (desk.out / "standard").read_text() == "mine"


@pytest.mark.slow
def test_a_grid_is_really_trained_and_compared(tmp_path, capsys):
    words = [f"word{i}" for i in range(20)]
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(words[i % 7 :] * 4) for i in range(300)))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = {
        "data": [str(tmp_path / "text.txt")],
        "config": small,
        "vocabulary": 300,
        "seq_len": 16,
        "batch_size": 4,
        "held_out": 8,
        "steps": 6,
        "track_every": 2,
        "save_every": 3,
    }
    grid = {"base": base, "arms": ARMS, "seeds": [0]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    out = str(tmp_path / "runs")
    assert main(["sweep", str(tmp_path / "grid.yaml"), "--out", out, "--threads", "1"]) == 0
    assert main(["sweep", str(tmp_path / "grid.yaml"), "--out", out, "--list", "--format", "json"]) == 0
    shown = capsys.readouterr().out
    states = [
        (one["name"], one["state"], one["step"])
        for one in json.loads(shown[shown.index('{"schema"') :])["runs"]
    ]
    assert sorted(states) == [("matched/seed-0", "finished", 6), ("standard/seed-0", "finished", 6)]
    table = compare([out])
    assert [(pair["arm"], pair["refused"]) for pair in table.pairs] == [("matched", None)]
    (start,) = [row for row in table.curves if (row["arm"], row["step"]) == ("matched", 0)]
    assert start["symmetry"] > 0.9
