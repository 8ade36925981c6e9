"""Optimizers that give every entry a step of its own: sign descent, in closed form, and Adam, run.

Under them a ratio of learning rates means something else than under gradient descent: multiplying the *gradient* of
W_Q and W_K changes nothing (Adam divides it out), and the line is gap = scale · ratio · gain in place of one whose
slope holds k_QK / k_OV.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from qkform.dynamics.one_layer.given import number, shown
from qkform.dynamics.one_layer.matrices import Matrices, off_ray
from qkform.dynamics.one_layer.needs import scipy
from qkform.dynamics.one_layer.points import Array, EndPoint, Simulation, end_point
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.one_layer.flow import Flow

Optimizer = Literal["sgd", "sign", "adam"]
_LONGEST = 400_000  # steps
_POINTS = 60  # of a run that are kept
_ROUNDING = 1e-15  # gradients that are 0 but for rounding have no sign


def sign_descent(flow: Flow, ratio: float, loss: float) -> EndPoint:
    """See `Flow.sign_descent`: the gap solves p(a) a = scale · ratio · z."""
    _check(flow)
    flow.slope(ratio)
    says = "the line gap = scale · ratio · gain needs one above 0"
    ratio = number("ratio", ratio, says, lambda r: r > 0)
    if flow.objective == "squared" and flow.classes > 2:
        raise DynamicsError(
            f"under the squared loss of {flow.classes} classes sign descent leaves the line: wrong logits move as far "
            "as the right one and their targets are nearer; it is on the line for cross-entropy, and for 2 classes"
        )
    margin = flow.goal.margin_at(loss, flow.classes)
    steep = flow.task.score_scale * ratio
    gap = scipy("optimize").brentq(
        lambda a: float(flow.task.sharpness(a)) * a - steep * margin,
        0.0,
        steep * margin / float(flow.task.sharpness(0.0)),
        xtol=1e-15,
        rtol=1e-14,
    )
    return end_point(flow.task, float(gap), float(gap) / steep)


def descend(flow: Flow, ratio: float, loss: float, optimizer: Optimizer, lr: float) -> Simulation:
    """See `Flow.descend`."""
    _check(flow)
    flow.slope(ratio)
    flow.goal.margin_at(loss, flow.classes)
    if not isinstance(optimizer, str) or optimizer not in STEPS:
        raise DynamicsError(f"optimizer is {shown(optimizer)}; known: {', '.join(STEPS)}")
    lr = number("lr", lr, "it is above 0", lambda e: 0 < e < math.inf)
    model = Matrices(flow.task, flow.objective, one_hot=True)
    w_qk, w_ov = np.zeros((model.d, model.d)), np.zeros((model.d, model.d))
    of_qk, of_ov = STEPS[optimizer](), STEPS[optimizer]()
    places = [(0.0, 0.0, 0.0)]
    for step in range(_LONGEST):
        now, g_qk, g_ov = model.gradients(w_qk, w_ov)
        if now <= loss:
            break
        w_qk -= lr * ratio * of_qk(g_qk)
        w_ov -= lr * of_ov(g_ov)
        places.append((lr * (step + 1), model.gap(w_qk), model.gain(w_ov)))
    else:
        raise DynamicsError(f"the loss {loss} is not reached within {_LONGEST:,} steps; take a larger lr")
    sharp, entropy = model.attention(w_qk)
    times, gaps, gains = np.array(places)[np.unique(np.linspace(0, len(places) - 1, _POINTS).astype(int))].T
    return Simulation(
        gap=float(gaps[-1]),
        gain=float(gains[-1]),
        sharpness=float(sharp.mean()),
        entropy=float(entropy.mean()),
        loss=now,
        off_ray_qk=off_ray(w_qk, float(gaps[-1]) / flow.task.score_scale * model.ray_qk),
        off_ray_ov=off_ray(w_ov, float(gains[-1]) * model.ray_ov),
        line_drift=math.nan,
        balance_drift=0.0,
        unlike=float(np.ptp(sharp)),
        evaluations=len(places),
        times=times,
        gaps=gaps,
        gains=gains,
    )


def _check(flow: Flow) -> None:
    if (flow.attention, flow.output) != ("collapsed", "collapsed") or flow.first != (0.0, 0.0):
        raise DynamicsError(
            "steps by entry follow a line for collapsed circuits from 0 alone; this flow is "
            f"{flow.attention} / {flow.output} from {flow.first}"
        )


def _sign() -> Callable[[Array], Array]:
    return lambda gradient: np.where(np.abs(gradient) > _ROUNDING, np.sign(gradient), 0.0)


def _adam(first: float = 0.9, second: float = 0.999, epsilon: float = 1e-8) -> Callable[[Array], Array]:
    mean, square, steps = 0.0, 0.0, 0

    def step(gradient: Array) -> Array:
        nonlocal mean, square, steps
        steps += 1
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        return (mean / (1 - first**steps)) / (np.sqrt(square / (1 - second**steps)) + epsilon)

    return step


STEPS: dict[str, Callable[[], Callable[[Array], Array]]] = {
    "sgd": lambda: lambda gradient: gradient,
    "sign": _sign,
    "adam": _adam,
}
