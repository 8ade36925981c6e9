"""Prepared tokens: two fixed parts in memory maps, what they were made of, and what a model must have to read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qkform.errors import DataError
from qkform.training.data.unigram import Unigram

PARTS = {  # of the key, as a person calls them
    "corpus": "the text",
    "tokenizer": "the tokenizer",
    "held_out": "the share of held-out text",
}


@dataclass(frozen=True, eq=False)
class Tokens:
    """Packed sequences of a corpus, in two parts that are fixed: what is trained on and what is held out."""

    folder: Path
    key: str
    seq_len: int
    manifest: Mapping[str, Any]

    @cached_property
    def train(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """(n_sequences, seq_len), read from the disk as it is touched."""
        return self._part("train")

    @cached_property
    def held_out(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """(held_out_sequences, seq_len)."""
        return self._part("held_out")

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    def unigram(self, objective: str = "mlm") -> Unigram:
        """What a model knows that knows only how frequent tokens are: the plateau of a run that learns nothing more.

        For mlm without the special tokens, which are never masked.
        """
        counts = np.load(self.folder / "counts.npy")
        if objective == "mlm":
            counts[:, list(self.manifest["specials"])] = 0
        return Unigram(counts[0], counts[1])

    @property
    def info(self) -> dict[str, Any]:
        """Sizes and provenance, as JSON; what is not defined is None."""
        unigram = self.unigram("clm")
        return {
            "key": self.key,
            "seq_len": self.seq_len,
            "n_sequences": len(self.train),
            "held_out_sequences": len(self.held_out),
            "unigram_entropy": _number(unigram.entropy),
            "held_out_unigram": _number(unigram.held_out),
            **{name: value for name, value in self.manifest.items() if name not in ("files", "specials")},
        }

    def check_vocabulary(self, vocab_size: int, model: str = "the model") -> None:
        """DataError when the tokenizer has ids for which the model has no embedding."""
        if self.vocab_size > vocab_size:
            raise DataError(
                f"the tokenizer {self.manifest['tokenizer']} has ids up to {self.vocab_size - 1} and {model} "
                f"has room for vocab_size={vocab_size}; give the model vocab_size={self.vocab_size} or more, "
                "or take its own tokenizer"
            )

    def check_same(self, info: Mapping[str, Any], since: str = "this run began") -> None:
        """DataError when these are not the tokens of `info`, naming what is different."""
        if info.get("key") == self.key and info.get("seq_len") == self.seq_len:
            return
        old, new = info.get("made_of"), self.manifest["made_of"]
        changed = [what for part, what in PARTS.items() if old and old.get(part) != new[part]]
        if info.get("seq_len") != self.seq_len:
            changed.append("the length of sequences")
        if not old and not changed:
            changed = ["the text, the tokenizer or the share of held-out text"]  # it was not kept which
        raise DataError(
            f"{self.manifest['corpus']}: {' and '.join(changed) or 'the way tokens are kept'} "
            f"{'have' if len(changed) > 1 else 'has'} changed since {since}; "
            "go on with the old text, tokenizer and settings, or begin a run of its own"
        )

    def _part(self, name: str) -> npt.NDArray[np.unsignedinteger[Any]]:
        count = int(self.manifest["n_tokens" if name == "train" else "held_out_tokens"]) // self.seq_len
        if count == 0:
            return np.zeros((0, self.seq_len), self.manifest["dtype"])
        shape = (count, self.seq_len)
        return np.memmap(self.folder / f"{name}.bin", self.manifest["dtype"], "r", shape=shape)

    def __reduce__(self) -> Any:
        return Tokens, (self.folder, self.key, self.seq_len, self.manifest)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
