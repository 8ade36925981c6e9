"""YAML as people write it, read so that nothing in it is lost in silence and nothing takes the reader down.

PyYAML lets the second of two equal names win, follows aliases of aliases without end, and fails on values with
whatever exception it stumbles over. Here each of these is an ExperimentError with file and line.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from qkform.errors import ExperimentError

LARGEST = 2**18  # characters: PyYAML reads about 50,000 a second
DEEPEST = 32  # levels of nesting
MOST = 100_000  # values, each counted as often as aliases repeat it

_STUMBLES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_OTHERWISE = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-9.]+)+)")  # 010 is 8, and 1:30 is 90
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_FLOAT = re.compile(  # as YAML 1.2 and JSON have them: to PyYAML 1e-6 is a text
    r"^(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_MERGE = "tag:yaml.org,2002:merge"


class _Refused(yaml.MarkedYAMLError):  # type: ignore[misc]
    """What YAML allows and no experiment can mean."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader with bounds, and with the place of every value that it cannot make out."""

    level = 0
    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [(tag, pattern) for tag, pattern in known if tag != _NUMBERS[1]]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        mark = event.start_mark
        if self.level >= DEEPEST:
            raise _Refused(None, None, f"nested more than {DEEPEST} levels deep", mark)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        if not isinstance(event, yaml.AliasEvent):
            if isinstance(node, yaml.MappingNode):
                _refuse_twice(node)
            _measure(node)
        elif not hasattr(node, "height"):
            raise _Refused(None, None, f"*{event.anchor} stands within what it names", mark)
        if self.level + node.height > DEEPEST or node.count > MOST:
            raise _Refused(None, None, "aliases repeat more than an experiment can hold", mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag in _NUMBERS and _OTHERWISE.fullmatch(node.value):
            what = (
                f"{node.value[:40]} is counted in eights or sixties in YAML; write it plainly, or in quotes"
            )
            raise _Refused(None, None, what, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except _STUMBLES as error:
            what = f"{node.value[:40]!r} is no value: " if isinstance(node, yaml.ScalarNode) else ""
            raise yaml.constructor.ConstructorError(
                None, None, f"{what}{error or type(error).__name__}", node.start_mark
            ) from None


_Loader.add_implicit_resolver(_NUMBERS[1], _FLOAT, list("-+0123456789."))


def _measure(node: Any) -> None:
    """Note levels and number of values of a node whose children are measured."""
    children: list[Any] = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
    if isinstance(node, yaml.MappingNode):
        children = [one for pair in children for one in pair]
    node.height = 1 + max((child.height for child in children), default=0)
    node.count = 1 + sum(child.count for child in children)


def _refuse_twice(node: Any) -> None:
    seen: dict[tuple[str, str], Any] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        first = seen.setdefault((key.tag, key.value), key)
        if first is not key:
            line = first.start_mark.line + 1
            raise _Refused(
                None, None, f"{key.value[:40]} is there twice, first in line {line}", key.start_mark
            )


def loaded(text: str, where: str) -> Any:
    """The one document of a YAML text; ExperimentError with `where` and the line."""
    if len(text) > LARGEST:
        raise ExperimentError(
            f"{where}: more than {LARGEST:,} characters; no experiment and no grid is that long"
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        kind = "" if isinstance(error, _Refused) else "not YAML: "
        raise ExperimentError(f"{place}: {kind}{getattr(error, 'problem', None) or error}") from None
