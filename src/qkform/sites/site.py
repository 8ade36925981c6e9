"""One attention module of a live model: its Q and K as they are now, and how to write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from qkform.errors import FormError, QKFormError, SourceError
from qkform.form import BilinearForm
from qkform.layouts import AttentionLayer, Manual, Overrides
from qkform.sites.live import LiveModel, open_live
from qkform.sites.parameters import is_module, still_there
from qkform.sites.shares import SIDES, Share, Side, shares

if TYPE_CHECKING:
    import torch


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

    def refuse(self, *sides: Side) -> None:
        """SourceError for a side that `write_` cannot write in place, FormError for one that is not there."""
        self._current()
        for side in sides:
            self._writable(side)

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
            sites.append(Site(layer.module, module, facts, shares(live, layer), live))
        except QKFormError as error:
            skipped.append({"module": layer.module, "reason": str(error)})
    return Sites(tuple(sites), tuple(skipped))


def _without_weights(name: str, rows: int | None = None) -> NDArray[Any]:
    raise FormError(
        "the layer of a site has no weights; ask site.form() for those of now, or site.snapshot() for a layer"
    )
