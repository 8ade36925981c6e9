"""Do circuits, objective and start of a flow fit each other? Errors say what was given and what would work."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING

from qkform.dynamics.one_layer.circuits import KINDS
from qkform.dynamics.one_layer.given import shown
from qkform.dynamics.one_layer.objectives import OBJECTIVES
from qkform.errors import DynamicsError

if TYPE_CHECKING:
    from qkform.dynamics.one_layer.flow import Flow

HIGHEST = 600.0  # of a gap: not far beyond, e^a is no number any more
HIGHEST_GAIN = 1e100  # its square is a number
SMALL = 0.01  # where factorized circuits start unless told: from 0 they never move


def check(flow: Flow) -> None:
    """DynamicsError for the first thing that does not fit."""
    for name, known in (("attention", KINDS), ("output", KINDS), ("objective", OBJECTIVES)):
        value = getattr(flow, name)
        if not isinstance(value, str) or value not in known:
            raise DynamicsError(f"{name} is {shown(value)}; known: {', '.join(known)}")
    flow.task  # noqa: B018  wrong sizes are said here
    for name in ("start", "imbalance"):
        value = getattr(flow, name)
        if isinstance(value, Real) and value and "factorized" not in (flow.attention, flow.output):
            raise DynamicsError(
                f"{name} is {shown(value)}: one number is of factorized circuits, and both are collapsed; leave it "
                "out, or name a pair: attention, output"
            )
    for side, at, tilt in zip(("attention", "output"), flow.first, flow.tilts, strict=True):
        kind = getattr(flow, side)
        highest = HIGHEST if side == "attention" else HIGHEST_GAIN
        if not 0 <= at <= highest:
            raise DynamicsError(f"start is {at} for the {side} circuit; it is 0 or above, up to {highest:g}")
        if (tilt and kind == "collapsed") or not (tilt == 0 or 1e-100 <= abs(tilt) <= 1e100):
            raise DynamicsError(
                f"imbalance is {tilt} for the {kind} {side} circuit; factorized ones have one: 0, or from 1e-100 to "
                "1e100 in size"
            )
        if kind == "factorized" and at == 0 and tilt == 0:
            raise DynamicsError(
                f"the factorized {side} circuit starts at 0 and never moves: each factor's gradient is a product "
                f"with the other; start above 0, for example start={SMALL}"
            )
