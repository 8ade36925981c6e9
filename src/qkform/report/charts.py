"""The charts, one function each: rows in, an altair chart out, for the page, a notebook, a PNG or an SVG.

Rows are those of a `ScoreTable` or of one `ModelScores`; every chart but `plane` takes the rows of one model,
one component, one kind of attention. `width` is in pixels, or "container" for that of the element around it.
`held_as` names a dataset that is given later (by the page, to all charts at once), in place of the rows.
No value of a row ever becomes a name, an expression or a title: rows are data and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from qkform.records import Row, values
from qkform.report.rows import points

if TYPE_CHECKING:
    import altair as alt

Axis = Literal["symmetry", "directionality"]
Width = int | Literal["container"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, QUIET, GRID, UNDEFINED = "#1f2933", "#616e7c", "#e4e7eb", "#b8bec6"
# Okabe and Ito's colours, told apart by colour-blind readers too, in an order that keeps neighbours apart.
MODEL_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4f88", "#b8860b", "#56a0d3", "#5b5b5b", "#7a4fbf")
# Two axes, two pairs of hues: purple to green never means what blue to orange means.
DIVERGING = {
    "symmetry": ("#5b2a86", "#a98bc4", "#f1f0ec", "#7dbf8f", "#1b6e3c"),
    "directionality": ("#1d4f91", "#7fa8d6", "#f1f0ec", "#eba661", "#b3510a"),
}
_TITLES = {
    "symmetry": "symmetry",
    "directionality": "directionality",
    "positive_energy": "attracting share of energy",
}
_RANDOM = "random weights ± 2 std"
_CROSS = "M-1,-1L1,1M-1,1L1,-1"
_Y_EXTENT = 36  # room for the labels left of every chart, so that layers stand below one another
_NICE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def model_colour(index: int) -> str:
    """The colour of the model at this place in the table; they repeat after `MODEL_COLOURS`."""
    return MODEL_COLOURS[index % len(MODEL_COLOURS)]


def plane(
    rows: Iterable[Mapping[str, Any]],
    *,
    colours: Mapping[str, str] | None = None,
    legend: bool = True,
    width: Width = 640,
    height: int = 460,
    held_as: str | None = None,
) -> alt.LayerChart:
    """Symmetry (up) against directionality (across), both [-1, 1]: whole layers large, heads small.

    Colour is `source`; the parameter `hidden` lists the sources to leave out.
    """
    import altair as alt

    rows = points(rows)
    names = list(dict.fromkeys(str(row.get("source", "")) for row in rows))
    colours = colours or {name: model_colour(i) for i, name in enumerate(names)}
    colour = alt.Color(
        "source:N",
        scale=alt.Scale(domain=list(colours), range=list(colours.values())),
        legend=alt.Legend(title=None, orient="bottom", columns=1, labelLimit=400) if legend else None,
    )
    scale = alt.Scale(domain=[-1, 1], nice=False)
    tens = alt.Axis(values=[-1, -0.5, 0, 0.5, 1], format="~g", domain=False)
    hidden = alt.param(name="hidden", value=[])
    base = alt.Chart().encode(
        x=alt.X(
            "directionality:Q",
            scale=scale,
            axis=tens,
            title="← keys   ·   directionality   ·   queries →",
        ),
        y=alt.Y("symmetry:Q", scale=scale, axis=tens, title="← skew   ·   symmetry   ·   symmetric →"),
        color=colour,
    )
    base = base.transform_filter("isValid(datum.symmetry) && isValid(datum.directionality)")
    base = base.transform_filter("indexof(hidden, datum.source) < 0")
    heads = base.transform_filter("datum.head !== null")
    heads = heads.mark_circle(size=16, opacity=0.4).encode(tooltip=_tooltip(named=True))
    layers = base.transform_filter("datum.head === null")
    layers = layers.mark_circle(size=130, opacity=0.9, stroke="white", strokeWidth=1)
    layers = layers.encode(tooltip=_tooltip(whole=True, named=True))
    zero = [
        alt.Chart(alt.InlineData(values=[{"at": 0}])).mark_rule(color=UNDEFINED).encode(**{c: "at:Q"})
        for c in ("x", "y")
    ]
    chart = alt.layer(*zero, heads, layers).add_params(hidden)
    words = (
        "Symmetry against directionality, both from -1 to 1; large marks are whole layers, small ones heads"
    )
    return _finished(chart, _data(rows, held_as), words, width, height)


def heatmap(
    rows: Iterable[Mapping[str, Any]],
    axis: Axis,
    *,
    width: Width = 480,
    height: int | None = None,
    held_as: str | None = None,
) -> alt.LayerChart:
    """One cell per layer (across) and head (down): the score as colour, a grey cross where it is not defined.

    The colours span `heatmap_limit(rows, axis)` on both sides of 0.
    """
    import altair as alt

    rows = points(rows)
    m = heatmap_limit(rows, axis)
    base = alt.Chart().transform_filter("datum.head !== null")
    base = base.encode(
        x=_layers(title="layer"),
        y=alt.Y(
            "head:O", title="head", axis=alt.Axis(labelOverlap="greedy", labelSeparation=2, domain=False)
        ),
        tooltip=_tooltip(),
    )
    colour = alt.Color(
        f"{axis}:Q",
        scale=alt.Scale(
            domain=[-m, -m / 2, 0, m / 2, m], range=list(DIVERGING[axis]), clamp=True, interpolate="rgb"
        ),
        legend=alt.Legend(
            title=_TITLES[axis],
            orient="top",
            gradientLength=180,
            gradientThickness=9,
            values=[-m, 0, m],
            format="~g",
        ),
    )
    cells = base.transform_filter(f"isValid(datum.{axis})").mark_rect(stroke="white", strokeWidth=0.6)
    undefined = base.transform_filter(f"!isValid(datum.{axis})")
    grey = undefined.mark_rect(color=UNDEFINED, stroke="white", strokeWidth=0.6)
    cross = undefined.mark_point(shape=_CROSS, size=30, color="white", strokeWidth=1)
    chart = alt.layer(cells.encode(color=colour), grey, cross)
    n_heads = len({row["head"] for row in rows if row["head"] is not None})
    words = f"Heat map of {axis} per layer and head, colours from -{m:g} to {m:g}."
    return _finished(chart, _data(rows, held_as), words, width, height or min(max(18 * n_heads, 90), 430))


def heatmap_limit(rows: Iterable[Row], axis: Axis) -> float:
    """Where the colours of a heat map end, on both sides of 0: 1 for directionality.

    For symmetry it is a round number that 99 in 100 heads stay within (the rest have the end colour), so that
    small scores show their structure.
    """
    if axis == "directionality":
        return 1.0
    found = sorted(abs(v) for v in values([row for row in rows if row["head"] is not None], axis))
    if not found:
        return 1.0
    reached = found[math.ceil(0.99 * len(found)) - 1]
    return next((nice for nice in _NICE if reached <= nice), 1.0)


def profile(
    rows: Iterable[Mapping[str, Any]],
    axis: Axis,
    *,
    colour: str = MODEL_COLOURS[0],
    width: Width = 480,
    height: int = 230,
    held_as: str | None = None,
) -> alt.LayerChart:
    """Layer by layer: the whole layer (line) and its heads (median and range).

    For symmetry also where random weights lie: the whole layer's null band, mean +- 2 std. Layers without the
    score have a cross at the foot.
    """
    import altair as alt

    rows = points(rows)
    low, high = (-1.0, 1.0) if axis == "directionality" else _domain(rows)
    keys = {"whole layer": colour, "median head": INK, "all heads": "#cbd2d9"}
    if axis == "symmetry":
        keys[_RANDOM] = "#f0b429"
    scale = alt.Scale(domain=[low, high], nice=False)
    y_axis = alt.Axis(format="~g", tickCount=5, domain=False)

    def y(field: str, **options: Any) -> alt.Y:
        return alt.Y(field, scale=scale, axis=y_axis, title=_TITLES[axis], **options)

    base = alt.Chart().encode(x=_layers(title="layer"))
    heads = base.transform_filter(f"datum.head !== null && isValid(datum.{axis})").transform_aggregate(
        heads="count()",
        median=f"median({axis})",
        least=f"min({axis})",
        most=f"max({axis})",
        groupby=["layer"],
    )
    heads = heads.encode(
        tooltip=[
            alt.Tooltip("layer:O", title="layer"),
            alt.Tooltip("heads:Q", title="heads"),
            *(alt.Tooltip(f"{f}:Q", title=f"{f} {axis}", format="+.4f") for f in ("least", "median", "most")),
        ]
    )
    whole = base.transform_filter("datum.head === null").encode(tooltip=_tooltip(whole=True))
    wide = {"band": 0.55}
    parts = [
        _keyed(heads.mark_bar(width=wide, cornerRadius=2), "all heads", keys).encode(
            y=y("least:Q"), y2="most:Q"
        ),
        _keyed(heads.mark_tick(thickness=2, orient="horizontal", width=wide), "median head", keys).encode(
            y=y("median:Q")
        ),
    ]
    if axis == "symmetry":
        band = whole.transform_filter("isValid(datum.null_low)")
        band = _keyed(band.mark_bar(width={"band": 1}, opacity=0.55, minBandSize=1), _RANDOM, keys)
        parts.insert(1, band.encode(y=y("null_low:Q"), y2="null_high:Q"))
    zero = alt.Chart(alt.InlineData(values=[{"at": 0}])).mark_rule(color=UNDEFINED).encode(y=y("at:Q"))
    line = whole.mark_line(strokeWidth=2, point=_dots(rows))
    line = _keyed(line, "whole layer", keys).encode(y=y(f"{axis}:Q"))
    chart = alt.layer(zero, *parts, line, _absent(whole, axis))
    words = f"Profile of {axis} by layer: whole layer as a line, median and range over heads as bars."
    return _finished(chart, _data(rows, held_as), words, width, height)


def signature(
    rows: Iterable[Mapping[str, Any]],
    *,
    colour: str = MODEL_COLOURS[0],
    width: Width = 480,
    height: int = 230,
    held_as: str | None = None,
) -> alt.LayerChart:
    """Layer by layer, the attracting share of the symmetric energy, [0, 1]: layers a line, heads dots."""
    import altair as alt

    rows = points(rows)
    keys = {"whole layer": colour, "single head": QUIET}
    y = alt.Y(
        "positive_energy:Q",
        scale=alt.Scale(domain=[0, 1], nice=False),
        axis=alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format=".0%", domain=False),
        title=_TITLES["positive_energy"],
    )
    base = alt.Chart().encode(x=_layers(title="layer"))
    whole = base.transform_filter("datum.head === null").encode(tooltip=_tooltip(whole=True))
    heads = base.transform_filter("datum.head !== null && isValid(datum.positive_energy)")
    dots = heads.mark_circle(size=18, opacity=0.45)
    dots = _keyed(dots, "single head", keys).encode(y=y, tooltip=_tooltip())
    half = alt.Chart(alt.InlineData(values=[{"at": 0.5}])).mark_rule(color=UNDEFINED)
    half = half.encode(y=alt.Y("at:Q", title=_TITLES["positive_energy"]))
    line = whole.mark_line(strokeWidth=2, point=_dots(rows))
    line = _keyed(line, "whole layer", keys).encode(y=y)
    chart = alt.layer(half, dots, line, _absent(whole, "positive_energy"))
    words = "Attracting share of the energy of the symmetric part by layer, from 0 to 1; one half is balance."
    return _finished(chart, _data(rows, held_as), words, width, height)


def _data(rows: Sequence[Row], held_as: str | None) -> Any:
    """The rows, or the name that stands for them: altair checks every value of rows, which takes its time."""
    import altair as alt

    return alt.InlineData(values=rows) if held_as is None else alt.NamedData(name=held_as)


def _layers(title: str) -> alt.X:
    import altair as alt

    axis = alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=8, domain=False, grid=False)
    return alt.X("layer:O", title=title, axis=axis, scale=alt.Scale(type="band", paddingInner=0))


def _keyed(marks: alt.Chart, name: str, colours: Mapping[str, str]) -> alt.Chart:
    """The marks in the colour of `name`, one of our own words, and a legend of all `colours`."""
    import altair as alt

    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    legend = alt.Legend(
        title=None, orient="top", columns=2, symbolType="square", symbolSize=70, symbolOpacity=1
    )
    marks = marks.transform_calculate(mark=f"'{name}'")
    return marks.encode(color=alt.Color("mark:N", scale=scale, legend=legend))


def _dots(rows: Sequence[Row]) -> alt.OverlayMarkDef:
    """The points on a line, smaller where there are many."""
    import altair as alt

    n_layers = len({row["layer"] for row in rows})
    return alt.OverlayMarkDef(size=42 if n_layers <= 40 else 14, filled=True, opacity=1)


def _absent(whole: alt.Chart, field: str) -> alt.Chart:
    """A cross at the foot of the chart where the layer's score is not defined."""
    import altair as alt

    absent = whole.transform_filter(f"!isValid(datum.{field})")
    absent = absent.mark_point(shape=_CROSS, size=30, color=QUIET, strokeWidth=1.5)
    return absent.encode(y=alt.value(alt.expr("height - 6")))


def _domain(rows: Sequence[Row]) -> tuple[float, float]:
    """The part of [-1, 1] that holds 0, every symmetry and every null band, with some air."""
    found = [0.0, *(v for c in ("symmetry", "null_low", "null_high") for v in values(rows, c))]
    low, high = max(min(found), -1.0), min(max(found), 1.0)
    air = 0.06 * (high - low) or 0.05
    return (max(low - air, -1.0) if low < 0 else low - air / 3), min(high + air, 1.0)


def _tooltip(*, whole: bool = False, named: bool = False) -> list[alt.Tooltip]:
    import altair as alt

    shown: list[tuple[str, str, str | None]] = [("source", "model", None)] if named else []
    shown += [("module", "module", None), ("layer", "layer", None)]
    if not whole:
        shown += [("head", "head", None), ("kv_head", "key head", None)]
    shown += [
        ("mask", "mask", None),
        ("symmetry", "symmetry", "+.4f"),
        ("symmetry_z", "std from random", "+.1f"),
        ("directionality", "directionality", "+.4f"),
        ("norm", "norm", ".4~g"),
        ("effective_rank", "effective rank", ".1f"),
        ("positive_energy", "attracting share", ".1%"),
        ("positive_directions", "attracting directions", None),
        ("negative_directions", "repelling directions", None),
        ("shared_by", "shared by layers", None),
        ("flags", "flags", None),
        ("reason", "not defined", None),
    ]
    return [
        alt.Tooltip(f"{field}:{'Q' if form else 'N'}", title=title, **({"format": form} if form else {}))
        for field, title, form in shown
    ]


def _finished(chart: Any, data: Any, words: str, width: Width, height: int) -> Any:
    """The look that all charts share. Marks carry no aria text: the table of the page says it better."""
    chart = (
        chart.properties(width=width, height=height, description=words)
        .configure(font=FONT, background="transparent", padding=2, autosize=_fit(width))
        .configure_view(stroke=None)
        .configure_mark(aria=False)
        .configure_axis(
            aria=False,
            labelColor=QUIET,
            titleColor=INK,
            titleFontWeight="normal",
            titleFontSize=12,
            labelFontSize=11,
            titlePadding=8,
            gridColor=GRID,
            tickColor=GRID,
            ticks=False,
            labelPadding=5,
        )
        .configure_axisY(minExtent=_Y_EXTENT)
        .configure_legend(
            aria=False,
            labelColor=QUIET,
            titleColor=INK,
            titleFontWeight="normal",
            labelFontSize=11,
            titleFontSize=12,
        )
    )
    chart.data = data  # last: altair copies a chart, rows and all, at every step
    return chart


def _fit(width: Width) -> dict[str, str]:
    return {"type": "fit-x" if width == "container" else "pad", "contains": "padding"}
