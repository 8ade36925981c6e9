"""Checkpoints of a run, `checkpoints/step-N/`: written aside, forced to disk, renamed; whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkform import disk
from qkform.errors import TrainingError

FACTS = "qkform.json"  # in every checkpoint: its step, its experiment, the environment, and the sizes of its files
_NAME = re.compile(r"step-([0-9]+)")
_KINDS = {"step": int, "data": str, "tracker": dict, "environment": dict, "files": dict}  # of the facts
_ASIDE = ".aside-"
_FULL = re.compile(r"No space left|os error 28|StorageFull|file write failed|unexpected pos")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole: its folder, its step, and the facts that were saved with it."""

    path: Path
    step: int
    facts: dict[str, Any]
    passed_over: tuple[str, ...] = ()  # what is wrong with others, where this is the one to go on from


def checkpoints(folder: Path, *, read: bool = False) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints in a folder, by ascending step, and what is wrong with others, in words.

    Sizes of files are looked at; with `read` their contents too, which takes as long as reading them.
    """
    found, damaged = [], []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match:
            try:
                found.append(Checkpoint(path, int(match[1]), _facts(path, int(match[1]), read)))
            except (OSError, ValueError, KeyError, TypeError) as error:
                damaged.append(f"{path}: {error}")
    return sorted(found, key=lambda one: one.step), sorted(damaged)


def newest(folder: Path) -> Checkpoint:
    """The checkpoint to go on from. TrainingError where there is none, with what is wrong with those that are there."""
    found, damaged = checkpoints(folder, read=True)
    if found:
        return replace(found[-1], passed_over=tuple(damaged))
    if damaged:
        raise TrainingError(f"no checkpoint in {folder} is whole: {'; '.join(damaged[:3])}")
    raise TrainingError(f"no checkpoint in {folder}: begin again in another folder, or delete this one")


@contextmanager
def written(folder: Path, name: str, facts: dict[str, Any] | None = None) -> Iterator[Path]:
    """A folder to write into, which becomes `folder/name` when everything in it is on disk.

    What stood there is replaced. After an error, or a kill, nothing of it is left under that name. A full disk is a
    TrainingError that says what is safe.
    """
    aside, target = folder / f"{_ASIDE}{name}", folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        if facts is not None:
            files = {
                str(p.relative_to(aside)): {"bytes": p.stat().st_size, "sha256": _sha256(p)}
                for p in sorted(aside.rglob("*"))
                if p.is_file()
            }
            text = json.dumps({**facts, "files": files}, indent=1)
            (aside / FACTS).write_text(text + "\n", encoding="utf-8")
        disk.take_place(aside, target)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if (code := _full(error)) is not None:
            raise TrainingError(
                f"{target}: {os.strerror(code)}; what was saved before is whole: make room and go on with --resume"
            ) from error
        if isinstance(error, OSError):
            raise TrainingError(
                f"{target}: cannot be written: {error.strerror or error}; what was saved before is whole"
            ) from error
        raise


def tidy(folder: Path, keep: int) -> None:
    """Delete what kills left behind, and all checkpoints but the newest `keep`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(_ASIDE):
            shutil.rmtree(path, ignore_errors=True)
    for one in checkpoints(folder)[0][:-keep]:
        gone = one.path.with_name(f"{_ASIDE}{one.path.name}")
        with suppress(OSError):  # renamed first: half a deletion is no damaged checkpoint
            one.path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _facts(path: Path, step: int, read: bool) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((path / FACTS).read_text(encoding="utf-8"))
    for name, kind in _KINDS.items():
        if not isinstance(facts, dict) or not isinstance(facts.get(name), kind):
            raise ValueError(f"{FACTS} has no {name}, or another kind of value")
    if facts["step"] != step:
        raise ValueError(f"{FACTS} is of step {facts['step']}")
    for name, said in facts["files"].items():
        had = said if isinstance(said, dict) else {"bytes": said}  # older ones have sizes alone
        there = (path / name).stat().st_size if (path / name).is_file() else None
        if there != had.get("bytes"):
            raise ValueError(
                f"{name} has {there} bytes and had {had.get('bytes')}"
                if there is not None
                else f"{name} is missing"
            )
        if read and "sha256" in had and _sha256(path / name) != had["sha256"]:
            raise ValueError(f"{name} has other contents than were written")
    return dict(facts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _full(error: BaseException | None) -> int | None:
    """The code of a full disk or a spent quota behind an error; safetensors and torch say it in their own words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error.errno
        if isinstance(error, Exception) and _FULL.search(str(error)):
            return errno.ENOSPC
        error = error.__cause__ or error.__context__
    return None
