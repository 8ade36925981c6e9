"""Quantised weights as the floats they stand for."""

from __future__ import annotations

from qkform.checkpoints.base import Checkpoint


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint
