"""Models of other code bases: timm and diffusers, recognised by their own configs, brought into words known here.

timm writes `architecture` and `num_features`, and no head count; the architectures' names say it. diffusers writes
`_class_name`, and its UNets call the number of heads `attention_head_dim`: a mistake that its files have kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qkform.layouts.match import HasShape

# timm: heads of the sizes that its names give, by (name, width); each is what timm's own functions pass
_TIMM_HEADS: Mapping[tuple[str, int], int] = {
    ("tiny", 192): 3,
    ("small", 384): 6,
    ("base", 768): 12,
    ("large", 1024): 16,
    ("huge", 1280): 16,
    ("so400m", 1152): 16,
}
_TIMM_NAME = re.compile(r"(?:vit|deit3?|flexivit|eva02?)_(tiny|small|base|large|huge|so400m)_")


def is_timm(config: Mapping[str, Any] | None, tensors: Mapping[str, HasShape]) -> bool:
    """Whether this is a vision transformer as timm stores it: by its config, or by the names of its tensors."""
    if config is not None and not isinstance(config.get("architecture"), str):
        return False
    return all(
        any(name == end or name.endswith(f".{end}") for name in tensors)
        for end in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    )


def translated(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A config of timm or diffusers with its head counts under the names of others; any other as it is."""
    if config is None:
        return None
    if isinstance(config.get("architecture"), str) and "model_type" not in config:
        return _timm(config)
    if isinstance(config.get("_class_name"), str) and "model_type" not in config:
        return _diffusers(config)
    return config


def _timm(config: Mapping[str, Any]) -> Mapping[str, Any]:
    given = config.get("model_args")
    heads = given.get("num_heads") if isinstance(given, Mapping) else None
    size = _TIMM_NAME.match(config["architecture"])
    width = config.get("num_features")
    if heads is None and size and isinstance(width, int):
        heads = _TIMM_HEADS.get((size[1], width))
    return config if heads is None or "num_heads" in config else {**config, "num_heads": heads}


def _diffusers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    heads, dim = config.get("num_attention_heads"), config.get("attention_head_dim")
    if heads is None and "UNet" in config["_class_name"]:
        return {**_without(config, "attention_head_dim"), "num_attention_heads": dim}
    return config


def _without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


def unet_block(module: str, blocks: int) -> int | None:
    """Which entry of a per-block list a UNet's module uses: down in order, mid the last, up from the last."""
    found = re.search(r"(?:^|\.)(down_blocks|mid_block|up_blocks)(?:\.(\d{1,4}))?(?:\.|$)", module)
    if not found:
        return None
    match found[1]:
        case "down_blocks":
            return int(found[2] or 0)
        case "up_blocks":
            return blocks - 1 - int(found[2] or 0)
    return blocks - 1
