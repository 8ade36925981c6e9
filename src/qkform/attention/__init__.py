"""The changed scores of self-attention as functions on queries, keys and values.

`decoupled_attention` gives the score of a token with itself its own value; `exclusive_attention` and
`no_diagonal_attention` are its relatives; `attention_statistics` measures the rows. `reference` defines, in plain
torch, and the fast versions agree with it. Needs torch.
"""

from qkform.attention.decoupled import decoupled_attention
from qkform.attention.exclusive import exclusive_attention
from qkform.attention.no_diagonal import no_diagonal_attention
from qkform.attention.statistics import AttentionStatistics, attention_statistics

__all__ = [
    "AttentionStatistics",
    "attention_statistics",
    "decoupled_attention",
    "exclusive_attention",
    "no_diagonal_attention",
]
