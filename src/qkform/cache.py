"""Where qkform keeps what it fetched or made once: one folder, which may be deleted at any time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qkform.errors import SourceError


def cache_folder() -> Path:
    """QKFORM_CACHE, else XDG_CACHE_HOME/qkform, else the system's own place. SourceError without a home folder."""
    try:
        if chosen := os.environ.get("QKFORM_CACHE"):
            return Path(chosen).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        if os.path.isabs(xdg):  # the XDG specification: a relative path is to be ignored
            return Path(xdg) / "qkform"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "qkform"
        if sys.platform == "win32":
            local = os.environ.get("LOCALAPPDATA")
            return (Path(local) if local else Path.home() / "AppData" / "Local") / "qkform"
        return Path.home() / ".cache" / "qkform"
    except RuntimeError as error:
        raise SourceError(
            f"no cache folder: {error}; set QKFORM_CACHE to a folder that can be written"
        ) from None
