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

    A v belongs to the self-attention below whose path it stands. ConfigError where its shape is not of that layer.
    """
    owners = {
        name.removesuffix(ENDING): name for name in tensors if name == ENDING or name.endswith(f".{ENDING}")
    }
    if not owners:
        return list(layers)
    return [_with_own(layer, owners, tensors, where) for layer in layers]


def _with_own(
    layer: AttentionLayer, owners: Mapping[str, str], tensors: Mapping[str, HasShape], where: str
) -> AttentionLayer:
    if layer.attention != "self":
        return layer
    owner = max((prefix for prefix in owners if layer.q.weight.startswith(prefix)), key=len, default=None)
    if owner is None:
        return layer
    name = owners[owner]
    shape, wanted = tuple(tensors[name].shape), (layer.n_heads, layer.d_model)
    if shape != wanted:
        raise ConfigError(f"{where}: {name!r} has shape {shape}; the heads of {layer.module} need {wanted}")
    return replace(layer, self_score=name, flags=(*layer.flags, "decoupled"))
