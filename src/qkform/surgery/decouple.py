"""`decouple_`: the score of a token with itself gets parameters of its own, in every self-attention of a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from qkform import sites
from qkform.errors import SurgeryError
from qkform.sites import Site
from qkform.surgery import record
from qkform.surgery.self_score import SelfScore

CHANGE = "decouple"
Init = Literal["diagonal", "zero", "spread", "fit"]


def decouple_(model: Any, *, init: Init = "diagonal", batch: Mapping[str, Any] | None = None, seed: int = 0) -> Any:
    """Give every self-attention of the model a `self_score`; the model itself is changed and returned."""
    if record.done(model, CHANGE) is not None:
        raise SurgeryError("the model is decoupled already; qkform.surgery.recouple_(model) undoes it")
    found = self_sites(model)
    scores = [_score(site) for site in found]
    _attach(model, found, scores)
    record.note(
        model,
        CHANGE,
        init=init,
        seed=seed,
        sites=[site.path for site in found],
        normalised=[score.normalise for score in scores],
    )
    return model


def recouple_(model: Any) -> Any:
    """Undo `decouple_`: the self scores are the standard ones again, and `v` is gone."""
    change = record.done(model, CHANGE)
    if change is None:
        raise SurgeryError("the model is not decoupled")
    for site in self_sites(model):
        _kind(site).detach(site)
        del site.module.self_score
    record.forget(model, CHANGE)
    return model


def restore(model: Any, change: Mapping[str, Any]) -> None:
    """Build what a record of `decouple_` describes, with `v` of zeros: its values come from a checkpoint."""
    found = self_sites(model)
    _attach(model, found, [_score(site) for site in found])


def self_sites(model: Any) -> list[Site]:
    return [site for site in sites.find(model) if site.layer.attention == "self"]


def _score(site: Site) -> SelfScore:
    weight = site.w_q()
    return SelfScore(
        site.layer.n_heads,
        site.layer.d_model,
        normalise="qk_norm" in site.layer.flags,
        device=weight.device,
        dtype=weight.dtype,
    )


def _attach(model: Any, found: Sequence[Site], scores: Sequence[SelfScore]) -> None:
    for site, score in zip(found, scores, strict=True):
        site.module.self_score = score
        _kind(site).attach(site, score)


def _kind(site: Site) -> Any:
    """The module of `attach(site, score)` and `detach(site)` for this kind of attention."""
    name = "mha" if isinstance(site.module, nn.MultiheadAttention) else "huggingface"
    return importlib.import_module(f"qkform.surgery.{name}")
