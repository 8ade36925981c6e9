"""A source -> its layers, or the table of their scores: open, find, read, score, one layer at a time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from qkform import __version__
from qkform.checkpoints import Checkpoint, open_checkpoint
from qkform.checkpoints.hub_names import hub_name
from qkform.errors import ConfigError, QKFormError, SourceError
from qkform.form import BilinearForm
from qkform.layouts import AttentionLayer, Layout, Manual, Overrides, find_layers
from qkform.layouts.transform import Changes, changed, check, extra_needs
from qkform.records import ModelScores, Row, ScoreTable

if TYPE_CHECKING:
    from qkform.sites import LiveModel

Source = Any  # str or os.PathLike: a file, a folder, a hub id, sample:NAME; anything else: a live model
Progress = Callable[[str, int, int], None]  # (source, layers done, layers in all)

SIGNATURE_SIZE = 2048  # a whole layer's signature takes about a second at this size, and grows with its cube
FARTHEST = 2**31  # positions: more than any model reads, and angles still have nine digits
AT_ONCE = 2**28  # bytes of widened weights that are scored together
_STEP = re.compile(r"(?:checkpoint|global_?step|step|iter(?:ation)?)[-_=]?(\d+)", re.IGNORECASE)
_SELF_ONLY = ("symmetry", "symmetry_z", "positive_directions", "negative_directions", "positive_energy")


@dataclass(frozen=True)
class Options:
    """What a scan may be told beyond the source.

    heads, kv_heads, head_dim   outrank the config
    q, k                        tensor names with {layer}, for a layout that is not known; transposed: stored (in, out)
    gamma                       standard deviations above the mean at which a row or column is an outlier
    signature                   "auto" counts directions of every head, and of a whole layer up to 2048 of them;
                                "all" of every layer, however long it takes; "none" of nothing
    revision, token             of a hub id: branch, tag or commit (default: the main branch), and an access token
    download                    of a hub id that has no safetensors: fetch whole files where ranges cannot do
    fold_norm                   multiply W_Q and W_K by the gain of the norm that feeds them, and add its bias to theirs
    bias                        score the extended form [x, 1] W [x, 1]^T, biases included
    qk_norm                     multiply by the gains of the norms on queries and keys
    offset                      rotary models: the form at this relative distance i - j, W_Q R(i - j) W_K^T; several
                                distances give one ModelScores each, and every layer is read once for all of them
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    q: str | None = None
    k: str | None = None
    transposed: bool = False
    gamma: float = 2.0
    signature: Literal["auto", "all", "none"] = "auto"
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    download: bool = False
    fold_norm: bool = False
    bias: bool = False
    qk_norm: bool = False
    offset: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not abs(self.gamma) <= 1e6:
            raise ConfigError(
                f"gamma is {self.gamma}; it must be a number of standard deviations, at most 1e6"
            )
        if self.signature not in ("auto", "all", "none"):
            raise ConfigError(f"signature is {self.signature!r}; it must be auto, all or none")
        for offset in self.offsets:
            sound = isinstance(offset, int) and not isinstance(offset, bool)
            if offset is not None and not (sound and abs(offset) <= FARTHEST):
                raise ConfigError(
                    f"offset is {offset!r:.60}; it must be a whole number of positions up to {FARTHEST}"
                )
        if len(set(self.offsets)) < len(self.offsets):
            raise ConfigError(f"offset names a distance twice: {', '.join(map(str, self.offsets))}")

    @property
    def offsets(self) -> tuple[int | None, ...]:
        """The distances, one for each ModelScores; (None,) where the form is taken as it is stored."""
        if isinstance(self.offset, tuple):
            return self.offset or (None,)
        return (self.offset,)

    @property
    def distance(self) -> int | None:
        """The distance of options that have one, or none."""
        (distance,) = self.offsets
        return distance

    @property
    def changes(self) -> Changes:
        """What is done to the form of every layer."""
        return Changes(self.fold_norm, self.bias, self.qk_norm, self.distance)


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
    """The scores of a source, once for each distance that was asked for."""
    begin = time.perf_counter()
    checkpoint, layout = opened(source, options)
    live = (
        checkpoint.format == "live"
    )  # where it came from says nothing about how far it has been trained since
    every = [replace(options, offset=offset) for offset in options.offsets]
    for one in every:
        check(layout.layers, one.changes)
    needs = [(*layer.needs(), *extra_needs(layer, every[0].changes)) for layer in layout.layers]
    checkpoint.plan([need for of_layer in needs for need in of_layer])
    rows: list[list[Row]] = [[] for _ in every]
    for done, layer in enumerate(_released(layout.layers)):
        if progress is not None:
            progress(checkpoint.source, done, len(layout.layers))
        for at_distance, one in zip(rows, every, strict=True):  # the layer keeps what it has read
            at_distance += layer_rows(layer, one)
    if progress is not None:
        progress(checkpoint.source, len(layout.layers), len(layout.layers))
    wall_seconds = time.perf_counter() - begin
    return [
        ModelScores(
            source=checkpoint.source,
            format=checkpoint.format,
            model_type=layout.model_type,
            bytes_read=checkpoint.bytes_read,
            wall_seconds=wall_seconds,
            conventions=conventions(one),
            skipped=list(layout.skipped),
            rows=at_distance,
            revision=checkpoint.revision,
            step=None if live else step_of(checkpoint.source, options.revision),
            offset=one.distance,
        )
        for one, at_distance in zip(every, rows, strict=True)
    ]


def opened(source: Source, options: Options) -> tuple[Checkpoint | LiveModel, Layout]:
    """A source as its checkpoint and the layers that were found in it; nothing but headers is read."""
    checkpoint = _open(source, options)
    return checkpoint, _layout(checkpoint, options)


def step_of(source: str, revision: str | None = None) -> int | None:
    """The training step that a revision or a checkpoint's name tells: checkpoint-500, step1000, iter_20."""
    for name in (revision, Path(source).name, Path(source).parent.name):
        found = _STEP.findall(name or "")
        if found and len(found[-1]) < 16:
            return int(found[-1])
    return None


def _open(source: Source, options: Options) -> Checkpoint | LiveModel:
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
        from qkform.checkpoints.hub import open_hub

        return open_hub(
            name, revision=options.revision, token=options.token, download=options.download, source=name
        )
    if options.revision:
        raise ConfigError(f"{name[:200]!r} is no hub id, so it has no revision {options.revision[:80]!r}")
    if name.startswith("sample:"):
        from qkform import samples

        return open_checkpoint(samples.fetch(name.removeprefix("sample:")), source=name)
    try:
        return open_checkpoint(Path(name).expanduser(), source=name)
    except RuntimeError as error:  # no such user, or no home
        raise SourceError(f"cannot find {name[:200]!r}: {error}") from None


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


def layer_rows(layer: AttentionLayer, options: Options) -> list[Row]:
    """The row of the whole layer, then one per head."""
    result = changed(layer, options.changes)
    form, base = result.form, result.unextended
    try:
        size = form.n_heads // form.n_kv_heads
        part = at_once(form)
        whole = base.total() if options.bias else None
        rows = _rows(layer, form.total(), options, result.flags, whole, first=None)
        unextended: Iterable[BilinearForm | None] = base.groups(part) if options.bias else repeat(None)
        for i, (heads, plain) in enumerate(zip(form.groups(part), unextended, strict=False)):
            rows += _rows(layer, heads, options, result.flags, plain, first=i * part * size)
        return rows
    except QKFormError as error:
        raise type(error)(f"{layer.module}: {error}") from None


def at_once(form: BilinearForm, itemsize: int = 4) -> int:
    """How many key heads, each with the query heads that read it, are scored together."""
    size = form.n_heads // form.n_kv_heads
    inputs = form.d_model * size + int(form.w_k.shape[1])
    return max(1, AT_ONCE // (itemsize * form.d_head * inputs))


def _rows(
    layer: AttentionLayer,
    form: BilinearForm,
    options: Options,
    flags: Sequence[str],
    unextended: BilinearForm | None,
    *,
    first: int | None,
) -> list[Row]:
    """One row per head of `form`, the first of which is head `first` of the layer; None: the layer as a whole.

    `unextended` is the form without the row of biases where `form` has one: the share of the biases is read from it.
    """
    scores, reason = _scores(layer, form, options)
    if unextended is not None:
        scores["bias_share"] = unextended.bias_share()
    defects = form.defects()
    no_outliers = form.no_outliers(options.gamma)
    rows = []
    for i in range(form.n_heads):
        row: Row = {
            "component": layer.component,
            "module": layer.module,
            "layer": layer.layer,
            "shared_by": list(layer.shared_by) if layer.shared_by else None,
            "head": None if first is None else first + i,
            "kv_head": None if first is None else layer.form.kv_head(first + i),
            "attention": layer.attention,
            "part": layer.part,
            "mask": layer.mask,
            "d_model": form.d_model,
            "d_head": layer.d_head,
        }
        row |= {name: _plain(values[i]) if values is not None else None for name, values in scores.items()}
        for name in ("positive_directions", "negative_directions"):
            row[name] = None if row[name] is None else int(row[name])
        row["flags"] = [*layer.flags, *flags, *(["no_outliers"] if no_outliers[i] else [])]
        row["reason"] = defects[i] or reason or _undefined(row)
        rows.append(row)
    return rows


def _scores(layer: AttentionLayer, form: BilinearForm, options: Options) -> tuple[dict[str, Any], str | None]:
    """Every score as an array, None where the whole layer has none, and the reason for that."""
    scores: dict[str, Any] = dict.fromkeys(_SELF_ONLY)
    reason = None
    if layer.attention == "cross":
        reason = "cross-attention: queries and keys come from different sequences, so W has no symmetry"
    else:
        scores["symmetry"], scores["symmetry_z"] = form.symmetry(), form.symmetry_z()
        size = min(form.d_model, 2 * form.d_head)
        if options.signature == "none":
            reason = "signature not asked for"
        elif options.signature == "auto" and size > SIGNATURE_SIZE:
            reason = f"signature of {size} directions is left out; --signature all computes it"
        else:
            for name, values in zip(_SELF_ONLY[2:], form.signature(), strict=True):
                scores[name] = values
    scores["directionality"] = form.directionality(options.gamma)
    scores["row_excess"] = form.row_excess(options.gamma)
    scores["column_excess"] = form.column_excess(options.gamma)
    for name in ("norm", "effective_rank", "bias_share"):
        scores[name] = getattr(form, name)()
    return scores, reason


def _plain(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _undefined(row: Row) -> str | None:
    """Why a score of a head with sound weights is null."""
    if row["norm"] is None or row["row_excess"] is None:
        return "W is beyond the range of float64"
    if row["bias_share"] is None:
        return "the biases hold NaN or infinity"
    if row["positive_energy"] is None:
        return "W is skew: its symmetric part has no directions"
    if row["symmetry_z"] is None:
        return "d_model is 1: random weights have the same symmetry"
    return None


def conventions(options: Options) -> dict[str, Any]:
    """What was assumed, for the record: formulas, signs, and what is in the form and what is not."""
    offset = options.distance
    form = "W = W_Q W_K^T per head, rows query side, columns key side; a layer is the sum over its heads"
    size = "d_model"
    if options.fold_norm:
        form += "; in coordinates of the normalised token x_hat, before the norm's own gain"
    if options.bias:
        form += "; extended by one input that is 1: d_model of a row is one more than the model's"
        size = "d_model (of the extended form)"
    return {
        "version": f"qkform {__version__}",
        "form": form,
        "symmetry": f"tr(W W) / ||W||_F^2 in [-1, 1]; random weights have mean 1/{size}",
        "symmetry_z": f"(symmetry - 1/{size}) / standard deviation of random weights with the same spectrum",
        "directionality": "(R - C) / (R + C) in [-1, 1]; negative: columns (key side) dominate",
        "excess": "R, C: sum of (norm - threshold) over row, column norms above mean + gamma * std (ddof 1)",
        "gamma": options.gamma,
        "signature": f"eigenvalues of (W + W^T)/2 above 1e-8 of the largest in size; {options.signature}",
        "biases": (
            "in the form, as one more row of W_Q and W_K; bias_share is what they add to ||W||^2"
            if options.bias
            else "not in the form; bias_share is 1 - ||W||^2 / ||W with biases||^2"
        ),
        "norm_gains": (
            "rows of W_Q and W_K times the gain of the norm in front, its bias added to theirs; layers flagged no_norm "
            "have none, and cross-attention folds the query side alone (flag norm_on_queries_only)"
            if options.fold_norm
            else "not in the form"
        ),
        "rotary": (
            "not in the form (relative distance 0)"
            if offset is None
            else f"W_Q R({offset}) W_K^T: a query {abs(offset)} positions "
            f"{'after' if offset >= 0 else 'before'} its key (i - j), with the model's factor on cosines and sines; "
            "layers flagged no_rope do not turn"
        ),
        "qk_norm": (
            "columns of W_Q and W_K times the gains of the norms on queries and keys, the mean taken away where "
            "they do; their division by each token's length is not in the form"
            if options.qk_norm
            else "not in the form; layers that have it are flagged qk_norm"
        ),
        "precision": "products in the weights' precision, at least float32; sums in float64",
    }
