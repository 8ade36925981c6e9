"""What was seen and is no layer: attention without a form, terms that forms do not have, layers that are missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qkform.layouts.layer import AttentionLayer
from qkform.layouts.manual import QUERY
from qkform.layouts.match import MAX_NAME, modules_of, place
from qkform.layouts.rules import Family
from qkform.layouts.search import Search

_MOST = 1000  # entries: a list that nobody reads to its end
_DIGITS = str.maketrans("123456789", "000000000")


def skip_modules(search: Search, pattern: str, reason: str) -> None:
    """An entry for every module that fits, where a layer has not taken all of its tensors."""
    for module, names in sorted(modules_of(pattern, search.tensors).items()):
        if not search.seen.issuperset(names):
            search.skip(module, reason)
        search.seen.update(names)


def report(search: Search, family: Family, layers: Sequence[AttentionLayer]) -> None:
    """Adds to `skipped` what a scan of these layers leaves out."""
    _terms(search, family, layers)
    _missing(search, family, layers)
    _unseen(search)


def _terms(search: Search, family: Family, layers: Sequence[AttentionLayer]) -> None:
    """Terms of the scores that the forms do not have, once per stack of layers."""
    for note in family.notes:
        if note.counts(search.config):
            values: Mapping[str, Any] = search.config or {}
            reason = "".join(_words(values.get(p, p)) for p in re.split(r"[{}]", note.reason))
            for component in {a.component: None for a in layers if place(note.module, a.module)}:
                search.skip(component, reason)


def _missing(search: Search, family: Family, layers: Sequence[AttentionLayer]) -> None:
    """A config that promises more layers than the weights hold is a hint that a file is missing."""
    for rule in family.rules:
        if rule.shared:
            continue
        scope = search.scope(rule)
        promised = scope.count(rule.layers, 0) if layers else None
        for component in {a.component: None for a in layers if place(rule.module, a.module)}:
            have = {a.layer for a in layers if a.component == component}
            if promised and len(have) < promised[1]:
                what, count = promised
                reason = f"{scope.where}: {what} is {count}, and {len(have)} layers were found"
                if {"module": component, "reason": reason} not in search.skipped:
                    search.skip(component, reason)


def _unseen(search: Search) -> None:
    """Anything else that is named like a query projection is mentioned, not passed over in silence."""
    alike: dict[str, bool] = {}  # names that differ in numbers alone are called the same

    def is_query(name: str) -> bool:
        called = name[-MAX_NAME:].translate(_DIGITS)
        if called not in alike:
            alike[called] = QUERY.search(called) is not None
        return alike[called]

    for name in sorted(n for n in search.tensors if n not in search.seen and is_query(n)):
        if len(search.tensors[name].shape) == 2 and len(search.skipped) < _MOST:
            path = name.rpartition(".")[0]
            reason = f"{path[-200:]} is not described by the layout of {search.model_type!r}"
            search.skip(path.rpartition(".")[0], reason)


def _words(value: Any) -> str:
    """A config value in a sentence."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text[:100]
