"""Charts of a `DiffTable`: how much every form changed, whether it became more symmetric, and which way it went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from qkform.records import Row, values
from qkform.report.charts import domain_of
from qkform.report.look import DIVERGING, MODEL_COLOURS, QUIET, SIZES, Field, Width, data, finished, tooltip
from qkform.report.marks import by_layer, cells, plane_axes, zero_lines
from qkform.report.rows import diff_points

if TYPE_CHECKING:
    import altair as alt

Change = Literal["symmetry_change", "relative_change"]
CHANGES: dict[Change, str] = {"symmetry_change": "change of symmetry", "relative_change": "relative change"}
RANDOM_CHANGE = "noise on the weights ± 2 std"


def heatmap(
    rows: Iterable[Mapping[str, Any]],
    column: Change,
    *,
    width: Width = 480,
    height: int | None = None,
    held_as: str | None = None,
) -> alt.LayerChart:
    """One cell per layer and head: the change of symmetry around 0, or the relative change from 0 up."""
    rows = diff_points(rows)
    limit = heatmap_limit(rows, column)
    diverging = column == "symmetry_change"
    return cells(
        rows,
        column,
        title=CHANGES[column],
        limits=(-limit, 0, limit) if diverging else (0, limit),
        colours=DIVERGING["symmetry"] if diverging else SIZES,
        fields=_fields(),
        width=width,
        height=height,
        held_as=held_as,
    )


def heatmap_limit(rows: Iterable[Row], column: Change) -> float:
    """Where the colours end. Round, and 99 in 100 heads stay within; a relative change has no bound of its own."""
    found = sorted(abs(v) for v in values([row for row in rows if row["head"] is not None], column))
    reached = found[math.ceil(0.99 * len(found)) - 1] if found else 0.0
    return _rounded_up(reached) if reached > 0 else 1.0


def profile(
    rows: Iterable[Mapping[str, Any]],
    column: Change,
    *,
    colour: str = MODEL_COLOURS[0],
    width: Width = 480,
    height: int = 230,
    held_as: str | None = None,
) -> alt.LayerChart:
    """Layer by layer: the whole layer (line) and its heads (median and range), for symmetry with its null band."""
    rows = diff_points(rows)
    if column == "symmetry_change":
        domain = domain_of(rows, ("symmetry_change", "null_low", "null_high"), limit=2.0)
    else:
        domain = (0.0, 1.06 * max(values(rows, column), default=1.0) or 1.0)
    return by_layer(
        rows,
        column,
        title=CHANGES[column],
        domain=domain,
        band=RANDOM_CHANGE if column == "symmetry_change" else None,
        colour=colour,
        fields=_fields(whole=True),
        width=width,
        height=height,
        held_as=held_as,
    )


def arrows(
    rows: Iterable[Mapping[str, Any]],
    *,
    colour: str = MODEL_COLOURS[0],
    width: Width = 640,
    height: int = 460,
    held_as: str | None = None,
) -> alt.LayerChart:
    """The plane of symmetry and directionality: an arrow from a to b for every whole layer, thin lines for heads."""
    import altair as alt

    rows = diff_points(rows)
    base = alt.Chart().encode(**plane_axes("directionality_a", "symmetry_a"))
    for column in ("symmetry_a", "symmetry_b", "directionality_a", "directionality_b"):
        base = base.transform_filter(f"isValid(datum.{column})")
    ends = {"x2": "directionality_b:Q", "y2": "symmetry_b:Q"}
    heads = base.transform_filter("datum.head !== null")
    heads = heads.mark_rule(color=QUIET, strokeWidth=0.8, opacity=0.4).encode(
        **ends, tooltip=tooltip(_fields())
    )
    whole = base.transform_filter("datum.head === null")
    shafts = whole.mark_rule(color=colour, strokeWidth=2).encode(**ends, tooltip=tooltip(_fields(whole=True)))
    starts = whole.mark_point(filled=True, fill="white", stroke=colour, strokeWidth=1.5, size=34)
    # both axes span 2 units; a triangle points up, and angles go clockwise
    turn = "atan2(datum.directionality_change * width, datum.symmetry_change * height) * 180 / PI"
    tips = whole.mark_point(
        shape="triangle-up", filled=True, color=colour, size=90, angle=alt.expr(turn), opacity=1
    )
    tips = tips.encode(**plane_axes("directionality_b", "symmetry_b"), tooltip=tooltip(_fields(whole=True)))
    chart = alt.layer(*zero_lines(), heads, shafts, starts, tips)
    words = "Symmetry and directionality, both from -1 to 1: an arrow per layer, from checkpoint a to b."
    return finished(chart, data(rows, held_as), words, width, height)


def both_ends(rows: Iterable[Row]) -> bool:
    """Whether any row has both scores in both checkpoints."""
    ends = ("symmetry_a", "symmetry_b", "directionality_a", "directionality_b")
    return any(all(row[end] is not None for end in ends) for row in rows)


def _rounded_up(value: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten."""
    ten = 10.0 ** math.floor(math.log10(value))
    return next((float(f"{m * ten:.3g}") for m in (1, 2, 5) if value <= m * ten), float(f"{10 * ten:.3g}"))


def _fields(*, whole: bool = False) -> Sequence[Field]:
    shown: list[Field] = [("module", "module", None), ("layer", "layer", None)]
    shown += [] if whole else [("head", "head", None)]
    return [
        *shown,
        ("symmetry_a", "symmetry a", "+.4f"),
        ("symmetry_b", "symmetry b", "+.4f"),
        ("symmetry_change", "change", "+.4f"),
        ("symmetry_change_z", "std from noise", "+.1f"),
        ("directionality_a", "directionality a", "+.4f"),
        ("directionality_b", "directionality b", "+.4f"),
        ("relative_change", "relative change", ".4~g"),
        ("cosine", "cosine", "+.4f"),
        ("change_symmetry", "symmetry of the change", "+.4f"),
        ("change_effective_rank", "effective rank of the change", ".1f"),
        ("flags", "flags", None),
        ("reason", "not defined", None),
    ]
