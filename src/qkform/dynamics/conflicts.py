"""`conflict`: do pairs of a token with itself pull W_qk against the other pairs, more than softmax makes them?

A negative cosine proves nothing by itself. Rows of beta sum to 0, so beta_ii = -sum of the others: raising a token's
score with itself is lowering its scores with others, and where embeddings share a direction the two gradients point
against each other for free. The null model keeps that and forgets which other key got what; conflict goes beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkform.dynamics.calls import Block, Call, check_dtype
from qkform.dynamics.capture import LossFunction, Watched, capture, without_autocast
from qkform.errors import DynamicsError


@dataclass(frozen=True, eq=False)
class Conflict:
    """Diagonal against off-diagonal gradient of one self-attention on one batch; everything (n_heads,) float64.

    With D = sum_i beta_ii x_i x_i^T, O = sum_{i != j} beta_ij x_i x_j^T and sym O its symmetric part:

    module          path of the attention in the model
    cosine          <D, sym O> / (||D|| ||sym O||), in [-1, 1]; NaN where either is 0
    share           ||D||^2 / (||D||^2 + ||O||^2), in [0, 1]
    cancellation    1 - ||D + sym O|| / (||D|| + ||sym O||), in [0, 1]: how much of the two is lost when they are added
    skew            the skew part's share of ||O||^2, in [0, 1]: of which D has nothing
    null_closed     the null's cosine in closed form, <D, E O> / (||D|| sqrt(E ||sym O||^2)), where under the null
                    E O = -sum_i beta_ii x_i m_i^T, m_i the mean of the other tokens that i may attend to
    null            (permutations, n_heads): cosines where each row's beta are permuted over its other open keys;
                    heads with the same mask share their draws

    Cosines depend on the size of the batch, which averages: compare like with like.
    """

    module: str
    cosine: Tensor
    share: Tensor
    cancellation: Tensor
    skew: Tensor
    null_closed: Tensor
    null: Tensor

    @property
    def null_cosine(self) -> Tensor:
        """(n_heads,): what softmax alone gives: the mean over permutations; without any, `null_closed`."""
        return self.null.mean(0) if len(self.null) else self.null_closed

    @property
    def excess(self) -> Tensor:
        """(n_heads,): cosine - null_cosine.  Conflict is where this is clearly below 0, not where the cosine is."""
        return self.cosine - self.null_cosine

    @property
    def null_spread(self) -> Tensor:
        """(n_heads,): standard deviation of the cosine over permutations; NaN for fewer than two."""
        return self.null.std(0) if len(self.null) > 1 else torch.full_like(self.cosine, math.nan)

    @property
    def p_value(self) -> Tensor:
        """(n_heads,), in (0, 1]: how often the null is as far down, (1 + #{null <= cosine}) / (1 + permutations).

        Small: more conflict than softmax makes.  NaN without permutations, or without a cosine.
        """
        found = (1 + (self.null <= self.cosine).sum(0)).to(self.cosine) / (1 + len(self.null))
        known = self.cosine.isfinite() if len(self.null) else torch.zeros_like(self.cosine, dtype=torch.bool)
        return torch.where(known, found, math.nan)

    @property
    def fraction_negative(self) -> float:
        """The share of heads with cosine < 0; to be read beside that of the null, see `fraction_negative`."""
        return fraction_negative([self]).observed


class Negative(NamedTuple):
    """Shares in [0, 1] of (measurement, head) with a cosine < 0; NaN where there is none."""

    observed: float
    null: float  # the same under the null: what softmax alone gives
    measured: int  # how many cosines were observed


def conflict(
    model: Any,
    batch: Mapping[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    permutations: int = 0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    modules: Sequence[str] | None = None,
) -> list[Conflict]:
    """The gradient of every self-attention's form from a token's pair with itself, against that from other pairs.

    A negative cosine alone proves nothing: softmax makes beta_ii the negative of the sum of its row's others, so that
    the cosine is negative wherever embeddings share a direction. Read `excess`, what is left over the null model that
    keeps this constraint: each row's beta permuted over the other keys that the row may attend to.

    permutations    draws of the null, each a pass over the pairs; 0: its closed form alone
    seed            of the permutations; the random numbers of torch are not touched
    the rest        as in `decompose`, whose errors it raises too

    The metric, E O and E ||sym O||^2 are exact; that their quotient is the null's mean cosine is leading order, the
    fluctuation of ||sym O|| left out: good where many rows add up.  On a decoupled model D is what v's gradient is the
    diagonal of, and W_Q and W_K learn from O alone.  Source: docs/theory.md.

    >>> for layer in conflict(model, batch, permutations=20):              # doctest: +SKIP
    ...     print(layer.module, layer.cosine, layer.excess, layer.p_value)
    """
    if not _is_whole(permutations) or permutations < 0:
        raise DynamicsError(f"permutations is {permutations!r:.60}; it is a number of draws, 0 or more")
    if not _is_whole(seed) or not -(2**63) <= seed < 2**63:
        raise DynamicsError(f"seed is {seed!r:.60}; it is a whole number of 64 bits")
    check_dtype(dtype)
    captured = capture(model, batch, loss_fn, modules)
    with without_autocast(captured):
        return [_conflict(each, int(permutations), int(seed), dtype) for each in captured]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def fraction_negative(found: Iterable[Conflict]) -> Negative:
    """How often cosines are negative, over the heads of all these measurements (layers, steps), and under the null.

    >>> steps: list[Conflict] = []
    >>> # in a loop: steps += conflict(model, batch)
    >>> fraction_negative(steps)
    Negative(observed=nan, null=nan, measured=0)
    """
    observed: list[Tensor] = []
    null: list[Tensor] = []
    for each in found:
        if not isinstance(each, Conflict):
            raise DynamicsError(
                f"found holds a {type(each).__name__}; give results of `conflict` in one list: steps += conflict(...)"
            )
        observed.append(each.cosine.flatten())
        null.append((each.null if len(each.null) else each.null_closed).flatten())
    share, count = _negative(observed)
    return Negative(share, _negative(null)[0], count)


def _negative(cosines: Sequence[Tensor]) -> tuple[float, int]:
    known = [float(c) for part in cosines for c in part if not math.isnan(float(c))]
    return (sum(c < 0 for c in known) / len(known) if known else math.nan), len(known)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _conflict(each: Watched, permutations: int, seed: int, dtype: torch.dtype | None) -> Conflict:
    diagonal, off, mean, noise = _parts(each.calls, dtype)
    d, o = diagonal.flatten(1), off.flatten(1)
    s = _symmetric(off).flatten(1)
    of_d, of_o, of_s = (t.norm(dim=1) for t in (d, o, s))
    generator = torch.Generator(diagonal.device).manual_seed(seed)
    draws = [_cosine(diagonal, _permuted(each.calls, dtype, generator)) for _ in range(permutations)]
    return Conflict(
        module=each.path,
        cosine=_cosine(diagonal, off),
        share=of_d**2 / (of_d**2 + of_o**2),
        cancellation=1 - (d + s).norm(dim=1) / (of_d + of_s),
        skew=((o - s).norm(dim=1) / of_o) ** 2,
        null_closed=_cosine(diagonal, mean, noise),
        null=torch.stack(draws) if draws else diagonal.new_zeros(0, len(diagonal)),
    )


def _parts(calls: Sequence[Call], dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """D, O and the mean of O under the null, (n_heads, d, d), and E ||sym (O - mean)||^2, (n_heads,); float64.

    A permutation of values b over n vectors x has sum_k b_k x_k with the mean n mean(b) mean(x) and the covariance
    sum_k (b_k - mean)^2 / (n - 1) times sum_k (x_k - mean)(x_k - mean)^T; rows are permuted independently.
    """
    own_sum, off_sum, null_sum = (_zeros(calls) for _ in range(3))
    noise = own_sum[:, 0, 0].clone()
    for block in (block for call in calls for block in call.blocks(dtype)):
        own, others = block.own(block.beta)[..., None], block.others()  # (b, H, R, 1), (., ., R, N)
        off = block.beta.masked_fill(~others, 0.0)
        x, among = block.x, others.to(block.x.dtype)
        asking = x[:, None, block.rows]  # (b, 1, R, d)
        count = among.sum(-1, keepdim=True).clamp(min=1)
        mean = among @ x[:, None] / count  # (b, ., R, d): of the other open keys
        own_sum += _product(block, own * asking)
        off_sum += _product(block, off @ x[:, None])
        null_sum -= _product(block, own * mean)
        values = (
            off.square().sum(-1, keepdim=True) - own.square() / count
        )  # sum (b_k - mean)^2: the row sums to -own
        sizes = (among * x.square().sum(-1)[:, None, None]).sum(-1, keepdim=True)
        sizes = sizes - count * mean.square().sum(-1, keepdim=True)  # sum_k |x_k - mean|^2
        along = (among * (asking @ x[:, None].mT).square()).sum(-1, keepdim=True)
        along = along - count * (mean * asking).sum(-1, keepdim=True).square()  # sum_k (x_i . (x_k - mean))^2
        spread = (asking.square().sum(-1, keepdim=True) * sizes + along) / 2
        noise += (values / (count - 1).clamp(min=1) * spread).sum((0, 2, 3))
    return own_sum, off_sum, null_sum, noise


def _permuted(calls: Sequence[Call], dtype: torch.dtype | None, generator: torch.Generator) -> Tensor:
    """O with each row's off-diagonal beta permuted over the other keys that are open to it.

    Heads with the same mask are permuted alike: each by itself has the law of the null, at the cost of one sort.
    """
    total = _zeros(calls)
    for block in (block for call in calls for block in call.blocks(dtype)):
        others = block.others().expand(len(block.x), -1, -1, -1)  # (b, 1 or H, R, N)
        draws = torch.rand(others.shape, generator=generator, device=others.device, dtype=torch.float32)
        shuffled = draws.masked_fill_(~others, 2.0).argsort(-1)  # the other open keys first, in random order
        rank = others.cumsum(-1).sub_(1).clamp_(min=0)  # an open key's place among them
        source = shuffled.gather(-1, rank).expand_as(block.beta)
        permuted = block.beta.gather(-1, source).masked_fill_(~others, 0.0)
        total = total + _product(block, permuted @ block.x[:, None])
    return total


def _zeros(calls: Sequence[Call]) -> Tensor:
    """(n_heads, d_model, d_model) float64, to add gradients to."""
    (_, heads, _, _), d = calls[0].query.shape, calls[0].x.shape[2]
    return torch.zeros(heads, d, d, dtype=torch.float64, device=calls[0].x.device)


def _product(block: Block, read: Tensor) -> Tensor:
    """sum_i x_i r_i^T over the rows of a block, (H, d, d), from r (b, H, R, d)."""
    return torch.einsum("brd,bhre->hde", block.x[:, block.rows], read)


def _symmetric(g: Tensor) -> Tensor:
    return (g + g.mT) / 2


def _cosine(diagonal: Tensor, off: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """(n_heads,): of D with the symmetric part of O, whose squared norm `noise` adds to; NaN where a norm is 0."""
    d, s = diagonal.flatten(1), _symmetric(off).flatten(1)
    size = d.norm(dim=1) * (s.square().sum(1) + noise).sqrt()
    cosine = ((d * s).sum(1) / size).clamp(-1.0, 1.0)
    return torch.where(size > 0, cosine, math.nan)
