"""A checkpoint seen through others' names: tensors renamed, or computed from several that are stored.

Wrapper prefixes, quantised weights and adapters all end here, so that layouts never learn about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    stored: Callable[[int | None], Array] | None = None  # its codes, where it has some


def refused(info: TensorInfo, message: str) -> Made:
    """A tensor that is listed, and says why it cannot be read when it is asked for."""

    def read(rows: int | None) -> Array:
        raise CheckpointError(message)

    return Made(info, lambda rows: [], read)


class Derived:
    """`base` without the tensors in `hidden`, and with those in `made`."""

    def __init__(self, base: Checkpoint, made: Mapping[str, Made], hidden: Iterable[str] = ()) -> None:
        self.base, self._made = base, made
        self.source, self.format = base.source, base.format
        self.config: Mapping[str, Any] | None = base.config
        self.config_path: Path | None = base.config_path
        gone = set(hidden)
        kept = {name: info for name, info in base.tensors.items() if name not in gone}
        self.tensors: Mapping[str, TensorInfo] = kept | {name: made[name].info for name in made}

    @property
    def bytes_read(self) -> int:
        return self.base.bytes_read

    @property
    def revision(self) -> str | None:
        return self.base.revision

    def plan(self, needs: Sequence[Need]) -> None:
        """The same in the names of what is stored."""
        below: dict[Need, None] = {}
        for name, rows in needs:
            made = self._made.get(name)
            below.update(dict.fromkeys([(name, rows)] if made is None else made.needs(rows)))
        self.base.plan(list(below))

    def read(self, name: str, rows: int | None = None) -> Array:
        made = self._made.get(name)
        return self.base.read(name, rows) if made is None else made.read(rows)

    def stored(self, name: str, rows: int | None = None) -> Array:
        """Codes and scales as they are stored; CheckpointError for a format that has none."""
        made = self._made.get(name)
        if made is None:
            return codes(self.base, name, rows)
        return made.read(rows) if made.stored is None else made.stored(rows)


def codes(checkpoint: Checkpoint, name: str, rows: int | None = None) -> Array:
    """The tensor as it is stored, where the format offers that; as floats otherwise."""
    if hasattr(checkpoint, "stored"):
        return cast(Coded, checkpoint).stored(name, rows)
    return checkpoint.read(name, rows)
