"""Do the arguments of an attention function fit each other? Errors name both shapes and what would fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qkform.errors import AttentionError

IMPLEMENTATIONS = ("auto", "reference", "flash")


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    self_score: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
    query_start: int | Tensor | None,
    impl: str,
) -> None:
    """AttentionError for the first thing that does not fit."""
    check_impl(impl)
    check_dropout(dropout_p)
    check_heads(query, key, value, enable_gqa)
    b, h, n, _ = query.shape
    m = key.shape[2]
    if tuple(self_score.shape) != (b, h, n):
        raise AttentionError(
            f"self_score has shape {_shape(self_score)}; query {_shape(query)} wants (B, H, N) = {(b, h, n)}"
        )
    if not self_score.is_floating_point():
        raise AttentionError(f"self_score is {_name(self_score.dtype)}; it is a score, of any floating type")
    if attn_mask is not None:
        check_mask(attn_mask, (b, h, n, m))
    for name, x in (("key", key), ("value", value), ("self_score", self_score), ("attn_mask", attn_mask)):
        if x is not None and x.device != query.device:
            raise AttentionError(f"{name} is on {x.device}, query on {query.device}; put them on one device")
    check_start(query_start, n, m)


def check_tensors(needed: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """AttentionError for the first argument, by name, that is no tensor; None will do for the optional ones."""
    for name, x in {**needed, **optional}.items():
        if isinstance(x, Tensor) or (x is None and name in optional):
            continue
        kind = type(x)
        found = (
            "None"
            if x is None
            else f"a {kind.__name__}"
            if kind.__module__ == "builtins"
            else f"a {kind.__module__}.{kind.__name__}"
        )
        how = (
            ""
            if x is None
            else f": torch.{'from_numpy' if kind.__module__ == 'numpy' else 'tensor'}({name}) makes one"
        )
        raise AttentionError(f"{name} is {found}; expected a torch.Tensor{how}")


def check_impl(impl: str) -> None:
    if impl not in IMPLEMENTATIONS:
        raise AttentionError(f"impl is {impl!r}; known: {', '.join(IMPLEMENTATIONS)}")


def check_dropout(dropout_p: float) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise AttentionError(f"dropout_p is {dropout_p}; it is a probability, from 0 to 1")


def check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Shapes and types of queries, keys and values."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise AttentionError(f"{name} has shape {_shape(x)}; expected (B, heads, tokens, features)")
    types = [x.dtype for x in (query, key, value)]
    if len(set(types)) > 1 or not query.is_floating_point():
        names = ", ".join(map(_name, types))
        raise AttentionError(f"query, key and value are {names}; they are of one floating type: cast them")
    b, h, _, d = query.shape
    if d == 0:
        raise AttentionError(f"query has shape {_shape(query)}, of no features; expected one or more")
    if key.shape[0] != b or key.shape[3] != d or key.shape[1] == 0 or h % max(key.shape[1], 1):
        raise AttentionError(
            f"query has shape {_shape(query)}, key {_shape(key)}; a key that fits is ({b}, G, M, {d}), G dividing {h}"
        )
    if value.shape[:3] != key.shape[:3]:
        fits = f"({', '.join(map(str, key.shape[:3]))}, D_v)"
        raise AttentionError(
            f"key has shape {_shape(key)}, value {_shape(value)}; a value that fits is {fits}"
        )
    if key.shape[1] != h and not enable_gqa:
        raise AttentionError(
            f"query has {h} heads and key {key.shape[1]}; for grouped queries pass enable_gqa=True"
        )


def check_mask(mask: Tensor, full: tuple[int, int, int, int]) -> None:
    """A mask for scores of shape `full`."""
    fits = mask.dim() <= 4 and all(
        a in (1, b) for a, b in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise AttentionError(f"attn_mask has shape {_shape(mask)}; it broadcasts to (B, H, N, M) = {full}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AttentionError(
            f"attn_mask is {_name(mask.dtype)}; it is bool (True: open) or of a floating type, to be added"
        )


def check_start(start: int | Tensor | None, n: int, m: int) -> None:
    """AttentionError for queries that stand beside the keys; a tensor's value is read unless something traces it."""
    if isinstance(start, Tensor):
        if start.numel() != 1 or start.is_floating_point() or start.dtype == torch.bool:
            raise AttentionError(
                f"query_start is a {_name(start.dtype)} tensor of shape {_shape(start)}; it is one integer"
            )
        if not _readable(start):
            return
        start = int(start)
    if start is None:
        if n > m:
            raise AttentionError(f"{n} queries for {m} keys: a query's own token is one of the keys")
    elif not isinstance(start, int | torch.SymInt) or isinstance(start, bool):
        raise AttentionError(f"query_start is {start!r}; it is an int, or a tensor with one integer")
    elif not 0 <= start <= m - n:
        raise AttentionError(
            f"query_start is {start}: {n} queries from there on need keys {start} to {start + n - 1}, of {m}; "
            f"0 to {m - n} would fit"
        )


def _readable(x: Tensor) -> bool:
    """Whether a tensor has a value now: the compiler's, a transform's, a fake and a meta tensor have none."""
    return not (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.is_meta
        or torch._C._are_functorch_transforms_active()
    )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As scaled_dot_product_attention under autocast: floats but float64 in the autocast type."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if x.dtype in narrow else x for x in tensors)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def transform_of(*tensors: Tensor) -> str | None:
    """Which derivative but the usual one is being taken of a call with these tensors; None: no other."""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    dual = torch.autograd.forward_ad
    if dual._current_level >= 0 and any(dual.unpack_dual(x).tangent is not None for x in tensors):
        return "an argument carries a forward-mode tangent"
    return None
