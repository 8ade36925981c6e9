"""End points of the one-layer flow over learning-rate ratios, plain rows with a versioned schema: the record alone."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from qkform.plain import plain_table
from qkform.records import Row, Table, plain_row

SCHEMA = "qkform.theory/1"
MEASURES = ("gap", "gain", "sharpness", "entropy")  # of a row, in closed form; under "simulated", as measured
# Of the task, in front of the flat rows: what tells one record from another.
_OF_TASK = {"attention": str, "output": str, "objective": str, "loss": float}


@dataclass(frozen=True)
class FlowTable(Table):
    """Where training ends for each ratio of learning rates, in closed form and simulated on the full matrices.

    A row is {"ratio", the four `MEASURES`, "simulated": the same four, or null where nothing was simulated}. `task` has
    every argument of `qkform.dynamics.one_layer.Flow`, and the loss; "inf" for endless common tokens. Saved by `save`
    (.json, .csv, .parquet), read back by `load` (.json).
    """

    schema: ClassVar[str] = SCHEMA

    task: Mapping[str, Any]
    rows: Sequence[Row] = ()
    # Points along the runs, for pictures: {"kind", "ratio", ...}. They follow from the task and are not saved.
    points: Sequence[Row] = field(default=(), repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The document that JSON holds: {"schema", "task", "rows"}; undefined values are None."""
        return {
            "schema": SCHEMA,
            "task": dict(self.task),
            "rows": [
                plain_row(row, ("ratio", *MEASURES))
                | {"simulated": row["simulated"] and plain_row(row["simulated"], MEASURES)}
                for row in self.rows
            ],
        }

    @classmethod
    def columns(cls) -> dict[str, type]:
        """attention, output, objective, loss; ratio and the four measures; simulated_ and the same four."""
        measured = dict.fromkeys(MEASURES, float)
        return {**_OF_TASK, "ratio": float, **measured, **{f"simulated_{n}": float for n in MEASURES}}

    def _flat(self) -> list[Row]:
        task = {name: self.task.get(name) for name in _OF_TASK}
        return [
            task
            | {name: row[name] for name in ("ratio", *MEASURES)}
            | {f"simulated_{name}": (row["simulated"] or {}).get(name) for name in MEASURES}
            for row in self.rows
        ]

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> FlowTable:
        task, rows = document["task"], document["rows"]
        if not isinstance(task, dict) or not isinstance(rows, list):
            raise TypeError("task is an object and rows a list")
        for row in rows:
            _numbers(row, ("ratio", *MEASURES), ("simulated",))
            if row["simulated"] is not None:
                _numbers(row["simulated"], MEASURES)
        return cls(task, rows)

    def __str__(self) -> str:
        """A line per ratio, as plain text."""
        names = [name for name in self.columns() if name not in _OF_TASK]
        return f"FlowTable({len(self)} ratios)\n{plain_table(self._flat(), names)}"

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        names = [name for name in self.columns() if name not in _OF_TASK]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{'–' if row[name] is None else format(row[name], '.5g')}</td>" for name in names)
            + "</tr>"
            for row in self._flat()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def ratio_name(ratio: float) -> str:
    """A ratio as a person writes it: 1/16, 4, 0.37."""
    near = Fraction(ratio).limit_denominator(1024)
    if near and float(near) == ratio and 1 in (near.numerator, near.denominator):
        return str(near)
    return f"{ratio:.6g}"


def _numbers(row: Any, names: Sequence[str], others: Sequence[str] = ()) -> None:
    """KeyError or TypeError unless these are the names of a row, and what they stand for are numbers or None."""
    if set(row) != {*names, *others}:
        raise KeyError(f"a row has {sorted(row)[:5]}...")
    for name in names:
        if isinstance(row[name], bool) or not isinstance(row[name], (int, float, type(None))):
            raise TypeError(f"{name} is {str(row[name])[:40]!r}, no number")
