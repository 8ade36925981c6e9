"""Lines of a record: JSON objects, one per line, that a kill may have cut at the end."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qkform.errors import RecordError

_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_TAIL = 2**22  # bytes at the end of a record among which the line of its last step is
_WIDE = (b"e000", b"e+000", b"0" * 300)  # with digits alike, in a line that may have numbers beyond 1e300


class Line(NamedTuple):
    """One line of a record: where it stands, from 1, its bytes with the newline, and what they say."""

    number: int
    raw: bytes
    value: dict[str, Any]


def read_lines(file: Path) -> list[Line]:
    """The complete lines of a file, less what a kill left at its end; RecordError for one that is no JSON object."""
    return list(_lines(file, read_whole(file)))


def read_whole(file: Path) -> bytes:
    """The bytes of a regular file; RecordError for anything else, which might never end."""
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise RecordError(
                f"cannot read the record {file}: it is {what}; name a record.jsonl, or its folder"
            )
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot read the record {file}: {getattr(error, 'strerror', None) or error}"
        ) from None


def last_step(file: Path) -> dict[str, Any] | None:
    """The last complete line of a step, from the end of a record that may be long and is being written; unchecked.

    None where there is none yet, or it cannot be read.
    """
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL))
            lines = opened.read().split(b"\n")[:-1]
    except OSError:
        return None
    for raw in reversed(lines):
        try:
            value = json.loads(raw)
        except ValueError:  # the first of them may be cut
            continue
        if isinstance(value, dict) and "event" not in value and isinstance(value.get("step"), int):
            return value
    return None


def parsed(raw: bytes) -> Any:
    """What JSON says, None in place of numbers that are not finite, as other writers have them: NaN, 1e400.

    ValueError for what is no JSON; RecordError for a whole number that no float can hold.
    """
    alike = raw.translate(_ALIKE)
    wide = any(part in alike for part in _WIDE)  # else every number is finite, and reading is quicker
    more: dict[str, Any] = {"parse_float": _finite_number, "parse_int": _whole_number} if wide else {}
    try:
        return json.loads(raw, parse_constant=lambda name: None, **more)
    except RecursionError:
        raise RecordError("more lists and objects within each other than can be read") from None


def _finite_number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _whole_number(text: str) -> int:
    if not math.isfinite(float(text)):
        raise RecordError(f"a whole number of {len(text.lstrip('-'))} digits is more than a float can hold")
    return int(text)


def _lines(file: Path, raw: bytes) -> Iterator[Line]:
    whole = raw.split(b"\n")[:-1]  # what follows the last newline was not written to its end
    for number, line in enumerate(whole, 1):
        value = object_in(line, file, number)
        if value is not None:
            yield Line(number, line + b"\n", value)
        elif number < len(whole):
            raise RecordError(no_object(line, file, number))


def object_in(line: bytes, file: Path, number: int) -> dict[str, Any] | None:
    """The JSON object of a line, None where it is none; RecordError where it holds what cannot be read."""
    try:
        value = parsed(line)
    except ValueError:
        return None
    except RecordError as error:
        raise RecordError(f"{file}, line {number}: {error}") from None
    return value if isinstance(value, dict) else None


def no_object(line: bytes, file: Path, number: int) -> str:
    return f"{file}, line {number}: no JSON object: {line[:40]!r}..."


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line as it is written: JSON, what is not finite as null, and a newline."""
    return dumped(finite(line))


def dumped(line: Mapping[str, Any]) -> bytes:
    """A line that holds nothing but what JSON can, as it is written."""
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """A value with None for every number that JSON cannot hold; numpy's and torch's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if value - value == 0.0 else None
    return finite(value.tolist()) if hasattr(value, "tolist") else str(value)
