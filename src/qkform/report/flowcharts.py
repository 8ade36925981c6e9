"""Charts of a one-layer flow: its straight lines, its way, and where it ends. Points in, an altair chart out.

Points are those of a `FlowTable`, with the name and the place of their ratio; "line" and "curve" are closed forms,
"simulated" is measured on the full matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkform.records import Row
from qkform.report.look import DEPTH, INK, Width, data, finished, tooltip

if TYPE_CHECKING:
    import altair as alt

_DEEPEST = 1e-4  # of the largest value: what a logarithmic axis shows of the beginning
_FIELDS = [
    ("name", "ratio", None),
    ("gap", "gap", ".5~g"),
    ("gain", "gain", ".5~g"),
    ("sharpness", "sharpness", ".5~g"),
]


def phase_plane(
    points: Sequence[Row], *, width: Width = 640, height: int = 420, held_as: str | None = None
) -> alt.LayerChart:
    """How far Phi_QK (up) and Phi_OV (across) have grown, both axes logarithmic: a line of slope 1 for every ratio.

    What the straight line Phi_QK = slope · Phi_OV looks like there; its height is the ratio.
    """
    import altair as alt

    grown = [
        row for row in points if row["kind"] in ("line", "simulated") and row["across"] > 0 and row["up"] > 0
    ]
    across, up = (_decades([row[name] for row in grown]) for name in ("across", "up"))
    encoded = {
        "x": alt.X(
            "across:Q", title="growth of Φ_OV since the start", scale=_log(across), axis=_powers(across)
        ),
        "y": alt.Y("up:Q", title="growth of Φ_QK since the start", scale=_log(up), axis=_powers(up)),
    }
    chart = _lines_and_marks(points, encoded)
    words = "Growth of Phi_QK against that of Phi_OV, both axes logarithmic: parallel straight lines, one per ratio."
    return finished(chart, data(grown, held_as), words, width, height)


def way(
    points: Sequence[Row], *, width: Width = 480, height: int = 260, held_as: str | None = None
) -> alt.LayerChart:
    """The gap (up) against the gain (across) from the start to the loss, a curve for every ratio."""
    import altair as alt

    kept = [row for row in points if row["kind"] in ("line", "simulated")]
    plain = alt.Axis(format="~r", tickCount=6, domain=False)
    encoded = {
        "x": alt.X("gain:Q", title="gain b", axis=plain),
        "y": alt.Y("gap:Q", title="gap a", axis=plain),
    }
    words = "Gap of the scores against gain of the output, from the start to the loss, a curve per ratio."
    return finished(_lines_and_marks(kept, encoded), data(kept, held_as), words, width, height)


def against_ratio(
    points: Sequence[Row],
    measure: str,
    *,
    width: Width = 480,
    height: int = 260,
    held_as: str | None = None,
) -> alt.LayerChart:
    """Sharpness or entropy when the loss is reached against the ratio: closed form (curve) and simulated (marks)."""
    import altair as alt

    kept = [row for row in points if row["kind"] in ("curve", "end", "simulated end") and row["ratio"] > 0]
    names = list(dict.fromkeys(row["name"] for row in kept if row["kind"] == "end"))
    ratios = sorted({row["ratio"] for row in kept if row["kind"] == "end"})
    domain = [ratios[0], ratios[-1]] if len(ratios) > 1 else [ratios[0] / 4, ratios[0] * 4]
    x = alt.X(
        "ratio:Q",
        title="ratio of learning rates, W_QK over W_OV",
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(format="~r", values=ratios, domain=False, grid=False, labelOverlap="greedy"),
    )
    limits = {"domain": [0, 1]} if measure == "sharpness" else {"zero": True}
    y = alt.Y(
        f"{measure}:Q",
        title={"entropy": "entropy (nats)"}.get(measure, measure),
        scale=alt.Scale(nice=False, **limits),
        axis=alt.Axis(format="~g", tickCount=5, domain=False),
    )
    base = alt.Chart().encode(x=x, y=y)
    shown = tooltip([("name", "ratio", None), (measure, measure, ".6~g")])
    curve = base.transform_filter("datum.kind === 'curve'").mark_line(color=INK, strokeWidth=1.5)
    colour = _colour(names, legend=False)
    ends = base.transform_filter("datum.kind === 'end'").mark_circle(size=36, opacity=1)
    run = base.transform_filter("datum.kind === 'simulated end'").mark_point(size=130, strokeWidth=1.6)
    chart = alt.layer(
        curve, ends.encode(color=colour, tooltip=shown), run.encode(color=colour, tooltip=shown)
    )
    words = f"{measure} when the loss is reached against the ratio of learning rates."
    return finished(chart, data(kept, held_as), words, width, height)


def _lines_and_marks(points: Sequence[Row], encoded: dict[str, Any]) -> Any:
    import altair as alt

    names = list(dict.fromkeys(row["name"] for row in points if row["kind"] == "line"))
    base = alt.Chart().encode(**encoded)
    lines = base.transform_filter("datum.kind === 'line'").mark_line(strokeWidth=1.8, clip=True)
    lines = lines.encode(color=_colour(names), detail="name:N", order="number:Q")
    marks = base.transform_filter("datum.kind === 'simulated'").mark_point(
        size=46, strokeWidth=1.4, clip=True
    )
    return alt.layer(lines, marks.encode(color=_colour(names), tooltip=tooltip(_FIELDS)))


def _colour(names: Sequence[str], *, legend: bool = True) -> alt.Color:
    """The colour of a ratio, from the slowest to the fastest query-key circuit."""
    import altair as alt

    shown = alt.Legend(title="ratio", orient="top", symbolType="stroke", symbolStrokeWidth=3, columns=8)
    scale = alt.Scale(domain=list(names), range=colours(len(names)))
    return alt.Color("name:N", scale=scale, legend=shown if legend else None)


def colours(count: int) -> list[str]:
    """As many colours between the ends of `DEPTH`, dark to light."""
    found = []
    for i in range(count):
        at = (len(DEPTH) - 1) * (i / (count - 1) if count > 1 else 0.0)
        low = min(int(at), len(DEPTH) - 2)
        parts = [
            round(a + (at - low) * (b - a))
            for a, b in zip(_parts(DEPTH[low]), _parts(DEPTH[low + 1]), strict=True)
        ]
        found.append("#" + "".join(f"{part:02x}" for part in parts))
    return found


def _parts(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _decades(values: Sequence[float]) -> list[float]:
    """The part of a logarithmic axis that is shown: four decades at most, and a little air."""
    if not values:
        return [1.0, 10.0]
    high = max(values)
    return [max(min(values), high * _DEEPEST) / 1.2, high * 1.5]


def _log(domain: Sequence[float]) -> alt.Scale:
    import altair as alt

    return alt.Scale(type="log", domain=list(domain), nice=False)


def _powers(domain: Sequence[float]) -> alt.Axis:
    """A line at every power of ten."""
    import altair as alt

    powers = range(math.ceil(math.log10(domain[0])), math.floor(math.log10(domain[1])) + 1)
    return alt.Axis(format="~r", values=[10.0**power for power in powers], domain=False)
