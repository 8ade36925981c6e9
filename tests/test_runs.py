"""Records of runs: read whole, torn by a kill, cut back on resume, written by one process at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from qkform.errors import RecordError
from qkform.runs import RunRecord, RunWriter, last_step

LAYER = {
    "module": "layers.0.attn",
    "layer": 0,
    "part": None,
    "mask": "causal",
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_model": 6,
    "d_head": 3,
}
START = {"experiment": {"seed": 3}, "environment": {"torch": "2"}, "layers": [LAYER], "probe": None}


def line(step, **over):
    heads = {"symmetry": [0.25, step / 8], "self_norm": [1.0, 2.0]}
    conflict = {
        "cosine": [-0.5, 0.5],
        "null_mean": [0, 0],
        "null_sd": [1, 1],
        "excess": [-0.5, 0.5],
        "share": [0.1, 0.2],
    }
    row = {"module": "layers.0.attn", "layer": 0, "symmetry": step / 4, "heads": heads, "conflict": conflict}
    return {
        "step": step,
        "loss": 2.0 / (1 + step),
        "held_out": None,
        "tokens": 10 * step,
        "rates": {"0": 0.1},
        "layers": [row],
        "seconds": 1.5,
        "tracker_seconds": 0.25,
        "tokens_per_second": None,
    } | over


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def write(path, steps):
    writer = RunWriter.new(path)
    writer.start(START)
    for step in steps:
        writer.append(line(step))
    return writer


def test_what_was_written_is_read(path):
    writer = write(path, [0, 2, 4])
    writer.event("end", step=4, reason="finished")
    writer.close()
    record = RunRecord.load(path)
    assert record.start["schema"] == "qkform.run/1"
    assert record.start["experiment"] == {"seed": 3}
    assert [step["step"] for step in record.steps] == [0, 2, 4]
    assert record.end["reason"] == "finished"
    assert record.layers == [LAYER]
    assert RunRecord.load(path.parent) == record
    assert record.series("loss") == ([0, 2, 4], [2.0, 2 / 3, 0.4])
    assert record.series("symmetry", layer=0) == ([0, 2, 4], [0.0, 0.5, 1.0])
    assert record.series("symmetry", layer="layers.0.attn", head=1) == ([0, 2, 4], [0.0, 0.25, 0.5])
    assert record.series("conflict_cosine", layer=0, head=0)[1] == [-0.5] * 3
    assert record.series("rates.0")[1] == [0.1] * 3
    assert record.series("entropy", layer=0)[1] == [None] * 3


def test_rows_are_flat_and_save(path, tmp_path):
    write(path, [0, 2]).close()
    record = RunRecord.load(path)
    assert len(record.rows) == 2 * 3
    assert record.rows[4] == {"step": 2, "head": 0} | record.rows[4]
    assert record.rows[5]["symmetry"] == 0.25
    assert record.rows[5]["conflict_share"] == 0.2
    assert record.rows[3]["self_norm"] is None
    assert record.to_csv().splitlines()[0].startswith("step,loss,held_out")
    assert RunRecord.load(record.save(tmp_path / "copy.json")) == record
    assert RunRecord.load(record.save(tmp_path / "copy.jsonl")) == record
    assert record.to_polars().shape == (6, len(record.columns()))
    assert record.to_pandas()["layer"].tolist() == [0] * 6


def test_every_cut_of_a_record_reads_as_whole_lines(path):
    write(path, [0, 2]).close()
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in sorted({*range(0, len(whole), 7), *(end + d for end in ends for d in (-1, 0, 1))}):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        if complete == 0:
            with pytest.raises(RecordError, match="no complete line"):
                RunRecord.load(path)
        else:
            assert len(RunRecord.load(path).steps) == complete - 1


def test_a_line_in_the_middle_that_is_no_json_is_an_error_with_its_number(path):
    write(path, [0, 2]).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{half\n" + lines[2])
    with pytest.raises(RecordError, match=r"record\.jsonl, line 2: no JSON object"):
        RunRecord.load(path)
    path.write_bytes(lines[0] + lines[2] + lines[1])
    with pytest.raises(RecordError, match="line 3: step 0 after step 2"):
        RunRecord.load(path)
    path.write_bytes(lines[1])
    with pytest.raises(RecordError, match="line 1: schema None"):
        RunRecord.load(path)


def test_resuming_cuts_later_steps_and_keeps_events(path):
    writer = write(path, [0, 2, 4])
    writer.event("note", text="kept")
    writer.append(line(6))
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"step": 8, "lo')
    writer, record = RunWriter.resume(path, 3, environment={"torch": "3"}, exact=False, reason="torch")
    assert [s["step"] for s in record.steps] == [0, 2]
    writer.append(line(4))
    writer.close()
    record = RunRecord.load(path)
    assert [s["step"] for s in record.steps] == [0, 2, 4]
    assert [e["event"] for e in record.events] == ["note", "resume"]
    assert record.events[1] == {
        "event": "resume",
        "step": 3,
        "exact": False,
        "reason": "torch",
        "environment": {"torch": "3"},
    }
    assert record.end is None
    assert [p.name for p in path.parent.iterdir()] == ["record.jsonl"]


def test_a_step_is_never_written_twice(path):
    writer = write(path, [0, 2])
    with pytest.raises(RecordError, match="has step 2 already"):
        writer.append(line(2))
    writer.close()
    assert len(RunRecord.load(path).steps) == 2
    with pytest.raises(RecordError, match="up to step 2; resume it"):
        RunWriter.new(path)


def test_a_second_writer_is_refused_also_in_another_process(path):
    writer = write(path, [0])
    with pytest.raises(RecordError, match="being written by another process"):
        RunWriter.resume(path, 0)
    code = f"from qkform.runs import RunWriter; RunWriter.resume({str(path)!r}, 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "being written by another process" in done.stderr
    writer.close()
    writer, _ = RunWriter.resume(path, 0)
    with pytest.raises(RecordError, match="being written"):  # the lock goes with the new file
        RunWriter.resume(path, 0)
    writer.close()


def test_what_is_not_finite_is_null(path):
    writer = RunWriter.new(path)
    writer.start(START)
    writer.append(line(0, loss=float("nan"), held_out=float("inf")))
    writer.close()
    assert "NaN" not in path.read_text()
    assert RunRecord.load(path).steps[0]["loss"] is None


def test_a_full_disk_leaves_whole_lines_and_says_so(path, monkeypatch):
    writer = write(path, [0])
    real = os.write

    def full(handle, data):
        if len(data) > 10:
            return real(handle, data[:10])
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RecordError, match=r"cannot write to .*record\.jsonl: No space left on device"):
            writer.append(line(2) | {"layers": line(2)["layers"]})
    assert path.read_bytes() == before
    writer.append(line(2))
    writer.close()
    assert len(RunRecord.load(path).steps) == 2


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(RecordError, match=r"it is a folder; name a file in it, such as .*record\.jsonl"):
        RunWriter.new(tmp_path)
    with pytest.raises(RecordError, match="its folder does not exist"):
        RunWriter.new(tmp_path / "no" / "record.jsonl")
    with pytest.raises(RecordError, match="there is no record to resume"):
        RunWriter.resume(tmp_path / "record.jsonl", 3)


def test_a_record_that_never_began_leaves_no_file(path):
    RunWriter.new(path).close()
    assert not path.exists()
    path.write_bytes(b'{"event": "sta')  # a kill in its first write
    writer = write(path, [0])
    writer.close()
    assert len(RunRecord.load(path).steps) == 1


def test_names_that_are_not_there(path):
    write(path, [0]).close()
    record = RunRecord.load(path)
    with pytest.raises(RecordError, match="a step has no 'loos'"):
        record.series("loos")
    with pytest.raises(RecordError, match="a layer has no 'lass'"):
        record.series("lass", layer=0)
    with pytest.raises(RecordError, match="no layer 1; there are 0 to 0"):
        record.series("symmetry", layer=1)
    with pytest.raises(RecordError, match="has no head 2; it has heads 0 to 1"):
        record.series("symmetry", layer=0, head=2)
    json.dumps(record.to_dict())


def test_a_file_that_is_no_record_is_left_alone(path):
    for text in ('{"text": "one of my documents"}\n', "a letter", "two\nlines\n"):
        path.write_text(text)
        with pytest.raises(RecordError, match=r"no record of a run; name another file|no JSON object"):
            RunWriter.new(path)
        assert path.read_text() == text
    writer = RunWriter.new(path.with_name("other.jsonl"))
    writer.start(START | {"experiment": {"seed": 4}})
    writer.close()
    writer = RunWriter.new(path.with_name("other.jsonl"))  # killed before its first step: nothing is lost
    writer.start(START)
    writer.append(line(0))
    writer.close()
    assert RunRecord.load(path.with_name("other.jsonl")).start["experiment"] == {"seed": 3}


def test_the_last_step_is_read_from_the_end_of_a_record_that_is_being_written(tmp_path, monkeypatch):
    file = tmp_path / "record.jsonl"
    assert last_step(file) is None
    file.write_text('{"event": "start"}\n')
    assert last_step(file) is None
    file.write_text(
        '{"event": "start"}\n{"step": 4, "x": 1}\n{"step": 5}\n{"event": "end", "step": 5}\n{"step": 6'
    )
    assert last_step(file) == {"step": 5}
    monkeypatch.setattr("qkform.runs.lines._TAIL", 45)  # cut within the line of step 5
    assert last_step(file) is None
    assert last_step(tmp_path) is None


@pytest.mark.parametrize("harm", ["removed", "replaced", "cut"])
def test_a_record_that_goes_while_it_is_written_is_said(tmp_path, harm):
    file = tmp_path / "record.jsonl"
    writer = RunWriter.new(file)
    writer.start({"layers": []})
    if harm == "cut":
        file.write_text("")
    else:
        file.unlink()
    if harm == "replaced":
        file.write_text("{}\n")
    with pytest.raises(RecordError, match="was removed, replaced or cut while it was being written"):
        writer.event("end", reason="finished")
    writer.close()
