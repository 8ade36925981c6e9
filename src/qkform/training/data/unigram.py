"""The frequencies of tokens, and the loss of a model that knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Unigram:
    """Counts of each token, (vocabulary,), in the text that is trained on and in what is held out."""

    counts: npt.NDArray[np.int64]
    held_out_counts: npt.NDArray[np.int64]

    @property
    def entropy(self) -> float:
        """-sum p log p of the training tokens, in nats; NaN without any."""
        total = self.counts.sum()
        p = self.counts[self.counts > 0] / total if total else np.array([np.nan])
        return float(-(p * np.log(p)).sum())

    @property
    def held_out(self) -> float:
        """Nats a held-out token costs under the training frequencies; NaN without held-out text.

        With one added to the count of every token that occurs at all, so that a new token does not cost infinity.
        """
        occurs = (self.counts + self.held_out_counts) > 0
        seen, new = self.counts[occurs], self.held_out_counts[occurs]
        if not new.sum():
            return float("nan")
        p = (seen + 1) / (seen + 1).sum()
        return float(-(new * np.log(p)).sum() / new.sum())
