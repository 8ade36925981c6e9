"""What the symmetry score of random weights would be: its mean and its exact variance.

The null: W_Q (or W_K) may be rotated from the left without changing its distribution, and is independent of
the other (independent Gaussian weights, for one). The score's spread then depends on nothing but d_model and
the effective rank of W. Derivation and simulation: docs/math.md#symmetry_z.
"""

from __future__ import annotations

from typing import Any


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
