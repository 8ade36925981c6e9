"""Where in a model of its family a module stands that was given alone, so that its names begin further down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from qkform.layouts.facts import blocks_of
from qkform.layouts.match import is_number, place
from qkform.layouts.rules import families

_MAX_KINDS = 200  # of paths, layer numbers left out: odd names shall cost no time


def above(
    config: Mapping[str, Any] | None, names: Iterable[str], path: str = "", decoder: bool | None = None
) -> str:
    """Where in a model of its family a module stands, whose own names begin further down: "encoder.", "" at the top.

    It is the place at which most of its modules fit the patterns of the family; of several, the one of which the least
    is missing (an encoder has no attention across), then the one that is most like `path`, the place of the module
    in what was given, then the one on the side that `decoder` says, then one of self-attention.
    """
    model_type = str((config or {}).get("model_type"))
    family = families().get(model_type)
    rules = family.rules if family else ()
    across = {_numbered(rule.module) for rule in rules if rule.attention == "cross"}
    patterns = [rule.module for rule in rules]
    patterns += [
        block.module for block in blocks_of(model_type) if "{layer}" in block.module and not block.skip
    ]
    parts = [_numbered(pattern).split(".") for pattern in patterns]
    heads = {f"{head}." for p in parts for head in _heads(".".join(p)) if "**" not in head.split(".")}
    starts = ["", *sorted(heads)]
    if len(starts) == 1:
        return ""
    by_last: dict[str, list[str]] = {}
    for pattern in patterns:
        by_last.setdefault(pattern.rpartition(".")[2], []).append(pattern)
    anywhere = [p for last in ("", "**", "{layer}", "{inner}") for p in by_last.get(last, ())]
    words = [pattern.split(".") for pattern in patterns]
    literal = {(p[i - 1], p[i]) for p in words for i in range(1, len(p)) if is_number(p[i])}
    fits = dict.fromkeys(starts, 0)
    found: dict[str, set[str]] = {start: set() for start in starts}
    for module, count in _kinds(names, None if anywhere else by_last.keys(), literal):
        ends = by_last.get(module.rpartition(".")[2], []) if module else patterns
        for pattern in dict.fromkeys([*ends, *anywhere]):
            if place(pattern, module) is None:  # else it fits wherever the module stands
                for start in starts:
                    if place(pattern, f"{start}{module}".rstrip(".")) is not None:
                        fits[start] += count
                        found[start].add(pattern)
    most = max(fits.values())
    if not most:
        return ""

    def likely(start: str) -> tuple[int, int, bool, bool]:
        words = start.removesuffix(".").split(".")
        under = {p for p in map(_numbered, patterns) if f"{p}.".startswith(start)}
        missing = [p for p in under if not any(place(f, above) for f in found[start] for above in _heads(p))]
        side = decoder is None or ("decoder" in words) == decoder
        return -len(missing), _alike(words, path.split(".")), side, start.removesuffix(".") not in across

    return max((start for start in starts if fits[start] == most), key=likely)


def _numbered(pattern: str) -> str:
    return pattern.replace("{layer}", "0").replace("{inner}", "0")


def _heads(path: str) -> list[str]:
    """A path and all above it."""
    words = path.split(".")
    return [".".join(words[:i]) for i in range(1, len(words) + 1)]


def _alike(words: Sequence[str], others: Sequence[str]) -> int:
    """How many words at the end of two paths are the same, numbers all being one."""
    pairs = zip(reversed(words), reversed(others), strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1] or all(map(is_number, pair)), pairs)
    return sum(1 for _ in same)


def _kinds(
    names: Iterable[str], lasts: Collection[str] | None, literal: Collection[tuple[str, str]]
) -> list[tuple[str, int]]:
    """Paths of modules with 0 for every number, and how many modules have each: the shortest, which need a start.

    With `lasts`, those that end in one of these words, and the top. A `literal` word and number stay as they are:
    T5 tells its self-attention from that across by layer.0 and layer.1.
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
            parts = module.split(".")
            kinds[
                ".".join(
                    "0" if is_number(part) and (before, part) not in literal else part
                    for before, part in zip(["", *parts], parts, strict=False)
                )
            ] += 1
    shortest = sorted(kinds.items(), key=lambda kind: (kind[0].count("."), kind[0]))
    return [("", 1), *shortest[:_MAX_KINDS]]
