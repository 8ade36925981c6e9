"""Charts of a series: a score of every layer over training steps, or over relative distance.

Rows are those of `rows.groups` for all models of the series, whole layers only or not; heads are left out.
The parameter `now` is the value that the page shows at the moment, `now_stop` its place in the series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from qkform.records import Row
from qkform.report.charts import axis_domain
from qkform.report.look import (
    DEPTH,
    INK,
    QUIET,
    RANDOM,
    RANDOM_COLOUR,
    UNDEFINED,
    Axis,
    Field,
    Width,
    data,
    finished,
    keyed,
    tooltip,
)
from qkform.report.marks import plane_axes, zero_lines
from qkform.report.rows import points

if TYPE_CHECKING:
    import altair as alt

Over = Literal["step", "offset"]
_MEDIAN = "median of layers"
_ACROSS = {"step": "training step", "offset": "relative distance i − j"}
_NAMES = {"step": "step", "offset": "distance"}
# d3's own SI format gives all ticks the prefix of the largest: 0k, 0k, 1k, 16k
SHORT_NUMBER = (
    "datum.value >= 1e6 ? format(datum.value / 1e6, '~g') + 'M' : "
    "datum.value >= 1e4 ? format(datum.value / 1e3, '~g') + 'k' : format(datum.value, ',')"
)
_EARLY = 0.2  # half of the steps lie in this part of the axis: a linear one would squeeze them


def path(
    rows: Iterable[Mapping[str, Any]],
    axis: Axis,
    over: Over,
    *,
    now: int | None = None,
    width: Width = 480,
    height: int = 260,
    held_as: str | None = None,
) -> alt.LayerChart:
    """A score of every whole layer (thin lines, coloured by depth) and their median over steps or distances.

    For symmetry also the band of random weights, from the lowest layer's to the highest's. `now` marks a value.
    """
    import altair as alt

    rows = points(rows)
    stops = sorted({row[over] for row in rows if row[over] is not None})
    x = _across(over, stops, over)
    scale = alt.Scale(
        domain=list(axis_domain([row for row in rows if row["head"] is None], axis)), nice=False
    )
    y_axis = alt.Axis(format="~g", tickCount=5, domain=False)

    def y(field: str) -> alt.Y:
        return alt.Y(field, scale=scale, axis=y_axis, title=axis)

    keys = {_MEDIAN: INK} | ({RANDOM: RANDOM_COLOUR} if axis == "symmetry" else {})
    whole = alt.Chart().transform_filter("datum.head === null").encode(x=x)
    known = whole.transform_filter(f"isValid(datum.{axis})")
    lines = known.mark_line(strokeWidth=1.1, opacity=0.75)
    depth = depth_colour(rows)
    lines = lines.encode(y=y(f"{axis}:Q"), color=depth, detail=["module:N", "layer:N"], order="stop:Q")
    dots = known.mark_circle(size=16 if len(stops) <= 60 else 6, opacity=0.9)
    dots = dots.encode(
        y=y(f"{axis}:Q"), color=depth_colour(rows, legend=False), tooltip=tooltip(_fields(over))
    )
    middle = known.transform_aggregate(middle=f"median({axis})", groupby=[over, "stop"])
    middle = keyed(middle.mark_line(strokeWidth=2.5, clip=True), _MEDIAN, keys, symbol="stroke")
    middle = middle.encode(y=y("middle:Q"), order="stop:Q")
    parts = [_zero(y), _now(stops, over), lines, dots, middle]
    if axis == "symmetry":
        band = whole.transform_filter("isValid(datum.null_low)").transform_aggregate(
            low="min(null_low)", high="max(null_high)", groupby=[over]
        )
        band = keyed(band.mark_area(opacity=0.55, line=False), RANDOM, keys, legend=False)
        parts.insert(0, band.encode(y=y("low:Q"), y2="high:Q"))
    chart = alt.layer(*parts).resolve_scale(color="independent").add_params(*_params(now))
    words = f"{axis} of every layer over {_ACROSS[over]}, a line per layer, and the median of layers."
    return finished(chart, data(rows, held_as), words, width, height)


def plane_paths(
    rows: Iterable[Mapping[str, Any]],
    over: Over,
    *,
    now: int | None = None,
    now_stop: int = 0,
    width: Width = 640,
    height: int = 420,
    held_as: str | None = None,
) -> alt.LayerChart:
    """The way of every whole layer through the plane (lines), and where it is at the stop `now_stop` (marks)."""
    import altair as alt

    rows = points(rows)
    depth = depth_colour(rows)
    whole = alt.Chart().encode(color=depth, **plane_axes())
    whole = whole.transform_filter(
        "datum.head === null && isValid(datum.symmetry) && isValid(datum.directionality)"
    )
    lines = whole.mark_line(strokeWidth=1, opacity=0.4).encode(detail=["module:N", "layer:N"], order="stop:Q")
    here = whole.transform_filter("datum.stop === now_stop")
    here = here.mark_circle(size=120, opacity=0.95, stroke="white", strokeWidth=1)
    here = here.encode(tooltip=tooltip(_fields(over)))
    chart = alt.layer(*zero_lines(), lines, here).add_params(*_params(now, now_stop))
    words = f"The way of every layer through symmetry and directionality, both from -1 to 1, over {_ACROSS[over]}."
    return finished(chart, data(rows, held_as), words, width, height)


def spacing(stops: Sequence[int], over: Over) -> Literal["log", "linear"]:
    """How an axis spaces these values: log where a linear one would squeeze half of them into its first fifth.

    Distances are always spaced by their logarithm, on both sides of 0.
    """
    if over == "offset":
        return "log"
    low, high = min(stops, default=0), max(stops, default=0)
    if low < 0 or low == high:
        return "linear"
    return "log" if (median(stops) - low) / (high - low) < _EARLY else "linear"


def _scale(stops: Sequence[int], over: Over) -> alt.Scale:
    import altair as alt

    domain = [min(stops, default=0), max(stops, default=1)]
    if domain[0] == domain[1]:
        domain[1] += 1
    if spacing(stops, over) == "linear":
        return alt.Scale(domain=domain, nice=False)
    # symlog has a place for 0, and spaces what is above its constant by logarithm
    constant = 1 if over == "offset" else min((stop for stop in stops if stop > 0), default=1)
    return alt.Scale(type="symlog", constant=constant, domain=domain, nice=False)


def _axis(stops: Sequence[int], over: Over) -> alt.Axis:
    import altair as alt

    more: dict[str, Any] = {"values": list(stops)} if spacing(stops, over) == "log" else {"tickCount": 6}
    return alt.Axis(
        labelExpr=SHORT_NUMBER,
        labelAngle=0,
        labelOverlap="greedy",
        labelSeparation=8,
        domain=False,
        grid=False,
        **more,
    )


def depth_colour(rows: Sequence[Row], *, legend: bool = True) -> alt.Color:
    """The colour of a line: how deep its layer lies."""
    import altair as alt

    layers = sorted({row["layer"] for row in rows if row["layer"] is not None}) or [0]
    first, last = layers[0], max(layers[-1], layers[0] + 1)
    domain = [first + (last - first) * i / (len(DEPTH) - 1) for i in range(len(DEPTH))]
    shown = alt.Legend(
        title="layer",
        orient="top",
        gradientLength=90,
        gradientThickness=9,
        values=[layers[0], layers[-1]],
        format="d",
    )
    return alt.Color(
        "layer:Q",
        scale=alt.Scale(domain=domain, range=list(DEPTH), interpolate="rgb"),
        legend=shown if legend and len(layers) > 1 else None,
    )


def _zero(y: Any) -> alt.Chart:
    import altair as alt

    return alt.Chart(alt.InlineData(values=[{"at": 0}])).mark_rule(color=UNDEFINED).encode(y=y("at:Q"))


def _across(field: str, stops: Sequence[int], over: Over) -> alt.X:
    import altair as alt

    return alt.X(f"{field}:Q", title=_ACROSS[over], scale=_scale(stops, over), axis=_axis(stops, over))


def _now(stops: Sequence[int], over: Over) -> alt.Chart:
    """A line at the value that the page shows; none where there is none."""
    import altair as alt

    base = alt.Chart(alt.InlineData(values=[{"at": 0}])).transform_calculate(shown="now")
    base = base.transform_filter("isValid(datum.shown)")
    return base.mark_rule(color=QUIET, strokeDash=[3, 3]).encode(x=_across("shown", stops, over))


def _params(now: int | None, now_stop: int | None = None) -> list[Any]:
    import altair as alt

    return [
        alt.param(name="now", value=now),
        *([] if now_stop is None else [alt.param(name="now_stop", value=now_stop)]),
    ]


def _fields(over: Over) -> list[Field]:
    return [
        (over, _NAMES[over], None),
        ("module", "module", None),
        ("layer", "layer", None),
        ("symmetry", "symmetry", "+.4f"),
        ("symmetry_z", "std from random", "+.1f"),
        ("directionality", "directionality", "+.4f"),
        ("norm", "norm", ".4~g"),
        ("effective_rank", "effective rank", ".1f"),
        ("reason", "not defined", None),
    ]
