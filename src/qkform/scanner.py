"""A source -> its layers, or the table of their scores: open, find, read, score, one layer at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from qkform.checkpoints import Checkpoint, open_checkpoint
from qkform.checkpoints.adapter import AdapterFolder, Merged, is_adapter, open_adapter
from qkform.checkpoints.base import Need
from qkform.checkpoints.hub_names import HubName, hub_name
from qkform.errors import ConfigError, QKFormError, SourceError
from qkform.form.change import change_form
from qkform.layouts import AttentionLayer, Layout, Manual, Overrides, find_layers
from qkform.layouts.transform import Changed, changed, check, extra_needs
from qkform.options import Options
from qkform.records import ModelScores, Row, ScoreTable, SourceFault
from qkform.scoring import conventions, layer_rows
from qkform.steps import step_of

if TYPE_CHECKING:
    from qkform.sites import LiveModel

Source = Any  # str or os.PathLike: a file, a folder, a hub id, sample:NAME; anything else: a live model
Progress = Callable[[str, int, int], None]  # (source, layers done, layers in all)

OUT_OF_MEMORY = "out of memory: a tensor this large does not fit; is its shape right?"


@runtime_checkable
class InMemory(Protocol):
    """A model that finds its own layers; checkpoints of files are searched by `find_layers`."""

    source: str

    def find(self, overrides: Overrides, manual: Manual) -> Layout: ...


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

    `source` is a file, a folder that holds a model or an adapter, a hub id, sample:NAME, or a live torch module; the
    keywords are explained in `Options`. An adapter gives the layers of the merged model, its base with the adapter in
    it; `scan` scores base, delta and merged. Let each layer go before the next to keep one layer in memory. Layers with
    `attention == "cross"` have no symmetry to speak of: their two sides read different sequences.

    >>> for layer in layers("./my-model"):             # doctest: +SKIP
    ...     print(layer.module, layer.form.symmetry(), layer.form.total().symmetry())
    """
    options = Options(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q=q,
        k=k,
        transposed=transposed,
        revision=revision,
        token=token,
        download=download,
    )
    if len(options.revisions) > 1:
        raise ConfigError("layers reads one revision; call it once for each")
    found = opened(source, options)
    return _planned(found.checkpoint, found.layout)


def _planned(checkpoint: Checkpoint | LiveModel, layout: Layout) -> Iterator[AttentionLayer]:
    """Fresh copies of the layers. The first that is read plans for itself and those after it; to look reads nothing."""
    planned = False

    def read(first: int, name: str, rows: int | None = None) -> Any:
        nonlocal planned
        if not planned:
            planned = True
            _plan(checkpoint, layout.layers[first:], Options())
        return layout.layers[first].read(name, rows)

    return (replace(layer, read=partial(read, i)) for i, layer in enumerate(layout.layers))


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
    revision: str | Sequence[str] | None = None,
    token: str | None = None,
    download: bool = False,
    fold_norm: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
    offset: int | Sequence[int] | None = None,
    progress: Progress | None = None,
    on_error: Literal["raise", "record"] = "raise",
) -> ScoreTable:
    """The scores of every layer and head of one or more checkpoints or models.

    A source is a file, a folder that holds a model or an adapter (scored as base, delta and merged), a hub id,
    sample:NAME, or a live torch module; the keywords are explained in `Options`; `progress` is called with (source,
    layers done, layers in all). Reads only Q and K, one layer at a time. Raises SourceError, ConfigError or LayoutError
    for a source that cannot be scanned; with `on_error="record"` the others are scanned all the same, and `errors` of
    the table says why. A head that has no scores (zero or NaN weights) is a row of nulls with the reason. Live models
    of one name are told apart by a number: BertModel, BertModel (2).

    >>> scan("./my-model").layers[0]["symmetry"]       # doctest: +SKIP
    0.405
    """
    if on_error not in ("raise", "record"):
        raise ConfigError(f"on_error is {on_error!r}; it must be raise or record")
    options = Options(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q=q,
        k=k,
        transposed=transposed,
        gamma=gamma,
        signature=signature,
        revision=revision,
        token=token,
        download=download,
        fold_norm=fold_norm,
        bias=bias,
        qk_norm=qk_norm,
        offset=offset,
    )
    if not sources:
        raise SourceError("no source; name a file, a folder, a hub id or sample:minilm")
    models: list[ModelScores] = []
    errors: list[SourceFault] = []
    names: set[str] = set()  # of live models
    for source in sources:
        for one in options.revisions:
            try:
                models += _scanned(source, replace(options, revision=one), progress, names)
            except (QKFormError, MemoryError) as error:
                if on_error == "raise":
                    raise
                errors.append(fault(source, error, one if len(options.revisions) > 1 else None))
    return ScoreTable(models, errors)


def fault(source: Source, error: Exception, revision: str | None = None) -> SourceFault:
    """A source that cannot be scanned, as the record tells it; `revision` is named where it is one of several."""
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
    message = OUT_OF_MEMORY if isinstance(error, MemoryError) else str(error)
    if revision is not None and revision not in message:
        message = f"revision {revision[:80]}: {message}"
    return SourceFault(name, message if name[:200] in message else f"{name[:200]}: {message}")


class Cost(NamedTuple):
    """What a source took. Of several models from one source each byte and second is counted once, so that sums are
    right: the first model has the seconds, and every byte but those that an adapter adds.
    """

    bytes_read: int
    seconds: float


NOTHING = Cost(0, 0.0)


def _scanned(
    source: Source, options: Options, progress: Progress | None, names: set[str]
) -> list[ModelScores]:
    """The scores of a source, once for each distance that was asked for; of an adapter: base, delta and merged."""
    begin = time.perf_counter()
    found = _open(source, options)
    if isinstance(found, Adapter):
        return _adapted(found, options, progress, begin)
    if isinstance(found, InMemory):
        found.source = _another(found.source, names)
    layout = _layout(found, options)
    every = _each_distance(options, layout)
    _plan(found, layout.layers, every[0])
    rows: list[list[Row]] = [[] for _ in every]
    for layer in _counted(layout, found.source, progress):
        for at_distance, one in zip(rows, every, strict=True):  # the layer keeps what it has read
            at_distance += layer_rows(layer, one)
    cost = Cost(found.bytes_read, time.perf_counter() - begin)
    return [
        _scores_of(found, layout, one, found.source, at_distance, cost if one is every[0] else NOTHING)
        for one, at_distance in zip(every, rows, strict=True)
    ]


def _another(name: str, names: set[str]) -> str:
    """The name, with a number where `names` has it already; and put among them."""
    free, n = name, 1
    while free in names:
        n += 1
        free = f"{name} ({n})"
    names.add(free)
    return free


def _adapted(
    adapter: Adapter, options: Options, progress: Progress | None, begin: float
) -> list[ModelScores]:
    """A model without an adapter, what the adapter adds to every form, and the model with it."""
    name = adapter.merged.source
    layouts = [_layout(checkpoint, options) for checkpoint in (adapter.base, adapter.merged)]
    every = _each_distance(options, layouts[0])
    both = list(zip(*(layout.layers for layout in layouts), strict=True))
    adapter.merged.plan_with_base([(_needs(a, every[0]), _needs(b, every[0])) for a, b in both])
    names = [f"{name} (base: {adapter.base.source})", f"{name} (delta)", f"{name} (merged)"]
    rows: list[list[list[Row]]] = [[[] for _ in every] for _ in names]
    merged_layers = _released(layouts[1].layers)
    for before, after in zip(_counted(layouts[0], name, progress), merged_layers, strict=True):
        for i, one in enumerate(every):
            for of_model, found in zip(rows, _three(before, after, one), strict=True):
                of_model[i] += found
    seconds = time.perf_counter() - begin
    costs = (Cost(adapter.base.bytes_read, seconds), NOTHING, Cost(adapter.merged.bytes_of_adapter, 0.0))
    return [
        _scores_of(
            checkpoint,
            layout,
            one,
            names[k],
            rows[k][i],
            NOTHING if i else costs[k],
            adapter=adapter if k else None,
            delta=k == 1,
        )
        for i, one in enumerate(every)
        for k, (checkpoint, layout) in enumerate(
            ((adapter.base, layouts[0]), (adapter.merged, layouts[0]), (adapter.merged, layouts[1]))
        )
    ]


def _three(before: AttentionLayer, after: AttentionLayer, options: Options) -> tuple[list[Row], ...]:
    """The rows of a layer, of what an adapter adds to it, and with it. The changed forms live no longer than this."""
    a, b = changed(before, options.changes), changed(after, options.changes)
    delta = _delta_rows(
        before, options, a, b
    )  # first: it is the largest, and what scoring keeps is not there yet
    return layer_rows(before, options, a), delta, layer_rows(after, options, b)


def _delta_rows(layer: AttentionLayer, options: Options, a: Changed, b: Changed) -> list[Row]:
    """Rows of W_merged - W_base; where the adapter changes nothing, that is the reason."""
    form = change_form(a.form, b.form)
    same = a.form is a.unextended and b.form is b.unextended
    rows = layer_rows(
        layer, options, Changed(form, form if same else change_form(a.unextended, b.unextended), a.flags)
    )
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


def _plan(checkpoint: Checkpoint | LiveModel, found: Sequence[AttentionLayer], options: Options) -> None:
    checkpoint.plan([need for layer in found for need in _needs(layer, options)])


def _needs(layer: AttentionLayer, options: Options) -> list[Need]:
    own = [] if layer.self_score is None else [(layer.self_score, None)]
    return [*layer.needs(), *own, *extra_needs(layer, options.changes)]


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
    cost: Cost,
    *,
    adapter: Adapter | None = None,
    delta: bool = False,
) -> ModelScores:
    revision = checkpoint.revision if adapter is None else adapter.revision
    asked = options.single_revision if adapter is not None or source == checkpoint.source else None
    step = None  # of a live model: where it came from says nothing about how far it was trained since
    if not isinstance(checkpoint, InMemory):
        step = step_of(checkpoint.source, asked, hub=revision is not None)
    told = conventions(options)
    if delta:
        told |= {"form": "W_merged - W_base per head: what the adapter adds to the form. " + told["form"]}
    return ModelScores(
        source=source,
        format=checkpoint.format,
        model_type=layout.model_type,
        bytes_read=cost.bytes_read,
        wall_seconds=cost.seconds,
        conventions=told,
        skipped=list(layout.skipped),
        rows=rows,
        revision=revision,
        step=step,
        offset=options.distance,
        form=options.form,
    )


class Opened(NamedTuple):
    """A source with the layers found in it; an adapter is the model with it."""

    checkpoint: Checkpoint | LiveModel
    layout: Layout
    revision: str | None  # of the source itself, where it is the hub's


def opened(source: Source, options: Options) -> Opened:
    """A source as its checkpoint and the layers found in it. Only headers are read."""
    found = _open(source, options)
    checkpoint = found.merged if isinstance(found, Adapter) else found
    return Opened(checkpoint, _layout(checkpoint, options), found.revision)


class Adapter(NamedTuple):
    """A model, and the same model with an adapter in its weights."""

    base: Checkpoint
    merged: Merged
    revision: str | None  # of the adapter, where it is the hub's


def _open(source: Source, options: Options) -> Checkpoint | LiveModel | Adapter:
    if not isinstance(source, (str, os.PathLike)):
        from qkform.sites import open_live

        if options.single_revision is not None:
            raise SourceError(f"a {type(source).__name__} in memory has no revisions; leave out revision")
        return open_live(source)
    name = os.fspath(source)
    if not name:
        raise SourceError("the source is empty; name a file, a folder, a hub id or sample:minilm")
    hub = hub_name(name) if isinstance(source, str) else None
    if hub is not None and (hub.explicit or not os.path.lexists(name)):
        found = _from_hub_or_nowhere(name, hub, options)
        return _adapter(found, name, options) if isinstance(found, AdapterFolder) else found
    if options.single_revision is not None:
        raise ConfigError(
            f"{name[:200]!r} is no hub id, so it has no revision {options.single_revision[:80]!r}"
        )
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


def _from_hub_or_nowhere(name: str, hub: HubName, options: Options) -> Checkpoint | AdapterFolder:
    """A model of the hub; where a name that may be a path is none there either, the path comes first."""
    nowhere = f"there is no file or folder named {name[:200]!r}"
    try:
        return _from_hub(name, options.single_revision, options)
    except SourceError as error:
        text = str(error)
        if hub.explicit or not text.endswith(nowhere):  # the hub knows it
            raise
        text = text.removesuffix(nowhere).removesuffix("; and ")
        raise SourceError(f"{nowhere}, and as a hub id: {text}") from None


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
    if isinstance(checkpoint, InMemory):
        return checkpoint.find(overrides, manual)
    return find_layers(
        checkpoint.tensors,
        checkpoint.config,
        checkpoint.read,
        source=checkpoint.source,
        config_name=str(checkpoint.config_path) if checkpoint.config_path else None,
        overrides=overrides,
        manual=manual,
    )
