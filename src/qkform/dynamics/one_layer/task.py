"""The task: find the few relevant tokens among many distractors and name their class. Its constants, exactly.

Every class has tokens of its own, and there are tokens common to all classes. A sequence of class y holds `relevant`
tokens of that class and `distractors` common ones; a query token looks at them (it is not a key itself) and the model
names y. Permuting classes, the tokens of a class, or the common tokens changes nothing, so gradient flow from a
symmetric start stays symmetric, and two numbers say where it is (exact; docs/theory.md):

* the gap a: by how much the score of a relevant token exceeds that of a distractor;
* the gain b: by how much attended relevant tokens raise the right logit above every other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from qkform.dynamics.one_layer.given import number, whole
from qkform.dynamics.one_layer.needs import scipy
from qkform.errors import DynamicsError


@dataclass(frozen=True)
class Task:
    """Sizes of the task. `common` may be math.inf: then no gap is ever carried by distractors' own scores.

    `queries_per_class` None: one query token serves every class; a number: each class has that many of its own.
    `scale` multiplies q·k; None is vocabulary^-1/2. Raises DynamicsError for sizes that make no task.
    """

    classes: int = 8
    per_class: int = 2
    common: float = 16
    relevant: int = 1
    distractors: int = 15
    queries_per_class: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("classes", 2), ("per_class", 1), ("relevant", 1), ("distractors", 1)):
            self._set(name, whole(name, getattr(self, name), least))
        if self.queries_per_class is not None:
            self._set("queries_per_class", whole("queries_per_class", self.queries_per_class, 1))
        common: Any = self.common
        if not (isinstance(common, Real) and common == math.inf):
            self._set("common", whole("common", self.common, 1, " or inf"))
        if self.scale is None and self.common == math.inf:
            raise DynamicsError(
                "scale is vocabulary^-1/2 unless given, and common=inf has a vocabulary without end; "
                "give one: scale=1.0"
            )
        if self.scale is not None:
            says = "it multiplies the scores and is above 0, from 1e-100 to 1e100"
            self._set("scale", number("scale", self.scale, says, lambda s: 1e-100 <= s <= 1e100))

    def _set(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)  # as float or int, whatever kind of number was given

    @property
    def class_tokens(self) -> int:
        return self.classes * self.per_class

    @property
    def query_tokens(self) -> int:
        return 1 if self.queries_per_class is None else self.classes * self.queries_per_class

    @property
    def vocabulary(self) -> float:
        """Class tokens, common tokens and query tokens together."""
        return self.class_tokens + self.common + self.query_tokens

    @property
    def score_scale(self) -> float:
        """s, which multiplies q·k."""
        return float(self.vocabulary**-0.5 if self.scale is None else self.scale)

    @property
    def odds(self) -> float:
        """c, the odds of relevant against distracting tokens under uniform attention."""
        return self.relevant / self.distractors

    @property
    def k_qk(self) -> float:
        """k_QK, the motion of the gap per unit of pull: s² / ‖D_QK‖², D_QK the ray of unit gap (exact).

        Without class-specific queries s² (1/(MB) + 1/C), with Q of them s² (1/B + 1/C) / (M Q). The printed constant
        of arXiv 2608.06776's repository is the latter at Q = B, C = inf, s = 1.
        """
        return self.score_scale**2 / self._ray_energy

    @property
    def k_ov(self) -> float:
        """k_OV, the motion of the gain per unit of pull: 1 / ‖D_OV‖² = 1 / (B (M-1)) (exact)."""
        return 1.0 / (self.per_class * (self.classes - 1))

    @property
    def sigma_qk(self) -> float:
        """Singular value of W_QK at unit gap.

        Exact with one query for all classes (rank 1). With class-specific ones the M singular values differ by the
        part of the common tokens, and this is their root mean square; they are equal for `common=inf`.
        """
        modes = 1 if self.queries_per_class is None else self.classes
        return math.sqrt(self._ray_energy / modes) / self.score_scale

    @property
    def sigma_ov(self) -> float:
        """Singular value of W_OV at unit gain, the same M-1 times: sqrt(B) (exact)."""
        return math.sqrt(self.per_class)

    @property
    def flat(self) -> bool:
        """Whether the ray of W_QK has one singular value alone: what makes factorized attention exact."""
        return self.queries_per_class is None or self.common == math.inf

    @property
    def _ray_energy(self) -> float:
        """‖D_QK‖²: one query's row times the number of rows."""
        own = self.class_tokens if self.queries_per_class is None else self.per_class
        return self.query_tokens / (1.0 / own + 1.0 / self.common)

    def sharpness(self, gap: Any) -> Any:
        """Attention on the relevant tokens, (0, 1): c e^a / (1 + c e^a) (exact)."""
        return scipy("special").expit(gap + math.log(self.odds))

    def blur(self, gap: Any) -> Any:
        """1 - sharpness, without the rounding of that difference."""
        return scipy("special").expit(-(gap + math.log(self.odds)))

    def gap_for(self, sharpness: float) -> float:
        """The gap at which attention has this sharpness."""
        return float(scipy("special").logit(sharpness)) - math.log(self.odds)
