"""Where in a model of its family a module stands that was given alone, so that its names begin further down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from qkform.layouts.facts import blocks_of
from qkform.layouts.match import is_number, place
from qkform.layouts.rules import families

_MAX_KINDS = 200  # of paths, layer numbers left out: odd names shall cost no time


def above(config: Mapping[str, Any] | None, names: Iterable[str]) -> str:
    """Where in a model of its family a module stands, whose own names begin further down: "encoder.", "" at the top.

    It is the place at which most of its modules fit the patterns of the family.
    """
    model_type = str((config or {}).get("model_type"))
    family = families().get(model_type)
    patterns = [rule.module for rule in family.rules] if family else []
    patterns += [
        block.module for block in blocks_of(model_type) if "{layer}" in block.module and not block.skip
    ]
    parts = [pattern.replace("{layer}", "0").replace("{inner}", "0").split(".") for pattern in patterns]
    heads = {".".join(p[:i]) + "." for p in parts for i in range(1, len(p) + 1) if "**" not in p[:i]}
    starts = ["", *sorted(heads)]
    if len(starts) == 1:
        return ""
    by_last: dict[str, list[str]] = {}
    for pattern in patterns:
        by_last.setdefault(pattern.rpartition(".")[2], []).append(pattern)
    anywhere = [p for last in ("", "**", "{layer}", "{inner}") for p in by_last.get(last, ())]
    fits = dict.fromkeys(starts, 0)
    for module, count in _kinds(names, None if anywhere else by_last.keys()):
        ends = by_last.get(module.rpartition(".")[2], []) if module else patterns
        for pattern in dict.fromkeys([*ends, *anywhere]):
            if place(pattern, module) is None:  # else it fits wherever the module stands
                for start in starts:
                    fits[start] += count * (place(pattern, f"{start}{module}".rstrip(".")) is not None)
    return max(starts, key=fits.__getitem__)


def _kinds(names: Iterable[str], lasts: Collection[str] | None) -> list[tuple[str, int]]:
    """Paths of modules with 0 for every number, and how many modules have each: the shortest, which need a start.

    With `lasts`, those that end in one of these words, and the top.
    """
    modules: set[str] = set()
    for name in names:
        module = name.rpartition(".")[0]
        while module and module not in modules:
            modules.add(module)
            module = module.rpartition(".")[0]
    kinds: Counter[str] = Counter()
    for module in modules:
        if lasts is None or module.rpartition(".")[2] in lasts:
            kinds[".".join("0" if is_number(part) else part for part in module.split("."))] += 1
    shortest = sorted(kinds.items(), key=lambda kind: (kind[0].count("."), kind[0]))
    return [("", 1), *shortest[:_MAX_KINDS]]
