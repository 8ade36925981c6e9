"""A model and its tokenizer in a folder, under the stock names of `save_pretrained`, and back from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both; what surgery did is in config.json, and split weights are fused in the files."""
    with _silent():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load_weights_(model: Any, folder: Path) -> None:
    """Put the weights of a folder into a model of the same kind, whatever their names in its files."""
    from qkform import surgery

    with _silent():
        loaded = surgery.from_pretrained(type(model), folder)
    model.load_state_dict(loaded.state_dict())


@contextmanager
def _silent() -> Iterator[None]:
    """transformers draws no bars of its own meanwhile."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
