"""One search for attentions: what it is given, what it has seen so far, and where names and config point."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from qkform.layouts.geometry import Overrides, Scope
from qkform.layouts.layer import Reader
from qkform.layouts.match import HasShape
from qkform.layouts.rotary import Positions, positions
from qkform.layouts.rules import Rule
from qkform.layouts.scopes import Candidate, Solver
from qkform.layouts.scopes import candidates as config_parts

Entry = dict[str, str]  # a module and the reason why it has no layer


@dataclass(frozen=True, eq=False)
class Search:
    """Names, shapes and config of one checkpoint; `seen` and the two lists grow while rules are held against them."""

    tensors: Mapping[str, HasShape]
    config: Mapping[str, Any] | None
    read: Reader
    model_type: str
    where: str  # the config's name for messages
    arch: str  # the architecture of a GGUF file, or ""
    overrides: Overrides
    seen: set[str] = field(default_factory=set)  # tensors that a layer or an entry accounts for
    skipped: list[Entry] = field(default_factory=list)
    unproved: list[Entry] = field(default_factory=list)  # pairs whose heads are not known

    def skip(self, module: str, reason: str) -> None:
        self.skipped.append({"module": module, "reason": reason})

    def below(self, path: str) -> bool:
        """Whether any tensor stands below `path`. Costs the logarithm of the number of names."""
        start = f"{path}."
        at = bisect_left(self._sorted, start)
        return at < len(self._sorted) and self._sorted[at].startswith(start)

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.tensors)

    def scope(self, rule: Rule) -> Scope:
        return Scope(self.config, rule, self.where, self.arch)

    @cached_property
    def parts(self) -> list[Candidate]:
        """The parts of the config that may speak of heads."""
        return config_parts(self.config)

    @cached_property
    def solver(self) -> Solver:
        return Solver(self.parts, self.overrides)

    def part_of(self, module: str) -> Mapping[str, Any] | None:
        """The sub-config that names a model type of its own and is the only one that a path points to."""
        words = self.solver.words(module)
        pointed = [c.values for c in self.parts if c.points_to(words) and "model_type" in c.values]
        return pointed[0] if len(pointed) == 1 else None

    def positions(self, rule: Rule, layer: int, part: Mapping[str, Any] | None) -> Positions:
        """How a layer knows positions, by its own part of the config where there is one."""
        scope = self.scope(rule)
        config = scope.config if part is None else part
        return positions(rule.family, self.arch, config, scope.where, layer, self.tensors)
