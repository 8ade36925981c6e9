"""Fused kernels are compared with the reference before their first use, once per process, device, type and head size.

What they do with a row without keys, with a mask whose rows overlap in memory, or with a mask beside causal is written
in no manual of theirs: another version of torch, or another card, may do otherwise.
"""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qkform.attention import flash, reference
from qkform.attention.fused import KERNELS

# largest difference of outputs and gradients that are near 1 in size
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_B, _H, _G = 2, 2, 1
_NO_MEMORY = "DefaultCPUAllocator"  # what a CPU without memory calls itself, in a plain RuntimeError


class Case(NamedTuple):
    """One comparison."""

    n: int  # queries
    m: int  # keys
    mask: str | None  # see `_mask`
    causal: bool
    start: int  # the key of the first query
    overlapping: bool = False  # the kernels alone, as they are used on many tokens

    def __str__(self) -> str:
        kind = "causal" if self.causal else "two-sided"
        return f"{self.n} queries and {self.m} keys, {kind}, mask: {self.mask or 'none'}"


CASES = (
    Case(37, 37, None, False, 0),
    Case(37, 37, None, True, 0),
    Case(37, 37, "floats", False, 0),
    Case(37, 37, "rows", True, 0),
    Case(5, 40, "keys", False, 11),
    Case(5, 40, "keys", True, 20),
    Case(1, 40, None, True, 39),
    Case(37, 40, None, False, 2, overlapping=True),
)


def disagreement(device: str, dtype: torch.dtype, d: int) -> str | None:
    """How a device's fused kernels ("cuda:0") differ from the reference for heads of d features; None: they agree.

    Warns where they differ, once.  Kernels that have no memory for the trial say nothing of their values:
    their error is raised, and the next call tries again.
    """
    return looked_at(device, dtype, d)


# Tracing takes the answer and does not look inside: what `torch._dynamo.assume_constant_result` does, the import of
# which takes longer than that of everything here.
disagreement._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def looked_at(device: str, dtype: torch.dtype, d: int) -> str | None:
    """The same, remembered."""
    # Gradient, inference and autocast modes, hooks on saved tensors and whatever records or fakes operators belong to
    # a thread: in one of its own the trial neither sees those of the caller nor is seen by them.
    with ThreadPoolExecutor(1) as other:
        found = other.submit(_compared, device, dtype, d).result()
    if found is not None:
        warnings.warn(
            f"{found}: attention takes the reference from here on, which is slower and makes a score matrix",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _compared(device: str, dtype: torch.dtype, d: int) -> str | None:
    what = f"the fused kernels of {device} for {str(dtype).removeprefix('torch.')}, {d} features per head"
    largest, where = 0.0, CASES[0]
    for case in CASES:
        if case.overlapping and not KERNELS[torch.device(device).type].any_strides:
            continue
        try:
            found = _difference(device, dtype, d, case)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY in str(error):
                raise
            return f"{what}, fail on {case}: {error}"
        if not found <= largest:  # NaN is
            largest, where = found, case
    if largest <= TOLERANCES.get(dtype, 0.0):
        return None
    return f"{what}, differ from the reference by {largest:.1e} on {where}"


def _difference(device: str, dtype: torch.dtype, d: int, case: Case) -> float:
    """The largest of output and gradients; NaN where any is."""
    n, m, _, causal, start, overlapping = case
    shapes = ((_B, _H, n, d), (_B, _G, m, d), (_B, _G, m, d), (_B, _H, n))
    inputs = [_numbers(shape, i).to(device, dtype) for i, shape in enumerate(shapes)]
    mask = _mask(case, device)
    if overlapping:
        inputs[3].fill_(-math.inf)  # the others' part alone
    else:
        inputs[3][:, ::2, ::3] = -math.inf
    for x in inputs:
        x.requires_grad_()
    scale = 1 / math.sqrt(d)
    exact = reference.decoupled(*inputs, attn_mask=mask, is_causal=causal, scale=scale, query_start=start)
    grad = _numbers(tuple(exact.shape), 4).to(device, dtype)
    wanted = [
        exact,
        *torch.autograd.grad((exact * grad).sum(), inputs),
    ]  # a sum: `grad_outputs` imports sympy
    with torch.no_grad():
        q, k, v, own = (x.detach() for x in inputs)
        if overlapping:
            found = _others(q, k, v, grad, scale, start)
        else:
            how = (mask, causal, scale, start)
            out, lse = flash.forward(q, k, v, own, *how)
            found = [out, *flash.backward(grad, q, k, v, own, out, lse, *how)]
        differences = [(a.double() - b.double()).abs().max() for a, b in zip(found, wanted, strict=False)]
        return float(torch.stack(differences).max())


def _others(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float, start: int) -> list[Tensor]:
    """Output and gradients of q, k and v over the other keys, by reversed keys under a mask of overlapping rows."""
    kernel, n, m = KERNELS[q.device.type], q.shape[2], k.shape[2]
    line = q.new_zeros(n + m - 1)
    line[m - 1 - start] = -math.inf
    mask = line.as_strided((1, 1, n, m), (0, 0, 1, 1))
    k, v = k.flip(2), v.flip(2)
    out, lse = kernel.forward(q, k, v, mask=mask, causal=False, scale=scale, closed=None)
    gq, gk, gv = kernel.backward(grad, q, k, v, out, lse, mask=mask, causal=False, scale=scale)
    return [out, gq, gk.flip(2), gv.flip(2)]


def _mask(case: Case, device: str) -> Tensor | None:
    """A row without keys in each: keys open or not for each query; floats for each head; left padding."""
    rows, keys = torch.arange(case.n, device=device)[:, None], torch.arange(case.m, device=device)
    opened = ((rows + keys) % 4 != 0) & (rows != case.n // 2)  # (N, M)
    if case.mask == "rows":
        return opened
    if case.mask == "keys":
        padding = torch.tensor([0, case.start + 2], device=device)  # causal: two rows without keys
        return keys >= padding[:, None, None, None]  # (B, 1, 1, M)
    if case.mask == "floats":
        added = _numbers((1, _H, case.n, case.m), 5).to(device)
        return added.masked_fill(~opened, -math.inf)
    return None


def _numbers(shape: tuple[int, ...], i: int) -> Tensor:
    """Numbers between -1 and 1 without a pattern, the same each time."""
    return torch.sin((torch.arange(math.prod(shape), dtype=torch.float64) + 1.0).pow(1.3) + i).view(shape)
