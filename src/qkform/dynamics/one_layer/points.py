"""What a question to the flow is answered with: an end point, a simulation, a course in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from qkform.dynamics.one_layer.needs import scipy
from qkform.dynamics.one_layer.task import Task

Array = Any  # numpy, float64


@dataclass(frozen=True)
class EndPoint:
    """Where the flow is when its loss is reached, and how sharp attention is there."""

    gap: float  # a, by how much a relevant token's score exceeds a distractor's
    gain: float  # b, by how much attended relevant tokens raise the right logit above the others
    sharpness: float  # (0, 1), attention on the relevant tokens
    entropy: float  # nats, of the attention over relevant + distractors keys
    effective_tokens: float  # exp(entropy)
    largest: float  # (0, 1), the largest single weight
    gini: float  # [0, 1), sharpness above that of uniform attention


@dataclass(frozen=True)
class Simulation:
    """The same, measured on the full matrices, with how far they strayed from what the closed form assumes."""

    gap: float
    gain: float
    sharpness: float
    entropy: float
    loss: float
    off_ray_qk: float  # largest share of ‖W_QK‖ that is not along its ray, over the run
    off_ray_ov: float
    line_drift: float  # largest |ΔPhi_QK - slope ΔPhi_OV| over the run, relative to the largest |ΔPhi_QK|; NaN: no line
    balance_drift: (
        float  # largest entry of U^T U/e1 - V^T V/e2 that changed, relative to U^T U/e1 + V^T V/e2; 0: none
    )
    unlike: float  # largest difference of sharpness between two sequences, at the end
    evaluations: int
    times: Array  # (points,) in 1 / (learning rate of the output circuit)
    gaps: Array  # (points,)
    gains: Array  # (points,)


@dataclass(frozen=True)
class Course:
    """Gap, gain, sharpness and loss over time; `time` is in 1 / (learning rate of the output circuit)."""

    time: Array  # (points,)
    gap: Array
    gain: Array
    sharpness: Array
    loss: Array


def end_point(task: Task, gap: float, gain: float) -> EndPoint:
    """The measures of attention that has two heights: one on relevant tokens, one on distractors (exact)."""
    m, n = task.relevant, task.distractors
    sharp, blur = float(task.sharpness(gap)), float(task.blur(gap))
    xlogy = scipy("special").xlogy
    entropy = float(-xlogy(sharp, sharp / m) - xlogy(blur, blur / n))
    return EndPoint(
        gap=gap,
        gain=gain,
        sharpness=sharp,
        entropy=entropy,
        effective_tokens=float(np.exp(entropy)),
        largest=max(sharp / m, blur / n),
        gini=abs(sharp - m / (m + n)),
    )
