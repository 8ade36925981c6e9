"""The probe: a batch that a run keeps, so that every tracked step is measured on the same tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkform.dynamics.chance import RandomState
from qkform.errors import DynamicsError, MissingExtra, RecordError
from qkform.records import write_whole
from qkform.runs import NAME

_LABELS = ("labels", "label", "label_ids", "next_sentence_label", "start_positions", "end_positions")
_PLAIN = (bool, int, float, str, type(None))


class Probe:
    """The keyword arguments of one call of the model, on the CPU: tensors, and plain values.

    DynamicsError for a batch that is no mapping, without a tensor, or with something else in it.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        if not isinstance(batch, Mapping):
            raise DynamicsError(
                f"probe is a {type(batch).__name__}; it is a mapping: the keyword arguments of one call of the model"
            )
        self.tensors = {k: v.detach().to("cpu", copy=True) for k, v in batch.items() if isinstance(v, Tensor)}
        self.plain = {k: v for k, v in batch.items() if k not in self.tensors}
        for name, value in self.plain.items():
            if not isinstance(value, _PLAIN):
                raise DynamicsError(
                    f"probe[{name!r}] is a {type(value).__name__}; a probe is kept for resuming, and holds tensors "
                    "and plain values"
                )
        if not any(t.ndim > 0 for t in self.tensors.values()):
            raise DynamicsError(
                f"probe has no tensor of tokens; it has {', '.join(map(repr, batch)) or 'nothing'}"
            )

    @property
    def has_labels(self) -> bool:
        return any(
            name in ("labels", "label", "start_positions", "next_sentence_label") for name in self.tensors
        )

    def batch(self, device: torch.device, *, labels: bool = True) -> dict[str, Any]:
        """As the model is called with it; without labels it computes no loss."""
        kept = {k: v.to(device) for k, v in self.tensors.items() if labels or k not in _LABELS}
        return {**kept, **self.plain}

    @property
    def sha256(self) -> str:
        """Of names, types, shapes and values."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found.update(json.dumps(self.plain, sort_keys=True).encode())
        return found.hexdigest()

    @property
    def about(self) -> dict[str, Any]:
        """{"sha256", "sequences", "tokens"}, for the record."""
        from qkform.dynamics.ledger import counted

        tokens = counted(self.tensors)
        first = next(t for t in self.tensors.values() if t.ndim > 0)
        return {
            "sha256": self.sha256,
            "sequences": len(first),
            "tokens": None if tokens is None else int(tokens),
        }

    def save(self, path: Path) -> None:
        """Write it as safetensors, whole or not at all."""
        safetensors = _safetensors()
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        data = safetensors.save(tensors, {"plain": json.dumps(self.plain)})
        write_whole(path, lambda to: to.write_bytes(data))

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Read what `save` wrote; RecordError where that cannot be."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                plain = json.loads((file.metadata() or {}).get("plain", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as error:
            raise RecordError(f"cannot read the probe {path}: {error}") from None
        return cls({**tensors, **plain})


def first_of(dataloader: Any, sequences: int) -> dict[str, Any]:
    """The first batch of a data loader, of so many sequences: from the data set, as the loader puts them together.

    The loader itself is left alone, since in a Trainer it counts who reads it. Collators that draw, as those of masked
    language models do, draw the same whenever this is called, and nobody else's random numbers change.
    """
    before = RandomState()
    try:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        dataset, collate = getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None)
        if dataset is None or collate is None:
            return dict(next(iter(dataloader)))
        whole = (
            getattr(dataloader, "batch_size", 1) is None
            and getattr(dataloader, "batch_sampler", None) is None
        )
        if hasattr(dataset, "__getitem__"):
            few = [dataset[i] for i in range(1 if whole else min(sequences, len(dataset)))]
        else:
            few = list(itertools.islice(iter(dataset), 1 if whole else sequences))
        return dict(collate(few[0] if whole else few))
    finally:
        before.put_back()


def place(record: Path) -> Path:
    """Where the probe of a record is kept: probe.safetensors beside record.jsonl."""
    name = "probe.safetensors" if record.name == NAME else f"{record.stem}.probe.safetensors"
    return record.with_name(name)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingExtra(
            "safetensors is not installed, and the probe is kept in its format: pip install 'qkform[train]'"
        ) from None
    return safetensors.torch
