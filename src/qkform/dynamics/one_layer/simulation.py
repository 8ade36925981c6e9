"""Gradient flow of the full matrices by SciPy's integrator, stopped by an event at the loss, and what it measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qkform.dynamics.one_layer.given import number, whole
from qkform.dynamics.one_layer.matrices import Matrices, off_ray
from qkform.dynamics.one_layer.needs import scipy
from qkform.dynamics.one_layer.points import Array, Simulation
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.one_layer.flow import Flow

_POINTS = 60  # of a run that are measured
_LONGEST = 100_000  # evaluations of the gradient


@dataclass(frozen=True)
class Weights:
    """One circuit's parameters, W or (U, V) with W = U V^T, and their learning rates."""

    parts: tuple[Array, ...]
    rates: tuple[float, ...]

    @property
    def matrix(self) -> Array:
        return self.parts[0] if len(self.parts) == 1 else self.parts[0] @ self.parts[1].T

    def motion(self, gradient: Array) -> list[Array]:
        """d(parts)/dt under gradient flow, from dL/dW."""
        if len(self.parts) == 1:
            return [-self.rates[0] * gradient]
        (u, v), (e1, e2) = self.parts, self.rates
        return [-e1 * gradient @ v, -e2 * gradient.T @ u]

    def balance(self) -> tuple[Array, float]:
        """U^T U/e1 - V^T V/e2, which no loss changes (exact), and the size of what it is the difference of."""
        if len(self.parts) == 1 or not all(self.rates):
            return np.zeros((1, 1)), 1.0
        u, v = (part.T @ part / rate for part, rate in zip(self.parts, self.rates, strict=True))
        return u - v, float(np.abs(u + v).max()) or 1.0

    def filled(self, state: Array) -> tuple[Weights, Array]:
        """The same circuit with the numbers from the front of `state`, and the rest of it."""
        parts = []
        for part in self.parts:
            parts.append(state[: part.size].reshape(part.shape))
            state = state[part.size :]
        return Weights(tuple(parts), self.rates), state


def simulate(
    flow: Flow,
    ratio: float,
    loss: float,
    *,
    seed: int,
    factor_ratio: float,
    noise: float | None,
    rtol: float,
) -> Simulation:
    """See `Flow.simulate`."""
    slope = flow.slope(ratio)
    seed = whole("seed", seed, 0)
    says = "it is a learning rate over another, above 0"
    factor_ratio = number("factor_ratio", factor_ratio, says, lambda e: 0 < e < math.inf)
    if noise is not None:
        noise = number("noise", noise, "it is a standard deviation, above 0", lambda sd: 0 < sd < math.inf)
    rtol = number("rtol", rtol, "it is from 1e-13 to 0.01", lambda each: 1e-13 <= each <= 1e-2)
    flow.goal.margin_at(loss, flow.classes)
    model = Matrices(flow.task, flow.objective, seed=seed)
    rng = np.random.default_rng([seed, 1])
    qk = _start(
        model.ray_qk / flow.task.score_scale,
        flow.attention,
        flow.first[0],
        flow.tilts[0],
        ratio,
        factor_ratio,
        noise,
        flow.classes,
        rng,
    )
    ov = _start(
        model.ray_ov, flow.output, flow.first[1], flow.tilts[1], 1.0, factor_ratio, noise, flow.classes, rng
    )
    began = model.loss(qk.matrix, ov.matrix)
    if began <= loss:
        raise DynamicsError(
            f"loss {loss} is behind the start, whose loss is {began:.6g}; name a lower loss, or start lower"
        )
    times, states, evaluations = _integrated(model, qk, ov, loss, rtol)
    return _measured(flow, model, qk, ov, times, states, evaluations, None if noise is not None else slope)


def _start(
    ray: Array,
    kind: str,
    at: float,
    tilt: float,
    rate: float,
    factor_ratio: float,
    noise: float | None,
    width: int,
    rng: Array,
) -> Weights:
    """A circuit at the point `at` of its ray, or of Gaussian entries.

    Factors have one column per class and lie along the ray's singular vectors, in a random basis of their own.
    """
    if kind == "collapsed":
        return Weights((at * ray if noise is None else noise * rng.normal(size=ray.shape),), (rate,))
    rates = (rate * math.sqrt(factor_ratio), rate / math.sqrt(factor_ratio))
    if noise is not None:
        parts = tuple(noise * rng.normal(size=(len(ray), width)) for _ in range(2))
        return Weights(parts, rates)
    left, lengths, right = np.linalg.svd(ray)
    modes = int((lengths > 1e-9 * lengths[0]).sum())
    # u v = the mode's singular value and u² - v² = tilt, at equal rates
    u = np.sqrt((np.hypot(tilt, 2 * at * lengths[:modes]) + tilt) / 2)
    v = np.sqrt((np.hypot(tilt, 2 * at * lengths[:modes]) - tilt) / 2)
    basis = np.linalg.qr(rng.normal(size=(width, width)))[0][:modes]
    lean = factor_ratio**0.25  # what balance is when the rates differ
    return Weights((lean * (left[:, :modes] * u) @ basis, (right[:modes].T * v) @ basis / lean), rates)


def _integrated(
    model: Matrices, qk: Weights, ov: Weights, loss: float, rtol: float
) -> tuple[Array, Array, int]:
    """Times, states (points, parameters) and the number of evaluations of the gradient, up to the loss."""
    spent = 0

    def both(state: Array) -> tuple[Weights, Weights]:
        first, rest = qk.filled(state)
        return first, ov.filled(rest)[0]

    def motion(_: float, state: Array) -> Array:
        nonlocal spent
        spent += 1
        if spent > _LONGEST:
            raise DynamicsError(
                f"the loss {loss} is not reached within {_LONGEST:,} evaluations of the gradient"
            )
        first, second = both(state)
        _, g_qk, g_ov = model.gradients(first.matrix, second.matrix)
        return np.concatenate([part.ravel() for part in (*first.motion(g_qk), *second.motion(g_ov))])

    def above(_: float, state: Array) -> float:
        first, second = both(state)
        return model.loss(first.matrix, second.matrix) - loss

    above.terminal, above.direction = True, -1  # type: ignore[attr-defined]
    began = np.concatenate([part.ravel() for part in (*qk.parts, *ov.parts)])
    found = scipy("integrate").solve_ivp(
        motion, (0.0, 1e15), began, method="DOP853", rtol=rtol, atol=1e-3 * rtol, events=above
    )
    if found.status != 1:
        raise DynamicsError(f"the loss {loss} is not reached: {found.message}")
    return found.t, found.y.T, spent


def _measured(
    flow: Flow,
    model: Matrices,
    qk: Weights,
    ov: Weights,
    times: Array,
    states: Array,
    evaluations: int,
    slope: float | None,
) -> Simulation:
    """What a run shows at up to `_POINTS` of its steps. `slope` None: it did not start on the rays, so has no line."""
    kept = np.unique(np.linspace(0, len(times) - 1, _POINTS).astype(int))
    places: list[tuple[float, float, float, float]] = []
    tilted = 0.0
    for state in states[kept]:
        first, rest = qk.filled(state)
        second = ov.filled(rest)[0]
        gap, gain = model.gap(first.matrix), model.gain(second.matrix)
        ray_qk, ray_ov = gap / flow.task.score_scale * model.ray_qk, gain * model.ray_ov
        places.append((gap, gain, off_ray(first.matrix, ray_qk), off_ray(second.matrix, ray_ov)))
        for now, then in ((first, qk), (second, ov)):
            tilted = max(tilted, float(np.abs(now.balance()[0] - then.balance()[0]).max()) / now.balance()[1])
    gaps, gains, off_qk, off_ov = np.array(places).T
    sharp, entropy = model.attention(first.matrix)
    return Simulation(
        gap=float(gaps[-1]),
        gain=float(gains[-1]),
        sharpness=float(sharp.mean()),
        entropy=float(entropy.mean()),
        loss=model.loss(first.matrix, second.matrix),
        off_ray_qk=float(off_qk.max()),
        off_ray_ov=float(off_ov.max()),
        line_drift=math.nan if slope is None else _drift(flow, slope, gaps, gains),
        balance_drift=tilted,
        unlike=float(np.ptp(sharp)),
        evaluations=evaluations,
        times=times[kept],
        gaps=gaps,
        gains=gains,
    )


def _drift(flow: Flow, slope: float, gaps: Array, gains: Array) -> float:
    across, up = flow.grown(gaps, gains)
    return float(np.abs(up - slope * across).max() / (np.abs(up).max() or 1.0))
