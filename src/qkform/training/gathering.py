"""The runs under some paths: their records, how each ended, and what its experiment says, flat."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkform.errors import RecordError
from qkform.runs import NAME, RunRecord
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
        keys = [event.get("key") for event in self.record.events if event.get("event") == "data"]
        return keys[-1] if keys and isinstance(keys[-1], str) and keys[-1] else None

    @property
    def ending(self) -> str | None:
        """The reason of the last `end` event; None for a run that has none, killed or still going."""
        return None if self.record.end is None else str(self.record.end.get("reason"))

    @property
    def last_step(self) -> int | None:
        return int(self.record.steps[-1]["step"]) if self.record.steps else None


def find(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The folders that hold a record, under each path or the path itself, each once, in order.

    Hidden folders are not looked into, nor are the folders of a run. Symbolic links are followed, once each and after
    all that is no link, so that a run has the name of its own folder. Raises RecordError where a path is not there, or
    holds no run.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_file() and path.name == NAME:
            path = path.parent
        if not path.is_dir():
            raise RecordError(f"{path} is not there; name a run folder, or a folder of run folders")
        here = list(_under(path))
        if not here:
            raise RecordError(
                f"there is no {NAME} in {path} or below; name a run folder, or a folder of them"
            )
        for folder in here:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def load(folder: Path) -> Run:
    """The run in a folder. Raises RecordError, which names the file, where its record cannot be read."""
    record = RunRecord.load(folder)
    experiment = record.start.get("experiment")
    return Run(folder, record, flat(experiment) if isinstance(experiment, Mapping) else {})


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names of flat fields in which two experiments differ; one that is absent counts as null."""
    return [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]


def _under(path: Path) -> Iterator[Path]:
    seen: set[str] = set()
    waiting = [path]
    for top in waiting:
        for folder, inside, files in os.walk(top):
            if (real := os.path.realpath(folder)) in seen:
                inside.clear()
                continue
            seen.add(real)
            if NAME in files:
                inside.clear()
                yield Path(folder)
            inside[:] = sorted(name for name in inside if not name.startswith("."))
            waiting += [link for name in inside if (link := Path(folder, name)).is_symlink()]
