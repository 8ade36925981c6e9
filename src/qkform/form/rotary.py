"""Rotary position embeddings as mathematics: frequencies, and the turn that a relative distance puts into the form.

A rotary model turns the query at position i and the key at position j, pair of coordinates by pair, before it compares
them: q_i R(i), k_j R(j). Turns of one plane add up, so the score depends on the distance alone,

    s_ij = x_i W_Q R(i) R(j)^T W_K^T x_j^T = x_i W_Q R(n) W_K^T x_j^T,    n = i - j,

and the form at distance n is that of the turned factors W_Q R(n), W_K. Where a model multiplies its cosines and sines
by a factor a (yarn, longrope), both sides carry it: the turned coordinates weigh a^2. docs/math.md, rotary distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from array_api_compat import array_namespace, device

from qkform.errors import FormError
from qkform.form import arrays
from qkform.form.arrays import Array

Style = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """How one layer turns its queries and keys.

    style        "half": coordinate p turns with p + r/2 (LLaMA, GPT-NeoX); "interleaved": 2p with 2p + 1 (GPT-J)
    frequencies  radians per position of the r/2 pairs
    start        the first of the r coordinates that turn; those before and behind stay as they are
    factor       what the model multiplies its cosines and sines by
    """

    style: Style
    frequencies: tuple[float, ...]
    start: int = 0
    factor: float = 1.0

    @property
    def dims(self) -> int:
        """How many coordinates of a head turn."""
        return 2 * len(self.frequencies)

    def turned(self, w: Array, distance: int) -> Array:
        """w R(distance): (..., d, d_head) -> the same shape, in the working precision of `w` (at least float32).

        Turned queries w_q make the form of a query that stands `distance` positions after the key (i - j);
        a negative distance is a query before its key. Includes factor^2, the factor of both sides.
        """
        r, end = self.dims, self.start + self.dims
        if w.shape[-1] < end:
            raise FormError(f"{end} coordinates turn and a head has {w.shape[-1]}")
        xp = array_namespace(w)
        w = arrays.to(w, arrays.working_dtype(w))
        w = xp.matrix_transpose(w)  # (..., d_head, d): memory of a stored Linear runs along d
        angles = [math.remainder(distance * f, 2.0 * math.pi) for f in self.frequencies]
        scale = self.factor**2
        cos, sin = (
            xp.asarray([[scale * f(a)] for a in angles], dtype=w.dtype, device=device(w))
            for f in (math.cos, math.sin)
        )  # (r/2, 1) each
        if self.style == "half":
            a, b = w[..., self.start : self.start + r // 2, :], w[..., self.start + r // 2 : end, :]
        else:
            a, b = w[..., self.start : end : 2, :], w[..., self.start + 1 : end : 2, :]
        first, second = a * cos - b * sin, b * cos + a * sin
        if self.style == "half":
            both = xp.concat([first, second], axis=-2)
        else:
            both = xp.reshape(xp.stack([first, second], axis=-2), (*w.shape[:-2], r, w.shape[-1]))
        out = xp.concat([w[..., : self.start, :], both, w[..., end:, :]], axis=-2)
        return xp.matrix_transpose(out)


def plain(theta: float, dims: int) -> list[float]:
    """theta^(-2p/r) for p = 0 .. r/2 - 1: the frequencies of the original rotary embedding."""
    return [theta ** (-2.0 * p / dims) for p in range(dims // 2)]


def linear(frequencies: Sequence[float], factor: float) -> list[float]:
    """Positions divided by `factor`."""
    return [f / factor for f in frequencies]


def llama3(
    frequencies: Sequence[float], factor: float, low: float, high: float, original: float
) -> list[float]:
    """Long waves divided by `factor`, short ones kept, smooth in between (Llama 3.1).

    `low`, `high`: how many waves fit into the `original` context length at the two ends of the transition.
    """
    out = []
    for f in frequencies:
        waves = original * f / (2.0 * math.pi)
        if waves > high:
            out.append(f)
        elif waves < low:
            out.append(f / factor)
        else:
            smooth = (waves - low) / (high - low)
            out.append((1.0 - smooth) * f / factor + smooth * f)
    return out


def yarn(
    frequencies: Sequence[float],
    theta: float,
    factor: float,
    original: float,
    fast: float = 32.0,
    slow: float = 1.0,
    *,
    truncate: bool = True,
) -> list[float]:
    """A ramp over the pairs from kept to divided by `factor` (arXiv 2309.00071).

    `fast`, `slow`: turns within the `original` context length at which the ramp begins and ends; `truncate` rounds
    its ends outward to whole pairs.
    """
    pairs = len(frequencies)

    def pair_of(turns: float) -> float:
        return 2 * pairs * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    begin, end = pair_of(fast), pair_of(slow)
    if truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, 2 * pairs - 1)
    end += 0.001 if begin == end else 0.0
    ramp = [min(max((p - begin) / (end - begin), 0.0), 1.0) for p in range(pairs)]
    return [f / factor * r + f * (1.0 - r) for f, r in zip(frequencies, ramp, strict=True)]


def yarn_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor of cosines and sines that yarn takes where the config gives none."""

    def grown(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


def longrope_factor(factor: float, original: float) -> float:
    """The factor of cosines and sines that longrope takes where the config gives none (arXiv 2402.13753)."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
