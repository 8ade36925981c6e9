"""Where in the parameters of a live model the Q and K of an attention lie: which rows of which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkform.errors import LayoutError
from qkform.layouts import AttentionLayer
from qkform.sites.live import LiveModel
from qkform.sites.parameters import Parameter

if TYPE_CHECKING:
    import torch

Side = Literal["w_q", "w_k", "b_q", "b_k"]
SIDES: tuple[Side, ...] = ("w_q", "w_k", "b_q", "b_k")


@dataclass(frozen=True, eq=False)
class Share:
    """What one side has of one parameter: `rows` along `dim`, (heads, d_head) numbers; None: all of it, per head."""

    side: Side
    name: str  # of the parameter in the model, wrappers left out
    rows: NDArray[np.int64] | None
    dim: int  # 0: stored (outputs, inputs); 1: stored (inputs, outputs), as Conv1D does
    at: Parameter

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter itself; the tensor it makes, where it is parametrized.

        SourceError where the model has another module, or one of another shape, in its place by now.
        """
        value: torch.Tensor = self.at.value
        if tuple(value.shape) != self.at.shape:
            self.at.refuse()
        return value

    @property
    def span(self) -> slice | None:
        """The rows as one slice, where they follow each other; None where they do not, or where all are meant."""
        if self.rows is None:
            return None
        flat = self.rows.reshape(-1)
        first = int(flat[0])
        return slice(first, first + flat.size) if (np.diff(flat) == 1).all() else None

    def taken(self) -> torch.Tensor:
        """(heads, d_model, d_head), or (heads, d_head) for a bias: a view where the rows allow one."""
        value = self.parameter
        if self.rows is None:
            return value
        heads, width = self.rows.shape
        if value.ndim == 2 and self.dim == 1:
            value = value.T  # (out, in)
        span = self.span
        rows = value[span] if span is not None else value[self._index(value)]
        if rows.ndim == 1:
            return rows.reshape(heads, width)
        return rows.reshape(heads, width, -1).transpose(1, 2)

    def put(self, values: torch.Tensor) -> None:
        """Write (heads, d_model, d_head) or (heads, d_head) in place; other rows are not touched."""
        value = self.parameter
        if self.rows is None:
            value.copy_(values)
        elif value.ndim == 1:
            value.index_copy_(0, self._index(value), values.reshape(-1))
        else:
            rows = values.transpose(1, 2).reshape(self.rows.size, -1)  # (out, in)
            value.index_copy_(self.dim, self._index(value), rows if self.dim == 0 else rows.T)

    def _index(self, value: torch.Tensor) -> torch.Tensor:
        import torch

        assert self.rows is not None
        return torch.from_numpy(np.ascontiguousarray(self.rows.reshape(-1))).to(value.device)


def shares(live: LiveModel, layer: AttentionLayer) -> dict[Side, Share]:
    """Where the sides of a layer lie: it is read once more, with row numbers in place of weights."""
    if live.tensors[layer.q.weight].per_head:
        names: dict[Side, str | None] = {
            "w_q": layer.q.weight,
            "w_k": layer.k.weight,
            "b_q": layer.q.bias,
            "b_k": layer.k.bias,
        }
        return {s: Share(s, n, None, 0, live.parameters[n]) for s, n in names.items() if n is not None}
    numbers = _RowNumbers(live, layer)
    try:
        form = replace(layer, read=numbers.read).form
    except ValueError:  # row numbers of two matrices do not multiply
        raise LayoutError("no single parameter holds Q and K: one of them is a product of matrices") from None
    found: dict[Side, NDArray[Any] | None] = {
        "w_q": form.w_q[:, 0, :],
        "w_k": form.w_k[:, 0, :],
        "b_q": form.b_q,
        "b_k": form.b_k,
    }
    return {side: numbers.share(side, rows) for side, rows in found.items() if rows is not None}


class _RowNumbers:
    """A reader that hands out, for every row of a tensor, a number that says which row of which parameter it is."""

    def __init__(self, live: LiveModel, layer: AttentionLayer) -> None:
        self.live = live
        self.transposed = {s.weight: s.transposed for s in (layer.q, layer.k)}
        self.starts: dict[tuple[str, int], int] = {}  # (parameter, dim) -> number of its first row
        self.end = 1  # 0 is no row

    def read(self, name: str, rows: int | None = None) -> NDArray[np.float64]:
        tensor = self.live.tensors[name]
        dim = 1 if self.transposed.get(name, False) else 0
        parts = []
        for parameter in tensor.origin.parameters:
            height = self.live.parameters[parameter].shape[dim]
            if (parameter, dim) not in self.starts:
                self.starts[parameter, dim] = self.end
                self.end += height
            parts.append(np.arange(height) + self.starts[parameter, dim])
        numbers = np.concatenate(parts).astype(np.float64)
        if tensor.origin.rows is not None:
            numbers = numbers[tensor.origin.rows]
        if len(tensor.shape) == 1:
            return numbers[:rows]
        return numbers[None, :] if dim == 1 else numbers[:rows, None]

    def share(self, side: Side, numbers: NDArray[Any]) -> Share:
        """The parameter and rows that (heads, d_head) numbers stand for; LayoutError where they are of several."""
        for (name, dim), start in self.starts.items():
            rows = numbers - start
            parameter = self.live.parameters[name]
            if (rows >= 0).all() and (rows < parameter.shape[dim]).all():
                whole = rows.astype(np.int64)
                if (whole == rows).all() and len(np.unique(whole)) == whole.size:
                    return Share(side, name, whole, dim, parameter)
        raise LayoutError(f"no single parameter holds {side}: it is a product, or put together from several")
