"""`no_diagonal_attention`: attention in which no token sees itself."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from qkform.attention import reference
from qkform.attention.decoupled import decoupled_attention


def no_diagonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_start: int | Tensor | None = None,
    impl: Literal["auto", "reference", "flash"] = "auto",
) -> Tensor:
    """Attention whose score of a token with itself is -inf: the limit of the decoupled score.

    Shapes, masks, `query_start` and `impl` as in `decoupled_attention`.  A row that sees no other key, such as the
    first causal one, is zero with zero gradients.
    """
    return decoupled_attention(
        query,
        key,
        value,
        torch.full_like(query[..., 0], -math.inf),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        query_start=query_start,
        impl=impl,
    )


def no_diagonal_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_start: int | Tensor | None = None,
) -> Tensor:
    """The same with the diagonal in the mask: what `no_diagonal_attention` must agree with."""
    n, m = query.shape[-2], key.shape[-2]
    place = torch.arange(n, device=query.device) + (m - n if query_start is None else query_start)
    others = torch.arange(m, device=query.device) != place[:, None]  # (N, M)
    if attn_mask is None:
        mask = others
    elif attn_mask.dtype == torch.bool:
        mask = attn_mask & others
    else:
        mask = attn_mask.masked_fill(~others, -math.inf)
    return reference.decoupled(
        query,
        key,
        value,
        torch.zeros_like(query[..., 0]),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        query_start=query_start,
    )
