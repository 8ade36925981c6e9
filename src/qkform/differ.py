"""Two checkpoints of one model -> how each layer and head changed: tuned against pretrained, quantised against full."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qkform.differences import DiffTable
from qkform.errors import ConfigError, LayoutError, QKFormError, prefixed
from qkform.form import BilinearForm
from qkform.form.change import change
from qkform.layouts import AttentionLayer, Layout
from qkform.layouts.transform import changed, check, extra_needs
from qkform.options import Options
from qkform.records import Row
from qkform.scanner import Progress, Source, opened
from qkform.scoring import at_once, conventions

Pair = tuple[AttentionLayer, AttentionLayer]


def diff(
    a: Source,
    b: Source,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    q: str | None = None,
    k: str | None = None,
    transposed: bool = False,
    gamma: float = 2.0,
    revision_a: str | None = None,
    revision_b: str | None = None,
    token: str | None = None,
    download: bool = False,
    fold_norm: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
    offset: int | Sequence[int] | None = None,
    progress: Progress | None = None,
) -> DiffTable:
    """How the query-key form of every layer and head changed from `a` to `b`, two checkpoints of one architecture.

    Sources and keywords are those of `qkform.scan` (`qkform.options.Options`), with a revision for each side and one
    distance at most; an adapter is its base with the adapter in it. Layers are matched by the path of their module;
    where the two name their modules differently (with and without a head; a GGUF file and the model it was made from),
    by the end of the path, or in order if all shapes agree. A row has both symmetries and directionalities, the size
    of the change, the angle between the forms, and where the change of symmetry would lie (+-2 std) had noise on W_Q
    and W_K turned the form by the same angle (docs/math.md#differences). Raises what `scan` raises, and LayoutError
    where no layer of one is a layer of the other.

    >>> diff("./pretrained", "./finetuned").layers[0]["symmetry_change"]       # doctest: +SKIP
    0.012
    """
    begin = time.perf_counter()
    asked = Options(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q=q,
        k=k,
        transposed=transposed,
        gamma=gamma,
        token=token,
        download=download,
        fold_norm=fold_norm,
        bias=bias,
        qk_norm=qk_norm,
        offset=offset,
    )
    if len(asked.offsets) > 1:
        raise ConfigError("diff compares at one distance; call it once for each offset")
    sides = [
        opened(a, _at_revision(asked, "revision_a", revision_a)),
        opened(b, _at_revision(asked, "revision_b", revision_b)),
    ]
    (first, layout_a, _), (second, layout_b, _) = sides
    source_a, source_b = _named(first.source, revision_a), _named(second.source, revision_b)
    for layout in (layout_a, layout_b):
        check(layout.layers, asked.changes)
    name = f"{source_a} -> {source_b}"
    pairs, matched_by = _matched(layout_a, layout_b, name)
    only_a, only_b = (
        [layer.module for layer in layout.layers if all(layer is not pair[side] for pair in pairs)]
        for side, layout in enumerate((layout_a, layout_b))
    )
    for side, checkpoint in enumerate((first, second)):
        checkpoint.plan(
            [
                need
                for pair in pairs
                for need in (*pair[side].needs(), *extra_needs(pair[side], asked.changes))
            ]
        )
    model_type = layout_b.model_type or layout_a.model_type
    commits = [side.revision for side in sides]
    del layout_a, layout_b, sides  # a layer's weights go when its rows are made
    rows: list[Row] = []
    total = len(pairs)
    for done in range(total):
        if progress is not None:
            progress(name, done, total)
        rows += _layer_rows(*pairs.pop(0), asked)
    if progress is not None:
        progress(name, total, total)
    return DiffTable(
        source_a=source_a,
        source_b=source_b,
        model_type=model_type,
        conventions=_conventions(asked, matched_by),
        rows=rows,
        only_in_a=only_a,
        only_in_b=only_b,
        wall_seconds=time.perf_counter() - begin,
        bytes_read=first.bytes_read + second.bytes_read,
        revision_a=commits[0],
        revision_b=commits[1],
        offset=asked.distance,
    )


def _at_revision(options: Options, keyword: str, revision: str | None) -> Options:
    """The options of one side."""
    if not isinstance(revision, str | None):
        raise ConfigError(f"{keyword} is {revision!r:.60}; it must be a branch, a tag or a commit")
    return replace(options, revision=revision)


def _named(source: str, revision: str | None) -> str:
    """The source with the revision that was asked for: both sides may be one repository."""
    return f"{source}@{revision}" if revision else source


def _matched(a: Layout, b: Layout, name: str) -> tuple[list[Pair], str]:
    """Layers of `a` with the same layer of `b`, and how they were matched."""
    for how, key in (("module", _module), ("end of the module's path", _tail)):
        pairs = _paired(a, b, key)
        if pairs:
            return pairs, how
    if [_shape(layer) for layer in a.layers] == [_shape(layer) for layer in b.layers]:
        return list(zip(a.layers, b.layers, strict=True)), "order"
    one, other = a.layers[0], b.layers[0]
    raise LayoutError(
        f"{name}: no layer of one is a layer of the other; the first are {one.module} {_words(one)} of "
        f"{len(a.layers)} and {other.module} {_words(other)} of {len(b.layers)}. "
        "Compare two checkpoints of one architecture"
    )


def _paired(a: Layout, b: Layout, key: Any) -> list[Pair]:
    """Layers with the same shape whose key is the same, and which have it alone."""
    sides = [{}, {}]  # type: list[dict[Any, AttentionLayer]]
    for side, layout in zip(sides, (a, b), strict=True):
        count = Counter(key(layer) for layer in layout.layers)
        side |= {key(layer): layer for layer in layout.layers if count[key(layer)] == 1}
    return [(layer, sides[1][k]) for k, layer in sides[0].items() if k in sides[1]]


def _module(layer: AttentionLayer) -> tuple[Any, ...]:
    return layer.module, _shape(layer)


def _tail(layer: AttentionLayer) -> tuple[Any, ...]:
    """The module's path from the name of its layer list on: layers.3.self_attn."""
    start = layer.component.rpartition(".")[0]
    return layer.module.removeprefix(f"{start}."), _shape(layer)


def _shape(layer: AttentionLayer) -> tuple[Any, ...]:
    return (
        layer.attention,
        layer.part,
        layer.n_heads,
        layer.n_kv_heads,
        layer.d_model,
        layer.d_head,
    )


def _words(layer: AttentionLayer) -> str:
    return f"({layer.n_heads} heads of {layer.d_head}, {layer.n_kv_heads} key heads, d_model {layer.d_model})"


def _layer_rows(a: AttentionLayer, b: AttentionLayer, options: Options) -> list[Row]:
    """The row of the whole layer, then one per head."""
    try:
        form_a, form_b = (changed(layer, options.changes).form for layer in (a, b))
        rows = _rows(a, b, form_a.total(), form_b.total(), options, first=None)
        part = at_once(form_a, itemsize=8)
        size = form_a.n_heads // form_a.n_kv_heads
        for i, (x, y) in enumerate(zip(form_a.groups(part), form_b.groups(part), strict=True)):
            rows += _rows(a, b, x, y, options, first=i * part * size)
        return rows
    except QKFormError as error:
        raise prefixed(error, a.module) from None


def _rows(
    a: AttentionLayer,
    b: AttentionLayer,
    form_a: BilinearForm,
    form_b: BilinearForm,
    options: Options,
    *,
    first: int | None,
) -> list[Row]:
    """One row per head of the two forms, the first being head `first` of the layer; None: the layer as a whole."""
    moved = change(form_a, form_b)
    own = a.attention == "self"
    columns: dict[str, Any] = {
        "directionality_a": form_a.directionality(options.gamma),
        "directionality_b": form_b.directionality(options.gamma),
        "relative_change": moved.size,
        "cosine": moved.cosine,
        "norm_a": form_a.norm(),
        "norm_b": form_b.norm(),
        "change_effective_rank": moved.form.effective_rank(),
    }
    columns["directionality_change"] = columns["directionality_b"] - columns["directionality_a"]
    if own:
        columns |= {
            "symmetry_a": form_a.symmetry(),
            "symmetry_b": form_b.symmetry(),
            "symmetry_change": moved.symmetry,
            "null_low": moved.null_mean - 2.0 * moved.null_std,
            "null_high": moved.null_mean + 2.0 * moved.null_std,
            "symmetry_change_z": moved.z(),
            "change_symmetry": moved.form.symmetry(),
        }
    defects = list(zip(form_a.defects(), form_b.defects(), moved.form.defects(), strict=True))
    rows = []
    for i, (of_a, of_b, of_change) in enumerate(defects):
        row: Row = {
            "component": a.component,
            "module": a.module,
            "layer": a.layer,
            "head": None if first is None else first + i,
            "attention": a.attention,
            "part": a.part,
            "d_model": form_a.d_model,
            "d_head": a.d_head,
        }
        for name in _SCORES:
            value = columns[name][i] if name in columns else None
            row[name] = float(value) if value is not None and np.isfinite(value) else None
        row["flags"] = sorted({*a.flags, *b.flags})
        row["reason"] = (
            (of_a and f"first: {of_a}")
            or (of_b and f"second: {of_b}")
            or (
                None
                if own
                else "cross-attention: queries and keys come from different sequences, so W has no symmetry"
            )
            or (of_change and "no change")
        )
        rows.append(row)
    return rows


_SCORES = (
    "symmetry_a",
    "symmetry_b",
    "symmetry_change",
    "null_low",
    "null_high",
    "symmetry_change_z",
    "directionality_a",
    "directionality_b",
    "directionality_change",
    "relative_change",
    "cosine",
    "norm_a",
    "norm_b",
    "change_symmetry",
    "change_effective_rank",
)


def _conventions(options: Options, matched_by: str) -> dict[str, Any]:
    """What was assumed, for the record."""
    return conventions(options, of_change=True) | {
        "change": "b - a; relative_change is ||W_b - W_a|| / ||W_a||, cosine is <W_a, W_b> / (||W_a|| ||W_b||)",
        "null": "symmetry_change had noise on W_Q and W_K turned W_a by the same angle: mean -+ 2 standard deviations",
        "matched_by": matched_by,
    }
