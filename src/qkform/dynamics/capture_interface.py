"""Watching attentions that transformers calls through its interface.

For one forward pass the config names another implementation, `NAME`, which notes what it is given and hands it on to
the implementation that was named before; where that is one that gives no access to its masks, such as "eager", to SDPA.
What the projections read is seen by a hook on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qkform.dynamics.calls import Call
from qkform.dynamics.capture import Watched
from qkform.errors import DynamicsError

NAME = "qkform_capture"
WATCH = "_qkform_watch"  # on a module whose config names NAME: (the function to hand on to, Watched or None)
SWITCH = "qkform_attention"  # on a module that surgery changed: its `kind`
UNKNOWN = ("softcap", "s_aux", "sinks", "indices", "block_indices")


@contextmanager
def watching(root: Any, watched: Sequence[Watched]) -> Iterator[None]:
    """Note every call of these attentions."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for each in watched:
        _check(each)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    configs = {id(each.module.config): each.module.config for each in watched}
    before = {key: config._attn_implementation for key, config in configs.items()}
    by_module = {id(each.module): each for each in watched}
    touched, hooks = [], []
    try:
        for module in root.modules():
            config = getattr(module, "config", None)
            if id(config) in configs:
                vars(module)[WATCH] = (_inner(before[id(config)]), by_module.get(id(module)))
                touched.append(module)
        for each in watched:
            for at in _projections(each):
                hooks.append(at.owner.register_forward_pre_hook(partial(_read, each)))
            hooks.append(each.module.register_forward_hook(partial(_end, each)))
        for config in configs.values():
            config._attn_implementation_internal = (
                NAME  # the property would set those of parts of the model too
            )
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for hook in hooks:
            hook.remove()
        for module in touched:
            vars(module).pop(WATCH, None)


def _projections(each: Watched) -> list[Any]:
    """The parameters of queries and keys; their owners are what reads x."""
    assert each.site is not None  # a family's attention has two factors
    return [each.site.shares["w_q"].at, each.site.shares["w_k"].at]


def _check(each: Watched) -> None:
    module, kind = each.module, type(each.module).__name__
    if not hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
        raise DynamicsError(
            f"{each.path}: a {kind} is neither an attention of transformers nor an nn.MultiheadAttention; its scores "
            "cannot be seen"
        )
    for at in _projections(each):
        if (
            at.index is not None
            or at.owner is module
            or not any(at.owner is part for part in module.modules())
        ):
            raise DynamicsError(
                f"{each.path}: {at.name!r} is not the weight of a projection module inside it"
            )


def _inner(name: str | None) -> Callable[..., Any]:
    """The function to hand on to: the implementation of that name where it reads masks as SDPA does, else SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    functions, masks = AttentionInterface(), AttentionMaskInterface()  # type: ignore[no-untyped-call]
    if name in functions and masks.get(name) is sdpa_mask:
        function: Callable[..., Any] = functions[name]
        return function
    return sdpa_attention_forward


def _read(each: Watched, projection: nn.Module, args: tuple[Any, ...]) -> None:
    """Before a projection runs: what it is about to see."""
    x = args[0]
    if each.over:
        return
    if each.x is not None and each.x is not x and not torch.equal(each.x, x):
        raise DynamicsError(
            f"{each.path}: its queries and keys are made from different inputs; there is no one x"
        )
    each.x = x


def _end(each: Watched, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if each.x is not None:
        raise DynamicsError(
            f"{each.path}: a {type(module).__name__} does not call its attention through transformers' "
            "AttentionInterface, so that its scores cannot be seen"
        )


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: (B, H, N, D) -> (B, N, H, D_v); the call is noted on the way."""
    inner, each = vars(module)[WATCH]
    if each is not None and not each.over:
        x, each.x = each.x, None
        x = _checked(each, x, query, key, attention_mask, others)
    if position_bias is not None:
        others["position_bias"] = position_bias
    out, weights = inner(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **others,
    )
    if each is None or each.over:
        return out, weights
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    said = _prescale(module, scaling)
    factor = said if said != 1.0 else _silent_scale(each, x, query, scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    score = getattr(module, "self_score", None)
    switch = getattr(module, SWITCH, None)
    call = Call(
        x=x.detach(),
        query=query.detach() if factor == 1.0 else query.detach() / factor,
        key=key.detach(),
        value=value.detach(),
        mask=_with_bias(position_bias, attention_mask),
        causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        scale=scale * factor,
        own=None if score is None else score(x).detach() * (said / factor),  # surgery knows what is said
        kind="standard" if switch is None else switch.kind,
    )
    return each.add(call, out, lambda grad: grad.transpose(1, 2)), weights


def _prescale(module: Any, scaling: float | None) -> float:
    """What the module says that it multiplies its queries with: Whisper and OPT do, and hand over the scale 1."""
    own = getattr(module, "scaling", None)
    return own if scaling == 1.0 and isinstance(own, float) else 1.0


def _silent_scale(each: Watched, x: Tensor, query: Tensor, scaling: float | None) -> float:
    """1 / sqrt(d_head) where the queries were multiplied with it and nothing says so, as in ESM; else 1.

    Seen by their size, which a rotation keeps.
    """
    assert each.site is not None
    if scaling != 1.0 or "qk_norm" in each.site.layer.flags:
        return 1.0
    with torch.no_grad():
        weight, bias = each.site.w_q(), each.site.b_q()
        made = torch.einsum("bnd,hde->bhne", x.to(weight.dtype), weight)
        made = made if bias is None else made + bias[:, None]
        size, expected = float(query.float().norm()), float(made.float().norm()) * query.shape[-1] ** -0.5
    return query.shape[-1] ** -0.5 if math.isclose(size, expected, rel_tol=0.01) else 1.0


def _with_bias(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A position bias and a mask as one."""
    if bias is None or mask is None:
        found = mask if bias is None else bias
        return None if found is None else found.detach()
    if mask.dtype == torch.bool:
        return bias.detach().masked_fill(~mask, -torch.inf)
    return (bias + mask).detach()


def _checked(
    each: Watched, x: Tensor | None, query: Tensor, key: Tensor, mask: Any, others: dict[str, Any]
) -> Tensor:
    """x; DynamicsError for a call whose scores are not those of a form on the tokens that were read."""
    for name in UNKNOWN:
        if others.get(name) is not None:
            raise DynamicsError(f"{each.path} changes its scores by {name!r}, of which Gamma knows nothing")
    if x is None:
        raise DynamicsError(
            f"{each.path}: its projections did not run in this call: have they been replaced?"
        )
    assert each.site is not None
    batch, heads, n, _ = query.shape
    if x.ndim != 3 or tuple(x.shape[:2]) != (batch, n) or heads != each.site.layer.n_heads:
        raise DynamicsError(
            f"{each.path}: its projections read {tuple(x.shape)} and its queries are {tuple(query.shape)}; expected "
            "(batch, tokens, d_model) and (batch, n_heads, tokens, d_head) of the same tokens"
        )
    if key.shape[2] != n:
        raise DynamicsError(
            f"{each.path} has {key.shape[2]} keys for {n} tokens: give a batch without a cache"
        )
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
        raise DynamicsError(f"{each.path} got a mask that is no (batch, heads, queries, keys)")
    return x
