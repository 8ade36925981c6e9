"""One attention of a checkpoint: where its Q and K are stored, and how to take them out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qkform.errors import QKFormError, prefixed
from qkform.form import BilinearForm
from qkform.layouts.order import WHOLE, Sizes, cut
from qkform.layouts.rules import Kind, Mask

if TYPE_CHECKING:
    from qkform.layouts.rotary import Positions
    from qkform.layouts.transform import QKNorms

Array = NDArray[Any]


class Reader(Protocol):
    def __call__(self, name: str, rows: int | None = None) -> Array:
        """The tensor `name`, or its first `rows` rows."""


@dataclass(frozen=True)
class Stored:
    """A projection inside a stored tensor. `transposed` is (in, out), as Conv1D stores it, not (out, in).

    `part` says which rows of the tensor: "whole", or an order and an item of it (see `order`), whose `widths` are
    given where they are not d_head. A projection through a latent has the `inner` projection that makes its inputs:
    its weight is the product. `tail` is a projection that one key head shares with all: it is put behind every head.
    """

    weight: str
    bias: str | None
    part: str = WHOLE
    transposed: bool = False
    bias_part: str = WHOLE
    widths: tuple[tuple[str, int], ...] = ()
    inner: Stored | None = None
    tail: Stored | None = None

    @property
    def order(self) -> str:
        """The order in which the tensor holds several projections, "" where it holds one."""
        return self.part.rpartition(": ")[0]

    def all(self) -> Iterator[Stored]:
        """This projection and those it is made with."""
        yield self
        for other in (self.inner, self.tail):
            if other is not None:
                yield from other.all()


@dataclass(frozen=True)
class AttentionLayer:
    """One attention of a model, with its query-key form.

    `form` reads the two projections when it is first asked for: (n_heads, d_model, d_head) and
    (n_kv_heads, d_model, d_head), biases included. Nothing after this object asks which family it was.
    """

    component: str
    module: str
    layer: int
    shared_by: tuple[int, ...] | None
    attention: Kind
    mask: Mask
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    flags: tuple[str, ...]
    norm: str | None  # tensor path of the norm whose output the projections read; None if there is none
    # "layer", "rms", "rms, gain 1 + weight", "post" (the input is also the residual), "none" (the same, in a
    # layer of a pre-norm model that has no norm of its own) or "unknown"
    norm_kind: str
    q: Stored = field(repr=False)
    k: Stored = field(repr=False)
    read: Reader = field(repr=False, compare=False)
    part: str | None = None  # one term of a score that has several ("nope", "rope"); None: the whole score
    norm_bias: str | None = field(default=None, repr=False, compare=False)  # tensor of the bias of that norm
    qk_norms: QKNorms | None = field(default=None, repr=False, compare=False)
    positions: Positions | None = field(default=None, repr=False, compare=False)
    self_score: str | None = (
        None  # tensor of v where a token's score with itself is x diag(v) x^T; None: it is W's
    )

    @cached_property
    def form(self) -> BilinearForm:
        """The query-key form of this layer, as stored: no norm gain, no rotary offset."""
        try:
            held: dict[tuple[str, int | None], Array] = {}  # a fused tensor is read once
            w_q, b_q = self._projection(self.q, self.n_heads, held)
            both = {stored.weight for stored in self.k.all()}
            held = {need: array for need, array in held.items() if need[0] in both}  # the rest may go
            w_k, b_k = self._projection(self.k, self.n_kv_heads, held)
            return BilinearForm(w_q, w_k, b_q=b_q, b_k=b_k)
        except QKFormError as error:
            raise prefixed(error, self.module) from None

    def form_with(
        self,
        *,
        fold_norm: bool = False,
        bias: bool = False,
        qk_norm: bool = False,
        offset: int | None = None,
    ) -> BilinearForm:
        """The form changed by options, as `qkform.scan` takes them; without any it is `form`.

        LayoutError where the layer does not admit one: a post-norm block has no gain to fold. docs/math.md#options.
        """
        from qkform.layouts.transform import Changes, changed

        return changed(self, Changes(fold_norm, bias, qk_norm, offset)).form

    @cached_property
    def v(self) -> Array | None:
        """The features' weights in a token's score with itself, (n_heads, d_model); None where that score is W's."""
        return None if self.self_score is None else self.read(self.self_score)

    def needs(self) -> list[tuple[str, int | None]]:
        """(tensor, rows) of everything that `form` reads, in order; rows None: the whole tensor."""
        stored = [s for side in (self.q, self.k) for s in side.all()]
        weights = dict.fromkeys((s.weight, self._rows(s)) for s in stored)
        biases = dict.fromkeys((s.bias, None) for s in stored if s.bias is not None)
        return [*weights, *biases]

    def _sizes(self, stored: Stored) -> Sizes:
        return Sizes(self.n_heads, self.n_kv_heads, self.d_head, stored.widths)

    def _rows(self, stored: Stored) -> int | None:
        """How many of its first rows are needed: those of V lie behind those of Q and K.

        One number for a tensor that holds both, so that it is read once.
        """
        both = {s for side in (self.q, self.k) for s in side.all() if s.weight == stored.weight}
        if stored.part == WHOLE or any(s.transposed or s.part == WHOLE for s in both):
            return None
        cuts = [cut(s.part, self._sizes(s)) for s in both]
        return None if any(c.repeats > 1 for c in cuts) else max(c.last for c in cuts)

    def _projection(
        self, stored: Stored, heads: int, held: dict[tuple[str, int | None], Array]
    ) -> tuple[Array, Array | None]:
        """(heads, inputs, d) and (heads, d) or None: one side of the form, taken out of the file."""
        need = (stored.weight, self._rows(stored))
        if need not in held:
            held[need] = self.read(*need)
        weight = held[need].T if stored.transposed else held[need]  # (out, in)
        w = np.swapaxes(self._take(weight, stored, heads), 1, 2)  # (heads, in, d), a view
        b = None
        if stored.bias is not None:
            bias = self.read(stored.bias)
            b = self._take(bias[:, None], replace(stored, part=stored.bias_part), heads)[:, :, 0]
        return self._composed(stored, w, b, held) if stored.inner or stored.tail else (w, b)

    def _composed(
        self, stored: Stored, w: Array, b: Array | None, held: dict[tuple[str, int | None], Array]
    ) -> tuple[Array, Array | None]:
        """A projection of a latent as one of what the latent is made of, and a tail behind every head.

        Head by head into the array that is returned: it is far larger than the factors (0.7 GB a side in
        DeepSeek-V3), and nothing of its size lives beside it.
        """
        heads, _, d = w.shape
        inner = self._projection(stored.inner, 1, held) if stored.inner else None
        tail = self._projection(stored.tail, 1, held) if stored.tail else None
        first = None if inner is None else _product_type(inner[0][0])  # (inputs, rank)
        last = None if tail is None else _product_type(tail[0][0])  # (inputs, d of the tail)
        dtype = np.result_type(*(x.dtype for x in (first, _product_type(w[:0]), last) if x is not None))
        inputs = w.shape[1] if first is None else first.shape[0]
        out = np.empty((heads, inputs, d + (0 if last is None else last.shape[1])), dtype)
        for head in range(heads):
            own = _product_type(w[head])  # (rank, d), or (inputs, d)
            if first is None:
                out[head, :, :d] = own
            else:
                np.matmul(first, own, out=out[head, :, :d])
        if inner is not None and inner[1] is not None:
            added = np.einsum("r,hrd->hd", _product_type(inner[1][0]), _product_type(w))
            b = added if b is None else added + b
        if last is not None:
            out[:, :, d:] = last
        if tail is not None and (b is not None or tail[1] is not None):
            halves = ((b, d), (tail[1], out.shape[2] - d))
            b = np.concatenate(
                [np.zeros((heads, n)) if x is None else np.broadcast_to(x, (heads, n)) for x, n in halves], 1
            )
        return out, b

    def _take(self, weight: Array, stored: Stored, heads: int) -> Array:
        """(out, in) -> (heads, rows of a head, in), the heads of one projection; a view where rows allow it.

        The truth test puts a wrong order in here: `stored.part` names the order and the side.
        """
        rows = weight if stored.part == WHOLE else cut(stored.part, self._sizes(stored)).of(weight)
        return rows.reshape(heads, -1, weight.shape[1])


def _product_type(x: Array) -> Array:
    """float16 and bfloat16 as float32: their products would lose what the weights hold."""
    return x if x.dtype.kind == "f" and x.dtype.itemsize >= 4 else x.astype(np.float32)
