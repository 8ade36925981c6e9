"""Names and shapes -> attentions that no rule of a family has taken, where the config proves their heads.

First blocks that the model type is known to have (see `facts`), then latent attention, then pairs by their names alone.
What is not proved is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from qkform.errors import ConfigError
from qkform.layouts.build import built, keys_from, mask_of, matrix, norm_of, short
from qkform.layouts.facts import Block, block_of, blocks_of
from qkform.layouts.geometry import Geometry
from qkform.layouts.latent import Latent, Setting, latents, split
from qkform.layouts.latent import layers as latent_layers
from qkform.layouts.layer import AttentionLayer
from qkform.layouts.leftovers import skip_modules
from qkform.layouts.match import Place, places
from qkform.layouts.naming import is_cross, pairs
from qkform.layouts.rules import Kind, Mask, Rule
from qkform.layouts.scopes import Projection
from qkform.layouts.search import Search

# what models call the norms on queries and keys, inside the attention module
QK_NORMS = (
    "q_norm",
    "k_norm",
    "q_layernorm",
    "k_layernorm",
    "query_layernorm",
    "key_layernorm",
    "norm_q",
    "norm_k",
)
CONVOLUTIONS = (
    "q_conv1d",
    "k_conv1d",
    "q_conv",
    "k_conv",
    "k_sconv",
    "q_sconv",
    "convolution_projection_query",
)
_SHORTENED = ("sr", "sequence_reduction", "sequences_reduction", "spatial_reduction")
_LINEAR = ("A_log", "dt_bias", "query_decay")
_MAKE_CAUSAL: Mapping[str, bool] = {"is_decoder": True, "is_causal": True, "causal": True}
_MAKE_BIDIRECTIONAL: Mapping[str, bool] = {
    "is_causal": False,
    "causal": False,
    "use_bidirectional_attention": True,
    "use_bidirectional": True,
    "bidirectional": True,
}


@dataclass(eq=False)
class _Asked:
    """A rule that does not say how many heads there are, what is known beside it, and the rules it became."""

    rule: Rule
    block: Block | None
    proved: dict[tuple[Geometry, Kind], Rule] = field(default_factory=dict)


def named(search: Search) -> Iterator[AttentionLayer]:
    """Attentions that no rule of the family has taken: of blocks that the model type has, then by names alone."""
    for block in blocks_of(search.model_type):
        if block.skip:
            skip_modules(search, block.module, block.skip)
        elif block.names_tensors:
            asked: dict[Block, _Asked] = {}
            for q_name, at in places(block.rule(search.model_type), search.tensors):
                whole = block_of(search.model_type, at.module, block) or block
                if whole not in asked:
                    asked[whole] = _Asked(whole.rule(search.model_type), whole)
                yield from _proved(search, asked[whole], q_name, at)
    for found in latents(search.tensors):
        yield from _latent(search, found)
    yield from _pairs(search)
    search.skipped.extend(search.unproved)


def _pairs(search: Search) -> Iterator[AttentionLayer]:
    """Attentions whose two matrices are called a query and a key."""
    asked: dict[tuple[Block | None, str, str, Kind], _Asked] = {}
    for pair in pairs(search.tensors):
        block = block_of(search.model_type, pair.place.module)
        q, k = f"{pair.q}{pair.suffix}", f"{pair.k}{pair.suffix}"
        kind: Kind = "cross" if is_cross(pair.place.module) else "self"
        question = (block, q, k, kind)
        if question not in asked:
            facts = block or Block("**", {})
            asked[question] = _Asked(facts.rule(search.model_type, q=q, k=k, exact=True, kind=kind), block)
        yield from _proved(search, asked[question], pair.q_tensor, pair.place)


def _proved(search: Search, asked: _Asked, q_name: str, at: Place) -> Iterator[AttentionLayer]:
    """The layer of a rule that does not say which part of the config counts, if shapes prove one."""
    rule, block = asked.rule, asked.block
    k_name = f"{keys_from(search, rule, at).module}.{rule.k_tensor}".removeprefix(".")
    if q_name in search.seen or k_name not in search.tensors:
        return
    other = _no_softmax(search, at.module)
    if other:
        search.seen.update((q_name, k_name))
        search.skip(at.module, other)
        return
    try:
        shapes = [matrix(n, search.tensors[n].shape, rule.transposed) for n in (q_name, k_name)]
        q = Projection(*shapes[0], rule.order if rule.fused else rule.q_order)
        k = Projection(*shapes[1], rule.order if rule.fused else rule.kv_order if rule.kv_fused else "")
        solved = search.solver.solve(at.module, q, k, block.keys if block else None, rule.any_width)
    except ConfigError as error:
        solved = str(error)
    if isinstance(solved, str):
        search.seen.update((q_name, k_name))
        shown = f"{q_name[-200:]} {short(search.tensors[q_name].shape)}"
        search.unproved.append({"module": at.module, "reason": f"{solved}: {shown}"})
        return
    apart = q.inputs != k.inputs or _shortened(search, at.module)
    kind = "cross" if apart else rule.attention
    if (solved, kind) not in asked.proved:
        asked.proved[solved, kind] = replace(
            rule,
            mask=_undoubted(search, rule.mask),
            heads=(f"={solved.n_heads}",),
            kv_heads=(f"={solved.n_kv_heads}",),
            head_dim=(f"={solved.d_head}",),
            d_model=(),
            attention=kind,
            qk_norm=rule.qk_norm or QK_NORMS,
        )
    flags = () if block else ("by_names",)
    layer = built(search, asked.proved[solved, kind], q_name, at, search.part_of(at.module), flags)
    if layer is not None:
        yield layer


def _latent(search: Search, found: Latent) -> Iterator[AttentionLayer]:
    """The three layers of a latent attention."""
    if found.q in search.seen:
        return
    search.seen.update(found.tensors)
    size = split(found, search.tensors, search.parts)
    if isinstance(size, str):
        search.unproved.append({"module": found.place.module, "reason": size})
        return
    block = block_of(search.model_type, found.place.module)
    rule = (block or Block("**", {})).rule(search.model_type, q="q", k="k")
    scope = search.scope(rule)
    norm = norm_of(search, rule, scope, found.place)
    setting = Setting(
        mask=_undoubted(search, mask_of(rule, scope)),
        norm=norm.path,
        norm_kind=norm.kind,
        norm_bias=norm.bias,
        flags=() if block else ("by_names",),
        positions=search.positions(rule, found.place.layer, search.part_of(found.place.module)),
    )
    yield from latent_layers(found, size, search.tensors, search.read, setting)


def _undoubted(search: Search, mask: Mask) -> Mask:
    """The mask that a model type was seen to have, unless a switch in the config says otherwise."""
    doubts = {"bidirectional": _MAKE_CAUSAL, "causal": _MAKE_BIDIRECTIONAL}.get(mask, {})
    switched = any(part.values.get(key) is value for part in search.parts for key, value in doubts.items())
    return "unknown" if switched else mask


def _shortened(search: Search, module: str) -> bool:
    """Whether keys are read from a shortened sequence: the two sides have different inputs."""
    return any(search.below(f"{module}.{name}") for name in _SHORTENED)


def _no_softmax(search: Search, module: str) -> str | None:
    """Why a module with queries and keys has no form between tokens, as what stands beside them shows."""
    if any(f"{module}.{name}" in search.tensors for name in _LINEAR):
        return "linear attention: no softmax over scores"
    if any(search.below(f"{module}.{name}") for name in CONVOLUTIONS):
        return "a convolution stands between the projection and the score"
    return None
