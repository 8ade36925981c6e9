"""A flow over several learning-rate ratios as a record, with the points along each run that its pictures need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkform.errors import DynamicsError
from qkform.flows import MEASURES, FlowTable

if TYPE_CHECKING:
    from qkform.dynamics.one_layer.flow import Flow
    from qkform.dynamics.one_layer.points import Simulation

_BETWEEN = 60  # ratios of the curve through the end points
_ON_A_LINE = 40  # points of a run in closed form
_MARKS = 14  # points of a simulated run


def table(flow: Flow, ratios: Sequence[float], loss: float, *, simulated: bool) -> FlowTable:
    """See `Flow.table`."""
    asked: Any = ratios
    if not isinstance(asked, Iterable) or isinstance(asked, (str, bytes)):
        asked = [asked]
    ratios = list(asked)
    if not ratios:
        raise DynamicsError("there is no ratio; name one or more, for example 1/4, 1, 4")
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for ratio in ratios:
        end = flow.closed_form(ratio, loss)
        run = flow.simulate(ratio, loss) if simulated else None
        rows.append(
            {"ratio": float(ratio)}
            | {name: getattr(end, name) for name in MEASURES}
            | {"simulated": run and {name: getattr(run, name) for name in MEASURES}}
        )
        points += _line(flow, ratio, loss)
        points += _marks(flow, ratio, run) if run else []
    points += _curve(flow, ratios, loss)
    return FlowTable(described(flow, loss), rows, points)


def described(flow: Flow, loss: float) -> dict[str, Any]:
    """Every argument of the flow and the loss, as JSON holds them."""
    task = flow.task
    return {
        "classes": task.classes,
        "per_class": task.per_class,
        "common": "inf" if task.common == math.inf else int(task.common),
        "relevant": task.relevant,
        "distractors": task.distractors,
        "queries_per_class": task.queries_per_class,
        "scale": task.score_scale,
        "attention": flow.attention,
        "output": flow.output,
        "objective": flow.objective,
        "start": list(flow.first),
        "imbalance": list(flow.tilts),
        "loss": loss,
        "exact": flow.exact,
    }


def _line(flow: Flow, ratio: float, loss: float) -> Iterator[dict[str, Any]]:
    """A run in closed form."""
    course = flow.time_course(ratio, loss, _ON_A_LINE)
    across, up = flow.grown(course.gap, course.gain)
    for number, (gap, gain, sharp, x, y) in enumerate(
        zip(course.gap, course.gain, course.sharpness, across, up, strict=True)
    ):
        yield _point("line", ratio, number, gap, gain, sharp, x, y)


def _marks(flow: Flow, ratio: float, run: Simulation) -> Iterator[dict[str, Any]]:
    """A simulated run, at places that are even in what its gap and gain have grown."""
    across, up = flow.grown(run.gaps, run.gains)
    grown = (run.gaps - run.gaps[0]) / (np.ptp(run.gaps) or 1.0) + (run.gains - run.gains[0]) / (
        np.ptp(run.gains) or 1.0
    )
    kept = np.unique([int(np.abs(grown - at).argmin()) for at in np.linspace(0.0, grown[-1], _MARKS)])
    for number in kept:
        gap, gain = run.gaps[number], run.gains[number]
        sharp = flow.task.sharpness(gap)
        yield _point("simulated", ratio, int(number), gap, gain, sharp, across[number], up[number])


def _curve(flow: Flow, ratios: Sequence[float], loss: float) -> Iterator[dict[str, Any]]:
    """Sharpness and entropy at the ratios between those that were asked for."""
    above = [ratio for ratio in ratios if ratio > 0]
    if len(set(above)) < 2:
        return
    for ratio in np.geomspace(min(above), max(above), _BETWEEN):
        end = flow.closed_form(float(ratio), loss)
        yield {"kind": "curve", "ratio": float(ratio), "sharpness": end.sharpness, "entropy": end.entropy}


def _point(kind: str, ratio: float, number: int, *found: Any) -> dict[str, Any]:
    names = ("gap", "gain", "sharpness", "across", "up")
    return {"kind": kind, "ratio": float(ratio), "number": number} | {
        name: float(value) for name, value in zip(names, found, strict=True)
    }
