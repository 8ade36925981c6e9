"""What names do not tell, per model type: orders of fused tensors, masks, norms, and what is no attention at all.

The files in blocks/ hold `[[block]]` entries: `module`, a pattern; `types`, model types or "*" for any; and fields of a
rule (see `rules`), or `skip`, the reason why there is no form. Of several that fit a module the facts are put together,
the first that says something counts. Head counts come from the part of the config that shapes prove (see `scopes`).
`[[none]]` entries name model types without softmax attention.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from qkform.errors import LayoutError
from qkform.layouts.match import place
from qkform.layouts.rules import Kind, Rule

_FACTS = frozenset(f.name for f in fields(Rule)) - {
    "family",
    "module",
    "when",
    "unless_set",
    "defaults",
    "shared",
}
_KEYS = ("heads", "kv_heads", "head_dim")  # config keys of head counts, where they are not the usual ones


@dataclass(frozen=True, eq=False)  # each entry is itself: it can be a key
class Block:
    """One kind of attention of some model types: where it stands, and fields of `Rule`; or why it is skipped."""

    module: str
    facts: Mapping[str, Any]
    skip: str = ""

    @property
    def names_tensors(self) -> bool:
        """Whether it says which tensors, as fused ones need: no pair of names shows them."""
        return "fused" in self.facts or "q" in self.facts

    @property
    def keys(self) -> Mapping[str, tuple[str, ...]]:
        return {key: self.facts[key] for key in _KEYS if key in self.facts}

    def rule(
        self, model_type: str, *, q: str = "", k: str = "", exact: bool = False, kind: Kind = "self"
    ) -> Rule:
        """The rule of this block, with what was found where the block says nothing."""
        found = {"q": q, "k": k, "exact": exact, "attention": kind}
        return Rule(model_type, self.module, **{**found, **self.facts})


@lru_cache(256)
def blocks_of(model_type: str) -> Sequence[Block]:
    """The blocks of a model type, then those of any type, in the order of the files."""
    blocks, _ = _files()
    return (*blocks.get(model_type, ()), *blocks.get("*", ()))


def block_of(model_type: str, module: str, own: Block | None = None) -> Block | None:
    """The facts about one module, None if there are none. `own` is the block that named its tensors, if one did."""
    return _together(
        tuple(
            b
            for b in blocks_of(model_type)
            if b is own or not (b.skip or b.names_tensors or place(b.module, module) is None)
        ),
        own,
    )


@lru_cache(1024)
def _together(fitting: tuple[Block, ...], own: Block | None) -> Block | None:
    """Several blocks as one, the same object for the same ones: a hundred layers ask for it, of two or three kinds."""
    facts: dict[str, Any] = {}
    for block in reversed(fitting):
        facts.update(block.facts)
    return Block((own or fitting[0]).module, facts) if fitting else None


def without_attention(model_type: str | None) -> str | None:
    """What a model type has instead of softmax attention, None if it may have some."""
    return _files()[1].get(model_type or "")


@cache
def _files() -> tuple[Mapping[str, list[Block]], Mapping[str, str]]:
    blocks: dict[str, list[Block]] = {}
    none: dict[str, str] = {}
    folder = resources.files("qkform.layouts") / "blocks"
    for file in sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name):
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        if set(data) - {"block", "none"}:
            raise LayoutError(f"{file.name}: unknown tables {sorted(set(data) - {'block', 'none'})}")
        for entry in data.get("block", ()):
            facts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
            module, types, skip = facts.pop("module"), facts.pop("types"), facts.pop("skip", "")
            if set(facts) - _FACTS:
                raise LayoutError(f"{file.name}: unknown keys {sorted(set(facts) - _FACTS)} at {module}")
            for model_type in types.split():
                blocks.setdefault(model_type, []).append(Block(module, facts, skip))
        for entry in data.get("none", ()):
            none |= dict.fromkeys(entry["types"].split(), entry["reason"])
    return blocks, none
