"""One call of a self-attention as it was seen, and the gradient of its scores, some rows at a time.

    S_ij = scale * x_i W_qk x_j^T,  A = softmax over the open keys,  G_ij = dL/dA_ij = dL/do_i . v_j
    beta_ij = scale * A_ij (G_ij - sum_k A_ik G_ik)  =  scale * dL/dS_ij;  0 for masked pairs

Exact. A row of beta sums to 0: softmax takes from the others what it gives to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkform.errors import DynamicsError

TOGETHER = 2**22  # scores held at once, over sequences, heads and rows
CLOSED = 5e3  # nats: a key whose mask is so far below the row's highest is closed, its weight 0


class Block(NamedTuple):
    """Some rows of beta: queries `rows` of the sequences `some`."""

    some: slice
    rows: slice
    beta: Tensor  # (b, H, R, N)
    open: Tensor  # broadcasting to (b, H, R, N), bool: which pairs there are
    x: Tensor  # (b, N, d_model): all tokens of these sequences

    def own(self, pairs: Tensor) -> Tensor:
        """The pairs of a token with itself, (..., R), of something (..., R, N)."""
        return pairs.diagonal(self.rows.start, -2, -1)

    def others(self) -> Tensor:
        """(..., R, N) bool: the open pairs of a token with another."""
        return self.open & ~itself(self)


def itself(block: Block) -> Tensor:
    """(R, N) bool: the pairs of a token with itself."""
    n = block.x.shape[1]
    place = torch.arange(n, device=block.x.device)
    return place[block.rows, None] == place


def working_type(own: torch.dtype, dtype: Any) -> torch.dtype:
    """In what the pairs are computed: the model's own type, float32 at least, unless told otherwise."""
    return torch.promote_types(own, torch.float32) if dtype is None else dtype


def check_dtype(dtype: Any) -> None:
    if dtype not in (None, torch.float32, torch.float64):
        raise DynamicsError(f"dtype is {dtype!r:.60}; it is torch.float32 or torch.float64")


@dataclass(frozen=True, eq=False)
class Call:
    """What one call of an attention saw, and the gradient that came back to it.

    kind    "standard", "decoupled" (`own` is the score of a token with itself), "no-diagonal" (a token does not see
            itself) or "exclusive" (the output is without the direction of the token's own value)
    """

    x: Tensor  # (B, N, d_model): what W_Q and W_K read
    query: Tensor  # (B, H, N, D), rotated and normed as the model does, before any scale
    key: Tensor  # (B, G, N, D)
    value: Tensor  # (B, G, N, D_v)
    mask: Tensor | None  # broadcasting to (B, H, N, N); bool with True for open, or added to the scores
    causal: bool
    scale: float
    own: Tensor | None = None  # (B, H, N), in units of q . k
    kind: str = "standard"
    grad: Tensor | None = None  # (B, H, N, D_v): dL/do, where the loss was taken back

    def blocks(self, dtype: torch.dtype | None = None) -> Iterator[Block]:
        """beta, block by block; computed in float32 at least, or in `dtype`."""
        wide = self._wide(dtype)
        for some, rows in self._parts():
            yield self._block(some, rows, wide)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Sequences, rows, A (b, H, R, N) and which pairs are open, broadcasting to it: block by block."""
        wide = self._wide(dtype)
        for some, rows in self._parts():
            yield some, rows, *self._weights(some, rows, wide)

    def _wide(self, dtype: torch.dtype | None) -> torch.dtype:
        return working_type(self.query.dtype, dtype)

    def _parts(self) -> Iterator[tuple[slice, slice]]:
        """Sequences and rows of which not too many scores are made at once."""
        batch, heads, n, _ = self.query.shape
        together = max(1, TOGETHER // max(1, heads * n * n))
        step = n if heads * n * n <= TOGETHER else max(1, TOGETHER // (heads * n))
        for first in range(0, batch, together):
            for start in range(0, n, step):
                yield slice(first, min(first + together, batch)), slice(start, min(start + step, n))

    def _weights(self, some: slice, rows: slice, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """A (b, H, R, N), 0 where a pair is closed, and which are open, broadcasting to it."""
        heads, n = self.query.shape[1:3]
        q, k = self.query[some, :, rows].to(wide), _for_heads(self.key[some].to(wide), heads)
        place = torch.arange(n, device=q.device)
        diagonal = place[rows, None] == place  # (R, N)
        scores = self.scale * (q @ k.mT)  # (b, H, R, N)
        if self.own is not None:
            scores = torch.where(diagonal, self.scale * self.own[some, :, rows, None].to(wide), scores)
        allowed = torch.ones_like(diagonal)[None, None]
        if self.causal:
            allowed = allowed & (place[rows, None] >= place)
        if self.kind == "no-diagonal":
            allowed = allowed & ~diagonal
        mask = self._mask(some, rows)
        if mask is not None and mask.dtype == torch.bool:
            allowed = allowed & mask
        elif mask is not None:
            seen = torch.where(allowed, mask, -torch.inf)
            scores = scores + seen.to(wide)
            least = (
                seen.amax(-1, keepdim=True) - CLOSED
            )  # -inf and finfo.min, and -1e4 and -1e9 as people write them
            allowed = allowed & (seen >= least) & (seen > -torch.inf)
        weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
        return torch.where(allowed, weights, 0.0), allowed  # 0 also in a row without any key

    def _block(self, some: slice, rows: slice, wide: torch.dtype) -> Block:
        assert self.grad is not None  # of a call whose loss was taken back
        weights, allowed = self._weights(some, rows, wide)
        g, v = self.grad[some, :, rows].to(wide), _for_heads(self.value[some].to(wide), self.query.shape[1])
        if self.kind == "exclusive":
            g = _without(g, v[:, :, rows])
        slopes = g @ v.mT  # (b, H, R, N): dL/dA
        centred = slopes - (weights * slopes).sum(-1, keepdim=True)
        beta = torch.where(allowed, self.scale * weights * centred, 0.0)
        return Block(some, rows, beta, allowed, self.x[some].to(wide))

    def _mask(self, some: slice, rows: slice) -> Tensor | None:
        """The part of the mask for a block; its dimensions of size 1 stay."""
        mask = self.mask
        if mask is None:
            return None
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[some] if mask.shape[0] > 1 else mask
        return mask[:, :, rows] if mask.shape[2] > 1 else mask


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values (b, G, N, D) for every head that reads them, (b, H, N, D)."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _without(g: Tensor, v: Tensor) -> Tensor:
    """g less its part along v; all of g where v is 0."""
    square = (v * v).sum(-1, keepdim=True)
    return g - (g * v).sum(-1, keepdim=True) / torch.where(square == 0, 1, square) * v
