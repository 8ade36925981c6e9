"""How far the largest rows or columns of W stand out from the rest.

With norms n_1 .. n_d of the rows (or columns), the threshold is mean + gamma * std (ddof 1) and the excess is
the sum of (n_i - threshold) over the norms above it.  Source: arXiv 2502.10927 and its released script.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace


def excess(norms: Any, gamma: float, resolution: float) -> Any:
    """Sum of (norm - threshold) over the norms above the threshold; 0.0 where none is.

    `norms` (n_heads, d) float64 -> (n_heads,). `resolution` is the relative rounding error the norms carry:
    what stands above the threshold by less is no outlier (a matrix whose rows are all equally long has none,
    whatever rounding says).
    """
    xp = array_namespace(norms)
    d = norms.shape[1]
    if d < 2:
        return 0.0 * norms[:, 0]
    mean = xp.mean(norms, axis=1, keepdims=True)
    std = xp.sqrt(xp.sum((norms - mean) ** 2, axis=1, keepdims=True) / (d - 1))
    above = norms - (mean + gamma * std)
    floor = resolution * xp.max(norms, axis=1, keepdims=True)
    return xp.sum(xp.where(above > floor, above, 0.0 * above), axis=1)
