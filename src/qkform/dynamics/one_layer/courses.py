"""When the flow is where: the exact time course, its beginning to leading order, and attention that does not learn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from qkform.dynamics.one_layer.given import moments, whole
from qkform.dynamics.one_layer.needs import less_omega
from qkform.dynamics.one_layer.points import Array, Course
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.one_layer.flow import Flow

_NODES = np.polynomial.legendre.leggauss(10)
_INTERVALS = 24  # fewer would not see how the pull falls


def time_course(flow: Flow, ratio: float, loss: float, points: int) -> Course:
    """See `Flow.time_course`: t = ∫ dτ / (k_OV p g), τ the output's clock, with the gap on its line.

    Ten Gauss-Legendre nodes an interval, of `_INTERVALS` and more, leave 1e-9 relative and less; `points` of their ends
    are returned.
    """
    points = whole("points", points, 2)
    gains = _on_the_way(flow, ratio, loss, max(points, _INTERVALS + 1))
    gaps = np.array([flow.gap_at(float(gain), ratio) for gain in gains])
    clock = flow.ov.clock(gains)
    x, w = _NODES
    middle, reach = (clock[1:] + clock[:-1]) / 2, np.diff(clock) / 2
    nodes = np.clip(flow.ov.at(middle[:, None] + reach[:, None] * x), gains[0], gains[-1])
    between = np.array([[flow.gap_at(float(gain), ratio) for gain in row] for row in nodes])
    sharp = flow.task.sharpness(between)  # (intervals, nodes)
    rate = flow.task.k_ov * sharp * flow.goal.pull(sharp * nodes, flow.classes)
    time = np.concatenate([[0.0], np.cumsum(reach * (w / rate).sum(1))])
    kept = np.unique(np.linspace(0, len(gains) - 1, points).round().astype(int))
    sharpness = flow.task.sharpness(gaps[kept])
    return Course(
        time=time[kept],
        gap=gaps[kept],
        gain=gains[kept],
        sharpness=sharpness,
        loss=flow.goal.loss(sharpness * gains[kept], flow.classes),
    )


def _on_the_way(flow: Flow, ratio: float, loss: float, points: int) -> Array:
    """Gains from the start's to the end's, ascending, about as many as `points`.

    A third is even in the output's clock, a third in the attention's, a third in the logarithm of the loss: so that
    neither circuit runs far between two of them, nor the pull falls far.
    """
    end = flow.closed_form(ratio, loss)
    (a, b), third = flow.first, points // 3
    moves = ratio > 0 and end.gap > a
    even = flow.ov.at(
        np.linspace(flow.ov.clock(b), flow.ov.clock(end.gain), points - (2 if moves else 1) * third)
    )
    began = float(flow.goal.loss(float(flow.task.sharpness(a)) * b, flow.classes))
    losses = np.geomspace(began, loss, third + 2)[1:-1]
    found = [even, [flow.closed_form(ratio, float(each)).gain for each in losses]]
    if moves:
        gaps = flow.qk.at(np.linspace(flow.qk.clock(a), flow.qk.clock(end.gap), third + 2)[1:-1])
        found.append([flow.gain_at(float(gap), ratio) for gap in gaps])
    gains: Array = np.unique(np.clip(np.concatenate(found), b, end.gain))
    gains[0], gains[-1] = b, end.gain
    return gains


def early(flow: Flow, ratio: float, times: Array) -> tuple[Array, Array]:
    """See `Flow.early`. Sharpness p and pull g keep their first values:

    clock_OV(b) = clock_OV(b0) + k_OV p g t,   clock_QK(a) = clock_QK(a0) + slope (1 - p) (Phi_OV(b) - Phi_OV(b0)).
    """
    a, b = flow.first
    sharp = float(flow.task.sharpness(a))
    pull = float(flow.goal.pull(sharp * b, flow.classes))
    gains = flow.ov.at(flow.ov.clock(b) + flow.task.k_ov * sharp * pull * moments(times))
    across = flow.ov.phi_ov(gains) - flow.ov.phi_ov(b)
    gaps = flow.qk.at(flow.qk.clock(a) + flow.slope(ratio) * float(flow.task.blur(a)) * across)
    return gaps, gains


def frozen(flow: Flow, times: Array) -> Array:
    """See `Flow.frozen`. With p the sharpness that stays and T = k_OV p² t:

    cross-entropy    z = x - W0(e^x / (M-1)),    x = T + z0 + e^z0 / (M-1)
    squared          z = 1 - (1 - z0) exp(-(1 - 1/M) T)
    squared, factorized output    z = 1 / (1 + (1/z0 - 1) exp(-2 sigma_OV k_OV p (1 - 1/M) t))
    """
    a, b = flow.first
    times = moments(times)
    sharp, others, k = float(flow.task.sharpness(a)), flow.classes - 1, flow.task.k_ov
    began, share = sharp * b, 1 - 1 / flow.classes
    if flow.output == "collapsed":
        if flow.objective == "squared":
            return 1 - (1 - began) * np.exp(-share * k * sharp**2 * times)
        x = k * sharp**2 * times + began + math.exp(began) / others
        return less_omega(x, -math.log(others))
    if flow.objective == "squared" and flow.tilts[1] == 0:
        return 1 / (1 + (1 / began - 1) * np.exp(-2 * flow.task.sigma_ov * k * sharp * share * times))
    raise DynamicsError(
        "a factorized output has this closed form for the squared loss and balanced factors alone; "
        "time_course(ratio=0.0, ...) has every other"
    )
