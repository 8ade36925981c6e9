"""Arguments that are numbers: any real one, numpy's too, comes out as float or int; the rest is a DynamicsError."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np

from qkform.errors import DynamicsError

_LARGEST = 2**40  # of a whole number: products of the sizes of a task stay numbers


def number(name: str, value: Any, says: str, fits: Callable[[float], bool] = math.isfinite) -> float:
    """The value as float where it `fits`; `says` completes "NAME is VALUE; ..."."""
    found = _float(value)
    if found is None or not fits(found):
        raise DynamicsError(f"{name} is {shown(value)}; {says}")
    return found


def whole(name: str, value: Any, least: int, more: str = "") -> int:
    """The value as int; `more` is what else it may be, for the message."""
    found = _float(value)
    if found is None or not math.isfinite(found) or found != int(found):
        raise DynamicsError(f"{name} is {shown(value)}; it is a whole number{more}, {least} or more")
    if found < least:
        raise DynamicsError(f"{name} is {shown(value)}; it is {least} or more")
    if found > _LARGEST:
        raise DynamicsError(f"{name} is {shown(value)}; it is {_LARGEST} or less")
    return int(found)


def moments(times: Any) -> Any:
    """Times as a float64 array, each 0 or above."""
    try:
        found = np.asarray(times, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.array(math.nan)
    if not (np.isfinite(found) & (found >= 0)).all():
        raise DynamicsError(f"times is {shown(times)}; times are numbers, 0 or above and finite")
    return found


def shown(value: Any) -> str:
    """A value for a message, not longer than a line; numpy's numbers as plain ones."""
    if isinstance(value, np.generic):
        value = value.item()
    return f"{value!r:.60}"


def _float(value: Any) -> float | None:
    """None for what is no real number, or has too many digits to be a float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):
        return None
