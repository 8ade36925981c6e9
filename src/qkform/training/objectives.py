"""The two objectives, masked tokens and true next tokens: what is hidden, what is asked, and one loss for both.

The loss is the sum over counted tokens divided by their number in the whole batch of a step, whatever it is split into.
(Trainer's own masked-LM path multiplies loss and gradient by accumulation and world size: transformers issue 47688.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from qkform.errors import DataError
from qkform.training.data.vocabulary import name_of, separator_id, size_of

IGNORED = -100  # transformers' and torch's label for "does not count"

Ids = npt.NDArray[np.int64]


class Objective(Protocol):
    """What a batch hides and asks."""

    @property
    def name(self) -> Literal["mlm", "clm"]: ...

    def corrupted(self, ids: Ids, draws: npt.NDArray[np.uint64]) -> tuple[Ids, Ids]:
        """(B, T) tokens and as many random words -> what the model sees, and labels, -100 where nothing is asked."""
        ...

    def loss(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        """Mean cross-entropy over the counted tokens of the whole batch, in nats, as Trainer's `compute_loss_func`.

        num_items_in_batch   counted labels of the whole batch of the step, over processes and micro-batches; None: of
                             these
        """
        ...


def objective(
    name: str,
    tokenizer: Any,
    *,
    mask_rate: float = 0.15,
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1),
) -> Objective:
    """The objective "mlm" or "clm" for the ids of `tokenizer`; DataError when it has no mask token for mlm."""
    specials = tuple(sorted(set(tokenizer.all_special_ids)))
    if name == "clm":
        pad = tokenizer.pad_token_id
        return NextToken(None if pad == separator_id(tokenizer) else pad)
    if name != "mlm":
        raise DataError(f"no objective named {name!r}; known: mlm, clm")
    if tokenizer.mask_token_id is None:
        raise DataError(
            f"the tokenizer {name_of(tokenizer)} has no mask token, which mlm needs; give it one with "
            "tokenizer.add_special_tokens({'mask_token': ...}), or train clm"
        )
    return MaskedTokens(tokenizer.mask_token_id, specials, size_of(tokenizer), mask_rate, shares)


@dataclass(frozen=True)
class MaskedTokens:
    """BERT's task (arXiv 1810.04805, section 3.1): each token is chosen with probability `mask_rate`, independently.

    Of the chosen, `shares` become [MASK], become a random token, stay. Special tokens are neither chosen nor put in.
    """

    mask_id: int
    specials: tuple[int, ...]
    vocab_size: int
    mask_rate: float = 0.15
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
    name: Literal["mlm"] = "mlm"

    def __post_init__(self) -> None:
        if not 0 < self.mask_rate <= 1:
            raise DataError(f"mask_rate={self.mask_rate}: a share above 0, at most 1")
        if len(self.shares) != 3 or min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise DataError(
                f"shares={self.shares}: three shares that add up to 1 (masked, random, unchanged); BERT has .8, .1, .1"
            )
        if len(set(self.specials)) >= self.vocab_size:
            raise DataError(
                f"a vocabulary of {self.vocab_size} with {len(self.specials)} special tokens has no other"
            )
        ordinary = np.setdiff1d(np.arange(self.vocab_size), self.specials)
        object.__setattr__(self, "_ordinary", ordinary)
        is_special = np.ones(self.vocab_size, bool)
        is_special[ordinary] = False
        object.__setattr__(self, "_is_special", is_special)

    def corrupted(self, ids: Ids, draws: npt.NDArray[np.uint64]) -> tuple[Ids, Ids]:
        ordinary: Ids = self._ordinary  # type: ignore[attr-defined]
        is_special: npt.NDArray[np.bool_] = self._is_special  # type: ignore[attr-defined]
        masked, random, _ = self.shares
        lot = (draws >> np.uint64(32)).astype(
            np.int64
        )  # decides what happens; the lower half is the random token
        chosen = (lot < _threshold(self.mask_rate)) & ~is_special[ids]
        labels = np.where(chosen, ids, IGNORED)
        inputs = np.where(chosen & (lot < _threshold(self.mask_rate * masked)), self.mask_id, ids)
        swapped = (
            chosen
            & (lot >= _threshold(self.mask_rate * masked))
            & (lot < _threshold(self.mask_rate * (masked + random)))
        )
        low = (draws[swapped] & np.uint64(2**32 - 1)).astype(np.int64)
        inputs[swapped] = ordinary[(low * len(ordinary)) >> 32]
        return inputs, labels

    def loss(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return _divided(*summed_loss(outputs, labels, shifted=False), num_items_in_batch)


@dataclass(frozen=True)
class NextToken:
    """Position i predicts token i + 1.

    Labels are the tokens themselves, as transformers has it: the shift is inside the loss. The first label is -100,
    which no shifted loss reads, so that the labels that count are those that are not -100, as for mlm.
    """

    pad_id: int | None = None
    name: Literal["clm"] = "clm"

    def corrupted(self, ids: Ids, draws: npt.NDArray[np.uint64]) -> tuple[Ids, Ids]:
        labels = ids.copy()
        labels[:, 0] = IGNORED
        if self.pad_id is not None:
            labels[ids == self.pad_id] = IGNORED
        return ids, labels

    def loss(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return _divided(*summed_loss(outputs, labels, shifted=True), num_items_in_batch)


def summed_loss(outputs: Any, labels: Any, *, shifted: bool) -> tuple[Any, Any]:
    """Cross-entropy summed over the counted labels, in float32, and their number; `shifted` for next tokens."""
    from torch.nn import functional

    logits = outputs["logits"] if hasattr(outputs, "keys") else outputs[0]  # (B, T, vocabulary)
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    labels = labels.to(logits.device).reshape(-1)
    total = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels, ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()


def _divided(total: Any, counted: Any, num_items_in_batch: Any) -> Any:
    count = counted if num_items_in_batch is None else num_items_in_batch
    if hasattr(count, "clamp"):
        return total / count.to(total.device).clamp(min=1)
    return total / max(count, 1)


def _threshold(probability: float) -> int:
    return round(probability * 2**32)
