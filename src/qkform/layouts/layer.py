"""One attention of a checkpoint: where its Q and K are stored, and how to take them out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from qkform.errors import LayoutError, QKFormError
from qkform.form import BilinearForm

if TYPE_CHECKING:
    from qkform.layouts.rotary import Positions
    from qkform.layouts.transform import QKNorms

Array = NDArray[Any]
Part = Literal["whole", "q|k|v: q", "q|k|v: k", "heads x [q|k|v]: q", "heads x [q|k|v]: k", "k|v: k"]


class Reader(Protocol):
    def __call__(self, name: str, rows: int | None = None) -> Array:
        """The tensor `name`, or its first `rows` rows."""


@dataclass(frozen=True)
class Stored:
    """A projection inside a stored tensor. `transposed` is (in, out), as Conv1D stores it, not (out, in)."""

    weight: str
    bias: str | None
    part: Part = "whole"
    transposed: bool = False
    bias_part: Part = "whole"


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
    attention: Literal["self", "cross"]
    mask: Literal["causal", "bidirectional", "unknown"]
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
    norm_bias: str | None = field(default=None, repr=False)  # tensor of the bias of that norm
    qk_norms: QKNorms | None = field(default=None, repr=False)
    positions: Positions | None = field(default=None, repr=False, compare=False)

    @cached_property
    def form(self) -> BilinearForm:
        """The query-key form of this layer, as stored: no norm gain, no rotary offset."""
        try:
            weight = self._stored(self.q)
            w_q, b_q = self._projection(self.q, self.n_heads, weight)
            weight = weight if self.k.weight == self.q.weight else self._stored(self.k)
            w_k, b_k = self._projection(self.k, self.n_kv_heads, weight)
            return BilinearForm(w_q, w_k, b_q=b_q, b_k=b_k)
        except QKFormError as error:
            raise type(error)(f"{self.module}: {error}") from None

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

    def needs(self) -> list[tuple[str, int | None]]:
        """(tensor, rows) of everything that `form` reads, in order; rows None: the whole tensor."""
        weights = dict.fromkeys((s.weight, self._rows(s)) for s in (self.q, self.k))
        biases = dict.fromkeys((s.bias, None) for s in (self.q, self.k) if s.bias is not None)
        return [*weights, *biases]

    def _rows(self, stored: Stored) -> int | None:
        """How many of its first rows are needed: those of V lie behind those of Q and K."""
        if stored.part.startswith("q|k|v") and not stored.transposed:
            return (self.n_heads + self.n_kv_heads) * self.d_head
        return None

    def _stored(self, stored: Stored) -> Array:
        return self.read(stored.weight, self._rows(stored))

    def _projection(self, stored: Stored, heads: int, weight: Array) -> tuple[Array, Array | None]:
        if stored.transposed:
            weight = weight.T  # (out, in)
        w = np.swapaxes(self._take(weight, stored, heads), 1, 2)  # (heads, d_model, d_head), a view
        if stored.bias is None:
            return w, None
        bias = self.read(stored.bias)
        taken = self._take(bias[:, None], replace(stored, part=stored.bias_part), heads)
        return w, taken[:, :, 0]

    def _take(self, weight: Array, stored: Stored, heads: int) -> Array:
        """(out, in) -> (heads, d_head, in), the heads of one projection."""
        d, width = self.d_head, heads * self.d_head
        q_width = self.n_heads * d
        match stored.part:
            case "whole" | "q|k|v: q" | "k|v: k":
                rows = weight[:width]
            case "q|k|v: k":
                rows = weight[q_width : q_width + width]
            case "heads x [q|k|v]: q" | "heads x [q|k|v]: k":
                which = 0 if stored.part.endswith("q") else 1
                return weight.reshape(heads, 3, d, -1)[:, which]
            case _:
                raise LayoutError(f"no rule to take {stored.part!r} out of {stored.weight!r}")
        return rows.reshape(heads, d, -1)
