"""What symmetry a layer of the control has by chance: over the J that its arm draws, with its W_Q as it is.

Of one head the mean is about ||M||_F^2 / (tr M)^2 with M = W_Q^T W_Q (1/d_head where the columns of W_Q are
orthonormal), but heads whose W_Q share directions meet in the sum, and turns of planes are not Haar. So it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DRAWS = 32  # the standard deviation is then known to about an eighth


def by_chance(
    w_q: torch.Tensor, c: torch.Tensor, make: Callable[[int, Any], torch.Tensor], generator: Any
) -> tuple[float, float]:
    """Mean and standard deviation, over J, of the symmetry of W = sum_g c_g W_Q,g J_g^T W_Q,g^T.

    w_q (n_kv_heads, d_model, d_head), c (n_kv_heads,), make (key head, generator) -> J (d_head, d_head).
    Never forms W: with G the products of all columns of sqrt(c) W_Q and J block-diagonal it is
    tr(G J^T G J^T) / tr(G J^T G J).
    """
    import torch

    heads, _, d_head = w_q.shape
    sized = w_q * c.to(w_q).sqrt()[:, None, None]
    columns = sized.transpose(0, 1).flatten(1)  # (d_model, n_kv_heads d_head)
    gram = columns.T @ columns
    by_head = gram.unflatten(1, (heads, d_head))
    found = []
    for _ in range(DRAWS):
        j = torch.stack([make(g, generator) for g in range(heads)]).to(gram)
        back = torch.einsum("agk,gjk->agj", by_head, j).flatten(1)  # G J^T
        there = torch.einsum("agk,gkj->agj", by_head, j).flatten(1)  # G J
        found.append(float((back * back.T).sum() / (back * there.T).sum()))
    drawn = torch.tensor(found, dtype=torch.float64)
    return float(drawn.mean()), float(drawn.std())
