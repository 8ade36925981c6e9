"""One run of a sweep in its folder: what state it is in, and how it is brought to its end in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qkform import disk
from qkform.errors import ExperimentError, RecordError, TrainingError
from qkform.records import write_whole
from qkform.runs import NAME, RunRecord, last_step
from qkform.training.experiment import Experiment
from qkform.training.folder import EXPERIMENT, MODEL
from qkform.training.gathering import BROKE, FINISHED
from qkform.training.grid import Planned

GRACE_SECONDS = 120  # that a run has to save a checkpoint when it is asked to stop
TOLD_SECONDS = 60.0  # from one word on how far a run is to the next
_LOOK_SECONDS = 0.1
_LAST_LINES, _LAST_BYTES = 5, 4096
State = Literal["new", "begun", "finished"]  # of a listing also "running"
Say = Callable[[str], None]
Stop = Callable[[], int]  # 0: go on; 1: end with a checkpoint; 2: end at once


@dataclass(frozen=True)
class Job:
    """A run, and its places: OUT/ARM/seed-N the run folder, and beside it seed-N.yaml, seed-N.log and seed-N.lock."""

    name: str
    arm: str
    seed: int
    folder: Path
    yaml: str  # its experiment, all fields

    @classmethod
    def of(cls, planned: Planned, out: Path) -> Job:
        folder = out.absolute() / planned.name
        return cls(planned.name, planned.arm, planned.seed, folder, planned.experiment.to_yaml())

    @property
    def file(self) -> Path:
        return self._beside(".yaml")

    @property
    def log(self) -> Path:
        return self._beside(".log")

    @property
    def lock(self) -> Path:
        return self._beside(".lock")

    def _beside(self, suffix: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}{suffix}")


@dataclass(frozen=True)
class Outcome:
    """How a run of a sweep ended, or where it stands.

    state     "finished", "failed" or "interrupted"; of a listing "new", "running", "begun" or "finished"
    attempts  processes that were started for it; 0 for one that was finished before
    step, held_out   of the last line of its record
    message   what failed, with the last lines of its log
    """

    name: str
    arm: str
    seed: int
    folder: str
    state: str
    attempts: int = 0
    step: int | None = None
    held_out: float | None = None
    seconds: float | None = None
    message: str | None = None


def state(job: Job) -> State:
    """Whether the run has ended well, has begun, or is not there.

    ExperimentError where the folder holds another experiment: it names the fields that differ.
    """
    if not (job.folder / EXPERIMENT).exists():
        return "new"
    _refuse_odd(job.folder / EXPERIMENT)
    there, asked = Experiment.load(job.folder / EXPERIMENT), _experiment(job)
    if names := there.differences(asked):
        a, b = there.to_dict(), asked.to_dict()
        said = "; ".join(f"{name}: {a[name]!r} there, {b[name]!r} in the grid" for name in names[:3])
        raise ExperimentError(
            f"{job.folder} holds another experiment: {said}{' ...' if names[3:] else ''}; put the grid back, or sweep "
            "into another folder with --out"
        )
    return "finished" if ending(job) in FINISHED and (job.folder / MODEL).is_dir() else "begun"


def ending(job: Job) -> str | None:
    """The reason with which the record ends; None where it goes on, or is not there."""
    record = _record(job)
    return None if record is None or record.end is None else str(record.end.get("reason"))


def is_running(job: Job) -> bool:
    """Whether a process that a sweep started for this run lives."""
    _refuse_odd(job.lock)
    try:
        with job.lock.open("rb") as file:
            return disk.locked(file.fileno()) is False
    except OSError:
        return False


def outcome(job: Job, state: str, **more: Any) -> Outcome:
    """An outcome with what the record says last."""
    record = _record(job)
    last = record.steps[-1] if record is not None and record.steps else {}
    return Outcome(
        job.name,
        job.arm,
        job.seed,
        str(job.folder),
        state,
        step=last.get("step"),
        held_out=last.get("held_out"),
        seconds=last.get("seconds"),
        **more,
    )


def execute(
    job: Job,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    retries: int = 1,
    stop: Stop = lambda: 0,
    say: Say = lambda _: None,
) -> Outcome:
    """Bring a run to its end: `command` EXPERIMENT.yaml --out FOLDER [--resume], again where it fails.

    A run that is finished is left as it is. One that another process still trains, left over by a sweep that was
    killed, is waited for. When `stop` says so, or an exception comes, the process is asked to end by SIGTERM, and made
    to after `GRACE_SECONDS`, or at once where `stop` says that.
    """
    try:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{job.folder.parent}: cannot be written to: {error.strerror or error}") from None
    with _held(job, stop, say) as handle:
        if handle is None:
            return outcome(job, "interrupted", message="another process was still training it")
        attempts, message = 0, ""
        while True:
            if state(job) == "finished":
                return outcome(job, "finished", attempts=attempts)
            if attempts > retries or (attempts and ending(job) == BROKE):
                return outcome(job, "failed", attempts=attempts, message=message)
            if stop():
                return outcome(job, "interrupted", attempts=attempts, message=message or None)
            attempts += 1
            say(f"{job.name}: {_doing(job)}" + (f", attempt {attempts}" if attempts > 1 else ""))
            code, stopped = _run(job, command, environment, handle, stop, say)
            message = f"it ended with {_code_words(code)}{_lacking(job, code)}{_last_lines(job.log)}"
            if state(job) != "finished" and not stopped:
                say(f"{job.name}: {message.splitlines()[0]}; its log is {job.log}")


def _doing(job: Job) -> str:
    if state(job) == "new":
        return "begins"
    record = _record(job)
    return f"goes on, tracked to step {record.steps[-1]['step']}" if record and record.steps else "goes on"


def _run(
    job: Job, command: Sequence[str], environment: Mapping[str, str], handle: int, stop: Stop, say: Say
) -> tuple[int, bool]:
    """Exit code of one process, and whether it was asked to stop."""
    text = job.yaml
    write_whole(job.file, lambda to: to.write_text(text, encoding="utf-8"))
    arguments = [*command, str(job.file), "--out", str(job.folder)]
    if state(job) != "new":
        arguments.append("--resume")
    with os.fdopen(_opened(job.log, os.O_WRONLY | os.O_APPEND), "ab") as log:
        log.write(f"--- {' '.join(arguments)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=(handle,) if handle >= 0 else (),  # it holds the lock as long as the process lives
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
        )
    try:
        told, words = time.monotonic(), _how_far(job)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_SECONDS), False
            if stop():
                return _ended(process, stop), True
            if time.monotonic() - told >= TOLD_SECONDS:
                told, before, words = time.monotonic(), words, _how_far(job)
                if words != before:
                    say(f"{job.name}: {words}")
    except BaseException:
        _ended(process, stop)
        raise


def _how_far(job: Job) -> str:
    """ "step 300 of 1,000, held-out loss 4.210", as the record has it; empty where it has no step."""
    last = last_step(job.folder / NAME)
    if last is None:
        return ""
    held_out = last.get("held_out")
    loss = f", held-out loss {held_out:.3f}" if isinstance(held_out, float) else ""
    return f"step {last['step']:,} of {_experiment(job).steps:,}{loss}"


def _ended(process: subprocess.Popen[bytes], stop: Stop) -> int:
    """Exit code of a process that is asked to end, and made to after a while."""
    _signalled(
        process, signal.SIGTERM
    )  # and not SIGINT, which what runs in the background, or under Ray, ignores
    last = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < last and stop() < 2:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECONDS)
    _signalled(process, signal.SIGKILL)
    return process.wait()


def _signalled(process: subprocess.Popen[bytes], number: int) -> None:
    """A signal to a process and those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextmanager
def _held(job: Job, stop: Stop, say: Say) -> Iterator[int | None]:
    """The lock of a run as an open file; None: another process had it until `stop`; -1: there are no locks here."""
    handle = _opened(job.lock, os.O_RDWR)
    try:
        told = False
        while (ours := disk.locked(handle)) is False:
            if stop():
                yield None
                return
            if not told:
                say(f"{job.name}: a process that an earlier sweep left is training it; waiting for that")
            told = True
            time.sleep(_LOOK_SECONDS)
        yield handle if ours else -1  # on Windows `qkform train` has a lock of its own
    finally:
        os.close(handle)


def _opened(file: Path, flags: int) -> int:
    """A file of the sweep, made if need be; TrainingError where that cannot be, or something else has its name."""
    _refuse_odd(file)
    try:
        return os.open(file, flags | os.O_CREAT, 0o644)
    except OSError as error:
        raise TrainingError(f"{file}: cannot be written to: {error.strerror or error}") from None


def _refuse_odd(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise TrainingError(
            f"{file}: a folder, pipe or device has the name of a file of the sweep; remove it"
        )


def _experiment(job: Job) -> Experiment:
    from qkform.training.strict_yaml import loaded

    return Experiment.from_dict(loaded(job.yaml, str(job.file)))


def _record(job: Job) -> RunRecord | None:
    if not (job.folder / NAME).exists():
        return None
    try:
        return RunRecord.load(job.folder)
    except RecordError:
        return None


def _lacking(job: Job, code: int) -> str:
    """What a run that says it ended well has not left; empty for one that says it failed."""
    if code:
        return ""
    if (said := ending(job)) not in FINISHED:
        return f", and {job.folder / NAME} " + (f"ends with {said!r}" if said else "has no end")
    return "" if (job.folder / MODEL).is_dir() else f", and there is no {job.folder / MODEL}"


def _code_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _last_lines(log: Path) -> str:
    """The last lines of a log, each on a line of its own, after a line break; empty where there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()
    except OSError:
        return ""
    start = max((i + 1 for i, line in enumerate(lines) if line.startswith("--- ")), default=0)
    kept = [line for line in lines[start:] if line.strip()][-_LAST_LINES:]
    return "".join(f"\n  {line[:300]}" for line in kept)
