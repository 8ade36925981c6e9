"""`from_pretrained`: load a Hugging Face model that surgery changed, with the changes that its config records."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from qkform.errors import CheckpointError, QKFormError, SurgeryError, prefixed
from qkform.surgery import record
from qkform.surgery.filed import ENDING, refuse_unsound

# change -> the module with what builds it again: `restore(model, change)` the structure, `start(model, change)` values
_HOME: dict[str, str] = {
    "collapse": "qkform.surgery.factorize",
    "decouple": "qkform.surgery.decouple",
    "set_attention": "qkform.surgery.set_attention",
    "symmetrize": "qkform.surgery.symmetric_init",
}


def from_pretrained(model_class: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """`model_class.from_pretrained(source, ...)` for a model that surgery changed and `save_pretrained` saved.

    `model_class` is a model class of transformers or one of its Auto classes, `source` and the other arguments are
    those of its `from_pretrained`. What `config.qkform` records is built into the empty model before its weights are
    read, so that every parameter comes from the file, `self_score.v` too; a model without a record loads as ever.

    SurgeryError for a record of a newer qkform, a change it does not know, or a model with no room for it;
    CheckpointError where the files lack a parameter that the record promises, have one of another shape, or a
    self score without a record, or one whose v is not of finite floating-point numbers.

    >>> model = from_pretrained(AutoModelForMaskedLM, "folder")     # doctest: +SKIP
    """
    from safetensors import SafetensorError

    told = kwargs.pop("output_loading_info", False)
    ignore = kwargs.pop("ignore_mismatched_sizes", False)
    restored = _Restored()
    try:
        model, report = restored.kind(model_class).from_pretrained(
            source, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        restored.finish(model, report, ignore)
    except QKFormError as error:
        raise prefixed(error, str(source)) from error
    except SafetensorError as error:
        raise CheckpointError(f"{_damaged(source)}: cannot be read as safetensors: {error}") from error
    return (model, report) if told else model


def _damaged(source: Any) -> str:
    """The file of a folder that is damaged; the source where that is not found out."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(Path(source).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return str(path)
    return str(source)


class _Restored:
    """One loading: the class that restores while transformers builds the model, and what came of it."""

    def __init__(self) -> None:
        # Names of the parameters that restoring gave, per model that was built: the last one is the outermost.
        self.added: list[set[str]] = []
        self.promised: set[str] = set()  # sites of the record in the files
        self.classes: dict[type, type] = {}  # class of a model -> the one that restores

    def kind(self, model_class: Any) -> Any:
        """The class to load with: a subclass of a model class, or an Auto class that knows such subclasses."""
        mapping = getattr(model_class, "_model_mapping", None)
        if mapping is not None:
            return type(model_class.__name__, (model_class,), {"_model_mapping": _Mapping(mapping, self)})
        if not (isinstance(model_class, type) and hasattr(model_class, "_load_pretrained_model")):
            raise SurgeryError(
                f"{model_class!r:.80} is no model class; expected one of transformers, or an Auto class"
            )
        return self.restoring(model_class)

    def restoring(self, model_class: type) -> type:
        """A subclass of the same name whose models are restored when they are built, before weights are loaded."""
        if model_class in self.classes:
            return self.classes[model_class]

        @functools.wraps(model_class.__init__)  # type: ignore[misc]
        def build(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            model_class.__init__(model, config, *args, **kwargs)  # type: ignore[misc]
            before = {name for name, _ in model.named_parameters()}
            changes = [c for c in record.changes(model) if c["change"] == "decouple"]
            self.promised = {site for change in changes for site in change.get("sites", ())}
            restore(model)
            self.added.append({name for name, _ in model.named_parameters()} - before)

        def load(model: Any, state_dict: Any, files: Any, *args: Any, **kwargs: Any) -> Any:
            if self.added[-1]:
                refuse_unsound(state_dict, files)
            return model_class._load_pretrained_model(model, state_dict, files, *args, **kwargs)  # type: ignore[attr-defined]

        names = ("__module__", "__qualname__", "__doc__")
        inside = {name: getattr(model_class, name) for name in names}
        made = type(
            model_class.__name__,
            (model_class,),
            {**inside, "__init__": build, "_load_pretrained_model": staticmethod(load)},
        )
        self.classes[model_class] = made
        return made

    def finish(self, model: Any, report: Mapping[str, Any], ignore_mismatched_sizes: bool) -> None:
        """Give the model its own class; CheckpointError where its files do not hold what they should."""
        if not self._was_restored(model) and record.changes(model):
            raise SurgeryError(
                f"the model's class, {type(model).__name__}, is custom code that an Auto class fetched, and was "
                "loaded without its surgery; pass the class itself"
            )
        added = self.added[-1] if self.added else set()
        lacking = sorted(added & set(report["missing_keys"]))
        if lacking:
            raise CheckpointError(
                f"the files have no {_some(lacking)}, which the record of surgery in config.qkform promises"
            )
        wrong = {name: (tuple(filed), tuple(live)) for name, filed, live in report["mismatched_keys"]}
        if not ignore_mismatched_sizes:
            added = added | set(wrong)
        wrong = {name: shapes for name, shapes in wrong.items() if name in added}
        if wrong:
            said = [
                f"{name}: {filed} in the files, {live} expected"
                for name, (filed, live) in sorted(wrong.items())
            ]
            raise CheckpointError(f"shapes do not fit the config: {_some(said)}")
        has = {path for path, _ in model.named_modules()}
        unread = {
            f".{name}".removesuffix(ENDING): name
            for name in report["unexpected_keys"]
            if f".{name}".endswith(ENDING)
        }
        # What is promised and has no place belongs to a part that this class of model lacks.
        strange = sorted(
            name
            for path, name in unread.items()
            if path.removeprefix(".") in has
            or not any(f".{site}".endswith(path) or path.endswith(f".{site}") for site in self.promised)
        )
        if strange:
            raise CheckpointError(
                f"the files have {_some(strange)}, and config.qkform records no attention that would use it; put the "
                "record back into config.json, or load without it: model_class.from_pretrained"
            )

    def _was_restored(self, model: Any) -> bool:
        """Whether the model was built by a restoring class; it has its own class from now on."""
        own = type(model).__mro__[1]
        if self.classes.get(own) is not type(model):
            return False
        model.__class__ = own
        return True


class _Mapping:
    """The mapping of an Auto class from configs to model classes, with restoring ones in the place of each."""

    def __init__(self, mapping: Any, restored: _Restored) -> None:
        self._mapping = mapping
        self._restored = restored

    def __getitem__(self, config_class: Any) -> Any:
        found = self._mapping[config_class]
        if isinstance(found, list | tuple):
            return [self._restored.restoring(each) for each in found]
        return self._restored.restoring(found)

    def __contains__(self, config_class: Any) -> bool:
        return config_class in self._mapping

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mapping, name)


def restore(model: Any, *, anew: bool = False) -> None:
    """Build into a model of stock structure what its record of surgery describes; values come from elsewhere.

    `anew`: from the model's own weights, as the changes were made at first.

    The record is brought to this class of model: with another head, or none, its modules have other paths, and those
    of a part that it does not have are gone. Where a part was changed, and not the model, the paths start from there.
    Parts with a config inside the model's, as a vision tower has, have their own records in it.
    """
    own = record.changes(model)
    parts = [(part, record.changes(part)) for part in _parts(model)]
    _restore(model, own, anew)
    known = {(change["change"], site) for change in record.changes(model) for site in change.get("sites", ())}
    for path, part, changes in ((path, part, changes) for (path, part), changes in parts):
        _restore(
            part,
            [
                c
                for c in changes
                if not any((c["change"], f"{path}.{s}") in known for s in c.get("sites", ()))
            ],
            anew,
        )


def _restore(model: Any, changes: list[dict[str, Any]], anew: bool) -> None:
    for change in changes:
        name = change.get("change")
        if name not in _HOME:
            raise SurgeryError(
                f"the model's record of surgery has the change {name!r:.80}; known: {', '.join(sorted(_HOME))}; "
                "upgrade qkform"
            )
    changes = [_moved(model, change) for change in changes]
    for change in changes:
        record.forget(model, change["change"])
    for change in changes:
        record.note(model, change["change"], **{k: v for k, v in change.items() if k != "change"})
        home = importlib.import_module(_HOME[change["change"]])
        for build in ("restore", "start") if anew else ("restore",):
            if hasattr(home, build):
                getattr(home, build)(model, change)


def _moved(model: Any, change: dict[str, Any]) -> dict[str, Any]:
    """A change with the paths, and what runs along them, that this model has; as it was where it has none of them."""
    sites = change.get("sites")
    if not isinstance(sites, list):
        return change
    has = {path for path, _ in model.named_modules()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    places = [
        next((path for path in (site, f"{prefix}{site}", site.removeprefix(prefix)) if path in has), None)
        for site in map(str, sites)
    ]
    if not any(place is not None for place in places):
        part = _part(model, change, has)
        return change if part is None else {**change, "sites": [f"{part}.{site}" for site in sites]}
    return record.along({**change, "sites": places}, [place is not None for place in places])


def _part(model: Any, change: Mapping[str, Any], has: AbstractSet[str]) -> str | None:
    """The path of the part that was changed: the one module that has all the sites, of the class that it had."""
    first = f".{change['sites'][0]}" if change["sites"] else None
    above = [path.removesuffix(first) for path in has if path.endswith(first)] if first else []
    fitting = [part for part in above if all(f"{part}.{site}" in has for site in change["sites"])]
    of = [part for part in fitting if type(model.get_submodule(part)).__name__ == change.get("of")]
    found = of if len(fitting) > 1 and of else fitting
    if len(found) > 1:
        raise SurgeryError(
            f"the record of surgery is of a part of the model, {change.get('of', 'of unknown class')} with "
            f"{change['sites'][0]}, and {', '.join(sorted(found))} are such parts; write the path of the one that was "
            "changed in front of the sites of config.qkform"
        )
    return found[0] if found else None


def _parts(model: Any) -> list[tuple[str, Any]]:
    """By path the outermost modules with configs that stand inside the model's own and have a record."""
    inner, wanted = [getattr(model, "config", None)], set()
    for config in inner:
        found = [value for value in vars(config).values() if hasattr(value, "to_dict")] if config else []
        inner += found
        wanted |= {id(value) for value in found if getattr(value, "qkform", None) is not None}
    outermost: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if id(config) in wanted and config is not getattr(model, "config", None):
            outermost.setdefault(id(config), (path, module))
    return list(outermost.values())


def _some(things: list[str], most: int = 3) -> str:
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(things[:most]) + more
