"""Libraries of the extra `train`, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from qkform.errors import MissingExtra


def imported(name: str, why: str) -> Any:
    """The module; MissingExtra "`why` needs `name`" where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise MissingExtra(f"{why} needs {error.name}: pip install 'qkform[train]'") from None
