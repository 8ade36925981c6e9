"""The look that all charts share: colours, axes, legends, tooltips. Rows are data and nothing else to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from qkform.records import Row

if TYPE_CHECKING:
    import altair as alt

Axis = Literal["symmetry", "directionality"]
Width = int | Literal["container"]
Field = tuple[str, str, str | None]  # column, title, format of the number

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, QUIET, GRID, UNDEFINED = "#1f2933", "#616e7c", "#e4e7eb", "#b8bec6"
RANDOM_COLOUR, RANGE_COLOUR = "#f0b429", "#cbd2d9"
# Okabe and Ito's colours, told apart by colour-blind readers too, in an order that keeps neighbours apart.
MODEL_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4f88", "#b8860b", "#56a0d3", "#5b5b5b", "#7a4fbf")
# Two axes, two pairs of hues: purple to green never means what blue to orange means.
DIVERGING = {
    "symmetry": ("#5b2a86", "#a98bc4", "#f1f0ec", "#7dbf8f", "#1b6e3c"),
    "directionality": ("#1d4f91", "#7fa8d6", "#f1f0ec", "#eba661", "#b3510a"),
}
SIZES = ("#f1f0ec", "#ecd9a8", "#e0a070", "#b9574f", "#6f1d3f")  # from nothing up
DEPTH = ("#440154", "#3b528b", "#21918c", "#5ec962")  # first layer to last: viridis without its palest end
RANDOM = "random weights ± 2 std"
CROSS = "M-1,-1L1,1M-1,1L1,-1"
NICE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
_Y_EXTENT = 36  # room for the labels left of every chart, so that layers stand below one another


def model_colour(index: int) -> str:
    """The colour of the model at this place in the table; they repeat after `MODEL_COLOURS`."""
    return MODEL_COLOURS[index % len(MODEL_COLOURS)]


def data(rows: Sequence[Row], held_as: str | None) -> Any:
    """The rows, or the name that stands for them: altair checks every value of rows, which takes its time."""
    import altair as alt

    return alt.InlineData(values=rows) if held_as is None else alt.NamedData(name=held_as)


def layer_axis(rows: Sequence[Row]) -> alt.X:
    """The layers across. Rows of several models of a series leave the axis as it is when one is shown after another."""
    import altair as alt

    axis = alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=8, domain=False, grid=False)
    scale = alt.Scale(type="band", paddingInner=0, **steady(rows, "layer"))
    return alt.X("layer:O", title="layer", axis=axis, scale=scale)


def steady(rows: Sequence[Row], column: str) -> dict[str, list[int]]:
    """The domain of a column of whole numbers where the rows shown will change; nothing where they will not."""
    if len({row.get("stop") for row in rows}) < 2:
        return {}
    return {"domain": sorted({row[column] for row in rows if row[column] is not None})}


def keyed(
    marks: alt.Chart, name: str, colours: Mapping[str, str], *, symbol: str = "square", legend: bool = True
) -> alt.Chart:
    """The marks in the colour of `name`, one of our own words, and a legend of all `colours`."""
    import altair as alt

    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    shown = alt.Legend(
        title=None,
        orient="top",
        columns=2 if symbol == "square" else 1,
        symbolType=symbol,
        symbolSize=70 if symbol == "square" else 160,
        symbolOpacity=1,
        **({} if symbol == "square" else {"symbolStrokeWidth": 3}),
    )
    marks = marks.transform_calculate(mark=f"'{name}'")
    return marks.encode(color=alt.Color("mark:N", scale=scale, legend=shown if legend else None))


def dots(rows: Sequence[Row]) -> alt.OverlayMarkDef:
    """The points on a line, smaller where there are many."""
    import altair as alt

    n_layers = len({row["layer"] for row in rows})
    return alt.OverlayMarkDef(size=42 if n_layers <= 40 else 14, filled=True, opacity=1)


def absent(whole: alt.Chart, field: str) -> alt.Chart:
    """A cross at the foot of the chart where the layer's score is not defined."""
    import altair as alt

    absent = whole.transform_filter(f"!isValid(datum.{field})")
    absent = absent.mark_point(shape=CROSS, size=30, color=QUIET, strokeWidth=1.5)
    return absent.encode(y=alt.value(alt.expr("height - 6")))


def tooltip(fields: Sequence[Field]) -> list[alt.Tooltip]:
    import altair as alt

    return [
        alt.Tooltip(f"{field}:{'Q' if form else 'N'}", title=title, **({"format": form} if form else {}))
        for field, title, form in fields
    ]


def finished(chart: Any, data: Any, words: str, width: Width, height: int) -> Any:
    """The look that all charts share. Marks carry no aria text: the table of the page says it better."""
    # set in place: every method of altair's returns a copy of the whole chart, which took half the time of a page
    chart.width, chart.height, chart.description = width, height, words
    chart.config = {
        "font": FONT,
        "background": "transparent",
        "padding": 2,
        "autosize": _fit(width),
        "view": {"stroke": None},
        "mark": {"aria": False},
        "axis": {
            "aria": False,
            "labelColor": QUIET,
            "titleColor": INK,
            "titleFontWeight": "normal",
            "titleFontSize": 12,
            "labelFontSize": 11,
            "titlePadding": 8,
            "gridColor": GRID,
            "tickColor": GRID,
            "ticks": False,
            "labelPadding": 5,
        },
        "axisY": {"minExtent": _Y_EXTENT},
        "legend": {
            "aria": False,
            "labelColor": QUIET,
            "titleColor": INK,
            "titleFontWeight": "normal",
            "labelFontSize": 11,
            "titleFontSize": 12,
        },
    }
    chart.data = data
    return chart


def _fit(width: Width) -> dict[str, str]:
    return {"type": "fit-x" if width == "container" else "pad", "contains": "padding"}
