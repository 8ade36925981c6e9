"""The change from one query-key form to another, W_b - W_a, without forming either; and what chance would make of it.

The difference is a form itself, twice as wide: W_b - W_a = (Q_b - Q_a) K_b^T + Q_a (K_b - K_a)^T. Written so, two forms
that hardly differ do not cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkform.errors import FormError
from qkform.form import arrays
from qkform.form.arrays import Array
from qkform.form.bilinear import BilinearForm
from qkform.form.null import null_variance


@dataclass(frozen=True)
class Change:
    """From form `a` to form `b`, per head. Every array is (n_heads,) float64, NaN where a head has no scores.

    size            ||W_b - W_a|| / ||W_a||, >= 0
    cosine          <W_a, W_b> / (||W_a|| ||W_b||), in [-1, 1]
    null_mean       what the change of symmetry would be on average, had W_a turned by this angle in a random direction
    null_std        and its standard deviation
    """

    form: BilinearForm
    size: Array
    cosine: Array
    null_mean: Array
    null_std: Array


def change_form(a: BilinearForm, b: BilinearForm) -> BilinearForm:
    """W_b - W_a of every head as one form, (n_heads, d_model, 2 d_head), in float64.

    Raises FormError where the two are not of one shape. Biases are left out.
    """
    shapes = [(tuple(f.w_q.shape), tuple(f.w_k.shape)) for f in (a, b)]
    if shapes[0] != shapes[1]:
        raise FormError(f"the forms are of different shapes: W_Q and W_K are {shapes[0]} and {shapes[1]}")
    xp = a._xp
    q_a, k_a, q_b, k_b = (arrays.double(w) for w in (a.w_q, a.w_k, b.w_q, b.w_k))
    return BilinearForm(xp.concat([q_b - q_a, q_a], axis=2), xp.concat([k_b, k_b - k_a], axis=2))


def change(a: BilinearForm, b: BilinearForm) -> Change:
    """How `b` differs from `a`; see `Change`. Source of the null: docs/math.md#differences."""
    form = change_form(a, b)
    norm_a, norm_b, moved = (x.norm() for x in (a, b, form))
    xp = a._xp
    finite = (norm_a > 0.0) & (norm_b > 0.0) & xp.isfinite(norm_a * norm_b)
    nan = arrays.like([math.nan] * a.n_heads, a.w_q)
    safe_a, safe_b = xp.where(finite, norm_a, 1.0 + 0.0 * nan), xp.where(finite, norm_b, nan)
    size = xp.where(finite, moved / safe_a, nan)
    inner = (safe_a**2 + safe_b**2 - moved**2) / (2.0 * safe_a * safe_b)
    cosine = xp.clip(inner, -1.0, 1.0)
    # the angle from the difference: 1 - cos^2 would cancel for forms that hardly differ
    ahead = (moved**2 - (safe_b - safe_a) ** 2) / (4.0 * safe_a * safe_b)  # sin^2 of half the angle
    ahead = xp.clip(ahead, 0.0, 1.0)
    sine2 = 4.0 * ahead * (1.0 - ahead)
    if a.w_q.shape[1] != a.w_k.shape[1]:
        return Change(form, size, cosine, nan, nan)
    return Change(form, size, cosine, *_null(a, form, sine2, finite, nan))


def _null(
    a: BilinearForm, form: BilinearForm, sine2: Array, finite: Array, nan: Array
) -> tuple[Array, Array]:
    """Mean and standard deviation of symmetry(W_b) - symmetry(W_a), had W_a turned by this angle at random.

    W_b / ||W_b|| = cos W_a / ||W_a|| + sin E, with E of norm 1, orthogonal to W_a and otherwise of random direction.
    """
    d = float(a.d_model)
    if d == 1.0:
        return nan * 0.0, nan * 0.0
    xp = a._xp
    symmetry = a.symmetry()
    rank = form.effective_rank()
    rank = xp.where(xp.isfinite(rank), rank, 1.0 + 0.0 * symmetry)  # no change at all: the last term is 0
    mean = sine2 * ((d - symmetry) / (d**2 - 1.0) - symmetry)
    crossed = 4.0 * (1.0 - sine2) * sine2 * (1.0 - symmetry**2) / (d**2 - 1.0)
    variance = crossed + sine2**2 * null_variance(a.d_model, rank)
    return xp.where(finite, mean, nan), xp.where(finite, xp.sqrt(variance), nan)
