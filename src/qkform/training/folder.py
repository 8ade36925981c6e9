"""The folder of a run: whose it is, what it holds, and that one training at a time writes into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qkform import disk
from qkform.errors import ExperimentError, RecordError, TrainingError
from qkform.runs import RunRecord, RunWriter
from qkform.runs.experiments import NOT_COMPUTED
from qkform.training.checkpoints import Checkpoint, checkpoints, newest
from qkform.training.experiment import Experiment

EXPERIMENT = "experiment.yaml"
RECORD = "record.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
_LOCK = ".lock"
_ASIDE = f".{EXPERIMENT}"  # being written; a kill may leave it


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder, made if need be, while no other process trains in it; TrainingError where one does.

    The operating system lets go when the process ends, however it ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except FileExistsError:
        raise TrainingError(f"{folder} is a file; give a folder for the run") from None
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be written to: {error.strerror or error}") from None
    try:
        if not _locked(handle):
            raise TrainingError(
                f"{folder}: another training writes to this folder; give this one a folder of its own"
            )
        yield
    finally:
        os.close(handle)


def claim(folder: Path, experiment: Experiment, resume: bool) -> Checkpoint | None:
    """Whether this experiment may run in the folder: the checkpoint to go on from; None: from the beginning.

    TrainingError where it holds something and `resume` is not asked for, or holds no run to go on with;
    ExperimentError where the run there is another experiment, naming the fields.
    """
    there = sorted(path.name for path in folder.iterdir() if path.name not in (_LOCK, _ASIDE))
    if not resume:
        if EXPERIMENT in there:
            found, _ = checkpoints(folder / CHECKPOINTS)
            at = f", saved at step {found[-1].step}" if found else ""
            raise TrainingError(f"{folder} holds a run{at}; go on with --resume, or give another folder")
        if there:
            raise TrainingError(
                f"{folder} is not empty: it holds {there[0]}; give a folder that is new or empty"
            )
        return None
    if EXPERIMENT not in there:
        what = f"it holds {there[0]}" if there else "it is empty"
        raise TrainingError(
            f"{folder} holds no run to go on with ({what}): there is no {EXPERIMENT}; begin without --resume"
        )
    before = Experiment.load(folder / EXPERIMENT)
    if names := before.differences(experiment):
        old, new = before.to_dict(), experiment.to_dict()
        said = "; ".join(f"{name}: {old[name]!r} there, {new[name]!r} asked for" for name in names[:3])
        raise ExperimentError(
            f"{said}{' ...' if names[3:] else ''}: {folder} holds another experiment; go on with what it began with "
            f"(only {', '.join(sorted(NOT_COMPUTED))} may change), or begin in another folder"
        )
    if not _has_begun(folder):
        return None  # it was killed before its first checkpoint
    point = newest(folder / CHECKPOINTS)
    _refuse_short(folder / RECORD, point, experiment)
    return point


def _refuse_short(record: Path, point: Checkpoint, experiment: Experiment) -> None:
    """The record reaches as far as a checkpoint when that is written: one that does not has lost lines."""
    steps = RunRecord.load(record).steps
    last, wanted = steps[-1]["step"] if steps else -1, point.step - point.step % experiment.track_every
    if last < wanted:
        raise TrainingError(
            f"{record} ends {f'at step {last}' if steps else 'before step 0'} and the checkpoint is of step "
            f"{point.step}: lines up to step {wanted} are lost; put the record back, or begin in another folder"
        )


def begin(folder: Path, experiment: Experiment, point: Checkpoint | None) -> None:
    """Write the experiment into the folder, and clear away what is no part of the run that begins or goes on."""
    if point is None:
        (folder / RECORD).unlink(missing_ok=True)
    aside = folder / _ASIDE
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(experiment.to_yaml())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(folder / EXPERIMENT)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise TrainingError(f"{folder / EXPERIMENT}: cannot be written: {error.strerror or error}") from None


def end(folder: Path, point: Checkpoint) -> None:
    """Write into the record that the run ended at its last checkpoint, where a kill came between the two."""
    if RunRecord.load(folder / RECORD).end is None:
        writer, _ = RunWriter.resume(folder / RECORD, point.step)
        try:
            writer.event("end", step=point.step, reason=point.facts["reason"])
        finally:
            writer.close()


def _has_begun(folder: Path) -> bool:
    """Whether there is, or was, a checkpoint."""
    if any(checkpoints(folder / CHECKPOINTS)) or (folder / MODEL).exists():
        return True
    try:
        return any(step["step"] > 0 for step in RunRecord.load(folder / RECORD).steps)
    except RecordError:
        return False


def _locked(handle: int) -> bool:
    ours = disk.locked(handle)
    if ours is not None:
        return ours
    import msvcrt

    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True
