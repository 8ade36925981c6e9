"""Stock fused attention kernels that hand over their log-sum-exp, one pair of functions per device.

A kernel computes softmax(scale * q k^T + mask) v for queries (B, H, N, D), keys and values (B, G, M, D) and a float
mask of 4 dimensions that broadcasts; causal opens to row i the keys up to i. It returns the output (B, H, N, D) and the
log of each row's sum of exponentials (B, H, N). Its backward takes any output and log-sum-exp: the weights are
exp(score - lse), and the gradient of a score is weight * (grad_out . v - grad_out . out). That is what lets a row be
merged with scores from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten


Closed = Callable[[], Tensor]  # which rows (b, h, rows or 1) the mask leaves without a key


class Forward(Protocol):
    """(output, log-sum-exp) of one fused call: 0 and -inf for the rows that `closed` names, where it is given."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        closed: Closed | None,
    ) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """Gradients of q, k and v for an output and a log-sum-exp that may hold more than this call's keys."""

    def __call__(
        self,
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
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Kernel(NamedTuple):
    """One device's pair."""

    forward: Forward
    backward: Backward


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


KERNELS = {"cpu": Kernel(_cpu_forward, _cpu_backward)}
