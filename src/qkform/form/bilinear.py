"""The query-key form W = W_Q W_K^T of a layer's heads, and every score that is read from it.

Rows of W are the query side, columns the key side: s_ij = x_i W x_j^T. W, d x d, is hardly ever
formed: `moments.py` says how the scores come from the factors; `reference.py` computes the same from W, as the
papers write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from qkform.errors import FormError
from qkform.form import arrays
from qkform.form.arrays import Array
from qkform.form.moments import HeadMoments, is_zero
from qkform.form.null import null_mean, null_variance
from qkform.form.outliers import excess
from qkform.form.spectrum import eigenvalues, svd, symmetric_part

SIGNATURE_TOLERANCE = 1e-8  # eigenvalues below this share of the largest count as zero
_VANISHED = 1e-13  # a symmetric part this small beside W is rounding: W is skew


class Signature(NamedTuple):
    """Directions in which the symmetric part of W attracts (x W x^T > 0) and repels, (n_heads,) float64 each.

    `positive` and `negative` count eigenvalues above 1e-8 of the largest in size; `positive_energy` is the
    attracting share of the squared eigenvalues, in [0, 1]. NaN where there is no symmetric part to speak of.
    """

    positive: Array
    negative: Array
    positive_energy: Array


class BilinearForm:
    """The query-key form of one attention layer, all heads.

    Parameters
    ----------
    w_q : (n_heads, d_model, d_head), numpy array or torch tensor, real floating.
    w_k : (n_kv_heads, d_model, d_head); query head h reads key head h // (n_heads // n_kv_heads).
    b_q : (n_heads, d_head) or None. Used by `bias_share` alone.
    b_k : (n_kv_heads, d_head) or None.

    Cross-attention may give w_k another d_model; symmetry, eigenvalues and signature then raise FormError.
    Scores are float64 arrays (n_heads,) of the kind and device of `w_q`; gradients do not flow through.
    A head whose weights are all zero, or not finite, has no scores: NaN, with the reason in `defects()`.

    >>> import numpy as np, qkform as qk
    >>> w = np.eye(4)[None]                       # one head, W = identity
    >>> qk.BilinearForm(w, w).symmetry().tolist()
    [1.0]
    """

    def __init__(self, w_q: Array, w_k: Array, *, b_q: Array | None = None, b_k: Array | None = None) -> None:
        w_q = arrays.checked("w_q", w_q, 3, "(n_heads, d_model, d_head)")
        w_k = arrays.checked("w_k", w_k, 3, "(n_kv_heads, d_model, d_head)")
        _same_kind(w_q=w_q, w_k=w_k)
        if w_q.shape[2] != w_k.shape[2]:
            raise FormError(f"w_q has d_head {w_q.shape[2]} and w_k {w_k.shape[2]}: they must be equal")
        if w_q.shape[0] % w_k.shape[0]:
            raise FormError(
                f"{w_q.shape[0]} query heads cannot share {w_k.shape[0]} key heads evenly: "
                "n_heads must be a multiple of n_kv_heads"
            )
        self.w_q, self.w_k = w_q, w_k
        self.b_q = _checked_bias("b_q", b_q, w_q)
        self.b_k = _checked_bias("b_k", b_k, w_k)
        self._of = HeadMoments(w_q, w_k)
        self._exact_q: Callable[[], Array] | None = None
        self._excesses_at: dict[float, tuple[Array, Array]] = {}  # by gamma: four scores read them
        self._xp, self._dtype = self._of.xp, self._of.dtype

    # ---- shape ---------------------------------------------------------------------------------------------

    @property
    def n_heads(self) -> int:
        return int(self.w_q.shape[0])

    @property
    def n_kv_heads(self) -> int:
        return int(self.w_k.shape[0])

    @property
    def d_model(self) -> int:
        """Width of the query side (in self-attention also of the key side)."""
        return int(self.w_q.shape[1])

    @property
    def d_head(self) -> int:
        return int(self.w_q.shape[2])

    def kv_head(self, head: int) -> int:
        """The key head that query head `head` reads."""
        return head // (self.n_heads // self.n_kv_heads)

    def __repr__(self) -> str:
        return (
            f"BilinearForm(n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, d_model={self.d_model}, "
            f"d_head={self.d_head}, dtype={self.w_q.dtype})"
        )

    # ---- scores --------------------------------------------------------------------------------------------

    def symmetry(self) -> Array:
        """How close W is to its transpose: tr(W W) / ||W||_F^2, per head.

        Returns (n_heads,) float64 in [-1, 1]: 1 symmetric, -1 skew; 1/d_model is the mean of random weights.
        NaN for a head without weights (see `defects`).  Source: arXiv 2502.10927; docs/math.md#symmetry.
        """
        self._need_square("symmetry")
        return self._scores(
            lambda i: max(-1.0, min(1.0, self._of.moments[i].trace2 / self._of.moments[i].norm2))
        )

    def symmetry_z(self) -> Array:
        """Symmetry in standard deviations from what random weights of the same spectrum give.

        Returns (n_heads,) float64, unbounded: (s - 1/d) / sqrt(Var[s]), the variance exact for any spectrum.
        A large z says "not by chance", not "large": read it beside `symmetry`.  docs/math.md#symmetry_z.
        """
        symmetry, rank = self.symmetry(), self.effective_rank()
        if self.d_model == 1:
            return symmetry * math.nan
        return (symmetry - null_mean(self.d_model)) / null_variance(self.d_model, rank) ** 0.5

    def directionality(self, gamma: float = 2.0) -> Array:
        """Whether outlier rows or outlier columns dominate: (R - C) / (R + C), per head.

        R and C are `row_excess` and `column_excess`. Returns (n_heads,) float64 in [-1, 1]: negative means
        column (key-side) dominance, as in the published tables. 0.0 where neither side has an outlier
        (see `no_outliers`).  Source: arXiv 2502.10927; docs/math.md#directionality.
        """
        xp = self._xp
        rows, columns = self._excesses(gamma)
        both = rows + columns
        return xp.where(both == 0.0, both, (rows - columns) / xp.where(both == 0.0, both + 1.0, both))

    def no_outliers(self, gamma: float = 2.0) -> Array:
        """Where `directionality` is 0.0 for want of any outlier row or column: (n_heads,) bool."""
        rows, columns = self._excesses(gamma)
        return rows + columns == 0.0

    def row_excess(self, gamma: float = 2.0) -> Array:
        """Sum of (norm - threshold) over rows with a norm above mean + gamma * std (ddof 1): (n_heads,) >= 0."""
        return self._rescaled(self._excesses(gamma)[0])

    def column_excess(self, gamma: float = 2.0) -> Array:
        """Sum of (norm - threshold) over columns whose norm is above mean + gamma * std: (n_heads,) >= 0."""
        return self._rescaled(self._excesses(gamma)[1])

    def norm(self) -> Array:
        """The Frobenius norm of W: (n_heads,) float64 >= 0. An all-zero head has norm 0."""
        values = []
        for i, head in enumerate(self._of.heads):
            if head.defect is None:
                values.append(math.sqrt(self._of.moments[i].norm2) * head.scale)
            else:
                values.append(0.0 if is_zero(head.defect) else math.nan)
        return arrays.like(values, self.w_q)

    def effective_rank(self) -> Array:
        """How many directions carry W: ||W||_F^4 / ||W W^T||_F^2, the participation ratio of squared
        singular values. Returns (n_heads,) float64 in [1, min(d_model, d_head)]. docs/math.md#effective_rank.
        """

        def rank(i: int) -> float:  # inside its bounds, which rounding may miss
            return min(max(self._of.moments[i].norm2 ** 2 / self._of.fourth[i], 1.0), float(self._rank_bound))

        return self._scores(rank)

    def bias_share(self) -> Array:
        """The share of the extended form [x, 1] W_ext [x, 1]^T that comes from the biases.

        Returns (n_heads,) float64 in [0, 1]: 1 - ||W||^2 / ||W_ext||^2, where W_ext has b_Q and b_K as an
        extra row of W_Q and W_K. 0.0 without biases; 1.0 where the weights are zero and the biases are not.
        """
        values = []
        for i, head in enumerate(self._of.heads):
            extra = self._bias_energy(i)
            if head.defect is not None:
                values.append(1.0 if is_zero(head.defect) and extra > 0.0 else math.nan)
            else:
                values.append(
                    extra / (self._of.moments[i].norm2 + extra) if extra < math.inf else self._all_bias(i)
                )
        return arrays.like(values, self.w_q)

    def row_norms(self) -> Array:
        """Norms of the rows of W, the query side: (n_heads, d_model) float64."""
        return self._rescaled(self._of.norms[0])

    def column_norms(self) -> Array:
        """Norms of the columns of W, the key side: (n_heads, d_model) float64."""
        return self._rescaled(self._of.norms[1])

    # ---- spectrum ------------------------------------------------------------------------------------------

    def eigenvalues(self) -> Array:
        """The eigenvalues of W that need not be 0: (n_heads, min(d_model, d_head)) complex128, largest first.

        They are those of the small product C = W_K^T W_Q.
        """
        self._need_square("eigenvalues")
        xp = self._xp
        parts = self._per_head(lambda i: eigenvalues(*self._factors(i)) * self._of.heads[i].scale)
        return self._stacked(parts, self._rank_bound, dtype=xp.complex128)

    def singular_values(self) -> Array:
        """The singular values that need not be 0: (n_heads, min(d_model, d_head)) float64, descending."""
        parts = self._per_head(lambda i: svd(*self._factors(i))[1] * self._of.heads[i].scale)
        return self._stacked(parts, self._rank_bound)

    def singular_vectors(self, count: int = 1) -> tuple[Array, Array]:
        """The leading `count` singular vectors: left (query side) and right (key side), largest first.

        Returns two arrays (n_heads, d_model, count) float64, orthonormal columns; the sign of a pair is free.
        """
        count = self._count(count, self._rank_bound)
        parts = self._per_head(lambda i: svd(*self._factors(i)))
        left = [None if part is None else part[0][:, :count] for part in parts]
        right = [None if part is None else part[2][:, :count] for part in parts]
        return (
            self._stacked(left, (self.d_model, count)),
            self._stacked(right, (int(self.w_k.shape[1]), count)),
        )

    def symmetric_eigenvalues(self) -> Array:
        """Eigenvalues of (W + W^T)/2 that need not be 0: (n_heads, min(d_model, 2 d_head)) float64, ascending."""
        self._need_square("symmetric_eigenvalues")
        parts = self._per_head(
            lambda i: symmetric_part(*self._factors(i), vectors=False)[0] * self._of.heads[i].scale
        )
        return self._stacked(parts, self._symmetric_bound)

    def symmetric_eigenvectors(self, count: int = 1) -> tuple[Array, Array]:
        """The `count` eigenpairs of (W + W^T)/2 that are largest in size, largest first.

        Returns values (n_heads, count), positive where the direction attracts, and orthonormal
        vectors (n_heads, d_model, count); the sign of a vector is free.
        """
        self._need_square("symmetric_eigenvectors")
        xp = self._xp
        count = self._count(count, self._symmetric_bound)

        def leading(i: int) -> tuple[Array, Array]:
            values, vectors = symmetric_part(*self._factors(i), vectors=True)
            order = xp.argsort(xp.abs(values), descending=True)[:count]
            return xp.take(values, order) * self._of.heads[i].scale, xp.take(vectors, order, axis=1)

        parts = self._per_head(leading)
        values = [None if part is None else part[0] for part in parts]
        vectors = [None if part is None else part[1] for part in parts]
        return self._stacked(values, count), self._stacked(vectors, (self.d_model, count))

    def signature(self) -> Signature:
        """Directions in which the symmetric part of W attracts and repels, and the attracting share of energy.

        See `Signature`. A skew W (symmetric part below 1e-13 of its norm) has none: counts 0, energy NaN.
        docs/math.md#signature.
        """
        self._need_square("signature")
        xp = self._xp
        positive, negative, energy = [], [], []
        for i, head in enumerate(self._of.heads):
            if head.defect is not None:
                p, n, e = math.nan, math.nan, math.nan
            else:
                values, _ = symmetric_part(*self._factors(i), vectors=False)
                largest = float(xp.max(xp.abs(values)))
                size = math.sqrt(head.q.energy * head.k.energy)  # what rounding is measured by
                if largest <= _VANISHED * size:
                    p, n, e = 0.0, 0.0, math.nan
                else:
                    values = values / largest
                    least = max(SIGNATURE_TOLERANCE, 1e-15 * size / largest)
                    p = float(xp.sum(arrays.double(values > least)))
                    n = float(xp.sum(arrays.double(values < -least)))
                    up = xp.where(values > 0.0, values, 0.0 * values)
                    e = float(xp.sum(up**2)) / float(xp.sum(values**2))
            positive.append(p)
            negative.append(n)
            energy.append(e)
        return Signature(*(arrays.like(v, self.w_q) for v in (positive, negative, energy)))

    # ---- whole layer, whole matrix -------------------------------------------------------------------------

    def total(self) -> BilinearForm:
        """The whole layer: the sum of W over heads, as a form with one head.

        The factors are put side by side. Query heads that share a key head are added first, so the result is
        (1, d_model, n_kv_heads * d_head) wide. The score of the sum is not the mean of the heads' scores.
        """
        xp = self._xp
        group = self.n_heads // self.n_kv_heads

        def side_by_side(w: Array) -> Array:  # (n_kv_heads, d, d_head) -> (1, d, n_kv_heads * d_head)
            w = xp.permute_dims(w, (0, 2, 1))  # (n_kv_heads, d_head, d): no copy for stored Linear weights
            return xp.permute_dims(xp.reshape(w, (1, w.shape[0] * w.shape[1], w.shape[2])), (0, 2, 1))

        def over_group(w: Array, dtype: Any = self._dtype) -> Array:  # (n_heads, ...) -> (n_kv_heads, ...)
            out = arrays.to(
                w[0::group, ...], dtype
            )  # one head of each group at a time: no wide copy of them all
            for j in range(1, group):
                out = out + arrays.to(w[j::group, ...], dtype)
            return out

        bias: dict[str, Array] = {}
        if self.b_q is not None:
            bias["b_q"] = xp.reshape(over_group(self.b_q), (1, -1))
        if self.b_k is not None:
            bias["b_k"] = xp.reshape(arrays.to(self.b_k, self._dtype), (1, -1))
        total = BilinearForm(
            side_by_side(over_group(self.w_q)), side_by_side(arrays.to(self.w_k, self._dtype)), **bias
        )
        if group > 1 and self._dtype != xp.float64:  # the rounding of these sums would count as directions
            total._exact_q = lambda: side_by_side(over_group(self.w_q, xp.float64))
        return total

    def head(self, head: int) -> BilinearForm:
        """One head alone, as a form with n_heads = n_kv_heads = 1."""
        if not -self.n_heads <= head < self.n_heads:
            raise FormError(f"no head {head}: this layer has heads 0 to {self.n_heads - 1}")
        q = head % self.n_heads
        k = self.kv_head(q)
        return BilinearForm(
            self.w_q[q : q + 1, ...],
            self.w_k[k : k + 1, ...],
            b_q=None if self.b_q is None else self.b_q[q : q + 1, ...],
            b_k=None if self.b_k is None else self.b_k[k : k + 1, ...],
        )

    def groups(self, per_part: int) -> Iterator[BilinearForm]:
        """The same heads in order, as forms of `per_part` key heads each (the last may have fewer).

        Scores need widened copies of the heads they are read from: in parts, only a part of them at a time.
        """
        size = self.n_heads // self.n_kv_heads
        for start in range(0, self.n_kv_heads, max(per_part, 1)):
            keys = slice(start, start + max(per_part, 1))
            queries = slice(keys.start * size, keys.stop * size)
            yield BilinearForm(
                self.w_q[queries, ...],
                self.w_k[keys, ...],
                b_q=None if self.b_q is None else self.b_q[queries, ...],
                b_k=None if self.b_k is None else self.b_k[keys, ...],
            )

    def matrix(self) -> Array:
        """W itself, d x d: (n_heads, d_model, d_model) in the working precision (at least float32).

        Large: 64 MB a head at d_model 4096. `form.head(h).matrix()` gives one.
        """
        xp = self._xp
        return xp.stack(
            [
                arrays.to(self.w_q[h, ...], self._dtype)
                @ xp.matrix_transpose(arrays.to(self.w_k[self.kv_head(h), ...], self._dtype))
                for h in range(self.n_heads)
            ]
        )

    def defects(self) -> list[str | None]:
        """Why a head has no scores (zero, NaN or infinite weights), None where it has: one entry per head."""
        return list(self._of.defects)

    # ---- inside --------------------------------------------------------------------------------------------

    def _need_square(self, score: str) -> None:
        if self.w_q.shape[1] != self.w_k.shape[1]:
            raise FormError(
                f"{score} needs a square W, and this one is {self.w_q.shape[1]} x {self.w_k.shape[1]} "
                "(queries and keys are read from different inputs)"
            )

    def _count(self, count: int, bound: int) -> int:
        if not 1 <= count <= bound:
            raise FormError(f"count is {count}; this form has between 1 and {bound} vectors")
        return count

    @property
    def _rank_bound(self) -> int:
        return min(self.d_model, self.d_head, int(self.w_k.shape[1]))

    @property
    def _symmetric_bound(self) -> int:
        return min(self.d_model, 2 * self.d_head)

    def _resolutions(self) -> Array:
        """(n_heads, 1): the relative rounding error that row and column norms carry."""
        out = []
        for head, moments in zip(self._of.heads, self._of.moments, strict=True):
            spread = head.q.energy * head.k.energy / (self.d_head * moments.norm2) if not head.defect else 1.0
            out.append(8.0 * self._of.eps * max(1.0, spread))
        return arrays.like(out, self.w_q)[:, None]

    def _excesses(self, gamma: float) -> tuple[Array, Array]:
        if not isinstance(gamma, (int, float)) or not abs(gamma) <= 1e6:
            raise FormError(f"gamma is {gamma!r}; it must be a number of standard deviations, at most 1e6")
        if gamma not in self._excesses_at:
            resolutions = self._resolutions()
            rows, columns = (excess(norms, gamma, resolutions) for norms in self._of.norms)
            undefined = arrays.like([math.nan if d else 0.0 for d in self._of.defects], self.w_q)
            self._excesses_at[gamma] = rows + undefined, columns + undefined
        return self._excesses_at[gamma]

    def _rescaled(self, values: Array) -> Array:
        """Values of the rescaled heads, (n_heads, ...), in the size of W; inf beyond float64."""
        scales = arrays.like([head.scale for head in self._of.heads], self.w_q)
        scales = self._xp.reshape(scales, (-1, *[1] * (values.ndim - 1)))
        with arrays.overflow_ignored():
            return self._xp.where(values == 0.0, values, values * scales)

    def _bias_energy(self, i: int) -> float:
        """||W_ext||^2 - ||W||^2 of head i (after rescaling)."""
        if self.b_q is None and self.b_k is None:
            return 0.0
        xp, head = self._xp, self._of.heads[i]
        zero = xp.zeros(self.d_head, dtype=xp.float64, device=device(self.w_q))
        b_q = zero if self.b_q is None else arrays.scaled(arrays.double(self.b_q[i, ...]), -head.q.exponent)
        b_k = (
            zero
            if self.b_k is None
            else arrays.scaled(arrays.double(self.b_k[self.kv_head(i), ...]), -head.k.exponent)
        )
        w_q, w_k = self._factors(i)
        with arrays.overflow_ignored():
            towards_keys = xp.sum((w_q @ b_k) ** 2)  # W_Q b_K: the last column of W_ext
            towards_queries = xp.sum((w_k @ b_q) ** 2)
            return float(towards_keys + towards_queries + xp.sum(b_q * b_k) ** 2)

    def _factors(self, i: int) -> tuple[Array, Array]:
        """W_Q and W_K of head i in float64, after rescaling; of a whole layer, summed in float64."""
        head = self._of.heads[i]
        w_q = self.w_q[i, ...] if self._exact_q is None else self._exact_q()[i, ...]
        w_k = self.w_k[self.kv_head(i), ...]
        return (
            arrays.scaled(arrays.double(w_q), -head.q.exponent),
            arrays.scaled(arrays.double(w_k), -head.k.exponent),
        )

    def _all_bias(self, i: int) -> float:
        """bias_share where the biases' energy is beyond float64: 1, unless they are not finite themselves."""
        xp = self._xp
        given = [b[h, ...] for b, h in ((self.b_q, i), (self.b_k, self.kv_head(i))) if b is not None]
        return 1.0 if all(bool(xp.all(xp.isfinite(b))) for b in given) else math.nan

    def _scores(self, score: Any) -> Array:
        values = [math.nan if defect else score(i) for i, defect in enumerate(self._of.defects)]
        return arrays.like(values, self.w_q)

    def _per_head(self, compute: Callable[[int], Any]) -> list[Any]:
        """`compute` of every head, None where the head has no scores."""
        return [None if defect else compute(i) for i, defect in enumerate(self._of.defects)]

    def _stacked(self, parts: list[Any], shape: int | tuple[int, ...], dtype: Any = None) -> Array:
        """One array (n_heads, *shape); NaN for the heads without scores."""
        xp = self._xp
        nan = xp.full(shape, math.nan, dtype=dtype or xp.float64, device=device(self.w_q))
        return xp.stack([nan if part is None else part for part in parts])

    def __iter__(self) -> Iterator[BilinearForm]:
        return (self.head(h) for h in range(self.n_heads))

    def __len__(self) -> int:
        return self.n_heads


def _same_kind(**given: Array) -> None:
    try:
        array_namespace(*given.values())
    except TypeError:
        kinds = ", ".join(f"{name}: {type(x).__module__.split('.')[0]}" for name, x in given.items())
        raise FormError(f"the arrays are of different kinds ({kinds}); convert one of them") from None
    if len({str(device(x)) for x in given.values()}) > 1:
        places = ", ".join(f"{name}: {device(x)}" for name, x in given.items())
        raise FormError(f"the arrays are on different devices ({places}); move one of them")


def _checked_bias(name: str, bias: Array | None, weight: Array) -> Array | None:
    if bias is None:
        return None
    expected = (int(weight.shape[0]), int(weight.shape[2]))
    bias = arrays.checked(name, bias, 2, str(expected))
    if tuple(bias.shape) != expected:
        raise FormError(f"{name} has shape {tuple(bias.shape)}; expected {expected}: heads, d_head")
    _same_kind(weight=weight, bias=bias)
    return bias
