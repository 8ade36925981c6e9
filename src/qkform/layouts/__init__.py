"""Which tensors are Q and K, and how they are stored: names and config in, an AttentionLayer each out."""

from qkform.layouts.find import Layout, Manual, find_layers
from qkform.layouts.geometry import Overrides
from qkform.layouts.layer import AttentionLayer

__all__ = ["AttentionLayer", "Layout", "Manual", "Overrides", "find_layers"]
