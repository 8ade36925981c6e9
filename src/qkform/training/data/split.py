"""Which tokens are held out: whole documents by the hash of their text, else the end of each; no seed decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

MOST = 1.5  # of the wanted share may be held out; a document that would exceed it is passed over
LEAST = 0.5  # of the wanted share; with less than this, documents are cut instead


@dataclass(frozen=True)
class Split:
    """Stretches of the stream of all tokens, in order."""

    by: Literal["document", "tail"]
    stops: npt.NDArray[np.int64]  # (n_stretches,) where each ends; it starts where the one before ends
    is_held_out: npt.NDArray[np.bool_]  # (n_stretches,)
    documents: int  # held out, whole


def split(lengths: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64], share: float) -> Split:
    """Hold out about `share` of the tokens.

    lengths, hashes   (n_documents,) tokens and text of each document; equal texts fall on the same side
    Documents are taken in the order of their hashes until the share is reached. Where that ends too far from it (few
    documents, or very uneven ones), the last `share` of every document is held out.
    """
    total = int(lengths.sum())
    stops = np.cumsum(lengths)
    if share == 0:
        return Split("document", np.array([total]), np.array([False]), 0)
    chosen, start, rest = np.argsort(hashes, kind="stable"), 0, share * total
    is_held_out = np.zeros(len(lengths), bool)
    held = 0
    kinds, firsts = np.unique(hashes[chosen], return_index=True)  # equal texts as one
    sums = np.add.reduceat(lengths[chosen], firsts) if len(kinds) else np.zeros(0, np.int64)
    for start, stop, tokens in zip(firsts, [*firsts[1:], len(chosen)], sums, strict=True):
        if held + tokens > MOST * rest:
            continue
        is_held_out[chosen[start:stop]] = True
        held += int(tokens)
        if held >= rest:
            break
    if held >= LEAST * rest:
        ends = np.flatnonzero(np.append(is_held_out[1:] != is_held_out[:-1], True))
        return Split("document", stops[ends], is_held_out[ends], int(is_held_out.sum()))
    cut = stops - np.floor(lengths * share).astype(np.int64)
    both = np.column_stack([cut, stops]).ravel()
    return Split("tail", both, np.tile([False, True], len(lengths)), 0)
