"""Which fused calls make the scores of a token with the others: queries, keys and a mask for each.

Causal: the queries after the first over the keys from the first query's own on, a triangle that ends before each
query's own key; and the keys before them, if any.  Otherwise: all keys, with -inf at each query's own.  That mask costs
nothing when the keys are reversed: query i's own key is then the one with i + j constant, so that rows of one short
vector, each a step further, are the mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from qkform.attention.fused import KERNELS

REVERSE_FROM = 640  # keys; below, a mask of N x M in memory is cheaper than reversing (measured on CPU)
BLOCK = 1024  # queries that share a copy of a mask of keys


class Part(NamedTuple):
    """One fused call; rows and keys are half-open ranges."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    mask: Tensor | None = None  # float, broadcasts to (B, H, rows, keys)
    causal: bool = False  # key j of the part is open to its rows from j on
    reverse: bool = False  # the keys in reversed order
    closable: bool = False  # the mask can leave a row without a key


def parts(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, start: int) -> Iterator[Part]:
    """The parts for queries at keys start, start + 1, ...; a part's mask is valid until the next part is asked for."""
    n, m = q.shape[2], k.shape[2]
    if causal:
        if start > 0:
            rows, keys = (0, n), (0, start)
            yield Part(rows, keys, _cut(mask, rows, keys), closable=mask is not None)
        if n > 1:
            rows, keys = (1, n), (start, start + n)
            yield Part(rows, keys, _cut(mask, rows, keys), causal=True, closable=mask is not None)
    elif m > 1:
        yield from _two_sided(q, k, mask, start)


def _two_sided(q: Tensor, k: Tensor, mask: Tensor | None, start: int) -> Iterator[Part]:
    n, m = q.shape[2], k.shape[2]
    if mask is None and n * m < REVERSE_FROM**2:
        yield Part((0, n), (0, m), _hidden(n, m, start, q.dtype, q.device))
    elif mask is None and KERNELS[q.device.type].any_strides:
        line = q.new_zeros(n + m - 1)
        line[m - 1 - start] = -math.inf
        yield Part((0, n), (0, m), line.as_strided((1, 1, n, m), (0, 0, 1, 1)), reverse=True)
    else:
        mask = q.new_zeros(1, 1, 1, 1) if mask is None else mask
        block = n if mask.shape[2] > 1 else min(n, BLOCK)
        own = mask.expand(-1, -1, n, m).diagonal(start, -2, -1)  # (b, h, n)
        copy = mask.expand(-1, -1, block, m).clone(memory_format=torch.contiguous_format)
        for first in range(0, n, block):
            end = min(first + block, n)
            hidden = copy[:, :, : end - first].diagonal(start + first, -2, -1)
            hidden.fill_(-math.inf)
            yield Part((first, end), (0, m), copy[:, :, : end - first], closable=True)
            hidden.copy_(own[..., first:end])


@lru_cache(
    maxsize=4
)  # at most 1.6 MB each: touching such memory anew in every layer costs more than reading it
def _hidden(n: int, m: int, start: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-inf at each query's own key, (1, 1, N, M); nobody writes to it."""
    hidden = torch.zeros(n, m, dtype=dtype, device=device)
    hidden.diagonal(start).fill_(-math.inf)
    return hidden[None, None]


def _cut(mask: Tensor | None, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape[2] > 1:
        mask = mask[:, :, rows[0] : rows[1]]
    return mask[..., keys[0] : keys[1]] if mask.shape[3] > 1 else mask


def closed_rows(part: Part) -> Tensor:
    """Which rows (b, h, rows or 1) of a part with a mask have no key open to them."""
    assert part.mask is not None
    assert not part.reverse
    open_ = part.mask > -math.inf
    rows, keys = part.rows[1] - part.rows[0], part.keys[1] - part.keys[0]
    if not part.causal:
        return ~open_.any(-1)
    if open_.shape[2] == 1:  # row i of the part reaches its keys up to i
        reached = open_.expand(-1, -1, 1, keys).cumsum(-1) > 0
        return ~reached[:, :, 0, :rows]
    places = torch.arange(keys, device=open_.device)
    return ~(open_ & (places <= places[:rows, None])).any(-1)
