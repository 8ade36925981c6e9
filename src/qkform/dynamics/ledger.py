"""What a run has used so far: tokens, wall seconds, and the seconds of them that went into tracking."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qkform.dynamics.processes import total
from qkform.errors import DynamicsError


class Ledger:
    """Tokens and seconds, carried over when a run is resumed.

    tokens          of all processes, up to the last `settle`; None where nothing said how many there were
    tracker_seconds of `own`
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        self.tracker_seconds = 0.0
        self._carried = 0.0  # seconds before this process
        self._begun: float | None = None
        self._waiting: list[
            int | Tensor
        ] = []  # tokens that nobody has asked for yet: tensors stay on their device
        self._last: tuple[int, float] | None = (
            None  # tokens and seconds of the last tracked step, in this process
        )

    def begin(self) -> None:
        """The clock runs from here."""
        if self._begun is None:
            self._begun = time.perf_counter()

    def add(self, tokens: int | Tensor) -> None:
        """Tokens of this process; a tensor is not read before `settle`."""
        self._waiting.append(tokens)

    def settle(self, device: torch.device) -> None:
        """Count what was added in all processes; each of them has to call this."""
        waiting, self._waiting = self._waiting, []
        mine = sum(int(tokens) for tokens in waiting)
        counted = total(float(bool(waiting)), device)
        if counted:
            self.tokens = (self.tokens or 0) + int(total(float(mine), device))

    @property
    def seconds(self) -> float:
        return self._carried + (0.0 if self._begun is None else time.perf_counter() - self._begun)

    @contextmanager
    def own(self) -> Iterator[None]:
        """What runs inside is the tracker's own time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.tracker_seconds += time.perf_counter() - start

    def line(self) -> dict[str, Any]:
        """The fields of a tracked step."""
        seconds = self.seconds
        rate = None
        if self._last is not None and self.tokens is not None and seconds > self._last[1]:
            rate = (self.tokens - self._last[0]) / (seconds - self._last[1])
        self._last = (self.tokens or 0, seconds)
        return {
            "seconds": seconds,
            "tracker_seconds": self.tracker_seconds,
            "tokens_per_second": rate,
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint; after `settle`."""
        return {"tokens": self.tokens, "seconds": self.seconds, "tracker_seconds": self.tracker_seconds}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, or from the line of a tracked step, which has the same fields."""
        try:
            tokens, seconds, own = state["tokens"], float(state["seconds"]), float(state["tracker_seconds"])
            self.tokens = None if tokens is None else int(tokens)
        except (KeyError, TypeError, ValueError) as error:
            raise DynamicsError(
                f"no state of a tracker: {error!r}; give what `state_dict()` returned when the checkpoint was made"
            ) from None
        self._carried, self.tracker_seconds = seconds, own
        self._waiting.clear()


def counted(batch: Mapping[str, Any]) -> int | Tensor | None:
    """The input tokens of a batch that are no padding: an int, or a tensor that is not read; None where it has none."""
    mask, tokens = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.sum() if mask.dtype != torch.bool else mask.count_nonzero()
    if isinstance(tokens, Tensor):
        return tokens.numel()
    embedded = batch.get("inputs_embeds")
    return embedded.shape[:-1].numel() if isinstance(embedded, Tensor) else None
