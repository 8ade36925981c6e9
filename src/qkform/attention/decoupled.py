"""`decoupled_attention`: scaled dot-product attention in which a token's score with itself is given."""

from __future__ import annotations

import math
from operator import index
from typing import Literal

import torch
from torch import Tensor

from qkform.attention import reference
from qkform.attention.checks import autocast, check, check_tensors, transform_of
from qkform.attention.fused import KERNELS
from qkform.attention.operator import Direct, attend, direct
from qkform.attention.trial import disagreement
from qkform.errors import AttentionError


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
    """Attention whose score of a token with itself is `scale * self_score` in place of `scale * q . k`.

    The arguments of `torch.nn.functional.scaled_dot_product_attention`, and two of its own:

    query (B, H, N, D), key (B, G, M, D), value (B, G, M, D_v): one floating type; G < H takes `enable_gqa`.
    self_score (B, H, N): unscaled, as q . k is; any floating type, computed in float32 (float64 when the query is).
    -inf takes the self key away.
    attn_mask broadcasts to (B, H, N, M): bool, True where a key is open, or floats to add; on the self score too.
    query_start is the key index of the first query's own token, an int or a tensor with one integer; M - N by
    default: the queries are the last N tokens. `is_causal` opens the keys up to a query's own, so that with N < M it is
    aligned bottom-right, where `scaled_dot_product_attention` is top-left; it may come together with a mask.
    A row with no key left is 0, and so are its gradients.

    impl: "flash" uses fused kernels (exact, memory linear in N; raises AttentionError where they cannot be used),
    "reference" the definition, "auto" flash where it can. Flash has no second derivatives and raises for them.

    Returns (B, H, N, D_v) in the type of the query.  Source: docs/math.md#a-score-of-its-own;
    `reference.decoupled` is the definition.

    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> decoupled_attention(q, k, v, torch.zeros(1, 2, 3), is_causal=True).shape
    torch.Size([1, 2, 3, 4])
    """
    check_tensors(
        {"query": query, "key": key, "value": value, "self_score": self_score}, {"attn_mask": attn_mask}
    )
    query, key, value = autocast(query, key, value)
    check(query, key, value, self_score, attn_mask, dropout_p, enable_gqa, query_start, impl)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    reason = None
    if impl != "reference":
        reason = why_not_flash(query, key, value, self_score, attn_mask, dropout_p, scale)
    if impl == "flash":
        refuse_flash(reason)
    if impl == "reference" or reason is not None:
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
    place = query_start if isinstance(query_start, Tensor) else None
    start = key.shape[2] - query.shape[2] if query_start is None else 0 if place is not None else query_start
    given = (query, key, value, self_score, attn_mask, is_causal, scale, start, place)
    return Direct.apply(*given) if direct(*given[:5], place) else attend(*given)[0]


def refuse_flash(reason: str | None) -> None:
    if reason is not None:
        raise AttentionError(f"impl='flash' cannot be used: {reason}; impl='reference' and 'auto' can")


def why_not_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    scale: float,
) -> str | None:
    """Why fused kernels cannot take these arguments, which fit each other; None where they can."""
    tensors = [query, key, value, self_score] + ([] if attn_mask is None else [attn_mask])
    if query.device.type not in KERNELS:
        return f"there are no kernels for device {query.device.type!r}, only for {', '.join(KERNELS)}"
    if dropout_p > 0:
        return f"dropout_p is {dropout_p}, and fused kernels drop by a rule of their own"
    if not scale > 0:
        return f"scale is {scale}, and fused kernels hide keys before they scale"
    if value.shape[-1] != query.shape[-1]:
        return f"value has {value.shape[-1]} features per head, and query {query.shape[-1]}"
    if attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        return "attn_mask requires a gradient"
    # index: a number, where the compiler has a symbol
    return (
        KERNELS[query.device.type].refuses(query)
        or disagreement(str(query.device), query.dtype, index(query.shape[-1]))
        or transform_of(*tensors)
    )
