"""Which tensors are Q and K, and how they are stored: names and config in, an AttentionLayer each out."""

from qkform.layouts.find import Layout, find_layers
from qkform.layouts.geometry import Overrides
from qkform.layouts.layer import AttentionLayer
from qkform.layouts.manual import Manual

__all__ = ["AttentionLayer", "Layout", "Manual", "Overrides", "find_layers"]
