"""Lines of a record: JSON objects, one per line, that a kill may have cut at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qkform.errors import RecordError


class Line(NamedTuple):
    """One line of a record: where it stands, from 1, its bytes with the newline, and what they say."""

    number: int
    raw: bytes
    value: dict[str, Any]


def read_lines(file: Path) -> list[Line]:
    """The complete lines of a file, less what a kill left at its end; RecordError for one that is no JSON object."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read the record {file}: {error.strerror or error}") from None
    return list(_lines(file, raw))


def _lines(file: Path, raw: bytes) -> Iterator[Line]:
    whole = raw.split(b"\n")[:-1]  # what follows the last newline was not written to its end
    for number, line in enumerate(whole, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield Line(number, line + b"\n", value)
        elif number < len(whole):
            raise RecordError(f"{file}, line {number}: no JSON object: {line[:40]!r}...")


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line as it is written: JSON, what is not finite as null, and a newline."""
    return json.dumps(finite(line), allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """A value with None for every number that JSON cannot hold; numpy's and torch's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    return finite(value.tolist()) if hasattr(value, "tolist") else str(value)
