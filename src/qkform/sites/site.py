"""One attention module of a live model: the parameters that hold its Q and K, where in them, and how to write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from qkform.errors import FormError, LayoutError, QKFormError, SourceError
from qkform.form import BilinearForm
from qkform.layouts import AttentionLayer, Manual, Overrides
from qkform.sites.live import LiveModel, open_live
from qkform.sites.parameters import Parameter, is_module, still_there

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


@dataclass(frozen=True, eq=False)
class Site:
    """An attention of a live model, with the parameters behind its query-key form. Equal to itself alone.

    path     of its module, wrappers (compiled, sharded) left out
    module   the torch module
    layer    what a scan knows of it: heads, sizes, mask, kind; it has no weights, see `form` and `snapshot`
    shares   where in the parameters its sides are

    All that reads or writes raises SourceError where the model has another module in this place by now.
    """

    path: str
    module: Any
    layer: AttentionLayer
    shares: Mapping[Side, Share]
    live: LiveModel = field(repr=False)

    def w_q(self) -> torch.Tensor:
        """The query weights as they are now, (n_heads, d_model, d_head).

        A view of the parameter where its rows follow each other, else gathered; gradients flow to the parameter.
        """
        return self._share("w_q").taken()

    def w_k(self) -> torch.Tensor:
        """The key weights as they are now, (n_kv_heads, d_model, d_head); see `w_q`."""
        return self._share("w_k").taken()

    def b_q(self) -> torch.Tensor | None:
        """The query bias, (n_heads, d_head); None where there is none."""
        return self._share("b_q").taken() if "b_q" in self.shares else None

    def b_k(self) -> torch.Tensor | None:
        """The key bias, (n_kv_heads, d_head); None where there is none."""
        return self._share("b_k").taken() if "b_k" in self.shares else None

    def form(self) -> BilinearForm:
        """The query-key form of the weights as they are now: a copy, read anew at every call."""
        return self.snapshot().form

    def snapshot(self) -> AttentionLayer:
        """The layer as `qkform.layers` gives it: it reads the weights when it is first asked, and keeps them."""
        return replace(self.layer, read=self._read)

    def _read(self, name: str, rows: int | None = None) -> NDArray[Any]:
        self._current()
        return self.live.read(name, rows)

    def _current(self) -> None:
        still_there(self.live.root, self.path, self.module, adapted=True)

    def _share(self, side: Side) -> Share:
        self._current()
        return self.shares[side]

    def parameters(self) -> list[Share]:
        """Which rows of which parameters are queries and keys, weights first: for learning rates of their own."""
        self._current()
        return [self.shares[side] for side in SIDES if side in self.shares]

    def write_(self, *, w_q: Any = None, w_k: Any = None, b_q: Any = None, b_k: Any = None) -> None:
        """Put new values into the model, in place and without gradient history; None leaves a side as it is.

        Torch tensors or numpy arrays in the shapes that `w_q()`, `w_k()`, `b_q()`, `b_k()` have; they are brought to
        the type and device of the parameter. Nothing is written unless everything fits: FormError for a wrong shape,
        a bias the module does not have, or two values for a parameter that Q and K share; SourceError for a parameter
        that cannot be written in place.
        """
        import torch

        self._current()
        sides: tuple[tuple[Side, Any], ...] = (("w_q", w_q), ("w_k", w_k), ("b_q", b_q), ("b_k", b_k))
        with torch.no_grad():
            ready = [
                (self._writable(side), self._fitting(side, new)) for side, new in sides if new is not None
            ]
            self._refuse_two_values(ready)
            for share, values in ready:
                share.put(values)

    def _writable(self, side: Side) -> Share:
        share = self.shares.get(side)
        if share is None:
            raise FormError(f"{self.path} has no {side}: the projection has no bias")
        share.at.refuse()
        value = share.parameter
        if hasattr(value, "full_tensor"):
            raise SourceError(f"{share.name!r} is sharded; write its values before the model is sharded")
        if share.at.attribute not in dict(share.at.owner.named_parameters(recurse=False)):
            raise SourceError(f"{share.name!r} is parametrized; write before, or remove the parametrization")
        return share

    def _refuse_two_values(self, ready: Sequence[tuple[Share, torch.Tensor]]) -> None:
        """FormError where one tied parameter would get two values: the second would undo the first."""
        for i, (share, values) in enumerate(ready):
            for other, others in ready[:i]:
                same = share.parameter is other.parameter and (
                    share.rows is None
                    or other.rows is None
                    or np.intersect1d(share.rows, other.rows).size > 0
                )
                if same and not (values.shape == others.shape and bool((values == others).all())):
                    raise FormError(
                        f"{other.side} and {share.side} of {self.path} are one parameter, {other.name!r}: "
                        "it cannot have two values"
                    )

    def _fitting(self, side: Side, new: Any) -> torch.Tensor:
        import torch

        old = self.shares[side].taken()
        values = torch.as_tensor(new)
        if values.shape != old.shape:
            raise FormError(
                f"{side} of {self.path} has shape {tuple(values.shape)}; expected {tuple(old.shape)}"
            )
        # A copy: what is given may be a view of the very parameter that is written.
        return values.detach().to(device=old.device, dtype=old.dtype, copy=True)


@dataclass(frozen=True, eq=False)
class Sites(Sequence[Site]):
    """The sites of a model in order, and `skipped`: {"module", "reason"} of what was seen and is none."""

    found: tuple[Site, ...]
    skipped: tuple[Mapping[str, str], ...] = ()

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Site, ...]: ...
    def __getitem__(self, index: int | slice) -> Site | tuple[Site, ...]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.found)


def find(
    model: Any,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    q: str | None = None,
    k: str | None = None,
    transposed: bool = False,
) -> Sites:
    """The attention modules of a torch model; the keywords are those of `qkform.layers`.

    Raises SourceError for anything but a torch module, ConfigError or LayoutError where its attentions are not
    understood. An attention whose Q or K no single parameter holds is in `skipped`.

    >>> for site in find(model):                # doctest: +SKIP
    ...     print(site.path, site.w_q().shape)
    """
    live = open_live(model)
    if not is_module(live.root):
        raise SourceError(
            f"a {type(model).__name__} is no torch module: its weights can be scanned, not changed"
        )
    layout = live.find(Overrides(heads, kv_heads, head_dim), Manual(q, k, transposed))
    sites, skipped = [], list(layout.skipped)
    for layer in layout.layers:
        try:
            module = live.tree.modules[layer.module]
            facts = replace(layer, read=_without_weights)
            sites.append(Site(layer.module, module, facts, _shares(live, layer), live))
        except QKFormError as error:
            skipped.append({"module": layer.module, "reason": str(error)})
    return Sites(tuple(sites), tuple(skipped))


def _without_weights(name: str, rows: int | None = None) -> NDArray[Any]:
    raise FormError(
        "the layer of a site has no weights; ask site.form() for those of now, or site.snapshot() for a layer"
    )


def _shares(live: LiveModel, layer: AttentionLayer) -> dict[Side, Share]:
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
