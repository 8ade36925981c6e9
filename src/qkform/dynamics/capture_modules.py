"""Watching attentions that are modules of their own: nn.MultiheadAttention, and circuits as parameters.

They are seen from outside: what goes in, what comes out, and the weights in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qkform.dynamics.calls import Call
from qkform.dynamics.capture import Watched, is_circuit
from qkform.errors import DynamicsError


@contextmanager
def watching(root: Any, watched: Sequence[Watched]) -> Iterator[None]:
    """Note every call of these attentions."""
    for each in watched:
        module = each.module
        if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
            raise DynamicsError(f"{each.path} has keys of no token (add_bias_kv or add_zero_attn)")
    # nn.TransformerEncoder packs padded sequences where nothing learns; hooks keep the other fast paths away
    packing = [m for m in root.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    hooks = []
    try:
        for encoder in packing:
            encoder.use_nested_tensor = False
        for each in watched:
            hooks.append(each.module.register_forward_hook(partial(_see, each), with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for encoder in packing:
            encoder.use_nested_tensor = True


_ARGUMENTS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)


def _see(each: Watched, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """After a call: what was given and what came out."""
    if each.over:
        return output
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    x = given["query"]
    for name in ("key", "value"):
        other = given.get(name)
        if other is not None and other is not x and not (name == "value" or _same(x, other)):
            if each.site is None:
                return output  # a collapsed circuit does not tell beforehand what it is for
            raise DynamicsError(f"{each.path} was called as cross-attention: its {name} is not its query")
    single, swapped = x.ndim == 2, x.ndim == 3 and not module.batch_first
    value = x if given.get("value") is None else given["value"]
    x, value = (_batch(t, single, swapped).detach() for t in (x, value))
    with torch.no_grad():
        q, k, v, out_weight, scale = _parts(module, x, value)
        out_weight = out_weight.clone()  # sharded models (FSDP2) free theirs before the way back
        score = getattr(module, "self_score", None)
        own = None if score is None else score(x)
        mask = _mask(module, x, given)
    out = output[0]
    call = Call(
        x=x, query=q, key=k, value=v, mask=mask, causal=False, scale=scale, own=own,
        kind=getattr(module, "kind", "standard"),
    )  # fmt: skip

    def back(grad: Tensor) -> Tensor:
        """(B, H, N, D_v) from the gradient of the module's output: through the output weights (H, D_v, d_model)."""
        return torch.einsum("bnd,hvd->bhnv", _batch(grad, single, swapped), out_weight)

    return (each.add(call, out, back), *output[1:])


def _parts(module: Any, x: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Queries, keys, values (B, H, N, ...), output weights (H, D_v, d_model) and scale."""
    if is_circuit(module):
        out = module.W_OV if module.ov == "collapsed" else module.W_O
        return module._queries(x), module._keys(x), module._values(value), out.detach(), module.scale
    heads = module.num_heads
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projected = (functional.linear(t, w, b) for t, w, b in zip((x, x, value), weights, biases, strict=True))
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in projected)
    out = module.out_proj.weight.detach().mT.unflatten(0, (heads, -1))  # (H, d_head, d_model)
    return q, k, v, out, q.shape[-1] ** -0.5


def _mask(module: Any, x: Tensor, given: dict[str, Any]) -> Tensor | None:
    """(B or 1, H or 1, N or 1, N) bool, True for open, or float; both masks are bool with True for hidden, or float."""
    n, dtype = x.shape[1], x.dtype
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    masks = []
    if mask is not None:
        mask = mask.unflatten(0, (-1, module.num_heads)) if mask.ndim == 3 else mask
        masks.append(mask[(None,) * (4 - mask.ndim)])
    if padding is not None:
        masks.append(padding.reshape(-1, 1, 1, n))
    circuit = is_circuit(module)
    if circuit and (module.causal or (given.get("is_causal") and mask is None)):
        masks.append(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)[None, None])
    if not masks:
        return None
    if all(m.dtype == torch.bool for m in masks):
        return ~_all(masks, torch.logical_or)
    floats = [
        torch.zeros_like(m, dtype=dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m
        for m in masks
    ]
    return _all(floats, torch.add).detach()


def _all(masks: list[Tensor], join: Any) -> Tensor:
    found = masks[0]
    for mask in masks[1:]:
        found = join(found, mask)
    return found


def _batch(x: Tensor, single: bool, swapped: bool) -> Tensor:
    """(B, N, width), from what callers and modules give."""
    return x[None] if single else x.transpose(0, 1) if swapped else x


def _same(x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape and bool(torch.equal(x, other))
