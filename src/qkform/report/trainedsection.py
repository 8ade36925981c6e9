"""Two objectives on the same text, beside each other on a page: symmetry over training, over that of recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from qkform.records import Row, values
from qkform.report import runpoints
from qkform.report.charts import domain_of
from qkform.report.look import (
    MODEL_COLOURS,
    QUIET,
    RANDOM,
    RANDOM_COLOUR,
    Width,
    data,
    finished,
    keyed,
    tooltip,
)
from qkform.report.paths import SHORT_NUMBER
from qkform.report.rows import text
from qkform.report.runset import Run, RunSet
from qkform.report.words import counted

if TYPE_CHECKING:
    import altair as alt

    from qkform.report.sections import Packed

NAMES = {"mlm": "encoder, masked tokens", "clm": "decoder, next token"}
_LAYERS, _MIDDLE, _RECORDED = "layers (thin)", "median layer (thick)", "recorded medians"


@dataclass(frozen=True)
class Trained:
    """Runs to show: those just made, one per objective, and recorded ones of the same kind, which may be none."""

    made: RunSet
    recorded: RunSet

    @property
    def objectives(self) -> list[str]:
        return list(dict.fromkeys(objective(run) for run in self.made.runs))


def objective(run: Run) -> str:
    return text(run.experiment.get("objective", "?"))


class TrainedSection:
    """The section of a page: a chart and a line of numbers per objective."""

    def __init__(self, trained: Trained, packed: Packed) -> None:
        self._packed = packed
        self._made = {
            name: [r for r in trained.made.runs if objective(r) == name] for name in trained.objectives
        }
        self._recorded = {
            name: [r for r in trained.recorded.runs if objective(r) == name] for name in trained.objectives
        }
        self._points = {name: points(self._made[name], self._recorded[name]) for name in self._made}

    @property
    def charts(self) -> list[dict[str, Any]]:
        """{"name", "chart"} per objective; all have one axis."""
        every = [row for rows in self._points.values() for row in rows]
        domain = domain_of(every, ("symmetry", "low", "high"))
        last = max((row["step"] for row in every), default=1)
        return [
            {
                "name": NAMES.get(name, name),
                "chart": self._packed(
                    over_steps(rows, MODEL_COLOURS[i % len(MODEL_COLOURS)], domain, last, width="container"),
                    "runs",
                ),
            }
            for i, (name, rows) in enumerate(self._points.items())
            if values(rows, "symmetry")
        ]

    @property
    def lines(self) -> list[dict[str, str]]:
        """Where each training ended, and the recorded ones."""
        return [
            line(NAMES.get(name, name), kind, run)
            for name in self._made
            for kind, runs in (("this training", self._made[name]), ("recorded", self._recorded[name]))
            for run in runs
            if run.last is not None
        ]

    @property
    def behind(self) -> str:
        """What the pale curves are, in words."""
        runs = [run for several in self._recorded.values() for run in several]
        if not runs:
            return "No recorded runs are drawn behind these: they come with the repository, in results/structure."
        longest = max((run.last["step"] for run in runs if run.last), default=0)
        return (
            f"Pale, behind: the median layer of {counted(len(runs), 'recorded run')} of the same models on the same "
            f"text, {longest:,} steps long. The rate falls to 0 at the end of a run, so a short one is not the "
            "beginning of a long one."
        )


def points(made: Sequence[Run], recorded: Sequence[Run]) -> list[Row]:
    """{"step", "curve", "kind", "symmetry", "low", "high"}: layers and median of what was made, medians behind.

    low and high are where a layer with random weights lies, beside medians too: the chart has one band.
    """
    rows: list[Row] = []
    for run in made:
        steps = runpoints.steps_drawn(run, len(run.record.start["layers"]))
        of_layers = runpoints.layers(run, steps)
        rows += [_point(row, f"layer {row['layer']}", _LAYERS, row) for row in of_layers]
        rows += [_point(row, "median", _MIDDLE, {}) for row in runpoints.middles([run])]
    for i, run in enumerate(recorded):
        seed = i if run.seed is None else run.seed
        bands = {step["step"]: _widest(runpoints.layers(run, [step])) for step in run.record.steps}
        rows += [
            _point(row, f"recorded, seed {seed}", _RECORDED, bands[row["step"]])
            for row in runpoints.middles([run])
        ]
    return rows


def _point(row: Row, curve: str, kind: str, band: Row) -> Row:
    point = {"curve": curve, "kind": kind} | {name: row[name] for name in ("step", "symmetry")}
    return point | {name: band.get(name) for name in ("low", "high")}


def _widest(layers: Sequence[Row]) -> Row:
    return {
        "low": min(values(layers, "low"), default=None),
        "high": max(values(layers, "high"), default=None),
    }


def over_steps(
    rows: Sequence[Row],
    colour: str,
    domain: tuple[float, float],
    last: int,
    *,
    width: Width = 480,
    height: int = 280,
) -> alt.LayerChart:
    """Symmetry over steps: recorded medians (pale), layers (thin), their median (thick), and where chance lies."""
    import altair as alt

    kinds = {row["kind"] for row in rows}
    keys = {_MIDDLE: colour, _LAYERS: colour}
    keys |= {_RECORDED: QUIET} if _RECORDED in kinds else {}
    keys |= {RANDOM: RANDOM_COLOUR}
    x = alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(domain=[0, max(last, 1)], nice=False),
        axis=alt.Axis(labelExpr=SHORT_NUMBER, tickCount=6, labelOverlap="greedy", domain=False, grid=False),
    )

    def y(field: str) -> alt.Y:
        return alt.Y(
            f"{field}:Q",
            title="symmetry of layers",
            scale=alt.Scale(domain=list(domain), nice=False),
            axis=alt.Axis(format="~f", tickCount=5, domain=False),
        )

    base = alt.Chart().encode(x=x)
    shown = tooltip([("curve", "curve", None), ("step", "step", None), ("symmetry", "symmetry", "+.4f")])
    band = base.transform_filter("isValid(datum.low)").transform_aggregate(
        low="min(low)", high="max(high)", groupby=["step"]
    )
    parts = [keyed(band.mark_area(opacity=0.5), RANDOM, keys).encode(y=y("low"), y2="high:Q")]
    for kind, size, dim in ((_RECORDED, 2.0, 0.45), (_LAYERS, 1.0, 0.6), (_MIDDLE, 3.0, 1.0)):
        some = base.transform_filter(f"datum.kind === '{kind}' && isValid(datum.symmetry)")
        marks = some.mark_line(strokeWidth=size, opacity=dim, point=alt.OverlayMarkDef(size=18, opacity=dim))
        parts.append(
            keyed(marks, kind, keys).encode(y=y("symmetry"), detail="curve:N", order="step:Q", tooltip=shown)
        )
    words = "Symmetry of layers over steps: thin each layer, thick their median, pale the medians of recorded runs."
    return finished(alt.layer(*parts), data(rows, None), words, width, height)


def line(name: str, kind: str, run: Run) -> dict[str, str]:
    """One run's end, as text."""
    last = run.last or {}
    layers = runpoints.layers(run, [last]) if last else []
    found = values(layers, "symmetry")
    held_out = runpoints.number(last.get("held_out"))
    unigram = next((e.get("unigram") for e in run.record.events if e["event"] == "data"), None)
    unigram = runpoints.number(unigram)
    widest = _widest(layers)
    middle = runpoints.band_of_median(layers)
    return {
        "name": name,
        "kind": kind + (f", seed {run.seed}" if run.seed is not None else ""),
        "step": f"{last.get('step', 0):,}",
        "held_out": "–" if held_out is None else f"{held_out:.2f}",
        "unigram": "–" if unigram is None else f"{unigram:.2f}",
        "symmetry": f"{median(found):+.3f}" if found else "–",
        "range": _span(min(found, default=None), max(found, default=None)),
        "random": _span(widest["low"], widest["high"]),
        "random_median": _span(middle["low"], middle["high"]),
    }


def _span(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:+.3f} to {high:+.3f}"
