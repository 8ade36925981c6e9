"""The moments of W that the scores are made of, head by head: from the factors or, where cheaper, from W.

||W||^2     = sum(G_Q * G_K)        G_Q = W_Q^T W_Q,  G_K = W_K^T W_K
tr(W W)     = sum(C * C^T)          C   = W_K^T W_Q
row norms^2 = diag(W_Q G_K W_Q^T)   column norms^2 = diag(W_K G_Q W_K^T)
||W W^T||^2 = tr((G_Q G_K)^2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from array_api_compat import array_namespace, device

from qkform.form import arrays
from qkform.form.arrays import Array

STRIP = 64  # rows of W at a time
TILE = 128  # side of the pieces of W that are held against their mirror image
_CANCELS = 1e-4  # ||W||^2 below this share of ||W_Q||^2 ||W_K||^2: the sums of the Grams lose digits
_SAFE = (1e-8, 1e16)  # squared norms outside are rescaled by a power of two first


@dataclass(frozen=True)
class Factor:
    """W_Q or W_K of one head, widened and rescaled: the stored weight is w * 2**exponent."""

    w: Array  # (d, d_head)
    gram: Array  # (d_head, d_head) float64; None on the dense route
    exponent: int
    defect: str | None  # why it has no scores
    energy: float = 0.0  # ||w||^2


@dataclass(frozen=True)
class Head:
    """One head: W = q k^T * 2**exponent."""

    q: Factor
    k: Factor
    vanished: bool = False  # W_Q and W_K are not zero, and W = W_Q W_K^T is, to rounding
    dense: Array = None  # q k^T on the dense route

    @property
    def defect(self) -> str | None:
        """Why the head has no scores. Not finite outweighs zero; the query side is named first."""
        found = [f.defect for f in (self.q, self.k) if f.defect is not None]
        return min(found, key=is_zero, default="W_Q W_K^T is all zero" if self.vanished else None)

    @property
    def scale(self) -> float:
        exponent = self.q.exponent + self.k.exponent
        return math.ldexp(1.0, exponent) if exponent < 1024 else math.inf


@dataclass(frozen=True)
class Moments:
    """Second moments of one head's W (after rescaling)."""

    norm2: float
    trace2: float
    energies: tuple[Array, Array] | None = (
        None  # squared row and column norms, where one pass over W gave them
    )


UNDEFINED = Moments(math.nan, math.nan)


def is_zero(defect: str | None) -> bool:
    return defect is not None and defect.endswith("all zero")


class HeadMoments:
    """Moments of every head of w_q (n_heads, d, d_head) and w_k (n_kv_heads, d, d_head), each computed once."""

    def __init__(self, w_q: Array, w_k: Array) -> None:
        self.w_q, self.w_k = w_q, w_k
        self.xp = array_namespace(w_q, w_k)
        self.dtype = arrays.working_dtype(w_q, w_k)
        self.eps = float(self.xp.finfo(self.dtype).eps)

    @cached_property
    def is_dense(self) -> bool:
        """Whether forming W costs fewer operations than the products of the factors, all moments counted."""
        d_q, d_k, k = float(self.w_q.shape[1]), float(self.w_k.shape[1]), float(self.w_q.shape[2])
        factors = 4.0 * (d_q + d_k) * k**2 + 2.0 * k**3
        dense = 2.0 * d_q * d_k * k + d_q**2 * d_k + 32.0 * d_q * d_k  # the last: passes over memory
        return dense < factors

    @cached_property
    def heads(self) -> list[Head]:
        keys = [self._factor(self.w_k[g, ...], "W_K") for g in range(int(self.w_k.shape[0]))]
        n = int(self.w_q.shape[0])
        group = n // int(self.w_k.shape[0])
        return [self._head(self._factor(self.w_q[h, ...], "W_Q"), keys[h // group]) for h in range(n)]

    def _head(self, q: Factor, k: Factor) -> Head:
        """The head of two factors; where their products would cancel, of better conditioned ones."""
        head = Head(q, k)
        if head.defect is not None:
            return head
        if self.is_dense:
            dense = q.w @ k.w.T  # (d_q, d_k)
            return Head(q, k, self._is_rounding(dense, q, k), dense)
        if float(self.xp.sum(q.gram * k.gram)) > _CANCELS * q.energy * k.energy:
            return head
        return self._reconditioned(q, k)

    def _reconditioned(self, q: Factor, k: Factor) -> Head:
        """The same W with orthonormal keys: W = (U_Q M) U_K^T with M = R_Q R_K^T, in float64.

        W_Q A and W_K A^-T give the same W for every A, but Grams of an ill-conditioned A cancel.
        """
        xp = self.xp
        basis_q, r_q = xp.linalg.qr(arrays.double(q.w))
        basis_k, r_k = xp.linalg.qr(arrays.double(k.w))
        middle = r_q @ r_k.T
        w_q = basis_q @ middle  # (d_q, rank)
        gram_k = basis_k.T @ basis_k
        return Head(
            Factor(w_q, w_q.T @ w_q, q.exponent, None, arrays.energy(w_q)),
            Factor(basis_k, gram_k, k.exponent, None, float(basis_k.shape[1])),
            self._is_rounding(middle, q, k),
        )

    def _is_rounding(self, product: Array, q: Factor, k: Factor) -> bool:
        """Whether W is no larger than the rounding errors of the weights it is made of."""
        return arrays.energy(product) <= (8.0 * self.eps) ** 2 * q.energy * k.energy

    @cached_property
    def defects(self) -> list[str | None]:
        return [head.defect for head in self.heads]

    def _factor(self, w: Array, name: str) -> Factor:
        """A factor in the working precision, times 2**-exponent where its size would over- or underflow."""
        xp = self.xp
        w = arrays.to(w, self.dtype)
        gram, energy = self._gram(w)
        if _SAFE[0] < energy < _SAFE[1]:
            return Factor(w, gram, 0, None, energy)
        largest = float(xp.max(xp.abs(w)))
        if not math.isfinite(largest):
            return Factor(w, None, 0, f"{name} holds NaN or infinity")
        if largest == 0.0:
            return Factor(w, None, 0, f"{name} is all zero")
        exponent = math.frexp(largest)[1]
        w = arrays.scaled(w, -exponent)
        gram, energy = self._gram(w)
        return Factor(w, gram, exponent, None, energy)

    def _gram(self, w: Array) -> tuple[Array | None, float]:
        """w^T w in float64 where it is needed, and ||w||^2."""
        xp = self.xp
        with arrays.overflow_ignored():
            if self.is_dense:
                return None, arrays.energy(w)
            gram = arrays.double(w.T @ w)
            return gram, float(xp.linalg.trace(gram))

    @cached_property
    def moments(self) -> list[Moments]:
        of_head = self._dense_moments if self.is_dense else self._factor_moments
        return [
            UNDEFINED if defect else of_head(head)
            for head, defect in zip(self.heads, self.defects, strict=True)
        ]

    def _factor_moments(self, head: Head) -> Moments:
        xp = self.xp
        norm2 = float(xp.sum(head.q.gram * head.k.gram))
        if head.q.w.shape[0] != head.k.w.shape[0]:
            return Moments(norm2, math.nan)
        small = arrays.double(head.k.w.T @ head.q.w)
        return Moments(norm2, float(xp.sum(small * small.T)))

    def _dense_moments(self, head: Head) -> Moments:
        """Everything that one pass over W gives, in strips and tiles that stay in the cache."""
        xp = self.xp
        w = head.dense
        d_q, d_k = w.shape
        right = xp.ones(d_k, dtype=xp.float64, device=device(w))
        rows2, columns2 = [], 0.0 * right
        for i in range(0, d_q, STRIP):
            squares = arrays.double(w[i : i + STRIP, :]) ** 2
            rows2.append(squares @ right)  # sums as products with ones: twice as fast as sum over an axis
            columns2 = columns2 + xp.ones(squares.shape[0], dtype=xp.float64, device=device(w)) @ squares
        energies = (xp.concat(rows2), columns2)
        trace2 = self._trace_of_square(w) if d_q == d_k else math.nan
        return Moments(float(xp.sum(energies[0])), trace2, energies)

    def _trace_of_square(self, w: Array) -> float:
        """tr(W W) = sum(W * W^T), tile by tile with its mirror image: a transposed pass would miss every cache."""
        xp, total = self.xp, 0.0
        for i in range(0, w.shape[0], TILE):
            for j in range(i, w.shape[0], TILE):
                tile = w[i : i + TILE, j : j + TILE] * w[j : j + TILE, i : i + TILE].T
                total += float(xp.sum(tile, dtype=xp.float64)) * (1.0 if i == j else 2.0)
        return total

    @cached_property
    def fourth(self) -> list[float]:
        """||W W^T||_F^2 per head (after rescaling)."""
        xp = self.xp
        out = []
        for head, moments in zip(self.heads, self.moments, strict=True):
            if moments is UNDEFINED:
                out.append(math.nan)
            elif head.dense is not None:
                w, step, total = head.dense, 4 * TILE, 0.0
                for i in range(0, w.shape[0], step):  # W W^T is symmetric: its upper tiles are enough
                    strip = w[i : i + step, :] @ w[i:, :].T  # (step, d - i)
                    own = float(xp.sum(arrays.double(strip[:, :step]) ** 2))
                    total += own + 2.0 * float(xp.sum(arrays.double(strip[:, step:]) ** 2))
                out.append(total)
            else:
                p = head.q.gram @ head.k.gram
                out.append(float(xp.sum(p * p.T)))
        return out

    @cached_property
    def norms(self) -> tuple[Array, Array]:
        """Row norms (n_heads, d_q) and column norms (n_heads, d_k) after rescaling, float64."""
        xp = self.xp
        rows, columns = [], []
        for head, moments in zip(self.heads, self.moments, strict=True):
            if moments is UNDEFINED:
                blank = 0.0 if is_zero(head.defect) else math.nan
                rows2, columns2 = (
                    xp.full(f.w.shape[0], blank, dtype=xp.float64, device=device(self.w_q))
                    for f in (head.q, head.k)
                )
            elif moments.energies is not None:
                rows2, columns2 = moments.energies
            else:
                rows2 = arrays.quadratic_rows(head.q.w, head.k.gram)
                columns2 = arrays.quadratic_rows(head.k.w, head.q.gram)
            rows.append(rows2)
            columns.append(columns2)
        stacked = (xp.stack(rows), xp.stack(columns))
        return tuple(xp.sqrt(xp.where(x < 0.0, 0.0 * x, x)) for x in stacked)
