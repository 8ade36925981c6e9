"""What charts of scores and charts of differences are both made of: cells, profiles by layer, the plane's axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkform.records import Row
from qkform.report.look import (
    CROSS,
    INK,
    RANDOM_COLOUR,
    RANGE_COLOUR,
    UNDEFINED,
    Field,
    Width,
    absent,
    data,
    dots,
    finished,
    keyed,
    layer_axis,
    steady,
    tooltip,
)

if TYPE_CHECKING:
    import altair as alt


def cells(
    rows: Sequence[Row],
    column: str,
    *,
    title: str,
    limits: Sequence[float],
    colours: Sequence[str],
    fields: Sequence[Field],
    width: Width,
    height: int | None,
    held_as: str | None,
) -> alt.LayerChart:
    """One cell per layer (across) and head (down), the column as colour, a grey cross where it is not defined.

    `colours` are spread evenly from the least of `limits` to the greatest; the legend names every limit.
    """
    import altair as alt

    low, high = limits[0], limits[-1]
    domain = [low + (high - low) * i / (len(colours) - 1) for i in range(len(colours))]
    base = alt.Chart().transform_filter("datum.head !== null")
    base = base.encode(
        x=layer_axis(rows),
        y=alt.Y(
            "head:O",
            title="head",
            axis=alt.Axis(labelOverlap="greedy", labelSeparation=2, domain=False),
            scale=alt.Scale(**steady([row for row in rows if row["head"] is not None], "head")),
        ),
        tooltip=tooltip(fields),
    )
    colour = alt.Color(
        f"{column}:Q",
        scale=alt.Scale(domain=domain, range=list(colours), clamp=True, interpolate="rgb"),
        legend=alt.Legend(
            title=title,
            orient="top",
            gradientLength=180,
            gradientThickness=9,
            values=list(limits),
            format="~g",
        ),
    )
    known = base.transform_filter(f"isValid(datum.{column})").mark_rect(stroke="white", strokeWidth=0.6)
    undefined = base.transform_filter(f"!isValid(datum.{column})")
    grey = undefined.mark_rect(color=UNDEFINED, stroke="white", strokeWidth=0.6)
    cross = undefined.mark_point(shape=CROSS, size=30, color="white", strokeWidth=1)
    chart = alt.layer(known.encode(color=colour), grey, cross)
    n_heads = len({row["head"] for row in rows if row["head"] is not None})
    words = f"Heat map of {title} per layer and head, colours from {low:g} to {high:g}."
    return finished(chart, data(rows, held_as), words, width, height or min(max(18 * n_heads, 90), 430))


def by_layer(
    rows: Sequence[Row],
    column: str,
    *,
    title: str,
    domain: tuple[float, float],
    band: str | None,
    colour: str,
    fields: Sequence[Field],
    width: Width,
    height: int,
    held_as: str | None,
) -> alt.LayerChart:
    """The whole layer as a line, its heads as a bar from least to most with a tick at their median.

    `band` is the name in the legend of the band from `null_low` to `null_high` of the whole layers. Layers
    without a value have a cross at the foot.
    """
    import altair as alt

    keys = {"whole layer": colour, "median head": INK, "all heads": RANGE_COLOUR}
    if band is not None:
        keys[band] = RANDOM_COLOUR
    scale = alt.Scale(domain=list(domain), nice=False)
    y_axis = alt.Axis(format="~g", tickCount=5, domain=False)

    def y(field: str) -> alt.Y:
        return alt.Y(field, scale=scale, axis=y_axis, title=title)

    base = alt.Chart().encode(x=layer_axis(rows))
    heads = base.transform_filter(f"datum.head !== null && isValid(datum.{column})").transform_aggregate(
        heads="count()",
        median=f"median({column})",
        least=f"min({column})",
        most=f"max({column})",
        groupby=["layer"],
    )
    heads = heads.encode(
        tooltip=[
            alt.Tooltip("layer:O", title="layer"),
            alt.Tooltip("heads:Q", title="heads"),
            *(
                alt.Tooltip(f"{f}:Q", title=f"{f} {title}", format="+.4f")
                for f in ("least", "median", "most")
            ),
        ]
    )
    whole = base.transform_filter("datum.head === null").encode(tooltip=tooltip(fields))
    wide = {"band": 0.55}
    parts = [
        keyed(heads.mark_bar(width=wide, cornerRadius=2), "all heads", keys).encode(
            y=y("least:Q"), y2="most:Q"
        ),
        keyed(heads.mark_tick(thickness=2, orient="horizontal", width=wide), "median head", keys).encode(
            y=y("median:Q")
        ),
    ]
    if band is not None:
        random = whole.transform_filter("isValid(datum.null_low)")
        random = keyed(random.mark_bar(width={"band": 1}, opacity=0.55, minBandSize=1), band, keys)
        parts.insert(1, random.encode(y=y("null_low:Q"), y2="null_high:Q"))
    zero = alt.Chart(alt.InlineData(values=[{"at": 0}])).mark_rule(color=UNDEFINED).encode(y=y("at:Q"))
    line = whole.mark_line(strokeWidth=2, point=dots(rows))
    line = keyed(line, "whole layer", keys).encode(y=y(f"{column}:Q"))
    chart = alt.layer(zero, *parts, line, absent(whole, column))
    words = f"Profile of {title} by layer: whole layer as a line, median and range over heads as bars."
    return finished(chart, data(rows, held_as), words, width, height)


def plane_axes(x: str = "directionality", y: str = "symmetry") -> dict[str, Any]:
    """The encodings of the plane: directionality across, symmetry up, both [-1, 1]."""
    import altair as alt

    scale = alt.Scale(domain=[-1, 1], nice=False)
    ticks = alt.Axis(values=[-1, -0.5, 0, 0.5, 1], format="~g", domain=False)
    return {
        "x": alt.X(f"{x}:Q", scale=scale, axis=ticks, title="← keys   ·   directionality   ·   queries →"),
        "y": alt.Y(f"{y}:Q", scale=scale, axis=ticks, title="← skew   ·   symmetry   ·   symmetric →"),
    }


def zero_lines() -> list[alt.Chart]:
    """Where both scores of the plane are 0."""
    import altair as alt

    return [
        alt.Chart(alt.InlineData(values=[{"at": 0}])).mark_rule(color=UNDEFINED).encode(**{c: "at:Q"})
        for c in ("x", "y")
    ]
