"""What training does to the query-key form: mathematics that can be measured.

`one_layer` is a model small enough to be solved: which learning rates sharpen attention, and by how much. Needs the
extra `theory` (scipy).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkform.dynamics import one_layer as one_layer

_HOME: dict[str, str] = {  # public name -> module
    "one_layer": "qkform.dynamics.one_layer",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qkform.dynamics' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if _HOME[name] == f"qkform.dynamics.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
