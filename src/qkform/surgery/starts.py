"""With what a self score starts: `v` from the weights of its attention, from noise, or fitted to its old self scores.

THEORY: the self score of a standard head, q_i . k_i, is a quadratic form of x_i with the matrix W_Q W_K^T; `v` has its
diagonal alone. docs/math.md#decoupled-self-score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qkform.errors import QKFormError, SurgeryError
from qkform.sites import Site
from qkform.surgery.interface import SWITCH, prescale
from qkform.surgery.self_score import SelfScore

RIDGE = 1e-4  # of the mean of the diagonal of the squares' second moments


def diagonal(site: Site, normalise: bool) -> Tensor:
    """(n_heads, d_model) float64: diag(W_Q W_K^T), the least-squares `v` for independent features of mean 0.

    Head h reads its group's keys. Biases add a constant and a linear term to a self score, which no `v` has. With norms
    on queries and keys: of q / rms(q) and k / rms(k), with the root mean squares that independent features give.
    """
    w_q, w_k = _sides(site, normalise)
    return (w_q * w_k).sum(-1)


def spread(site: Site, normalise: bool, generator: torch.Generator) -> Tensor:
    """(n_heads, d_model) float64: noise with which the self scores of tokens differ as much as standard ones do.

    v_k ~ N(0, d_h d sigma_q^2 sigma_k^2 / 2) with sigma the weights' root mean square, per head: then the standard
    deviation over tokens of sum_k v_k x_k^2 is that of q . k for independent features. sigma^2 = 1/d: d_h / (2 d).
    """
    w_q, w_k = _sides(site, normalise)
    d_model, d_head = w_q.shape[1:]
    sigma_q, sigma_k = (w.square().mean((1, 2), keepdim=True).sqrt() for w in (w_q, w_k))  # (H, 1, 1)
    deviation = math.sqrt(d_head * d_model / 2) * (sigma_q * sigma_k)[..., 0]  # (H, 1)
    noise = torch.randn(w_q.shape[:2], generator=generator, dtype=torch.float64)
    return deviation * noise.to(deviation.device)


def fit(
    model: Any, found: Sequence[Site], scores: Sequence[SelfScore], batch: Any
) -> list[tuple[Tensor, list[float | None]]]:
    """Per site `v` (n_heads, d_model) float64 and R^2 per head: the old self scores regressed on x^2 over a batch.

    The old score is the diagonal of the true one before the mask: with rotation, biases and norms, divided by the
    scale, without a bias of position. Padded tokens do not count. The model runs once, in eval mode, without gradients.
    R^2 is None where a head's self scores do not vary. The modules have to be attached.
    """
    if not isinstance(batch, Mapping):
        raise SurgeryError(
            'init="fit" needs batch=..., a mapping of what the model is called with, tokens and masks'
        )
    sums = [_Sums(site, score) for site, score in zip(found, scores, strict=True)]
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        for each in sums:
            each.start()
        with torch.no_grad():
            model(**batch)
    finally:
        for each in sums:
            each.stop()
        for module in training:
            module.training = True
    return [each.solve() for each in sums]


class _Sums:
    """The normal equations of one site's regression: the self score's squares against q . k of the same token."""

    def __init__(self, site: Site, score: SelfScore) -> None:
        self.site, self.score = site, score
        d, heads = site.layer.d_model, site.layer.n_heads
        device = score.v.device
        self.xx = torch.zeros(d, d, dtype=torch.float64, device=device)
        self.xy = torch.zeros(d, heads, dtype=torch.float64, device=device)
        self.y = torch.zeros(heads, dtype=torch.float64, device=device)
        self.yy = torch.zeros(heads, dtype=torch.float64, device=device)
        self.tokens = 0
        self.x: Tensor | None = None
        self.handle: Any = None
        torch_one = isinstance(site.module, nn.MultiheadAttention)
        self.seen = site.module if torch_one else getattr(site.module, SWITCH)  # what shows its calls

    def start(self) -> None:
        self.handle = self.score.register_forward_pre_hook(self._see)
        self.seen.observe = self._add

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
        self.xx += squares.mT @ squares
        self.xy += squares.mT @ y
        self.y += y.sum(0)
        self.yy += y.square().sum(0)
        self.tokens += len(y)
        self.x = None

    def solve(self) -> tuple[Tensor, list[float | None]]:
        if not self.tokens:
            raise SurgeryError(f'{self.site.path}: init="fit" found no token of the batch in this attention')
        eye = torch.eye(len(self.xx), dtype=torch.float64, device=self.xx.device)
        ridge = RIDGE * self.xx.diagonal().mean() + torch.finfo(torch.float64).tiny
        v = torch.linalg.solve(self.xx + ridge * eye, self.xy)  # (d, H)
        left = self.yy - 2 * (v * self.xy).sum(0) + (v * (self.xx @ v)).sum(0)
        whole = self.yy - self.y.square() / self.tokens
        varies = whole > 1e-9 * self.yy
        r2 = [float(1 - a / b) if c else None for a, b, c in zip(left, whole, varies, strict=True)]
        return v.mT, r2


def _own_key_allowed(mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """(B, N): the tokens that may attend to themselves, and so are none of padding; None for all."""
    if mask is None:
        return None
    own = mask.diagonal(dim1=-2, dim2=-1)  # (B, heads, N)
    allowed = own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
    return allowed.any(1).expand(*shape)


def _sides(site: Site, normalise: bool) -> tuple[Tensor, Tensor]:
    """W_Q and, for every head, the W_K of its group: (n_heads, d_model, d_head) float64."""
    w_q, w_k = site.w_q().detach().double(), site.w_k().detach().double()
    if normalise:
        sizes = [
            w.square().sum((1, 2), keepdim=True).div(w.shape[2]).sqrt() for w in (w_q, w_k)
        ]  # of q, of k
        gained = _gained(site)
        w_q, w_k = (w.to(w_q.device) / size for w, size in zip(gained or (w_q, w_k), sizes, strict=True))
    return w_q, w_k.repeat_interleave(w_q.shape[0] // w_k.shape[0], 0)


def _gained(site: Site) -> tuple[Tensor, Tensor] | None:
    """Both weights times the gains of the norms behind them; None where those are of an unknown making."""
    try:
        form = site.snapshot().form_with(qk_norm=True)
    except QKFormError:
        return None
    w_q, w_k = (torch.as_tensor(w, dtype=torch.float64) for w in (form.w_q, form.w_k))
    return w_q, w_k
