"""Attentions that keep W_Q and W_K per head, (n_heads, d_model, d_head), as TransformerLens names and shapes them.

Where keys are grouped the parameters are `_W_K` and `_b_K`, (n_kv_heads, ...), and `W_K` repeats them. An object need
be no torch module: `blocks[i].attn` with W_Q and W_K, or one W_Q and W_K for all layers, (n_layers, n_heads, d_model,
d_head), of any array kind. The weights are scored as the object has them: a model that was loaded with its norms
folded in has them in W_Q and W_K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qkform.errors import ConfigError, SourceError
from qkform.layouts import AttentionLayer
from qkform.layouts.layer import Reader, Stored
from qkform.layouts.match import place
from qkform.layouts.rules import Mask
from qkform.sites.parameters import Parameter, ask, is_module, is_tensor, shape_of

_MASKS: dict[str, Mask] = {"causal": "causal", "bidirectional": "bidirectional"}


def is_attention(thing: Any) -> bool:
    """Whether it has W_Q and W_K of one layer. Of a module the parameters count: W_Q of a whole model is a stack."""
    if is_module(thing):
        own = {name: len(shape_of(p)) for name, p in thing.named_parameters(recurse=False)}
        return own.get("W_Q") == 3 and 3 in (own.get("W_K"), own.get("_W_K"))
    return all(_sides(thing, name) == 3 for name in ("W_Q", "W_K"))


def is_stack(thing: Any) -> bool:
    """Whether it has blocks with such attentions, or W_Q and W_K of all layers."""
    return (
        is_attention(thing)
        or bool(_blocks(thing))
        or all(_sides(thing, name) == 4 for name in ("W_Q", "W_K"))
    )


def half(thing: Any) -> str | None:
    """What is there of W_Q and W_K of an attention that has only one of them as it should be; None if neither is."""
    if is_module(thing):
        own = {name: shape_of(p) for name, p in thing.named_parameters(recurse=False)}
        own["W_K"] = own.get("W_K", own.get("_W_K", ()))
    else:
        own = {name: shape_of(value) for name in ("W_Q", "W_K") if is_tensor(value := ask(thing, name))}
    sides = {name: own.get(name, ()) for name in ("W_Q", "W_K")}
    if not any(len(shape) >= 3 for shape in sides.values()) or is_attention(thing):
        return None
    shown = " and ".join(f"{name} {shape}" if shape else f"no {name}" for name, shape in sides.items())
    return f"it has {shown}; expected both as (n_heads, d_model, d_head)"


def _sides(thing: Any, name: str) -> int:
    """How many dimensions a weight has; 0 where it is none."""
    try:
        value = getattr(thing, name, None)
    except Exception as error:  # a property may raise anything
        raise SourceError(
            f"{name} of a {type(thing).__name__} cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error
    return len(value.shape) if is_tensor(value) else 0


def _blocks(thing: Any) -> list[tuple[str, Any]]:
    if is_module(thing):
        return []  # its modules are found one by one
    blocks = ask(thing, "blocks")
    try:
        numbered = list(enumerate(blocks)) if blocks is not None else []
    except TypeError:
        return []
    attentions = [(f"blocks.{i}.attn", ask(block, "attn")) for i, block in numbered]
    return [(path, attention) for path, attention in attentions if is_attention(attention)]


@dataclass(frozen=True, eq=False)
class Headwise:
    """One attention: the four parameters, biases None where there are none."""

    path: str
    q: Parameter
    k: Parameter
    b_q: Parameter | None
    b_k: Parameter | None
    mask: Mask

    def parameters(self) -> list[Parameter]:
        return [p for p in (self.q, self.k, self.b_q, self.b_k) if p is not None]

    def layer(self, read: Reader) -> AttentionLayer:
        """The facts; ConfigError where the shapes contradict each other."""
        n, d, width = self.q.shape
        g, d_k, width_k = self.k.shape
        cross = "cross" in self.path.rpartition(".")[2]
        empty = 0 in self.q.shape or 0 in self.k.shape
        if empty or width != width_k or n % g or (d != d_k and not cross):
            raise ConfigError(
                f"{self.q.name} has shape {self.q.shape} and {self.k.name} {self.k.shape}; expected "
                "(n_heads, d_model, d_head) and the same, or fewer heads, for keys, no side of length 0"
            )
        for bias, weight in ((self.b_q, self.q), (self.b_k, self.k)):
            if bias is not None and bias.shape != (weight.shape[0], width):
                raise ConfigError(
                    f"{bias.name} has shape {bias.shape}; {weight.name} has {weight.shape[0]} heads of {width}"
                )
        at = place("**", self.path)
        return AttentionLayer(
            component=at.component if at else self.path,
            module=self.path,
            layer=at.layer if at else 0,
            shared_by=None,
            attention="cross" if cross else "self",
            mask="bidirectional" if cross else self.mask,
            n_heads=n,
            n_kv_heads=g,
            d_model=d,
            d_head=width,
            flags=(),
            norm=None,
            norm_kind="unknown",
            q=Stored(self.q.name, self.b_q.name if self.b_q else None),
            k=Stored(self.k.name, self.b_k.name if self.b_k else None),
            read=read,
        )


def attentions(path: str, thing: Any, root: Any) -> Iterator[Headwise]:
    """The attentions of a module or an object, in order."""
    if is_attention(thing):
        yield _attention(path, thing, root)
    elif blocks := _blocks(thing):
        for inner, attention in blocks:
            yield _attention(f"{path}.{inner}".removeprefix("."), attention, root)
    else:
        n_q, n_k = (len(ask(thing, name)) for name in ("W_Q", "W_K"))
        if n_q != n_k:
            raise ConfigError(f"W_Q has {n_q} layers and W_K {n_k}; expected the same number of both")
        for i in range(n_q):
            yield _attention(f"{path}.blocks.{i}.attn".removeprefix("."), thing, root, index=i)


def _attention(path: str, thing: Any, root: Any, index: int | None = None) -> Headwise:
    def parameter(name: str, grouped: bool = False) -> Parameter | None:
        attribute = f"_{name}" if grouped and is_tensor(ask(thing, f"_{name}")) else name
        value = ask(thing, attribute)
        if not is_tensor(value):
            return None
        shape = tuple(value.shape) if index is None else tuple(value.shape[1:])
        name = f"{path}.{attribute}".removeprefix(".")
        return Parameter(name, thing, attribute, shape, index, root=root if is_module(root) else None)

    q, k = parameter("W_Q"), parameter("W_K", grouped=True)
    if q is None or k is None:
        raise ConfigError(f"{path}: W_Q and W_K are gone")
    cfg = ask(thing, "cfg") or ask(root, "cfg")
    direction = ask(cfg, "attention_dir")
    mask: Mask = _MASKS.get(direction, "unknown") if isinstance(direction, str) else "unknown"
    return Headwise(path, q, k, parameter("b_Q"), parameter("b_K", grouped=True), mask)
