"""Symmetric starts and their controls: `symmetrize_` writes W_Q and W_K so that W = W_Q W_K^T begins as promised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np

from qkform.errors import SurgeryError
from qkform.form.rotary import Rotary
from qkform.plain import plain_table
from qkform.sites import Site
from qkform.sites.parameters import is_module, unwrapped
from qkform.surgery import record
from qkform.surgery.arms import ARMS
from qkform.surgery.circuits import has_collapsed
from qkform.surgery.rebuilt import REBUILT
from qkform.surgery.root import understood
from qkform.surgery.symmetric_start import Plan, Start, planned


@dataclass(frozen=True, repr=False)
class Starts(Sequence[Start]):
    """One `Start` per self-attention, in order, and `left`: {"module", "reason"} of what was not changed.

    Printed as a table: the symmetry of each layer beside what was promised (of the control: its mean and standard
    deviation by chance), the norm of W and how many times that of before it is.
    """

    found: tuple[Start, ...]
    left: tuple[Mapping[str, str], ...] = ()

    @overload
    def __getitem__(self, index: int) -> Start: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Start, ...]: ...
    def __getitem__(self, index: int | slice) -> Start | tuple[Start, ...]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Start]:
        return iter(self.found)

    def __repr__(self) -> str:
        rows = [
            {**vars(start), "times_before": start.norm / start.norm_before if start.norm_before else None}
            for start in self.found
        ]
        left = [f"left as it is: {entry['module']}: {entry['reason']}" for entry in self.left]
        shown = ("path", "arm", "symmetry", "promised", "expected", "norm", "times_before", "flags")
        return "\n".join([plain_table(rows, shown), *left])


def symmetrize_(
    model: Any, *, arm: str = "matched", seed: int = 0, rotary: Rotary | Literal["auto"] | None = "auto"
) -> Starts:
    """Give every self-attention of a model a start of one arm, in place; it is free to change afterwards.

    The first four arms keep W_Q, the values and all biases bit for bit, and write W_K = c W_Q J for every key head,
    J orthogonal, c such that W_K keeps the Frobenius norm that it had:

    "matched"     J = 1: W is symmetric, and positive: a token attracts itself
    "indefinite"  J = balanced signs: symmetric, attracting and repelling
    "skew"        J = quarter turns: W^T = -W, no token attracts itself; d_head must be even
    "orthogonal"  J random: no symmetry but by chance, the same singular values of W_K: their control

    Under rotary embedding J commutes with the rotation, and s_ij = s_ji (skew: -s_ji) wherever i and j stand. See
    `qkform.surgery.arms`; "script", "script_scale" and "mimetic" are recipes of others, see `qkform.surgery.rebuilt`.
    Query heads that share a key head: W_K = c (sum of their W_Q) J, so that the sum over the layer keeps the promise;
    a single head cannot while W_Q stays, and its `reason` says so.

    The norm of W differs from that of independent W_Q and W_K, which `norm_before` gives: the factors are aligned.
    What is added to scores (ALiBi, T5's and DeBERTa's biases) stays as it is and is in no promise. Cross-attention is
    left alone and listed in `left`. A trained model may be given: its W_K is overwritten.

    `seed`: every layer draws from a generator of its own, made of (seed, its number), so that a layer's numbers
    depend neither on the other layers nor on torch's global state, which is not touched. `rotary` says how heads turn,
    `qkform.form.rotary.Rotary` or None, for a type whose positions are not described.

    Raises SurgeryError for a model that cannot take the arm, before anything is written; also where J is not orthogonal
    or does not commute with the rotation, where W_K does not read as it was written, to the bit, and where the symmetry
    measured afterwards is not as promised (1e-6, in low precision 64 eps^2), and then puts back what it found. The
    control promises none, and no seed is refused for the symmetry that it gives: read it beside what J gives by chance
    with this W_Q, `symmetry` beside `expected`. Symmetrize once, before `decouple_` and `param_groups`.

    >>> for start in symmetrize_(model, arm="skew"):        # doctest: +SKIP
    ...     print(start.path, start.symmetry, start.norm / start.norm_before)
    """
    _check(arm, seed)
    model = unwrapped(model) if is_module(model) else model
    _check_order(model)
    chosen, left = _chosen(model)
    found = _written(chosen, arm, seed, rotary)
    record.note(model, "symmetrize", arm=arm, seed=seed, sites=[site.path for site in chosen])
    return Starts(found, left)


def start(model: Any, change: Mapping[str, Any]) -> None:
    """Write the arm of a record into a new model, at the paths of the record; all of them where it names none."""
    arm, seed, paths = change.get("arm"), change.get("seed"), change.get("sites")
    _check(arm, seed)
    chosen, _ = _chosen(model)
    _written(
        [site for site in chosen if paths is None or site.path in paths], str(arm), int(seed or 0), "auto"
    )


def _check(arm: Any, seed: Any) -> None:
    if arm not in (*ARMS, *REBUILT):
        raise SurgeryError(f"no arm {arm!r:.60}; known: {', '.join((*ARMS, *REBUILT))}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise SurgeryError(f"seed is {seed!r:.60}; expected a whole number from 0")


def _written(
    chosen: Sequence[Site], arm: str, seed: int, rotary: Rotary | Literal["auto"] | None
) -> tuple[Start, ...]:
    """All planned, then all written and measured, or none."""
    import torch

    with torch.no_grad():
        plans = [planned(site, arm, seed, number, rotary) for number, site in enumerate(chosen)]
        with _undone_on_error(plans):
            written = [plan.write() for plan in plans]
            return tuple(plan.verified(keys) for plan, keys in zip(plans, written, strict=True))


def _check_order(model: Any) -> None:
    if record.done(model, "decouple") is not None:
        raise SurgeryError(
            "the model is decoupled already, and its self scores were set from the old weights; "
            "symmetrize first: recouple_(model), symmetrize_(model), then decouple_(model)"
        )
    if has_collapsed(model):
        raise SurgeryError(
            "the model's attentions are collapsed, or CircuitAttention, and have no W_Q and W_K of a stock one; "
            "factorize_(model) first, or symmetrize it before collapse_"
        )
    before = record.done(model, "symmetrize")
    if before is not None:
        raise SurgeryError(
            f"the model was given the arm {before.get('arm')!r} already, so its weights and their norms are no longer "
            "those of its own init; build the model again"
        )


def _chosen(model: Any) -> tuple[list[Site], tuple[Mapping[str, str], ...]]:
    """The self-attentions to change, and what is left alone with the reason."""
    found = understood(model)
    left = list(found.skipped)
    chosen: list[Site] = []
    for site in found:
        reason = _why_left(site, chosen)
        if reason is None:
            chosen.append(site)
        else:
            left.append({"module": site.path, "reason": reason})
    if not chosen:
        reasons = "; ".join(f"{entry['module'] or 'the model'}: {entry['reason']}" for entry in left[:3])
        raise SurgeryError(f"no self-attention to symmetrize was found ({reasons})")
    return chosen, tuple(left)


def _why_left(site: Site, before: Sequence[Site]) -> str | None:
    if site.layer.attention == "cross":
        return "cross-attention: its W compares two sequences and has no symmetry"
    if site.layer.part is not None:
        return f"the score has several terms, of which this ({site.layer.part}) is one"
    if "shared_k" in site.layer.flags:
        return "it reads the keys of another layer"
    for other in before:
        if _same(site, other, "w_k"):
            if not _same(site, other, "w_q"):
                raise SurgeryError(
                    f"{site.path} and {other.path} have one W_K and two W_Q: the keys of one layer cannot follow both"
                )
            return f"its weights are those of {other.path}"
    return None


def _same(site: Site, other: Site, side: Any) -> bool:
    one, two = site.shares[side], other.shares[side]
    return one.parameter is two.parameter and (
        one.rows is None or two.rows is None or np.array_equal(one.rows, two.rows)
    )


@contextmanager
def _undone_on_error(plans: Sequence[Plan]) -> Iterator[None]:
    """All or nothing: what the plans change is put back where one of them fails."""
    kept = [plan.kept() for plan in plans]
    try:
        yield
    except BaseException:
        for plan, old in zip(plans, kept, strict=True):
            plan.restore(old)
        raise
