"""The record of what surgery did to a model, kept in it: `config.qkform`, or an attribute where it has no config.

The record is plain JSON: {"version": 1, "changes": [{"change": "decouple", ...}, ...]}, in the order of the changes.
Paths in it start from the model of class "of" that is saved with it. It stands in every model that holds what was
changed and has a config of its own (see `owners`), so that the whole and a part can both be saved, and loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qkform.errors import SurgeryError
from qkform.sites.parameters import is_module, unwrapped
from qkform.surgery.owners import NAME, holder, own_configs, owners

VERSION = 1


def changes(model: Any) -> list[dict[str, Any]]:
    """What was done to the model, oldest first: copies. SurgeryError for a record that a newer qkform wrote."""
    return _read(holder(_root(model)))


def done(model: Any, change: str) -> dict[str, Any] | None:
    """The last change of this kind to something in the model; None where there was none.

    A part may have its record in the config of a whole, beside what was done to other parts: that does not count.
    """
    for owner in owners(_root(model)):
        for entry in reversed(_read(owner.holder)):
            everywhere = owner.above is None or not entry.get("sites")
            if entry["change"] == change and (everywhere or any(map(owner.has, entry["sites"]))):
                return dict(entry)
    return None


def prepare(model: Any) -> None:
    """To be called before a change: SurgeryError for a record that cannot be added to.

    A config that another model has too is copied, for a change writes into it.
    """
    for owner in owners(_root(model)):
        _read(owner.holder)
    own_configs(_root(model))


def note(model: Any, change: str, /, **facts: Any) -> None:
    """Add a change to the record; `sites` among the facts are paths in the model, and lists as long run along them."""
    facts = {name: fact for name, fact in facts.items() if name not in ("change", "of")}
    for owner in owners(_root(model)):
        own = facts
        if "sites" in facts:
            places = [owner.path(site) for site in facts["sites"]]
            own = along({**facts, "sites": places}, [place is not None for place in places])
            if not own["sites"]:
                continue
            own = {"of": type(owner.model).__name__, **own}
        _write(owner.holder, [*_read(owner.holder), {"change": change, **own}])


def forget(model: Any, change: str) -> None:
    """Take what concerns this model in changes of this kind out of every record that has it."""
    for owner in owners(_root(model)):
        kept = []
        for entry in _read(owner.holder):
            if entry["change"] != change:
                kept.append(entry)
            elif owner.above and "sites" in entry:  # of a whole, where other parts may be changed too
                left = along(entry, [not owner.has(site) for site in entry["sites"]])
                kept += [left] if left["sites"] else []
        _write(owner.holder, kept)


def along(entry: Mapping[str, Any], keep: list[bool]) -> dict[str, Any]:
    """A change with some of its sites, and of the lists that run along them the same places."""
    lists = {name: v for name, v in entry.items() if isinstance(v, list) and len(v) == len(keep)}
    return {**entry, **{n: [x for x, k in zip(v, keep, strict=True) if k] for n, v in lists.items()}}


def _read(held_by: Any) -> list[dict[str, Any]]:
    found = getattr(held_by, NAME, None)
    if found is None:
        return []
    if not isinstance(found, Mapping) or not isinstance(found.get("changes"), list):
        raise SurgeryError(f"the model's config.qkform is {found!r:.80}; expected a record of surgery")
    version = found.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise SurgeryError(
            f"the model's record of surgery has version {version!r}; this qkform knows {VERSION}: upgrade qkform"
        )
    for entry in found["changes"]:
        _refuse_malformed(entry)
    return [dict(change) for change in found["changes"]]


# fact -> what it has to be, and how that is called, where a change has it
_FACTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "change": (lambda fact: isinstance(fact, str), "a name"),
    "sites": (
        lambda fact: isinstance(fact, list) and all(isinstance(s, str) for s in fact),
        "a list of paths",
    ),
    "normalised": (
        lambda fact: isinstance(fact, list) and all(isinstance(n, bool | None) for n in fact),
        "a list of true and false",
    ),
}


def _refuse_malformed(entry: Any) -> None:
    if not isinstance(entry, Mapping) or "change" not in entry:
        raise SurgeryError(
            f"the model's record of surgery has the change {entry!r:.80}; expected its name and facts"
        )
    for name, (fits, kind) in _FACTS.items():
        if name in entry and not fits(entry[name]):
            raise SurgeryError(
                f"the model's record of surgery has the {name} {entry[name]!r:.80} in a change; expected {kind}"
            )


def _write(held_by: Any, entries: list[dict[str, Any]]) -> None:
    if entries:
        setattr(held_by, NAME, {"version": VERSION, "changes": entries})
    elif hasattr(held_by, NAME):
        delattr(held_by, NAME)


def _root(model: Any) -> Any:
    return unwrapped(model) if is_module(model) else model
