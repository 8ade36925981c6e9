"""Writing a record that a kill at any instant leaves readable: whole lines appended, files replaced by renaming."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkform import disk
from qkform.errors import RecordError
from qkform.runs.checks import check_event, check_start, check_step
from qkform.runs.fields import SCHEMA
from qkform.runs.lines import Line, dumped, finite, read_lines
from qkform.runs.record import RunRecord, from_lines

_BEGIN = b'{"event": "start"'


class RunWriter:
    """The one writer of a record; it holds the file locked until `close`.

    `RunWriter.new(path)` begins a record, `RunWriter.resume(path, step)` goes on after a step of one. Both refuse, with
    RecordError, a file that another writer holds; `new` one that holds a run already.

    path        the file
    last_step   of the last line of a tracked step; None before the first
    """

    def __init__(
        self,
        path: Path,
        handle: int,
        last_step: int | None = None,
        layers: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.path, self.last_step = path, last_step
        self._handle, self._layers = handle, layers  # those of the first line; None before it is written
        self._end = os.fstat(handle).st_size

    @classmethod
    def new(cls, path: str | os.PathLike[str]) -> RunWriter:
        """Begin a record at `path`. RecordError where one with a tracked step is, or the place cannot be written."""
        file = Path(path)
        handle = _opened(file, os.O_CREAT)
        try:
            lines, begin = read_lines(file), file.read_bytes()[: len(_BEGIN)]
            if any(_is_step(line) for line in lines) or not _BEGIN.startswith(begin):
                raise RecordError(_taken(file, lines))
            os.ftruncate(handle, 0)  # what a kill left before the first step
        except BaseException:
            os.close(handle)
            raise
        return cls(file, handle)

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        step: int,
        *,
        environment: Mapping[str, Any] | None = None,
        exact: bool = True,
        reason: str | None = None,
    ) -> tuple[RunWriter, RunRecord]:
        """Go on after `step`: later steps are cut off, the event "resume" is noted; the writer, and what is left.

        Events stay. The cut file is written beside the old one and renamed. RecordError where there is no record.
        """
        file = Path(path)
        handle = _opened(file)
        try:
            lines = read_lines(file)
            if not lines:
                raise RecordError(f"{file} has no complete line: there is no run to resume; begin a new one")
            before = from_lines(file, lines)
            kept = [line for line in lines if "event" in line.value or line.value["step"] <= step]
            event = {"event": "resume", "step": step, "exact": exact, "reason": reason}
            event |= {} if environment is None else {"environment": environment}
            check_event(event := finite(event))
            data = b"".join([*(line.raw for line in kept), dumped(event)])
            renamed = _replaced(file, data)
        finally:
            os.close(handle)
        steps = [each for each in before.steps if each["step"] <= step]
        record = RunRecord(before.start, [*before.events, event], steps)
        return cls(file, renamed, steps[-1]["step"] if steps else None, before.start["layers"]), record

    def start(self, line: Mapping[str, Any]) -> None:
        """The first line: "event" and "schema" are put in front of what is given."""
        if self._layers is not None:
            raise RecordError(f"{self.path} has begun already; its first line is there")
        first = self._plain({"event": "start", "schema": SCHEMA, "step": 0, **line}, check_start)
        self._write(first)
        self._layers = first["layers"]

    def append(self, line: Mapping[str, Any]) -> None:
        """The line of a tracked step. RecordError unless its step comes after the last one."""
        if self._layers is None:
            raise RecordError(f"{self.path} has no first line yet; write `start` before the steps")
        if "event" in line:
            raise RecordError(f"no line of a step for {self.path}: it has 'event', which is of `event` alone")
        layers = self._layers
        found = self._plain(line, lambda plain: check_step(plain, layers))
        if self.last_step is not None and found["step"] <= self.last_step:
            raise RecordError(
                f"{self.path} has step {self.last_step} already, and step {found['step']} comes before or is it; "
                "resume the record at the step where training goes on"
            )
        self._write(found)
        self.last_step = found["step"]

    def event(self, name: str, **said: Any) -> None:
        """A line that says what happened to the run."""
        if self._layers is None:
            raise RecordError(f"{self.path} has no first line yet; write `start` before the events")
        self._write(self._plain({"event": name} | said | {"event": name}, check_event))

    def close(self) -> None:
        """Let the file go. A record that never began leaves no file."""
        handle, self._handle = self._handle, -1
        if handle < 0:
            return
        if self._layers is None and os.fstat(handle).st_size == 0:
            with suppress(OSError):
                self.path.unlink()
        os.close(handle)

    @property
    def closed(self) -> bool:
        return self._handle < 0

    def _plain(self, line: Mapping[str, Any], check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The line as JSON holds it; RecordError unless it is one that can be read back."""
        try:
            plain: dict[str, Any] = finite(line)
            check(plain)
        except RecordError as error:
            raise RecordError(f"this is no line for {self.path}: {error}") from None
        except RecursionError:
            raise RecordError(f"this is no line for {self.path}: something in it holds itself") from None
        return plain

    def _write(self, line: Mapping[str, Any]) -> None:
        """The whole line or nothing of it, on the disk when this returns."""
        if self.closed:
            raise RecordError(f"{self.path} is closed; nothing more can be written to it")
        if not _is_at(self._handle, self.path) or os.fstat(self._handle).st_size < self._end:
            raise RecordError(
                f"{self.path} was removed, replaced or cut while it was being written; what was written before is lost "
                "with it, and nothing more is added"
            )
        _put(self._handle, dumped(line), self._end, self.path)
        self._end = os.fstat(self._handle).st_size


def _put(handle: int, data: bytes, end: int, path: Path) -> None:
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(handle, end)  # no half of a line
        raise RecordError(
            f"cannot write to {path}: {error.strerror or error}; it holds the run up to its last complete line: make "
            "room and resume"
        ) from None


def _opened(file: Path, flags: int = 0) -> int:
    """The file, open at its end and locked; RecordError where that cannot be."""
    if os.path.isdir(file):
        raise RecordError(
            f"cannot write {file}: it is a folder; name a file in it, such as {file / 'record.jsonl'}"
        )
    try:
        handle = os.open(file, os.O_RDWR | os.O_APPEND | flags | getattr(os, "O_BINARY", 0), 0o666)
    except FileNotFoundError:
        what = "its folder does not exist" if flags else "there is no record to resume"
        raise RecordError(f"cannot write {file}: {what}") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot write {file}: {getattr(error, 'strerror', None) or error}") from None
    if disk.locked(handle) is False or not _is_at(handle, file):
        os.close(handle)
        raise RecordError(f"{file} is being written by another process: is the same run going on elsewhere?")
    return handle


def _is_at(handle: int, file: Path) -> bool:
    """Whether this is still the file of that name: another writer may have put a new one in its place."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def _replaced(file: Path, data: bytes) -> int:
    """A file with other contents under the name, written aside, locked and renamed; open at its end."""
    target = file.resolve()
    aside = target.with_name(f".{target.name}.{os.getpid()}.aside")
    handle = -1
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        handle = os.open(aside, flags, target.stat().st_mode & 0o777)
        disk.locked(handle)
        _put(handle, data, 0, file)
        os.replace(aside, target)
        with suppress(OSError):  # the new name is on the disk too, where folders can be synced
            disk.synced(target.parent)
    except BaseException as error:
        if handle >= 0:
            os.close(handle)
        with suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError):
            raise RecordError(f"cannot write {file}: {error.strerror or error}") from None
        raise
    return handle


def _is_step(line: Line) -> bool:
    return "event" not in line.value


def _taken(file: Path, lines: list[Line]) -> str:
    steps = [line.value.get("step") for line in lines if _is_step(line)]
    if not steps or lines[0].value.get("event") != "start":
        return f"{file} is there and is no record of a run; name another file"
    return (
        f"{file} holds a run already, up to step {steps[-1]}; resume it at the step of a checkpoint (resume=), or "
        "name another file"
    )
