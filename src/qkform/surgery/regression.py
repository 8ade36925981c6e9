"""`Ridge`: regression of several targets on features that come in parts, with a penalty chosen by leaving one out."""

from __future__ import annotations

import torch
from torch import Tensor

# Strengths of the penalty, in parts of each feature's own sum of squares: a loud feature penalises no other.
STRENGTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


class Ridge:
    """y = z b without a constant: sum (y - z b)^2 + strength sum_k (sum z_k^2) b_k^2, per target.

    Every part of the data is given twice: `add` sums what the solutions need, `leave_out` then predicts every target
    from all the others, which takes no other solution: the residual over 1 - h, h = z (Z^T Z + penalty)^-1 z^T.
    Nothing grows with the number of rows.

    >>> ridge.add(z, y); ridge.leave_out(z, y); b, r2 = ridge.solve()    # doctest: +SKIP
    """

    def __init__(self, features: int, targets: int, device: torch.device | str | None = None) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.rows = 0
        self._zz, self._zy = zeros(features, features), zeros(features, targets)
        self._y, self._yy = zeros(targets), zeros(targets)
        self._missed = zeros(len(STRENGTHS), targets)  # sum of squares of what leaving one out misses
        self._solved: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, z: Tensor, y: Tensor) -> None:
        """Rows of features (T, features) and targets (T, targets), float64."""
        self._zz += z.mT @ z
        self._zy += z.mT @ y
        self._y += y.sum(0)
        self._yy += y.square().sum(0)
        self.rows += len(z)

    def leave_out(self, z: Tensor, y: Tensor) -> None:
        """The same rows once more, when all have been added."""
        values, basis, moved = self._eigen()
        z = z @ basis  # (T, features)
        for i, strength in enumerate(STRENGTHS):
            weighed = z / (values + strength)
            h = (weighed * z).sum(1, keepdim=True)
            self._missed[i] += ((y - weighed @ moved) / (1 - h).clamp_min(1e-9)).square().sum(0)

    def solve(self) -> tuple[Tensor, list[float | None]]:
        """b (features, targets), with the strength that misses least for each target, and its R^2 when left out.

        R^2 is 1 - sum of squares missed / that around the mean: below 0 where the mean predicts better. None for a
        target that does not vary.
        """
        values, basis, moved = self._eigen()
        missed, best = self._missed.min(0)
        strengths = values.new_tensor(STRENGTHS)[best]  # (targets,)
        b = basis @ (moved / (values[:, None] + strengths))
        around = self._yy - self._y.square() / max(self.rows, 1)
        varies = around > 1e-9 * self._yy
        r2 = [
            float(1 - miss / whole) if vary else None
            for miss, whole, vary in zip(missed, around, varies, strict=True)
        ]
        return b, r2

    def _eigen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of Z^T Z in features of length 1: values, vectors (features, features) with those lengths, Z^T y in them."""
        if self._solved is None:
            sizes = self._zz.diagonal().sqrt()
            inverse = torch.where(sizes > 0, 1 / sizes.clamp_min(torch.finfo(sizes.dtype).tiny), 0.0)
            values, vectors = torch.linalg.eigh(inverse[:, None] * self._zz * inverse)
            basis = inverse[:, None] * vectors
            self._solved = values.clamp_min(0.0), basis, basis.mT @ self._zy
        return self._solved
