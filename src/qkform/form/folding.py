"""Folds of a form: gains of norms multiplied in, biases as one more input. docs/math.md#options derives them."""

from __future__ import annotations

from collections.abc import Callable

from array_api_compat import array_namespace, device

from qkform.errors import FormError
from qkform.form import arrays
from qkform.form.arrays import Array
from qkform.form.bilinear import BilinearForm

Folded = tuple[Array, Array | None]


def gained_inputs(w: Array, b: Array | None, gain: Array, shift: Array | None) -> tuple[Array, Array | None]:
    """The projection of x_hat, where x = x_hat * gain + shift is what (w, b) projects.

    w (heads, d_model, d_head), b (heads, d_head) or None, gain and shift (d_model,). Returns
    (gain * w by rows, b + shift w); b stays None where there is neither bias nor shift.
    """
    if tuple(gain.shape) != (w.shape[1],) or (shift is not None and tuple(shift.shape) != (w.shape[1],)):
        raise FormError(
            f"a norm of {tuple(gain.shape)} gains cannot stand before a projection of {w.shape[1]} inputs"
        )

    def fold(w: Array, b: Array | None) -> tuple[Array, Array | None]:
        if shift is not None:
            added = array_namespace(w).sum(w * _as(shift, w)[None, :, None], axis=1)  # (heads, d_head)
            b = added if b is None else arrays.to(b, w.dtype) + added
        return w * _as(gain, w)[None, :, None], b

    return _in_range(fold, w, b)


def gained_outputs(w: Array, b: Array | None, gain: Array, *, centred: bool) -> tuple[Array, Array | None]:
    """The projection behind a norm on queries or keys, but for the division by each token's own length.

    gain: (d_head,) for a norm of every head alike, (heads, d_head) for one of each head, (heads * d_head,) for one
    across all heads. `centred`: the norm takes the mean away first, over what it normalises.
    """
    return _in_range(lambda w, b: _gained_outputs(w, b, gain, centred=centred), w, b)


def _gained_outputs(w: Array, b: Array | None, gain: Array, *, centred: bool) -> tuple[Array, Array | None]:
    heads, _, d_head = w.shape
    xp = array_namespace(w)
    gain = _as(gain, w)
    b = None if b is None else arrays.to(b, w.dtype)
    across = gain.ndim == 1 and heads > 1 and gain.shape[0] == heads * d_head
    if across:
        gain = xp.reshape(gain, (heads, d_head))
    elif gain.ndim == 1:
        gain = gain[None, :]
    if gain.ndim != 2 or gain.shape[1] != d_head or gain.shape[0] not in (1, heads):
        raise FormError(f"a norm of {tuple(gain.shape)} gains does not fit {heads} heads of {d_head}")
    if centred:
        axes_w, axes_b = ((0, 2), (0, 1)) if across else ((2,), (1,))
        w = w - xp.mean(w, axis=axes_w, keepdims=True)
        b = None if b is None else b - xp.mean(b, axis=axes_b, keepdims=True)
    return w * gain[:, None, :], None if b is None else b * gain


def extended(form: BilinearForm) -> BilinearForm:
    """The form of [x, 1]: biases as one more row of W_Q and W_K, zero where a side has none.

    (n_heads, d_model + 1, d_head). Its scores are those of `[x_i, 1] W_ext [x_j, 1]^T`, all terms of a biased score.
    """

    def with_row(w: Array, b: Array | None) -> Array:
        xp = array_namespace(w)
        w = arrays.to(w, arrays.working_dtype(w) if b is None else arrays.working_dtype(w, b))
        row = xp.zeros_like(w[:, :1, :]) if b is None else arrays.to(b, w.dtype)[:, None, :]
        # along the last axis of a stored Linear, whose memory runs along d_model
        both = [xp.matrix_transpose(part) for part in (w, row)]
        return xp.matrix_transpose(xp.concat(both, axis=2))

    return BilinearForm(with_row(form.w_q, form.b_q), with_row(form.w_k, form.b_k))


def _in_range(fold: Callable[[Array, Array | None], Folded], w: Array, b: Array | None) -> Folded:
    """`fold` in the precision of the weights; in float64 where it takes sound weights beyond float32."""
    with arrays.overflow_ignored():
        out = fold(arrays.to(w, arrays.working_dtype(w)), b)
        if all(_is_finite(part) for part in out) or not _is_finite(w) or not _is_finite(b):
            return out
        return fold(arrays.double(w), b)


def _is_finite(x: Array | None) -> bool:
    if x is None:
        return True
    xp = array_namespace(x)
    return bool(xp.all(xp.isfinite(x)))


def _as(gain: Array, w: Array) -> Array:
    """A vector of gains in the precision, of the kind and on the device of `w`."""
    return array_namespace(w).asarray(gain, dtype=w.dtype, device=device(w))
