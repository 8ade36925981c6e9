"""`decouple_`: the score of a token with itself gets parameters of its own, in every self-attention of a model."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from qkform import sites
from qkform.errors import SurgeryError
from qkform.sites import Site
from qkform.surgery import record
from qkform.surgery.circuits import has_collapsed
from qkform.surgery.root import REMEDY, changeable, understood
from qkform.surgery.self_score import SelfScore

CHANGE = "decouple"
Init = Literal["diagonal", "zero", "spread", "fit"]
_BIAS = re.compile(r"relative_(attention|position)_bias|rel_pos|position_bias")
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout", "dropout_prob", "attention_dropout_prob")


def decouple_(
    model: Any, *, init: Init = "diagonal", batch: Mapping[str, Any] | None = None, seed: int = 0
) -> Any:
    """Give the score of a token with itself its own form in every self-attention of the model, which is returned.

        s_ij = scale * x_i W_Q W_K^T x_j^T      i != j
        s_ii = scale * sum_k v_k x_ik^2         v: one (d_model,) vector per head, x the input of W_Q and W_K

    The attention modules get a child `self_score` with the parameter `v`, (n_heads, d_model), in the type and on the
    device of their query weights. A rotation leaves s_ii alone, a bias of position is still added to it, masks win over
    it. Models with norms on queries and keys use x / rms(x). Cross-attention is left as it is.

    init    "diagonal": diag(W_Q W_K^T), the least-squares start for independent features; where Q = K at the start,
            the one that keeps the self scores' mean. "zero": 0, which does so where they are independent.
            "spread": noise with which self scores have the mean of before and differ between tokens as much, for
            independent Gaussian features.
            "fit": ridge regression of the old self scores on x^2 over `batch`, the keyword arguments of one call of
            the model: for a trained one. The record has the number of tokens and R^2 per head, of tokens left out.
    seed    of the noise: every attention draws from a generator of its own, made of (seed, its number)

    The change is recorded in `model.config.qkform` (see `record`). SurgeryError, with the model as it was: no attention
    was found, none that is self-attention, decoupled before, wrapped for data-parallel training, or an attention that
    cannot be changed. A config that the model shares with another is copied first: the other model keeps its own.
    UserWarning where the model has attention dropout, or a learned bias of position (T5): in training those calls take
    the reference, which keeps N x N weights. Where it has attentions whose weights no single parameter holds: those
    stay as they are. And for a fit to fewer than 4 d_model tokens, which says little about others: 16 d_model do.

    >>> decouple_(model)                                        # doctest: +SKIP
    >>> model.encoder.layer[0].attention.self.self_score.v      # doctest: +SKIP
    """
    if init not in get_args(Init):
        raise SurgeryError(f"init={init!r} is none of {', '.join(get_args(Init))}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SurgeryError(f"seed is {seed!r:.60}; expected a whole number from 0")
    if batch is not None and init != "fit":
        raise SurgeryError(f'batch is for init="fit", and init is {init!r}')
    root = changeable(model, "decouple_")
    _refuse_changed(root)
    found = self_sites(root)
    for site in found:
        kind_of(site).check(site)
    record.prepare(root)
    scores = _attach(found)
    try:
        facts = _start(root, found, scores, init, batch, seed)
    except BaseException:
        _detach(found)
        raise
    record.note(
        root,
        CHANGE,
        init=init,
        seed=seed,
        sites=[site.path for site in found],
        normalised=[score.normalise for score in scores],
        **facts,
    )
    _warn_of_few(found, facts.get("tokens", ()))
    warn_of_reference(found)
    _warn_of_others(root, found)
    return model


def recouple_(model: Any) -> Any:
    """Undo `decouple_`: the self scores are the standard ones again, and `v` is gone; the model is returned."""
    root = changeable(model, "recouple_")
    found = [site for site in sites.find(root) if _is_decoupled(site)]
    if not found:
        raise SurgeryError("the model is not decoupled: none of its attentions has a self_score")
    _detach(found)
    record.forget(root, CHANGE)
    return model


def restore(model: Any, change: Mapping[str, Any]) -> None:
    """Build what a record of `decouple_` describes, with `v` of zeros: its values come from a checkpoint.

    SurgeryError where the model has no self-attention at a path of the record.
    """
    at = {site.path: site for site in self_sites(model)}
    wanted = list(change.get("sites", ()))
    missing = [path for path in wanted if path not in at]
    if missing or not wanted:
        raise SurgeryError(
            f"the record of surgery says that {missing[0] if missing else 'nothing'} was decoupled; "
            f"the model has self-attention at {', '.join(at)}"
        )
    normalised = change.get("normalised") or [None] * len(wanted)
    if len(normalised) != len(wanted):
        raise SurgeryError(
            f"the record of surgery says of {len(normalised)} attentions whether they are normalised, and names "
            f"{len(wanted)}"
        )
    _attach([at[path] for path in wanted], normalised)


def start(model: Any, change: Mapping[str, Any]) -> None:
    """Give `v` its first values as a record of `decouple_` says, after `restore`. SurgeryError where it was fitted."""
    init: Any = change.get("init")
    seed = change.get("seed", 0)
    if init == "fit" or init not in get_args(Init):
        fitted = (
            "was fitted to a batch of a trained model (init='fit')"
            if init == "fit"
            else f"has init={init!r:.60}"
        )
        raise SurgeryError(
            f"the record of surgery says that v {fitted}, which a new model has not; change `init` in config.qkform to "
            "'diagonal', 'zero' or 'spread', or load the trained model: qkform.surgery.from_pretrained"
        )
    found = [site for site in self_sites(model) if site.path in change["sites"]]
    _start(model, found, [site.module.self_score for site in found], init, None, seed)


def self_sites(model: Any) -> list[Site]:
    """The self-attentions of a model. SurgeryError where there are none."""
    name = type(model).__name__
    if has_collapsed(model):
        raise SurgeryError(
            f"the attentions of {name} are collapsed, and have no queries and keys of their own; factorize_ it first"
        )
    found = understood(model)
    own = [site for site in found if site.layer.attention == "self"]
    if own:
        return own
    if len(found):
        raise SurgeryError(
            f"{name} has cross-attention only ({found[0].path}), where a token has no score with itself; "
            "give the model that holds its self-attention"
        )
    seen = {f"{each['module']}: {each['reason']}" for each in found.skipped}
    if seen:
        raise SurgeryError(f"no attention of {name} can be changed: {min(seen)}; {REMEDY}")
    raise SurgeryError(f"no attention was found in {name}; {REMEDY}")


def kind_of(site: Site) -> Any:
    """The module with `check(site)`, `attach(site, score)` and `detach(site)` for this kind of attention."""
    name = "mha" if isinstance(site.module, nn.MultiheadAttention) else "huggingface"
    return importlib.import_module(f"qkform.surgery.{name}")


def _refuse_changed(model: Any) -> None:
    if any(isinstance(module, SelfScore) for module in model.modules()):
        raise SurgeryError("the model is decoupled already; qkform.surgery.recouple_(model) undoes it")
    if record.done(model, CHANGE) is not None:
        raise SurgeryError(
            "the model's config says that it is decoupled, but no attention has a self_score: the config comes from a "
            "decoupled model; load that with qkform.surgery.from_pretrained, or take `qkform` out of the config"
        )


def _attach(found: Sequence[Site], normalised: Sequence[bool | None] | None = None) -> list[SelfScore]:
    """A self score of zeros in every site; none is changed unless all can be."""
    for site in found:
        kind_of(site).check(site)
    scores = []
    for site, normalise in zip(found, normalised or [None] * len(found), strict=True):
        weight = site.shares["w_q"].parameter
        score = SelfScore(
            site.layer.n_heads,
            site.layer.d_model,
            normalise="qk_norm" in site.layer.flags if normalise is None else normalise,
            device=weight.device,
            dtype=weight.dtype,
        )
        kind_of(site).attach(site, score)
        scores.append(score)
    return scores


def _detach(found: Sequence[Site]) -> None:
    for site in found:
        kind_of(site).detach(site)


def _is_decoupled(site: Site) -> bool:
    return isinstance(getattr(site.module, "self_score", None), SelfScore)


def _start(
    model: Any, found: Sequence[Site], scores: Sequence[SelfScore], init: Init, batch: Any, seed: int
) -> dict[str, Any]:
    """Give every `v` its first values; what the record shall have about them."""
    from qkform.surgery import starts

    if init == "zero":
        return {}
    values: list[Tensor]
    facts: dict[str, Any] = {}
    if init == "diagonal":
        values = [starts.diagonal(site, s.normalise) for site, s in zip(found, scores, strict=True)]
    elif init == "spread":
        values = [
            starts.spread(site, score.normalise, _generator(seed, number))
            for number, (site, score) in enumerate(zip(found, scores, strict=True))
        ]
    else:
        fitted = starts.fit(model, found, scores, batch)
        values = [each.v for each in fitted]
        facts = {"r2": [each.r2 for each in fitted], "tokens": [each.tokens for each in fitted]}
    with torch.no_grad():
        for score, value in zip(scores, values, strict=True):
            score.v.copy_(value)
    return facts


def _generator(seed: int, number: int) -> torch.Generator:
    (mixed,) = np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed) >> 1)


def _warn_of_few(found: Sequence[Site], tokens: Sequence[int]) -> None:
    """A fit to so few tokens that it may be of them alone; the first is named."""
    from qkform.surgery.starts import ENOUGH, FEW

    for site, count in zip(found, tokens, strict=False):
        d = site.layer.d_model
        if count < FEW * d:
            warnings.warn(
                f'{site.path}: init="fit" saw {count} tokens for {d} features, too few to say much of '
                f"others: give at least {FEW * d}, better {ENOUGH * d}; what the fit is worth is in the record, r2 of "
                "tokens left out",
                UserWarning,
                stacklevel=3,
            )
            return


def warn_of_reference(found: Sequence[Site]) -> None:
    """Once for each reason for which these attentions leave the fused kernels, for the reference, in training."""
    reasons = (_dropout, _learned_bias)
    for reason in reasons:
        problem = next(
            (f"{site.path} has {why}" for site in found if (why := reason(site)) is not None), None
        )
        if problem is not None:
            warnings.warn(
                f"{problem}. Until then every training step computes the whole matrix of attention weights: slower, "
                "and memory grows with the square of the length. Evaluation is not touched",
                UserWarning,
                stacklevel=3,
            )


def _dropout(site: Site) -> str | None:
    for name in _DROPOUTS:
        rate = getattr(site.module, name, None)
        rate = getattr(rate, "p", rate)
        if isinstance(rate, float) and rate > 0:
            return f"attention dropout {rate}, which fused kernels cannot do here: set it to 0 in the config"
    return None


def _learned_bias(site: Site) -> str | None:
    """A bias of position that is learned comes as a mask that needs a gradient, which no fused kernel gives."""
    for name, parameter in site.module.named_parameters():
        if _BIAS.search(name) and parameter.requires_grad:
            return (
                f"a learned bias of position, {name!r}, whose gradient no fused kernel gives: freeze it "
                "(requires_grad_(False))"
            )
    return None


def _warn_of_others(model: Any, found: Sequence[Site]) -> None:
    """Attentions beside those that were changed, whose kind is not known: a model that is decoupled in part."""
    from qkform.surgery.huggingface import uses_interface

    modules = found[0].live.tree.modules
    changed = {site.path for site in found}
    for each in sites.find(model).skipped:
        module = modules.get(each["module"])
        if each["module"] not in changed and module is not None and uses_interface(module):
            warnings.warn(f"{each['module']} stays as it is: {each['reason']}", UserWarning, stacklevel=3)
            return
