"""What the scores of tokens with themselves are in a standard head: the quadratic form x M x^T, from its weights.

Without norms on queries and keys M is the symmetric part of W_Q W_K^T, with the factor of a rotation on the coordinates
that turn. With them the score is q . k / (rms(q) rms(k)); M is then its form to first order around the mean squares
that independent features give, x being x / rms(x). docs/math.md#a-score-of-its-own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkform.errors import QKFormError
from qkform.layouts import AttentionLayer
from qkform.sites import Site


@dataclass(frozen=True)
class OwnForm:
    """Of every head, float64, for independent Gaussian features of mean 0 and variance 1; biases left out.

    diagonal   (n_heads, d_model), of M plus what makes its sum the mean: the least-squares `v`
    mean       (n_heads,) of the self scores
    deviation  (n_heads,) the Frobenius norm of M without its trace, ||M - tr(M)/d||: a `v` of that size around
               mean / d lets self scores differ between tokens as much as x M x^T does
    """

    diagonal: Tensor
    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class _Sides:
    """W_Q and W_K as the score has them, (heads, d_model, d_head), and as the norms see them; None without norms.

    across: whether one norm is of all heads together
    """

    q: Tensor
    k: Tensor
    seen: tuple[Tensor, Tensor] | None = None
    across: bool = False


def own_form(site: Site, normalise: bool) -> OwnForm:
    """The form of a site's self scores; head h reads its group's keys. `normalise`: with norms on queries and keys.

    Gains of norms of an unknown making, and biases of norms, are left out. M is never formed: with the factors U of
    all its terms, M = U D U^T, its norm is tr(D G D G) with G = U^T U.
    """
    sides = _sides(site, normalise)
    group = site.layer.n_heads // site.layer.n_kv_heads
    each = [_head(sides, h, h // group) for h in range(site.layer.n_heads)]
    diagonal, mean, deviation = (torch.stack(values) for values in zip(*each, strict=True))
    return OwnForm(diagonal, mean, deviation)


def _head(sides: _Sides, h: int, g: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k = sides.q[h], sides.k[g]  # (d, d_head)
    d, width = q.shape
    eye = torch.eye(width, dtype=q.dtype, device=q.device)
    u, inner = torch.cat([q, k], 1), torch.kron(q.new_tensor([[0.0, 0.5], [0.5, 0.0]]), eye)
    mean = (q * k).sum()
    if sides.seen is not None:
        seen = [w if sides.across else w[i : i + 1] for w, i in zip(sides.seen, (h, g), strict=True)]
        squares = [w.square().sum() / (len(w) * width) for w in seen]  # mean squares of q and k
        tiny = torch.finfo(q.dtype).tiny
        whole = (squares[0] * squares[1]).sqrt() + tiny
        if not sides.across:  # one norm of all heads hardly varies with what one head has
            # d(a / sqrt(b c)) = (da - a/2 (db/b + dc/c)) / sqrt(b c)
            terms = [-0.5 * mean / (square + tiny) / width * eye for square in squares]
            u, inner = torch.cat([u, seen[0][0], seen[1][0]], 1), torch.block_diag(inner, *terms)
        mean, inner = mean / whole, inner / whole
    diagonal = ((u @ inner) * u).sum(1)
    gram = inner @ (u.mT @ u)
    trace = gram.diagonal().sum()
    square = (gram * gram.mT).sum() - trace.square() / d
    return diagonal + (mean - trace) / d, mean, square.clamp_min(0.0).sqrt()


def _sides(site: Site, normalise: bool) -> _Sides:
    layer = site.snapshot()
    w_q, w_k = site.w_q().detach().double(), site.w_k().detach().double()
    if not normalise:
        return _Sides(_turning(layer, w_q), _turning(layer, w_k))
    norms = layer.qk_norms
    seen, across = (w_q, w_k), False
    if norms is not None and norms.q:
        across = layer.n_heads > 1 and layer.read(norms.q[0]).shape == (layer.n_heads * layer.d_head,)
    if norms is not None and norms.kind == "layer":  # takes the mean away before it divides
        axes = (0, 2) if across else (2,)
        seen = (w_q - w_q.mean(axes, keepdim=True), w_k - w_k.mean(axes, keepdim=True))
    q, k = _gained(layer) or seen
    return _Sides(_turning(layer, q.to(w_q.device)), _turning(layer, k.to(w_k.device)), seen, across)


def _gained(layer: AttentionLayer) -> tuple[Tensor, Tensor] | None:
    """Both weights times the gains of the norms behind them; None where those are of an unknown making."""
    if layer.qk_norms is None:
        return None
    try:
        form = replace(layer, qk_norms=replace(layer.qk_norms, biases=())).form_with(qk_norm=True)
    except QKFormError:
        return None
    w_q, w_k = (torch.as_tensor(w, dtype=torch.float64) for w in (form.w_q, form.w_k))
    return w_q, w_k


def _turning(layer: AttentionLayer, w: Tensor) -> Tensor:
    """The weights with the factor of cosines and sines (yarn, longrope) on the coordinates that turn."""
    try:
        rotary = None if layer.positions is None else layer.positions.rotary(layer.d_head, 0, layer.part)
    except QKFormError:  # how the model turns them is not known
        rotary = None
    if rotary is None or rotary.factor == 1.0:
        return w
    factors = w.new_ones(w.shape[2])
    factors[rotary.start : rotary.start + rotary.dims] = rotary.factor
    return w * factors
