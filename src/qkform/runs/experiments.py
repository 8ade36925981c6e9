"""The experiment that a record carries, as those who set runs beside each other read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Fields that change nothing about what a run computes, its record included: a resumed run may have others.
NOT_COMPUTED = frozenset({"save_every", "keep", "report_to"})
# Fields that make no other arm: what is trained is the same, seed aside, or they only say where it goes.
NOT_OF_ARM = NOT_COMPUTED | {"seed", "track_every", "conflict", "out", "name"}


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; a mapping of nothing is not there."""
    out: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def telling(arms: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """Of these fields those that tell arms apart, in order: one that only follows what is said already says nothing."""
    chosen: list[str] = []
    apart = 1
    for name in names:
        if apart == len(arms):
            break
        found = len({tuple(repr(arm.get(one)) for one in (*chosen, name)) for arm in arms})
        if found > apart:
            chosen.append(name)
            apart = found
    return chosen


def swept_names(arms: Sequence[Sequence[tuple[Path, Any]]]) -> list[str] | None:
    """The names that a sweep gave to its arms: (folder, seed) of the runs of each, which lie in NAME/seed-N.

    None where a run lies otherwise, the runs of an arm lie in two folders, or two arms would have one name.
    """
    around = [{folder.absolute().parent for folder, _ in runs} for runs in arms]
    names = [one.name for folders in around for one in folders]
    lying = all(folder.name == f"seed-{seed}" for runs in arms for folder, seed in runs)
    return names if lying and all(names) and len(set(names)) == len(names) == len(arms) else None
