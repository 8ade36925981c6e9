"""One attention and one arm: everything checked, then written, read back, and measured as a scan measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qkform.errors import QKFormError, SurgeryError
from qkform.form import BilinearForm
from qkform.form.rotary import Rotary
from qkform.sites import Site
from qkform.surgery import arms
from qkform.surgery.arms import ARMS, Planes, planes
from qkform.surgery.chance import by_chance
from qkform.surgery.rebuilt import REBUILT, find_values

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Start:
    """How one attention begins, as measured after writing, in the way a scan measures.

    path              of the module
    arm               as asked for
    symmetry          of the layer, the sum of W over its heads, in [-1, 1]
    head_symmetry     of each head
    promised          1.0 symmetric, -1.0 skew, None: no symmetry is promised
    expected          of the arm "orthogonal": mean and standard deviation that `symmetry` has over J with this W_Q (and
                      c), from 32 draws of J for the layer; None for other arms. Nothing is checked against it
    norm, head_norms  Frobenius norm of W, of the layer and of each head
    norm_before, head_norms_before    the same of the weights that were found: of a new model, the standard arm's
    c                 W_K = c W_Q J, one number per key head; () for arms of another kind
    reason            why single heads do not keep the promise; None where they do
    flags             what of the score is not in W and breaks the promise there: "bias" (b_Q or b_K are not zero),
                      "qk_norm" (norms on queries and keys whose gains, or whose kind, are not as J is; where they
                      are, the score keeps the promise up to the norm's epsilon)
    """

    path: str
    arm: str
    symmetry: float
    head_symmetry: tuple[float, ...]
    promised: float | None
    expected: tuple[float, float] | None
    norm: float
    head_norms: tuple[float, ...]
    norm_before: float
    head_norms_before: tuple[float, ...]
    c: tuple[float, ...]
    reason: str | None
    flags: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be done with one site: checked, and nothing written yet."""

    site: Site
    arm: str
    planes: Planes
    seeds: tuple[int, int]
    before: tuple[float, tuple[float, ...]]  # norms of W, of the layer and of each head
    tied: bool  # queries and keys are one parameter

    @property
    def promise(self) -> float | None:
        return ARMS[self.arm].promise if self.arm in ARMS else REBUILT[self.arm].promise

    def generator(self, *more: int) -> torch.Generator:
        """Of this layer and seed; `more` numbers give others, independent of it."""
        import torch

        (mixed,) = np.random.SeedSequence((*self.seeds, *more)).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(mixed) >> 1)

    def write(self) -> torch.Tensor | None:
        """Writes the arm; W_K as it has to read from now on, of arms with a J. None where nothing has to."""
        if self.arm in ARMS:
            if self.tied:
                return None
            keys = self._keys().to(self.site.w_k())
            self.site.write_(w_k=keys)
            return keys
        new = dict(REBUILT[self.arm].make(self.site, self.generator()))
        if "values" in new:
            found = find_values(self.site)
            found.weight.put(new.pop("values"))
            if found.bias is not None:
                found.bias.put(new.pop("value_bias"))
        self.site.write_(**new)
        return None

    def _keys(self) -> torch.Tensor:
        """c (sum of the group's W_Q) J: (n_kv_heads, d_model, d_head). SurgeryError where a J is none."""
        import torch

        generator = self.generator()
        sums, w_k = self._sums(), _widened(self.site.w_k())
        j = torch.stack([self._j(g, generator) for g in range(len(sums))])
        for one in j:
            flaw = arms.flaw(one, self.planes, self.promise)
            if flaw is not None:
                raise SurgeryError(
                    f"{self.site.path}: the arm {self.arm!r} has drawn a J that it must not: {flaw}"
                )
        keys = sums @ j.to(sums)
        return keys * (_size(w_k) / _size(keys))

    def _sums(self) -> torch.Tensor:
        """W_Q summed over the query heads that read a key head: (n_kv_heads, d_model, d_head)."""
        w_q = _widened(self.site.w_q())
        return w_q.reshape(self.site.layer.n_kv_heads, -1, *w_q.shape[1:]).sum(1)

    def _j(self, head: int, generator: Any) -> torch.Tensor:
        return ARMS[self.arm].make(self.planes, head, generator)

    def _expected(self) -> tuple[float, float] | None:
        if self.arm not in ARMS or self.promise is not None:
            return None
        sums = self._sums()
        c = (_size(_widened(self.site.w_k())) / _size(sums)).flatten()
        return by_chance(sums, c, self._j, self.generator(1))

    def kept(self) -> dict[str, torch.Tensor]:
        """Copies of all that `write` changes."""
        if self.arm in ARMS:
            return {"w_k": self.site.w_k().detach().clone()}
        sides = {
            side: getattr(self.site, side)().detach().clone()
            for side in ("w_q", "w_k", "b_q", "b_k")
            if side in self.site.shares
        }
        if REBUILT[self.arm].values:
            found = find_values(self.site)
            sides["values"] = found.weight.taken()
            if found.bias is not None:
                sides["value_bias"] = found.bias.taken()
        return sides

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        sides = dict(kept)
        if "values" in sides:
            found = find_values(self.site)
            found.weight.put(sides.pop("values"))
            if found.bias is not None:
                found.bias.put(sides.pop("value_bias"))
        self.site.write_(**sides)

    def verified(self, written: torch.Tensor | None) -> Start:
        """What is there now; SurgeryError where it is not what was written, to the bit, or not what was promised."""
        form = self.site.form()
        total = form.total()
        grouped = form.n_heads > form.n_kv_heads and self.arm in ARMS and self.promise is not None
        start = Start(
            path=self.site.path,
            arm=self.arm,
            symmetry=float(total.symmetry()[0]),
            head_symmetry=_floats(form.symmetry()),
            promised=self.promise,
            expected=self._expected(),
            norm=float(total.norm()[0]),
            head_norms=_floats(form.norm()),
            norm_before=self.before[0],
            head_norms_before=self.before[1],
            c=self._c(form) if self.arm in ARMS else (),
            reason=(
                f"{form.n_heads // form.n_kv_heads} query heads read one key head, which follows their sum: "
                "the layer keeps the promise, a single head cannot while W_Q stays"
                if grouped
                else None
            ),
            flags=_flags(self.site, self.arm),
        )
        self._check(start, grouped, written)
        return start

    def _c(self, form: BilinearForm) -> tuple[float, ...]:
        w_q = np.asarray(form.w_q, np.float64)
        sums = w_q.reshape(form.n_kv_heads, -1, *w_q.shape[1:]).sum(1)
        w_k = np.asarray(form.w_k, np.float64)
        return tuple(float(np.linalg.norm(k) / np.linalg.norm(q)) for k, q in zip(w_k, sums, strict=True))

    def _check(self, start: Start, grouped: bool, written: torch.Tensor | None) -> None:
        import torch

        w_k = self.site.w_k().detach()
        scores = (start.symmetry,) if grouped else (start.symmetry, *start.head_symmetry)
        if not all(math.isfinite(s) for s in scores):
            raise SurgeryError(f"{start.path}: W of the arm {self.arm!r} is zero or not finite")
        if written is not None and not torch.equal(w_k, written):
            raise SurgeryError(
                f"{start.path}: W_K does not hold what was written, c W_Q J; it may be computed from other weights, or "
                "be written by another layer too"
            )
        if self.promise is not None:
            off = max(abs(s - self.promise) for s in scores)
            if off > max(64 * float(torch.finfo(w_k.dtype).eps) ** 2, 1e-6):
                raise SurgeryError(
                    f"{start.path}: the arm {self.arm!r} promises symmetry {self.promise:+g} and {off:.1e} is missing; "
                    "the weights may hold values beyond their type, or be computed from others"
                )


def planned(site: Site, arm: str, seed: int, number: int, rotary: Rotary | Literal["auto"] | None) -> Plan:
    """A plan for one site, with all that could stop it found out now."""
    try:
        site.refuse("w_q", "w_k")
        form = site.form()
    except QKFormError as error:
        reason = str(error).removeprefix(f"{site.path}: ")
        raise SurgeryError(
            f"{site.path}: {reason}; symmetrize the model before it is changed further"
        ) from None
    query, key = site.shares["w_q"], site.shares["w_k"]
    tied = query.parameter is key.parameter and (
        query.rows is None or key.rows is None or bool(np.intersect1d(query.rows, key.rows).size)
    )
    if tied and arm != "matched":
        raise SurgeryError(
            f"{site.path}: queries and keys are one parameter, {query.name!r}, so W is symmetric as it is; "
            "only arm='matched' fits"
        )
    turning = Planes((), tuple(range(site.layer.d_head)))
    if arm in ARMS:
        if arm != "matched":
            turning = _planes(site, rotary)
        problem = ARMS[arm].problem(turning)
        if problem is not None:
            raise SurgeryError(
                f"{site.path}: {problem}; choose another arm than {arm!r}, or another head size"
            )
        for name, weight in (("W_Q", form.w_q), ("W_K", form.w_k)):
            _check_weight(site, name, np.asarray(weight, np.float64))
    elif REBUILT[arm].values:
        find_values(site)
    elif site.layer.d_head > site.layer.d_model:
        raise SurgeryError(
            f"{site.path}: d_head {site.layer.d_head} is more than d_model {site.layer.d_model}"
        )
    norms = float(form.total().norm()[0]), _floats(form.norm())
    return Plan(site, arm, turning, (seed, number), norms, tied)


def _check_weight(site: Site, name: str, weight: Any) -> None:
    """SurgeryError where a key head has nothing to start from, or no size to keep."""
    if not np.isfinite(weight).all():
        raise SurgeryError(f"{site.path}: {name} is not finite; initialise the model first")
    sums = weight.reshape(site.layer.n_kv_heads, -1, *weight.shape[1:]).sum(1)
    empty = [g for g in range(len(sums)) if not sums[g].any()]
    if empty:
        raise SurgeryError(
            f"{site.path}: {name} of key head {empty[0]} is zero, so W_K = c W_Q J has no size to keep; "
            "initialise the model first, or use arm='mimetic'"
        )


def _planes(site: Site, rotary: Rotary | Literal["auto"] | None) -> Planes:
    """Which coordinates of a head of this layer turn together. SurgeryError where nobody has said."""
    import torch

    layer = site.layer
    if not (rotary is None or rotary == "auto" or isinstance(rotary, Rotary)):
        raise SurgeryError(f"rotary is {rotary!r:.60}; expected 'auto', None or a qkform.form.rotary.Rotary")
    try:
        if rotary != "auto":
            return planes(layer.d_head, rotary)
        if isinstance(site.module, torch.nn.MultiheadAttention):
            return planes(layer.d_head, None)
        if layer.positions is None or layer.positions.kind is None:
            kind = "its model" if layer.positions is None else repr(layer.positions.kinds[0])
            raise SurgeryError(f"how {kind} knows positions is not described")
        return planes(layer.d_head, layer.positions.rotary(layer.d_head, 1, layer.part))
    except QKFormError as error:
        raise SurgeryError(
            f"{site.path}: {error}. J has to commute with a rotation, where there is one: give rotary=None (no "
            "rotation), rotary=qkform.form.rotary.Rotary(...), or arm='matched', which fits any"
        ) from None


def _flags(site: Site, arm: str) -> tuple[str, ...]:
    """What of the score is not in W and does not keep the promise."""
    biases = [b for b in (site.b_q(), site.b_k()) if b is not None]
    flags = ["bias"] if any(bool(b.detach().ne(0).any()) for b in biases) else []
    normed = "qk_norm" in site.layer.flags or site.layer.qk_norms is not None
    return (*flags, *(["qk_norm"] if normed and not _norms_agree(site, arm) else []))


def _norms_agree(site: Site, arm: str) -> bool:
    """Whether the norms on queries and keys leave the score of a head as symmetric as W.

    The score is q^ G_q R(n) G_k J^T q^' with q^ of unit size: gains that are one number each do nothing; gains that
    agree keep symmetry as long as J is diagonal as they are. A norm that takes the mean away needs J to keep the
    mean, which only J = 1 does; a norm over all heads at once, or over keys of a group, divides by other sizes.
    """
    layer, norms = site.layer, site.layer.qk_norms
    if norms is None or norms.kind is None or any(np.any(site.live.read(name)) for name in norms.biases):
        return False
    if layer.n_heads > layer.n_kv_heads and arm != "script":
        return False
    if len(norms.q) != 1 or len(norms.k) != 1:
        return False
    q, k = (np.asarray(site.live.read(names[0]), np.float64) for names in (norms.q, norms.k))
    if q.shape != (layer.d_head,) or k.shape != (layer.d_head,):
        return False
    if norms.kind == "layer" and arm not in ("matched", "script"):
        return False
    plain = bool((q == q[0]).all() and (k == k[0]).all())
    return plain or (arm in ("matched", "indefinite", "script") and bool((q == k).all()))


def _widened(w: torch.Tensor) -> torch.Tensor:
    """In float64 where it is so, else in float32: products of half precision lose what the weights hold."""
    import torch

    return w.detach().to(torch.float64 if w.dtype == torch.float64 else torch.float32)


def _size(w: torch.Tensor) -> torch.Tensor:
    """Frobenius norm per head, (heads, 1, 1)."""
    import torch

    return torch.linalg.vector_norm(w, dim=(1, 2), keepdim=True)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
