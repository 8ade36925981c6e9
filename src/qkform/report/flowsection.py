"""What the page shows of a `FlowTable`, ready for its template: words, numbers, charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qkform.flows import MEASURES, FlowTable, ratio_name
from qkform.records import Row
from qkform.report import flowcharts
from qkform.report.flowscreen import circuit_words, shown, task_words
from qkform.report.rows import text
from qkform.report.sections import Packed

WORDS = (
    (
        "ratio",
        "above 0",
        "The learning rate of the query–key circuit, divided by that of the output circuit.",
    ),
    ("gap a", "0 and up", "By how much the score of a relevant token exceeds that of a distractor."),
    (
        "gain b",
        "0 and up",
        "By how much attended relevant tokens raise the right logit above every other one.",
    ),
    (
        "sharpness",
        "0 to 1",
        "Attention on the relevant tokens: c eᵃ / (1 + c eᵃ), c their share under uniform attention.",
    ),
    ("entropy", "0 and up", "Of the attention over all keys, in nats."),
    (
        "closed form",
        "exact",
        "The end point solves Φ_QK(a) − Φ_QK(a₀) = ρ (Φ_OV(b) − Φ_OV(b₀)) with sharpness · b fixed by the loss.",
    ),
    (
        "simulated",
        "measured",
        "Gradient flow of the full d × d matrices over every sequence of the task, until the loss is reached.",
    ),
)


class FlowSection:
    """A flow on the page. Numbers of a loaded record are taken only where they are numbers."""

    def __init__(self, table: FlowTable, packed: Packed) -> None:
        self._packed = packed
        self.circuits = [text(word) for word in circuit_words(table.task)]
        self.task = text(task_words(table.task))
        self.pairs = [(text(str(key)), text(_said(value))) for key, value in table.task.items()]
        self.rows = safe_rows(table.rows)
        self.simulated = any(row["simulated"] for row in self.rows)
        self.points = picture_points(table.points, self.rows)
        self.exact = table.task.get("exact") is not False

    @property
    def lines(self) -> list[dict[str, str]]:
        """The rows of the table, as text."""
        return [
            {"ratio": _name(row["ratio"]), **{name: shown(row[name]) for name in MEASURES}}
            | {f"simulated_{name}": shown((row["simulated"] or {}).get(name)) for name in MEASURES}
            for row in self.rows
        ]

    @property
    def largest(self) -> str | None:
        """The largest relative difference between closed form and simulation."""
        found = [
            abs(row["simulated"][name] / row[name] - 1)
            for row in self.rows
            for name in MEASURES
            if row["simulated"] and row[name] and row["simulated"][name] is not None
        ]
        return f"{max(found):.1g}" if found else None

    @property
    def plane(self) -> dict[str, Any] | None:
        return self._chart(flowcharts.phase_plane) if self._runs else None

    @property
    def way(self) -> dict[str, Any] | None:
        return self._chart(flowcharts.way) if self._runs else None

    @property
    def ends(self) -> dict[str, dict[str, Any]]:
        """Sharpness and entropy against the ratio; empty without a ratio above 0."""
        if not any(row["ratio"] and row["ratio"] > 0 for row in self.rows):
            return {}
        return {
            name: self._packed(flowcharts.against_ratio(self.points, name, width="container"), "flow")
            for name in ("sharpness", "entropy")
        }

    @property
    def _runs(self) -> bool:
        return any(point["kind"] == "line" for point in self.points)

    def _chart(self, draw: Any) -> dict[str, Any]:
        return self._packed(draw(self.points, width="container"), "flow")


def safe_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows with numbers, or None, where numbers belong."""
    return [_safe(row) for row in rows]


def picture_points(points: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """What the charts take: the points of the runs, named, and the end points of `safe_rows`."""
    return [*({**point, "name": _name(point["ratio"])} for point in points), *_ends(rows)]


def _ends(rows: Sequence[Row]) -> list[Row]:
    """The end points, and those of simulations, as points."""
    found = []
    for row in rows:
        if row["ratio"] is None:
            continue
        for kind, values in (("end", row), ("simulated end", row["simulated"])):
            if values:
                found.append(
                    {"kind": kind, "ratio": row["ratio"], "name": _name(row["ratio"])}
                    | {name: values[name] for name in ("sharpness", "entropy")}
                )
    return found


def _safe(row: Row) -> Row:
    run = row.get("simulated")
    return {name: _number(row.get(name)) for name in ("ratio", *MEASURES)} | {
        "simulated": {name: _number(run.get(name)) for name in MEASURES} if isinstance(run, dict) else None
    }


def _number(value: Any) -> float | None:
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if sound else None


def _name(ratio: float | None) -> str:
    return "–" if ratio is None else ratio_name(ratio)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_said(one) for one in value)
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
