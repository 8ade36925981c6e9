"""Traces of one model -> its attentions, each with the query-key form that the model itself computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.survey.trace import Key, Product, Projection, Softmax, Trace

Array = np.ndarray[Any, Any]
EXACT = 1e-7  # relative: operands are moved, scaled and rounded once or twice, nothing else


class NotRead(Exception):
    """An attention whose queries or keys are not plain outputs of projections; says why."""


@dataclass
class Side:
    """Queries or keys: which outputs of which projections make each head, in the order the model uses them."""

    projections: tuple[Resolved, ...]  # every one that has a part
    which: Array  # (heads, d_head) place in `projections`
    rows: Array  # (heads, d_head) output of it
    scale: float
    offset: bool  # something is added after the projection
    added: Array  # (heads, d_head) it, where it is the same for every token; 0 elsewhere

    @property
    def x(self) -> torch.Tensor:
        return self.projections[0].x

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for p in self.projections for n in p.parameters))

    def matrix(self) -> Array:
        """(heads, d_model, d_head)"""
        out = np.empty((*self.rows.shape, self.projections[0].weight.shape[1]))
        for i, p in enumerate(self.projections):
            out[self.which == i] = p.weight[self.rows[self.which == i]]
        return np.swapaxes(out, 1, 2)

    def bias(self) -> Array:
        """(heads, d_head)"""
        out = np.zeros(self.rows.shape)
        for i, p in enumerate(self.projections):
            if p.bias is not None:
                out[self.which == i] = p.bias[self.rows[self.which == i]]
        return out

    def columns(self, kept: Array) -> Side:
        return replace(self, which=self.which[:, kept], rows=self.rows[:, kept], added=self.added[:, kept])


@dataclass
class Resolved:
    """A projection of what the attention reads; one of a latent is multiplied out."""

    weight: Array  # (rows, d_model)
    bias: Array | None  # (rows,)
    x: torch.Tensor  # in the pass with everything in place
    parameters: tuple[str, ...]


@dataclass
class Attention:
    """One attention as one forward pass computed it."""

    module: str
    attention: str
    mask: str
    q: Side
    k: Side
    pairs: list[int]  # the key head of each query head
    normed: bool
    terms: int  # further products that are added to the score
    x: torch.Tensor  # what the query projection reads

    @property
    def matrix(self) -> Array:
        q, k = self.q.matrix(), self.k.matrix()
        return np.stack([q[h] @ k[g].T for h, g in enumerate(self.pairs)])

    def parts(self) -> list[Attention]:
        """The terms of a score whose keys come from several projections, each as an attention of its own."""
        sources = self.k.which[0]
        if len(set(sources.tolist())) < 2:
            return []
        out = []
        for source in dict.fromkeys(sources.tolist()):
            kept = sources == source
            k, q = self.k.columns(kept), self.q.columns(kept)
            distinct = list(dict.fromkeys(map(tuple, k.rows.tolist())))
            pairs = [distinct.index(tuple(k.rows[g].tolist())) for g in self.pairs]
            first = [next(i for i, r in enumerate(k.rows.tolist()) if tuple(r) == d) for d in distinct]
            k = replace(k, which=k.which[first], rows=k.rows[first], added=k.added[first])
            out.append(replace(self, q=q, k=k, pairs=pairs))
        return out


@dataclass
class Failure:
    module: str
    reason: str
    parameters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    without_form: bool = False  # one side is no projection of tokens at all: a learned probe, say


@dataclass
class Reading:
    attentions: list[Attention] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    softmaxes: int = 0
    first: Trace | None = None  # the pass with everything in place


Forward = Callable[[], Any]


def watch(model: torch.nn.Module, forward: Forward) -> Trace:
    """One forward pass, watched, with everything in place."""
    return _run(model, forward)


def read(model: torch.nn.Module, forward: Forward, first: Trace | None = None) -> Reading:
    """Every attention that a forward pass of the model reaches. `first`: that pass, already watched."""
    first = first or watch(model, forward)
    reading = Reading(softmaxes=len(first.softmaxes), first=first)
    if not first.softmaxes:
        return reading
    wanted = {
        t[1]
        for s in first.softmaxes
        for p in s.products
        for side in p.sources
        for t in side
        if t[0] == "proj"
    }
    chained = _chained(first, wanted)
    wanted |= set(chained.values())
    norms = {n.module for n in first.norms if any(t[0] == "proj" and t[1] in wanted for t in n.tags)}
    latent = {
        n.module for n in first.norms if any(t[0] == "proj" and t[1] in chained.values() for t in n.tags)
    }
    norms -= {n.module for n in first.norms if _is_outside(n, first, wanted)} - latent
    options = {"without_norms": frozenset(norms), "skip_normalize": frozenset(first.normalized & wanted)}
    plain = _run(model, forward, **options)
    bases: dict[Key, int] = {}
    total = 1
    for key, projection in plain.projections.items():
        if key in wanted and projection.weight is not None:
            bases[key] = total
            total += int(np.prod(projection.shape))

    def fill(kind: str) -> Callable[[Projection], torch.Tensor | None]:
        def replacement(p: Projection) -> torch.Tensor | None:
            if p.key not in bases or p.y is None:
                return None
            if kind != "codes":
                return torch.full_like(p.y, 0.0 if kind == "zeros" else 1.0)
            return p.place(_codes(p, bases[p.key]).to(p.y.dtype)).contiguous()

        return replacement

    zeros, ones, codes = (
        _run(model, forward, replace=fill(k), **options) for k in ("zeros", "ones", "codes")
    )
    counts = {len(t.softmaxes) for t in (first, plain, zeros, ones, codes)}
    if len(counts) > 1:
        reading.failures.append(
            Failure("", f"the passes differ in the number of softmaxes: {sorted(counts)}")
        )
        return reading
    decoder = _Decoder((plain, zeros, ones, codes), bases, total, first, chained)
    for i, softmax in enumerate(first.softmaxes):
        passes = [t.softmaxes[i] for t in (plain, zeros, ones, codes)]
        found, problems = None, []
        for j in range(len(softmax.products)):
            try:
                candidate = decoder.attention(softmax, [p.products[j] for p in passes], norms - latent)
            except (NotRead, IndexError) as error:
                problems.append(str(error))
                continue
            if found is None or (found.attention != "self" and candidate.attention == "self"):
                found = candidate
        if found is None:
            names = tuple(
                tuple(
                    sorted(
                        {
                            n
                            for p in softmax.products
                            for t in p.sources[side]
                            if t[0] == "proj"
                            for n in t[1][1]
                        }
                    )
                )
                for side in (0, 1)
            )
            reason = "; ".join(dict.fromkeys(problems)) or "no product"
            probe = not all(names)
            reading.failures.append(Failure(softmax.module, reason, names, probe))  # type: ignore[arg-type]
        else:
            found.terms = len(softmax.products) - 1
            reading.attentions.append(found)
    return reading


def _chained(first: Trace, wanted: set[Key]) -> dict[Key, Key]:
    """Projections of a latent that another projection of the same module makes, and that other one."""
    out = {}
    for key in wanted:
        tags = first._of(first.projections[key].x)
        inner = [t[1] for t in tags if t[0] == "proj"]
        if len(tags) == len(inner) == 1 and inner[0][0].rpartition(".")[0] == key[0].rpartition(".")[0] != "":
            out[key] = inner[0]
    return out


def _is_outside(norm: Any, first: Trace, wanted: set[Key]) -> bool:
    """A norm that feeds a projection of Q or K is no norm on queries and keys."""
    return any(p.key in wanted and p.x is norm.y for p in first.projections.values())


def _run(model: torch.nn.Module, forward: Forward, **options: Any) -> Trace:
    torch.manual_seed(0)
    # Some models turn queries and keys in single precision: here float() stays float64.
    double = patch.object(torch.Tensor, "float", torch.Tensor.double)
    with double, Trace(model, **options).watching() as trace:
        forward()
    return trace


def _codes(p: Projection, base: int) -> torch.Tensor:
    n = int(np.prod(p.shape))
    return torch.arange(base, base + n, dtype=torch.float64).reshape(-1, p.rows)


class _Decoder:
    """Says for each element of an operand which output of which projection it is."""

    def __init__(
        self,
        passes: Sequence[Trace],
        bases: Mapping[Key, int],
        total: int,
        first: Trace,
        chained: Mapping[Key, Key],
    ) -> None:
        self.passes, self.first, self.chained = passes, first, chained
        self.keys = list(bases)
        self.starts = np.array([*bases.values(), total])
        self.projections = [passes[0].projections[k] for k in self.keys]
        self.values = np.zeros(total)
        for p in self.projections:
            assert p.y is not None
            places = p.place(_codes(p, bases[p.key])).contiguous().numpy().astype(int)
            self.values[places.ravel()] = p.y.detach().double().numpy().ravel()
        self.known: dict[Key, Resolved] = {}

    def resolved(self, key: Key) -> Resolved:
        """A projection as one of what the attention reads."""
        if key in self.known:
            return self.known[key]
        p = self.passes[0].projections[key]
        assert p.weight is not None
        weight = p.weight.detach().double().numpy()
        bias = None if p.bias is None else p.bias.detach().double().numpy()
        out = Resolved(weight, bias, self.first.projections[key].x, p.parameters)
        if key in self.chained:
            # where something that is not linear stands between, the latent is what the attention reads
            with contextlib.suppress(NotRead):
                out = self._through(key, out)
        self.known[key] = out
        return out

    def _through(self, key: Key, outer: Resolved) -> Resolved:
        which, _, rows, scale, offset = self.side([t.projections[key].x for t in self.passes])
        flat = rows.reshape(-1, rows.shape[-1])
        if len(set(which.ravel().tolist())) != 1 or offset.any() or (flat != flat[0]).any():
            raise NotRead("the latent is not a plain part of one projection")
        inner = self.resolved(self.keys[which.flat[0]])
        bias = outer.bias
        if inner.bias is not None:
            added = scale * outer.weight @ inner.bias[flat[0]]
            bias = added if bias is None else bias + added
        weight = scale * outer.weight @ inner.weight[flat[0]]
        return Resolved(weight, bias, inner.x, (*outer.parameters, *inner.parameters))

    def side(self, operands: Sequence[torch.Tensor]) -> tuple[Array, Array, Array, float, Array]:
        """(projection, token, row) of each element, the scale, and what is added to them."""
        plain, zeros, ones, codes = (o.detach().double().numpy() for o in operands)
        scale = ones - zeros
        if not np.isfinite(codes).all():
            raise NotRead("values that are not finite reach the product")
        if not np.abs(scale).max() > 0:
            raise NotRead("not an output of a projection")
        used = np.abs(scale) > 0
        raw = np.divide(codes - zeros, scale, out=np.zeros_like(codes), where=used)
        index = np.rint(raw).astype(int)
        if np.abs(raw - index).max() > 1e-3 or index.min() < 0 or index.max() >= len(self.values):
            raise NotRead("not a plain output of one projection: outputs are mixed, or a norm stands between")
        index[~used] = 0
        expected = scale * self.values[index] + zeros
        off = np.abs(expected - plain)[used].max() / max(np.abs(plain).max(), 1e-300)
        if not off < EXACT:
            raise NotRead(f"not linear in the output of the projection: off by {off:.1e}")
        factors = scale[used]
        if np.ptp(factors) > 1e-6 * abs(factors).max():
            raise NotRead("scaled differently from element to element")
        which = np.searchsorted(self.starts, index, side="right") - 1
        which[~used] = -1
        size = np.array([p.rows for p in self.projections])
        local = index - self.starts[which]
        return (
            which,
            np.where(used, local // size[which], -1),
            np.where(used, local % size[which], -1),
            float(factors.mean()),
            zeros / float(factors.mean()),
        )

    def attention(self, softmax: Softmax, passes: Sequence[Product], norms: set[str]) -> Attention:
        q = self.side([p.left for p in passes])
        k = self.side([p.right for p in passes])
        lead = np.broadcast_shapes(q[0].shape[:-2], k[0].shape[:-2])
        (codes_q, added_q), (codes_k, added_k) = (_spread(side, lead) for side in (q, k))
        pairs: dict[tuple[int, ...], tuple[int, ...]] = {}
        for rows_q, rows_k in zip(codes_q, codes_k, strict=True):
            keys = {tuple(r) for r in np.unique(rows_k, axis=0).tolist() if min(r) >= 0}
            for row in dict.fromkeys(tuple(r) for r in rows_q.tolist() if min(r) >= 0):
                if len(keys) != 1:
                    raise NotRead(f"a query head meets {len(keys)} key heads")
                (key,) = keys
                if pairs.setdefault(row, key) != key:
                    raise NotRead("a query head meets different key heads")
        q_heads = list(pairs)
        k_heads = list(dict.fromkeys(pairs.values()))
        if not q_heads:
            raise NotRead("no whole head reaches the product")
        side_q, side_k = (
            self._side(np.array(heads), side[3], codes, added)
            for heads, side, codes, added in ((q_heads, q, codes_q, added_q), (k_heads, k, codes_k, added_k))
        )
        x_q, x_k = side_q.x, side_k.x
        same = x_q is x_k or (x_q.shape == x_k.shape and bool(torch.equal(x_q, x_k)))
        used = [self.keys[i] for i in sorted({*np.unique(q[0]).tolist(), *np.unique(k[0]).tolist()} - {-1})]
        return Attention(
            module=softmax.module,
            attention="self" if same else "cross",
            mask=_mask(softmax, q[1], k[1]) if same else "bidirectional",
            q=side_q,
            k=side_k,
            pairs=[k_heads.index(pairs[h]) for h in q_heads],
            normed=_normed(self.first, norms, used),
            terms=0,
            x=x_q,
        )

    def _side(self, codes: Array, scale: float, seen: Array, added: Array) -> Side:
        numbers = list(dict.fromkeys((codes // STRIDE).ravel().tolist()))
        found = tuple(self.resolved(self.keys[i]) for i in numbers)
        first = found[0].x
        if any(r.x.shape != first.shape or not torch.equal(r.x, first) for r in found):
            parts = " and ".join(", ".join(r.parameters) for r in found)
            raise NotRead(f"put together from projections of different inputs: {parts}")
        places = np.vectorize(numbers.index)(codes // STRIDE)
        vectors = np.zeros(codes.shape)
        flat, flat_added = seen.reshape(-1, codes.shape[1]), added.reshape(-1, codes.shape[1])
        for i, head in enumerate(codes):
            mine = flat_added[(flat == head).all(1)]
            if np.ptp(mine, axis=0).max() <= EXACT * max(1.0, np.abs(mine).max()):
                vectors[i] = mine[0]
        return Side(found, places, codes % STRIDE, scale, bool(np.abs(added).max() > 0), vectors)


def _spread(side: tuple[Array, Array, Array, float, Array], lead: tuple[int, ...]) -> tuple[Array, Array]:
    """(matrices, tokens, d_head) codes of projection and row, and what is added, for every product."""
    which, _, rows, _, added = side
    codes = np.where(rows >= 0, which * STRIDE + rows, -1)
    shape = (*lead, *rows.shape[-2:])
    return tuple(np.broadcast_to(x, shape).reshape(-1, *rows.shape[-2:]) for x in (codes, added))  # type: ignore[return-value]


STRIDE = 1 << 20  # more than any projection here has rows


def _normed(first: Trace, norms: set[str], sides: Sequence[Key]) -> bool:
    keys = {("proj", key) for key in sides}
    by_module = any(n.module in norms and n.tags & keys for n in first.norms)
    return by_module or any(key in first.normalized for key in sides)


def _mask(softmax: Softmax, q_tokens: Array, k_tokens: Array) -> str:
    """Whether any token gives weight to a later one."""
    p = softmax.probabilities.detach().numpy()
    t, s = q_tokens.shape[-2], k_tokens.shape[-2]
    lead_shape = np.broadcast_shapes(q_tokens.shape[:-2], k_tokens.shape[:-2])
    lead = int(np.prod(lead_shape))
    q_tokens, k_tokens = (np.broadcast_to(x, (*lead_shape, *x.shape[-2:])) for x in (q_tokens, k_tokens))
    if (
        softmax.dim not in (-1, p.ndim - 1)
        or p.shape[-2] != t
        or p.shape[-1] < s
        or p.size // t // p.shape[-1] != lead
    ):
        return "unknown"
    p = p.reshape(lead, t, -1)[..., :s]
    later = k_tokens.reshape(lead, s, -1)[:, None, :, 0] > q_tokens.reshape(lead, t, -1)[:, :, None, 0]
    real = q_tokens.reshape(lead, t, -1)[:, :, None, 0] >= 0
    return "bidirectional" if bool((p[later & real] > 0).any()) else "causal"
