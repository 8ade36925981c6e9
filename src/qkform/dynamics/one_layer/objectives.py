"""The two objectives as functions of the margin z = sharpness · gain, which is all that they depend on (exact).

z is by how much the right logit exceeds every other one. Cross-entropy over M labels is ln(1 + (M-1) e^-z); half the
squared distance to the centred target e_y - 1/M is (1 - 1/M)(1-z)²/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkform.dynamics.one_layer.given import number

LEAST = 1e-25  # of a loss: a squared loss that is lower has a margin of 1 but for rounding


@dataclass(frozen=True)
class Objective:
    """loss, pull = -dloss/dz and their inverse, each of (z or loss, number of classes)."""

    title: str
    loss: Callable[[Any, int], Any]
    pull: Callable[[Any, int], Any]
    margin: Callable[[float, int], float]

    def margin_at(self, loss: float, classes: int) -> float:
        """The margin at which the loss is this one; DynamicsError where no training reaches it."""
        highest = float(self.loss(0.0, classes))
        says = (
            f"that is not reached by training: {self.title} of {classes} classes falls from {highest:.6g} towards 0; "
            f"name a loss in between, {LEAST:g} or more"
        )
        return self.margin(number("loss", loss, says, lambda given: LEAST <= given < highest), classes)


OBJECTIVES = {
    "ce": Objective(
        "cross-entropy",
        lambda z, classes: np.log1p((classes - 1) * np.exp(-z)),
        lambda z, classes: (classes - 1) / (np.exp(z) + classes - 1),
        lambda loss, classes: math.log(classes - 1) - math.log(math.expm1(loss)),
    ),
    "squared": Objective(
        "the squared loss",
        lambda z, classes: 0.5 * (1 - 1 / classes) * (1 - z) ** 2,
        lambda z, classes: (1 - 1 / classes) * (1 - z),
        lambda loss, classes: 1 - math.sqrt(2 * loss / (1 - 1 / classes)),
    ),
}
