"""A mask as fused kernels want it: added floats, of which every row's largest is near 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOW = -64.0  # scores this far below 0 keep 20 bits of float32 behind the point


def ready(
    mask: Tensor | None, like: Tensor, self_score: Tensor, causal: bool, start: int, keys: int
) -> Tensor | None:
    """The mask in 4 dimensions, as floats, its rows levelled (see `tops`); in a new tensor where that takes one."""
    if mask is None:
        return None
    floats = as_floats(mask, like)
    if mask.dtype == torch.bool or not bool(((floats < LOW) & (floats > -math.inf)).any()):
        return floats
    n = like.shape[2]
    places = torch.arange(n, device=mask.device)[:, None] + start
    each = torch.arange(keys, device=mask.device)
    closed = (each == places) & (self_score == -math.inf)[..., None]  # (B, H, N, M)
    if causal:
        closed = closed | (each > places)
    return floats - tops(floats, ~closed)


def tops(mask: Tensor, allowed: Tensor) -> Tensor:
    """The largest value that a mask adds to the allowed keys of a row, where it is low: (..., N, 1), else 0.

    Taking it off a row changes no weight. Left on, a row of which every key is closed by a large finite number (the
    least of the type, -1e9), loses its scores to rounding: log(e^l + e^s) of two such numbers is the larger of them.
    """
    if not mask.numel() or not allowed.numel():
        return mask.new_zeros(())
    top = torch.where(allowed, mask.detach(), -math.inf).amax(-1, keepdim=True)
    return torch.where((top < LOW) & (top > -math.inf), top, 0.0)


def as_floats(mask: Tensor, like: Tensor) -> Tensor:
    """The mask in 4 dimensions as the kernels want it: added floats, no repeated rows, the last dimension dense."""
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


def narrowed(mask: Tensor | None, opened: Tensor) -> Tensor:
    """A mask of either kind with only those of its keys open that `opened` (bool) has open too; None opens all."""
    if mask is None:
        return opened
    return mask & opened if mask.dtype == torch.bool else mask.masked_fill(~opened, -math.inf)
