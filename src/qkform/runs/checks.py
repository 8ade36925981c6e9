"""What the lines of a record must be, checked once when they are read or written: what comes after can trust them.

A field that may be absent may also be null. Fields and events that are not known here may hold whatever JSON can. Each
check raises RecordError with the short fact; who reads a file adds the file and the line.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from qkform.errors import RecordError
from qkform.runs.fields import CONFLICT, MEASURES, SCHEMA, SELF_NORM

MOST_HEADS = 4096  # of a layer
MOST_IN_ALL = 2**17  # heads, of a model
LARGEST = 2**63 - 1  # whole number, such as a step: what a column of a table holds
DEEPEST = 50  # lists and objects within each other


class Kind(NamedTuple):
    """What a value may be, in words that follow "it must be", and whether one is."""

    words: str
    fits: Callable[[Any], bool]


def _whole(least: int, most: int = LARGEST) -> Kind:
    words = f"a whole number, {least} or more" if most == LARGEST else f"a whole number, {least} to {most}"
    return Kind(words, lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most)


WHOLE, COUNT, HEADS = _whole(0), _whole(1), _whole(1, MOST_HEADS)
TEXT = Kind("text", lambda v: isinstance(v, str))
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
OBJECT = Kind("an object", lambda v: isinstance(v, Mapping))
LIST = Kind("a list", lambda v: isinstance(v, list))
NUMBER = Kind("a number", lambda v: _is_number(v))

_START = {"step": WHOLE, "experiment": OBJECT, "environment": OBJECT, "model": OBJECT, "probe": OBJECT}
_LAYER = {
    "module": TEXT,
    "layer": WHOLE,
    "part": TEXT,
    "mask": TEXT,
    "n_kv_heads": COUNT,
    "d_model": COUNT,
    "d_head": COUNT,
}
_STEP = {
    "loss": NUMBER,
    "held_out": NUMBER,
    "tokens": WHOLE,
    "rates": OBJECT,
    "seconds": NUMBER,
    "tracker_seconds": NUMBER,
    "tokens_per_second": NUMBER,
}
_EVENTS = {
    "resume": {"step": WHOLE, "exact": FLAG, "reason": TEXT, "environment": OBJECT},
    "end": {"step": WHOLE, "reason": TEXT},
}
_PLAIN_NUMBERS = {float, type(None)}
_ROW = dict.fromkeys((*MEASURES, SELF_NORM), NUMBER) | {"module": TEXT, "heads": OBJECT, "conflict": OBJECT}


def check_start(start: Mapping[str, Any]) -> None:
    """The first line: the event `start` of this schema, and what is tracked in `layers`."""
    if start.get("event") != "start" or start.get("schema") != SCHEMA:
        raise RecordError(f"schema {_short(start.get('schema'))}; this version reads {SCHEMA!r}")
    _plain(start)
    _fields(start, _START)
    _must(start, "layers", LIST)
    for place, layer in enumerate(start["layers"]):
        where = f"layers[{place}]"
        if not isinstance(layer, Mapping):
            raise RecordError(f"{where} is {said(layer)}; it must be an object that describes a layer")
        _must(layer, "n_heads", HEADS, f"{where}.")
        _fields(layer, _LAYER, f"{where}.")
    heads = sum(layer["n_heads"] for layer in start["layers"])
    if heads > MOST_IN_ALL:
        raise RecordError(f"layers has {heads:,} heads in all; it must be {MOST_IN_ALL:,} at most")


def check_event(event: Mapping[str, Any]) -> None:
    """A line that says what happened to the run. There is one `start`, the first line."""
    _must(event, "event", TEXT)
    if event["event"] == "start":
        raise RecordError("a second start; a record is of one run, which starts in its first line")
    _plain(event)
    _fields(event, _EVENTS.get(event["event"], {}))


def check_step(step: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> None:
    """The line of a tracked step, of a run whose first line describes these `layers`."""
    _must(step, "step", WHOLE)
    _plain({name: value for name, value in step.items() if name not in _STEP and name != "layers"})
    _fields(step, _STEP)
    _fields(step.get("rates") or {}, dict.fromkeys(step.get("rates") or (), NUMBER), "rates.")
    _must(step, "layers", LIST)
    if len(step["layers"]) != len(layers):
        raise RecordError(f"{len(step['layers'])} layers; line 1 describes {len(layers)}")
    for place, (row, about) in enumerate(zip(step["layers"], layers, strict=True)):
        where = f"layers[{place}]"
        if not isinstance(row, Mapping):
            raise RecordError(f"{where} is {said(row)}; it must be an object, the row of a layer")
        _row(row, about, f"{where}.")


def _row(row: Mapping[str, Any], about: Mapping[str, Any], where: str) -> None:
    _fields(row, _ROW, where)
    named, here = row.get("module"), about.get("module")
    if named != here and named is not None and here is not None:
        raise RecordError(f"{where}module is {said(named)}; line 1 has {said(here)} there")
    _plain({name: value for name, value in row.items() if name not in _ROW})
    for group, names in (("heads", (*MEASURES, SELF_NORM)), ("conflict", CONFLICT)):
        found = row.get(group) or {}
        for name in names:
            if found.get(name) is not None:
                _per_head(found[name], about["n_heads"], f"{where}{group}.{name}")
        _plain({name: value for name, value in found.items() if name not in names})


def _per_head(values: Any, n_heads: int, where: str) -> None:
    if not isinstance(values, list) or len(values) != n_heads:
        found = f"a list of {len(values)}" if isinstance(values, list) else said(values)
        raise RecordError(f"{where} is {found}; it must be a list of {n_heads}, one for each head")
    if set(map(type, values)) <= _PLAIN_NUMBERS:  # nearly always, and quick
        return
    for head, value in enumerate(values):
        if value is not None and not _is_number(value):
            raise RecordError(f"{where}[{head}] is {said(value)}; it must be {NUMBER.words}, or null")


def _must(found: Mapping[str, Any], name: str, kind: Kind, where: str = "") -> None:
    if name not in found:
        raise RecordError(f"there is no {where}{name}; it must be {kind.words}")
    if not kind.fits(found[name]):
        raise RecordError(f"{where}{name} is {said(found[name])}; it must be {kind.words}")


def _fields(found: Mapping[str, Any], kinds: Mapping[str, Kind], where: str = "") -> None:
    for name, kind in kinds.items():
        value = found.get(name)
        if value is not None and not kind.fits(value):
            raise RecordError(f"{where}{_named(name)} is {said(value)}; it must be {kind.words}, or null")


def _plain(value: Any, depth: int = 0) -> None:
    """Whatever it holds: nothing too deep, and no whole number that a float cannot hold."""
    if isinstance(value, int) and not _is_number(value) and not isinstance(value, bool):
        raise RecordError(f"{said(value)} is more than a float can hold")
    if not isinstance(value, (Mapping, list)):
        return
    if depth > DEEPEST:
        raise RecordError(f"more than {DEEPEST} lists and objects within each other")
    inside: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
    for each in inside:
        _plain(each, depth + 1)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def said(value: Any) -> str:
    """A value that was found, in a few characters."""
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a whole number of more than {int(value.bit_length() * 0.301):,} digits"
    return _short(value)


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _named(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 40 else _short(name)
