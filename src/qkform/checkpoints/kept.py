"""Tensors that a plan says will be read again, held until then: nothing is fetched or computed twice in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from qkform.checkpoints.base import Array, Need

KEPT_BYTES = 2**29  # held at once: the projections of one layer of the largest models


class Kept:
    """What is read several times in a plan, from its first reading to its last.

    Whoever reads otherwise than planned gets the same tensors, and no more than `limit` bytes are ever held.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._left: Counter[Need] = Counter()  # readings to come of what is held in between
        self._held: dict[Need, Array] = {}  # the one that was asked for last is the last
        self._longest: dict[str, int | None] = {}  # rows: who asks for fewer is given them out of these

    def plan(self, needs: Sequence[Need], nbytes: Callable[[Need], int | None]) -> list[Need | None]:
        """What is to be read for each of `needs` in turn; None where it is held by then.

        `nbytes` says how large a tensor is, None for one that is not to be held. A later plan replaces this one.
        """
        self._held, self._longest = {}, {}
        for name, rows in needs:
            other = self._longest.get(name, rows)
            self._longest[name] = None if rows is None or other is None else max(rows, other)
        self._longest = {
            name: rows for name, rows in self._longest.items() if nbytes((name, rows)) is not None
        }
        needs = [(name, self._longest.get(name, rows)) for name, rows in needs]
        uses, seen, total = Counter(needs), Counter[Need](), 0
        sizes = {need: nbytes(need) for need, n in uses.items() if n > 1}
        self._left = Counter()
        below: list[Need | None] = []
        for need in needs:
            size = sizes.get(need)
            seen[need] += 1
            if need in self._left:
                if seen[need] == uses[need] and size is not None:
                    total -= size
                below.append(None)
                continue
            below.append(need)
            if size is not None and seen[need] == 1 and total + size <= self._limit:
                self._left[need] = uses[need]
                total += size
        return below

    def read(self, need: Need, fetch: Callable[[int | None], Array]) -> Array:
        """The tensor, or its first rows: held here, or brought by `fetch`, which is told how many rows to bring."""
        name, rows = need
        need = name, self._longest.get(name, rows)
        out = self._held.pop(need, None)
        if out is None:
            out = fetch(need[1])
        if need in self._left:
            self._left[need] -= 1
            if self._left[need] > 0:
                out.flags.writeable = False  # several readers have it
                self._held[need] = out
                while sum(array.nbytes for array in self._held.values()) > self._limit:
                    del self._held[next(iter(self._held))]
            else:
                del self._left[need]
        return out if need[1] == rows else out[:rows]
