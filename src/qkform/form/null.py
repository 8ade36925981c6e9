"""What the symmetry score of random weights would be: its mean and its exact variance.

The null: W_Q (or W_K) may be rotated from the left without changing its distribution, and is independent of
the other (independent Gaussian weights, for one). The score's spread then depends on nothing but d_model and
the effective rank of W. Derivation and simulation: docs/math.md#symmetry_z.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

_STEP, _REACH = 0.02, 8.0  # of the grid that `median_spread` sums over, in standard deviations
_MANY = 200  # layers from which on the limit, sqrt(pi / 2n), is right to 0.4 %


def null_mean(d_model: int) -> float:
    """The mean symmetry of random weights, 1/d_model: small, and not 0."""
    return 1.0 / d_model


def null_variance(d_model: int, effective_rank: Any) -> Any:
    """Variance of the symmetry score given the spectrum of W; about 2 / d_model**2.

    `effective_rank` is ||W||^4 / ||W W^T||^2, a number or an array of them, at least 1.
    d_model = 1 leaves nothing random: every score is 1 and the variance 0.
    """
    d = float(d_model)
    if d_model == 1:
        return 0.0 * effective_rank
    inverse = 1.0 / effective_rank
    return 3.0 / (d * (d + 2.0)) * (1.0 + 2.0 * (1.0 - inverse) / (d - 1.0)) - 1.0 / d**2


@lru_cache(maxsize=64)
def median_spread(n: int) -> float:
    """Standard deviation of the median of n independent standard normal variables: 1, .707, .670, .546, .536, ...

    What a band for one random layer is multiplied with to be one for the median of n of them. From the density of the
    middle order statistic, of an even n of the mean of the two middle ones (David and Nagaraja, Order Statistics, 2.3).
    """
    if n < 1:
        raise ValueError(f"n is {n}: a median is of one value or more")
    if n > _MANY:
        return math.sqrt(math.pi / (2 * n))
    x = np.arange(-_REACH, _REACH + _STEP / 2, _STEP)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])
    density = np.exp(-(x**2) / 2)
    k = (n - 1) // 2
    if n % 2:
        of_median = (below * below[::-1]) ** k * density
    else:  # the two middle ones at m - t and m + t: with k below the one and k above the other
        size = len(x)
        m, t = np.arange(size)[:, None], np.arange(size)[None, :]
        low, high = np.clip(m - t, 0, size - 1), np.clip(m + t, 0, size - 1)
        joint = (below[low] * below[::-1][high]) ** k * density[low] * density[high]
        of_median = joint.sum(1) - joint[:, 0] / 2  # a sum by trapezoids begins with half its first value
    return float(math.sqrt((x**2 @ of_median) / of_median.sum()))
