"""`no_diagonal_attention`: attention in which no token sees itself."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from qkform.attention.checks import check_tensors
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
    check_tensors({"query": query}, {})
    return decoupled_attention(
        query,
        key,
        value,
        torch.full(query.shape[:-1], -math.inf, dtype=torch.float32, device=query.device),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        query_start=query_start,
        impl=impl,
    )
