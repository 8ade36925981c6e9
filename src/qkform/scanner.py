"""A source -> its layers, or the table of their scores: open, find, read, score, one layer at a time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from qkform.checkpoints import Checkpoint, open_checkpoint
from qkform.checkpoints.adapter import AdapterFolder, is_adapter, open_adapter
from qkform.checkpoints.hub_names import hub_name
from qkform.errors import ConfigError, SourceError
from qkform.form.change import change_form
from qkform.layouts import AttentionLayer, Layout, Manual, Overrides, find_layers
from qkform.layouts.transform import Changed, changed, check, extra_needs
from qkform.options import Options
from qkform.records import ModelScores, Row, ScoreTable
from qkform.scoring import conventions, layer_rows

if TYPE_CHECKING:
    from qkform.sites import LiveModel

Source = Any  # str or os.PathLike: a file, a folder, a hub id, sample:NAME; anything else: a live model
Progress = Callable[[str, int, int], None]  # (source, layers done, layers in all)

_STEP = re.compile(r"(?:checkpoint|global_?step|step|iter(?:ation)?)[-_=]?(\d+)", re.IGNORECASE)


def layers(
    source: Source,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    q: str | None = None,
    k: str | None = None,
    transposed: bool = False,
    revision: str | None = None,
    token: str | None = None,
    download: bool = False,
) -> Iterator[AttentionLayer]:
    """The attention layers of a checkpoint or a model, in order; `layer.form` is read when it is first asked for.

    `source` is a file, a folder that holds a model, a hub id, sample:NAME, or a live torch module; the keywords are
    explained in `Options`. Let each layer go before the next to keep one layer in memory. Layers with
    `attention == "cross"` have no symmetry to speak of: their two sides read different sequences.

    >>> for layer in layers("./my-model"):             # doctest: +SKIP
    ...     print(layer.module, layer.form.symmetry(), layer.form.total().symmetry())
    """
    options = Options(
        heads, kv_heads, head_dim, q, k, transposed, revision=revision, token=token, download=download
    )
    return _released(opened(source, options)[1].layers)


def _released(found: Sequence[AttentionLayer]) -> Iterator[AttentionLayer]:
    """Fresh copies, so that a form read by the caller lives no longer than the caller keeps its layer."""
    return (replace(layer) for layer in found)


def scan(
    *sources: Source,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    q: str | None = None,
    k: str | None = None,
    transposed: bool = False,
    gamma: float = 2.0,
    signature: Literal["auto", "all", "none"] = "auto",
    revision: str | None = None,
    token: str | None = None,
    download: bool = False,
    fold_norm: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
    offset: int | Sequence[int] | None = None,
    progress: Progress | None = None,
) -> ScoreTable:
    """The scores of every layer and head of one or more checkpoints or models.

    A source is a file, a folder that holds a model, a hub id, sample:NAME, or a live torch module; the keywords are
    explained in `Options`; `progress` is called with (source, layers done, layers in all). Reads only Q and K, one
    layer at a time. Raises SourceError, ConfigError or LayoutError for a source that cannot be scanned; a head that
    has no scores (zero or NaN weights) is a row of nulls with the reason.

    >>> scan("./my-model").layers[0]["symmetry"]       # doctest: +SKIP
    0.405
    """
    options = Options(
        heads,
        kv_heads,
        head_dim,
        q,
        k,
        transposed,
        gamma,
        signature,
        revision,
        token,
        download,
        fold_norm,
        bias,
        qk_norm,
        tuple(offset) if isinstance(offset, Sequence) else offset,
    )
    if not sources:
        raise SourceError("no source; name a file, a folder, a hub id or sample:minilm")
    return ScoreTable([model for source in sources for model in _scanned(source, options, progress)])


def _scanned(source: Source, options: Options, progress: Progress | None) -> list[ModelScores]:
    """The scores of a source, once for each distance that was asked for; of an adapter: base, delta and merged."""
    begin = time.perf_counter()
    found = _open(source, options)
    if isinstance(found, Adapter):
        return _adapted(found, options, progress, begin)
    layout = _layout(found, options)
    every = _each_distance(options, layout)
    _plan(found, layout, every[0])
    rows: list[list[Row]] = [[] for _ in every]
    for layer in _counted(layout, found.source, progress):
        for at_distance, one in zip(rows, every, strict=True):  # the layer keeps what it has read
            at_distance += layer_rows(layer, one)
    return [
        _scores_of(found, layout, one, found.source, at_distance, begin)
        for one, at_distance in zip(every, rows, strict=True)
    ]


def _adapted(
    adapter: Adapter, options: Options, progress: Progress | None, begin: float
) -> list[ModelScores]:
    """A model without an adapter, what the adapter adds to every form, and the model with it."""
    name = adapter.merged.source
    layouts = [_layout(checkpoint, options) for checkpoint in (adapter.base, adapter.merged)]
    every = _each_distance(options, layouts[0])
    _plan(adapter.merged, layouts[1], every[0])
    names = [f"{name} (base: {adapter.base.source})", f"{name} (delta)", f"{name} (merged)"]
    rows: list[list[list[Row]]] = [[[] for _ in every] for _ in names]
    merged_layers = _released(layouts[1].layers)
    for before, after in zip(_counted(layouts[0], name, progress), merged_layers, strict=True):
        for i, one in enumerate(every):
            a, b = changed(before, one.changes), changed(after, one.changes)
            rows[0][i] += layer_rows(before, one, a)
            rows[1][i] += _delta_rows(before, one, a, b)
            rows[2][i] += layer_rows(after, one, b)
    return [
        _scores_of(
            checkpoint, layout, one, named, of_one, begin, adapter=adapter if k else None, delta=k == 1
        )
        for i, one in enumerate(every)
        for k, (checkpoint, layout, named, of_one) in enumerate(
            (
                (adapter.base, layouts[0], names[0], rows[0][i]),
                (adapter.merged, layouts[0], names[1], rows[1][i]),
                (adapter.merged, layouts[1], names[2], rows[2][i]),
            )
        )
    ]


def _delta_rows(layer: AttentionLayer, options: Options, a: Changed, b: Changed) -> list[Row]:
    """Rows of W_merged - W_base; where the adapter changes nothing, that is the reason."""
    forms = (change_form(a.form, b.form), change_form(a.unextended, b.unextended))
    rows = layer_rows(layer, options, Changed(*forms, a.flags))
    for row in rows:
        if row["norm"] == 0.0:
            row["reason"] = "the adapter does not change it"
    return rows


def _each_distance(options: Options, layout: Layout) -> list[Options]:
    """The options once for each distance, checked against the layers before a weight is read."""
    every = [replace(options, offset=offset) for offset in options.offsets]
    for one in every:
        check(layout.layers, one.changes)
    return every


def _plan(checkpoint: Checkpoint | LiveModel, layout: Layout, options: Options) -> None:
    needs = [(*layer.needs(), *extra_needs(layer, options.changes)) for layer in layout.layers]
    checkpoint.plan([need for of_layer in needs for need in of_layer])


def _counted(layout: Layout, name: str, progress: Progress | None) -> Iterator[AttentionLayer]:
    """The layers one after the other, telling `progress` how many are done."""
    for done, layer in enumerate(_released(layout.layers)):
        if progress is not None:
            progress(name, done, len(layout.layers))
        yield layer
    if progress is not None:
        progress(name, len(layout.layers), len(layout.layers))


def _scores_of(
    checkpoint: Checkpoint | LiveModel,
    layout: Layout,
    options: Options,
    source: str,
    rows: list[Row],
    begin: float,
    *,
    adapter: Adapter | None = None,
    delta: bool = False,
) -> ModelScores:
    live = checkpoint.format == "live"  # where it came from says nothing about how far it was trained since
    told = conventions(options)
    if delta:
        told |= {"form": "W_merged - W_base per head: what the adapter adds to the form. " + told["form"]}
    return ModelScores(
        source=source,
        format=checkpoint.format,
        model_type=layout.model_type,
        bytes_read=checkpoint.bytes_read,
        wall_seconds=time.perf_counter() - begin,
        conventions=told,
        skipped=list(layout.skipped),
        rows=rows,
        revision=checkpoint.revision if adapter is None else adapter.revision,
        step=None if live else step_of(checkpoint.source, options.revision),
        offset=options.distance,
    )


def opened(source: Source, options: Options) -> tuple[Checkpoint | LiveModel, Layout]:
    """A source as its checkpoint and the layers found in it; an adapter is the model with it. Only headers are read."""
    found = _open(source, options)
    checkpoint = found.merged if isinstance(found, Adapter) else found
    return checkpoint, _layout(checkpoint, options)


def step_of(source: str, revision: str | None = None) -> int | None:
    """The training step that a revision or a checkpoint's name tells: checkpoint-500, step1000, iter_20."""
    for name in (revision, Path(source).name, Path(source).parent.name):
        found = _STEP.findall(name or "")
        if found and len(found[-1]) < 16:
            return int(found[-1])
    return None


class Adapter(NamedTuple):
    """A model, and the same model with an adapter in its weights."""

    base: Checkpoint
    merged: Checkpoint
    revision: str | None  # of the adapter, where it is the hub's


def _open(source: Source, options: Options) -> Checkpoint | LiveModel | Adapter:
    if not isinstance(source, (str, os.PathLike)):
        from qkform.sites import open_live

        if options.revision is not None:
            raise SourceError(f"a {type(source).__name__} in memory has no revisions; leave out revision")
        return open_live(source)
    name = os.fspath(source)
    if not name:
        raise SourceError("the source is empty; name a file, a folder, a hub id or sample:minilm")
    hub = hub_name(name) if isinstance(source, str) else None
    if hub is not None and (hub.explicit or not os.path.lexists(name)):
        found = _from_hub(name, options.revision, options)
        return _adapter(found, name, options) if isinstance(found, AdapterFolder) else found
    if options.revision:
        raise ConfigError(f"{name[:200]!r} is no hub id, so it has no revision {options.revision[:80]!r}")
    if name.startswith("sample:"):
        from qkform import samples

        return open_checkpoint(samples.fetch(name.removeprefix("sample:")), source=name)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # no such user, or no home
        raise SourceError(f"cannot find {name[:200]!r}: {error}") from None
    if is_adapter(path):
        return _adapter(AdapterFolder(path, None), name, options)
    return open_checkpoint(path, source=name)


def _from_hub(name: str, revision: str | None, options: Options) -> Checkpoint | AdapterFolder:
    from qkform.checkpoints.hub import open_hub

    return open_hub(name, revision=revision, token=options.token, download=options.download, source=name)


def _adapter(folder: AdapterFolder, name: str, options: Options) -> Adapter:
    def base_from_hub(base: str, revision: str | None) -> Checkpoint:
        found = _from_hub(base, revision, options)
        if isinstance(found, AdapterFolder):
            raise SourceError(f"{name[:200]}: its base {base[:200]!r} is itself an adapter")
        return found

    base, merged = open_adapter(folder.path, name, open_hub=base_from_hub)
    return Adapter(base, merged, folder.revision)


def _layout(checkpoint: Checkpoint | LiveModel, options: Options) -> Layout:
    overrides = Overrides(options.heads, options.kv_heads, options.head_dim)
    manual = Manual(options.q, options.k, options.transposed)
    if checkpoint.format == "live":
        return cast("LiveModel", checkpoint).find(overrides, manual)
    return find_layers(
        checkpoint.tensors,
        checkpoint.config,
        checkpoint.read,
        source=checkpoint.source,
        config_name=str(checkpoint.config_path) if checkpoint.config_path else None,
        overrides=overrides,
        manual=manual,
    )
