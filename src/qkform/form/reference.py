"""The scores as the papers write them, from the full d x d matrix in float64: slow, plain, and the referee.

Every function takes one matrix W (d, d) of one head as numpy and returns a number or an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]


def symmetry(w: Matrix) -> float:
    """(||S||^2 - ||N||^2) / ||W||^2 with S = (W + W^T)/2, N = (W - W^T)/2; in [-1, 1]."""
    symmetric, skew = (w + w.T) / 2, (w - w.T) / 2
    return float((np.sum(symmetric**2) - np.sum(skew**2)) / np.sum(w**2))


def symmetry_z(w: Matrix) -> float:
    d = w.shape[0]
    inverse = 1.0 / effective_rank(w)
    variance = 3 / (d * (d + 2)) * (1 + 2 * (1 - inverse) / (d - 1)) - 1 / d**2
    return float((symmetry(w) - 1 / d) / np.sqrt(variance))


def row_norms(w: Matrix) -> Matrix:
    norms: Matrix = np.linalg.norm(w, axis=1)
    return norms


def column_norms(w: Matrix) -> Matrix:
    norms: Matrix = np.linalg.norm(w, axis=0)
    return norms


def _excess(norms: Matrix, gamma: float) -> float:
    threshold = norms.mean() + gamma * norms.std(ddof=1)
    return float((norms[norms > threshold] - threshold).sum())


def row_excess(w: Matrix, gamma: float = 2.0) -> float:
    return _excess(row_norms(w), gamma)


def column_excess(w: Matrix, gamma: float = 2.0) -> float:
    return _excess(column_norms(w), gamma)


def directionality(w: Matrix, gamma: float = 2.0) -> float:
    """(R - C) / (R + C); 0.0 where there is no outlier on either side."""
    rows, columns = row_excess(w, gamma), column_excess(w, gamma)
    return 0.0 if rows + columns == 0 else (rows - columns) / (rows + columns)


def norm(w: Matrix) -> float:
    return float(np.linalg.norm(w))


def effective_rank(w: Matrix) -> float:
    squares = np.linalg.svd(w, compute_uv=False) ** 2
    return float(squares.sum() ** 2 / (squares**2).sum())


def bias_share(w_q: Matrix, w_k: Matrix, b_q: Matrix, b_k: Matrix) -> float:
    """From the factors (d, d_head) and biases (d_head,): 1 - ||W||^2 / ||W_ext||^2."""
    extended = np.vstack([w_q, b_q]) @ np.vstack([w_k, b_k]).T
    return float(1 - np.sum((w_q @ w_k.T) ** 2) / np.sum(extended**2))


def eigenvalues(w: Matrix) -> Matrix:
    """All d of them, largest in size first."""
    values = np.linalg.eigvals(w).astype(np.complex128)
    return values[np.argsort(-np.abs(values))]


def singular_values(w: Matrix) -> Matrix:
    return np.linalg.svd(w, compute_uv=False)


def signature(w: Matrix) -> tuple[int, int, float]:
    """(attracting, repelling, attracting share of the energy) of the symmetric part."""
    values = np.linalg.eigvalsh((w + w.T) / 2)
    values = values / np.abs(values).max()
    energy = float((values[values > 0] ** 2).sum() / (values**2).sum())
    return int((values > 1e-8).sum()), int((values < -1e-8).sum()), energy
