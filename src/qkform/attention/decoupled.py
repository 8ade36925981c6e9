"""`decoupled_attention`: scaled dot-product attention in which a token's score with itself is given."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from qkform.attention import reference


def decoupled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_start: int | Tensor | None = None,
    impl: Literal["auto", "reference", "flash"] = "auto",
) -> Tensor:
    """Attention whose score of a token with itself is `scale * self_score`: see `reference.decoupled`."""
    return reference.decoupled(
        query,
        key,
        value,
        self_score,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        query_start=query_start,
    )
