"""SciPy, which the closed forms need and `import qkform` must not: brought in where it is used."""

from __future__ import annotations

import importlib
from typing import Any

from qkform.errors import MissingExtra


def scipy(part: str) -> Any:
    """`scipy.<part>`; MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError:
        raise MissingExtra('scipy is not installed; it comes with: pip install "qkform[theory]"') from None
