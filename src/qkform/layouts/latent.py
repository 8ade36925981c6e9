"""Multi-head latent attention (DeepSeek): keys, and often queries, that are made through a narrow latent.

A head's score has two terms. With `x` the row that the module reads::

    q = x W_qa W_qb, or x W_q           rows of every head: [nope|rope]
    c, r = x W_kva                      a latent, and a rotary key that all heads share
    k = c W_kvb                         rows of every head: [nope|v]
    score = q_nope . k_nope + q_rope . r

Each module gives three layers: the whole score at relative distance 0 (d_head = nope + rope), its part "nope", and its
part "rope". The norms between the two steps are not in the form; layers that have them are flagged `latent_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qkform.layouts.layer import AttentionLayer, Reader, Stored
from qkform.layouts.match import MAX_NAME, MAX_PARTS, HasShape, Place
from qkform.layouts.naming import layer_place
from qkform.layouts.order import WHOLE
from qkform.layouts.rotary import Positions
from qkform.layouts.rules import Mask, bias_of
from qkform.layouts.scopes import KEYS, Candidate, path_words

KV_A, KV_B = "kv_a_proj_with_mqa.weight", "kv_b_proj.weight"
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NORMS = ("q_a_layernorm", "kv_a_layernorm", "q_a_norm", "kv_a_norm")


@dataclass(frozen=True)
class Latent:
    """One module of this kind; `q_a` is None where queries are projected in one step."""

    place: Place
    q: str
    q_a: str | None
    kv_a: str
    kv_b: str

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for name in (self.q, self.q_a, self.kv_a, self.kv_b) if name)


def latents(tensors: Mapping[str, HasShape]) -> Iterator[Latent]:
    """Every module that has the projections of latent attention."""
    modules = [
        name[: -len(KV_A)]
        for name in tensors
        if name.endswith(KV_A) and len(name) <= MAX_NAME and name.count(".") <= MAX_PARTS
    ]
    for dotted in modules:
        q_b, q_a = f"{dotted}q_b_proj.weight", f"{dotted}q_a_proj.weight"
        through = q_a in tensors and q_b in tensors
        q = q_b if through else f"{dotted}q_proj.weight"
        if q in tensors and f"{dotted}{KV_B}" in tensors and (not dotted or dotted.endswith(".")):
            place = layer_place(dotted.removesuffix("."))
            yield Latent(place, q, q_a if through else None, f"{dotted}{KV_A}", f"{dotted}{KV_B}")


@dataclass(frozen=True)
class Split:
    """Sizes of one latent attention."""

    heads: int
    rank: int
    nope: int
    rope: int
    v: int


def split(found: Latent, tensors: Mapping[str, HasShape], parts: Sequence[Candidate]) -> Split | str:
    """The sizes that the config gives and the shapes bear out, or why there are none."""
    shape = {name: tuple(tensors[name].shape) for name in found.tensors}
    if any(len(s) != 2 for s in shape.values()):
        return "its projections are no matrices"
    path = path_words(found.place.module)
    pointed = [c for c in parts if c.points_to(path)]
    solved: set[Split] = set()
    for candidate in [c for c in pointed or parts if all(c.value((key,), ()) for key in _SIZES)] or parts:
        heads = candidate.value(KEYS["heads"], ())
        sizes = [candidate.value((key,), ()) for key in _SIZES]
        if heads is None or any(s is None for s in sizes):
            continue
        rank, nope, rope, v = (s or 0 for s in sizes)
        width = heads * (nope + rope)
        fits = (
            shape[found.kv_a][0] == rank + rope
            and shape[found.kv_b] == (heads * (nope + v), rank)
            and shape[found.q][0] == width
            and (found.q_a is None or shape[found.q_a][0] == shape[found.q][1])
            and shape[found.q_a or found.q][1] == shape[found.kv_a][1]
        )
        if fits:
            solved.add(Split(heads, rank, nope, rope, v))
    if len(solved) == 1:
        return solved.pop()
    keys = ", ".join(_SIZES)
    return f"latent attention whose sizes ({keys} and heads) in the config do not make its shapes"


@dataclass(frozen=True)
class Setting:
    """What is known of a latent attention beside its projections; the words are those of `AttentionLayer`."""

    mask: Mask
    norm: str | None
    norm_kind: str
    norm_bias: str | None
    flags: tuple[str, ...]
    positions: Positions


def layers(
    found: Latent, size: Split, tensors: Mapping[str, HasShape], read: Reader, setting: Setting
) -> Iterator[AttentionLayer]:
    """The whole score, then its two parts."""

    def stored(
        name: str, part: str = WHOLE, widths: tuple[tuple[str, int], ...] = (), inner: Stored | None = None
    ) -> Stored:
        bias = bias_of(name) if bias_of(name) in tensors else None
        return Stored(name, bias, part, bias_part=part, widths=widths, inner=inner)

    kv_widths = (("latent", size.rank), ("rope", size.rope))
    inner_q = stored(found.q_a) if found.q_a else None
    latent, shared = (
        stored(found.kv_a, part=part, widths=kv_widths)
        for part in ("latent|rope: latent", "latent|rope: rope")
    )
    nope_widths = (("nope", size.nope), ("v", size.v))
    k_nope = stored(found.kv_b, "heads x [nope|v]: nope", nope_widths, latent)
    q_widths = (("nope", size.nope), ("rope", size.rope))
    q_nope, q_rope = (
        stored(found.q, part=part, widths=q_widths, inner=inner_q)
        for part in ("heads x [nope|rope]: nope", "heads x [nope|rope]: rope")
    )
    module = found.place.module
    normed = any(f"{module}.{norm}.weight".removeprefix(".") in tensors for norm in _NORMS)
    flags = (*setting.flags, *(("latent_norm",) if normed else ()))
    whole = AttentionLayer(
        component=found.place.component,
        module=module,
        layer=found.place.layer,
        shared_by=None,
        attention="self",
        mask=setting.mask,
        n_heads=size.heads,
        n_kv_heads=size.heads,
        d_model=int(tensors[found.kv_a].shape[1]),
        d_head=size.nope + size.rope,
        flags=flags,
        norm=setting.norm,
        norm_kind=setting.norm_kind,
        q=stored(found.q, inner=inner_q),
        k=replace(k_nope, tail=shared),
        read=read,
        norm_bias=setting.norm_bias,
        positions=setting.positions,
    )
    yield whole
    yield replace(whole, part="nope", d_head=size.nope, q=q_nope, k=k_nope)
    yield replace(whole, part="rope", d_head=size.rope, n_kv_heads=1, q=q_rope, k=shared)
