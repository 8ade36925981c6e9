"""SciPy, which the closed forms need and `import qkform` must not: brought in where it is used."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from qkform.errors import MissingExtra


def scipy(part: str) -> Any:
    """`scipy.<part>`; MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError:
        raise MissingExtra('scipy is not installed; it comes with: pip install "qkform[theory]"') from None


def less_omega(x: Any, shift: float) -> Any:
    """x - W, where W = wrightomega(x + shift) solves W + ln W = x + shift; as ln W - shift where x is large.

    There x - W would lose its digits: of x = 1e17 none is left.
    """
    omega = scipy("special").wrightomega(x + shift)
    return np.where(x + shift > 1.0, np.log(np.maximum(omega, 1.0)) - shift, x - omega)
