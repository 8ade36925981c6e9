"""With what a self score starts: `v` from the weights of its attention, from noise, or fitted to its old self scores.

The self score of a standard head, q_i . k_i, is a quadratic form of x_i with the matrix W_Q W_K^T; `v` has its
diagonal alone. docs/math.md#a-score-of-its-own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkform.errors import SurgeryError
from qkform.sites import Site
from qkform.surgery.interface import SWITCH, prescale
from qkform.surgery.own_form import own_form
from qkform.surgery.regression import Ridge
from qkform.surgery.self_score import SelfScore

FEW, ENOUGH = (
    4,
    16,
)  # tokens per feature: below FEW a fit says little, from ENOUGH on more of them change little


def diagonal(site: Site, normalise: bool) -> Tensor:
    """(n_heads, d_model) float64: diag(W_Q W_K^T), the least-squares `v` for independent features of mean 0.

    Head h reads its group's keys. Biases add a constant and a linear term to a self score, which no `v` has. A factor
    of the rotation (yarn, longrope) counts. With norms on queries and keys: of q / rms(q) . k / rms(k) to first order
    around the root mean squares that independent Gaussian features give, see `own_form`.
    """
    return own_form(site, normalise).diagonal


def spread(site: Site, normalise: bool, generator: torch.Generator) -> Tensor:
    """(n_heads, d_model) float64: noise with which self scores have the mean and differ as much as standard ones do.

    For independent Gaussian features of variance 1 the variance over tokens of x W x^T is 2 ||S||_F^2, S the symmetric
    part of W, and that of sum_k v_k x_k^2 is 2 |v|^2; their means are tr(W) and sum_k v_k. So v = tr(W)/d + noise that
    sums to 0 and has the size ||S - tr(W)/d||_F: both are those of before, exactly, for symmetric W as for others.
    For independent W_Q and W_K of mean squares sigma^2 = 1/d the noise is about N(0, d_h / (2 d)). With norms on
    queries and keys to first order, see `own_form`.
    """
    form = own_form(site, normalise)
    d = form.diagonal.shape[1]
    noise = torch.randn(form.diagonal.shape, generator=generator, dtype=torch.float64)
    noise = (noise - noise.mean(1, keepdim=True)).to(form.mean.device)
    length = noise.norm(dim=1, keepdim=True)
    noise = torch.where(length > 0, noise / length, noise)
    return form.mean[:, None] / d + form.deviation[:, None] * noise


@dataclass(frozen=True)
class Fitted:
    """`v` (n_heads, d_model) float64, R^2 per head, None where its self scores do not vary, and how many tokens it saw.

    R^2 is of tokens left out of the fit, one at a time: what to expect of others like them. Below 0 where the mean
    self score alone predicts better.
    """

    v: Tensor
    r2: list[float | None]
    tokens: int


def fit(model: Any, found: Sequence[Site], scores: Sequence[SelfScore], batch: Any) -> list[Fitted]:
    """Per site the old self scores regressed on x^2 over a batch.

    The old score is the diagonal of the true one before the mask: with rotation, biases and norms, divided by the
    scale, without a bias of position. Padded tokens do not count. The model runs twice, in eval mode, without
    gradients: once for the solutions, once for what they miss of tokens that are left out (see `Ridge`), by which
    every head's penalty is chosen. The modules have to be attached.
    """
    if not isinstance(batch, Mapping):
        raise SurgeryError(
            'init="fit" needs batch=..., a mapping of what the model is called with, tokens and masks'
        )
    fits = [_Fit(site, score) for site, score in zip(found, scores, strict=True)]
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        for second in (False, True):
            for each in fits:
                each.start(second)
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
            ):  # the same draws twice, where a model draws
                model(**batch)
    finally:
        for each in fits:
            each.stop()
        for module in training:
            module.training = True
    return [each.solve() for each in fits]


class _Fit:
    """One site's regression: q . k of a token with itself on the squares of its self score."""

    def __init__(self, site: Site, score: SelfScore) -> None:
        self.site, self.score = site, score
        self.ridge = Ridge(site.layer.d_model, site.layer.n_heads, score.v.device)
        self.second = False
        self.x: Tensor | None = None
        self.handle: Any = None
        torch_one = isinstance(site.module, nn.MultiheadAttention)
        self.seen = site.module if torch_one else getattr(site.module, SWITCH)  # what shows its calls

    def start(self, second: bool) -> None:
        self.second = second
        self.seen.observe = self._add
        if self.handle is None:
            self.handle = self.score.register_forward_pre_hook(self._see)

    def stop(self) -> None:
        self.x = None
        if self.handle is not None:
            self.handle.remove()
            self.score.take()
            self.seen.observe = None

    def _see(self, score: SelfScore, args: tuple[Any, ...]) -> None:
        self.x = args[0]

    def _add(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> None:
        """The tokens of one call: query (B, H, N, D), key (B, G, N, D)."""
        n, m = query.shape[2], key.shape[2]
        if self.x is None or n != m:
            raise SurgeryError(
                f'{self.site.path}: init="fit" takes a batch without a cache; found {m} keys for {n} tokens'
            )
        self.score.take()
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        y = (query.double() * key.double()).sum(-1).transpose(1, 2)  # (B, N, H)
        factor = prescale(self.site.module, scaling)
        y = y if factor is None else y / factor
        squares = self.score.squares(self.x.double())  # (B, N, d)
        kept = _own_key_allowed(mask, squares.shape[:2])
        squares, y = (t[kept] if kept is not None else t.flatten(0, 1) for t in (squares, y))
        if not self.second:
            self.ridge.add(squares, y)
        elif self.ridge.rows:
            self.ridge.leave_out(squares, y)
        self.x = None

    def solve(self) -> Fitted:
        if not self.ridge.rows:
            raise SurgeryError(f'{self.site.path}: init="fit" found no token of the batch in this attention')
        v, r2 = self.ridge.solve()
        return Fitted(v.mT, r2, self.ridge.rows)


def _own_key_allowed(mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """(B, N): the tokens that may attend to themselves, and so are none of padding; None for all."""
    if mask is None:
        return None
    own = mask.diagonal(dim1=-2, dim2=-1)  # (B, heads, N)
    allowed = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    return allowed.any(1).expand(*shape)
