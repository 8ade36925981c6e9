"""`attention_statistics`: how spread each row of the attention weights is, without the whole matrix of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qkform.attention.checks import check_heads, check_mask, check_start, check_tensors
from qkform.attention.decoupled import why_not_flash
from qkform.attention.operator import attend
from qkform.errors import AttentionError

CHUNK_SCORES = (
    2**19
)  # scores held at once, over batch and heads, unless `chunk` says how many rows: a core's cache
_FAR = -800.0  # nats below the largest score: exp of it is 0 in every type


@dataclass(frozen=True)
class AttentionStatistics:
    """Of each row of attention weights, that is of each query: everything (B, H, N).

    A row without keys has log_sum_exp -inf and 0 in these, never NaN: a mean over rows takes those with `keys > 0`.
    """

    log_sum_exp: Tensor  # log of the sum of exp(score) over the keys; scores scaled, masks added
    entropy: Tensor  # nats, in [0, log keys]
    keys: Tensor  # int64: how many keys the row may attend to
    largest: Tensor | None  # the largest weight, in [1 / keys, 1]; None where it was not asked for

    @property
    def effective_keys(self) -> Tensor:
        """exp(entropy): over how many keys the weight is spread, in [1, keys]; 0 for a row without keys."""
        return torch.minimum(self.entropy.exp(), self.keys.to(self.entropy.dtype))

    @property
    def normalised_entropy(self) -> Tensor:
        """Entropy over log(keys), in [0, 1]: 1 is uniform.  NaN for one key or none, which leaves no choice.

        0 would say that the choice is sharp: a mean over rows takes those with keys > 1 (as in `sharpness`).
        """
        most = self.keys.clamp(min=2).to(self.entropy.dtype).log()
        return torch.where(self.keys > 1, (self.entropy / most).clamp(max=1.0), math.nan)


def attention_statistics(
    query: Tensor,
    key: Tensor,
    self_score: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_start: int | Tensor | None = None,
    largest: bool = True,
    chunk: int | None = None,
) -> AttentionStatistics:
    """Log-sum-exp, entropy in nats and largest weight of every row of standard or decoupled attention.

    query (B, H, N, D), key (B, G, M, D), self_score (B, H, N) or None (standard attention); masks, `is_causal`,
    `scale`, `enable_gqa` and `query_start` as in `decoupled_attention`; standard attention that is not causal may look
    at another sequence.  A float mask is part of the scores: all three count it, and -inf hides a key.

    Without gradients, in float32 (float64 for a float64 query).  From the scores of `chunk` rows at a time, by default
    as many as make half a million scores: the largest is taken off each row first, so that nothing cancels;
    what is left is the rounding of the scores, eps times their size.  Memory grows as N and not as N^2.

    largest=False is faster: log-sum-exp and entropy are one call of the fused kernels with the keys as values (but not
    under a float mask).  With p the weights and s the scores of a row,
    entropy = log_sum_exp - sum_j p_j s_j = log_sum_exp - scale * q . sum_j p_j k_j, and the self score in its place.
    The mean of the keys is taken off the keys first, which moves a row's scores together; log_sum_exp and the mean
    score still cancel, so that an entropy is exact up to a few eps times |log_sum_exp| of what is left.

    >>> found = attention_statistics(torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4), is_causal=True)
    >>> found.effective_keys[0, 0]
    tensor([1., 2., 3.])
    """
    check_tensors({"query": query, "key": key}, {"self_score": self_score, "attn_mask": attn_mask})
    check_heads(query, key, key, enable_gqa)
    b, h, n, d = query.shape
    m = key.shape[2]
    if attn_mask is not None:
        check_mask(attn_mask, (b, h, n, m))
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if self_score is not None and tuple(self_score.shape) != (b, h, n):
        raise AttentionError(
            f"self_score has shape {tuple(self_score.shape)}; the query wants (B, H, N) = {(b, h, n)}"
        )
    if self_score is not None or is_causal:
        check_start(query_start, n, m)
    else:
        query_start = None  # where a query stands makes no difference
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise AttentionError(f"chunk is {chunk!r}; it is a number of rows, 1 or more")
    exact = torch.promote_types(query.dtype, torch.float32)
    if b * h * n * m == 0:
        nothing = query.new_zeros(b, h, n, dtype=exact)
        return AttentionStatistics(
            nothing - math.inf, nothing, nothing.long(), nothing.clone() if largest else None
        )
    given = _Given(
        query.to(exact),
        key.to(exact),
        None if self_score is None else self_score.to(exact),
        attn_mask,
        is_causal,
        1 / math.sqrt(d) if scale is None else float(scale),
        m - n if query_start is None else query_start,
    )
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        keys = given.count_keys(chunk)
        if largest or not given.fits_the_fused_kernels():
            return _from_scores(given, keys, chunk, largest)
        return _fused(given, keys)


@dataclass(frozen=True)
class _Given:
    """The arguments, checked, in the type of the result; the mask in 4 dimensions."""

    query: Tensor
    key: Tensor
    self_score: Tensor | None
    mask: Tensor | None
    is_causal: bool
    scale: float
    start: int | Tensor

    def place(self, part: slice) -> Tensor:
        """(rows, 1): the key of each query's own token."""
        return torch.arange(part.start, part.stop, device=self.query.device)[:, None] + self.start

    def reach(self, part: slice) -> int:
        """M', how many keys come into question for some rows."""
        m: int = self.key.shape[2]
        return min(m, self.start + part.stop) if self.is_causal and isinstance(self.start, int) else m

    def mask_of(self, part: slice) -> Tensor | None:
        """The mask of some rows, broadcasting to (B, H, rows, M')."""
        if self.mask is None:
            return None
        return self.mask.expand(-1, -1, self.query.shape[2], self.key.shape[2])[
            :, :, part, : self.reach(part)
        ]

    def open(self, part: slice) -> Tensor | None:
        """Which keys some rows may attend to, broadcasting to (B, H, rows, M'); None where all."""
        found = self.mask_of(part)
        if found is not None and found.dtype != torch.bool:
            found = found != -math.inf  # NaN is open, and seen
        if self.is_causal:
            past = torch.arange(self.reach(part), device=self.query.device) <= self.place(part)
            found = past[None, None] if found is None else found & past
        return found

    def count_keys(self, chunk: int | None) -> Tensor:
        """(B, H, N): how many keys are open to each row."""
        b, h, n, _ = self.query.shape
        m = self.key.shape[2]
        count = torch.full((b, h, n), m, device=self.query.device)
        wide = 1 if self.mask is None else self.mask.shape[0] * self.mask.shape[1]
        for part in _parts(n, chunk, wide * m):
            found = self.open(part)
            if found is not None:
                count[:, :, part] = found.sum(-1)
            if self.self_score is not None:
                gone = self.self_score[:, :, part] == -math.inf
                if found is not None:
                    own = self.place(part).expand(*found.shape[:3], 1)
                    gone = gone & found.gather(-1, own)[..., 0]
                count[:, :, part] -= gone.long()
        return count

    def centre(self) -> Tensor:
        """(B, G, 1, D): the mean of the keys that some row may attend to; 0 where there is none or it is not finite."""
        used = torch.ones((), dtype=torch.bool, device=self.key.device)
        if self.is_causal:
            last = self.start + self.query.shape[2] - 1
            used = torch.arange(self.key.shape[2], device=self.key.device) <= last  # (M,)
        if self.mask is not None:
            used = used & self.mask.any(2).any(1, keepdim=True)  # (b, 1, M)
        used = used.expand(self.key.shape[0], 1, self.key.shape[2])[..., None]  # (B, 1, M, 1)
        mean = torch.where(used, self.key, 0.0).sum(2, keepdim=True) / used.sum(2, keepdim=True)
        return torch.where(mean.isfinite(), mean, 0.0)

    def fits_the_fused_kernels(self) -> bool:
        n, m = self.query.shape[2], self.key.shape[2]
        own = self.query[..., 0] if self.self_score is None else self.self_score
        if n > m or self.scale <= 0 or (self.mask is not None and self.mask.dtype != torch.bool):
            return False  # the kernels mask before they scale, and do not say what a float mask adds
        return why_not_flash(self.query, self.key, self.key, own, self.mask, 0.0, self.scale) is None


def _parts(n: int, chunk: int | None, scores_of_a_row: int) -> Iterator[slice]:
    rows = chunk or max(1, CHUNK_SCORES // max(1, scores_of_a_row))
    for begin in range(0, n, rows):
        yield slice(begin, min(begin + rows, n))


def _fused(given: _Given, keys: Tensor) -> AttentionStatistics:
    """Without the largest weights: one fused call gives the mean key of each row, and that the mean score."""
    q, self_score, scale = given.query, given.self_score, given.scale
    centre = given.centre()
    k = given.key - centre  # every score of row i is less by scale * moved_i
    moved = _product(q, centre)
    places = given.place(slice(0, q.shape[2]))
    product = _product(q, k.index_select(2, places[:, 0]))  # q_i . k_i
    own = product if self_score is None else self_score - moved
    start, place = (0, given.start) if isinstance(given.start, Tensor) else (given.start, None)
    mean_key, log_sum_exp = attend(q, k, k, own, given.mask, given.is_causal, scale, start, place)
    mean = _product(q, mean_key)
    if self_score is not None:
        weight = torch.exp(scale * own - log_sum_exp)  # of the own key
        hidden = own == -math.inf
        if given.mask is not None:
            mask = given.mask.expand(-1, -1, q.shape[2], k.shape[2])
            hidden = hidden | ~mask.gather(-1, places.expand(*mask.shape[:3], 1))[..., 0]
        mean = mean + torch.where(hidden, 0.0, weight * (own - product))
    entropy = _in_range(log_sum_exp - scale * mean, keys)
    log_sum_exp = (log_sum_exp + scale * moved).masked_fill_(keys == 0, -math.inf)
    return AttentionStatistics(log_sum_exp, entropy, keys, None)


def _product(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, N): q . k of each query with its own of k (B, G or H, N or 1, D)."""
    return (q.unflatten(1, (k.shape[1], -1)) * k[:, :, None]).sum(-1).flatten(1, 2)


def _in_range(entropy: Tensor, keys: Tensor) -> Tensor:
    """The entropy without what rounding adds: from 0 to log(keys)."""
    most = keys.clamp(min=1).to(entropy.dtype).log()
    return torch.minimum(entropy.clamp(min=0.0), most).masked_fill_(keys == 0, 0.0)


def _from_scores(given: _Given, keys: Tensor, chunk: int | None, largest: bool) -> AttentionStatistics:
    """Everything from the scores."""
    b, h, n, _ = given.query.shape
    log_sum_exp, entropy, most = (given.query.new_empty(b, h, n) for _ in range(3))
    for part in _parts(n, chunk, b * h * given.key.shape[2]):
        scores = _scores(given, part)
        top = scores.amax(-1, keepdim=True)  # (B, H, rows, 1)
        top.masked_fill_(top == -math.inf, 0.0)
        below = scores.sub_(top).clamp_(min=_FAR)  # 0 times -inf has no value
        weights = below.exp()
        total = weights.sum(-1)
        log_sum_exp[:, :, part] = top[..., 0] + total.log()
        entropy[:, :, part] = total.log() - weights.mul_(below).sum(-1) / total
        most[:, :, part] = 1 / total
    empty = keys == 0
    log_sum_exp.masked_fill_(empty, -math.inf)
    return AttentionStatistics(
        log_sum_exp, _in_range(entropy, keys), keys, most.masked_fill_(empty, 0.0) if largest else None
    )


def _scores(given: _Given, part: slice) -> Tensor:
    """(B, H, rows, M'): the scores of some rows, -inf where a row may not attend."""
    b, h, _, d = given.query.shape
    g, m = given.key.shape[1], given.reach(part)
    q = (given.scale * given.query[:, :, part]).reshape(b, g, -1, d)  # (B, G, H / G * rows, D)
    scores = (q @ given.key[:, :, :m].mT).view(b, h, -1, m)
    if given.self_score is not None:
        own = given.self_score[:, :, part, None]
        own = torch.where(own == -math.inf, own, given.scale * own)
        scores.scatter_(-1, given.place(part).expand(own.shape), own)
    mask, found = given.mask_of(part), given.open(part)
    if mask is not None and mask.dtype != torch.bool:
        scores += mask
    return scores if found is None else scores.masked_fill_(~found, -math.inf)
