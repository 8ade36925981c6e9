"""Records of runs as a page needs them: of a long one evenly spread steps, read without holding all of it in memory."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkform.errors import RecordError
from qkform.runs import RunRecord
from qkform.runs.lines import Line, no_object, object_in
from qkform.runs.record import from_lines

LARGE = 2**25  # bytes; a record that is larger is not read whole where few of its steps are wanted


def thinned(place: Path, most: int | None) -> tuple[RunRecord, int]:
    """The record with at most `most` of its tracked steps, first and last among them; and how many there are.

    Every event stays. A record that a kill left torn at its end is read as far as it is whole. RecordError for one that
    cannot be read.
    """
    try:
        there = place.stat()
        large = (
            most is not None
            and place.suffix != ".json"
            and there.st_size > LARGE
            and stat.S_ISREG(there.st_mode)
        )
    except (OSError, ValueError):
        large = False  # reading it says what is wrong
    if large and most is not None:
        return _sampled(place, most)
    record = RunRecord.load(place)
    kept = record.steps if most is None else spread(record.steps, most)
    return RunRecord(record.start, record.events, kept), len(record.steps)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, the first and the last among them."""
    n = len(items)
    if n <= most:
        return list(items)
    if most < 2:
        return [items[-1]][:most]
    return [items[round(i * (n - 1) / (most - 1))] for i in range(most)]


def _sampled(place: Path, most: int) -> tuple[RunRecord, int]:
    """The record of a few of its lines: where each begins is noted first, and only what is kept is taken apart."""
    events: list[tuple[int, int]] = []  # (number of the line, its place in the file)
    steps: list[tuple[int, int]] = []
    try:
        with place.open("rb") as file:
            at = 0
            for number, raw in enumerate(file, 1):
                if raw.endswith(b"\n"):  # a last line without one was not written to its end
                    (events if b'"event"' in raw[:4096] else steps).append((number, at))
                at += len(raw)
            kept = sorted([*events, *spread(steps, most)])
            lines = []
            for number, start in kept:
                file.seek(start)
                raw = file.readline()
                value = object_in(raw, place, number)
                if value is not None:
                    lines.append(Line(number, raw, value))
                elif (number, start) != max(steps + events):
                    raise RecordError(no_object(raw, place, number))
    except OSError as error:
        raise RecordError(f"cannot read the record {place}: {error.strerror or error}") from None
    if not lines:
        raise RecordError(f"{place} has no complete line: the run was killed before its record began")
    return from_lines(place, lines), len(steps)
