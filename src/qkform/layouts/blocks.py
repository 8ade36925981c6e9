"""What names do not tell: the mask and the norm of attentions that are found by their names.

blocks.toml lists, per kind of block, the model types whose forward pass was seen to be so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from qkform.errors import LayoutError
from qkform.layouts.match import place

_FACTS = frozenset({"mask", "norm", "norm_kind", "attention", "causal_if", "bidirectional_if", "pre_norm_if"})


def block_of(model_type: str, module: str) -> Mapping[str, Any] | None:
    """The facts of the first block that lists this model type and whose pattern fits, None if none does."""
    for pattern, facts in _blocks().get(model_type, ()):
        if place(pattern, module) is not None:
            return facts
    return None


@cache
def _blocks() -> Mapping[str, list[tuple[str, Mapping[str, Any]]]]:
    """(module pattern, facts) of every model type, in the order of the file."""
    text = (resources.files("qkform.layouts") / "blocks.toml").read_text(encoding="utf-8")
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for block in tomllib.loads(text).get("block", ()):
        facts = {key: value for key, value in block.items() if key not in ("module", "types")}
        if set(facts) - _FACTS:
            raise LayoutError(f"blocks.toml: unknown keys {sorted(set(facts) - _FACTS)}")
        for model_type in block["types"].split():
            found.setdefault(model_type, []).append((block["module"], facts))
    return found
