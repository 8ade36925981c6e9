"""What `print` shows: short tables of plain text, and never a raw list of dicts."""

from __future__ import annotations

from pathlib import Path

import pytest

import qkform as qk
from qkform.plain import plain_table, short
from qkform.records import ScoreTable, SourceFault, merged


def test_a_table_of_text() -> None:
    rows = [
        {"layer": 0, "name": "a\n b", "norm": 12345.0, "rate": 3e-5, "none": None},
        {"layer": 11, "name": None, "norm": None, "rate": 0.0, "none": None},
    ]
    assert plain_table(rows, ["layer", "name", "norm", "rate", "none"]).splitlines() == [
        "layer  name       norm   rate",
        "    0  a b   12345.000  3e-05",
        "   11  –             –  0.000",
    ]
    assert plain_table([], ["layer"]) == ""
    assert (short((4, 5)), short(True), short(("bias",)), short(1e9)) == ("4, 5", "True", "bias", "1e+09")


def test_a_score_table_is_printed_layer_by_layer(bert: Path) -> None:
    table = merged([qk.scan(bert), ScoreTable(errors=[SourceFault("gone", "is not there")])])
    lines = str(table).splitlines()
    assert lines[0] == f"{bert}: 2 layers, 6 heads"
    assert lines[1].split()[:3] == ["component", "layer", "attention"]
    assert [line.split()[1] for line in lines[2:4]] == ["0", "1"]
    assert f"{table.layers[0]['symmetry']:.3f}" in lines[2]
    assert lines[-1] == "gone: is not there"
    assert all(len(line) < 120 for line in lines[1:])
    assert str(ScoreTable()) == repr(ScoreTable())


def test_a_diff_table_and_a_flow_table(bert: Path) -> None:
    lines = str(qk.diff(bert, bert)).splitlines()
    assert lines[0].startswith("DiffTable(")
    assert len(lines) == 4
    assert "symmetry_change" in lines[1]
    from qkform.flows import FlowTable

    row = {"ratio": 4.0, "gap": 1.5, "gain": 2.0, "sharpness": 3.0, "entropy": 0.5, "simulated": None}
    lines = str(FlowTable({}, [row])).splitlines()
    assert [line.split()[0] for line in lines] == ["FlowTable(1", "ratio", "4.000"]


def test_starts_and_groups_are_printed_as_tables() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict({n: torch.nn.MultiheadAttention(12, 3) for n in ("a", "b", "multihead_attn")})
    starts = qk.surgery.symmetrize_(model, arm="orthogonal")
    lines = str(starts).splitlines()
    assert lines[0].split() == ["path", "arm", "symmetry", "expected", "norm", "times_before"]
    assert lines[1].split()[:2] == ["a", "orthogonal"]
    assert f"{starts[0].norm / starts[0].norm_before:.3f}" in lines[1]
    assert lines[-1].startswith("left as it is: multihead_attn: cross-attention")
    groups = qk.surgery.param_groups(model, lr=3e-4, qk_lr_ratio=4.0)
    rows = qk.surgery.describe_groups(model, groups)
    assert rows == [dict(row) for row in rows]
    lines = str(rows).splitlines()
    assert lines[0].split() == ["group", "parameter", "shape", "lr", "weight_decay"]
    assert len(lines) == len(rows) + 1
    assert "qk/decay" in lines[1]
    assert "0.001" in lines[1]
