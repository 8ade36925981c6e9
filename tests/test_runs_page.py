"""`qkform runs` and its page: every number is the record's, runs are told apart, and nothing of a record is obeyed."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console

from qkform.cli import main
from qkform.cli.runs import RATIOS, one_layer, ratios_of
from qkform.form.null import median_spread
from qkform.report import page_html, runcharts, runpoints, runreading, save_plots, trainedsection, write_page
from qkform.report.runsection import facts, run_colours
from qkform.report.runset import RunSet
from qkform.report.screens import renderables
from qkform.runs import RunRecord
from tests import run_records as made
from tests import test_report as pages

cache, browser = pages.cache, pages.browser


def answered(capsys: Any, *arguments: str, code: int = 0) -> str:
    assert main(["runs", *arguments]) == code
    return str(capsys.readouterr().out)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return made.run(tmp_path / "one", layers=3, heads=2, conflict=True, qk_lr_ratio=4.0)


# ---- names ----------------------------------------------------------------------------------------------------------


def test_runs_are_named_by_what_differs_and_seeds_of_an_arm_stand_together(tmp_path):
    for ratio in (1.0, 4.0):
        for seed in (0, 1):
            made.run(
                tmp_path / f"x{ratio}-{seed}", qk_lr_ratio=ratio, seed=seed, steps=4, init="skew", keep=seed
            )
    runs = RunSet.read([tmp_path])
    names = [
        "qk_lr_ratio 1, seed 0",
        "qk_lr_ratio 1, seed 1",
        "qk_lr_ratio 4, seed 0",
        "qk_lr_ratio 4, seed 1",
    ]
    assert [run.name for run in runs.runs] == names
    assert runs.arms == ["qk_lr_ratio 1", "qk_lr_ratio 4"]
    assert [run.seed for run in runs.runs] == [0, 1, 0, 1]
    colours = run_colours(runs)
    assert len(set(colours.values())) == 4, "one colour per run"
    blue, orange = ([int(colours[n][i : i + 2], 16) for i in (1, 3, 5)] for n in (names[1], names[3]))
    assert blue[2] > blue[0], "a seed has a shade of its arm's blue"
    assert orange[2] < orange[0]


def test_runs_of_a_sweep_have_the_names_of_their_arms_and_are_told_apart_on_a_narrow_screen(tmp_path):
    for arm, start in (("standard", "standard"), ("a-long-name-of-an-arm-of-matched-starts", "matched")):
        for seed in (0, 1):
            made.run(tmp_path / arm / f"seed-{seed}", steps=3, init=start, seed=seed)
    runs = RunSet.read([tmp_path])
    assert runs.arms == ["a-long-name-of-an-arm-of-matched-starts", "standard"]
    assert [run.name for run in runs.runs][2:] == ["standard, seed 0", "standard, seed 1"]
    for width in (60, 80, 120):
        first = [line.split("  ")[0] for line in screen(runs, width).splitlines()[1:7]]
        assert len(set(first)) == len(first), "no two names are cut to the same"
        assert max(map(len, screen(runs, width).splitlines())) <= width
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "standard" / "seed-1").rename(tmp_path / "elsewhere" / "seed-1")
    assert RunSet.read([tmp_path]).arms == ["init matched", "init standard"], "told by what differs"


def test_seeds_alone_and_runs_without_an_experiment(tmp_path):
    for seed in (0, 1):
        made.run(tmp_path / "seeds" / f"s{seed}", seed=seed, steps=3)
    assert [run.name for run in RunSet.read([tmp_path / "seeds"]).runs] == ["seed 0", "seed 1"]
    for name in ("a", "b"):
        first = made.start()
        made.write(tmp_path / "plain" / name, first, *made.lines(first, 3))
    assert [run.name for run in RunSet.read([tmp_path / "plain"]).runs] == ["a", "b"]
    long = "a text that is longer than a name should be, " * 2
    for arm in ("x", "y"):
        made.run(tmp_path / "sweep" / arm / "seed-0", note=f"{long}{arm}", steps=3)
    assert RunSet.read([tmp_path / "sweep"]).arms == ["x", "y"], "told by the folders of a sweep"
    made.run(tmp_path / "more" / "with", steps=3, lr=0.1, note="")
    made.write(tmp_path / "more" / "without", made.start(), *made.lines(made.start(), 3))
    assert RunSet.read([tmp_path / "more"]).arms == ["with", "without"]
    twice = RunSet.read([tmp_path / "plain" / "a", tmp_path / "plain" / "a" / "record.jsonl"])
    assert len({run.name for run in twice.runs}) == 2


def test_layers_of_two_widths_have_no_band_of_a_median():
    alike = [{"low": -0.01, "high": 0.03}, {"low": -0.005, "high": 0.025}]
    assert runpoints.band_of_median(alike)["low"] == pytest.approx(0.01 - 0.0175 * median_spread(2), rel=1e-3)
    assert runpoints.band_of_median([*alike, {"low": 0.009, "high": 0.011}]) == {"low": None, "high": None}
    assert runpoints.band_of_median([{"low": None, "high": None}]) == {"low": None, "high": None}


def test_the_band_beside_the_median_layer_is_that_of_a_median(tmp_path, one):
    runs = RunSet.read([one])
    (run,) = runs.runs
    for row in runpoints.middles(runs.runs):
        step = next(step for step in run.record.steps if step["step"] == row["step"])
        bands = [(each["low"], each["high"]) for each in runpoints.layers(run, [step])]
        wide = median(high - low for low, high in bands)
        assert row["high"] - row["low"] == pytest.approx(wide * median_spread(3), rel=1e-3)
        assert row["high"] + row["low"] == pytest.approx(median(low + high for low, high in bands), rel=1e-3)
    shown = trainedsection.line("encoder", "", run)
    assert shown["random_median"] != shown["random"]
    low, high = (float(part) for part in shown["random_median"].split(" to "))
    assert (low, high) == pytest.approx((row["low"], row["high"]), abs=6e-4)


# ---- reading --------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_read_as_far_as_it_is_whole(tmp_path):
    first = made.start(layers=1, heads=1, seed=3)
    found = made.lines(first, 5)
    made.write(tmp_path / "going", first, *found, torn=json.dumps(found[0])[:90])
    (run,) = RunSet.read([tmp_path / "going"]).runs
    assert (run.tracked, run.last["step"]) == (5, 40)
    assert run.state.startswith("no end recorded")
    assert facts(run)["resumed"] == ""


def test_resumes_and_ends_are_told(one):
    (run,) = RunSet.read([one]).runs
    assert run.state == "finished"
    assert runpoints.resumes([run]) == [{"run": "one", "step": 100, "said": "resumed exactly"}]
    events = [{"event": "resume", "step": 30, "exact": False, "reason": "2 threads, 1 before"}]
    other = RunSet.of([("x", RunRecord(run.record.start, events, run.record.steps))])
    assert runpoints.resumes(other.runs)[0]["said"] == "resumed, not exact: 2 threads, 1 before"


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path, one, capsys):
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken.jsonl"
    broken.write_text((one / "record.jsonl").read_text().replace('"step": 20', '"step": "x"', 1))
    assert main(["runs", str(one), str(tmp_path / "empty"), str(broken), str(tmp_path / "gone"), "-q"]) == 2
    out, err = capsys.readouterr()
    assert "finished" in out
    assert f"there is no record.jsonl in {tmp_path / 'empty'} or below" in err
    assert "broken.jsonl, line 4: step is 'x'" in err
    assert "gone" in err.splitlines()[-1]
    assert main(["runs"]) == 2


@pytest.mark.parametrize("most", [2, 3, 7, 100])
def test_a_large_record_is_sampled_as_a_small_one_is_thinned(one, monkeypatch, most):
    file = one / "record.jsonl"
    with file.open("a") as more:
        more.write('{"step": 999, "lo')
    whole, count = runreading.thinned(file, most)
    monkeypatch.setattr(runreading, "LARGE", 0)
    sampled, again = runreading.thinned(file, most)
    assert count == again == 20
    assert sampled == whole
    steps = [step["step"] for step in sampled.steps]
    assert (steps[0], steps[-1], len(steps)) == (0, 190, min(most, 20))
    assert sampled.steps == [step for step in RunRecord.load(file).steps if step["step"] in steps]
    gaps = [b - a for a, b in pairwise(steps)]
    assert max(gaps) - min(gaps) <= 10, "evenly spread"


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_json_and_csv_have_the_first_and_the_last_step(one, capsys, tmp_path):
    saved = tmp_path / "rows.csv"
    document = json.loads(answered(capsys, str(one), "--format", "json", "--out", str(saved)))
    assert document["schema"] == "qkform.runs/1"
    (run,) = document["runs"]
    assert (run["name"], run["state"], run["steps"], run["start"]["layers"][2]["layer"]) == (
        "one",
        "finished",
        20,
        2,
    )
    rows = document["rows"]
    assert len(rows) == 2 * 3 * (1 + 2)
    assert {row["step"] for row in rows} == {0, 190}
    record = RunRecord.load(one)
    for row in rows:
        steps, values = record.series("symmetry", layer=row["layer"], head=row["head"])
        assert row["symmetry"] == values[steps.index(row["step"])]
    assert answered(capsys, str(one), "--format", "csv") == saved.read_text()
    assert len(answered(capsys, str(one), "--format", "csv", "--every-step").splitlines()) == 1 + 20 * 9
    answered(capsys, str(one), "--out", str(saved))  # what it wrote, it may write again


def test_points_are_the_records_numbers(one):
    (run,) = RunSet.read([one]).runs
    record = run.record
    rows = runpoints.layers(run, record.steps)
    assert len(rows) == 20 * 3
    for row in rows:
        step = next(s for s in record.steps if s["step"] == row["step"])
        kept = step["layers"][row["layer"]]
        for name in runpoints.MEASURES:
            assert row[name] == (pytest.approx(kept[name], rel=1e-4) if name in kept else None)
        assert row["low"] == pytest.approx(1 / 48 - 2 * kept["null_sd"], rel=1e-4)
        assert row["high"] == pytest.approx(1 / 48 + 2 * kept["null_sd"], rel=1e-4)
        assert row["loss"] == pytest.approx(step["held_out"], rel=1e-4)
    heads = runpoints.heads(run, 1, record.steps)
    assert [row["head"] for row in heads[:3]] == [None, 0, 1]
    assert heads[2]["symmetry"] == pytest.approx(
        record.steps[0]["layers"][1]["heads"]["symmetry"][1], rel=1e-4
    )
    middle = runpoints.middles([run])[-1]
    assert middle["norm"] == pytest.approx(
        median(row["norm"] for row in record.steps[-1]["layers"]), rel=1e-4
    )


def test_conflict_is_its_excess_over_the_null_not_the_cosine(one):
    (run,) = RunSet.read([one]).runs
    found = runpoints.conflicts([run])
    assert len(found) == 20 * 3 * 2
    over = runpoints.excesses(found)
    kept = run.record.steps[7]["layers"][2]["conflict"]
    row = next(row for row in over if (row["step"], row["layer"]) == (70, 2))
    assert row["excess"] == pytest.approx(sum(kept["excess"]) / 2, rel=1e-4)
    assert (row["low"], row["high"]) == pytest.approx((-0.06, 0.06))


def test_held_out_loss_where_it_was_recorded_else_the_training_loss(one, tmp_path):
    (run,) = RunSet.read([one]).runs
    assert runpoints.whose_loss([run]) == "held_out"
    steps = [step | {"held_out": None} for step in run.record.steps]
    bare = RunSet.of([("x", RunRecord(run.record.start, [], steps))])
    assert runpoints.whose_loss(bare.runs) == runpoints.whose_loss([run, *bare.runs]) == "loss"
    assert runpoints.layers(bare.runs[0], steps[:1])[0]["loss"] is None
    assert runpoints.layers(bare.runs[0], steps[1:2])[0]["loss"] == pytest.approx(steps[1]["loss"], rel=1e-4)


def test_charts_are_vega_lite(one):
    (run,) = RunSet.read([one]).runs
    rows = runpoints.layers(run, run.record.steps)
    heads = runpoints.heads(run, 0, run.record.steps)
    conflicts, marks, colours = runpoints.conflicts([run]), runpoints.resumes([run]), {"one": "#0072b2"}
    for chart in (
        runcharts.losses(runpoints.losses([run]), colours, marks, legend=True),
        *(
            runcharts.over_steps(rows, measure, by, marks)
            for measure in ("symmetry", "norm")
            for by in (None, colours)
        ),
        runcharts.of_heads(heads, "symmetry", marks),
        *(runcharts.against_loss(rows, "largest", "held_out", by) for by in (None, colours)),
        *(runcharts.excess(runpoints.excesses(conflicts), by, marks) for by in (None, colours)),
        *(runcharts.against_null(conflicts, by) for by in (None, colours)),
    ):
        chart.to_dict()  # validates


def test_the_one_layer_model_stands_at_the_ratios_of_the_runs(one, tmp_path):
    runs = RunSet.read([one])
    assert ratios_of(runs) == [1.0, 4.0]
    made.run(tmp_path / "other", qk_lr_ratio=1.0, steps=3)
    assert ratios_of(RunSet.read([tmp_path / "other"])) == RATIOS
    flow = one_layer([1.0, 4.0])
    assert flow is not None
    assert [row["ratio"] for row in flow.rows] == [1.0, 4.0]
    lines = [point for point in flow.points if point["kind"] == "line" and point["across"] > 0]
    for ratio in (1.0, 4.0):
        heights = [p["up"] / p["across"] for p in lines if p["ratio"] == ratio]
        assert heights == pytest.approx([heights[0]] * len(heights), rel=1e-6), (
            "the invariant is a straight line"
        )


# ---- the screen -----------------------------------------------------------------------------------------------------


def screen(runs: RunSet, width: int, unicode: bool = True) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, emoji=False, markup=False)
    for item in renderables(runs, width=width, unicode=unicode):
        console.print(item)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_screen_fits_and_shows_first_and_last(tmp_path, one, width):
    made.run(tmp_path / "two", layers=3, heads=2, qk_lr_ratio=1.0)
    runs = RunSet.read([one, tmp_path / "two"])
    out = screen(runs, width)
    assert max(map(len, out.splitlines())) <= width
    first, last = (runs.runs[0].record.steps[i]["layers"][2] for i in (0, -1))
    said = f"{first['symmetry']:.3f} → {last['symmetry']:.3f} {last['symmetry_z']:.0f} "
    assert said in " ".join(out.split())
    assert "…" not in out.splitlines()[1], "headings are whole"
    assert ("largest" in out) == (width == 160)
    if width == 160:
        assert out.count("qk_lr_ratio") == 4
        assert "resumed at 100" in out
    assert not screen(runs, width, unicode=False).replace("–", "").strip().count("→")


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_has_the_facts(one, cache):
    runs = RunSet.read([one])
    html = page_html(runs, cache_folder=cache)
    last = runs.runs[0].record.steps[-1]
    for said in (
        f"{last['loss']:.4f}",
        f"{last['held_out']:.4f}",
        "resumed exactly at 100",
        "0.50%",
        "778,240",
        "20,480",
    ):
        assert said in html
    assert "qk 0.0006, rest 0.00015" in html
    assert html.count('class="chart"') == 1 + 2 + 4 + 2 + 3 + 2
    assert "environment.torch" in html
    assert "one-layer model" not in html
    with_model = page_html(
        RunSet.of([(str(one), runs.runs[0].record)], flow=one_layer([1.0, 4.0])), cache_folder=cache
    )
    assert "not</b> a measurement of this run" in with_model
    assert "at the ratios 1, 4" in with_model
    assert with_model.count('class="chart"') == html.count('class="chart"') + 2


def test_pages_of_little(tmp_path, one, cache):
    assert "No record was given" in page_html(RunSet(), cache_folder=cache)
    assert "None of the records" in page_html(
        RunSet.read([tmp_path / "gone"], on_error="record"), cache_folder=cache
    )
    first = made.start(layers=2, heads=2)
    started = made.write(tmp_path / "started", first)
    assert "No step of this run was tracked yet" in page_html(RunSet.read([started]), cache_folder=cache)
    single = made.write(tmp_path / "single", first, made.lines(first, 1)[0])
    assert page_html(RunSet.read([single]), cache_folder=cache).count('class="chart"') > 5
    nothing = [
        {
            "step": i,
            "loss": None,
            "held_out": None,
            "rates": {},
            "layers": [{}, {"symmetry": None, "heads": {}}],
        }
        for i in range(3)
    ]
    nulls = RunSet.read([made.write(tmp_path / "nulls", first, *nothing)])
    assert page_html(nulls, cache_folder=cache).count('class="chart"') == 0
    assert len(screen(RunSet.read([started, single, tmp_path / "nulls"]), 80)) > 0
    layerless = RunSet.read(
        [made.write(tmp_path / "none", made.start(layers=0), *made.lines(made.start(layers=0), 4))]
    )
    assert page_html(layerless, cache_folder=cache).count('class="chart"') == 1


def large(kept: int) -> RunSet:
    """A run of 48 layers with 16 heads each, 10,000 tracked steps, of which so many are read."""
    first = made.start(layers=48, heads=16, seed=0)
    few = made.lines(first, 3)
    steps = [few[i % 3] | {"step": i} for i in range(10_000)]
    return RunSet.of([("big", RunRecord(first, [], runreading.spread(steps, kept)))], [10_000])


def test_a_long_run_of_a_large_model_is_thinned():
    (run,) = large(400).runs
    assert len(runpoints.heads(run, 5, runpoints.steps_drawn(run, 17))) <= 1.1 * runpoints.POINTS
    assert len(runpoints.layers(run, runpoints.steps_drawn(run, 48))) <= runpoints.POINTS
    assert runpoints.charted(run) == [0, 4, 9, 13, 17, 21, 26, 30, 34, 38, 43, 47]
    drawn = [step["step"] for step in runpoints.steps_drawn(run, 48)]
    assert (drawn[0], drawn[-1], len(drawn)) == (0, 9999, 83)


@pytest.mark.slow
def test_the_page_of_a_long_run_of_a_large_model_says_what_it_left_out(cache):
    html = page_html(large(400), cache_folder=cache)
    assert "draw 83 of 10,000 tracked steps" in html
    assert "12 of 48 layers, evenly spread, have a chart of their heads" in html
    print(f"{len(html):,} characters")
    assert len(html) < 15e6


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u2028\u202e{{7*7}}"


NAME = "<script>window.hacked=1</script>"


def test_in_a_browser_hostile_runs_beside_each_other(tmp_path, browser, cache):
    for seed in range(2):
        made.run(
            tmp_path / "runs" / f"h{seed}",
            layers=2,
            heads=2,
            steps=6,
            conflict=True,
            note=NAME,
            said=HOSTILE,
            seed=seed,
            name=HOSTILE + "{}",
        )
    made.run(
        tmp_path / "runs" / "other",
        layers=2,
        heads=2,
        steps=6,
        note=f"{NAME}2",
        said=HOSTILE,
        qk_lr_ratio=4.0,
    )
    runs = RunSet.read([tmp_path / "runs", tmp_path / HOSTILE.replace("/", "|")], on_error="record")
    runs = RunSet(runs.runs, runs.errors, flow=one_layer([1.0, 4.0]))
    path = write_page(runs, tmp_path / "page.html", cache_folder=cache)
    with pages.opened(browser, path, 390) as page:
        assert pages.drawn_charts(page) > 20
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("#runs tbody tr").count() == 3
        assert "script" in page.locator("#runs tbody th").first.inner_text()
        assert page.locator("#table tbody tr").count() == 6


def test_every_chart_as_a_file(one, tmp_path):
    runs = RunSet.read([one])
    written = save_plots(RunSet(runs.runs, flow=one_layer([1.0, 4.0])), tmp_path / "plots", ["svg"])
    names = [path.name for path in written]
    assert names[0] == "runs-loss.svg"
    assert {
        "01-one-symmetry.svg",
        "01-one-layer-2-heads.svg",
        "runs-conflict.svg",
        "flow-phase-plane.svg",
    } <= {*names}
    assert "Symmetry of the heads of layer 2" in (tmp_path / "plots" / "01-one-layer-2-heads.svg").read_text()
