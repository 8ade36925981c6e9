"""Decoupled attention on fused kernels: a token's score with itself is merged into the others' by log-sum-exp.

With o and l the output and log-sum-exp over the other keys and s the self score, the row is
    out = lerp(v_self, o, sigmoid(l - s)),  lse = log(exp(l) + exp(s)).
Backward: the fused backward with the merged out and lse gives what flows through the other keys; the self key adds
    p = exp(s - lse),  dv_self += p grad,  ds = p grad . (v_self - out).
Nothing of size N x M is kept in between.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkform.attention.fused import KERNELS
from qkform.attention.parts import Part, as_floats, empty_rows, parts


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    self_score: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    start: int,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, D) and log-sum-exp (B, H, N), +inf where a row has no key at all; D_v = D."""
    n, groups = q.shape[2], k.shape[1]
    q, k, v = (_dense(x) for x in (q, k, v))
    mask = as_floats(mask, q)
    lse = _self_scores(self_score, q, k, mask, scale, start)
    out = empty_like_heads(q)
    if out.numel() == 0:
        return out, lse
    own, split = _by_group(v[:, :, start : start + n], groups), _by_group(out, groups)
    done = 0  # rows of `out` that hold a value
    for part in parts(q, k, mask, causal, start):
        o, other = _fused(q, k, v, part, scale)
        (a, b), before = part.rows, lse[..., part.rows[0] : part.rows[1]]
        weight = torch.sigmoid(other - before).masked_fill_(other == -math.inf, 0.0).to(q.dtype)
        before.copy_(torch.logaddexp(before, other))
        base = own if a >= done else split
        torch.lerp(
            base[..., a:b, :],
            _by_group(o, groups),
            _by_group(weight, groups)[..., None],
            out=split[..., a:b, :],
        )
        if a >= done:
            split[..., done:a, :] = own[..., done:a, :]
            done = b
    split[..., done:, :] = own[..., done:, :]
    empty = lse == -math.inf
    if bool(empty.any()):
        out.masked_fill_(empty[..., None], 0.0)
        lse.masked_fill_(empty, math.inf)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    self_score: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and self_score."""
    n, groups = q.shape[2], k.shape[1]
    grad, q, k, v = (_dense(x) for x in (grad, q, k, v))
    mask = as_floats(mask, q)
    p = torch.exp(_self_scores(self_score, q, k, mask, scale, start) - lse)
    own, split = _by_group(v[:, :, start : start + n], groups), _by_group(grad, groups)
    slope = (split * (own - _by_group(out, groups))).sum(-1).flatten(1, 2)
    grad_self = (scale * p * slope).to(self_score.dtype)
    gq, gk, gv = (torch.zeros_like(x) for x in (q, k, v))
    kernel = KERNELS[q.device.type]
    for part in parts(q, k, mask, causal, start):
        rows, keys = slice(*part.rows), slice(*part.keys)
        dq, dk, dv = kernel.backward(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            mask=part.mask,
            causal=part.causal,
            scale=scale,
        )
        gq[:, :, rows] += dq
        gk[:, :, keys] += dk
        gv[:, :, keys] += dv
    gv[:, :, start : start + n] += (split * _by_group(p, groups)[..., None].to(grad.dtype)).sum(2)
    return gq, gk, gv, grad_self


def empty_like_heads(q: Tensor) -> Tensor:
    """Room for an output (B, H, N, D), laid out as scaled_dot_product_attention does: (B, N, H, D) in memory."""
    b, h, n, d = q.shape
    return q.new_empty(b, n, h, d).transpose(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one part; a row without open keys is 0 and -inf."""
    rows, keys = slice(*part.rows), slice(*part.keys)
    kernel = KERNELS[q.device.type]
    out, lse = kernel.forward(
        q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=part.mask, causal=part.causal, scale=scale
    )
    if part.mask is not None and bool((lse == 0).any()):
        lse.masked_fill_(empty_rows(part), -math.inf)
    return out, lse


def _self_scores(
    self_score: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, scale: float, start: int
) -> Tensor:
    """scale * self_score and what the mask adds to it, (B, H, N)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = self_score.to(wide) * scale
    if mask is not None:
        scores = scores + mask.expand(-1, -1, q.shape[2], k.shape[2]).diagonal(start, -2, -1)
    return scores


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(B, H, ...) as (B, groups, H // groups, ...), (B, groups, ...) as (B, groups, 1, ...)."""
    return x.unflatten(1, (groups, -1))


def _dense(x: Tensor) -> Tensor:
    """Kernels read the last dimension one by one."""
    return x if x.stride(-1) == 1 else x.contiguous()
