"""The runs under some paths: their records, how each ended, and what its experiment says, flat."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkform.errors import RecordError
from qkform.runs import NAME, RunRecord, records_at
from qkform.runs.experiments import flat

FINISHED = ("finished", "stop_at_loss")  # reasons in the `end` event of a run that did what it was asked
BROKE = "nan"  # of one that came to its end all the same: its loss is no number any more


@dataclass(frozen=True)
class Run:
    """One run: where it is, its record, and its experiment with dotted names: {"config.hidden_size": 128, ...}."""

    path: Path
    record: RunRecord
    experiment: Mapping[str, Any]

    @property
    def seed(self) -> Any:
        return self.experiment.get("seed")

    @property
    def text(self) -> str | None:
        """The key of the tokens that it trained on: of text, tokenizer and held-out share; None where it has none."""
        key = self._of_data("key")
        return key if isinstance(key, str) and key else None

    @property
    def unigram(self) -> float | None:
        """The loss of its held-out tokens if each were guessed by its frequency, nats; None where it is not told."""
        found = self._of_data("unigram")
        return found if isinstance(found, float) and math.isfinite(found) else None

    def _of_data(self, name: str) -> Any:
        return next((e.get(name) for e in reversed(self.record.events) if e.get("event") == "data"), None)

    @property
    def ending(self) -> str | None:
        """The reason of the last `end` event; None for a run that has none, killed or still going."""
        return None if self.record.end is None else str(self.record.end.get("reason"))

    @property
    def last_step(self) -> int | None:
        return int(self.record.steps[-1]["step"]) if self.record.steps else None


def find(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The folders that hold a record, under each path or the path itself, each once, in order (`records_at`).

    RecordError where a path is not there, or holds no run.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for record in records_at(path):
            if record.name != NAME:
                raise RecordError(f"{record} is no {NAME}; name a run folder, or a folder of run folders")
            found.setdefault(record.parent.resolve(), record.parent)
    return list(found.values())


def load(folder: Path) -> Run:
    """The run in a folder. Raises RecordError, which names the file, where its record cannot be read."""
    record = RunRecord.load(folder)
    experiment = record.start.get("experiment")
    return Run(folder, record, flat(experiment) if isinstance(experiment, Mapping) else {})


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names of flat fields in which two experiments differ; one that is absent counts as null."""
    return [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
