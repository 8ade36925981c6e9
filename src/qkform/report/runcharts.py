"""Charts of training runs over steps and against the loss. Points of `runpoints` in, an altair chart out.

With `colours` (run -> colour) a curve is a run; without, it is a layer of one run, from dark (first) to light (last).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qkform.records import Row, values
from qkform.report.charts import domain_of
from qkform.report.look import (
    INK,
    QUIET,
    RANDOM,
    RANDOM_COLOUR,
    UNDEFINED,
    Field,
    Width,
    finished,
    keyed,
    tooltip,
)
from qkform.report.paths import SHORT_NUMBER, depth_colour

if TYPE_CHECKING:
    import altair as alt

Colours = Mapping[str, str]
TITLES = {
    "symmetry": "symmetry",
    "directionality": "directionality",
    "norm": "norm of W",
    "self_norm": "norm of v, mean of heads",
    "normalised_entropy": "normalised entropy",
    "largest": "largest weight",
    "excess": "excess over the null",
}
HEADINGS = {name: title[0].upper() + title[1:] for name, title in TITLES.items()}
_MIDDLE, _HEADS, _WHOLE = "median of layers", "heads", "whole layer"
_NULL = "null ± 2 std, one head"
_ONE_POINT = 40  # points of a curve up to which each is marked


def losses(
    points: Sequence[Row],
    colours: Colours,
    marks: Sequence[Row] = (),
    *,
    width: Width = 640,
    height: int = 300,
    legend: bool = False,
) -> alt.LayerChart:
    """The loss over steps: training (thin), held-out (thick), a curve of either per run; dashes where one resumed."""
    import altair as alt

    y = _y("loss", "loss (nats)", None)
    base = alt.Chart().encode(
        x=_steps(points), y=y, color=_run_colour(colours, legend=legend), detail="kind:N"
    )
    shown = tooltip(
        [("run", "run", None), ("kind", "loss", None), ("step", "step", None), ("loss", "nats", ".5~g")]
    )
    parts = []
    for kind, size, dim in (("training", 1.0, 0.45), ("held-out", 2.2, 1.0)):
        some = base.transform_filter(f"datum.kind === '{kind}'")
        parts.append(some.mark_line(strokeWidth=size, opacity=dim).encode(order="step:Q"))
        parts.append(some.mark_circle(size=_dot(points, "run"), opacity=dim).encode(tooltip=shown))
    chart = alt.layer(*_resumed(marks, points), *parts)
    words = "Training loss (thin) and held-out loss (thick) over steps, in nats, a curve per run."
    return _drawn(chart, points, words, width, height)


def over_steps(
    points: Sequence[Row],
    measure: str,
    colours: Colours | None = None,
    marks: Sequence[Row] = (),
    *,
    width: Width = 480,
    height: int = 250,
    legend: bool = False,
) -> alt.LayerChart:
    """A measure over steps: of every whole layer and their median, or of every run; symmetry with its null band."""
    import altair as alt

    banded = measure == "symmetry" and bool(values(points, "low"))
    kept = _with(points, measure, "low", "high") if banded else _with(points, measure)
    y = _y(measure, TITLES[measure], _domain(kept, measure, banded))
    base = alt.Chart().encode(x=_steps(kept))
    known = base.transform_filter(f"isValid(datum.{measure})")
    shown = tooltip(_fields(measure, colours))
    keys = ({} if colours else {_MIDDLE: INK}) | ({RANDOM: RANDOM_COLOUR} if banded else {})
    parts = [*_zero(y, measure), *_resumed(marks, kept)]
    if banded:
        band = base.transform_filter("isValid(datum.low)")
        if colours is None:
            band = band.transform_aggregate(low="min(low)", high="max(high)", groupby=["step"])
        # the bands of several runs lie over one another; together they are as dense as one
        dense = 1 - 0.45 ** (1 / max(len(colours or ()), 1))
        area = keyed(band.mark_area(opacity=dense), RANDOM, keys, legend=bool(colours))
        detail = {} if colours is None else {"detail": "run:N"}
        parts.insert(0, area.encode(y=_again(y, "low"), y2="high:Q", **detail))
    colour, quiet, detail_of = _colouring(kept, colours, legend)
    thick = 1.1 if colours is None else 2.0
    line = known.mark_line(strokeWidth=thick, opacity=0.8)
    parts.append(line.encode(y=y, color=colour, detail=detail_of, order="step:Q"))
    dots = known.mark_circle(size=_dot(kept, detail_of), opacity=0.9)
    parts.append(dots.encode(y=y, color=quiet, tooltip=shown))
    if colours is None:
        middle = known.transform_aggregate(middle=f"median({measure})", groupby=["step"])
        middle = keyed(middle.mark_line(strokeWidth=2.5, clip=True), _MIDDLE, keys, symbol="stroke")
        parts.append(middle.encode(y=_again(y, "middle"), order="step:Q"))
    chart = alt.layer(*parts).resolve_scale(color="independent")
    words = f"{TITLES[measure]} over training steps, a curve per {'run' if colours else 'layer'}."
    return _drawn(chart, kept, words, width, height)


def of_heads(
    points: Sequence[Row],
    measure: str,
    marks: Sequence[Row] = (),
    *,
    width: Width = 480,
    height: int = 210,
    domain: tuple[float, float] | None = None,
) -> alt.LayerChart:
    """A measure of one layer over steps: its heads (thin), the whole layer (thick), and its null band for symmetry."""
    import altair as alt

    banded = measure == "symmetry" and bool(values(points, "low"))
    kept = _with(points, measure, "low", "high") if banded else _with(points, measure)
    y = _y(measure, TITLES[measure], domain or _domain(kept, measure, banded))
    keys = {_WHOLE: INK, _HEADS: "#56a0d3"} | ({RANDOM: RANDOM_COLOUR} if banded else {})
    base = alt.Chart().encode(x=_steps(kept))
    known = base.transform_filter(f"isValid(datum.{measure})")
    shown = tooltip([("step", "step", None), ("head", "head", None), (measure, TITLES[measure], ".4~g")])
    single, whole = (
        known.transform_filter("datum.head !== null"),
        known.transform_filter("datum.head === null"),
    )
    lines = keyed(single.mark_line(strokeWidth=0.9, opacity=0.75), _HEADS, keys)
    dots = keyed(single.mark_circle(size=_dot(kept, "head"), opacity=0.9), _HEADS, keys)
    thick = keyed(whole.mark_line(strokeWidth=2.2), _WHOLE, keys)
    ends = keyed(whole.mark_circle(size=_dot(kept, "head"), opacity=1), _WHOLE, keys)
    parts = [
        *_zero(y, measure),
        *_resumed(marks, kept),
        lines.encode(y=y, detail="head:N", order="step:Q"),
        dots.encode(y=y, tooltip=shown),
        thick.encode(y=y, order="step:Q"),
        ends.encode(y=y, tooltip=shown),
    ]
    if banded:
        band = base.transform_filter("datum.head === null && isValid(datum.low)").mark_area(opacity=0.55)
        parts.insert(0, keyed(band, RANDOM, keys).encode(y=_again(y, "low"), y2="high:Q"))
    words = f"{TITLES[measure]} of one layer over training steps, thin lines its heads, the thick one the whole layer."
    return _drawn(alt.layer(*parts), kept, words, width, height)


def against_loss(
    points: Sequence[Row],
    measure: str,
    loss: str,
    colours: Colours | None = None,
    *,
    width: Width = 480,
    height: int = 260,
    legend: bool = False,
) -> alt.LayerChart:
    """A measure (up) against the loss (across, falling to the right), a curve per layer or run; a circle at the end."""
    import altair as alt

    kept = [row for row in points if row["loss"] is not None and row[measure] is not None]
    found = values(kept, "loss") or [0.0, 1.0]
    low, high = min(found), max(found)
    air = 0.03 * (high - low) or 0.05
    title = f"{'held-out' if loss == 'held_out' else 'training'} loss (nats), falling →"
    x = alt.X(
        "loss:Q",
        title=title,
        scale=alt.Scale(domain=[low - air, high + air], nice=False, reverse=True),
        axis=alt.Axis(format="~f", tickCount=6, domain=False, grid=False),
    )
    colour, quiet, detail_of = _colouring(kept, colours, legend)
    base = alt.Chart().encode(x=x, y=_y(measure, TITLES[measure], _unit(kept, measure)), detail=detail_of)
    line = base.mark_line(strokeWidth=1.1 if colours is None else 1.8, opacity=0.8)
    shown = tooltip([*_fields(measure, colours), ("loss", "loss", ".5~g")])
    last = {row["run"]: row["step"] for row in kept}  # points come in order of their steps
    ends = [row | {"last": row["step"] == last[row["run"]]} for row in kept]
    tips = base.transform_filter("datum.last").mark_point(size=70, strokeWidth=1.8, opacity=1)
    dots = base.mark_circle(size=_dot(kept, detail_of), opacity=0.8)
    chart = alt.layer(
        line.encode(color=colour, order="step:Q"),
        dots.encode(color=quiet, tooltip=shown),
        tips.encode(color=quiet, tooltip=shown),
    ).resolve_scale(color="independent")
    words = f"{TITLES[measure]} against the loss, a curve per {'run' if colours else 'layer'}, from left to right."
    return _drawn(chart, ends, words, width, height)


def excess(
    points: Sequence[Row],
    colours: Colours | None = None,
    marks: Sequence[Row] = (),
    *,
    width: Width = 480,
    height: int = 250,
    legend: bool = False,
) -> alt.LayerChart:
    """The excess of the conflict cosine over its null, a curve per layer, and where one head's null lies."""
    import altair as alt

    y = _y("excess", TITLES["excess"], _domain(points, "excess", True))
    base = alt.Chart().encode(x=_steps(points))
    keys = {_NULL: RANDOM_COLOUR}
    band = base.transform_filter("isValid(datum.low)").transform_aggregate(
        low="min(low)", high="max(high)", groupby=["step"]
    )
    band = keyed(band.mark_area(opacity=0.4), _NULL, keys).encode(y=_again(y, "low"), y2="high:Q")
    colour, quiet, _ = _colouring(points, colours, legend)
    detail = ["run:N", "layer:N"]
    lines = base.mark_line(strokeWidth=1.2, opacity=0.85).encode(
        y=y, color=colour, detail=detail, order="step:Q"
    )
    shown = tooltip(
        [*_fields("excess", colours), ("layer", "layer", None)] if colours else _fields("excess", None)
    )
    dots = base.mark_circle(size=_dot(points, "layer"), opacity=0.9).encode(y=y, color=quiet, tooltip=shown)
    chart = alt.layer(band, *_zero(y, "excess"), *_resumed(marks, points), lines, dots)
    chart = chart.resolve_scale(color="independent")
    words = "Excess of the conflict cosine over its null, over steps, a curve per layer."
    return _drawn(chart, points, words, width, height)


def against_null(
    points: Sequence[Row],
    colours: Colours | None = None,
    *,
    width: Width = 480,
    height: int = 280,
    legend: bool = False,
) -> alt.LayerChart:
    """The conflict cosine (up) against its null's mean (across), a dot per head and step; on the line: no conflict."""
    import altair as alt

    kept = [row for row in points if row["null_mean"] is not None]
    found = [v for row in kept for v in (row["cosine"], row["null_mean"])] or [-1.0, 0.0]
    air = 0.05 * (max(found) - min(found)) or 0.05
    ends = [max(min(found) - air, -1.0), min(max(found) + air, 1.0)]
    scale = alt.Scale(domain=ends, nice=False)
    axis = alt.Axis(format="~f", tickCount=5, domain=False)
    colour, _, _ = _colouring(kept, colours, legend)
    base = alt.Chart().encode(
        x=alt.X("null_mean:Q", title="mean of the null", scale=scale, axis=axis),
        y=alt.Y("cosine:Q", title="cosine", scale=scale, axis=axis),
        color=colour,
    )
    shown = tooltip(
        [("run", "run", None), ("step", "step", None), ("layer", "layer", None), ("head", "head", None)]
        + [
            (name, title, "+.4f")
            for name, title in (("cosine", "cosine"), ("null_mean", "null"), ("excess", "excess"))
        ]
        + [("null_sd", "std of the null", ".4f")]
    )
    dots = base.mark_circle(size=18, opacity=0.55).encode(tooltip=shown)
    line = alt.Chart(alt.InlineData(values=[{"null_mean": v, "cosine": v} for v in ends]))
    line = line.mark_line(color=QUIET, strokeDash=[4, 3], strokeWidth=1)
    line = line.encode(x=alt.X("null_mean:Q", scale=scale), y=alt.Y("cosine:Q", scale=scale))
    words = "Conflict cosine against the mean of its null, a dot per head and step; on the dashed line they agree."
    return _drawn(alt.layer(line, dots), kept, words, width, height)


def shared_domain(points: Sequence[Row], measure: str) -> tuple[float, float] | None:
    """One axis for the charts of several layers, so that they can be compared; None without a value."""
    return _domain(points, measure, measure == "symmetry") if values(points, measure) else None


def _drawn(chart: Any, points: Sequence[Row], words: str, width: Width, height: int) -> Any:
    """The look of all charts, and the points beside the chart under a name: altair checks every value inside."""
    import altair as alt

    chart = finished(chart, alt.NamedData(name="points"), words, width, height)
    chart.datasets = {"points": list(points)}
    return chart


def _with(points: Sequence[Row], *columns: str) -> list[Row]:
    """The rows that have any of these, without the other measures: they stand in the page once per chart."""
    names = ("run", "step", "layer", "head", "module", *columns)
    return [
        {name: row[name] for name in names if name in row}
        for row in points
        if any(row.get(column) is not None for column in columns)
    ]


def _steps(points: Sequence[Row]) -> alt.X:
    import altair as alt

    found = [row["step"] for row in points]
    low, high = min(found, default=0), max(found, default=1)
    return alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(domain=[low, high if high > low else low + 1], nice=False),
        axis=alt.Axis(labelExpr=SHORT_NUMBER, tickCount=6, labelOverlap="greedy", domain=False, grid=False),
    )


def _y(field: str, title: str, domain: tuple[float, float] | None) -> alt.Y:
    import altair as alt

    scale = alt.Scale(zero=False, nice=True) if domain is None else alt.Scale(domain=list(domain), nice=False)
    return alt.Y(
        f"{field}:Q", title=title, scale=scale, axis=alt.Axis(format="~f", tickCount=5, domain=False)
    )


def _again(y: alt.Y, field: str) -> alt.Y:
    """The same axis for another column."""
    again = y.copy()
    again.shorthand = f"{field}:Q"
    return again


def _domain(points: Sequence[Row], measure: str, banded: bool) -> tuple[float, float] | None:
    if measure in ("normalised_entropy", "largest"):
        return _unit(points, measure)
    if measure in ("norm", "self_norm"):
        return None
    return domain_of(points, (measure, *(("low", "high") if banded else ())))


def _unit(points: Sequence[Row], measure: str) -> tuple[float, float]:
    """The part of [0, 1] that is used, with some air."""
    found = values(points, measure) or [0.0, 1.0]
    air = 0.06 * (max(found) - min(found)) or 0.05
    return max(min(found) - air, 0.0), min(max(found) + air, 1.0)


def _zero(y: alt.Y, measure: str) -> list[alt.Chart]:
    """A line at 0 for what has both signs."""
    import altair as alt

    if measure not in ("symmetry", "directionality", "excess"):
        return []
    rule = alt.Chart(alt.InlineData(values=[{"at": 0}])).mark_rule(color=UNDEFINED)
    return [rule.encode(y=_again(y, "at"))]


def _resumed(marks: Sequence[Row], points: Sequence[Row]) -> list[alt.Chart]:
    """A dashed line where a run went on after a stop."""
    import altair as alt

    if not marks:
        return []
    shown = tooltip([("run", "run", None), ("step", "step", None), ("said", "event", None)])
    rule = alt.Chart(alt.InlineData(values=list(marks))).mark_rule(
        color=QUIET, strokeDash=[2, 3], strokeWidth=1
    )
    return [rule.encode(x=_steps(points), tooltip=shown)]


def _colouring(points: Sequence[Row], colours: Colours | None, legend: bool) -> tuple[Any, Any, str]:
    """(colour with its legend, the same without one, what a curve is)."""
    if colours is None:
        return depth_colour(points), depth_colour(points, legend=False), "layer:N"
    return _run_colour(colours, legend=legend), _run_colour(colours, legend=False), "run:N"


def _run_colour(colours: Colours, *, legend: bool) -> alt.Color:
    import altair as alt

    shown = alt.Legend(title=None, orient="bottom", columns=1, labelLimit=500, symbolType="stroke")
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color("run:N", scale=scale, legend=shown if legend else None)


def _dot(points: Sequence[Row], curve: str) -> int:
    """The size of the dots on curves, smaller where they are close."""
    names = {row.get(curve.removesuffix(":N")) for row in points}
    each = len(points) / max(len(names), 1)
    return 22 if each <= _ONE_POINT else 5


def _fields(measure: str, colours: Colours | None) -> list[Field]:
    shown: list[Field] = (
        [("run", "run", None)] if colours else [("module", "module", None), ("layer", "layer", None)]
    )
    return [
        *shown,
        ("step", "step", None),
        (measure, TITLES[measure], "+.4f" if measure != "norm" else ".4~g"),
    ]
