"""A record is checked where it is read: what does not fit is refused with its line, and the rest can be trusted."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from qkform.cli.runs import ratios_of
from qkform.errors import RecordError
from qkform.report import runpoints, runreading
from qkform.report.runset import RunSet
from qkform.runs import RunRecord, RunWriter
from tests import run_records as made

FIRST = made.start(layers=2, heads=2, seed=0, qk_lr_ratio=2.0)
STEPS = made.lines(FIRST, 3, conflict=True)
RESUME = {"event": "resume", "step": 10, "exact": True, "reason": None, "environment": {}}
LINES = [FIRST, *STEPS[:2], RESUME, STEPS[2], {"event": "end", "step": 20, "reason": "finished"}]
HUGE = "1" + "0" * 400
ROW = ("layers", 1)


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at a place in it."""
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = put(copy.get(place[0]) if isinstance(copy, dict) else copy[place[0]], place[1:], new)
    return copy


def written(folder: Path, line: int, place: tuple[Any, ...], odd: str) -> Path:
    """A good record but for a piece of JSON at a place in one line, counted from 1."""
    lines = [json.dumps(each) for each in LINES]
    lines[line - 1] = json.dumps(put(LINES[line - 1], place, "@@")).replace('"@@"', odd)
    file = folder / "record.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


KINDS = [  # (line, place in it, what stands there, what the error says)
    (1, ("layers",), "null", "layers is null; it must be a list"),
    (1, ("layers", 0), "null", r"layers\[0\] is null"),
    (1, ("layers", 0, "module"), "3", r"layers\[0\]\.module is 3; it must be text"),
    (
        1,
        ("layers", 1, "n_heads"),
        '"x"',
        r"layers\[1\]\.n_heads is 'x'; it must be a whole number, 1 to 4096",
    ),
    (1, ("layers", 1, "n_heads"), "null", r"n_heads is null"),
    (1, ("layers", 1, "n_heads"), "1000000000", "n_heads is 1000000000"),
    (1, ("layers", 1, "d_model"), "0", "d_model is 0; it must be a whole number, 1 or more, or null"),
    (1, ("experiment",), "[1]", r"experiment is \[1\]; it must be an object, or null"),
    (1, ("environment",), '"x"', "environment is 'x'"),
    (1, ("probe",), "[]", "probe is"),
    (1, ("experiment", "lr"), HUGE, "a whole number of 401 digits is more than a float can hold"),
    (1, ("experiment", "lr"), "[" * 200 + "]" * 200, "lists and objects within each other"),
    (2, ("step",), "true", "step is True; it must be a whole number, 0 or more"),
    (2, ("step",), str(2**63), "step is"),
    (2, ("loss",), HUGE, "a whole number of 401 digits"),
    (2, ("loss",), "9" * 5000, "a whole number of 5000 digits"),
    (2, ("held_out",), '"1.5"', "held_out is '1.5'; it must be a number, or null"),
    (2, ("tokens",), "1.5", "tokens is 1.5"),
    (2, ("rates",), "3", "rates is 3; it must be an object"),
    (2, ("rates", "qk"), "{}", "rates.qk is {}; it must be a number"),
    (2, ("unknown",), f"[{HUGE}]", "more than a float can hold"),
    (3, ("layers",), "[{}]", "1 layers; line 1 describes 2"),
    (3, ROW, "[]", r"layers\[1\] is \[\]"),
    (3, (*ROW, "module"), '"other"', r"module is 'other'; line 1 has 'layers\.1\.attn' there"),
    (3, (*ROW, "symmetry"), "[1]", r"layers\[1\]\.symmetry is \[1\]; it must be a number"),
    (3, (*ROW, "heads"), '"x"', r"layers\[1\]\.heads is 'x'; it must be an object"),
    (3, (*ROW, "heads", "symmetry"), "[0.1]", r"heads\.symmetry is a list of 1; it must be a list of 2"),
    (3, (*ROW, "heads", "symmetry"), "3", r"heads\.symmetry is 3"),
    (3, (*ROW, "heads", "symmetry"), '{"0": 1}', r"heads\.symmetry is \{'0': 1\}"),
    (3, (*ROW, "heads", "norm", 1), "true", r"heads\.norm\[1\] is True"),
    (3, (*ROW, "conflict"), '"x"', r"layers\[1\]\.conflict is 'x'"),
    (3, (*ROW, "conflict", "cosine"), "[0.1, 0.2, 0.3]", r"conflict\.cosine is a list of 3"),
    (4, ("event",), "null", "event is null; it must be text"),
    (4, ("event",), '"start"', "a second start"),
    (4, ("exact",), "1", "exact is 1; it must be true or false"),
    (4, ("step",), '"x"', "step is 'x'"),
    (5, ("step",), "10", "step 10 after step 10"),
    (6, ("reason",), "{}", "reason is {}; it must be text"),
]


@pytest.mark.parametrize(("line", "place", "odd", "said"), KINDS)
def test_what_does_not_fit_is_refused_with_its_line(tmp_path, line, place, odd, said):
    file = written(tmp_path, line, place, odd)
    with pytest.raises(RecordError, match=rf"record\.jsonl, line {line}: .*{said}") as error:
        RunRecord.load(file)
    assert len(str(error.value)) < len(str(file)) + 300
    runs = RunSet.read([tmp_path], on_error="record")
    assert not runs.runs
    assert [each.message for each in runs.errors] == [str(error.value)]


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", "1e400", "-9e999", f"{'9' * 400}.5"])
@pytest.mark.parametrize(
    "place", [("loss",), (*ROW, "symmetry"), (*ROW, "heads", "symmetry", 1), ("rates", "qk")]
)
def test_numbers_of_other_writers_that_are_not_finite_are_null(tmp_path, place, odd):
    good = RunRecord.load(written(tmp_path, 5, ("step",), "20"))
    assert good.steps == STEPS, "numbers of a good record are as they were written"
    record = RunRecord.load(written(tmp_path, 5, place, odd))
    assert record.steps[2] == put(STEPS[2], place, None)
    json.loads(record.to_json())
    assert RunSet.of([("x", record)]).to_csv().count("inf") == 0


def test_unknown_fields_events_and_absent_ones_are_fine(tmp_path):
    later = {"event": "of a later version", "step": "any", "reason": [1], "more": {"a": [None, 1e300]}}
    steps = [
        STEPS[0] | {"later": ["x"]},
        {"step": 7, "layers": [{}, {"heads": {"later": "x", "norm": None}}]},
    ]
    made.write(tmp_path, FIRST | {"later": 1}, steps[0], later, steps[1])
    record = RunRecord.load(tmp_path)
    assert (record.steps, record.events, record.end) == (steps, [later], None)
    assert record.series("rates.qk")[1] == [0.012, None]
    assert len(record.rows) == 2 * 2 * 3
    (run,) = RunSet.read([tmp_path]).runs
    assert runpoints.losses([run])[-1]["step"] == 0
    none = RunRecord.load(made.write(tmp_path / "none", made.start(layers=0)))
    with pytest.raises(RecordError, match="no layer 0; there is none"):
        none.series("symmetry", layer=0)


def test_saved_documents_are_checked_too(tmp_path):
    saved = RunRecord.load(written(tmp_path, 5, ("step",), "20")).save(tmp_path / "run.json")
    assert RunRecord.load(saved).steps == STEPS
    for old, new, said in (
        ('"step": 10,\n   "loss"', '"step": 0,\n   "loss"', r"run\.json, steps\[1\]: step 0 after step 0"),
        ('"n_heads": 2', '"n_heads": -2', r"run\.json, start: layers\[0\]\.n_heads is -2"),
        ('"reason": "finished"', '"reason": 3', r"run\.json, events\[1\]: reason is 3"),
        ('"events": [', '"event": [', "has no list 'events'"),
        ("{", "{{", "cannot read the record"),
    ):
        text = saved.read_text()
        assert old in text
        broken = saved.with_name("b") / "run.json"
        broken.parent.mkdir(exist_ok=True)
        broken.write_text(text.replace(old, new, 1))
        with pytest.raises(RecordError, match=said):
            RunRecord.load(broken)


def test_a_sampled_record_is_read_by_the_same_rules(tmp_path, monkeypatch):
    monkeypatch.setattr(runreading, "LARGE", 0)
    with pytest.raises(RecordError, match=r"line 2: layers\[1\]\.symmetry is 'x'"):
        runreading.thinned(written(tmp_path, 2, (*ROW, "symmetry"), '"x"'), 2)
    record, _ = runreading.thinned(written(tmp_path, 5, ("loss",), "NaN"), 2)
    assert record.steps[-1]["loss"] is None


def test_what_is_no_file_is_refused_and_the_runs_beside_it_are_shown(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "runs" / "a" / "record.jsonl").mkdir(parents=True)
    made.run(tmp_path / "runs" / "b", steps=3)
    for place, said in (
        (tmp_path / "pipe", "it is no regular file"),
        ("/dev/zero", "it is no regular file"),
        (tmp_path / "runs" / "a", "record.jsonl: it is a folder"),
        (tmp_path / "runs" / "a" / "record.jsonl", "is a folder without record.jsonl"),
        (tmp_path / ("x" * 300), "cannot read the record"),
        ("nul\0", "cannot read the record"),
    ):
        with pytest.raises(RecordError, match=said):
            RunRecord.load(place)
        with pytest.raises(RecordError):
            RunWriter.new(place).close()
        assert len(RunSet.read([place], on_error="record").errors) == 1
        with pytest.raises(RecordError):
            RunSet.read([place])
    with pytest.raises(RecordError, match="on_error"):
        RunSet.read([], on_error="skip")
    runs = RunSet.read([tmp_path / "runs"], on_error="record")
    assert [run.name for run in runs.runs] == ["b"]
    assert "is a folder" in runs.errors[0].message


def test_nothing_is_written_that_could_not_be_read_back(tmp_path):
    file = tmp_path / "record.jsonl"
    itself: dict[str, Any] = {}
    itself["again"] = itself
    writer = RunWriter.new(file)
    for wrong in (
        {"experiment": [1]},
        {"layers": [{}]},
        {"experiment": itself},
        {"experiment": {"a": 10**400}},
    ):
        with pytest.raises(RecordError, match="no line for"):
            writer.start(FIRST | wrong)
    writer.start(FIRST)
    for step in (
        STEPS[0] | {"layers": []},
        put(STEPS[0], (*ROW, "heads", "norm"), [1.0]),
        STEPS[0] | {"loss": "x"},
    ):
        with pytest.raises(RecordError, match="no line for"):
            writer.append(step)
    with pytest.raises(RecordError, match="it has 'event'"):
        writer.append(STEPS[0] | {"event": "note"})
    with pytest.raises(RecordError, match="a second start"):
        writer.event("start")
    writer.event("note", event="start")
    writer.append(STEPS[0])
    writer.close()
    record = RunRecord.load(file)
    assert (record.steps, record.events) == (STEPS[:1], [{"event": "note"}])


def test_what_fits_and_is_odd_is_drawn_without_a_fault(tmp_path):
    huge = [1.7e308, 1.7976931348623157e308]
    step = put(put(STEPS[2], (*ROW, "heads", "self_norm"), huge), (*ROW, "conflict", "excess"), huge)
    step = put(step, (*ROW, "conflict", "null_sd"), huge) | {"loss": huge[1]}
    made.write(tmp_path, put(FIRST, ("experiment", "qk_lr_ratio"), [2.0]), *STEPS[:2], step)
    runs = RunSet.read([tmp_path])
    assert ratios_of(runs), "a ratio that is no number is none"
    (run,) = runs.runs
    found = [*runpoints.middles(runs.runs), *runpoints.excesses(runpoints.conflicts(runs.runs))]
    found += [*runpoints.layers(run, run.record.steps), *runpoints.losses(runs.runs)]
    numbers = [value for row in found for value in row.values() if isinstance(value, float)]
    assert numbers
    assert all(map(math.isfinite, numbers))
