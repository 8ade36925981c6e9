"""Names, shapes and a config -> every attention of a model, in order, and what was seen and not scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qkform.errors import LayoutError
from qkform.layouts.build import built
from qkform.layouts.choose import choose, named_type, nothing_known
from qkform.layouts.facts import without_attention
from qkform.layouts.geometry import Overrides
from qkform.layouts.layer import AttentionLayer, Reader
from qkform.layouts.leftovers import report, skip_modules
from qkform.layouts.manual import Manual, candidates
from qkform.layouts.match import HasShape, places
from qkform.layouts.named import named
from qkform.layouts.outside import translated
from qkform.layouts.rules import Family
from qkform.layouts.search import Search
from qkform.layouts.self_scores import surgery_of, with_self_scores


@dataclass(frozen=True)
class Layout:
    """What was found in one checkpoint."""

    model_type: str | None
    layers: Sequence[AttentionLayer]
    skipped: Sequence[Mapping[str, str]]


def find_layers(
    tensors: Mapping[str, HasShape],
    config: Mapping[str, Any] | None,
    read: Reader,
    *,
    source: str,
    config_name: str | None = None,
    overrides: Overrides | None = None,
    manual: Manual | None = None,
) -> Layout:
    """Every attention layer of a checkpoint, without reading a weight.

    `config` is the parsed config.json, or the metadata of a GGUF file (which has general.architecture).
    Raises ConfigError where config and shapes contradict each other, LayoutError where no layout is known.
    """
    overrides = overrides or Overrides()
    where = config_name or source
    config = translated(config)
    model_type, arch = named_type(config, where)
    rule = manual.rule() if manual else None
    chosen = (
        Family(model_type or "unknown", "the command line", (rule,))
        if rule is not None
        else choose(model_type, arch, tensors, config, heads_given=overrides.heads is not None)
    )
    family = chosen or Family(model_type or "unknown", "names", ())
    search = Search(tensors, config, read, family.model_type, where, arch, overrides)
    layers = with_self_scores(_ordered(search, family, by_names=rule is None and not arch), tensors, source)
    report(search, family, layers)
    changes = surgery_of(config)
    if not layers and "collapse" in changes:
        raise LayoutError(
            f"{source}: its circuits are collapsed: W_QK is one free matrix per head, without the factors that are "
            "scored here; qkform.surgery.factorize_(model) gives it factors"
        )
    if "decouple" in changes and not any(layer.self_score for layer in layers):
        lost = "its config says decoupled, and no self_score.v is there: lost by a plain from_pretrained?"
        search.skip(family.model_type, lost)
    if not layers and (instead := without_attention(model_type)):
        raise LayoutError(
            f"{source}: {model_type} has no softmax attention, so it has no query-key form: {instead}"
        )
    if not layers and chosen is None:
        reasons = [f"{s['module'][-200:]}: {s['reason']}" for s in search.unproved]
        raise nothing_known(model_type, tensors, reasons, source=source, where=where)
    if not layers:
        wanted = f"the layout of {family.model_type!r} ({family.file})" if rule is None else "--q and --k"
        raise LayoutError(f"{source}: no tensor fits {wanted}. {candidates(tensors)}")
    return Layout(model_type, layers, search.skipped)


def _ordered(search: Search, family: Family, *, by_names: bool) -> list[AttentionLayer]:
    """The layers of the family's rules and those that names alone tell: stack after stack, layer after layer."""
    for skip in family.skips:
        skip_modules(search, skip.module, skip.reason)
    found: list[tuple[int, AttentionLayer]] = []
    rules = [rule for rule in family.rules if rule.counts(search.config)]
    for order, rule in enumerate(rules):
        for name, at in places(rule, search.tensors):
            if name not in search.seen:
                layer = built(search, rule, name, at)
                if layer is not None:
                    found.append((order, layer))
    if by_names and (found or not rules):  # a family of which nothing is there is not the family it says
        found += [(len(rules), layer) for layer in named(search)]
    components = {layer.component: None for _, layer in found}
    rank = {component: i for i, component in enumerate(components)}
    found.sort(key=lambda item: (rank[item[1].component], item[1].layer, item[0], item[1].module))
    return [layer for _, layer in found]
