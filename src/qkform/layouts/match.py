"""Paths of modules held against the patterns of rules: where in a model an attention stands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from qkform.layouts.rules import Rule

MAX_NAME = 1024  # a longer tensor name, or one of more parts, is no layer's: matching stays bounded
MAX_PARTS = 48
_NUMBERED = re.compile(r"[a-z]+(?:_[a-z]+)*_(0|[1-9][0-9]{0,5})")


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Place:
    """An attention module: its path, the path up to the layer list, and its number in that list."""

    module: str
    component: str
    layer: int


def places(rule: Rule, tensors: Mapping[str, HasShape]) -> Iterator[tuple[str, Place]]:
    """(tensor name, place) of every query tensor in a module that fits the rule."""
    tensor = rule.q_tensor
    for name in tensors:
        if name.endswith(tensor) and len(name) <= MAX_NAME:
            module = name[: len(name) - len(tensor)]
            if not module or module.endswith("."):
                found = place(rule.module, module.removesuffix("."))
                if found is not None:
                    yield name, found


def place(pattern: str, module: str) -> Place | None:
    """The place of `module` if its path ends in `pattern`; {layer} is a number, ** any parts in between."""
    parts = module.split(".") if module else []
    if len(parts) > MAX_PARTS:
        return None
    at = _layer_position(pattern.split("."), parts)
    if at is None:
        return None
    if at < 0:  # a pattern without {layer}: the last number in the path
        at = next((i for i in range(len(parts) - 1, -1, -1) if is_number(parts[i])), -1)
    if at < 0 and (numbered := _NUMBERED.fullmatch(parts[i := len(parts) - 2]) if len(parts) > 1 else None):
        return Place(module, ".".join(parts[:i]), int(numbered[1]))  # torchvision: encoder_layer_3
    if at < 0:
        return Place(module, module, 0)
    return Place(module, ".".join(parts[:at]), int(parts[at]))


def _layer_position(pattern: list[str], parts: list[str]) -> int | None:
    """Index of the part that {layer} stands for, -1 where the pattern has none, None where it does not fit.

    From the right end, so that anything may stand before.
    """
    if not pattern:
        return -1
    *rest, last = pattern
    if last == "**":
        for end in range(len(parts), -1, -1):
            found = _layer_position(rest, parts[:end])
            if found is not None:
                return found
        return None
    if not parts:
        return None
    if last in ("{layer}", "{inner}"):
        if not is_number(parts[-1]):
            return None
        found = _layer_position(rest, parts[:-1])
        return len(parts) - 1 if last == "{layer}" and found is not None else found
    return _layer_position(rest, parts[:-1]) if parts[-1] == last else None


def is_number(part: str) -> bool:
    """A layer number as models write it: no sign, no leading zero, below a million."""
    return part.isascii() and part.isdigit() and len(part) < 7 and (part == "0" or part[0] != "0")


def modules_of(pattern: str, tensors: Mapping[str, HasShape]) -> dict[str, list[str]]:
    """Modules whose path ends in `pattern`, each with the names of its tensors."""
    last = pattern.rpartition(".")[2]
    found: dict[str, list[str]] = {}
    for name in tensors:
        if f".{last}." not in f".{name}" or len(name) > MAX_NAME:
            continue
        parts = name.split(".")
        for end in range(1, min(len(parts), MAX_PARTS)):
            module = ".".join(parts[:end])
            if parts[end - 1] == last and place(pattern, module) is not None:
                found.setdefault(module, []).append(name)
                break
    return found
