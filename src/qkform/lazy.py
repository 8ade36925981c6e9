"""Public names that are imported when they are first used: what a package's `__getattr__` does."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def member(package: str, home: Mapping[str, str], name: str) -> Any:
    """The public name of a package whose names live in the modules `home`: an object of its module, or the module.

    AttributeError, as Python words it, for a name that the package does not have.
    """
    if name not in home:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = importlib.import_module(home[name])
    return module if home[name] == f"{package}.{name}" else getattr(module, name)
