"""The fused kernels of each device: `kernel.Kernel` says what they do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkform.attention import cuda
from qkform.attention.kernel import Closed, Kernel

_aten = torch.ops.aten


def _cpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    closed: Closed | None,
) -> tuple[Tensor, Tensor]:
    """The mask has 2 or 4 dimensions, is read by its strides (0 or 1 in the last), and may come with causal.

    A row without an allowed key gives output 0 and log-sum-exp 0. No keys at all ends the process: never call it so.
    It takes a row of nothing but NaN for one without keys; such rows get the log-sum-exp NaN here.
    """
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    if not bool(lse.all()):
        rows = (lse == 0).nonzero(as_tuple=True)
        group = rows[1] // (q.shape[1] // k.shape[1])
        lost = q[rows].isnan().any(-1) | k.isnan().any(-1).any(-1)[rows[0], group]
        lse[rows] = torch.where(lost, math.nan, lse[rows])
        if closed is not None:
            lse.masked_fill_(closed(), -math.inf)
    return out, lse


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return grads[0], grads[1], grads[2]


def _cpu_refuses(q: Tensor) -> str | None:
    return None


KERNELS = {"cpu": Kernel(_cpu_forward, _cpu_backward, _cpu_refuses), "cuda": cuda.KERNEL}
