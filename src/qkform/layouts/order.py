"""How several projections lie in one stored tensor: a word for the order, and the rows that belong to each.

An order is what the model's own code splits, outputs first to last::

    q|k|v                   all query rows, then all key rows, then all value rows (GPT-2, Phi-3, Falcon-7B)
    heads x [q|k|v]         head after head, each with its q, k and v (GPT-NeoX, BLOOM)
    groups x [q|k|v]        key head after key head: the query heads that read it, then its k and v (Falcon-40B)
    4 x [q|v|k]             four blocks, each with a fourth of every projection (CodeGen)
    heads x [q|gate]        every query head followed by its output gate (Qwen3-Next)
    heads x [nope|rope]     every query head in two parts of different width (DeepSeek)
    latent|rope             a compressed key and, behind it, a key shared by all heads (DeepSeek)

`q` and `gate` have n_heads heads, `k` and `v` n_kv_heads, any other item one in every repetition; an item is
d_head wide unless `widths` says otherwise. A *part* is an order and one of its items: "heads x [q|k|v]: k".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from numpy.typing import NDArray

from qkform.errors import LayoutError

Array = NDArray[Any]
WHOLE = "whole"  # the part of a tensor that holds one projection and nothing else
_ORDER = re.compile(r"(?:(heads|groups|[1-9]\d{0,3}) x \[)?([a-z]+(?:\|[a-z]+)*)(\])?")


@dataclass(frozen=True)
class Sizes:
    """Heads of one attention, and the widths of items that are not d_head wide."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    widths: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Cut:
    """Rows of a tensor of (repeats * height) rows: `rows` of them from `start` in every repetition."""

    repeats: int
    height: int
    start: int
    rows: int

    @property
    def last(self) -> int:
        """How many rows of the tensor, from its first, hold all of the cut."""
        return (self.repeats - 1) * self.height + self.start + self.rows

    def of(self, weight: Array) -> Array:
        """(repeats, rows, inputs) of a tensor (outputs, inputs), a view."""
        rows = weight[: self.repeats * self.height] if self.repeats > 1 else weight
        if self.repeats > 1:
            return rows.reshape(self.repeats, self.height, -1)[:, self.start : self.start + self.rows]
        return rows[self.start : self.start + self.rows][None]


@cache
def parsed(order: str) -> tuple[str, tuple[str, ...]]:
    """(repetition, items) of an order: "", "heads", "groups" or a number in digits; LayoutError for nonsense."""
    found = _ORDER.fullmatch(order)
    if not found or bool(found[1]) != bool(found[3]):
        raise LayoutError(f"{order!r} is no order; for example: q|k|v, heads x [q|k|v], groups x [q|k|v]")
    return found[1] or "", tuple(found[2].split("|"))


def outputs(order: str, sizes: Sizes) -> int:
    """How many rows a tensor of this order has."""
    repeats, heights = _repetition(order, sizes)
    return repeats * sum(heights)


def cut(part: str, sizes: Sizes) -> Cut:
    """Where a part lies. LayoutError if the order has no such item, or its heads do not fill the repetitions."""
    order, _, item = part.rpartition(": ")
    items = parsed(order)[1]
    if item not in items:
        raise LayoutError(f"no {item!r} in the order {order!r}")
    repeats, heights = _repetition(order, sizes)
    at = items.index(item)
    return Cut(repeats, sum(heights), sum(heights[:at]), heights[at])


def _repetition(order: str, sizes: Sizes) -> tuple[int, list[int]]:
    """How often the order repeats, and the rows of each item in one repetition."""
    word, items = parsed(order)
    counts: Mapping[str, int] = {"": 1, "heads": sizes.n_heads, "groups": sizes.n_kv_heads}
    repeats = counts[word] if word in counts else int(word)
    widths = dict(sizes.widths)
    totals = {"q": sizes.n_heads, "gate": sizes.n_heads, "k": sizes.n_kv_heads, "v": sizes.n_kv_heads}
    heights = []
    for item in items:
        heads = totals.get(item, repeats)
        if heads % repeats:
            raise LayoutError(
                f"{heads} heads of {item!r} cannot be shared out over the {repeats} of {order!r}"
            )
        heights.append(heads // repeats * widths.get(item, sizes.d_head))
    return repeats, heights
