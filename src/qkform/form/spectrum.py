"""Eigenvalues, singular values and symmetric part of one head's W = q k^T, from its thin factors in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from qkform.form.arrays import Array, double, to

# Z^T Z squares the condition of Z: a pivot that is zero to rounding comes out as 1e-16, and its root, 1e-8 of the
# largest, enters R. Below this ratio of squared pivots a QR of Z itself is worth its price.
_SAFE_PIVOT = 1e-10


def eigenvalues(q: Array, k: Array) -> Array:
    """The min(d, d_head) eigenvalues of q k^T that need not be 0, complex128, largest in size first.

    q and k (d, d_head): those of k^T q, or of W itself where the factors are wider than W.
    """
    xp = array_namespace(q, k)
    q, k = double(q), double(k)
    product = q @ k.T if q.shape[1] > q.shape[0] else k.T @ q
    values = to(xp.linalg.eigvals(product), xp.complex128)
    return xp.take(values, xp.argsort(xp.abs(values), descending=True))


def svd(q: Array, k: Array) -> tuple[Array, Array, Array]:
    """Left vectors (d_q, r), singular values (r,) and right vectors (d_k, r) of q k^T."""
    xp = array_namespace(q, k)
    basis_q, r_q = xp.linalg.qr(double(q))
    basis_k, r_k = xp.linalg.qr(double(k))
    u, s, vh = xp.linalg.svd(r_q @ r_k.T, full_matrices=False)
    return basis_q @ u, s, basis_k @ vh.T


def symmetric_part(q: Array, k: Array, *, vectors: bool) -> tuple[Array, Any]:
    """Eigenvalues (n,), ascending, and vectors (d, n) if asked for, of (W + W^T)/2; n = min(d, 2 d_head).

    It lives in the span of Z = [W_Q, W_K]; with Z = U R, its eigenvalues are those of the small
    (R_Q R_K^T + R_K R_Q^T)/2. The vectors need U, the values alone do not.
    """
    xp = array_namespace(q, k)
    q, k = double(q), double(k)
    d, width = q.shape
    basis = None
    if 2 * width < d:
        r = None if vectors else _triangle(q, k)
        if r is None:
            basis, r = xp.linalg.qr(xp.concat([q, k], axis=1))
        q, k = r[:, :width], r[:, width:]
    w = q @ k.T
    part = (w + w.T) / 2.0
    if not vectors:
        return xp.linalg.eigvalsh(part), None
    values, eigenvectors = xp.linalg.eigh(part)
    return values, eigenvectors if basis is None else basis @ eigenvectors


def _triangle(q: Array, k: Array) -> Any:
    """R (2 d_head, 2 d_head), upper triangular, with R^T R = Z^T Z; None where Z is too ill-conditioned for it.

    By Cholesky, ten times faster than a QR of Z.
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
