"""Which sequences a step trains on: a pure function of (seed, step), the same set whatever the number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from qkform.errors import DataError

_STREAM = 0x6F72646572  # "order": keeps this use of a seed apart from others


@dataclass(frozen=True)
class Order:
    """Epochs one after another, each a permutation of all sequences by (seed, epoch), cut into batches.

    A batch may hold the end of one epoch and the beginning of the next, so that every sequence is used equally often.
    Nothing is carried from step to step; two permutations are remembered, four bytes a sequence each.
    """

    n_sequences: int
    batch: int  # sequences a step, over all processes and micro-batches
    seed: int

    def __post_init__(self) -> None:
        if self.n_sequences < 1 or self.batch < 1:
            raise DataError(
                f"an order of {self.n_sequences} sequences in batches of {self.batch}: both are at least 1"
            )
        if not 0 <= self.seed < 2**63:
            raise DataError(f"seed={self.seed}: a whole number from 0 is wanted")

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """(batch,) numbers of sequences, for step 0, 1, ..."""
        return self.rows(step, 0, self.batch)

    def rows(self, step: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """(count,): rows first .. first + count of the batch of `step`."""
        if step < 0 or not 0 <= first <= first + count <= self.batch:
            raise DataError(f"step {step}, rows {first} to {first + count}: not in batches of {self.batch}")
        at = step * self.batch + first
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            epoch, offset = divmod(at + done, self.n_sequences)
            part = permutation(self.n_sequences, self.seed, epoch)[offset : offset + count - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out

    def share(
        self, rank: int = 0, world_size: int = 1, micro: int = 0, accumulation: int = 1
    ) -> tuple[int, int]:
        """(first row, number of rows) of a process's micro-batch. The shares of a step are disjoint and cover it."""
        parts = world_size * accumulation
        if world_size < 1 or accumulation < 1 or not 0 <= rank < world_size or not 0 <= micro < accumulation:
            raise DataError(
                f"rank {rank} of {world_size}, micro-batch {micro} of {accumulation}: no such share"
            )
        if self.batch % parts:
            raise DataError(
                f"a batch of {self.batch} sequences is not divisible by {world_size} processes x "
                f"{accumulation} micro-batches; change one of them"
            )
        count = self.batch // parts
        return (micro * world_size + rank) * count, count


@lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> npt.NDArray[np.uint32] | npt.NDArray[np.int64]:
    """The order of `n` sequences in an epoch; not to be written to."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed, epoch])))
    found = generator.permutation(np.arange(n, dtype=np.uint32 if n < 2**32 else np.int64))
    found.flags.writeable = False
    return found
