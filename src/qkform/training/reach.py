"""When a run first reaches a loss: its held-out loss smoothed, the crossing between two tracked steps, or never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from qkform.comparisons import CLOCKS, MEASURES

WINDOW = 3  # tracked steps
LARGEST = 1e100  # of a value that is compared
# Below the unigram entropy down to which a model knows frequencies and nothing of context: nats, and of the entropy,
# whichever is less. Text in 512 tokens has 5.6 nats; what has a tenth of that is left behind sooner.
PLATEAU, PLATEAU_SHARE = 0.35, 1 / 16


@dataclass(frozen=True)
class Curve:
    """What a record says at each tracked step, `values[name][i]` at tracked step i, None where it is not defined.

    `smoothed` is the held-out loss after `smoothed_by`, None where there was none. Names: `MEASURES`, `CLOCKS`.
    """

    values: Mapping[str, Sequence[float | None]]
    smoothed: Sequence[float | None]

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, Any]], window: int = WINDOW) -> Curve:
        """The curve of the step lines of a record; seconds count from step 0, without the setting up before it."""
        values = {name: [_number(line.get(name)) for line in steps] for name in (*CLOCKS, "loss", "held_out")}
        if values["step"][:1] == [0] and (before := values["seconds"][0]) is not None:
            values["seconds"] = [None if each is None else each - before for each in values["seconds"]]
        for name in MEASURES[2:]:
            values[name] = [_over_layers(line, name) for line in steps]
        return cls(values, smoothed_by(values["held_out"], window))

    def __len__(self) -> int:
        return len(self.values["step"])

    def final(self, name: str) -> float | None:
        """The value at the last tracked step."""
        return self.values[name][-1] if len(self) else None

    @property
    def final_smoothed(self) -> float | None:
        """The last smoothed held-out loss; None where there is none."""
        return next((value for value in reversed(self.smoothed) if value is not None), None)

    def first_reach(self, loss: float) -> dict[str, float | None] | None:
        """Every value when the smoothed held-out loss first is at most `loss`, None for never.

        Between the last tracked step above and the first one that is not, all go linearly.
        """
        places = self._places(loss)
        return None if places is None else self._between(*places, loss)

    def around(self, loss: float) -> list[tuple[float, float]]:
        """(step, smoothed loss) of the two tracked steps between which `loss` is first reached; empty where there are
        not two, or never.
        """
        above, below = self._places(loss) or (None, 0)
        if above is None:
            return []
        steps, smoothed = self.values["step"], self.smoothed
        found = [(steps[i], smoothed[i]) for i in (above, below)]
        return [(step, value) for step, value in found if step is not None and value is not None]

    def _places(self, loss: float) -> tuple[int | None, int] | None:
        """The last tracked step above the loss and the first one that is not; None for never."""
        above: int | None = None
        for i, value in enumerate(self.smoothed):
            if value is None:
                continue
            if value <= loss:
                return above, i
            above = i
        return None

    def _between(self, above: int | None, below: int, loss: float) -> dict[str, float | None]:
        if above is None:
            return {name: column[below] for name, column in self.values.items()}
        high, low = self.smoothed[above], self.smoothed[below]
        assert high is not None
        assert low is not None
        share = (high - loss) / (high - low)
        return {name: _mixed(column[above], column[below], share) for name, column in self.values.items()}


def on_plateau(lowest: float, unigram: float) -> bool:
    """Whether a run whose lowest held-out loss is `lowest` never left the plateau at the unigram entropy, both nats."""
    return lowest > unigram - min(PLATEAU, PLATEAU_SHARE * unigram)


def smoothed_by(values: Sequence[float | None], window: int) -> list[float | None]:
    """The running median over `window` values, centred, of those that are there; over fewer towards both ends.

    A median, since one bad step must not move the time at which a loss is reached; centred, since what falls steadily
    stays as it is. So the window shrinks on both sides alike, and the first and last value are those recorded: a run
    neither reaches at its start a loss that it had not, nor fails to reach the one at which it ended. None stays None
    and takes no part.
    """
    known = [(i, value) for i, value in enumerate(values) if value is not None]
    out: list[float | None] = [None] * len(values)
    for place, (i, _) in enumerate(known):
        half = min(window // 2, place, len(known) - 1 - place)
        out[i] = median(value for _, value in known[place - half : place + half + 1])
    return out


def published_speed_up(losses: Sequence[float | None], target: float) -> float | None:
    """1 - i/n: i the number of logged training losses before the first one below `target`, n that of all; None: never.

    The rule of the released notebook of arXiv 2502.10927 (table-symmetric-initialization.ipynb), with the baseline's
    last logged loss as target. There an arm that never gets below counts as 100 %, since the first of no places is 0.
    """
    logged = [value for value in losses if value is not None]
    for i, value in enumerate(logged):
        if value < target:
            return 1 - i / len(logged)
    return None


def _over_layers(line: Mapping[str, Any], name: str) -> float | None:
    found = [value for row in line["layers"] if (value := _number(row.get(name))) is not None]
    return median(found) if found else None


def _mixed(a: float | None, b: float | None, share: float) -> float | None:
    return None if a is None or b is None else a + share * (b - a)


def _number(value: Any) -> float | None:
    """A number that can be computed with: other writers' records may hold NaN, 400 digits, or what has no square."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < LARGEST else None  # False for NaN, too
