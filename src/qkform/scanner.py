"""A source -> its layers, or the table of their scores: open, find, read, score, one layer at a time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qkform import __version__
from qkform.checkpoints import Checkpoint, open_checkpoint
from qkform.checkpoints.hub_names import hub_name
from qkform.errors import ConfigError, QKFormError, SourceError
from qkform.form import BilinearForm
from qkform.layouts import AttentionLayer, Layout, Manual, Overrides, find_layers
from qkform.records import ModelScores, Row, ScoreTable

Source = str | os.PathLike[str]
Progress = Callable[[str, int, int], None]  # (source, layers done, layers in all)

SIGNATURE_SIZE = 2048  # a whole layer's signature takes about a second at this size, and grows with its cube
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
    offset                      rotary models: the form at this relative distance i - j, W_Q R(i - j) W_K^T
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
    offset: int | None = None

    def __post_init__(self) -> None:
        if not abs(self.gamma) <= 1e6:
            raise ConfigError(
                f"gamma is {self.gamma}; it must be a number of standard deviations, at most 1e6"
            )
        if self.signature not in ("auto", "all", "none"):
            raise ConfigError(f"signature is {self.signature!r}; it must be auto, all or none")


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
    return _released(_layout(_open(source, options), options).layers)


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
    offset: int | None = None,
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
        offset,
    )
    if not sources:
        raise SourceError("no source; name a file, a folder, a hub id or sample:minilm")
    return ScoreTable([_scanned(source, options, progress) for source in sources])


def _scanned(source: Source, options: Options, progress: Progress | None) -> ModelScores:
    begin = time.perf_counter()
    checkpoint = _open(source, options)
    layout = _layout(checkpoint, options)
    checkpoint.plan([need for layer in layout.layers for need in layer.needs()])
    rows: list[Row] = []
    for done, layer in enumerate(_released(layout.layers)):
        if progress is not None:
            progress(checkpoint.source, done, len(layout.layers))
        rows += layer_rows(layer, options)
    if progress is not None:
        progress(checkpoint.source, len(layout.layers), len(layout.layers))
    return ModelScores(
        source=checkpoint.source,
        format=checkpoint.format,
        model_type=layout.model_type,
        bytes_read=checkpoint.bytes_read,
        wall_seconds=time.perf_counter() - begin,
        conventions=conventions(options),
        skipped=list(layout.skipped),
        rows=rows,
        revision=checkpoint.revision,
        step=step_of(checkpoint.source, options.revision),
        offset=options.offset,
    )


def step_of(source: str, revision: str | None = None) -> int | None:
    """The training step that a revision or a checkpoint's name tells: checkpoint-500, step1000, iter_20."""
    for name in (revision, Path(source).name, Path(source).parent.name):
        found = _STEP.findall(name or "")
        if found and len(found[-1]) < 16:
            return int(found[-1])
    return None


def _open(source: Source, options: Options) -> Checkpoint:
    if not isinstance(source, (str, os.PathLike)):
        raise SourceError(
            f"a source is a path, a hub id or sample:NAME, not a {type(source).__name__}; for weights in memory use "
            "qkform.BilinearForm(w_q, w_k), or save the model and scan the folder"
        )
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


def _layout(checkpoint: Checkpoint, options: Options) -> Layout:
    return find_layers(
        checkpoint.tensors,
        checkpoint.config,
        checkpoint.read,
        source=checkpoint.source,
        config_name=str(checkpoint.config_path) if checkpoint.config_path else None,
        overrides=Overrides(options.heads, options.kv_heads, options.head_dim),
        manual=Manual(options.q, options.k, options.transposed),
    )


def layer_rows(layer: AttentionLayer, options: Options) -> list[Row]:
    """The row of the whole layer, then one per head."""
    form = layer.form
    try:
        return _rows(layer, form.total(), options, heads=False) + _rows(layer, form, options, heads=True)
    except QKFormError as error:
        raise type(error)(f"{layer.module}: {error}") from None


def _rows(layer: AttentionLayer, form: BilinearForm, options: Options, *, heads: bool) -> list[Row]:
    scores, reason = _scores(layer, form, options, heads=heads)
    defects = form.defects()
    no_outliers = form.no_outliers(options.gamma)
    rows = []
    for i in range(form.n_heads):
        row: Row = {
            "component": layer.component,
            "module": layer.module,
            "layer": layer.layer,
            "shared_by": list(layer.shared_by) if layer.shared_by else None,
            "head": i if heads else None,
            "kv_head": form.kv_head(i) if heads else None,
            "attention": layer.attention,
            "part": layer.part,
            "mask": layer.mask,
            "d_model": layer.d_model,
            "d_head": layer.d_head,
        }
        row |= {name: _plain(values[i]) if values is not None else None for name, values in scores.items()}
        for name in ("positive_directions", "negative_directions"):
            row[name] = None if row[name] is None else int(row[name])
        row["flags"] = [*layer.flags, *(["no_outliers"] if no_outliers[i] else [])]
        row["reason"] = defects[i] or reason or _undefined(row)
        rows.append(row)
    return rows


def _scores(
    layer: AttentionLayer, form: BilinearForm, options: Options, *, heads: bool
) -> tuple[dict[str, Any], str | None]:
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
    return {
        "version": f"qkform {__version__}",
        "form": "W = W_Q W_K^T per head, rows query side, columns key side; a layer is the sum over its heads",
        "symmetry": "tr(W W) / ||W||_F^2 in [-1, 1]; random weights have mean 1/d_model",
        "symmetry_z": "(symmetry - 1/d_model) / standard deviation of random weights with the same spectrum",
        "directionality": "(R - C) / (R + C) in [-1, 1]; negative: columns (key side) dominate",
        "excess": "R, C: sum of (norm - threshold) over row, column norms above mean + gamma * std (ddof 1)",
        "gamma": options.gamma,
        "signature": f"eigenvalues of (W + W^T)/2 above 1e-8 of the largest in size; {options.signature}",
        "biases": "not in the form; bias_share is 1 - ||W||^2 / ||W with biases||^2",
        "norm_gains": "not in the form",
        "rotary": "not in the form (relative distance 0)",
        "qk_norm": "not in the form; layers that have it are flagged qk_norm",
        "precision": "products in the weights' precision, at least float32; sums in float64",
    }
