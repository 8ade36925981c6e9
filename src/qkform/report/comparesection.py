"""What the page shows of a `CompareTable`, ready for its template: words, numbers, charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from qkform.comparisons import CLOCKS, MEASURES, CompareTable
from qkform.records import Row
from qkform.report import comparecharts
from qkform.report import comparewords as words
from qkform.report.look import INK, model_colour
from qkform.report.reading import is_number
from qkform.report.rows import text
from qkform.report.sections import Packed

CURVES = ("held_out", "symmetry", "normalised_entropy", "largest")
POINTS = 400  # of a curve: more are not seen, and make a page heavy
_MOMENTS = {"end": "at the end", "at_loss": "at one loss", "to_baseline": "to the baseline's loss"}
_ARM_COLUMNS = ("held_out", "symmetry", "directionality", "normalised_entropy", "largest")


class CompareSection:
    """A comparison on the page. Numbers of a loaded record are taken only where they are numbers."""

    def __init__(self, table: CompareTable, packed: Packed) -> None:
        self._table, self._packed = table, packed
        self.baseline = text(table.settings.get("baseline"))
        self.notes = [text(note) for note in table.notes]
        self.settings = [(text(name), text(value)) for name, value in table.settings.items()]
        self.interval = text(words.interval_name(table.means))
        self.loss = words.moment("at_loss", table.settings).removeprefix("at held-out loss ")
        self.smoothing = text(table.settings.get("smoothing"))
        self.colours = arm_colours(table)
        self.points = curve_points(table)

    @property
    def columns(self) -> list[str]:
        return [words.NAMES[name] for name in _ARM_COLUMNS]

    @property
    def arms(self) -> list[dict[str, Any]]:
        """A row of text per arm."""
        return [
            {
                "name": text(arm["name"]),
                "colour": self.colours[text(arm["name"])],
                "baseline": bool(arm["baseline"]),
                "differs": ", ".join(
                    f"{text(name)} = {text(value)}" for name, value in arm["differs"].items()
                ),
                "seeds": ", ".join(text(seed) for seed in arm["seeds"]),
                "values": [_mean_and_sd(arm, name) for name in _ARM_COLUMNS],
            }
            for arm in self._table.arms
        ]

    @property
    def pairs(self) -> list[dict[str, Any]]:
        """Tables of text, one per pair."""
        return [self._pair(number, pair) for number, pair in enumerate(self._table.pairs)]

    def _pair(self, number: int, pair: Mapping[str, Any]) -> dict[str, Any]:
        name = text(pair["arm"])
        moments = [
            {
                "title": text(words.moment(at, self._table.settings)),
                "lines": self._lines(pair["rows"], at),
                "interval": text(words.interval_name(row for row in pair["rows"] if row["at"] == at)),
                "ranged": any(row["low"] is not None for row in pair["rows"] if row["at"] == at),
                "remarks": [text(one) for one in words.remarks(pair["rows"], at)],
            }
            for at in dict.fromkeys(row["at"] for row in pair["rows"])
        ]
        return {
            "id": f"pair-{number}",
            "name": name,
            "colour": self.colours.get(name, INK),
            "seeds": ", ".join(text(seed) for seed in pair["seeds"]),
            "refused": pair["refused"] and text(pair["refused"]),
            "moments": moments,
        }

    def _lines(self, rows: Sequence[Row], at: str) -> list[dict[str, str]]:
        return [
            {
                "measure": words.NAMES.get(row["measure"], text(row["measure"])),
                "arm": words.value(row["measure"], row["arm_value"], row["arm_never"]),
                "baseline": words.value(row["measure"], row["baseline_value"], row["baseline_never"]),
                "difference": _minus(words.difference(row["measure"], row["difference"])),
                "interval": _minus(words.interval(row).strip()),
                "faster": words.faster(row).replace("x", "×"),
                "n": text(row["n"]),
            }
            for row in rows
            if row["at"] == at and row["seed"] is None
        ]

    @property
    def curves(self) -> dict[str, dict[str, Any]]:
        """A chart per measure over the steps; empty for a record that was loaded, which has no curves."""
        return {
            name: self._packed(
                comparecharts.curves(self.points, name, self.colours, width="container"), "compare"
            )
            for name in CURVES
            if any(row[name] is not None for row in self.points)
        }

    @property
    def against_loss(self) -> dict[str, dict[str, Any]]:
        """Symmetry and entropy against the held-out loss."""
        at = self._table.settings.get("at_loss")
        return {
            name: self._packed(
                comparecharts.against_loss(
                    self.points,
                    name,
                    self.colours,
                    at if is_number(at) else None,
                    width="container",
                    height=300,
                ),
                "compare",
            )
            for name in ("normalised_entropy", "symmetry")
            if any(row[name] is not None and row["smoothed"] is not None for row in self.points)
        }

    @property
    def differences(self) -> list[dict[str, Any]]:
        """A chart per measure of what differs."""
        return [
            {"id": f"difference-{name}", "title": title, **self._packed(chart, "compare")}
            for name, title, chart in difference_charts(self._table, self.colours, width="container")
        ]


def difference_charts(
    table: CompareTable, colours: Mapping[str, str], **size: Any
) -> list[tuple[str, str, Any]]:
    """(name, title, chart) of every measure that has a difference, and of how much faster."""
    found = []
    for measure in ("held_out", *MEASURES[2:]):
        points = difference_points(table, measure, "difference", ("low", "high"))
        if points:
            title = f"difference of {words.NAMES[measure]}"
            found.append((measure, title, comparecharts.differences(points, title, colours, **size)))
    points = difference_points(table, CLOCKS[0], "speed_up", ("speed_up_low", "speed_up_high"))
    if points:
        title = "times faster, in steps"
        found.append(("faster", title, comparecharts.differences(points, title, colours, ratio=True, **size)))
    return found


def difference_points(table: CompareTable, measure: str, column: str, ends: tuple[str, str]) -> list[Row]:
    """The rows of one measure as `comparecharts.differences` takes them."""
    return [
        {
            "arm": text(row["arm"]),
            "moment": _MOMENTS[row["at"]],
            "seed": row["seed"],
            "value": row[column],
            "low": row[ends[0]] if is_number(row[ends[0]]) else None,
            "high": row[ends[1]] if is_number(row[ends[1]]) else None,
        }
        for row in table.rows
        if row["measure"] == measure and row["at"] in _MOMENTS and is_number(row[column])
    ]


def arm_colours(table: CompareTable) -> dict[str, str]:
    """The baseline in ink, the others in the colours of models."""
    others = [text(arm["name"]) for arm in table.arms if not arm["baseline"]]
    colours = {text(arm["name"]): INK for arm in table.arms if arm["baseline"]}
    return colours | {name: model_colour(i) for i, name in enumerate(others)}


def curve_points(table: CompareTable) -> list[Row]:
    """The curves of every run, and behind them those of the mean over the seeds of an arm (seed None)."""
    names = ("smoothed", *MEASURES)
    points = [{**row, "arm": text(row["arm"])} for row in _thinned(table.curves)]
    steps: dict[tuple[str, Any], list[Row]] = {}
    for row in points:
        steps.setdefault((row["arm"], row["step"]), []).append(row)
    seeds = {arm: len({row["seed"] for row in points if row["arm"] == arm}) for arm, _ in steps}
    for (arm, step), rows in steps.items():
        mean: Row = {"arm": arm, "seed": None, "step": step}
        for name in names:
            found = [row[name] for row in rows if row[name] is not None]
            mean[name] = fmean(found) if len(found) == seeds[arm] else None  # a mean of others would jump
        points.append(mean)
    return [{name: row[name] for name in ("arm", "seed", "step", *names)} for row in points]


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """At most `POINTS` steps, spread evenly over those of the longest run, the last of every run among them."""
    steps = sorted({row["step"] for row in rows})
    if len(steps) <= POINTS:
        return list(rows)
    kept = {steps[round(i * (len(steps) - 1) / (POINTS - 1))] for i in range(POINTS)}
    last: dict[Any, Any] = {}
    for row in rows:
        last[row["arm"], row["seed"]] = row["step"]
    return [row for row in rows if row["step"] in kept or row["step"] == last[row["arm"], row["seed"]]]


def _mean_and_sd(arm: Mapping[str, Any], name: str) -> str:
    mean, sd = arm["mean"].get(name), arm["sd"].get(name)
    if broke := arm.get("broke"):
        return f"{text(broke)} of {len(arm['seeds'])} broke"
    shown = _minus(words.value(name, mean))
    return f"{shown} ± {sd:.3f}" if is_number(sd) else shown


def _minus(shown: str) -> str:
    return shown.replace("-", "\u2212")
