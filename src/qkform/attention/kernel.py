"""What a fused attention kernel that hands over its log-sum-exp is: a pair of functions.

A kernel computes softmax(scale * q k^T + mask) v for queries (B, H, N, D), keys and values (B, G, M, D) and a float
mask of 4 dimensions that broadcasts; causal opens to row i the keys up to i. It returns the output (B, H, N, D) and the
log of each row's sum of exponentials (B, H, N). Its backward takes any output and log-sum-exp: the weights are
exp(score - lse), and the gradient of a score is weight * (grad_out . v - grad_out . out). That is what lets a row be
merged with scores from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

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
    refuses: Callable[[Tensor], str | None]  # why it cannot take these queries
    any_strides: bool = True  # a mask whose rows overlap in memory will do
