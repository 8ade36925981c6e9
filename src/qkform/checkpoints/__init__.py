"""A source -> named tensors, read lazily, one tensor at a time, without torch."""

from qkform.checkpoints.base import Checkpoint, TensorInfo
from qkform.checkpoints.opening import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
