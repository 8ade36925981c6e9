"""Charts of a comparison: curves of every run, measures against the loss, differences with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qkform.records import Row
from qkform.report.comparewords import NAMES
from qkform.report.look import INK, QUIET, UNDEFINED, Width, data, finished, tooltip

if TYPE_CHECKING:
    import altair as alt

_AXIS: dict[str, Any] = {"format": "~f", "tickCount": 5, "domain": False}
_RATIOS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 6, 10, 20, 50, 100]
MOMENT_SHAPES = {"at the end": "circle", "at one loss": "diamond", "to the baseline's loss": "square"}


def curves(
    points: Sequence[Row],
    measure: str,
    colours: Mapping[str, str],
    *,
    width: Width = 480,
    height: int = 280,
    held_as: str | None = None,
) -> alt.LayerChart:
    """A measure against the step: every seed thin, the mean over seeds of an arm thick.

    `points` are {"arm", "seed", "step", measure}, seed None in those of the mean.
    """
    import altair as alt

    names = ("arm", "seed", "step", measure)
    kept = [{name: row[name] for name in names} for row in points if row.get(measure) is not None]
    base = alt.Chart().encode(
        x=alt.X(
            "step:Q",
            title="step",
            axis=alt.Axis(**{**_AXIS, "format": ",~d"}, grid=False),
            scale=alt.Scale(nice=False),
        ),
        y=alt.Y(f"{measure}:Q", title=NAMES[measure], axis=alt.Axis(**_AXIS), scale=alt.Scale(zero=False)),
        color=_colour(colours),
    )
    words = f"{NAMES[measure]} against the step, a thin line per run and a thick one per arm."
    return finished(_thin_and_thick(base, measure), data(kept, held_as), words, width, height)


def against_loss(
    points: Sequence[Row],
    measure: str,
    colours: Mapping[str, str],
    at_loss: float | None,
    *,
    width: Width = 640,
    height: int = 360,
    held_as: str | None = None,
) -> alt.LayerChart:
    """A measure against the smoothed held-out loss, which falls to the right; a rule where values are compared."""
    import altair as alt

    kept = [
        {name: row[name] for name in ("arm", "seed", "step", "smoothed", measure)}
        for row in points
        if row["seed"] is not None and row.get(measure) is not None and row["smoothed"] is not None
    ]
    base = alt.Chart().encode(
        x=alt.X(
            "smoothed:Q",
            title="held-out loss (falls to the right)",
            axis=alt.Axis(**_AXIS, grid=False),
            scale=alt.Scale(zero=False, reverse=True),
        ),
        y=alt.Y(f"{measure}:Q", title=NAMES[measure], axis=alt.Axis(**_AXIS), scale=alt.Scale(zero=False)),
        color=_colour(colours),
    )
    shown = tooltip(
        [
            ("arm", "arm", None),
            ("seed", "seed", None),
            ("step", "step", ","),
            ("smoothed", "held-out loss", ".4f"),
            (measure, NAMES[measure], ".4f"),
        ]
    )
    parts = [
        base.mark_line(strokeWidth=1.4, opacity=0.8).encode(detail="seed:N", order="step:Q"),
        base.mark_circle(size=22, opacity=1).encode(tooltip=shown),
    ]
    if at_loss is not None:
        rule = alt.Chart(alt.InlineData(values=[{"at": at_loss}]))
        parts.insert(0, rule.mark_rule(color=QUIET, strokeDash=[4, 3]).encode(x="at:Q"))
    words = f"{NAMES[measure]} against the held-out loss, a line per run."
    return finished(alt.layer(*parts), data(kept, held_as), words, width, height)


def differences(
    points: Sequence[Row],
    title: str,
    colours: Mapping[str, str],
    *,
    ratio: bool = False,
    width: Width = 480,
    held_as: str | None = None,
) -> alt.LayerChart:
    """Mean differences with their intervals as points, those of every seed as ticks, a rule where nothing differs.

    `points` are {"arm", "moment", "seed", "value", "low", "high"}; `ratio` for a logarithmic axis around 1.
    """
    import altair as alt

    arms = [name for name in colours if any(row["arm"] == name for row in points)]
    moments = [name for name in MOMENT_SHAPES if any(row["moment"] == name for row in points)]
    scale, ticks = alt.Scale(zero=True, padding=12), {}
    if ratio:  # no narrower than a quarter to both sides: else 1 is its only tick
        found = [row[name] for row in points for name in ("value", "low", "high") if row.get(name)]
        ends_at = [min([0.8, *found]), max([1.25, *found])]
        scale, ticks = alt.Scale(type="log", nice=False, padding=12, domain=ends_at), {"values": _RATIOS}
    across = alt.X("value:Q", title=title, scale=scale, axis=alt.Axis(**_AXIS, **ticks))
    base = alt.Chart().encode(
        y=alt.Y(
            "arm:N",
            title=None,
            sort=arms,
            scale=alt.Scale(domain=arms, paddingInner=0.2),
            axis=alt.Axis(domain=False, labelLimit=150, grid=False),
        ),
        yOffset=alt.YOffset("moment:N", sort=moments, scale=alt.Scale(domain=moments, paddingOuter=0.3)),
        color=_colour(colours, legend=False),
    )
    told = [("arm", "arm", None), ("moment", "", None), ("value", title, "+.4~f" if not ratio else ".4~g")]
    ranged = any(row["low"] is not None for row in points)  # two seeds have no intervals
    ends = [(name, word, told[2][2]) for name, word in (("low", "from"), ("high", "to")) if ranged]
    mean = base.transform_filter("datum.seed === null")
    each = base.transform_filter("datum.seed !== null")
    shapes = alt.Shape(
        "moment:N",
        scale=alt.Scale(domain=moments, range=[MOMENT_SHAPES[name] for name in moments]),
        legend=alt.Legend(title=None, orient="top", symbolFillColor=INK, symbolStrokeColor=INK),
    )
    intervals = mean.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.2)
    zero = alt.Chart(alt.InlineData(values=[{"at": 1 if ratio else 0}]))
    parts = [
        zero.mark_rule(color=UNDEFINED).encode(x="at:Q"),
        each.mark_tick(thickness=1.5, size=9, opacity=0.55).encode(
            x=across, tooltip=tooltip([*told[:2], ("seed", "seed", None), told[2]])
        ),
        *([intervals.encode(x=alt.X("low:Q"), x2="high:Q")] if ranged else []),
        mean.mark_point(filled=True, size=80, opacity=1).encode(
            x=across, shape=shapes, tooltip=tooltip([*told, *ends])
        ),
    ]
    words = f"{title}: arm against baseline, mean over seeds with its interval."
    height = 30 + 26 * max(1, len(arms)) * max(1, len(moments))
    return finished(alt.layer(*parts), data(list(points), held_as), words, width, height)


def _thin_and_thick(base: Any, measure: str) -> Any:
    import altair as alt

    shown = tooltip([("arm", "arm", None), ("step", "step", ","), (measure, NAMES[measure], ".4f")])
    runs = base.transform_filter("datum.seed !== null").mark_line(strokeWidth=0.9, opacity=0.45)
    mean = base.transform_filter("datum.seed === null")
    return alt.layer(
        runs.encode(detail="seed:N"),
        mean.mark_line(strokeWidth=2.6),
        mean.mark_circle(size=40, opacity=0).encode(tooltip=shown),
    )


def _colour(colours: Mapping[str, str], *, legend: bool = True) -> alt.Color:
    """The colour of an arm."""
    import altair as alt

    shown = alt.Legend(
        title=None,
        orient="top",
        symbolType="stroke",
        symbolStrokeWidth=3,
        symbolOpacity=1,
        columns=3,
        labelLimit=220,
    )
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color("arm:N", scale=scale, legend=shown if legend else None)
