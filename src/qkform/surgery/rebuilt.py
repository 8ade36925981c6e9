"""Arms that build the projections anew instead of deriving W_K from W_Q: those of two published recipes.

`script`        what the released script of arXiv 2502.10927 does (its README calls it a cleaned-up version that may
                differ from the runs in the paper): queries, keys and values become `nn.Linear` defaults, weights and
                biases uniform in +-1/sqrt(d_model), and the query weight is the key weight. Biases are drawn apart
                from each other. Scale, biases and values change together with symmetry, so its control is
`script_scale`  the same numbers for keys, values and biases, and query weights of their own.
`mimetic`       arXiv 2305.09828, its part for queries and keys: W_Q W_K^T is the rank d_head approximation of
                alpha Z + beta I, Z Gaussian of variance 1/d_model, alpha and beta 0.7 and 0.7, as the paper's default
                for queries and keys (not re-checked against its text), the singular values shared evenly between the
                factors. Values and the output projection stay as they are. The paper divides scores by sqrt(d_head);
                a model that does not (T5) starts with larger ones.

Query heads that share a key head: in `script` each of them is the key head; in `mimetic` the key head is taken from
the mean of their matrices, and each query head is the best fit to its own matrix with that key head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from qkform.errors import SurgeryError
from qkform.sites import Site
from qkform.surgery.circuits import value_name

if TYPE_CHECKING:
    import torch

ALPHA = BETA = 0.7  # arXiv 2305.09828, of queries and keys; not re-checked against its text


@dataclass(frozen=True)
class Rebuilt:
    """An arm of this kind: its promise, whether it writes the values, and (site, generator) -> values by name."""

    promise: float | None
    values: bool
    make: Callable[[Site, Any], Mapping[str, torch.Tensor]]


def script(site: Site, generator: Any, *, copied: bool = True) -> dict[str, torch.Tensor]:
    """w_q, w_k, b_q, b_k, values and value_bias as `nn.Linear` draws them; biases where the module has them."""
    import torch

    bound = site.layer.d_model**-0.5  # kaiming uniform with a = sqrt(5) is uniform in +-1/sqrt(inputs)

    def uniform(shape: Any) -> torch.Tensor:
        return (2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0) * bound

    out = {"w_k": uniform(site.w_k().shape)}
    found = find_values(site)
    out["values"] = uniform(found.weight.shape)
    if found.bias is not None:
        out["value_bias"] = uniform(found.bias.shape)
    for name, bias in (("b_k", site.b_k()), ("b_q", site.b_q())):
        if bias is not None:
            out[name] = uniform(bias.shape)
    group = site.layer.n_heads // site.layer.n_kv_heads
    out["w_q"] = out["w_k"].repeat_interleave(group, 0) if copied else uniform(site.w_q().shape)
    return out


def script_scale(site: Site, generator: Any) -> dict[str, torch.Tensor]:
    """As `script`, but for the query weight, which is drawn last: all else is the same."""
    return script(site, generator, copied=False)


def mimetic(site: Site, generator: Any) -> dict[str, torch.Tensor]:
    """w_q and w_k. One eigenvalue decomposition, d_model x d_model, for every key head."""
    import torch

    layer = site.layer
    d, rank, group = layer.d_model, layer.d_head, layer.n_heads // layer.n_kv_heads
    queries, keys = [], []
    for _ in range(layer.n_kv_heads):
        z = torch.randn(group, d, d, generator=generator, dtype=torch.float64) * d**-0.5
        targets = ALPHA * z + BETA * torch.eye(d, dtype=torch.float64)  # (group, d, d)
        mean = targets.mean(0)
        squares, vectors = torch.linalg.eigh(
            mean.T @ mean
        )  # of the singular values, ascending; faster than svd
        v, root = vectors[:, -rank:].flip(1), squares[-rank:].flip(0) ** 0.25
        keys.append(v * root)
        queries += list(targets @ v / root)  # U sqrt(S) where the key head is read by one query head
    return {"w_q": torch.stack(queries), "w_k": torch.stack(keys)}


# ---- values ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Values:
    """The value projection of an attention: parameters, and which of their rows; None: all of them."""

    weight: Slice
    bias: Slice | None


@dataclass(frozen=True, eq=False)
class Slice:
    """Rows of a parameter along `dim`; None: all of it."""

    at: Any  # qkform.sites.parameters.Parameter
    rows: torch.Tensor | None
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.at.value.shape)
        if self.rows is not None:
            shape[self.dim] = len(self.rows)
        return tuple(shape)

    def taken(self) -> torch.Tensor:
        value: torch.Tensor = self.at.value.detach()
        return (
            value.clone() if self.rows is None else value.index_select(self.dim, self.rows.to(value.device))
        )

    def put(self, values: torch.Tensor) -> None:
        value = self.at.value
        values = values.to(device=value.device, dtype=value.dtype)
        if self.rows is None:
            value.copy_(values)
        else:
            value.index_copy_(self.dim, self.rows.to(value.device), values)


def find_values(site: Site) -> Values:
    """Where the values of a site are: behind Q and K in their tensor, or in a projection named as the keys' is."""
    weight = _slice(site, "w_k", "w_q")
    if weight is None:
        raise SurgeryError(
            f"{site.path}: this arm rebuilds the values too, and no value projection was found beside "
            f"{site.shares['w_k'].name!r}; arms that leave the values alone: matched, indefinite, skew, orthogonal, "
            "mimetic"
        )
    weight.at.refuse()
    bias = _slice(site, "b_k", "b_q")
    if bias is None and weight.rows is None:  # keys may have no bias where values have one (Whisper)
        name = re.sub(r"weight$", "bias", weight.at.name)
        at = site.live.parameters.get(name) if name != weight.at.name else None
        bias = Slice(at, None, 0) if at is not None else None
    return Values(weight, bias)


def _slice(site: Site, key: Any, query: Any) -> Slice | None:
    """The values beside one side of the keys: of weights, or of biases. None where there are none."""
    import torch

    share = site.shares.get(key)
    if share is None:
        return None
    parameters = site.live.parameters
    if share.rows is not None:
        taken = [s.rows for s in (share, site.shares.get(query)) if s is not None and s.name == share.name]
        used = np.concatenate([np.asarray(rows).reshape(-1) for rows in taken])
        rest = np.setdiff1d(np.arange(share.at.shape[share.dim]), used)
        if len(rest):  # of a tensor that holds nothing else
            fits = len(rest) % site.layer.n_kv_heads == 0
            return Slice(share.at, torch.from_numpy(rest), share.dim) if fits else None
    name = _named_value(share.name)
    if name is None or name not in parameters or parameters[name].shape[1:] != share.at.shape[1:]:
        return None
    return Slice(parameters[name], None, share.dim)


def _named_value(name: str) -> str | None:
    """The name of the values beside that of the keys: "self.key.weight" -> "self.value.weight"; None for no key."""
    parts = name.split(".")
    for i in range(len(parts) - 1, max(len(parts) - 3, -1), -1):
        called = value_name(parts[i])
        if called is not None:
            return ".".join([*parts[:i], called, *parts[i + 1 :]])
    return None


REBUILT: Mapping[str, Rebuilt] = {
    "script": Rebuilt(1.0, True, script),
    "script_scale": Rebuilt(None, True, script_scale),
    "mimetic": Rebuilt(None, False, mimetic),
}
