"""The self score as a function: `sum_k v_hk x_k^2`, with a backward of one pass over x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkform.attention.checks import transform_of
from qkform.attention.operator import direct


def quadratic(x: Tensor, v: Tensor) -> Tensor:
    """x (B, N, d), v (H, d), of one floating type -> (B, H, N)."""
    if direct(x, v) and transform_of(x, v) is None:
        return _Quadratic.apply(x, v)
    return _scores(x * x, v)


def _scores(squares: Tensor, v: Tensor) -> Tensor:
    return (squares @ v.mT).mT.contiguous()  # (B, N, d) (d, H) -> (B, H, N)


class _Quadratic(torch.autograd.Function):  # type: ignore[misc]
    """Autograd's own backward of x * x goes over x three times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(x, v)
        return _scores(x * x, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, v = ctx.saved_tensors
        along = grad.mT  # (B, N, H)
        grad_x = grad_v = None
        if ctx.needs_input_grad[0]:
            grad_x = along @ (2 * v)
            grad_x = grad_x * x if torch.is_grad_enabled() else grad_x.mul_(x)
        if ctx.needs_input_grad[1]:
            squares = x * x  # once more: kept from the forward, its memory costs more than its time
            grad_v = along.reshape(-1, v.shape[0]).mT @ squares.reshape(-1, v.shape[1])
        return grad_x, grad_v
