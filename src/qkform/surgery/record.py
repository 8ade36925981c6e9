"""The record of what surgery did to a model, kept in it: `config.qkform`, or an attribute where it has no config.

The record is plain JSON: {"version": 1, "changes": [{"change": "decouple", ...}, ...]}, in the order of the changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkform.errors import SurgeryError

VERSION = 1
_NAME = "qkform"


def changes(model: Any) -> list[dict[str, Any]]:
    """What was done to the model, oldest first: copies. SurgeryError for a record that a newer qkform wrote."""
    found = getattr(_holder(model), _NAME, None)
    if found is None:
        return []
    if not isinstance(found, Mapping) or not isinstance(found.get("changes"), list):
        raise SurgeryError(f"the model's config.qkform is {found!r:.80}; expected a record of surgery")
    if found.get("version") != VERSION:
        raise SurgeryError(
            f"the model's record of surgery has version {found.get('version')!r}; this qkform knows {VERSION}: "
            "upgrade qkform"
        )
    return [dict(change) for change in found["changes"]]


def note(model: Any, change: str, **facts: Any) -> None:
    """Add a change to the record."""
    _write(model, [*changes(model), {"change": change, **facts}])


def forget(model: Any, change: str) -> None:
    """Take every change of this kind out of the record."""
    _write(model, [entry for entry in changes(model) if entry["change"] != change])


def done(model: Any, change: str) -> dict[str, Any] | None:
    """The last change of this kind; None where there was none."""
    return next((entry for entry in reversed(changes(model)) if entry["change"] == change), None)


def _write(model: Any, entries: list[dict[str, Any]]) -> None:
    holder = _holder(model)
    if entries:
        setattr(holder, _NAME, {"version": VERSION, "changes": entries})
    elif hasattr(holder, _NAME):
        delattr(holder, _NAME)


def _holder(model: Any) -> Any:
    """The config of a Hugging Face model, which is saved with it; else the model itself."""
    config = getattr(model, "config", None)
    return config if hasattr(config, "to_dict") else model
