"""What a tracker does at the events of transformers' Trainer."""

from __future__ import annotations

from typing import Any


class TrainerEvents:
    """The events, as `transformers.TrainerCallback` names them; those that are not here do nothing."""

    _in_trainer = False
    _started = False

    def _events_begin(self) -> None:
        self._in_trainer = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An event that means nothing here."""
