"""The experiment that a record carries, as those who set runs beside each other read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields that make no other arm of a run: they change nothing about what is trained, or only say where it goes.
NOT_OF_ARM = frozenset({"seed", "track_every", "conflict", "save_every", "keep", "report_to", "out", "name"})


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; a mapping of nothing is not there."""
    out: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out
