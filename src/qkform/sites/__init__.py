"""The attention modules of a live model: for scanning it, and for whoever changes or watches its weights.

`open_live(model)` gives the model the face of a checkpoint, for `qkform.scan` and `qkform.layers`; `find(model)`
gives its `Site`s, each an attention module with the parameters that hold its Q and K, and ways to read and write them.
A model is a Hugging Face model, compiled or wrapped or inside another module; anything that holds
nn.MultiheadAttention; anything whose parameter names a family knows; or an object with W_Q and W_K per head.
"""

from qkform.sites.live import LiveModel, open_live
from qkform.sites.shares import Share
from qkform.sites.site import Site, Sites, find

__all__ = ["LiveModel", "Share", "Site", "Sites", "find", "open_live"]
