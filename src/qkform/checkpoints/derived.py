"""A checkpoint seen through others' names: tensors renamed, or computed from several that are stored.

Wrapper prefixes, quantised weights and adapters all end here, so that layouts never learn about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from qkform.checkpoints.base import Checkpoint, Coded, Need, TensorInfo
from qkform.errors import CheckpointError

Array = NDArray[Any]


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

    @property
    def bytes_read(self) -> int:
        return self.base.bytes_read

    def plan(self, needs: Sequence[Need]) -> None:
        """The same in the names of what is stored."""
        below: dict[Need, None] = {}
        for name, rows in needs:
            made = self._made.get(name)
            here = [(self._renamed.get(name, name), rows)] if made is None else made.needs(rows)
            below.update(dict.fromkeys(here))
        self.base.plan(list(below))

    def read(self, name: str, rows: int | None = None) -> Array:
        made = self._made.get(name)
        return self.base.read(self._renamed.get(name, name), rows) if made is None else made.read(rows)

    def stored(self, name: str, rows: int | None = None) -> Array:
        """Codes and scales as they are stored; what is computed, as it is read."""
        made = self._made.get(name)
        return codes(self.base, self._renamed.get(name, name), rows) if made is None else made.read(rows)


def codes(checkpoint: Checkpoint, name: str, rows: int | None = None) -> Array:
    """The tensor as it is stored, where the format offers that; as floats otherwise."""
    if hasattr(checkpoint, "stored"):
        return cast(Coded, checkpoint).stored(name, rows)
    return checkpoint.read(name, rows)
