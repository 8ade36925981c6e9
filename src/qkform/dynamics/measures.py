"""What a tracker measures: the forms of a live model's self-attentions, and how they attend to a fixed batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qkform.dynamics.calls import Call
from qkform.dynamics.capture import Watched, capture, observe
from qkform.dynamics.conflicts import Conflict, conflict
from qkform.errors import ConfigError, DynamicsError, LayoutError
from qkform.form import BilinearForm
from qkform.form.null import null_variance
from qkform.layouts.transform import Changed
from qkform.options import Options
from qkform.scoring import layer_rows
from qkform.sites import LiveModel, open_live

if TYPE_CHECKING:
    from qkform.layouts import AttentionLayer

_OPTIONS = Options(signature="none")
_OF_FORM = ("symmetry", "symmetry_z", "null_sd", "directionality", "norm")
_OF_ATTENTION = ("entropy", "normalised_entropy", "largest")
# What of a batch says which queries are padding, and by which value, where that is not 0.
_ENCODING = ("attention_mask", "src_key_padding_mask")
_DECODING = ("decoder_attention_mask", "labels")  # the decoder reads its labels, one place on
_CLOSED = {"src_key_padding_mask": 1, "labels": -100}


class Measures:
    """The self-attentions of a model, found once; `rows` measures them as they are now.

    Sharded models (FSDP2) are gathered layer by layer: every process has to call `rows`, with the same batch.
    DynamicsError for a model without self-attention, or whose attention is not understood.
    """

    def __init__(self, model: Any) -> None:
        self.live: LiveModel = open_live(model)
        try:
            layout = self.live.find()
        except (ConfigError, LayoutError) as error:
            raise DynamicsError(f"{self.live.source}: no self-attention to track: {error}") from None
        self.layers = [layer for layer in layout.layers if layer.attention == "self"]
        self.model_type = layout.model_type
        if not self.layers:
            raise DynamicsError(f"{self.live.source} has no self-attention: nothing to track")

    @property
    def is_encoder_decoder(self) -> bool:
        return bool((self.live.config or {}).get("is_encoder_decoder"))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        parameter = next(iter(self.live.root.parameters()), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def about(self) -> list[dict[str, Any]]:
        """What is measured, a description of each layer."""
        names = ("module", "layer", "part", "mask", "n_heads", "n_kv_heads", "d_model", "d_head")
        return [{name: getattr(layer, name) for name in names} for layer in self.layers]

    def rows(
        self, batch: Mapping[str, Any] | None = None, *, permutations: int | None = None
    ) -> list[dict[str, Any]]:
        """One row per layer: scores of its form, and with a batch how it attends; with permutations its conflict."""
        rows = [self._of_form(layer) for layer in self._read()]
        if batch is None:
            return rows
        root = self.live.root
        attention = {each.path: self._heads(each, batch) for each in observe(root, batch)}
        against = (
            {} if permutations is None else _of_conflict(conflict(root, batch, permutations=permutations))
        )
        for row in rows:
            heads = attention.get(row["module"], {})
            row["heads"] |= heads
            row |= {name: _mean(values) for name, values in heads.items()}
            row["conflict"] = against.get(row["module"])
        return rows

    def take_part(
        self, batch: Mapping[str, Any] | None = None, *, permutations: int | None = None
    ) -> list[dict[str, Any]]:
        """What other processes do while the first one asks for `rows` of a sharded model; they have none."""
        for _ in self._read():
            pass
        if batch is not None:
            observe(self.live.root, batch)
        if batch is not None and permutations is not None:
            capture(self.live.root, batch)
        return []

    def _read(self) -> Iterator[AttentionLayer]:
        """The layers with their weights, which live no longer than the caller keeps a layer."""
        for layer in self.layers:
            fresh = replace(layer)
            _ = fresh.form, fresh.v
            yield fresh

    def _of_form(self, layer: AttentionLayer) -> dict[str, Any]:
        form = _on_torch(layer.form)
        whole, *heads = (_scores(row) for row in layer_rows(layer, _OPTIONS, Changed(form, form, ())))
        unknown = dict.fromkeys(_OF_ATTENTION)
        row: dict[str, Any] = {"module": layer.module, "layer": layer.layer}
        row |= {name: whole[name] for name in _OF_FORM} | unknown
        row["heads"] = {name: [head[name] for head in heads] for name in _OF_FORM} | unknown
        if layer.self_score is not None:
            row["heads"]["self_norm"] = [head["self_norm"] for head in heads]
        row["conflict"] = None
        return row

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _heads(self, each: Watched, batch: Mapping[str, Any]) -> dict[str, list[float | None]]:
        """As `sharpness` defines them, without what is not recorded: tested against it."""
        sums, counts = [], []
        for call in each.calls:
            asking = _asking(call, batch, each.path, two=self.is_encoder_decoder)
            for some, rows, weights, open_ in call.weights():
                keys = open_.sum(-1)  # (b or 1, H or 1, R)
                if asking is not None:
                    keys = keys * asking[some, None, rows]
                logs = weights.clamp(
                    min=torch.finfo(weights.dtype).tiny
                ).log()  # special.entr is three times as slow
                entropy = -(weights * logs).sum(-1).double()  # (b, H, R)
                normalised = entropy / keys.clamp(min=2).double().log()
                sums.append(
                    _sums((entropy, keys > 0), (normalised, keys > 1), (weights.amax(-1).double(), keys > 0))
                )
                counts.append(_sums(*((keys.new_ones(entropy.shape), keys > least) for least in (0, 1, 0))))
        total, count = torch.stack(sums).sum(0).tolist(), torch.stack(counts).sum(0).tolist()
        return {
            name: [value / n if n else None for value, n in zip(total[i], count[i], strict=True)]
            for i, name in enumerate(_OF_ATTENTION)
        }


def _on_torch(form: BilinearForm) -> BilinearForm:
    """The form with weights that torch multiplies. numpy's threads would go on spinning for a while, and take a core
    from the steps of training that come next: a line of the record then costs twice as much. In float64, which neither
    autocast nor `torch.set_float32_matmul_precision` lowers.
    """
    return BilinearForm(*(torch.from_numpy(w.astype(np.float64)) for w in (form.w_q, form.w_k)))


def _scores(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row as a scan makes it, with the null's standard deviation beside z."""
    rank, d = row["effective_rank"], row["d_model"]
    sd = None if rank is None or row["symmetry_z"] is None else math.sqrt(null_variance(d, rank))
    return {**row, "null_sd": sd}


def _sums(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """(pairs, H) float64: of each pair the sum of its values (b, H, R) where its condition holds."""
    return torch.stack([torch.where(known, values, 0).sum((0, 2)).double() for values, known in pairs])


def _asking(call: Call, batch: Mapping[str, Any], path: str, *, two: bool) -> Tensor | None:
    """(B, N) bool, the queries that are no padding; None where the batch says nothing about it.

    two    whether the model is an encoder and a decoder, of which each has its own tokens
    """
    shape = (call.query.shape[0], call.query.shape[2])
    decoding = two and "decoder" in path.split(".")
    for name in _DECODING if decoding else _ENCODING:
        given = batch.get(name)
        if isinstance(given, Tensor) and tuple(given.shape) == shape:
            return (given != _CLOSED.get(name, 0)).to(call.query.device)
    return None


def _of_conflict(found: Sequence[Conflict]) -> dict[str, dict[str, list[Any]]]:
    return {
        each.module: {
            "cosine": each.cosine.tolist(),
            "null_mean": each.null_cosine.tolist(),
            "null_sd": each.null_spread.tolist(),
            "excess": each.excess.tolist(),
            "share": each.share.tolist(),
        }
        for each in found
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Of the heads; None where one is not known."""
    return None if None in values or not values else sum(values) / len(values)  # type: ignore[arg-type]
