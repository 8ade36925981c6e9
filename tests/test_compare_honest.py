"""What a comparison must not do: let outsiders choose, compare texts by their names, average over survivors, hang."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from qkform.cli import main
from qkform.comparisons import CompareTable
from qkform.errors import RecordError
from qkform.training import gathering, reach
from qkform.training.comparing import compare
from tests.arm_records import falling, write_run

FAST, SLOW = 0.06, 0.03


@pytest.fixture
def runs(tmp_path):
    """Two arms of three seeds."""
    root = tmp_path / "runs"
    for seed in range(3):
        write_run(root / "standard" / f"seed-{seed}", falling(SLOW, 3 + seed / 10), seed=seed)
        write_run(root / "matched" / f"seed-{seed}", falling(FAST, 3), seed=seed, init="matched")
    return root


def edited(folder: Path, change: Any) -> Path:
    """A run whose record has been through `change`, a function of its list of lines as objects."""
    file = folder / "record.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return folder


def with_key(folder: Path, key: str) -> Path:
    return edited(folder, lambda lines: [*lines[:2], {"event": "data", "key": key}, *lines[2:]])


def mean(table: CompareTable, arm: str, at: str, measure: str) -> dict[str, Any]:
    (found,) = [row for row in table.means if (row["arm"], row["at"], row["measure"]) == (arm, at, measure)]
    return found


def test_what_takes_no_part_changes_no_row_of_another_pair(runs):
    before = compare([runs])
    write_run(runs / "other-text" / "seed-0", falling(0.1, 5.0), seed=0, data=["other"])
    write_run(runs / "clm" / "seed-0", falling(0.1, 4.9), seed=0, objective="clm")
    write_run(runs / "matched" / "seed-9", falling(0.1, 4.8), seed=9, init="matched")
    after = compare([runs], baseline="standard")
    assert after.settings["at_loss"] == before.settings["at_loss"] < 3.5
    (pair,) = [pair for pair in after.pairs if pair["arm"] == "matched"]
    assert pair["rows"] == before.pairs[0]["rows"]


def test_a_run_reaches_the_loss_at_which_it_stopped_and_none_before_its_time(tmp_path):
    for name, rate, more in (("standard", SLOW, {}), ("matched", FAST, {"init": "matched"})):
        curve = falling(rate)
        curve = {step: loss for step, loss in curve.items() if step - 10 not in curve or curve[step - 10] > 4}
        for seed in range(3):
            write_run(tmp_path / name / f"seed-{seed}", curve, seed=seed, end="stop_at_loss", **more)
    table = compare([tmp_path], at_loss=4.0)
    found = mean(table, "matched", "at_loss", "step")
    assert (found["arm_never"], found["baseline_never"], found["n"]) == (0, 0, 3)
    steps = [{"step": s, "held_out": v, "layers": []} for s, v in ((0, 5.6), (10, 4.43), (20, 4.4))]
    reached = reach.Curve.of(steps).first_reach(5.04)
    assert reached is not None
    assert reached["step"] == pytest.approx(10 * (5.6 - 5.04) / (5.6 - 4.43))
    assert reach.Curve.of(steps).final_smoothed == 4.4


def test_the_same_tokens_are_one_text_however_it_is_named(runs):
    for folder in gathering.find([runs]):
        with_key(folder, "a" * 64)
    with_key(write_run(runs / "matched" / "seed-5", falling(FAST), seed=5, init="matched"), "a" * 64)
    for seed, data in enumerate((["./sotu"], ["elsewhere"])):
        folder = runs / "decoupled" / f"seed-{seed}"
        with_key(
            write_run(folder, falling(FAST), seed=seed, data=data, attention="decoupled", on_error="skip"),
            "a" * 64,
        )
    table = compare([runs])
    assert [(arm["name"], arm["differs"]) for arm in table.arms] == [
        ("decoupled", {"attention": "decoupled"}),
        ("matched", {"init": "matched"}),
        ("standard", {}),
    ]
    assert [pair["refused"] for pair in table.pairs] == [None, None]


def test_another_text_under_the_same_name_is_not_paired(runs):
    for folder in gathering.find([runs]):
        with_key(folder, ("b" if "matched" in str(folder) else "a") * 64)
    table = compare([runs])
    assert table.pairs[0]["refused"] == (
        "the text or its tokenizer is another, by the same names "
        "(key bbbbbbbbbbbb in matched, aaaaaaaaaaaa in standard)"
    )
    assert table.arms[0]["differs"] == {"init": "matched", "tokens": "b" * 12}


@pytest.mark.parametrize("field", ["text_field", "split", "dataset_config", "revision", "tokenizer"])
def test_without_a_key_every_field_of_the_text_counts(tmp_path, field):
    write_run(tmp_path / "a" / "seed-0", falling(SLOW), seed=0)
    write_run(tmp_path / "b" / "seed-0", falling(FAST), seed=0, init="matched", **{field: "x"})
    assert compare([tmp_path]).pairs[0]["refused"] == f"{field} differs: x in b, None in a"


def test_an_option_of_the_model_is_not_taken_for_one_of_ours(tmp_path):
    write_run(tmp_path / "a" / "seed-0", falling(SLOW), seed=0)
    write_run(tmp_path / "b" / "seed-0", falling(FAST), seed=0, init="matched", config={"keep": 3})
    assert compare([tmp_path]).pairs[0]["refused"] == "config.keep differs: 3 in b, None in a"


def test_runs_tracked_unequally_often_are_said(tmp_path):
    write_run(tmp_path / "a" / "seed-0", falling(SLOW), seed=0)
    write_run(tmp_path / "b" / "seed-0", falling(FAST, every=20), seed=0, init="matched", track_every=20)
    assert "b and a were not tracked equally often (every 10 and 20 steps)" in " ".join(
        compare([tmp_path]).notes
    )


@pytest.mark.parametrize("broken", ["matched", "standard"])
def test_there_is_no_mean_over_the_seeds_that_survived(runs, broken):
    for name in ("standard", "matched"):
        more = {"init": "matched"} if name == "matched" else {}
        write_run(
            runs / name / "seed-3", falling(SLOW), seed=3, end="nan" if name == broken else "finished", **more
        )
    table = compare([runs])
    side = "arm" if broken == "matched" else "baseline"
    for measure in ("loss", "held_out", "symmetry"):
        found = mean(table, "matched", "end", measure)
        assert (found["difference"], found["low"], found["p"], found["n"]) == (None, None, None, 3)
        assert (found[f"{side}_broke"], found["arm_broke"] + found["baseline_broke"]) == (1, 1)
        assert f"the {side} broke in 1 of 4 seeds; no mean, since" in found["reason"]
    times = mean(table, "matched", "to_baseline", "step")
    assert (times["difference"] is None) == (broken == "standard")
    (arm,) = [arm for arm in table.arms if arm["name"] == broken]
    assert arm["broke"] == 1
    assert set(arm["mean"].values()) == set(arm["sd"].values()) == {None}
    assert "losses it had not reached are never" in " ".join(table.notes)


def test_a_mean_over_fewer_seeds_says_so(runs):
    def nothing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**line, "held_out": None} if "held_out" in line else line for line in lines]

    edited(runs / "matched" / "seed-1", nothing)
    found = mean(compare([runs]), "matched", "end", "held_out")
    assert found["n"] == 2
    assert "1 of 3 seeds left out: held_out is not in" in found["reason"]
    assert "/matched/seed-1" in found["reason"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_what_is_no_number_is_no_value(value):
    lines = [{"step": i, "held_out": v, "layers": [{"symmetry": v}]} for i, v in enumerate((5.0, value, 3.0))]
    curve = reach.Curve.of(lines)
    assert (curve.values["held_out"][1], curve.values["symmetry"][1], curve.smoothed[1]) == (None, None, None)
    reached = curve.first_reach(4.0)
    assert reached is not None
    assert reached["step"] == 1


@pytest.mark.parametrize("seed", [[0], {"a": 1}, "0", 1.5, True])
def test_a_seed_that_is_no_whole_number_is_left_out(runs, seed):
    write_run(runs / "x" / "seed-0", falling(SLOW), seed=seed, lr=1.0)
    write_run(runs / "y" / "seed-0", falling(SLOW), start={"experiment": [1]})
    table = compare([runs])
    assert len(table.arms) == 2
    assert sum("left out" in note for note in table.notes) == 2


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1"])
def test_a_loss_that_no_run_can_reach_is_refused_by_name(runs, value, capsys):
    assert main(["compare", str(runs), "--format", "json", f"--at-loss={value}"]) == 2
    assert f"--at-loss {float(value)}: expected a held-out loss above 0" in capsys.readouterr().err
    with pytest.raises(RecordError):
        compare([runs], at_loss=float(value))


def test_links_are_walked_once_and_a_run_keeps_its_name(runs):
    before = gathering.find([runs])
    (runs / "a").symlink_to(runs)
    (runs / "b").symlink_to("..")
    (runs / "a-latest").symlink_to(runs / "standard" / "seed-2")
    (runs / "standard" / "up").symlink_to(runs)
    assert gathering.find([runs]) == before
    (runs / "standard" / "up").unlink()
    elsewhere = runs.parent / "links"
    elsewhere.mkdir()
    (elsewhere / "one").symlink_to(runs / "standard")
    assert gathering.find([elsewhere]) == [elsewhere / "one" / f"seed-{i}" for i in range(3)]
    assert gathering.find([runs / "a-latest"]) == [runs / "a-latest"]
