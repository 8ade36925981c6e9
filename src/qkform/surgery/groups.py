"""Learning rates of their own for the query-key circuit and the self score: groups for any torch.optim optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from qkform.errors import QKFormError, SurgeryError
from qkform.plain import plain_table
from qkform.sites import Sites, open_live
from qkform.sites.parameters import clean, unwrapped
from qkform.surgery.circuits import CIRCUITS, Circuit, circuits, fused, has_collapsed
from qkform.surgery.root import understood
from qkform.surgery.split import parts, split_

# What transformers' Trainer does not decay: biases and norms (Trainer.get_decay_parameter_names), and the biases
# that attentions with weights per head call b_Q, b_K, b_V, b_O.
_NO_DECAY = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)_?b_[A-Za-z]+$", re.IGNORECASE
)


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    qk_lr_ratio: float = 1.0,
    self_score_lr_ratio: float = 1.0,
    weight_decay: float = 0.0,
    decoupled_decay: bool = True,
) -> list[dict[str, Any]]:
    """Parameter groups with the rate lr for most of the model, lr * ratio for Q and K and for self scores.

    Every trainable parameter is in exactly one group, tied ones once, in the order of the model: the same model and
    the same call give the same groups, so an optimizer's state can be loaded again. Each group has "name", "params",
    "lr", "weight_decay"; empty groups are left out. Of these circuits each has a group NAME/decay and NAME/no_decay:

    * qk: weights and biases of queries and keys, cross-attention included
    * ov: those of values and of the output projection
    * self_score: v of a decoupled self score
    * rest: embeddings, norms (on queries and keys too), feed-forward layers, heads; and a value or output projection
      that neither its name nor its shape shows, which learns at the same rate there (`describe_groups` lists all)

    Biases and norms do not decay, embeddings do, as transformers' Trainer has it. The self score's v does: like W_Q
    and W_K it is the weight of a score, and no offset.

    A weight that holds Q, K and V is split in place where qk_lr_ratio is not 1 (see `qkform.surgery.split`): the model
    computes what it did, bit for bit, and its files keep the stock names. Call this before the model is wrapped or
    compiled; `unsplit_` folds back. At qk_lr_ratio 1 nothing is split, and a fused weight is in qk.

    Scaling the *gradient* of Q and K is no remedy: Adam divides it by its own size, and a constant factor cancels.

    lr                    the base rate, per step
    qk_lr_ratio           multiplies it for Q and K; > 0
    self_score_lr_ratio   multiplies it for self scores; > 0
    weight_decay          per unit of rate, as torch.optim takes it
    decoupled_decay       divide a group's decay by its ratio. AdamW and SGD take lr * weight_decay of a weight per
                          step, which stays the same then. False leaves weight_decay as it is in every group: for Adam
                          with the decay in the gradient, which it normalises

    Raises SurgeryError where the model has no attention, where Q and K of one cannot have a rate of their own (products
    of matrices, tied or sharded or adapted fused weights), for ratios that are not positive, and for a negative rate or
    decay.

    >>> groups = param_groups(model, lr=3e-4, qk_lr_ratio=4.0, weight_decay=0.01)       # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(groups)                                           # doctest: +SKIP
    """
    ratios: Mapping[Circuit, float] = {"qk": qk_lr_ratio, "self_score": self_score_lr_ratio}
    for circuit, ratio in ratios.items():
        if not (math.isfinite(ratio) and ratio > 0):
            raise SurgeryError(
                f"{circuit}_lr_ratio is {ratio}; expected a positive number. For parameters that do not learn set "
                "requires_grad to False: they are in no group"
            )
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise SurgeryError(f"{name} is {value}; expected a number from 0")
    root = unwrapped(model)
    sites = _sites(model, needed=not has_collapsed(root))
    if qk_lr_ratio != 1.0:
        _apart(model, root, sites)
    where = circuits(root, sites)
    groups: dict[str, list[Any]] = {f"{c}/{d}": [] for c in CIRCUITS for d in ("decay", "no_decay")}
    decays = _decaying(root)
    for parameter in (p for p in root.parameters() if p.requires_grad):
        kind = "decay" if id(parameter) in decays else "no_decay"
        groups[f"{where.get(id(parameter), 'rest')}/{kind}"].append(parameter)
    made = []
    for circuit in CIRCUITS:
        ratio = ratios.get(circuit, 1.0)
        decay = weight_decay / ratio if decoupled_decay else weight_decay
        for kind, its_decay in (("decay", decay), ("no_decay", 0.0)):
            name = f"{circuit}/{kind}"
            if groups[name]:
                made.append(
                    {"name": name, "params": groups[name], "lr": lr * ratio, "weight_decay": its_decay}
                )
    return made


class GroupRows(list[dict[str, Any]]):
    """A list of rows that is printed as a table."""

    def __repr__(self) -> str:
        return plain_table(self, ("group", "parameter", "shape", "lr", "weight_decay"))


def describe_groups(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is where: a row per parameter, {"group", "parameter", "shape", "lr", "weight_decay"}, in their order.

    A list, which `print` shows as a table. `groups` are those of `param_groups`, or `optimizer.param_groups` made of
    them.
    """
    names = {id(p): clean(name) for name, p in unwrapped(model).named_parameters()}
    return GroupRows(
        {
            "group": group["name"],
            "parameter": names.get(id(parameter), "not of this model"),
            "shape": tuple(parameter.shape),
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
        }
        for group in groups
        for parameter in group["params"]
    )


def _sites(model: nn.Module, needed: bool) -> Sites:
    """The attentions of the model; none where none is understood and none is needed."""
    try:
        found = understood(model)
    except QKFormError as error:
        if not needed:
            return Sites(())
        raise SurgeryError(f"{error}; or let the optimizer take model.parameters() as they are") from error
    if not found and needed:
        reasons = "; ".join(f"{s['module']}: {s['reason']}" for s in found.skipped[:3])
        raise SurgeryError(
            f"no attention whose Q and K are parameters in a {type(model).__name__}{reasons and f' ({reasons})'}; "
            "the optimizer can take model.parameters() as they are"
        )
    return found


def _apart(model: nn.Module, root: nn.Module, sites: Sites) -> None:
    """Split what is fused, so that every Q and K is a parameter of its own. Nothing is changed unless all can be."""
    _refuse_products(model, sites)
    chosen: dict[tuple[int, str], tuple[Any, Any]] = {}
    for site in sites:
        for share, rows in fused(site):
            trainable = share.parameter.requires_grad
            adapted = share.at.adapted or _has_adapter(root, share.name.rpartition(".")[0])
            if adapted:
                raise SurgeryError(
                    f"{share.name!r} holds Q, K and V and has an adapter, whose low-rank part cannot be split; merge "
                    "the adapter first (`model.merge_and_unload()`), or leave qk_lr_ratio at 1"
                )
            if trainable:
                key = (id(share.at.owner), share.at.attribute)
                if key in chosen:
                    rows = rows | chosen[key][1]
                chosen[key] = (share, rows)
    before = [key for key, (share, _) in chosen.items() if parts(share.at.owner, share.at.attribute) is None]
    try:
        for share, rows in chosen.values():
            split_(model, share.at.owner, share.at.attribute, rows, share.dim)
    except SurgeryError as error:
        _fold(chosen[key][0] for key in before)
        raise SurgeryError(f"{share.name}: {error}") from error


def _fold(shares: Iterable[Any]) -> None:
    from qkform.surgery.split import unsplit_

    for owner in {id(share.at.owner): share.at.owner for share in shares}.values():
        unsplit_(owner)


def _has_adapter(root: nn.Module, path: str) -> bool:
    return any(clean(name).startswith(f"{path}.lora_") for name, _ in root.named_parameters())


def _refuse_products(model: nn.Module, sites: Sites) -> None:
    """SurgeryError for attentions that are known and whose Q or K no single parameter holds."""
    if not sites.skipped:
        return
    known = {site.path for site in sites}
    reasons: Mapping[str, str] = {s["module"]: s["reason"] for s in sites.skipped}
    layers: Sequence[Any] = open_live(model).find().layers
    lost = [layer.module for layer in layers if layer.module not in known]
    if lost:
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise SurgeryError(
            f"{lost[0]}{more}: {reasons.get(lost[0], 'no parameter holds Q and K')}; they cannot have a learning "
            "rate of their own here: leave qk_lr_ratio at 1 and name the parameters by hand"
        )


def _decaying(root: nn.Module) -> set[int]:
    """Ids of the parameters that decay: all but those of norms and biases."""
    decays = set()
    for path, module in root.named_modules():
        if "norm" in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            whole = clean(f"{path}.{name}".removeprefix("."))
            if not _NO_DECAY.search(whole):
                decays.add(id(parameter))
    return decays
