"""The change from one query-key form to another, W_b - W_a, without forming either; and what chance would make of it.

The difference is a form itself, twice as wide: W_b - W_a = (Q_b - Q_a) K_b^T + Q_a (K_b - K_a)^T. Written so, and
summed in float64, two forms that hardly differ do not cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from array_api_compat import array_namespace

from qkform.errors import FormError
from qkform.form import arrays
from qkform.form.arrays import Array
from qkform.form.bilinear import BilinearForm
from qkform.form.null import null_variance

_ROUNDING = 1e-15  # a change of symmetry this small is no change


@dataclass(frozen=True)
class Change:
    """From form `a` to form `b`, per head. Every array is (n_heads,) float64, NaN where a head has no scores.

    form            W_b - W_a
    size            ||W_b - W_a|| / ||W_a||, >= 0
    cosine          <W_a, W_b> / (||W_a|| ||W_b||), in [-1, 1]
    symmetry        symmetry(W_b) - symmetry(W_a), in [-2, 2], to its own precision
    null_mean       what the change of symmetry would be on average, had noise on W_Q and W_K turned W by the same angle
    null_std        and its standard deviation
    """

    form: BilinearForm
    size: Array
    cosine: Array
    symmetry: Array
    null_mean: Array
    null_std: Array

    def z(self) -> Array:
        """Standard deviations of the change of symmetry from the mean of chance; NaN where nothing moved."""
        xp = array_namespace(self.symmetry)
        off = self.symmetry - self.null_mean
        moved = (self.null_std > _ROUNDING) | (xp.abs(off) > _ROUNDING)
        known = moved & (self.null_std > 0.0)
        nan = 0.0 * off + math.nan
        return xp.where(known, off / xp.where(known, self.null_std, 1.0 + 0.0 * off), nan)


def change_form(a: BilinearForm, b: BilinearForm) -> BilinearForm:
    """W_b - W_a of every head as one form, (n_heads, d_model, 2 d_head), in float64; biases likewise.

    Raises FormError where the two are not of one shape.
    """
    shapes = [(tuple(f.w_q.shape), tuple(f.w_k.shape)) for f in (a, b)]
    if shapes[0] != shapes[1]:
        raise FormError(f"the forms are of different shapes: W_Q and W_K are {shapes[0]} and {shapes[1]}")
    xp = array_namespace(a.w_q)
    q_a, k_a, q_b, k_b = (arrays.double(w) for w in (a.w_q, a.w_k, b.w_q, b.w_k))
    biases: dict[str, Array] = {}
    if any(bias is not None for bias in (a.b_q, a.b_k, b.b_q, b.b_k)):
        bq_a, bk_a, bq_b, bk_b = (
            arrays.double(bias) if bias is not None else xp.sum(0.0 * w, axis=1)
            for bias, w in ((a.b_q, q_a), (a.b_k, k_a), (b.b_q, q_b), (b.b_k, k_b))
        )
        biases = {
            "b_q": xp.concat([bq_b - bq_a, bq_a], axis=1),
            "b_k": xp.concat([bk_b, bk_b - bk_a], axis=1),
        }
    w_q, w_k = xp.concat([q_b - q_a, q_a], axis=2), xp.concat([k_b, k_b - k_a], axis=2)
    return BilinearForm(w_q, w_k, **biases)


def change(a: BilinearForm, b: BilinearForm) -> Change:
    """How `b` differs from `a`; see `Change`. Source of the null: docs/math.md#differences."""
    form = change_form(a, b)
    square = a.w_q.shape[1] == a.w_k.shape[1]
    moved = form.norm()
    own = form.symmetry() if square else moved  # of the change itself; without a square W it is not asked for
    columns: list[list[float]] = [[], [], [], [], []]
    defects = zip(a.defects(), b.defects(), strict=True)
    for head, (of_a, of_b) in enumerate(defects):
        if of_a is None and of_b is None:
            found = _head(a.head(head), b.head(head), float(moved[head]), float(own[head]), square=square)
        else:
            found = (math.nan,) * 5
        for column, value in zip(columns, found, strict=True):
            column.append(value)
    return Change(form, *(arrays.like(column, a.w_q) for column in columns))


def _head(
    a: BilinearForm, b: BilinearForm, by: float, own_symmetry: float, *, square: bool
) -> tuple[float, float, float, float, float]:
    """size, cosine, change of symmetry, mean and standard deviation of the null of one head.

    `by` is the norm of the change, `own_symmetry` its symmetry.
    """
    xp = array_namespace(a.w_q)
    wide_a, wide_b = (BilinearForm(arrays.double(f.w_q), arrays.double(f.w_k)) for f in (a, b))
    q_a, k_a, q_b, k_b = (w[0, ...] for f in (wide_a, wide_b) for w in (f.w_q, f.w_k))  # (d, k)
    norm_a, norm_b = float(wide_a.norm()[0]), float(wide_b.norm()[0])
    size = by / norm_a
    # the angle from the difference: 1 - cos^2 would cancel for forms that hardly differ
    half = min(
        max((by**2 - (norm_b - norm_a) ** 2) / (4.0 * norm_a * norm_b), 0.0), 1.0
    )  # sin^2 of half the angle
    sine2 = 4.0 * half * (1.0 - half)
    cosine = 1.0 - 2.0 * half
    if not square:
        return size, cosine, math.nan, math.nan, math.nan
    s_a = float(wide_a.symmetry()[0])
    d_q, d_k = q_b - q_a, k_b - k_a
    inner = _inner(q_a, k_a, d_q, k_b) + _inner(q_a, k_a, q_a, d_k)  # <W_a, W_b - W_a>
    trace = _inner(k_a, q_a, d_q, k_b) + _inner(k_a, q_a, q_a, d_k)  # tr(W_a (W_b - W_a))
    own = 0.0 if by == 0.0 else own_symmetry * by**2  # tr of the square of W_b - W_a
    symmetry = (2.0 * (trace - s_a * inner) + own - s_a * by**2) / norm_b**2
    split = _split(float(xp.sum(d_q * d_q)), float(xp.sum(d_k * d_k)))
    return size, cosine, symmetry, *_null(q_a, k_a, norm_a, s_a, sine2, split)


def _inner(q_1: Array, k_1: Array, q_2: Array, k_2: Array) -> float:
    """<Q_1 K_1^T, Q_2 K_2^T>, from the products of the factors."""
    xp = array_namespace(q_1)
    return float(xp.sum((q_1.T @ q_2) * (k_1.T @ k_2)))


def _split(moved_q: float, moved_k: float) -> tuple[float, float]:
    """Shares of the noise on W_Q and W_K, as the observed squared changes have it."""
    both = moved_q + moved_k
    return (moved_q / both, moved_k / both) if both > 0.0 else (0.5, 0.5)


def _null(
    q: Array, k: Array, norm: float, s: float, sine2: float, split: tuple[float, float]
) -> tuple[float, float]:
    """Mean and standard deviation of symmetry(W_b) - s, W_b = (Q + N)(K + M)^T with independent Gaussian N and M.

    Their variances x_q and x_k per entry share as `split` does, and are of the size that turns W by the observed angle:
    d v = ||W||^2 tan^2, v = x_q ||K||^2 + x_k ||Q||^2 + x_q x_k d k. docs/math.md#differences has the derivation.
    """
    xp = array_namespace(q)
    d, width = (int(n) for n in q.shape)
    if d == 1 or sine2 == 0.0:
        return 0.0, 0.0
    sine2 = min(sine2, 1.0 - 1e-6)  # at a right angle noise would have to be infinite
    v = norm**2 * sine2 / (1.0 - sine2) / d
    q2, k2 = float(xp.sum(q * q)), float(xp.sum(k * k))
    x = _root(split[0] * split[1] * d * width, split[0] * k2 + split[1] * q2, v)
    x_q, x_k = split[0] * x, split[1] * x
    total = norm**2 + d * v  # the mean of ||W_b||^2
    expected = (s * norm**2 + v) / total  # the mean of tr(W_b W_b) over it
    gram_q, gram_k, small = q.T @ q, k.T @ k, k.T @ q  # (k, k)

    def square(w: Array) -> float:
        return float(xp.sum(w * w))

    # terms of tr(W_b W_b) - expected ||W_b||^2 with one factor of noise
    variance = 4.0 * x_q * square(k @ small.T - expected * (q @ gram_k))
    variance += 4.0 * x_k * square(q @ small - expected * (k @ gram_q))
    # with two: of the trace, of the norm, and of both together; the angle is given, so what the norm tells is taken out
    trace2 = float(xp.linalg.trace(small)) ** 2
    norm2 = norm**2
    of_trace = 4.0 * x_q * x_k * (d * square(small) + norm2 + 2.0 * trace2)
    of_norm = 4.0 * x_q * x_k * (q2 * k2 + 3.0 * norm2)
    of_both = 4.0 * x_q * x_k * (square(small) + 2.0 * s * norm2 + trace2)
    for noise, size, gram in ((x_q, k2, gram_k), (x_k, q2, gram_q)):
        of_trace += 2.0 * noise**2 * size**2
        of_norm += 2.0 * noise**2 * d * square(gram)
        of_both += 2.0 * noise**2 * square(gram)
    variance += max(of_trace - of_both**2 / of_norm, 0.0)
    # with three and four, to leading order
    variance += 4.0 * x_q * x_k * d * width * (x_q * k2 + x_k * q2)
    variance += (x_q * x_k * d**2 * width) ** 2 * null_variance(d, float(min(width, d)))
    return expected - s, math.sqrt(max(variance, 0.0)) / total


def _root(square: float, linear: float, constant: float) -> float:
    """The positive x with square x^2 + linear x = constant, all of them >= 0."""
    return 2.0 * constant / (linear + math.sqrt(linear**2 + 4.0 * square * constant))
