"""`set_attention_`: every self-attention of a model computes a relative of standard attention, without parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from qkform import sites
from qkform.errors import SurgeryError
from qkform.sites import Site
from qkform.sites.parameters import unwrapped
from qkform.surgery import record
from qkform.surgery.decouple import kind_of, self_sites, warn_of_reference

CHANGE = "set_attention"
Kind = Literal["exclusive", "no-diagonal", "standard"]


def set_attention_(model: Any, kind: Kind) -> Any:
    """Let every self-attention of the model be of this kind; the model is changed and returned.

    "exclusive": without the direction of the token's own value, see `qkform.attention.exclusive_attention`.
    "no-diagonal": a token does not attend to itself, see `qkform.attention.no_diagonal_attention`.
    "standard": undoes the others; on a model that was not changed it changes nothing.

    Weights and cross-attention stay as they are. The change is recorded in `model.config.qkform`.
    SurgeryError, with the model as it was, where no self-attention was found or one cannot be changed, and for a
    decoupled model: recouple it first. UserWarning where "no-diagonal" takes the reference in training, as in
    `decouple_`.

    >>> set_attention_(model, "exclusive")      # doctest: +SKIP
    """
    if kind not in get_args(Kind):
        raise SurgeryError(f"{kind!r} is no kind of attention; known: {', '.join(get_args(Kind))}")
    root = unwrapped(model)
    found = self_sites(root)
    decoupled = [site.path for site in found if _now(site) == "decoupled"]
    if decoupled:
        raise SurgeryError(
            f"{decoupled[0]} is decoupled; qkform.surgery.recouple_(model) first: an attention has one kind"
        )
    before = {site: _now(site) for site in found}
    for site, old in before.items():
        if old is None:
            kind_of(site).check(site)
    record.prepare(root)
    for site, old in before.items():
        if old is not None:
            kind_of(site).switch_off(site)
        if kind != "standard":
            kind_of(site).switch_on(site, kind)
    record.forget(root, CHANGE)
    if kind != "standard":
        record.note(root, CHANGE, kind=kind, sites=[site.path for site in found])
    if kind == "no-diagonal":  # exclusive attention starts from the standard output
        warn_of_reference(found)
    return model


def restore(model: Any, change: Mapping[str, Any]) -> None:
    """Switch what a record of `set_attention_` names. SurgeryError where the model has no self-attention there."""
    kind = change.get("kind")
    at = {site.path: site for site in sites.find(model)}
    wanted = list(change.get("sites", ()))
    missing = [path for path in wanted if path not in at]
    if missing or not wanted or kind not in get_args(Kind) or kind == "standard":
        raise SurgeryError(
            f"the record of surgery names the attention {kind!r} at {missing[0] if missing else wanted!r:.80}; "
            f"the model has {', '.join(at)}, and the kinds are exclusive and no-diagonal"
        )
    for path in wanted:
        kind_of(at[path]).check(at[path])
    for path in wanted:
        kind_of(at[path]).switch_on(at[path], kind)


def _now(site: Site) -> str | None:
    found: str | None = kind_of(site).switched(site.module)
    return found
