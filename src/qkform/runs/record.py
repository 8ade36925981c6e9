"""The record of a training run as it is read: whole, as series over its steps, and as flat rows.

The first line is the event `start`: schema, experiment, environment, layers. Lines with `event` say what happened to
the run; every other line is one tracked step. docs/tracking.md lists what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from qkform.errors import RecordError
from qkform.records import Row, Table, plain_row
from qkform.runs.checks import check_event, check_start, check_step
from qkform.runs.fields import CONFLICT, MEASURES, NAME, SCHEMA, SELF_NORM
from qkform.runs.lines import Line, encoded, parsed, read_lines, read_whole

_OF_STEP: dict[str, type] = {
    "step": int,
    "loss": float,  # of that step, mean over counted tokens, nats; null at step 0
    "held_out": float,
    "tokens": int,  # seen by training so far
    "seconds": float,
    "tracker_seconds": float,
    "tokens_per_second": float,
}
_OF_LAYER: dict[str, type] = {
    "module": str,
    "layer": int,
    "part": str,
    "mask": str,
    "d_model": int,
    "d_head": int,
    "head": int,  # null in the row of the whole layer
}


@dataclass(frozen=True)
class RunRecord(Table):
    """What was recorded while a model trained.

    start     the first line: schema, experiment, environment, model, layers, probe
    events    the other lines that carry `event`, in order: "resume", "end", ...
    steps     the tracked steps, ascending: {"step", "loss", "held_out", "tokens", "rates", "layers", ...}

    `rows` has one flat row per tracked step, layer and head; `to_csv`, frames and `save` write those.

    >>> record = RunRecord.load("runs/a")                               # doctest: +SKIP
    >>> steps, values = record.series("symmetry", layer=0)              # doctest: +SKIP
    """

    schema: ClassVar[str] = SCHEMA

    start: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]] = ()
    steps: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    @property
    def layers(self) -> list[Row]:
        """What is tracked: {"module", "layer", "part", "mask", "n_heads", "n_kv_heads", "d_model", "d_head"} each."""
        return [dict(layer) for layer in self.start["layers"]]

    @property
    def rows(self) -> list[Row]:
        """One flat row per tracked step and layer (head null: the whole layer), and per head: `columns`."""
        return [row for step in self.steps for row in _rows(step, self.start["layers"])]

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The event that ended the run; None while it goes on, was killed, or was resumed since."""
        said = [event for event in self.events if event["event"] in ("end", "resume")]
        return said[-1] if said and said[-1]["event"] == "end" else None

    def series(
        self, name: str, layer: int | str | None = None, head: int | None = None
    ) -> tuple[list[int], list[Any]]:
        """The tracked steps and the values of a column there, None where it has none.

        Without `layer` a value of the step itself: "loss", "held_out", "tokens", "seconds", "rates.NAME". With it, a
        place in `layers` or the path of a module, one of that layer, or of its head: `MEASURES`, "conflict_cosine" and
        the others of `CONFLICT`. RecordError for a name, layer or head that no line has.
        """
        steps = [int(step["step"]) for step in self.steps]
        if layer is None:
            return steps, [self._of_step(step, name) for step in self.steps]
        place = self._place(layer)
        known = self._place_heads(place)
        if head is not None and not 0 <= head < known:
            raise RecordError(f"layer {layer!r} has no head {head!r}; it has heads 0 to {known - 1}")
        return steps, [_measure(step["layers"][place], name, head) for step in self.steps]

    def _of_step(self, step: Mapping[str, Any], name: str) -> Any:
        group = name.removeprefix("rates.")
        if group != name:
            return (step.get("rates") or {}).get(group)
        if name not in _OF_STEP:
            raise RecordError(f"a step has no {name!r}; it has {', '.join(_OF_STEP)}, rates.NAME")
        return step.get(name)

    def _place(self, layer: int | str) -> int:
        layers = self.start["layers"]
        if isinstance(layer, str):
            found = [i for i, each in enumerate(layers) if each.get("module") == layer]
            if found:
                return found[0]
        elif 0 <= layer < len(layers):
            return layer
        there = (
            f"there are 0 to {len(layers) - 1}, at {layers[0].get('module')!r}, ..."
            if layers
            else "there is none"
        )
        raise RecordError(f"no layer {layer!r}; {there}")

    def _place_heads(self, place: int) -> int:
        return int(self.start["layers"][place]["n_heads"])

    def __len__(self) -> int:
        return len(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The document that .json holds: {"schema", "start", "events", "steps"}."""
        return {
            "schema": SCHEMA,
            "start": dict(self.start),
            "events": [dict(event) for event in self.events],
            "steps": [dict(step) for step in self.steps],
        }

    @classmethod
    def columns(cls) -> dict[str, type]:
        """What a step has, which layer and head, `MEASURES`, self_norm, and conflict_ of each of `CONFLICT`."""
        measured = dict.fromkeys((*MEASURES, SELF_NORM, *(f"conflict_{name}" for name in CONFLICT)), float)
        return {**_OF_STEP, **_OF_LAYER, **measured}

    def _flat(self) -> list[Row]:
        return [plain_row(row, self.columns()) for row in self.rows]

    def _writer(self, target: Path) -> Callable[[Path], Any]:
        if target.suffix.lower() != ".jsonl":
            return super()._writer(target)
        data = b"".join(encoded(line) for line in (self.start, *self.events, *self.steps))
        return lambda to: to.write_bytes(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read a record: the file, the folder of a run that holds record.jsonl, or what `save` wrote as .json.

        A last line that a kill left half-written is dropped. RecordError, with file and line, for anything else that is
        no record; what comes from here is what docs/tracking.md says in every field that it names.
        """
        file = Path(path)
        if os.path.isdir(file):
            if not os.path.lexists(file / NAME):
                raise RecordError(
                    f"{file} is a folder without {NAME}; name the folder of a run, or its {NAME}"
                )
            file = file / NAME
        if file.suffix.lower() == ".json":
            return _of_document(file, read_whole(file))
        lines = read_lines(file)
        if not lines:
            raise RecordError(f"{file} has no complete line: the run was killed before its record began")
        return from_lines(file, lines)


def from_lines(file: Path, lines: Sequence[Line]) -> RunRecord:
    """The record of these lines; RecordError that names the line where it is none."""
    return _checked(
        lines[0].value, ((f"{file}, line {line.number}", line.value) for line in lines[1:]), f"{file}, line 1"
    )


def _of_document(file: Path, raw: bytes) -> RunRecord:
    """The record of what `to_dict` gives, as JSON."""
    try:
        document = parsed(raw)
    except (ValueError, RecordError) as error:
        raise RecordError(
            f"cannot read the record {file}: {error}; what `save` wrote as .json can be read"
        ) from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise RecordError(f"{file} has schema {found!r}; this version reads {SCHEMA!r}")
    for name, kind in (("start", dict), ("events", list), ("steps", list)):
        if not isinstance(document.get(name), kind):
            raise RecordError(f"{file} says it is {SCHEMA!r} but has no {kind.__name__} {name!r}")
    after = [
        (f"{file}, {name}[{i}]", line)
        for name in ("events", "steps")
        for i, line in enumerate(document[name])
    ]
    return _checked(document["start"], after, f"{file}, start")


def _checked(start: dict[str, Any], after: Iterable[tuple[str, Any]], where: str) -> RunRecord:
    """The record of a first line and (where it stands, what it says) of those after it."""
    events: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    try:
        check_start(start)
        for place, line in after:
            where = place
            if not isinstance(line, dict):
                raise RecordError("no object")
            if "event" in line:
                check_event(line)
                events.append(line)
                continue
            check_step(line, start["layers"])
            if steps and line["step"] <= steps[-1]["step"]:
                raise RecordError(
                    f"step {line['step']} after step {steps[-1]['step']}; has something else written to it?"
                )
            steps.append(line)
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None
    return RunRecord(start, events, steps)


def _rows(step: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    of_step = {name: step.get(name) for name in _OF_STEP}
    names = [name for name in RunRecord.columns() if name not in _OF_STEP and name not in _OF_LAYER]
    for layer, row in zip(layers, step["layers"], strict=True):
        about = {name: layer.get(name) for name in _OF_LAYER}
        for head in (None, *range(layer["n_heads"])):
            yield of_step | about | {"head": head} | {name: _measure(row, name, head) for name in names}


def _measure(row: Mapping[str, Any], name: str, head: int | None) -> Any:
    """A value of a layer's row or of one of its heads; None where there is none."""
    of_conflict = name.removeprefix("conflict_")
    if of_conflict != name and of_conflict in CONFLICT:
        values = (row.get("conflict") or {}).get(of_conflict)
        return None if head is None or not values else values[head]
    if name not in (*MEASURES, SELF_NORM):
        raise RecordError(
            f"a layer has no {name!r}; it has {', '.join((*MEASURES, SELF_NORM))}, conflict_cosine, ..."
        )
    if head is None:
        return row.get(name)
    values = (row.get("heads") or {}).get(name)
    return values[head] if values else None
