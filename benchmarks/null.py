"""The figures of docs/math.md on random weights, simulated: python benchmarks/null.py

* how often |z| of the symmetry exceeds 2 and 3, by effective rank (large d, flat spectrum: d k s is a difference of two
  chi-square variables with k (k + 1) / 2 and k (k - 1) / 2 degrees of freedom);
* how far the median of 24 layers of rank 1 (d = 64) lies below 1/d, in standard deviations of such a median as if its
  scores were normal;
* the standard deviation of directionality of Gaussian weights, layers and heads;
* z of the change of symmetry when noise of 3 % is put on real heads, and a random low-rank change on W_Q.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

import qkform as qk
from qkform.form.change import change
from qkform.form.null import median_spread, null_variance


def tails(rank: int, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    symmetric = rng.chisquare(rank * (rank + 1) / 2, draws)
    skew = rng.chisquare(rank * (rank - 1) / 2, draws) if rank > 1 else np.zeros(draws)
    z = np.abs(symmetric - skew - rank) / (np.sqrt(2.0) * rank)
    return float((z > 2).mean()), float((z > 3).mean())


def median_shift(layers: int, d: int, draws: int, rng: np.random.Generator) -> float:
    """Of forms q k^T: their symmetry is the squared cosine of q and k."""
    q, k = rng.standard_normal((2, draws, layers, d))
    scores = (q * k).sum(-1) ** 2 / ((q * q).sum(-1) * (k * k).sum(-1))
    sd = np.sqrt(null_variance(d, 1.0)) * median_spread(layers)
    return float((np.median(scores, axis=1).mean() - 1 / d) / sd)


def directionality(d: int, d_head: int, draws: int, rng: np.random.Generator) -> tuple[float, float]:
    """Standard deviations of (layer, head)."""
    layers, heads = [], []
    for _ in range(draws):
        shape = (d // d_head, d, d_head)
        form = qk.BilinearForm(*(rng.standard_normal(shape, dtype=np.float32) for _ in range(2)))
        layers.append(form.total().directionality())
        heads.append(form.directionality())
    return float(np.std(np.concatenate(layers))), float(np.std(np.concatenate(heads)))


def noise_on_real_heads(source: str, rng: np.random.Generator) -> np.ndarray:
    """z of every head of the first four layers, noise of 3 % on W_Q alone and on both, twice each."""
    found = []
    for layer in islice(qk.layers(source), 4):
        form = layer.form
        for on_k in (0.0, 0.03) * 2:
            w_q, w_k = (
                w + (size * w.std() * rng.standard_normal(w.shape)).astype(np.float32)
                for w, size in ((form.w_q, 0.03), (form.w_k, on_k))
            )
            found.append(change(form, qk.BilinearForm(w_q, w_k)).z())
    return np.concatenate(found)


def low_rank(rng: np.random.Generator, *, few: bool) -> np.ndarray:
    """z of random rank-4 changes of W_Q of a half symmetric head; `few`: few directions carry it."""
    q = rng.standard_normal((128, 16))
    k = 0.7 * q + 0.7 * rng.standard_normal(q.shape)
    scale = 1.0 / np.arange(1, 17) if few else np.ones(16)
    q, k = q * scale, k * scale
    moves = 0.1 * np.abs(q).mean() * rng.standard_normal((400, 128, 4)) @ rng.standard_normal((400, 4, 16))
    before = qk.BilinearForm(np.stack([q] * 400), np.stack([k] * 400))
    return change(before, qk.BilinearForm(q + moves, before.w_k)).z()


def main() -> None:
    rng = np.random.default_rng(0)
    for rank in (1, 2, 4, 5, 8, 32, 64):
        above_2, above_3 = tails(rank, 1_000_000, rng)
        print(f"effective rank {rank:3}: P(|z| > 2) {above_2:.2%}, P(|z| > 3) {above_3:.2%}")
    print(
        f"median of 24 layers of rank 1, d 64: {median_shift(24, 64, 20_000, rng):+.2f} standard deviations from 1/d"
    )
    for d, d_head, draws in ((64, 8, 400), (96, 32, 400), (384, 32, 150), (768, 64, 100)):
        layer, head = directionality(d, d_head, draws, rng)
        print(f"d {d:3}, heads of {d_head}: std of directionality {layer:.2f} (layers), {head:.2f} (heads)")
    for source in ("sample:minilm", "sample:smollm2"):
        z = noise_on_real_heads(source, rng)
        print(
            f"{source}: noise of 3 %: z has std {z.std():.2f}, {(np.abs(z) > 2).mean():.0%} outside the band"
        )
    for few in (False, True):
        z = low_rank(rng, few=few)
        print(f"rank-4 change of W_Q, {'few' if few else 'all'} directions: z has std {z.std():.2f}")


if __name__ == "__main__":
    main()
