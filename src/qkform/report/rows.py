"""Rows made safe to draw: every value of the type its column promises, split into what is drawn together.

A record may come from a file that someone else wrote, so nothing in it is taken at its word: a number that is
not finite, or a text where a number belongs, is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qkform.differences import DIFF_COLUMNS, DiffTable
from qkform.records import (
    COLUMNS,
    ModelScores,
    Row,
    null_band,
    single_heads,
    values,
    whole_layers,
)

# Where in a series a row stands: values of its model, and the place of that model in the series, from 0.
STOP_COLUMNS: dict[str, type] = {"step": int, "offset": int, "stop": int}
POINT_COLUMNS = (*STOP_COLUMNS, *COLUMNS, "null_low", "null_high")
DIFF_POINT_COLUMNS = tuple(DIFF_COLUMNS)
_LABEL_LENGTH = 48


class Points(list[Row]):
    """Rows that `points` has made."""


@dataclass(frozen=True)
class Group:
    """The rows of one model that are drawn together: one component, one kind of attention, one part of the score."""

    component: str
    attention: str
    part: str  # "" is the whole score
    rows: Points

    @property
    def layers(self) -> list[Row]:
        return whole_layers(self.rows)

    @property
    def heads(self) -> list[Row]:
        return single_heads(self.rows)

    def at(self, stop: int) -> Group:
        """The rows of one model of a series."""
        return replace(self, rows=Points(row for row in self.rows if row["stop"] == stop))

    @property
    def masks(self) -> list[str]:
        return sorted({row["mask"] for row in self.rows if row["mask"]})

    def has(self, column: str) -> bool:
        """Whether any row has a value there."""
        return bool(values(self.rows, column))


def points(rows: Iterable[Mapping[str, Any]]) -> Points:
    """Rows as a chart and the table of the page read them.

    The columns of `COLUMNS` with finite numbers of six digits, lists as text ("a, b"), `source` where the row
    has one, the columns of `STOP_COLUMNS`, and in rows of whole layers `null_low` and `null_high`: where random
    weights would lie (+-2 std).
    """
    return rows if isinstance(rows, Points) else Points(_point(row) for row in rows)


def diff_points(rows: Iterable[Mapping[str, Any]]) -> Points:
    """The same for the rows of a `DiffTable`."""
    if isinstance(rows, Points):
        return rows
    return Points(
        {name: _six_digits(_typed(kind, row.get(name))) for name, kind in DIFF_COLUMNS.items()}
        | ({"source": text(row["source"])} if row.get("source") is not None else {})
        for row in rows
    )


def groups(models: Sequence[ModelScores], label: str, *, distances: bool = False) -> list[Group]:
    """The rows of a model, or of a series of models, by component, kind of attention and part of the score.

    In order of appearance; `source` is `label`, and `stop` the place of the row's model. `distances`: a model
    that was scanned without an offset stands at 0, where a rotation does nothing.
    """
    return grouped(
        points(
            {
                **row,
                "source": label,
                "step": model.step,
                "offset": (model.offset or 0) if distances else model.offset,
                "stop": stop,
            }
            for stop, model in enumerate(models)
            for row in model.rows
        )
    )


def diff_groups(diff: DiffTable) -> list[Group]:
    """The rows of a diff by component, kind of attention and part of the score."""
    return grouped(diff_points(diff.rows))


def grouped(rows: Points) -> list[Group]:
    found: dict[tuple[str, str, str], Points] = {}
    for row in rows:
        key = (row["component"] or "", row["attention"] or "", row["part"] or "")
        found.setdefault(key, Points()).append(row)
    return [Group(*key, found[key]) for key in found]


def whole_score(found: Iterable[Group]) -> list[Group]:
    """The groups of whole scores: a part of a score says nothing about the model as a whole."""
    return [group for group in found if not group.part]


def distinct(names: Iterable[str]) -> list[str]:
    """One label per name, short enough for a legend and never the same twice."""
    taken: set[str] = set()
    out = []
    for full in names:
        name = shortened(text(full) or "unnamed")
        label, n = name, 1
        while label in taken:
            n += 1
            label = f"{name} ({n})"
        taken.add(label)
        out.append(label)
    return out


def shortened(name: str, length: int = _LABEL_LENGTH) -> str:
    """The name with its middle left out where it is longer than `length` characters."""
    if len(name) <= length:
        return name
    tail = length * 2 // 3
    return f"{name[: length - tail - 1]}…{name[-tail:]}"


def text(value: Any) -> str:
    """Any value as text that UTF-8 can write: file names may hold lone surrogates."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def clean(name: str) -> str:
    """A name as a picture can show it: no control characters, which XML cannot hold, nor turns of direction."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text(name))


def _point(row: Mapping[str, Any]) -> Row:
    point = {name: _typed(kind, row.get(name)) for name, kind in (STOP_COLUMNS | COLUMNS).items()}
    if (point["d_model"] or 0) < 1:
        point["d_model"] = point["symmetry_z"] = None  # deviations from 1/d mean nothing without d
    point["null_low"], point["null_high"] = _band(point)
    if row.get("source") is not None:
        point["source"] = text(row["source"])
    return {name: _six_digits(value) for name, value in point.items()}


def _band(point: Row) -> tuple[float | None, float | None]:
    if point["head"] is not None:
        return None, None
    low, high = null_band(point) or (None, None)
    return _number(low), _number(high)


def _typed(kind: type, value: Any) -> Any:
    if value is None:
        return None
    if kind is float:
        return _number(value)
    if kind is int:
        number = _number(value)
        return int(value) if number is not None and abs(number) < 2**53 else None  # what javascript can count
    if kind is list:
        return ", ".join(text(v) for v in value) if isinstance(value, list | tuple) else text(value)
    return text(value)


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _six_digits(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
