"""Random numbers of a batch: row r of step s has the same ones whoever asks, and asks for whatever rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TRAINING, HELD_OUT = 0x6D61736B, 0x68656C64  # "mask", "held": streams that never meet
_WORDS = 4  # a Philox counter gives four 64-bit words


def draws(key: tuple[int, ...], first_row: int, rows: int, width: int) -> npt.NDArray[np.uint64]:
    """(rows, width) uniform 64-bit words: rows first_row, first_row + 1, ... of the endless table that `key` names.

    Philox counts (Salmon et al. 2011, doi 10.1145/2063384.2063405): any row is reached at once. Raw words, which numpy
    keeps the same from version to version.
    """
    counters = -(-width // _WORDS)
    state = np.random.SeedSequence(key).generate_state(2, np.uint64)
    philox = np.random.Philox(key=state)
    philox.advance(first_row * counters)
    return philox.random_raw(rows * counters * _WORDS).reshape(rows, -1)[:, :width]
