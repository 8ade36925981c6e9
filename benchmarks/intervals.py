"""The figures of docs/comparing.md on intervals and stars, simulated: python benchmarks/intervals.py

* how often `pairing.interval` of n differences holds their true mean, for normal and for skewed (exponential) ones;
* how often arms that are alike would have a star where the baseline's own last loss is the mark: 12 seeds, held-out
  losses 3 + 3 exp(-t / r) + b t^3 that turn up at the end, r = exp(.4 z) / 5 and b = exp(-.8 z), z normal: the faster
  a run, the more it turns up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qkform.training import pairing
from qkform.training.reach import Curve

TIMES = 4000
STEPS = np.linspace(0, 1, 41)


def held(n: int, draw: Callable[[tuple[int, ...]], np.ndarray]) -> float:
    """Share of TIMES intervals of n differences of mean 0 that hold 0."""
    found = [pairing.interval(list(differences)) for differences in draw((TIMES, n))]
    return sum(one is not None and one[0] <= 0 <= one[1] for one in found) / TIMES


def curve(rng: np.random.Generator) -> Curve:
    z = rng.standard_normal()
    losses = 3 + 3 * np.exp(-STEPS / (0.2 * np.exp(0.4 * z))) + np.exp(-0.8 * z) * STEPS**3
    lines = [
        {
            "step": 1000 * float(t),
            "tokens": None,
            "seconds": None,
            "loss": None,
            "held_out": float(loss),
            "layers": [],
        }
        for t, loss in zip(STEPS, losses, strict=True)
    ]
    return Curve.of(lines)


def stars(seeds: int, comparisons: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """(comparisons with a mean, with p <= .05, of these with a faster arm), as if such rows had a p."""
    means = starred = faster = 0
    for _ in range(comparisons):
        differences = []
        for _ in range(seeds):
            arm, baseline = curve(rng), curve(rng)
            mark = baseline.final_smoothed
            assert mark is not None
            reached, own = arm.first_reach(mark), baseline.first_reach(mark)
            if reached is not None and own is not None:
                differences.append(float(reached["step"] or 0) - float(own["step"] or 0))
        if len(differences) == seeds:
            means += 1
            p = pairing.sign_flip_p(differences)
            if p is not None and p <= 0.05:
                starred += 1
                faster += sum(differences) < 0
    return means, starred, faster


def main() -> None:
    rng = np.random.default_rng(0)
    draws = {"normal": rng.standard_normal, "exponential": lambda size: rng.exponential(size=size) - 1}
    for name, draw in draws.items():
        print(name, *(f"n={n}: {100 * held(n, draw):.0f} %" for n in (3, 4, 5, 6, 7, 8, 10)), sep="  ")
    comparisons = 474
    means, starred, faster = stars(12, comparisons, rng)
    print(
        f"arms that are alike, 12 seeds, {comparisons} comparisons: {means} have a mean, {starred} "
        f"({100 * starred / comparisons:.1f} %) would have a star, {faster} of these for the arm"
    )


if __name__ == "__main__":
    main()
