"""The memory-efficient kernels of CUDA as `fused.Kernel`. Written from their signatures and not yet run on a card.

`trial` compares them with the reference before they are used, as it does all: where they differ or fail, `auto` takes
the reference. They take any mask, where the flash kernels take none; the flash and cuDNN ones may follow for speed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qkform.attention.kernel import Closed, Kernel

_aten = torch.ops.aten
_ROWS = 32  # log-sum-exps of a head are a multiple of it
_COLUMNS = 16  # and so are the keys of a mask in memory


def refuses(q: Tensor) -> str | None:
    """Why the kernels cannot take these queries."""
    if q.dtype == torch.float64:
        return "on CUDA fused kernels do not compute in float64"
    if q.shape[-1] % 8:
        return f"on CUDA fused kernels want a multiple of 8 features per head, and query has {q.shape[-1]}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    closed: Closed | None,
) -> tuple[Tensor, Tensor]:
    """Grouped keys are copied for each query head."""
    tokens = (x.transpose(1, 2) for x in (q, _per_head(k, q), _per_head(v, q)))  # (B, N, H, D)
    found = _aten._efficient_attention_forward(
        *tokens, _aligned(mask, q, k), None, None, None, None, 0.0, int(causal), True, scale=scale
    )
    out, lse = found[0].transpose(1, 2), found[1][..., : q.shape[2]]
    if closed is not None:
        rows = closed()
        lse = lse.masked_fill(rows, -math.inf)
        out = out.masked_fill(rows[..., None], 0.0)
    return out, lse


def backward(
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
    """The gradients of grouped keys are summed over their queries."""
    n, m, groups = q.shape[2], k.shape[2], k.shape[1]
    lse = torch.nn.functional.pad(lse, (0, -n % _ROWS), value=math.inf).contiguous()
    tokens = [x.transpose(1, 2) for x in (grad, q, _per_head(k, q), _per_head(v, q))]
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    bias = _aligned(mask, q, k)
    how = (None, None, n, m, lse, 0.0, no_dropout, no_dropout, int(causal), False)
    found = _aten._efficient_attention_backward(*tokens, bias, out.transpose(1, 2), *how, scale=scale)
    gq, gk, gv = (x.transpose(1, 2) for x in found[:3])
    if groups != q.shape[1]:
        gk, gv = (x.unflatten(1, (groups, -1)).sum(2) for x in (gk, gv))
    return gq, gk, gv


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] != q.shape[1] else x


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask in the type of the queries, (B, H, N, M) by strides, its rows at addresses that the kernels can load."""
    if mask is None:
        return None
    b, h, n, _ = q.shape
    m = k.shape[2]
    room = q.new_empty(*mask.shape[:3], m + -m % _COLUMNS)[..., :m]
    return room.copy_(mask).expand(b, h, n, m)


KERNEL = Kernel(forward, backward, refuses, any_strides=False)
