"""`RunSet`: records of training runs beside each other, named by what differs, seeds of one arm together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from qkform.errors import RecordError
from qkform.flows import FlowTable
from qkform.records import Row, SourceFault, Table, plain_row
from qkform.report.rows import distinct, text
from qkform.report.runreading import thinned
from qkform.runs import NAME, RunRecord, records_at
from qkform.runs.experiments import NOT_OF_ARM, flat, swept_names, telling
from qkform.runs.lines import encoded

SCHEMA = "qkform.runs/1"
MOST = 400  # tracked steps that are read of a run, unless all are asked for
_OF_RUN: dict[str, type] = {"run": str, "arm": str, "seed": int}
_LONGEST = 60  # characters of a name


@dataclass(frozen=True)
class Run:
    """One run: its record, and how it is told from the others."""

    name: str  # never the same twice in a set
    path: str
    record: RunRecord = field(repr=False)
    arm: str = ""  # what it shares with runs that differ in their seed alone
    seed: int | None = None
    tracked: int = (
        0  # steps in its file; the record may hold fewer of them, evenly spread, first and last among them
    )

    @property
    def experiment(self) -> dict[str, Any]:
        """The options of the run; empty where it recorded none."""
        found = self.record.start.get("experiment")
        return dict(found) if isinstance(found, Mapping) else {}

    @property
    def last(self) -> Mapping[str, Any] | None:
        return self.record.steps[-1] if self.record.steps else None

    @property
    def state(self) -> str:
        """How it ended, as its record says; a record without an end is of a run that goes on or was killed."""
        end = self.record.end
        if end is None:
            return "no end recorded: it goes on, or was killed"
        return text(end.get("reason") or "ended").replace("_", " ")

    @property
    def resumes(self) -> list[Mapping[str, Any]]:
        return [event for event in self.record.events if event["event"] == "resume"]


@dataclass(frozen=True)
class RunSet(Table):
    """Runs beside each other, for the screen, the page, charts and files.

    `flow` is the one-layer model that the page draws beside them, `errors` what could not be read. `rows` are those of
    the first and the last tracked step of every run, or of every step that was read where `every_step` is set: a run, a
    step, and a whole layer (head null) or a head.
    """

    schema: ClassVar[str] = SCHEMA

    runs: Sequence[Run] = ()
    errors: Sequence[SourceFault] = ()
    flow: FlowTable | None = None
    every_step: bool = False

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def arms(self) -> list[str]:
        """The arms, in order of their first run."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def rows(self) -> list[Row]:
        return [
            {"run": run.name, "arm": run.arm, "seed": run.seed} | row
            for run in self.runs
            for row in _ends(run.record, every=self.every_step).rows
        ]

    @classmethod
    def columns(cls) -> dict[str, type]:
        """run, arm and seed, then those of a `RunRecord`."""
        return {**_OF_RUN, **RunRecord.columns()}

    def _flat(self) -> list[Row]:
        return [plain_row(row, self.columns()) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """The document of JSON: {"schema", "runs", "rows", "errors"}; a run has name, path, state and first line."""
        return {
            "schema": SCHEMA,
            "runs": [
                {
                    "name": run.name,
                    "path": text(run.path),
                    "arm": run.arm,
                    "seed": run.seed,
                    "state": run.state,
                    "steps": run.tracked,
                    "start": _plain(run.record.start),
                    "events": [_plain(event) for event in run.record.events],
                }
                for run in self.runs
            ],
            "rows": self._flat(),
            "errors": [error.to_dict() for error in self.errors],
        }

    @classmethod
    def of(cls, records: Iterable[tuple[str, RunRecord]], tracked: Sequence[int] = (), **more: Any) -> RunSet:
        """Records, each with the place it is from, as runs with names."""
        found = [
            Run("", place, record, tracked=tracked[i] if tracked else len(record.steps))
            for i, (place, record) in enumerate(records)
        ]
        return cls(_named(found), **more)

    @classmethod
    def read(
        cls,
        paths: Iterable[str | os.PathLike[str]],
        *,
        every_step: bool = False,
        flow: FlowTable | None = None,
        on_error: Literal["raise", "record"] = "raise",
    ) -> RunSet:
        """The runs at these places: a record, the folder of a run, or a folder of such folders.

        RecordError for one that cannot be read; with `on_error="record"` it is in `errors`. Of a long run `MOST`
        tracked steps are read, evenly spread, first and last among them, unless `every_step` is asked for.
        """
        if on_error not in ("raise", "record"):
            raise RecordError(f"on_error is {on_error!r:.60}; it must be raise or record")
        records, tracked = [], []
        errors: list[SourceFault] = []

        def fault(place: str | os.PathLike[str], error: RecordError) -> None:
            if on_error == "raise":
                raise error
            errors.append(SourceFault(text(os.fspath(place)), text(error)))

        for path in paths:
            try:
                places = records_at(path)
            except RecordError as error:
                fault(path, error)
                continue
            for place in places:
                try:
                    record, count = thinned(place, None if every_step else MOST)
                except RecordError as error:
                    fault(place, error)
                    continue
                records.append((str(place.parent if place.name == NAME else place), record))
                tracked.append(count)
        return cls.of(records, tracked, errors=errors, flow=flow, every_step=every_step)


def options(experiment: Mapping[str, Any]) -> dict[str, str]:
    """The options of an experiment, those of options in it as "config.name", values as text."""
    return {text(name): text(_said(value)) for name, value in flat(experiment).items()}


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _named(runs: Sequence[Run]) -> list[Run]:
    """The runs with the names of their arms and of themselves."""
    given = [
        {name: value for name, value in options(run.experiment).items() if name not in NOT_OF_ARM}
        for run in runs
    ]
    folders = [Path(run.path) for run in runs]
    # a run without an experiment is an arm of its own
    keys = [tuple(sorted(one.items())) or (("", run.path),) for one, run in zip(given, runs, strict=True)]
    seeds = [_seed(run) for run in runs]
    arms: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        arms.setdefault(key, []).append(i)
    words = swept_names([[(folders[i], seeds[i]) for i in each] for each in arms.values()])
    if words is None:
        known = [given[first] for first, *_ in arms.values() if given[first]]
        told = telling(known, dict.fromkeys(name for one in known for name in one))
        words = []
        for first, *more in arms.values():
            one = given[first]
            said = ", ".join(f"{name} {one[name]}" for name in told if name in one)
            # what is too long to tell apart at a glance, or is not said at all, is told by its folder
            words.append(said if said and len(said) <= _LONGEST else _of_all(folders[first], bool(more)))
    labels = dict(zip(arms, distinct(words), strict=True))
    alone = len(labels) == 1
    out = []
    for run, key, folder, seed in zip(runs, keys, folders, seeds, strict=True):
        arm = labels[key]
        many = len(arms[key]) > 1
        name = (f"seed {seed}" if alone else f"{arm}, seed {seed}") if many and seed is not None else arm
        name = f"{arm}, {folder.name}" if many and seed is None else name
        out.append(replace(run, name=name, arm=arm, seed=seed))
    names = distinct(run.name for run in out)
    return [replace(run, name=name) for run, name in zip(out, names, strict=True)]


def _seed(run: Run) -> int | None:
    seed = run.experiment.get("seed")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _of_all(folder: Path, many: bool) -> str:
    """The name of a run's folder; of many runs, or in a folder that is named for its seed, of the folder around it."""
    around = many or folder.name.startswith("seed-")
    return (folder.parent.name if around else "") or folder.name or str(folder)


def _ends(record: RunRecord, *, every: bool) -> RunRecord:
    """The record with its first and last step alone."""
    if every or len(record.steps) <= 2:
        return record
    return RunRecord(record.start, record.events, [record.steps[0], record.steps[-1]])


def _plain(line: Mapping[str, Any]) -> Any:
    """A line with nothing in it that JSON cannot hold."""
    return json.loads(encoded(line))
