"""The state of every random generator that training may draw from, to be put back after something else drew."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """Python's, numpy's and torch's generators, of all CUDA devices too, as they are when this is made."""

    def __init__(self) -> None:
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002, the one that others draw from
        self._torch: Any = torch.get_rng_state()
        started = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda: Any = torch.cuda.get_rng_state_all() if started else []

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
