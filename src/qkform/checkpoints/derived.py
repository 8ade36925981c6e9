"""A checkpoint seen through others' names: tensors renamed, or computed from several that are stored.

What is computed is held where a plan says that it is read again (the layers of latent attention share projections).

Wrapper prefixes, quantised weights and adapters all end here, so that layouts never learn about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from qkform.checkpoints.base import Array, Checkpoint, Coded, Need, TensorInfo
from qkform.checkpoints.kept import Kept
from qkform.errors import CheckpointError

SHARED_BYTES = 2**32  # a layer's Q and K, which whoever asked first holds anyway


@dataclass(frozen=True)
class Made:
    """One tensor that is not stored as it is asked for: its shape, what it reads, and how it is computed."""

    info: TensorInfo
    needs: Callable[[int | None], Sequence[Need]]
    read: Callable[[int | None], Array]


def refused(info: TensorInfo, message: str) -> Made:
    """A tensor that is listed, and says why it cannot be read when it is asked for."""

    def read(rows: int | None) -> Array:
        raise CheckpointError(message)

    return Made(info, lambda rows: [], read)


class _Names(Mapping[str, TensorInfo]):
    """The tensors of a derived checkpoint. A remote one reads a header when a tensor of it is looked at, not before."""

    def __init__(
        self,
        below: Mapping[str, TensorInfo],
        made: Mapping[str, Made],
        renamed: Mapping[str, str],
        hidden: AbstractSet[str],
    ) -> None:
        self._below, self._made, self._renamed, self._hidden = below, made, renamed, hidden
        kept = (name for name in below if name not in hidden)
        self._order = dict.fromkeys([*kept, *renamed, *made])

    def __getitem__(self, name: str) -> TensorInfo:
        if name in self._made:
            return self._made[name].info
        if name not in self._order:
            raise KeyError(name)
        return self._below[self._renamed.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, name: object) -> bool:
        return name in self._order


class Derived:
    """`base` without the tensors in `hidden`, with those in `made`, and `renamed`: new name -> the base's."""

    def __init__(
        self,
        base: Checkpoint,
        made: Mapping[str, Made],
        hidden: Iterable[str] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.base, self._made, self._renamed = base, made, renamed or {}
        self.source, self.format = base.source, base.format
        self.config: Mapping[str, Any] | None = base.config
        self.config_path: Path | None = base.config_path
        gone = {*hidden, *self._renamed.values()}
        self.tensors: Mapping[str, TensorInfo] = _Names(base.tensors, made, self._renamed, gone)
        self.revision: str | None = base.revision
        self._kept = Kept()

    @property
    def bytes_read(self) -> int:
        return self.base.bytes_read

    def plan(self, needs: Sequence[Need]) -> None:
        """The same in the names of what is stored, as often as it is read there."""
        self.base.plan(self._below(self._kept.plan(needs, self._nbytes)))

    def _below(self, needs: Iterable[Need | None]) -> list[Need]:
        below: list[Need] = []
        for need in needs:
            if need is None:
                continue
            name, rows = need
            made = self._made.get(name)
            below += [(self._renamed.get(name, name), rows)] if made is None else made.needs(rows)
        return below

    def _nbytes(self, need: Need) -> int | None:
        """How large a tensor is that is worth holding; None for one that the base hands out as it is."""
        name, rows = need
        if name not in self._made:
            return None
        shape = self._made[name].info.head(rows).shape
        return math.prod(shape) * (8 if self._made[name].info.dtype == "F64" else 4)

    def read(self, name: str, rows: int | None = None) -> Array:
        return self._kept.read((name, rows), partial(self._read, name))

    def _read(self, name: str, rows: int | None) -> Array:
        made = self._made.get(name)
        return self.base.read(self._renamed.get(name, name), rows) if made is None else made.read(rows)

    def stored(self, name: str, rows: int | None = None) -> Array:
        """Codes and scales as they are stored; what is computed, as it is read."""
        made = self._made.get(name)
        return codes(self.base, self._renamed.get(name, name), rows) if made is None else made.read(rows)


class Shared(Derived):
    """A checkpoint below two views of it: what one has read is held for the other, if both were planned."""

    def __init__(self, base: Checkpoint) -> None:
        super().__init__(base, {})
        self._kept = Kept(SHARED_BYTES)

    def _nbytes(self, need: Need) -> int | None:
        info = self.tensors.get(need[0])
        return None if info is None else info.head(need[1]).nbytes


def codes(checkpoint: Checkpoint, name: str, rows: int | None = None) -> Array:
    """The tensor as it is stored, where the format offers that; as floats otherwise."""
    if hasattr(checkpoint, "stored"):
        return cast(Coded, checkpoint).stored(name, rows)
    return checkpoint.read(name, rows)
