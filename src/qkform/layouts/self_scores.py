"""Which attentions of a checkpoint have a score of their own for a token with itself: x diag(v) x^T, one v per head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qkform.errors import ConfigError
from qkform.layouts.layer import AttentionLayer
from qkform.layouts.match import HasShape

ENDING = "self_score.v"


def with_self_scores(
    layers: Sequence[AttentionLayer], tensors: Mapping[str, HasShape], where: str
) -> list[AttentionLayer]:
    """The layers, those that are decoupled with the tensor of their v (n_heads, d_model) and the flag `decoupled`.

    A v belongs to the one self-attention whose queries stand nearest below its path; above several it is of none.
    ConfigError where its shape is not of that layer.
    """
    owners = {
        name.removesuffix(ENDING): name for name in tensors if name == ENDING or name.endswith(f".{ENDING}")
    }
    if not owners:
        return list(layers)
    mine = [_owner(layer, owners) for layer in layers]
    weights: dict[str | None, set[str]] = {}
    for layer, owner in zip(layers, mine, strict=True):
        weights.setdefault(owner, set()).add(layer.q.weight)
    return [
        layer if owner is None or len(weights[owner]) > 1 else _with_own(layer, owners[owner], tensors, where)
        for layer, owner in zip(layers, mine, strict=True)
    ]


def _owner(layer: AttentionLayer, owners: Mapping[str, str]) -> str | None:
    """The nearest path above the queries at which a v stands."""
    if layer.attention != "self":
        return None
    return max((prefix for prefix in owners if layer.q.weight.startswith(prefix)), key=len, default=None)


def _with_own(
    layer: AttentionLayer, name: str, tensors: Mapping[str, HasShape], where: str
) -> AttentionLayer:
    shape, wanted = tuple(tensors[name].shape), (layer.n_heads, layer.d_model)
    if shape != wanted:
        raise ConfigError(f"{where}: {name!r} has shape {shape}; the heads of {layer.module} need {wanted}")
    return replace(layer, self_score=name, flags=(*layer.flags, "decoupled"))
