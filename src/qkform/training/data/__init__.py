"""Text to batches: a corpus, a tokenizer, tokens in a memory map, their order, and the batch of a step.

>>> from qkform.training import data, objectives
>>> corpus = data.corpus("sotu")                                  # doctest: +SKIP
>>> tokenizer = data.tokenizer("trained", corpus, vocab_size=512)   # doctest: +SKIP
>>> tokens = data.prepare(corpus, tokenizer, seq_len=64)          # doctest: +SKIP
>>> batches = data.Batches(tokens, objectives.objective("mlm", tokenizer), seed=0, batch=64)  # doctest: +SKIP
>>> batches.micro(step=0)["input_ids"].shape                      # doctest: +SKIP
torch.Size([64, 64])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkform.lazy import member

if TYPE_CHECKING:
    from qkform.training.data.batches import Batches as Batches
    from qkform.training.data.cache import prepare as prepare
    from qkform.training.data.documents import Corpus as Corpus
    from qkform.training.data.documents import Piece as Piece
    from qkform.training.data.documents import Skipped as Skipped
    from qkform.training.data.order import Order as Order
    from qkform.training.data.sources import corpus as corpus
    from qkform.training.data.tokens import Tokens as Tokens
    from qkform.training.data.vocabulary import special_ids as special_ids
    from qkform.training.data.vocabulary import tokenizer as tokenizer

_HOME: dict[str, str] = {  # public name -> module
    "Batches": "qkform.training.data.batches",
    "Corpus": "qkform.training.data.documents",
    "Order": "qkform.training.data.order",
    "Piece": "qkform.training.data.documents",
    "Skipped": "qkform.training.data.documents",
    "Tokens": "qkform.training.data.tokens",
    "corpus": "qkform.training.data.sources",
    "prepare": "qkform.training.data.cache",
    "special_ids": "qkform.training.data.vocabulary",
    "tokenizer": "qkform.training.data.vocabulary",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return member(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
