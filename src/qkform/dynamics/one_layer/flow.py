"""The flow: a task, its two circuits, an objective, a start. Closed forms of where training ends and how it gets there.

With r = (learning rate of the query-key circuit) / (learning rate of the output circuit), gap a and gain b obey

    da/dt = r k_QK h_QK(a) p (1 - p) b g(p b),    db/dt = k_OV h_OV(b) p g(p b),    p = c e^a / (1 + c e^a)

with g = -dloss/dz. Exact for collapsed circuits, and for factorized ones whose factors start along the rays. The
reduced flow for class-specific queries and infinitely many common tokens is that of the repository of
arXiv 2608.06776 (its README); invariants, end points and everything else here are derived in docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qkform.dynamics.one_layer.checks import HIGHEST, HIGHEST_GAIN, SMALL, check
from qkform.dynamics.one_layer.circuits import Circuit, circuit
from qkform.dynamics.one_layer.given import number
from qkform.dynamics.one_layer.needs import less_omega, scipy
from qkform.dynamics.one_layer.objectives import OBJECTIVES, Objective
from qkform.dynamics.one_layer.points import Array, Course, EndPoint, Simulation, end_point
from qkform.dynamics.one_layer.task import Task
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.one_layer.descent import Optimizer
    from qkform.flows import FlowTable


@dataclass(frozen=True)
class Flow:
    """One layer of attention in training. See `Task` for the sizes.

    `attention`, `output`: "collapsed" (W_QK or W_OV is the parameter) or "factorized" (two factors are).
    `objective`: "ce" or "squared". `start`: gap and gain at the beginning, one number for both factorized circuits
    (collapsed ones start at 0) or a pair; None: 0.01 factorized, 0 collapsed. `imbalance`: u² - v² of the factors'
    lengths, of equal learning rates, one number for both factorized circuits or a pair; 0: balanced.

    >>> flow = Flow(attention="collapsed", output="collapsed")
    >>> round(flow.closed_form(ratio=4.0, loss=0.1).sharpness, 4)
    0.6237
    """

    classes: int = 8
    per_class: int = 2
    common: float = 16
    relevant: int = 1
    distractors: int = 15
    attention: str = "collapsed"
    output: str = "collapsed"
    scale: float | None = None
    objective: str = "ce"
    start: float | tuple[float, float] | None = None
    queries_per_class: int | None = None
    imbalance: float | tuple[float, float] = 0.0

    def __post_init__(self) -> None:
        check(self)

    # ---- the model -------------------------------------------------------------------------------------------------

    @cached_property
    def task(self) -> Task:
        return Task(
            self.classes,
            self.per_class,
            self.common,
            self.relevant,
            self.distractors,
            self.queries_per_class,
            self.scale,
        )

    @property
    def first(self) -> tuple[float, float]:
        """Gap and gain at the beginning."""
        return self._pair(SMALL if self.start is None else self.start, "start")

    @property
    def tilts(self) -> tuple[float, float]:
        """u² - v² of the attention's and the output's factors."""
        return self._pair(self.imbalance, "imbalance")

    @cached_property
    def qk(self) -> Circuit:
        """The attention circuit."""
        return circuit(self.attention, self.task.sigma_qk, self.task.odds, self.tilts[0])

    @cached_property
    def ov(self) -> Circuit:
        """The output circuit."""
        return circuit(self.output, self.task.sigma_ov, self.task.odds, self.tilts[1])

    @property
    def goal(self) -> Objective:
        return OBJECTIVES[self.objective]

    @property
    def exact(self) -> bool:
        """Whether the closed forms are exact.

        They are not for factorized attention with class-specific queries and finitely many common tokens, whose ray
        has unequal singular values: there sharpness at loss 0.1 (both factorized, 6 classes, 12 common tokens, 11
        distractors, one query each) is .0845 .0874 .1407 .4123 .9412 for ratios 1/16 to 16, against .0845 .0879 .1502
        .4526 .9599 simulated (empirical).
        """
        return self.attention == "collapsed" or self.task.flat

    def slope(self, ratio: float) -> float:
        """rho = r k_QK / k_OV, the slope of the straight line in the plane (Phi_OV, Phi_QK) (exact)."""
        says = "it is a learning rate over another: 0 or above, and finite"
        ratio = number("ratio", ratio, says, lambda r: 0 <= r < math.inf)
        return ratio * self.task.k_qk / self.task.k_ov

    def grown(self, gap: Any, gain: Any) -> tuple[Any, Any]:
        """(Phi_OV, Phi_QK) less their values at the start: the point of the plane in which training is a line."""
        return self.ov.phi_ov(gain) - self.ov.phi_ov(self.first[1]), self.qk.phi_qk(gap) - self._phi_start

    # ---- end points ------------------------------------------------------------------------------------------------

    def closed_form(self, ratio: float, loss: float) -> EndPoint:
        """Gap, gain and sharpness at the moment that the loss is reached (exact where `exact`).

        At equal loss a higher ratio gives a strictly sharper attention and a smaller gain (a theorem, for all four
        parameterizations). DynamicsError where the loss is not reached, or is at the start.
        """
        gap = self._gap_at(self.slope(ratio), self._margin(loss))
        return end_point(self.task, gap, self._margin(loss) / float(self.task.sharpness(gap)))

    def ratio_for(self, sharpness: float, loss: float) -> float:
        """The learning-rate ratio that ends at this sharpness when the loss is reached: the design rule (exact).

        DynamicsError for a sharpness outside (that of the start, 1), or of a smaller gain than the start's.
        """
        margin = self._margin(loss)
        least = float(self.task.sharpness(self.first[0]))
        says = (
            f"that is not reached: this task's attention starts at {least:.6g} and sharpens towards 1; "
            "name one in between"
        )
        sharpness = number("sharpness", sharpness, says, lambda p: least < p < 1)
        gap, gain = self.task.gap_for(sharpness), margin / sharpness
        if gain <= self.first[1]:
            raise DynamicsError(
                f"sharpness {sharpness} at loss {loss} goes with a gain of {gain:.6g}, below the start's "
                f"{self.first[1]:.6g}: no ratio gets there; ask for less sharpness or a lower loss"
            )
        across, up = self.grown(gap, gain)
        return float(up / across * self.task.k_ov / self.task.k_qk)

    def gap_at(self, gain: float, ratio: float) -> float:
        """The gap when the gain is this: the trajectory (exact where `exact`).

        Collapsed attention has it in closed form, with R = Phi_QK: c e^a = W0(c e^R), by the Wright omega function,
        which does not overflow.
        """
        says = f"it starts at {self.first[1]} and only grows, up to {HIGHEST_GAIN:g}"
        gain = number("gain", gain, says, lambda b: self.first[1] <= b <= HIGHEST_GAIN)
        across = float(self.ov.phi_ov(gain) - self.ov.phi_ov(self.first[1]))
        up = self._phi_start + self.slope(ratio) * across
        if self.attention == "collapsed":
            gap = float(less_omega(up, math.log(self.task.odds)))
            return max(gap, self.first[0])  # at the start, rounding may fall short of it
        return self._root(lambda gap: float(self.qk.phi_qk(gap)) - up)

    def gain_at(self, gap: float, ratio: float) -> float:
        """The gain when the gap is this: the same trajectory, in closed form for all parameterizations."""
        slope = self.slope(ratio)
        says = f"that is not on the way: it grows from {self.first[0]}, if the ratio is above 0, up to {HIGHEST:g}"
        gap = number("gap", gap, says, lambda a: slope > 0 and self.first[0] <= a <= HIGHEST)
        up = max(float(self.qk.phi_qk(gap)) - self._phi_start, 0.0)
        return float(self.ov.gain(self.ov.phi_ov(self.first[1]) + up / slope))

    def _gap_at(self, slope: float, margin: float) -> float:
        """The root of the strictly increasing Phi_QK(a) - slope Phi_OV(z / p(a)), both from the start."""

        def beyond(gap: float) -> float:
            across, up = self.grown(gap, margin / float(self.task.sharpness(gap)))
            return float(up - slope * across)

        return self._root(beyond)

    def _root(self, beyond: Callable[[float], float]) -> float:
        """Where an increasing function of the gap, not above 0 at the start, is 0."""
        low = self.first[0]
        if beyond(low) >= 0:
            return low
        high = low + 1.0
        while beyond(high) < 0:
            if high >= HIGHEST:
                raise DynamicsError(f"the gap would exceed {HIGHEST:g}; ask for a smaller ratio")
            low, high = high, min(2 * high, HIGHEST)
        return float(scipy("optimize").brentq(beyond, low, high, xtol=1e-15, rtol=1e-14))

    @cached_property
    def _phi_start(self) -> float:
        return float(self.qk.phi_qk(self.first[0]))

    def _margin(self, loss: float) -> float:
        margin = self.goal.margin_at(loss, self.classes)
        a, b = self.first
        began = float(self.task.sharpness(a)) * b
        if margin <= began:
            raise DynamicsError(
                f"loss {loss} is behind the start, whose loss is {float(self.goal.loss(began, self.classes)):.6g}; "
                "name a lower loss, or start lower"
            )
        return margin

    def _pair(self, value: Any, name: str) -> tuple[float, float]:
        says = "it is one number, or a pair: attention, output"
        if isinstance(value, (tuple, list)) and len(value) == 2:
            return number(name, value[0], says), number(name, value[1], says)
        value = number(name, value, says)
        first, second = (value if kind == "factorized" else 0.0 for kind in (self.attention, self.output))
        return first, second

    # ---- runs ------------------------------------------------------------------------------------------------------

    def simulate(
        self,
        ratio: float,
        loss: float,
        *,
        seed: int = 0,
        factor_ratio: float = 1.0,
        noise: float | None = None,
        rtol: float = 1e-9,
    ) -> Simulation:
        """Integrate the gradient flow of the full d x d matrices until the loss is reached, and measure the end.

        The embeddings are random orthonormal rows (`seed`). `factor_ratio`: by how much the first factor of each
        factorized circuit learns faster than the second, sqrt of their product kept. `noise`: start all matrices
        from Gaussian entries of this standard deviation instead of on the rays. Agrees with `closed_form` to 1e-6
        relative where that is exact.
        """
        from qkform.dynamics.one_layer.simulation import simulate

        return simulate(self, ratio, loss, seed=seed, factor_ratio=factor_ratio, noise=noise, rtol=rtol)

    def time_course(self, ratio: float, loss: float, points: int = 100) -> Course:
        """Gap, gain, sharpness and loss over time, up to the loss: one integral along the line (exact where `exact`).

        Time is in 1 / (learning rate of the output circuit): divide by that rate for steps of gradient descent.
        """
        from qkform.dynamics.one_layer.courses import time_course

        return time_course(self, ratio, loss, points)

    def early(self, ratio: float, times: Array) -> tuple[Array, Array]:
        """(gap, gain) at these times while neither sharpness nor pull has changed (leading order).

        Collapsed circuits: the gain grows linearly and the gap quadratically, output first, attention second. Both
        factorized: the gain exponentially, the gap as an exponential of the gain.
        """
        from qkform.dynamics.one_layer.courses import early

        return early(self, ratio, times)

    def frozen(self, times: Array) -> Array:
        """The margin sharpness · gain at these times while the attention does not learn (exact).

        Cross-entropy and squared loss for a collapsed output, squared loss for a factorized one (a logistic curve).
        """
        from qkform.dynamics.one_layer.courses import frozen

        return frozen(self, times)

    def table(self, ratios: Sequence[float], loss: float, *, simulated: bool = True) -> FlowTable:
        """End points over ratios as a record (`qkform.flows`), simulated ones beside them unless told not to."""
        from qkform.dynamics.one_layer.tables import table

        return table(self, ratios, loss, simulated=simulated)

    # ---- optimizers that work entry by entry -------------------------------------------------------------------------

    def sign_descent(self, ratio: float, loss: float) -> EndPoint:
        """Where sign descent ends: on the line gap = scale · ratio · gain, whatever the task's k (exact).

        For collapsed circuits from 0 with one-hot embeddings and full batches, under cross-entropy (with 2 classes,
        under the squared loss too; with more it leaves the line, DynamicsError). Adam follows it roughly (empirical, of
        the default task at cross-entropy 0.1: gap / (scale · ratio · gain) is 1.17, 1.23, 1.28, 1.13, 0.63 for ratios
        1/16 to 16, learning rate 1e-3); sharpness rises with the ratio under both.
        """
        from qkform.dynamics.one_layer.descent import sign_descent

        return sign_descent(self, ratio, loss)

    def descend(
        self, ratio: float, loss: float, optimizer: Optimizer = "adam", *, lr: float = 1e-3
    ) -> Simulation:
        """Full batches in discrete steps on the full matrices with one-hot embeddings, until the loss is reached.

        "sgd", "sign" or "adam" (0.9, 0.999, 1e-8); the output learns at `lr`, the attention at ratio · lr; times are
        lr · steps.
        """
        from qkform.dynamics.one_layer.descent import descend

        return descend(self, ratio, loss, optimizer, lr)
