"""The batch of a step, ready for a model: rows by `Order`, masks by (seed, step, row), nothing carried over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from qkform.errors import DataError
from qkform.training.data.order import Order, permutation
from qkform.training.data.tokens import Tokens
from qkform.training.draws import HELD_OUT, TRAINING, draws

if TYPE_CHECKING:
    from qkform.training.objectives import Objective

Batch = dict[str, Any]
"""input_ids and labels, (rows, seq_len) int64 tensors. No attention_mask: sequences are full."""


class Batches:
    """What each step trains on, however it is split over processes and micro-batches; the fixed held-out batches."""

    def __init__(self, tokens: Tokens, objective: Objective, *, seed: int, batch: int) -> None:
        """`batch` is the number of sequences of one optimizer step, over all processes and micro-batches."""
        self.tokens = tokens
        self.objective = objective
        self.order = Order(len(tokens.train), batch, seed)

    def micro(
        self, step: int, rank: int = 0, world_size: int = 1, micro: int = 0, accumulation: int = 1
    ) -> Batch:
        """The rows of one process in one micro-batch of `step` (0, 1, ...)."""
        first, count = self.order.share(rank, world_size, micro, accumulation)
        ids = self.tokens.train[self.order.rows(step, first, count)].astype(np.int64)
        return self._tensors(ids, (TRAINING, self.order.seed, step), first)

    def stream(
        self, start_step: int, end_step: int, rank: int = 0, world_size: int = 1, accumulation: int = 1
    ) -> Iterator[Batch]:
        """The micro-batches of one process from `start_step` to before `end_step`, in order."""
        for step in range(start_step, end_step):
            for micro in range(accumulation):
                yield self.micro(step, rank, world_size, micro, accumulation)

    def held_out(
        self, batch: int = 64, limit: int | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """The held-out sequences, in a fixed order with fixed masks: no seed decides anything.

        The order is mixed, so that the first `limit` come from all of the held-out text. Batch i goes to process
        i % world_size; the last one may be smaller.
        """
        if batch < 1 or (limit is not None and limit < 1):
            raise DataError(f"batches of {batch}, at most {limit} sequences: both are at least 1")
        stop = self._held_out(limit)
        for first in range(rank * batch, stop, batch * world_size):
            rows = permutation(len(self.tokens.held_out), 0, 0)[first : min(first + batch, stop)]
            ids = self.tokens.held_out[rows].astype(np.int64)
            yield self._tensors(ids, (HELD_OUT, 0, 0), first)

    def held_out_rounds(self, batch: int, limit: int | None = None, world_size: int = 1) -> int:
        """How many batches of `held_out` the first process has; others have as many, or one less."""
        return -(-self._held_out(limit) // (batch * world_size))

    def _held_out(self, limit: int | None) -> int:
        """How many sequences."""
        return len(self.tokens.held_out) if limit is None else min(limit, len(self.tokens.held_out))

    def _tensors(self, ids: Any, key: tuple[int, int, int], first_row: int) -> Batch:
        import torch

        inputs, labels = self.objective.corrupted(ids, draws(key, first_row, *ids.shape))
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
