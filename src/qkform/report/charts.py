"""The charts, one function each: rows in, an altair chart out, for the page, a notebook, a PNG or an SVG.

Rows are those of a `ScoreTable` or of one `ModelScores`; every chart but `plane` takes the rows of one model,
one component, one kind of attention, one part of the score. `width` is in pixels, or "container" for that of the
element around it.
`held_as` names a dataset that is given later (by the page, to all charts at once), in place of the rows.
No text of a row ever becomes a name, an expression or a title: rows are data and nothing else.
Charts of several models that belong together are in `paths`, those of differences in `changes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qkform.records import Row, values
from qkform.report.look import (
    DIVERGING,
    MODEL_COLOURS,
    NICE,
    QUIET,
    RANDOM,
    UNDEFINED,
    Axis,
    Field,
    Width,
    absent,
    data,
    dots,
    finished,
    keyed,
    layer_axis,
    model_colour,
    tooltip,
)
from qkform.report.marks import by_layer, cells, plane_axes, zero_lines
from qkform.report.rows import points

if TYPE_CHECKING:
    import altair as alt

__all__ = ["UNDEFINED", "heatmap", "heatmap_limit", "plane", "profile", "signature"]

_ENERGY = "attracting share of energy"


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
    hidden = alt.param(name="hidden", value=[])
    base = alt.Chart().encode(color=colour, **plane_axes())
    base = base.transform_filter("isValid(datum.symmetry) && isValid(datum.directionality)")
    base = base.transform_filter("indexof(hidden, datum.source) < 0")
    heads = base.transform_filter("datum.head !== null")
    heads = heads.mark_circle(size=16, opacity=0.4).encode(tooltip=tooltip(_fields(named=True)))
    layers = base.transform_filter("datum.head === null")
    layers = layers.mark_circle(size=130, opacity=0.9, stroke="white", strokeWidth=1)
    layers = layers.encode(tooltip=tooltip(_fields(whole=True, named=True)))
    chart = alt.layer(*zero_lines(), heads, layers).add_params(hidden)
    words = (
        "Symmetry against directionality, both from -1 to 1; large marks are whole layers, small ones heads"
    )
    return finished(chart, data(rows, held_as), words, width, height)


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
    rows = points(rows)
    m = heatmap_limit(rows, axis)
    return cells(
        rows,
        axis,
        title=axis,
        limits=(-m, 0, m),
        colours=DIVERGING[axis],
        fields=_fields(),
        width=width,
        height=height,
        held_as=held_as,
    )


def heatmap_limit(rows: Iterable[Row], axis: Axis) -> float:
    """Where the colours of a heat map end, on both sides of 0: 1 for directionality.

    For symmetry it is a round number that 99 in 100 heads stay within (the rest have the end colour), so that
    small scores show their structure.
    """
    return 1.0 if axis == "directionality" else limit_of(rows, axis)


def limit_of(rows: Iterable[Row], column: str) -> float:
    """A round number, at most 1, that the sizes of 99 in 100 heads' values stay within; 1 where there are none."""
    found = sorted(abs(v) for v in values([row for row in rows if row["head"] is not None], column))
    if not found:
        return 1.0
    reached = found[math.ceil(0.99 * len(found)) - 1]
    return next((nice for nice in NICE if reached <= nice), 1.0)


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
    rows = points(rows)
    return by_layer(
        rows,
        axis,
        title=axis,
        domain=axis_domain(rows, axis),
        band=RANDOM if axis == "symmetry" else None,
        colour=colour,
        fields=_fields(whole=True),
        width=width,
        height=height,
        held_as=held_as,
    )


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
        title=_ENERGY,
    )
    base = alt.Chart().encode(x=layer_axis(rows))
    whole = base.transform_filter("datum.head === null").encode(tooltip=tooltip(_fields(whole=True)))
    heads = base.transform_filter("datum.head !== null && isValid(datum.positive_energy)")
    single = heads.mark_circle(size=18, opacity=0.45)
    single = keyed(single, "single head", keys).encode(y=y, tooltip=tooltip(_fields()))
    half = alt.Chart(alt.InlineData(values=[{"at": 0.5}])).mark_rule(color=UNDEFINED)
    half = half.encode(y=alt.Y("at:Q", title=_ENERGY))
    line = whole.mark_line(strokeWidth=2, point=dots(rows))
    line = keyed(line, "whole layer", keys).encode(y=y)
    chart = alt.layer(half, single, line, absent(whole, "positive_energy"))
    words = "Attracting share of the energy of the symmetric part by layer, from 0 to 1; one half is balance."
    return finished(chart, data(rows, held_as), words, width, height)


def axis_domain(rows: Sequence[Row], axis: Axis) -> tuple[float, float]:
    """Where a chart of one score by layer ends: all of [-1, 1] for directionality, what is needed for symmetry."""
    if axis == "directionality":
        return -1.0, 1.0
    return domain_of(rows, ("symmetry", "null_low", "null_high"))


def domain_of(rows: Sequence[Row], columns: Sequence[str], limit: float = 1.0) -> tuple[float, float]:
    """The part of [-limit, limit] that holds 0 and every value of the columns, with some air."""
    found = [0.0, *(v for c in columns for v in values(rows, c))]
    low, high = max(min(found), -limit), min(max(found), limit)
    air = 0.06 * (high - low) or 0.05
    return (max(low - air, -limit) if low < 0 else low - air / 3), min(high + air, limit)


def _fields(*, whole: bool = False, named: bool = False) -> list[Field]:
    shown: list[Field] = [("source", "model", None)] if named else []
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
    return shown
