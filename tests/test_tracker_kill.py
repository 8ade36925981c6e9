"""A run that is killed with SIGKILL at any instant of writing its record: readable, and resumed without loss."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
from torch import nn

from qkform.dynamics import Tracker
from qkform.errors import RecordError
from qkform.runs import RunRecord
from tests.test_tracker import without_clock

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # of a process with threads, from 3.12
]
STEPS, EVERY, SAVE = 7, 2, 3


def batch(step):
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(step))


def has_steps(folder):
    try:
        return bool(RunRecord.load(folder).steps)
    except RecordError:
        return False


def run(folder):
    """A plain loop that saves every third step, and goes on from its last checkpoint."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    kept, first, resume = folder / "kept.pt", 1, None
    if kept.exists():
        saved = torch.load(kept)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first, resume = saved["step"] + 1, saved["step"]
    elif has_steps(folder):
        resume = 0
    probe = {"src": batch(99)}
    with Tracker(model, every=EVERY, path=folder / "record.jsonl", probe=probe, resume=resume) as tracker:
        if first > 1:
            tracker.load_state_dict(saved["tracker"])
        elif resume is None:
            tracker.step(0, optimizer=optimizer)
        for step in range(first, STEPS + 1):
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.step(step, loss=loss, optimizer=optimizer, tokens=15, last=step == STEPS)
            if step % SAVE == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                state |= {"random": torch.get_rng_state(), "tracker": tracker.state_dict()}
                torch.save(state, folder / "aside.pt")
                os.replace(folder / "aside.pt", kept)


def dying(name, count, half):
    """A function of os that kills the process at its `count`-th call: before it, after it, or halfway."""
    real, seen = getattr(os, name), [0]

    def call(*args, **kwargs):
        seen[0] += 1
        if seen[0] == count and half is not None:
            if name == "write" and half:
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **kwargs)
        if seen[0] == count and half is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(os, name, call)


def in_a_child(folder, name, count, half):
    """Whether the run was killed there; it is over otherwise."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dying(name, count, half)
            run(folder)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.waitstatus_to_exitcode(status) != 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder)
    return RunRecord.load(folder)


@pytest.mark.parametrize(
    ("name", "half", "counts"),
    [  # a new run writes its first line, five steps and the end; a resumed one its cut record first
        pytest.param("write", False, (1, 2, 5, 1, 3, 2, 99), marks=pytest.mark.slow),
        ("write", True, (1, 2, 5, 1, 3, 2, 99)),
        pytest.param("write", None, (1, 2, 5, 1, 3, 2, 99), marks=pytest.mark.slow),
        pytest.param("fsync", None, (1, 3, 6, 2, 1, 99), marks=pytest.mark.slow),
        pytest.param("replace", False, (1, 1, 2, 99), marks=pytest.mark.slow),
        ("replace", None, (1, 2, 1, 2, 99)),
    ],
)
def test_killed_again_and_again_it_has_the_record_of_an_unbroken_run(name, half, counts, tmp_path, unbroken):
    deaths = 0
    for count in counts:
        killed = in_a_child(tmp_path, name, count, half)
        deaths += killed
        try:
            record = RunRecord.load(tmp_path)
        except RecordError as error:
            unread = str(error)
            assert "no complete line" in unread or "cannot read" in unread
        else:
            steps = without_clock(record.steps)
            assert steps == without_clock(unbroken.steps)[: len(steps)]
        if not killed:
            break
    record = RunRecord.load(tmp_path)
    assert deaths == len(counts) - 1
    assert without_clock(record.steps) == without_clock(unbroken.steps)
    assert record.end["reason"] == "finished"
    assert all(event["exact"] for event in record.events if event["event"] == "resume")
