"""Models that belong together: one run at several training steps, one model at several relative distances."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkform.records import ModelScores, ScoreTable
from qkform.report.rows import distinct

Kind = Literal["step", "offset"]
UNITS = {"step": "step", "offset": "distance"}  # what a person reads for the kind

_ASSUMED = ("gamma", "biases", "norm_gains", "qk_norm")  # conventions that make scores incomparable
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Entry:
    """What has one section of the page: a model, or a series of two or more that differ in `kind` alone.

    A series is in order of its values. Two models with the same value both stay, in the order they came.
    """

    name: str
    kind: Kind | None
    models: Sequence[ModelScores]

    @property
    def values(self) -> list[int]:
        """The step or the distance of every model; empty for a single model."""
        return [] if self.kind is None else [value_of(model, self.kind) for model in self.models]

    @property
    def last(self) -> ModelScores:
        return self.models[-1]

    @property
    def start(self) -> int:
        """The place of the model to show first: the last step, or the shortest distance."""
        if self.kind != "offset":
            return len(self.models) - 1
        return min(range(len(self.models)), key=lambda i: abs(self.values[i]))


def value_of(model: ModelScores, kind: Kind) -> int:
    """The step of a model, or its distance: one that was not asked for is 0, where a rotation does nothing."""
    return (model.step if kind == "step" else model.offset) or 0


def entries(table: ScoreTable) -> list[Entry]:
    """The models of a table as entries, in order of first appearance.

    A trajectory is what has a step, the same type and shape, and the same source but for the step's number; what
    is left may be one model at several distances.
    """
    found: dict[Any, list[ModelScores]] = {}
    for i, model in enumerate(table.models):
        found.setdefault(_trajectory(model) or i, []).append(model)
    steps = {key: models for key, models in found.items() if len(models) > 1}
    distances: dict[Any, list[ModelScores]] = {}
    for i, model in enumerate(table.models):
        if _trajectory(model) not in steps:
            distances.setdefault(_apart_from_offset(model) or i, []).append(model)
    for key, models in list(distances.items()):
        if len(models) > 1 and all(model.offset is None for model in models):  # the same model twice
            del distances[key]
            distances.update({(key, i): [model] for i, model in enumerate(models)})
    order = {id(model): i for i, model in reversed(list(enumerate(table.models)))}
    made = [_series("step", models) for models in steps.values()]
    made += [
        _series("offset", models) if len(models) > 1 else _single(models[0]) for models in distances.values()
    ]
    return sorted(made, key=lambda entry: min(order[id(model)] for model in entry.models))


def labels(found: Iterable[Entry]) -> list[str]:
    """One name per entry, short enough for a legend and never the same twice."""
    return distinct(entry.name for entry in found)


def _single(model: ModelScores) -> Entry:
    return Entry(model.source, None, [model])


def _series(kind: Kind, models: Sequence[ModelScores]) -> Entry:
    ordered = sorted(models, key=lambda model: value_of(model, kind))
    first = ordered[0]
    name = (
        _without_step(str(first.source), first.step).replace("\0", "*")
        if kind == "step"
        else str(first.source)
    )
    offsets = {model.offset for model in ordered} - {None}
    return Entry(f"{name} at distance {offsets.pop()}" if kind == "step" and offsets else name, kind, ordered)


def _trajectory(model: ModelScores) -> str | None:
    """What the steps of one run have in common; None for a model that is no step of a run."""
    if not isinstance(model.step, int) or not _shape(model):
        return None
    without = _without_step(str(model.source), model.step)
    return _key("step", model, without, model.offset)


def _apart_from_offset(model: ModelScores) -> str | None:
    """What one model at several distances has in common; None for one that has no rows."""
    if not isinstance(model.offset, int | None) or not _shape(model):
        return None
    return _key("offset", model, str(model.source), model.revision, model.step)


def _key(kind: Kind, model: ModelScores, *own: Any) -> str:
    """A text, since a record from a file may hold in any place what cannot be a key."""
    return repr((kind, model.model_type, _shape(model), _assumed(model), own))


def _shape(model: ModelScores) -> list[tuple[str, str]]:
    """The widths that occur. Not how many layers: one that a checkpoint lacks does not make it another model."""
    return sorted({(repr(row.get("d_model")), repr(row.get("d_head"))) for row in model.rows})


def _assumed(model: ModelScores) -> list[Any]:
    given = model.conventions if isinstance(model.conventions, Mapping) else {}
    return [given.get(name) for name in _ASSUMED]


def _without_step(source: str, step: int | None) -> str:
    """The source with the last number in it that is the step replaced by NUL, which no source has."""
    for found in reversed(list(_DIGITS.finditer(source))):
        if step is not None and len(found[0]) < 16 and int(found[0]) == step:
            return f"{source[: found.start()]}\0{source[found.end() :]}"
    return source
