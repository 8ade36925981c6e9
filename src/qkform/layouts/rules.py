"""The family files as typed rules. A family is data; this module is all the code that reads it.

A file holds `[members]` (model_type = overrides) and one `[[attention]]` per kind of attention:

    module      path of the attention module; {layer} is its number, ** any path in between or at the end;
                anything may stand before it
    q, k        names of the projections inside the module, or
    fused       name of the tensor that holds both, with `order`: see `qkform.layouts.order`
    q_order     order of the query tensor where it holds more than queries, e.g. "heads x [q|gate]"
    kv_fused    name of the tensor that holds the keys and more, with `kv_order`, "k|v" if not said
    q_bias      name of the bias of the queries where the fused tensor has none for all
    when        config flags and the values with which this entry counts; `unless_set` gives those left out
    transposed  true for Conv1D: stored (in, out)
    heads, kv_heads, head_dim, d_model, layers     config keys, the first that is there counts; "=1" is the number
    config      sub-config that holds them (the config itself where it is absent)
    attention   "self" or "cross"
    mask        "causal", "bidirectional" or "unknown"
    causal_if, bidirectional_if, not_causal_if_false      config flags that decide the mask
    norm        the norm whose output the projections read, from the layer's path; of "a|b", the first that is there
    norm_kind   its kind, see `AttentionLayer`
    pre_norm_if config flag; where it is false the block is post-norm
    qk_norm     names in the module that show a norm on queries and keys
    qk_norm_if  config keys that show one without gains, where all of them are true (of a list, the entry of
                the layer); ["always"] where it is no choice
    shared      "albert": a group's weights serve several layers
    bias        name of one bias for q, k and v, where the weights are apart and the biases are not
    any_width   true where heads neither fill the width of the model nor have a size in the config: the shapes tell
    kv_shared   config key: how many of the last layers read the keys of the last layer before them of the same kind
    exact       q and k are whole names, without ".weight" to add
    defaults    values of the config's class, for sub-configs that are saved without what equals them

`[[skip]]` entries, `module` and `reason`, for attention that has no query-key form between tokens, and `[[note]]`
entries, the same with `when`, for terms of a score that are not in the form; {key} stands for a value of the config.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any, Literal

from qkform.errors import LayoutError
from qkform.layouts.order import WHOLE, parsed

Kind = Literal["self", "cross"]
Mask = Literal["causal", "bidirectional", "unknown"]


@dataclass(frozen=True)
class Rule:
    """One kind of attention in one family; the fields are explained at the top of this module."""

    family: str
    module: str
    q: str = ""
    k: str = ""
    fused: str = ""
    order: str = "q|k|v"
    q_order: str = ""
    kv_fused: str = ""
    kv_order: str = "k|v"
    q_bias: str = ""
    when: Mapping[str, Any] = field(default_factory=dict)
    unless_set: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False
    config: str = ""
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ()
    head_dim: tuple[str, ...] = ()
    d_model: tuple[str, ...] = ("hidden_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    attention: Kind = "self"
    mask: Mask = "unknown"
    causal_if: str = ""
    bidirectional_if: str = ""
    not_causal_if_false: str = ""
    norm: str = ""
    norm_kind: str = "unknown"
    pre_norm_if: str = ""
    qk_norm: tuple[str, ...] = ()
    qk_norm_if: tuple[str, ...] = ()
    shared: str = ""
    bias: str = ""
    exact: bool = False
    any_width: bool = False
    kv_shared: str = ""
    defaults: Mapping[str, int] = field(default_factory=dict)

    def counts(self, config: Mapping[str, Any] | None) -> bool:
        """Whether the config has the values with which this rule counts."""
        return _has(config, self.when, self.unless_set)

    @property
    def q_tensor(self) -> str:
        return self._tensor(self.fused or self.q)

    @property
    def k_tensor(self) -> str:
        return self._tensor(self.fused or self.kv_fused or self.k)

    @property
    def part_words(self) -> str:
        """How the two projections share their tensors, for comparing rules."""
        return (
            self.order if self.fused else f"{self.q_order} {self.kv_order if self.kv_fused else ''}".strip()
        )

    @property
    def q_part(self) -> str:
        """The rows of the query tensor that are queries."""
        return f"{self.order}: q" if self.fused else f"{self.q_order}: q" if self.q_order else WHOLE

    @property
    def k_part(self) -> str:
        """The rows of the key tensor that are keys."""
        return f"{self.order}: k" if self.fused else f"{self.kv_order}: k" if self.kv_fused else WHOLE

    def _tensor(self, name: str) -> str:
        """query -> query.weight; in_proj_weight, and a name that a person gave in full, stay."""
        return name if self.exact or name.endswith("weight") else f"{name}.weight"


@dataclass(frozen=True)
class Skip:
    """Attention that is known and has no form between tokens."""

    module: str
    reason: str


@dataclass(frozen=True)
class Note:
    """A term of the scores of some modules that their form does not have."""

    module: str
    reason: str
    when: Mapping[str, Any] = field(default_factory=dict)

    def counts(self, config: Mapping[str, Any] | None) -> bool:
        """Whether the config has the values with which the term is there."""
        return _has(config, self.when, {})


def _has(config: Mapping[str, Any] | None, when: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    return all((config or {}).get(key, defaults.get(key)) == value for key, value in when.items())


@dataclass(frozen=True)
class Family:
    """Everything known about one model type."""

    model_type: str
    file: str
    rules: tuple[Rule, ...]
    skips: tuple[Skip, ...] = field(default=())
    notes: tuple[Note, ...] = field(default=())


@cache
def families() -> Mapping[str, Family]:
    """Every family, by model_type. GGUF architectures are `gguf:NAME`, their fallback `gguf:*`."""
    found: dict[str, Family] = {}
    folder = resources.files("qkform.layouts") / "families"
    for file in sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name):
        for family in parse(file.read_text(encoding="utf-8"), file.name):
            if family.model_type in found:
                raise LayoutError(
                    f"{family.model_type!r} is in {file.name} and in {found[family.model_type].file}"
                )
            found[family.model_type] = family
    return found


def parse(text: str, name: str) -> list[Family]:
    """The families of one file; LayoutError for a key or a member that makes no sense."""
    data = tomllib.loads(text)
    unknown = set(data) - {"members", "attention", "skip", "note"}
    if unknown:
        raise LayoutError(f"{name}: unknown tables {sorted(unknown)}")
    skips = tuple(Skip(**s) for s in data.get("skip", ()))
    notes = tuple(Note(**n) for n in data.get("note", ()))
    out = []
    for member, overrides in data["members"].items():
        rules = tuple(_rule(member, {**entry, **overrides}, name) for entry in data["attention"])
        out.append(Family(member, name, rules, skips, notes))
    return out


def _rule(member: str, entry: Mapping[str, Any], name: str) -> Rule:
    known = {f.name for f in fields(Rule)} - {"family"}
    unknown = set(entry) - known
    if unknown:
        raise LayoutError(f"{name}: unknown keys {sorted(unknown)} for {member}")
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
    rule = Rule(family=member, **values)
    if not (rule.fused or (rule.q and (rule.k or rule.kv_fused))):
        raise LayoutError(f"{name}: {member} names neither `fused` nor `q` and `k`")
    for order in filter(None, (rule.order, rule.q_order, rule.kv_order)):
        parsed(order)
    return rule


def bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
