"""Whose record a change belongs in: every model that holds the changed attentions and is saved by itself.

A part and its whole share a config, or have two, or one stands inside the other; and what is saved, and later loaded,
may be either. Torch knows no parents, so wholes are looked for among all modules of the process.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkform.sites.parameters import clean, is_module

NAME = "qkform"  # the attribute with the record, of a config or, where there is none, of the model


@dataclass(frozen=True, eq=False)
class Owner:
    """A model with a record of its own.

    model   the outermost that keeps its record there
    above   the path of the changed model in it, where that is a part of it; None where it is a part of that
    below   its own path in the changed model, where it is a part of that
    """

    model: Any
    above: str | None
    below: str = ""

    @property
    def holder(self) -> Any:
        """What has the record as its attribute `qkform`: saved with the model if it is a config."""
        return holder(self.model)

    def path(self, site: str) -> str | None:
        """A path of the changed model as one of this model; None for what it does not have."""
        if self.above is not None:
            return ".".join(part for part in (self.above, site) if part)
        if site == self.below:
            return ""
        return site.removeprefix(f"{self.below}.") if site.startswith(f"{self.below}.") else None

    def has(self, site: str) -> bool:
        """Whether a path of this model is inside the changed model."""
        return not self.above or site == self.above or site.startswith(f"{self.above}.")


def holder(model: Any) -> Any:
    """The config of a Hugging Face model, which is saved with it; else the model itself."""
    config = getattr(model, "config", None)
    return config if _is_config(config) else model


def owners(model: Any) -> list[Owner]:
    """The models that keep a record of changes of `model`, wholes before their parts; itself is always among them.

    Of those that share a config the outermost.
    """
    if not is_module(model):
        return [Owner(model, "")]
    wholes = [whole for whole in _with_records() if whole is not model and _inside(whole, model)]
    wholes.sort(key=lambda whole: sum(1 for _ in whole.modules()), reverse=True)
    found = [Owner(whole, _path(whole, model)) for whole in wholes]
    found.append(Owner(model, ""))
    parts = ((clean(path), part) for path, part in model.named_modules() if part is not model)
    found += [Owner(part, None, path) for path, part in parts if _keeps(part)]
    first: dict[int, Owner] = {}
    for owner in found:
        first.setdefault(id(owner.holder), owner)
    return list(first.values())


def own_configs(model: Any) -> None:
    """Give a model, and what it is a part of, configs that nothing else has.

    Models are often made from one config object, and a change writes into it. A part that shares the config of its
    whole goes on doing so.
    """
    family: dict[int, Any] = {}
    for owner in owners(model):
        family |= {id(module): module for module in owner.model.modules()}
    values = [value for module in family.values() for value in vars(module).values() if _is_config(value)]
    configs = {id(value): value for value in values}
    values += [v for config in configs.values() for v in vars(config).values() if id(v) in configs]
    held = Counter(map(id, values))  # references from the models themselves, and from config to config
    del values
    if not _held_elsewhere(configs, held):
        return
    copies: dict[int, Any] = {}
    for key in configs:
        copy.deepcopy(configs[key], copies)
    for module in family.values():
        for name, value in vars(module).items():
            if id(value) in configs:
                vars(module)[name] = copies[id(value)]


def _held_elsewhere(configs: dict[int, Any], held: Mapping[int, int]) -> bool:
    """Whether anything but the models holds one of their configs: another model, or a variable."""
    unheld = object()
    watched = {
        **configs,
        0: unheld,
    }  # a config is in both dictionaries, and what nobody holds in one and a name
    counts = {key: sys.getrefcount(watched[key]) for key in watched}
    return any(counts[key] - held[key] > counts[0] for key in configs)


def _with_records() -> list[Any]:
    """Every module of the process that keeps a record, or would."""
    from torch import nn

    kinds, more = {nn.Module}, [nn.Module]
    while more:
        more = [kind for above in more for kind in type.__subclasses__(above) if kind not in kinds]
        kinds |= set(more)
    # By the type: isinstance asks objects for their class, and some that are lazy, or dead, raise.
    return [each for each in gc.get_objects() if type(each) in kinds and _keeps(each)]


def _keeps(module: Any) -> bool:
    held = vars(module)
    return NAME in held or _is_config(held.get("config"))


def _inside(whole: Any, part: Any) -> bool:
    return any(module is part for module in whole.modules())


def _path(whole: Any, part: Any) -> str:
    return next(clean(path) for path, module in whole.named_modules() if module is part)


def _is_config(thing: Any) -> bool:
    return hasattr(thing, "to_dict")
