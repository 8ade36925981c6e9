"""Changes of the query-key form in a live model: one change per module, the same model comes out.

Every change is recorded in the model (`model.config.qkform`), and `from_pretrained` restores it. Needs torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME: dict[str, str] = {  # public name -> module
    "CircuitAttention": "qkform.surgery.collapsed",
    "collapse_": "qkform.surgery.factorize",
    "describe_groups": "qkform.surgery.groups",
    "factorize_": "qkform.surgery.factorize",
    "param_groups": "qkform.surgery.groups",
    "unsplit_": "qkform.surgery.split",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qkform.surgery' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
