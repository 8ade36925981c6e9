"""How a circuit is made of parameters: one matrix, or two factors. Each kind is a speed h and two integrals of 1/h.

A factorized circuit W = U V^T moves as one matrix whose learning rate is multiplied by h, which grows with W itself
(exact; docs/theory.md). With x the gap or the gain and sigma the singular value of W at x = 1:

    collapsed                              h = 1
    factorized, balanced                   h = 2 sigma x
    factorized, u² - v² = imbalance        h = sqrt(imbalance² + 4 sigma² x²)

u and v are the lengths of a mode's two factors, whose product is sigma x. Then for every loss of sharpness · gain

    Phi_QK(a) - slope · Phi_OV(b) = const,   Phi_QK = ∫ (1 + c e^a) / h da,   Phi_OV = ∫ b / h db

holds along the whole of training (exact): a straight line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkform.dynamics.one_layer.needs import scipy

KINDS = ("collapsed", "factorized")


@dataclass(frozen=True)
class Circuit:
    """h and its integrals, functions of the gap (where the circuit is the attention's) or of the gain.

    `clock`, ∫ dx/h, runs evenly under a steady pull: x, ln x or asinh x. `at` and `gain` undo `clock` and `phi_ov`.
    """

    speed: Callable[[Any], Any]
    clock: Callable[[Any], Any]
    at: Callable[[Any], Any]
    phi_qk: Callable[[Any], Any]
    phi_ov: Callable[[Any], Any]
    gain: Callable[[Any], Any]


def circuit(kind: str, sigma: float, odds: float, imbalance: float = 0.0) -> Circuit:
    """The circuit of this kind. `odds` is c, `sigma` as above; `imbalance` is of factorized circuits alone."""
    if kind == "collapsed":
        return Circuit(
            speed=lambda x: np.ones_like(x, dtype=float),
            clock=lambda x: x,
            at=lambda t: t,
            phi_qk=lambda a: a + odds * np.exp(a),
            phi_ov=lambda b: b * b / 2,
            gain=lambda phi: np.sqrt(2 * phi),
        )
    if imbalance == 0:
        return Circuit(
            speed=lambda x: 2 * sigma * x,
            clock=lambda x: np.log(x) / (2 * sigma),
            at=lambda t: np.exp(2 * sigma * t),
            phi_qk=lambda a: (np.log(a) + odds * scipy("special").expi(a)) / (2 * sigma),
            phi_ov=lambda b: b / (2 * sigma),
            gain=lambda phi: 2 * sigma * phi,
        )
    width = abs(imbalance) / (2 * sigma)  # below it the imbalance decides the speed, above it x does
    return Circuit(
        speed=lambda x: 2 * sigma * np.hypot(width, x),
        clock=lambda x: np.arcsinh(x / width) / (2 * sigma),
        at=lambda t: width * np.sinh(2 * sigma * t),
        phi_qk=lambda a: _unbalanced(a, width, odds) / (2 * sigma),
        # hypot(width, b) - width, whose digits that difference loses where the imbalance is large
        phi_ov=lambda b: b * b / (np.hypot(width, b) + width) / (2 * sigma),
        gain=lambda phi: np.sqrt(2 * sigma * phi * (2 * sigma * phi + 2 * width)),
    )


def _unbalanced(gap: Any, width: float, odds: float) -> Any:
    """∫ (1 + c e^x) / sqrt(width² + x²) from 0 to the gap: with x = width sinh(t) both terms are smooth."""
    quad = scipy("integrate").quad
    end = np.arcsinh(np.asarray(gap, float) / width)
    pushed = [
        quad(lambda t: math.exp(width * math.sinh(t)), 0.0, one, epsabs=0.0, epsrel=1e-12, limit=200)[0]
        for one in end.ravel()
    ]
    total = end + odds * np.reshape(pushed, end.shape)
    return total if total.ndim else float(total)
