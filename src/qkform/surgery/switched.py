"""Which attentions of a model compute something else than their stock class does."""

from __future__ import annotations

from typing import Any

from qkform.surgery import huggingface, mha


def switched(module: Any) -> str | None:
    """The kind of attention that a module was switched to; None for any other module."""
    return mha.switched(module) or huggingface.switched(module)
