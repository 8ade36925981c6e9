"""The changed scores of self-attention as functions on queries, keys and values.

`decoupled_attention` gives the score of a token with itself its own value. `reference` defines each function in plain
torch; the fast versions agree with it. Needs torch.
"""

from qkform.attention.decoupled import decoupled_attention

__all__ = ["decoupled_attention"]
