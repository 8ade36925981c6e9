"""Kernels that were never seen at work are compared with the reference before their first use."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from qkform.attention import flash, reference

# largest difference of outputs and gradients that are near 1 in size
TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def disagreement(device: str, dtype: torch.dtype, d: int) -> str | None:
    """How a device's fused kernels ("cuda:0") differ from the reference for heads of d features; None: they agree."""
    return looked_at(device, dtype, d)


@cache
def looked_at(device: str, dtype: torch.dtype, d: int) -> str | None:
    """The same; a function with a cache is not for the compiler to look into."""
    tolerance = TOLERANCES.get(dtype, 0.0)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.split(":")[0], enabled=False),
    ):
        for n, m, masked in ((37, 37, False), (37, 37, True), (1, 40, False), (5, 40, True)):
            for causal in (False, True):
                try:
                    found = _largest_difference(device, dtype, d, n, m, masked, causal)
                except RuntimeError as error:
                    return f"the fused kernels of {device} fail on {n} queries and {m} keys: {error}"
                if not found <= tolerance:
                    return (
                        f"the fused kernels of {device} differ from the reference by {found:.1e} in {dtype}"
                    )
    return None


def _largest_difference(
    device: str, dtype: torch.dtype, d: int, n: int, m: int, masked: bool, causal: bool
) -> float:
    inputs = [
        _numbers(shape, i).to(device, dtype).requires_grad_()
        for i, shape in enumerate(((2, 4, n, d), (2, 2, m, d), (2, 2, m, d), (2, 4, n)))
    ]
    mask = None
    if masked:
        mask = (torch.arange(n)[:, None] + torch.arange(m)) % 3 != 0  # (N, M)
        mask[n // 2] = False
        mask = mask.to(device)
    scale = 1 / math.sqrt(d)
    exact = reference.decoupled(*inputs, attn_mask=mask, is_causal=causal, scale=scale)
    grad = _numbers(tuple(exact.shape), 4).to(device, dtype)
    wanted = [exact, *torch.autograd.grad(exact, inputs, grad)]
    with torch.no_grad():
        q, k, v, own = (x.detach() for x in inputs)
        out, lse = flash.forward(q, k, v, own, mask, causal, scale, m - n)
        found = [out, *flash.backward(grad, q, k, v, own, out, lse, mask, causal, scale, m - n)]
        differences = [(a.double() - b.double()).abs().max() for a, b in zip(found, wanted, strict=True)]
        return float(torch.stack(differences).max())  # NaN where any is


def _numbers(shape: tuple[int, ...], i: int) -> Tensor:
    """Numbers between -1 and 1 without a pattern, the same each time."""
    return torch.sin((torch.arange(math.prod(shape)) + 1.0).pow(1.3) + i).view(shape)
