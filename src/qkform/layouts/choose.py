"""Which family a checkpoint is of: by its config, by the architecture in its metadata, or by names alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qkform.errors import ConfigError, LayoutError
from qkform.layouts.manual import QUERY, candidates
from qkform.layouts.match import MAX_NAME, HasShape, places
from qkform.layouts.outside import is_timm
from qkform.layouts.rules import Family, Kind, Rule, families


def named_type(config: Mapping[str, Any] | None, where: str) -> tuple[str | None, str]:
    """(model_type, GGUF architecture or "") of a config."""
    for key in ("general.architecture", "model_type"):
        value = None if config is None else config.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} is {value!r:.60}; expected a name")
        return value, value if key == "general.architecture" else ""
    return None, ""


def choose(
    model_type: str | None,
    arch: str,
    tensors: Mapping[str, HasShape],
    config: Mapping[str, Any] | None,
    *,
    heads_given: bool,
) -> Family | None:
    """The family, None where none is known. `heads_given`: the names of families alone may decide."""
    known = families()
    if arch:
        return replace(known.get(f"gguf:{arch}", known["gguf:*"]), model_type=arch)
    if model_type is not None and model_type in known:
        return known[model_type]
    if model_type is None and is_timm(config, tensors):
        return known["timm"]
    torch = known["torch"]
    if _fits(torch, tensors) and (model_type is None or _is_whole(torch, tensors)):
        return torch
    if model_type is None and heads_given:
        family = _by_names(tensors)
        if family is not None:
            return family
    return None


def nothing_known(
    model_type: str | None,
    tensors: Mapping[str, HasShape],
    reasons: Sequence[str],
    *,
    source: str,
    where: str,
) -> LayoutError:
    """The error for a checkpoint of no known family, whose names do not tell enough either."""
    if model_type is None:
        found = f"{where} has no model_type" if where != source else f"{source} has no config.json"
        remedy = "put the model's config.json beside the weights, or pass --heads, --q and --k"
    else:
        found = f"{source}: no layout for model_type {model_type!r:.80}"
        remedy = "docs/families.md lists those that are known; or pass --heads, --q and --k"
    why = f" Pairs were found, but {reasons[0]}." if reasons else ""
    return LayoutError(f"{found}; {remedy}.{why} {candidates(tensors)}")


# query tensor, layer, key tensor in the module, order, transposed, self or cross
_Reading = tuple[str, int, str, str, bool, Kind]


def _by_names(tensors: Mapping[str, HasShape]) -> Family | None:
    """The family that the names alone fit, if all that fit read the same weights in the same way."""
    readings: dict[frozenset[_Reading], list[Rule]] = {}
    for name, family in families().items():
        if name.startswith("gguf:"):
            continue
        hits = [
            (rule, [f for f in places(rule, tensors) if _plausible(rule, tensors[f[0]])])
            for rule in family.rules
        ]
        used = [rule for rule, found in hits if found]
        reading = frozenset(
            (q, p.layer, r.k_tensor, r.part_words, r.transposed, r.attention)
            for r, found in hits
            for q, p in found
        )
        if reading:
            readings.setdefault(reading, used)
    widest = max(readings, key=len, default=frozenset[_Reading]())
    if not readings or any(not reading <= widest for reading in readings):
        return None
    if len({tensor for tensor, *_ in widest}) < len(widest):  # one family with several orders, and no config
        return None
    rules = tuple(
        replace(r, mask="unknown", causal_if="", bidirectional_if="", norm_kind="unknown", norm="")
        for r in readings[widest]
    )
    return Family("unknown", "names alone", rules)


def _plausible(rule: Rule, info: HasShape) -> bool:
    """Whether a fused tensor has more outputs than inputs, as q, k and v together always do."""
    if not rule.fused or len(info.shape) != 2:
        return True
    return (info.shape[1] > info.shape[0]) if rule.transposed else (info.shape[0] > info.shape[1])


def _fits(family: Family, tensors: Mapping[str, HasShape]) -> bool:
    return any(True for rule in family.rules for _ in places(rule, tensors))


def _is_whole(family: Family, tensors: Mapping[str, HasShape]) -> bool:
    """Whether nothing else looks like a query projection: a stray module does not make a model of it."""
    mine = {name for rule in family.rules for name, _ in places(rule, tensors)}
    others = (name for name, info in tensors.items() if name not in mine and len(info.shape) == 2)
    return not any(QUERY.search(name[-MAX_NAME:]) for name in others)
