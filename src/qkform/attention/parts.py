"""Which fused calls make the scores of a token with the others: queries, keys and a mask for each.

Causal: the queries after the first over the keys before the last, and the keys before the first query's own, if any.
Otherwise: all keys, with -inf at each query's own; in blocks of queries, so that the mask grows with M alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 512  # queries of a bidirectional call without a mask of N x M of its own


class Part(NamedTuple):
    """One fused call; rows and keys are half-open ranges."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    mask: Tensor | None  # float, broadcasts to (B, H, rows, keys)
    causal: bool  # key j of the part is open to its rows from j on


def parts(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, start: int) -> Iterator[Part]:
    """The parts for queries at keys start .. start + n of m. A mask of the last part is valid until the next is asked for."""
    n, m = q.shape[2], k.shape[2]
    if not causal:
        yield from _without_self(n, m, q.new_zeros(1, 1, 1, 1) if mask is None else mask, start)
        return
    if start > 0:
        yield Part((0, n), (0, start), _cut(mask, (0, n), (0, start)), False)
    if n > 1:
        rows, keys = (1, n), (start, start + n - 1)
        yield Part(rows, keys, _cut(mask, rows, keys), True)


def _without_self(n: int, m: int, mask: Tensor, start: int) -> Iterator[Part]:
    if m == 1:
        return
    whole = mask.shape[2] > 1
    block = n if whole else min(n, BLOCK)
    own = mask.expand(-1, -1, n, m).diagonal(start, -2, -1)  # (b, h, n)
    buffer = mask.expand(-1, -1, block, m).clone(memory_format=torch.contiguous_format)
    for first in range(0, n, block):
        end = min(first + block, n)
        hidden = buffer[:, :, : end - first].diagonal(start + first, -2, -1)
        hidden.fill_(-math.inf)
        yield Part((first, end), (0, m), buffer[:, :, : end - first], False)
        hidden.copy_(own[..., first:end])


def _cut(mask: Tensor | None, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape[2] > 1:
        mask = mask[:, :, rows[0] : rows[1]]
    return mask[..., keys[0] : keys[1]] if mask.shape[3] > 1 else mask


def empty_rows(part: Part) -> Tensor:
    """Which rows (b, h, rows or 1) of a part with a mask have no key open to them."""
    assert part.mask is not None
    open_ = part.mask > -math.inf
    rows, keys = part.rows[1] - part.rows[0], part.keys[1] - part.keys[0]
    if not part.causal:
        return ~open_.any(-1)
    if open_.shape[2] == 1:
        reached = open_.expand(-1, -1, 1, keys).cumsum(-1) > 0
        return ~reached[:, :, 0]
    places = torch.arange(max(rows, keys), device=open_.device)
    return ~(open_ & (places[:keys] <= places[:rows, None])).any(-1)


def as_floats(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask in 4 dimensions as the kernels want it: added floats, no repeated rows, the last dimension dense."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in range(4):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)  # an expanded dimension
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=like.dtype, device=mask.device)
        mask = torch.where(mask, zero, -math.inf)
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    if mask.dtype != like.dtype and mask.dtype != wide:
        mask = mask.to(wide)
    return mask.contiguous() if mask.shape[3] > 1 and mask.stride(3) != 1 else mask
