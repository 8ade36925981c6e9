"""The record of what surgery did to a model, kept in it: `config.qkform`, or an attribute where it has no config.

The record is plain JSON: {"version": 1, "changes": [{"change": "decouple", ...}, ...]}, in the order of the changes.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Mapping
from typing import Any

from qkform.errors import SurgeryError
from qkform.sites.parameters import is_module, unwrapped

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
    """Add a change to the record; where it has paths, with the class of the model that they start from."""
    if "sites" in facts:
        facts = {"of": type(unwrapped(model)).__name__, **facts}
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
    """The config of a Hugging Face model, which is saved with it; else the model itself, without wrappers."""
    model = unwrapped(model) if is_module(model) else model
    config = getattr(model, "config", None)
    return config if _is_config(config) else model


def own_config(model: Any) -> None:
    """Give a model that has no record yet, with all that it is a part of, a config that nothing else has.

    Models are often made from one config object, and a change writes into it. A part shares the config of its whole,
    which saves it, and goes on doing so: torch knows no parents, so the whole is looked for among all modules.
    """
    config = getattr(model, "config", None)
    if not _is_config(config) or changes(model):
        return
    family = list(model.modules())
    held = sum(value is config for module in family for value in vars(module).values())
    unheld = object()
    if sys.getrefcount(config) - held <= sys.getrefcount(unheld):
        return  # the model alone holds it; the search would take a tenth of a second
    for module in _with_config(config):
        parts = list(module.modules())
        if any(part is model for part in parts):
            family += parts
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in family:
        for name, value in vars(module).items():
            if id(value) in copies and _is_config(value):
                vars(module)[name] = copies[id(value)]


def _with_config(config: Any) -> list[Any]:
    """Every module of the process that has this config."""
    from torch import nn

    # By the type: isinstance asks objects for their class, and some that are lazy, or dead, raise.
    objects = gc.get_objects()
    kinds = {kind for kind in {type(each) for each in objects} if issubclass(kind, nn.Module)}
    modules = [each for each in objects if type(each) in kinds]
    return [module for module in modules if vars(module).get("config") is config]


def _is_config(thing: Any) -> bool:
    return hasattr(thing, "to_dict")
