"""`exclusive_attention`: what attention brings from elsewhere, without the direction of the token's own value."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qkform.attention import reference
from qkform.attention.checks import (
    autocast,
    check_dropout,
    check_heads,
    check_impl,
    check_mask,
    check_start,
    check_tensors,
)
from qkform.attention.decoupled import refuse_flash, why_not_flash
from qkform.attention.masks import narrowed, tops


def exclusive_attention(
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
    """Exclusive self attention: `z_i = y_i - (y_i . v_i) v_i / |v_i|^2`, y standard attention, v_i the own value.

    query (B, H, N, D), key (B, G, M, D), value (B, G, M, D_v) -> (B, H, N, D_v), every row orthogonal to its own
    value; under grouped queries (`enable_gqa`) that is the value of the head's group.  Where v_i is zero there is
    nothing to take away.  The own value is taken away whether or not the mask lets the token see itself; a row
    that sees no key is zero.

    Query i stands at key `query_start` + i: at the last N keys by default.  `is_causal` means keys up to the own
    position, which aligns bottom-right (`scaled_dot_product_attention` aligns top-left); with a mask, both apply.

    The difference is taken in float32 (float64 for float64), the result has the type of y.

    impl: "auto" is `scaled_dot_product_attention`, which chooses its kernel, and a few passes over its output; what
    that can do in torch.func and in second derivatives, this can.  "flash" is the same and raises AttentionError where
    no fused kernel could be used, "reference" the definition.

    Source: arXiv 2603.09078; `reference.exclusive` is the definition.
    """
    check_impl(impl)
    check_tensors({"query": query, "key": key, "value": value}, {"attn_mask": attn_mask})
    query, key, value = autocast(query, key, value)
    check_dropout(dropout_p)
    check_heads(query, key, value, enable_gqa)
    n, m = query.shape[2], key.shape[2]
    if attn_mask is not None:
        check_mask(attn_mask, (*query.shape[:3], m))
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]  # fused kernels want more dimensions than one
    check_start(query_start, n, m)
    if scale is not None and scale <= 0:  # the fused kernels mask first: -inf times 0, or turned to +inf
        query, scale = scale * query, 1.0
    start = m - n if query_start is None else query_start
    if impl == "reference":
        return reference.exclusive(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            query_start=query_start,
        )
    if impl == "flash":
        refuse_flash(why_not_flash(query, key, value, query[..., 0], attn_mask, dropout_p, 1.0))
    mask, plain = _mask(query, key, attn_mask, is_causal, start)
    y = scaled_dot_product_attention(
        query, key, value, mask, dropout_p, plain, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return _without(y, _own(value, start, n))


def _mask(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, start: int | Tensor
) -> tuple[Tensor | None, bool]:
    """The mask and `is_causal` that say the same to `scaled_dot_product_attention`: it aligns top-left."""
    n, m = query.shape[-2], key.shape[-2]
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = _levelled(attn_mask, query, is_causal, start)
    if not is_causal or (isinstance(start, int) and n == 1 and start == m - 1):
        return attn_mask, False
    if attn_mask is None and isinstance(start, int) and start == 0:
        return None, True
    return narrowed(attn_mask, _past(query, m, start)), False


def _past(query: Tensor, m: int, start: int | Tensor) -> Tensor:
    """(N, M): the keys up to each query's own."""
    place = torch.arange(query.shape[-2], device=query.device) + start
    return torch.arange(m, device=query.device) <= place[:, None]


def _levelled(mask: Tensor, query: Tensor, is_causal: bool, start: int | Tensor) -> Tensor:
    """A float mask in the type of the queries, in which the least number of a wider type would be -inf: see `tops`."""
    allowed = mask != -torch.inf
    if is_causal:
        allowed = allowed & _past(query, mask.shape[-1], start)
    return (mask - tops(mask, allowed)).to(query.dtype)


def _own(value: Tensor, start: int | Tensor, n: int) -> Tensor:
    """(B, G, N, D_v): the value of each query's own token."""
    if isinstance(start, int):
        return value[:, :, start : start + n]
    return value.index_select(2, torch.arange(n, device=value.device) + start)


def _without(y: Tensor, v: Tensor) -> Tensor:
    """y (B, H, N, D_v) less its part along v (B, G, N, D_v)."""
    exact = torch.promote_types(y.dtype, torch.float32)
    wide = y.to(exact).unflatten(1, (v.shape[1], -1))  # (B, G, H / G, N, D_v)
    v = v.to(exact)[:, :, None]
    # v enters as its direction only: its largest entry set to 1, so that no square under- or overflows. The result
    # does not depend on that factor, hence no gradient through it.
    size = v.detach().abs().amax(-1, keepdim=True)
    v = v / torch.where(size == 0, 1, size)
    square = (v * v).sum(-1, keepdim=True)
    along = (wide * v).sum(-1, keepdim=True) / torch.where(square == 0, 1, square)
    return (wide - along * v).flatten(1, 2).to(y.dtype)
