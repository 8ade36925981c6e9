"""The figures of docs/math.md on random weights, simulated: python benchmarks/null.py

* how often |z| of the symmetry exceeds 2 and 3, by effective rank (large d, flat spectrum: d k s is a difference of two
  chi-square variables with k (k + 1) / 2 and k (k - 1) / 2 degrees of freedom);
* the standard deviation of directionality of Gaussian weights, layers and heads.
"""

from __future__ import annotations

import numpy as np

import qkform as qk


def tails(rank: int, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    symmetric = rng.chisquare(rank * (rank + 1) / 2, draws)
    skew = rng.chisquare(rank * (rank - 1) / 2, draws) if rank > 1 else np.zeros(draws)
    z = np.abs(symmetric - skew - rank) / (np.sqrt(2.0) * rank)
    return float((z > 2).mean()), float((z > 3).mean())


def directionality(d: int, d_head: int, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    """Standard deviations of (layer, head)."""
    layers, heads = [], []
    for _ in range(draws):
        shape = (d // d_head, d, d_head)
        form = qk.BilinearForm(*(rng.standard_normal(shape, dtype=np.float32) for _ in range(2)))
        layers.append(form.total().directionality())
        heads.append(form.directionality())
    return float(np.std(np.concatenate(layers))), float(np.std(np.concatenate(heads)))


def main() -> None:
    rng = np.random.default_rng(0)
    for rank in (1, 2, 4, 5, 8, 32, 64):
        above_2, above_3 = tails(rank, 1_000_000, rng)
        print(f"effective rank {rank:3}: P(|z| > 2) {above_2:.2%}, P(|z| > 3) {above_3:.2%}")
    for d, d_head, draws in ((64, 8, 400), (96, 32, 400), (384, 32, 150), (768, 64, 100)):
        layer, head = directionality(d, d_head, draws, rng)
        print(f"d {d:3}, heads of {d_head}: std of directionality {layer:.2f} (layers), {head:.2f} (heads)")


if __name__ == "__main__":
    main()
