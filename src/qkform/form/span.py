"""The triangular factor R of a tall Z = [W_Q, W_K] = U R, without U, from the small product Z^T Z."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

# Z^T Z squares the condition of Z. Above this ratio of squared pivots, what is lost stays far below the
# 1e-8 at which eigenvalues are counted; below it, a QR of Z itself is worth its price.
_SAFE_PIVOT = 1e-10


def triangle(q: Any, k: Any) -> Any | None:
    """R (2 d_head, 2 d_head), upper triangular, for q and k (d, d_head) float64; None where Z is too ill-conditioned.

    R^T R = Z^T Z by Cholesky: ten times faster than a QR of Z.
    """
    xp = array_namespace(q, k)
    cross = q.T @ k
    top = xp.concat([q.T @ q, cross], axis=1)
    bottom = xp.concat([cross.T, k.T @ k], axis=1)
    try:
        lower = xp.linalg.cholesky(xp.concat([top, bottom], axis=0))
    except (np.linalg.LinAlgError, RuntimeError):  # torch's LinAlgError is a RuntimeError
        return None
    pivots = xp.linalg.diagonal(lower) ** 2
    if not float(xp.min(pivots)) > _SAFE_PIVOT * float(xp.max(pivots)):
        return None
    return lower.T
