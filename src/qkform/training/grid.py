"""`Grid`: arms times seeds, as a YAML file has them, and the runs that they come to."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkform.errors import ExperimentError
from qkform.training.experiment import Experiment, read_yaml

_KEYS = ("base", "arms", "axes", "seeds")
_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._+=,-]{0,199}"
)  # file systems allow 255, and files stand beside it


@dataclass(frozen=True)
class Planned:
    """One run of a grid: an arm's experiment with a seed, and the name of its folder, "arm/seed-0"."""

    arm: str
    seed: int
    experiment: Experiment

    @property
    def name(self) -> str:
        return f"{self.arm}/seed-{self.seed}"


@dataclass(frozen=True)
class Grid:
    """What a sweep runs: options that all runs share, what each arm changes, and the seeds of every arm.

    >>> Grid({"preset": "tiny"}, {"standard": {}, "matched": {"init": "matched"}}, [0, 1]).runs()[3].name
    'matched/seed-1'
    """

    base: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]

    def runs(self) -> list[Planned]:
        """Every run, seed by seed, so that an early stop leaves whole pairs; ExperimentError names the arm."""
        planned = []
        for seed in self.seeds:
            same: dict[str, str] = {}
            for arm, changes in self.arms.items():
                try:
                    experiment = Experiment.from_dict({**_merged(self.base, changes), "seed": seed})
                except ExperimentError as error:
                    raise ExperimentError(f"arm {arm}: {error}") from None
                if (other := same.setdefault(experiment.to_yaml(), arm)) != arm:
                    raise ExperimentError(f"arms {other} and {arm} are one experiment; leave one of them out")
                planned.append(Planned(arm, seed, experiment))
        return planned

    @classmethod
    def load(cls, path: str | Path) -> Grid:
        """The grid of a YAML file. ExperimentError names the file and what is wrong in it."""
        try:
            return cls.from_dict(read_yaml(Path(path)))
        except ExperimentError as error:
            told = str(error)
            raise ExperimentError(told if told.startswith(str(path)) else f"{path}: {told}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Grid:
        """A grid of `base`, `arms` (names and what each changes) or `axes` (options and their values), and `seeds`."""
        for name in values:
            if name not in _KEYS:
                close = difflib.get_close_matches(str(name), _KEYS, 1, 0.5)
                mine = name in Experiment.__dataclass_fields__ or not close
                hint = "options of all runs go under base" if mine else f"did you mean {close[0]}?"
                raise ExperimentError(f"{name}: a grid has no such part; {hint} (known: {', '.join(_KEYS)})")
        base = _options("base", values.get("base") or {})
        if ("arms" in values) == ("axes" in values):
            raise ExperimentError(
                "a grid has either arms, as in `arms: {standard: {}, matched: {init: matched}}`, or axes, as in "
                "`axes: {init: [standard, matched]}`"
            )
        arms = _arms(values["arms"]) if "arms" in values else _product(values["axes"])
        return cls(base, arms, _seeds(values.get("seeds")))


def _arms(values: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(values, Mapping) or not values:
        raise ExperimentError("arms: expected names of arms, and under each the options that it changes")
    for name in values:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ExperimentError(
                f"arms: {name!r:.60} is the name of a folder too; expected at most 200 letters, digits and . _ + = , -"
            )
    _folders_apart("arms", values)
    return {name: _options(f"arms: {name}", changes or {}) for name, changes in values.items()}


def _folders_apart(where: str, names: Iterable[str]) -> None:
    """ExperimentError where two names are one folder on a disk that does not tell capitals apart."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise ExperimentError(
                f"{where}: {other} and {name} are one folder on some disks; name one otherwise"
            )


def _product(values: Any) -> dict[str, dict[str, Any]]:
    """Every combination of the axes' values, each under a name that says it."""
    if not isinstance(values, Mapping) or not values:
        raise ExperimentError("axes: expected options, and for each a list of values")
    _options("axes", values)
    for name, several in values.items():
        if not isinstance(several, list) or not several:
            raise ExperimentError(f"axes: {name}: {several!r:.60}; expected a list of values")
    arms: dict[str, dict[str, Any]] = {}
    for chosen in itertools.product(*values.values()):
        changes = dict(zip(values, chosen, strict=True))
        name = ",".join(f"{option}={_folder_name(value)}" for option, value in changes.items())
        if not _NAME.fullmatch(name):
            raise ExperimentError(
                f"axes: {name:.60}... is too long for a folder; give them as arms, with names"
            )
        if name in arms:
            raise ExperimentError(f"axes: two combinations are called {name}; give them as arms, with names")
        arms[name] = changes
    _folders_apart("axes", arms)
    return arms


def _seeds(values: Any) -> list[int]:
    if isinstance(values, int) and not isinstance(values, bool):
        values = [values]
    if not isinstance(values, list) or not values:
        raise ExperimentError("seeds: expected a list of whole numbers, as in `seeds: [0, 1, 2]`")
    for seed in values:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ExperimentError(f"seeds: {seed!r:.60}; expected whole numbers from 0")
    if len(set(values)) < len(values):
        raise ExperimentError(f"seeds: {values}: one is there twice")
    return values


def _options(where: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ExperimentError(
            f"{where}: {values!r:.60}; expected options and their values, as in `objective: clm`"
        )
    if "seed" in values:
        raise ExperimentError(f"{where}: seed: the seeds of a grid are listed under seeds")
    return dict(values)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an arm; what it says of the model's config goes over the base's, name by name."""
    out = {**base, **changes}
    if isinstance(base.get("config"), Mapping) and isinstance(changes.get("config"), Mapping):
        out["config"] = {**base["config"], **changes["config"]}
    return out


def _folder_name(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-")[:60] or "none"
