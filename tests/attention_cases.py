"""Arguments for attention functions: the shapes and masks that language models make, and those that break kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

B = 2

# heads, key heads, queries, keys
SHAPES = {
    "one token": (2, 2, 1, 1),
    "two tokens": (2, 2, 2, 2),
    "odd": (2, 2, 13, 13),
    "grouped": (6, 2, 13, 13),
    "one key head": (3, 1, 5, 5),
    "a step of a cache": (4, 2, 1, 9),
    "some steps of a cache": (4, 2, 5, 12),
    "one head": (1, 1, 7, 7),
}


def _none(h: int, n: int, m: int) -> Tensor | None:
    return None


def _left(h: int, n: int, m: int) -> Tensor:
    """The second sequence is padded on the left by more than half, so that rows of it are empty."""
    mask = torch.ones(B, 1, 1, m, dtype=torch.bool)
    mask[1, ..., : m // 2 + 1] = False
    return mask


def _right(h: int, n: int, m: int) -> Tensor:
    return _left(h, n, m).flip(-1)


def _left_full(h: int, n: int, m: int) -> Tensor:
    """As Hugging Face hands it over: expanded over the queries."""
    return _left(h, n, m).expand(B, 1, n, m)


def _window(h: int, n: int, m: int) -> Tensor:
    places, keys = torch.arange(m - n, m)[:, None], torch.arange(m)
    return (places - keys).abs() < 3


def _documents(h: int, n: int, m: int) -> Tensor:
    document = torch.stack([torch.arange(m) // 4, torch.arange(m) // 3])
    return (document[:, m - n :, None] == document[:, None, :])[:, None]


def _random(h: int, n: int, m: int) -> Tensor:
    """Some rows have no key but their own, some not even that."""
    mask = torch.rand(B, h, n, m) > 0.5
    mask[0, :, 0] = False
    mask[1, :, -1] = False
    mask[1, :, -1, -1] = True
    return mask


def _floats(h: int, n: int, m: int) -> Tensor:
    return torch.randn(n, m).masked_fill(torch.rand(n, m) > 0.7, -math.inf)


def _bias(h: int, n: int, m: int) -> Tensor:
    return torch.randn(1, h, n, m)


def _lowest(h: int, n: int, m: int) -> Tensor:
    """As eager masks of Hugging Face are: the least number in place of -inf, for whole rows too."""
    mask = torch.zeros(B, 1, n, m).masked_fill(torch.rand(B, 1, n, m) > 0.5, torch.finfo(torch.float32).min)
    mask[0, :, : (n + 1) // 2] = torch.finfo(torch.float32).min
    mask[1, :, -1] = -1e9
    mask[1, :, -1, 0] = -math.inf
    return mask


def _lowest_keys(h: int, n: int, m: int) -> Tensor:
    """Left padding by such a number, one row for all queries: causal rows have nothing else."""
    mask = torch.zeros(B, 1, 1, m)
    mask[1, ..., : m // 2 + 1] = torch.finfo(torch.float32).min
    return mask


def _closed(h: int, n: int, m: int) -> Tensor:
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool)


def _holes(h: int, n: int, m: int) -> Tensor:
    """Keys of the first sequence open one by one; the first two keys of the second are closed, and one later."""
    mask = torch.ones(B, 1, 1, m, dtype=torch.bool)
    mask[0, ..., 1::2] = False
    mask[1, ..., :2] = False
    mask[1, ..., 3:4] = False
    return mask


def _turned(h: int, n: int, m: int) -> Tensor:
    """Dense in the queries, not in the keys."""
    return torch.randn(h, m, n).mT


def _columns(h: int, n: int, m: int) -> Tensor:
    """One value for all keys of a query: half of the queries see nothing."""
    return (torch.arange(n) % 2 == 0)[:, None]


MASKS = {f.__name__.strip("_"): f for f in (
    _none, _left, _right, _left_full, _window, _documents, _random, _floats, _bias,
    _lowest, _lowest_keys, _closed, _columns, _holes, _turned,
)}  # fmt: skip


def arguments(
    shape: tuple[int, int, int, int], d: int = 5, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """query, key, value, self_score, with heads and tokens swapped in memory as models hand them over."""
    h, g, n, m = shape
    r = torch.Generator().manual_seed(seed)

    def heads(count: int, tokens: int) -> Tensor:
        return torch.randn(B, tokens, count, d, generator=r, dtype=torch.float64).to(dtype).transpose(1, 2)

    own = 3 * torch.randn(B, h, n, generator=r, dtype=torch.float64)
    return [heads(h, n), heads(g, m), heads(g, m), own.to(dtype)]


def mask_of(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> Tensor | None:
    """A mask of this kind, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        h, _, n, m = shape
        mask = MASKS[kind](h, n, m)
    return mask.to(dtype) if mask is not None and mask.is_floating_point() else mask


def with_gradients(function: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The output and the gradients of every input, for a gradient that differs everywhere."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    along = torch.sin(torch.arange(1, out.numel() + 1, dtype=torch.float64)).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, along)]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference between tensors, pair by pair; NaN agrees with nothing."""
    found = 0.0
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape
        if a.numel():
            furthest = (a.double() - b.double()).abs().max().item()
            found = furthest if math.isnan(furthest) else max(found, furthest)
    return found
