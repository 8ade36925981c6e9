"""What names do not tell: masks, norms, and orders of fused tensors, for model types without a file of their own.

blocks.toml lists, per kind of block, the model types whose forward pass was seen to be so: `module`, a pattern,
`types`, and any fields of a rule (see `rules`), or `skip`, the reason why it has no form. Head counts come from the
config part that the shapes prove (see `scopes`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from qkform.errors import LayoutError
from qkform.layouts.match import place
from qkform.layouts.rules import Rule

_FACTS = frozenset(f.name for f in fields(Rule)) - {
    "family",
    "module",
    "when",
    "unless_set",
    "defaults",
    "shared",
}


@dataclass(frozen=True)
class Block:
    """One kind of attention of some model types: where it stands, and fields of `Rule`; or why it is skipped."""

    module: str
    facts: Mapping[str, Any]
    skip: str = ""

    @property
    def found_by_itself(self) -> bool:
        """Whether it names its tensors, as fused ones must: no pair of names shows them."""
        return "fused" in self.facts or "q" in self.facts

    @property
    def keys(self) -> Mapping[str, tuple[str, ...]]:
        """Config keys of the head counts, where they are not the usual ones."""
        return {key: self.facts[key] for key in ("heads", "kv_heads", "head_dim") if key in self.facts}

    def rule(self, model_type: str, **found: Any) -> Rule:
        return Rule(model_type, found.pop("module", self.module), **{**found, **self.facts})


def blocks_of(model_type: str) -> Sequence[Block]:
    """The blocks that list this model type, in the order of the file."""
    return _blocks().get(model_type, ())


def block_of(model_type: str, module: str) -> Block | None:
    """The first of them whose pattern fits a module, None if none does."""
    return next((b for b in blocks_of(model_type) if place(b.module, module) is not None), None)


@cache
def _blocks() -> Mapping[str, list[Block]]:
    text = (resources.files("qkform.layouts") / "blocks.toml").read_text(encoding="utf-8")
    found: dict[str, list[Block]] = {}
    for entry in tomllib.loads(text).get("block", ()):
        facts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        module, types, skip = facts.pop("module"), facts.pop("types"), facts.pop("skip", "")
        if set(facts) - _FACTS:
            raise LayoutError(f"blocks.toml: unknown keys {sorted(set(facts) - _FACTS)} for {types[:60]}")
        for model_type in types.split():
            found.setdefault(model_type, []).append(Block(module, facts, skip))
    return found
