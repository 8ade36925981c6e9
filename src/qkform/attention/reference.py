"""What the attention functions mean, in plain torch: the scores as a matrix, changed, and a softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkform.attention.masks import narrowed, tops


def decoupled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    query_start: int | Tensor | None = None,
) -> Tensor:
    """Attention whose score of a token with itself is `scale * self_score` in place of `scale * q . k`.

    query (B, H, N, D), key (B, G, M, D), value (B, G, M, D_v) with G dividing H, self_score (B, H, N), mask
    broadcasting to (B, H, N, M); query i stands at key `query_start` + i, at the last N keys by default.
    Scores are in float32, in float64 when the query is.
    """
    weights = decoupled_weights(
        query,
        key,
        self_score,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        query_start=query_start,
    )
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return torch.dropout(weights, dropout_p, dropout_p > 0).to(value.dtype) @ value


def decoupled_weights(
    query: Tensor,
    key: Tensor,
    self_score: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_start: int | Tensor | None = None,
) -> Tensor:
    """The weights (B, H, N, M) with which `decoupled` adds up the values, in `score_type(query)`; see there."""
    n, m, d = query.shape[-2], key.shape[-2], query.shape[-1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    start = m - n if query_start is None else query_start
    place = torch.arange(n, device=query.device) + start  # (N,) the key of each query's own token
    keys = torch.arange(m, device=query.device)
    itself = keys == place[:, None]  # (N, M)
    wide = score_type(query)
    own = self_score.to(wide)[..., None]
    scores = scale * torch.where(itself, own, query.to(wide) @ key.to(wide).mT)  # (B, H, N, M)
    allowed = ~(itself & (own == -math.inf))
    if is_causal:
        allowed = allowed & (keys <= place[:, None])
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        allowed = allowed & (attn_mask != -math.inf)  # NaN is open, and seen
        scores = scores + (attn_mask - tops(attn_mask, allowed))
    elif attn_mask is not None:
        allowed = allowed & attn_mask
    weights = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1)
    return torch.where(allowed.any(-1, keepdim=True), weights, 0.0)  # a row without keys is zero, not NaN


def exclusive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    query_start: int | Tensor | None = None,
) -> Tensor:
    """The formula as it stands, on the score matrix: what `exclusive_attention` must agree with."""
    n, m, groups = query.shape[-2], key.shape[-2], query.shape[1] // key.shape[1]
    wide = score_type(query)
    place = torch.arange(n, device=query.device) + (m - n if query_start is None else query_start)
    own_key = key.repeat_interleave(groups, 1)[:, :, place]
    v = value.repeat_interleave(groups, 1)[:, :, place]  # (B, H, N, D_v)
    y = decoupled(
        query,
        key,
        value,
        (query.to(wide) * own_key.to(wide)).sum(-1),  # the score that the token has with itself anyway
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        query_start=query_start,
    )
    square = (v * v).sum(-1, keepdim=True)
    along = (y * v).sum(-1, keepdim=True) / torch.where(square == 0, 1, square)
    return y - along * v


def no_diagonal(
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
    return decoupled(
        query,
        key,
        value,
        torch.zeros_like(query[..., 0]),
        attn_mask=narrowed(attn_mask, others),
        is_causal=is_causal,
        scale=scale,
        query_start=query_start,
    )


def score_type(query: Tensor) -> torch.dtype:
    """The type that scores are computed in."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32
