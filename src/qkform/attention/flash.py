"""Decoupled attention on fused kernels: a token's score with itself is merged into the others' by log-sum-exp.

With o and l the output and log-sum-exp over the other keys and s the self score, the row is
    out = lerp(v_self, o, sigmoid(l - s)),  lse = log(exp(l) + exp(s)).
Backward: the fused backward with the merged out and lse gives what flows through the other keys; the self key adds
    p = exp(s - lse),  dv_self += p grad,  ds = p grad . (v_self - out).
Nothing of size N x M is kept in between.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from qkform.attention.fused import KERNELS
from qkform.attention.masks import ready
from qkform.attention.parts import Part, closed_rows, parts
from qkform.attention.reference import score_type

TOGETHER = 2**18  # numbers of one step through rows: what a core's cache holds


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
    q, k, v = dense(q), dense(k), dense(v)
    mask = ready(mask, q, self_score, causal, start, k.shape[2])
    lse = _self_scores(self_score, q, k, mask, scale, start)
    own = by_key(_cut(v, (start, start + n)), q.shape[1])
    out, done = None, 0  # rows before `done` hold a value
    for part in parts(q, k, mask, causal, start) if lse.numel() else ():
        o, other = _fused(q, k, v, part, scale)
        a, b = part.rows
        before = _cut(lse, part.rows)
        share = other - before  # log of the odds of this part
        if part.closable:
            share.masked_fill_(other == -math.inf, -math.inf)
        torch.logaddexp(before, other, out=before)
        if out is None:
            out = o if b - a == n else torch.empty_like(q)
        split = by_group(out, groups)
        base = own if a >= done else split
        _join(_rows(base, a, b), by_group(o, groups), by_group(share, groups), _rows(split, a, b))
        if a >= done:
            if done < a:
                split[..., done:a, :] = own[..., done:a, :]
            done = b
    out = torch.empty_like(q) if out is None else out
    if done < n:
        by_group(out, groups)[..., done:, :] = own[..., done:, :]
    if not math.isfinite(float(lse.sum())):
        empty = lse == -math.inf
        out.masked_fill_(empty[..., None], 0.0).masked_fill_(~(empty | lse.isfinite())[..., None], math.nan)
        lse.masked_fill_(lse == math.inf, math.nan).masked_fill_(empty, math.inf)
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
    """Gradients of q, k, v and self_score, the first three laid out as those of the fused kernels."""
    n = q.shape[2]
    grad, q, k, v = dense(grad), dense(q), dense(k), dense(v)
    mask = ready(mask, q, self_score, causal, start, k.shape[2])
    p = torch.exp(_self_scores(self_score, q, k, mask, scale, start) - lse)
    own = _cut(v, (start, start + n))
    grad_self = (scale * p * _slopes(grad, own, out)).to(self_score.dtype)
    kernel = KERNELS[q.device.type]
    totals: list[Tensor | None] = [None, None, None]
    for part in parts(q, k, mask, causal, start) if lse.numel() else ():
        rows, keys = slice(*part.rows), slice(*part.keys)
        k_part, v_part = _keys(k, part), _keys(v, part)
        found = kernel.backward(
            _cut(grad, part.rows),
            _cut(q, part.rows),
            k_part,
            v_part,
            _cut(out, part.rows),
            _cut(lse, part.rows),
            mask=part.mask,
            causal=part.causal,
            scale=scale,
        )
        for i, (x, place) in enumerate(zip((q, k, v), (rows, keys, keys), strict=True)):
            piece = found[i].flip(2) if part.reverse and i > 0 else found[i]
            totals[i] = _gathered(totals[i], piece, place, x)
    gq, gk, gv = (
        empty_as_gradient(x).zero_() if g is None else g for g, x in zip(totals, (q, k, v), strict=True)
    )
    _add_self(_cut(gv, (start, start + n)), p, grad)
    return gq, gk, gv, grad_self


def _join(base: Tensor, other: Tensor, odds: Tensor, out: Tensor) -> None:
    """Into `out`: `other` with the weight sigmoid(odds), `base` with the rest."""
    if base.dtype in (torch.float32, torch.float64):
        torch.lerp(base, other, torch.sigmoid(odds).to(base.dtype)[..., None], out=out)
        return
    # Near 1 a narrow weight has steps of 0.004 (bfloat16): the rest would be lost, so it is a factor of its own.
    rest = base * torch.sigmoid(-odds).to(base.dtype)[..., None]
    torch.addcmul(rest, other, torch.sigmoid(odds).to(base.dtype)[..., None], out=out)


def _fused(q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one part; a row without open keys is 0 and -inf."""
    return KERNELS[q.device.type].forward(
        _cut(q, part.rows),
        _keys(k, part),
        _keys(v, part),
        mask=part.mask,
        causal=part.causal,
        scale=scale,
        closed=partial(closed_rows, part) if part.closable else None,
    )


def _keys(x: Tensor, part: Part) -> Tensor:
    x = _cut(x, part.keys)
    return x.flip(2) if part.reverse else x


def _rows(x: Tensor, a: int, b: int) -> Tensor:
    """The tokens a to b of x (..., N, D); x itself where these are all."""
    return x if a == 0 and b == x.shape[-2] else x[..., a:b, :]


def _cut(x: Tensor, place: tuple[int, int]) -> Tensor:
    """The tokens of x (B, H, N, ...) from the first number to the second; x itself where these are all."""
    return x if place == (0, x.shape[2]) else x[:, :, slice(*place)]


def _self_scores(
    self_score: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, scale: float, start: int
) -> Tensor:
    """scale * self_score and what the mask adds to it, (B, H, N)."""
    scores = self_score.to(score_type(q)) * scale
    if mask is not None:
        scores += mask.expand(-1, -1, q.shape[2], k.shape[2]).diagonal(start, -2, -1)
    return scores


def _slopes(grad: Tensor, own: Tensor, out: Tensor) -> Tensor:
    """grad . (v_self - out) of each row, (B, H, N): a few sequences at a time, so that what is in between is small."""
    sequences = grad.shape[0]
    together = max(1, TOGETHER * sequences // max(1, grad.numel()))
    if together >= sequences:
        return _slopes_at_once(grad, own, out)
    cuts = (slice(b, b + together) for b in range(0, sequences, together))
    return torch.cat([_slopes_at_once(grad[some], own[some], out[some]) for some in cuts])


def _slopes_at_once(grad: Tensor, own: Tensor, out: Tensor) -> Tensor:
    wide, groups = score_type(grad), own.shape[1]
    steps = by_key(own, grad.shape[1]).to(wide) - by_group(out, groups)  # float16 would overflow
    steps *= by_group(grad, groups)
    return steps.sum(-1, dtype=wide).reshape(grad.shape[:-1])


def _add_self(gv: Tensor, p: Tensor, grad: Tensor) -> None:
    """Add p grad, summed over the queries of a group, to the gradient of the values at the queries' own keys."""
    p = p.to(grad.dtype)[..., None]
    if gv.shape[1] == grad.shape[1]:
        gv.addcmul_(grad, p)
    else:
        gv += by_group(grad * p, gv.shape[1]).sum(2)


def _gathered(total: Tensor | None, piece: Tensor, place: slice, like: Tensor) -> Tensor:
    """The sum of gradients that came for some rows each."""
    if total is None:
        if piece.shape[2] == like.shape[2]:
            return piece
        total = empty_as_gradient(like)
        total[:, :, : place.start] = 0
        total[:, :, place.stop :] = 0
        total[:, :, place] = piece
    else:
        total[:, :, place] += piece
    return total


def empty_as_gradient(x: Tensor) -> Tensor:
    """Room for the gradient of x (B, H, N, D), in memory (B, N, H, D) as the fused kernels leave theirs."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d).transpose(1, 2)


def by_group(x: Tensor, groups: int) -> Tensor:
    """(B, H, ...) as (B, groups, H // groups, ...): the queries of one key together; or x, where each has its own."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1))


def by_key(x: Tensor, heads: int) -> Tensor:
    """(B, groups, ...) to stand beside what `by_group` makes of so many heads: (B, groups, 1, ...), or as it is."""
    return x if x.shape[1] == heads else x.unsqueeze(2)


def dense(x: Tensor) -> Tensor:
    """Kernels read the last dimension one by one."""
    return x if x.stride(-1) == 1 else x.contiguous()
