"""Steps of one run, distances of one model, parts of a score: found, kept apart, and gone through with a slider."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qkform.records import ModelScores, ScoreTable
from qkform.report import page_html, write_page
from qkform.report.paths import spacing
from qkform.report.reading import reading
from qkform.report.rows import groups
from qkform.report.screens import renderables
from qkform.report.series import entries, labels
from tests import test_report as pages

cache, browser = pages.cache, pages.browser
CELLS = pages.CELLS


def run(*steps: int, name: str = "runs/a/checkpoint-{}", **more: Any) -> list[ModelScores]:
    """Checkpoints of one run: symmetry of every head is the number of the checkpoint in tenths."""
    models = []
    for i, step in enumerate(steps):
        rows = pages.scored_rows(i, n_layers=3, n_heads=2)
        for row in rows:
            row["symmetry"] = (i + 1) / 10
        models.append(pages.a_model(rows, name.format(step), step=step, **more))
    return models


def described(table: ScoreTable) -> list[tuple[str, str | None, list[int]]]:
    return [(entry.name, entry.kind, entry.values) for entry in entries(table)]


# ---- what belongs together ---------------------------------------------------------------------------------


def test_steps_of_a_run_become_one_entry_in_order_whatever_order_they_come_in() -> None:
    alone = pages.a_model(pages.scored_rows(9), "acme/alone")
    table = ScoreTable([*run(300, 20, 1000), alone])
    assert described(table) == [
        ("runs/a/checkpoint-*", "step", [20, 300, 1000]),
        ("acme/alone", None, []),
    ]


def test_revisions_of_one_hub_id_are_steps() -> None:
    models = run(1, 2, name="org/m")
    models = [ModelScores(**{**vars(m), "revision": f"abc{m.step}"}) for m in models]
    assert described(ScoreTable(models)) == [("org/m", "step", [1, 2])]


def test_steps_given_twice_both_stay() -> None:
    table = ScoreTable([*run(5, 7), *run(5)])
    assert described(table) == [("runs/a/checkpoint-*", "step", [5, 5, 7])]


@pytest.mark.parametrize(
    "other",
    [
        run(2, name="runs/b/checkpoint-{}"),
        run(2, model_type="gpt2"),
        run(2, offset=3),
        [pages.a_model(pages.scored_rows(1, d_model=64), "runs/a/checkpoint-2", step=2)],
        [pages.a_model(pages.scored_rows(1), "runs/a/checkpoint-2")],
        [pages.a_model([], "runs/a/checkpoint-2", step=2)],
    ],
    ids=["another run", "another type", "another distance", "another width", "no step", "no rows"],
)
def test_what_differs_in_more_than_the_step_stays_apart(other: list[ModelScores]) -> None:
    assert [entry.kind for entry in entries(ScoreTable([*run(1), *other]))] == [None, None]


def test_only_the_number_that_is_the_step_is_left_out_of_a_source() -> None:
    table = ScoreTable([*run(1, 2, name="runs-1/lr2/checkpoint-000{}/part-3")])
    assert described(table)[0][0] == "runs-1/lr2/checkpoint-*/part-3"


def test_distances_of_one_model_become_one_entry_with_the_unrotated_form_at_zero() -> None:
    models = [pages.a_model(pages.scored_rows(1), offset=offset) for offset in (8, None, -2)]
    (entry,) = entries(ScoreTable(models))
    assert (entry.kind, entry.values, entry.start) == ("offset", [-2, 0, 8], 1)
    assert {row["offset"] for group in groups(entry.models, "x", distances=True) for row in group.rows} == {
        -2,
        0,
        8,
    }


def test_one_model_scanned_twice_is_no_series() -> None:
    model = pages.a_model(pages.scored_rows(1))
    found = entries(ScoreTable([model, model, pages.a_model([]), pages.a_model([])]))
    assert [entry.kind for entry in found] == [None] * 4
    assert len(set(labels(found))) == 4


def test_records_from_elsewhere_with_anything_in_them_are_sorted_into_entries() -> None:
    rows = pages.scored_rows(1)
    odd: dict[str, Any] = {"model_type": ["x"], "revision": {}, "step": "many", "offset": [1]}
    models = [pages.a_model(rows, **{key: value}) for key, value in odd.items()]
    models.append(
        ModelScores("x", "y", None, 1, 1.0, [1], (), [row | {"d_model": [1]} for row in rows], step=3)
    )  # type: ignore[arg-type]
    assert len(entries(ScoreTable(models + models))) >= len(models)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ([1, 2, 4, 8, 16, 32, 64, 128], "log"),
        ([0, 1, 2, 4, 8, 512, 1000, 2000, 16000], "log"),
        ([500 * i for i in range(1, 51)], "linear"),
        ([0, 1, 2, 4, 8, 16, *range(1000, 144_000, 1000)], "linear"),
        ([7, 7], "linear"),
        ([], "linear"),
    ],
)
def test_steps_are_spaced_by_logarithm_where_half_of_them_are_early(stops: list[int], expected: str) -> None:
    assert spacing(stops, "step") == expected
    assert spacing(stops, "offset") == "log"


# ---- parts of a score --------------------------------------------------------------------------------------


def with_parts() -> ModelScores:
    whole = pages.scored_rows(1)
    rows = [row | {"part": None} for row in whole]
    for part in ("nope", "rope"):
        rows += [row | {"part": part, "symmetry": -0.9} for row in whole]
    return pages.a_model(rows)


def test_parts_of_a_score_are_groups_of_their_own() -> None:
    found = groups([with_parts()], "x")
    assert [(group.part, len(group.rows)) for group in found] == [("", 30), ("nope", 30), ("rope", 30)]


def test_summaries_of_a_model_use_whole_scores_alone(cache: Path) -> None:
    model = with_parts()
    whole = pages.a_model([row for row in model.rows if row["part"] is None])
    assert reading(model) == reading(whole)
    html = page_html(ScoreTable([model]), cache_folder=cache)
    cards = [
        re.findall(r'<div class="spread">.*?</div>', h, re.S)
        for h in (html, page_html(ScoreTable([whole]), cache_folder=cache))
    ]
    assert cards[0]
    assert cards[0] == cards[1]
    assert "encoder.layer</bdi>, <bdi>nope</bdi> part" in html


def test_plane_has_no_parts_in_it(browser: Any, cache: Path, tmp_path: Path) -> None:
    with pages.opened(
        browser, write_page(ScoreTable([with_parts()]), tmp_path / "p.html", cache_folder=cache)
    ) as page:
        assert pages.drawn_charts(page) == 1 + 3 * pages.CHARTS_PER_GROUP
        assert page.locator(".chart").first.locator(".mark-symbol.role-mark path").count() == 30


# ---- on the page -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trajectory() -> ScoreTable:
    """Unsorted, one step twice, a layer missing at one step, a head and a layer without scores."""
    models = run(100, 20, 5, 5)
    models[1] = ModelScores(
        **{**vars(models[1]), "rows": [row for row in models[1].rows if row["layer"] != 2]}
    )
    models[0].rows[1].update(pages.undefined("not a number"))
    models[2].rows[3].update(pages.undefined("all zero") | {"symmetry": math.nan})
    return ScoreTable([*models, pages.a_model(pages.scored_rows(9), "acme/alone")])


@pytest.fixture(scope="module")
def page_of_run(trajectory: ScoreTable, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(trajectory, tmp_path_factory.mktemp("pages") / "run.html", cache_folder=cache)


def shown(page: Any, stop: int) -> None:
    page.wait_for_selector(f'.slider[data-shown="{stop}"]')


def colours(page: Any, chart: int) -> list[str]:
    marks = page.locator("#model-0 .chart").nth(chart).locator(CELLS).all()
    return [mark.get_attribute("fill") for mark in marks]


def test_run_is_one_section_with_a_slider_and_charts_over_steps(browser: Any, page_of_run: Path) -> None:
    with pages.opened(browser, page_of_run) as page:
        # both planes, then per section five charts and, of the run, two over steps
        assert pages.drawn_charts(page) == 2 + 2 * pages.CHARTS_PER_GROUP + 2
        assert page.locator("section.model").count() == 2
        slider = page.get_by_label("Training step")
        assert slider.get_attribute("aria-valuetext") == "100, 4 of 4"
        lines = page.locator("#model-0 .chart").nth(1).locator(".mark-line path")
        assert lines.count() == 3 + 1  # layers, and their median


def test_slider_moves_every_chart_from_the_keyboard(browser: Any, page_of_run: Path) -> None:
    with pages.opened(browser, page_of_run) as page:
        slider = page.get_by_label("Training step")
        heat, plane = 3, page.locator("#plane .chart .mark-symbol path")
        at_end = colours(page, heat)
        assert len(at_end) == 6
        assert len(set(at_end)) == 2  # one head there is not defined
        places = [mark.get_attribute("transform") for mark in plane.all()]
        slider.focus()
        page.keyboard.press("ArrowLeft")
        shown(page, 2)
        assert slider.get_attribute("aria-valuetext") == "20, 3 of 4"
        assert len(colours(page, heat)) == 4  # one layer is missing there
        axis = page.locator("#model-0 .chart").nth(heat).locator(".role-axis-label text").all_text_contents()
        assert {"0", "1", "2"} <= set(axis)  # but keeps its place
        assert set(colours(page, heat)) != set(at_end)
        assert [mark.get_attribute("transform") for mark in plane.all()] != places
        page.keyboard.press("Home")
        shown(page, 0)
        assert page.locator(".slider output").inner_text() == "5 · 1 of 4"
        page.keyboard.press("ArrowRight")
        shown(page, 1)
        assert page.locator(".slider output").inner_text() == "5 (2) · 2 of 4"
        page.keyboard.press("End")
        shown(page, 3)
        assert colours(page, heat) == at_end


def test_line_of_the_step_shown_moves_with_the_slider(browser: Any, page_of_run: Path) -> None:
    with pages.opened(browser, page_of_run) as page:
        rule = page.locator("#model-0 .chart").nth(1).locator('.mark-rule line[stroke-dasharray="3,3"]')
        before = rule.get_attribute("transform")
        page.get_by_label("Training step").fill("0")
        shown(page, 0)
        assert rule.get_attribute("transform") != before


def test_table_has_every_step(browser: Any, page_of_run: Path, trajectory: ScoreTable) -> None:
    with pages.opened(browser, page_of_run) as page:
        page.check("#with-heads")
        assert page.locator("#table tbody tr").count() == len(trajectory)
        assert {"5", "20", "100"} <= set(pages.column(page, "step"))


def test_gaps_of_a_run_say_at_which_step(page_of_run: Path) -> None:
    html = page_of_run.read_text(encoding="utf-8")
    assert "not a number (layer 0 head 0 at step 100)" in html
    assert "all zero (layer 1 as a whole at step 5)" in html


def test_distances_have_a_slider_and_a_chart(browser: Any, cache: Path, tmp_path: Path) -> None:
    models = [pages.a_model(pages.scored_rows(i), offset=offset) for i, offset in enumerate((None, 1, 64))]
    path = write_page(ScoreTable(models), tmp_path / "p.html", cache_folder=cache)
    with pages.opened(browser, path) as page:
        assert pages.drawn_charts(page) == 1 + 2 + pages.CHARTS_PER_GROUP
        assert page.get_by_label("Relative distance").get_attribute("aria-valuetext") == "0, 1 of 3"
        assert page.locator("#plane").count() == 0  # the series has its own


@pytest.mark.parametrize("width", [390, 1280])
def test_page_of_a_run_is_never_wider_than_its_window(browser: Any, page_of_run: Path, width: int) -> None:
    with pages.opened(browser, page_of_run, width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ends = "[...document.querySelectorAll('.chart svg *')].map((s) => s.getBoundingClientRect().right)"
        assert max(page.evaluate(ends)) <= width


def test_hostile_names_of_a_run_stay_text(browser: Any, cache: Path, tmp_path: Path) -> None:
    models = []
    for i, bad in enumerate(pages.HOSTILE):
        for step in (1, 2):
            rows = pages.scored_rows(i, n_layers=2, n_heads=2, component=bad, mask=bad)
            rows = [row | {"part": part, "reason": bad} for row in rows for part in (None, bad)]
            models.append(pages.a_model(rows, f"{bad}/checkpoint-{step}", step=step, model_type=bad))
    path = write_page(ScoreTable(models), tmp_path / "p.html", cache_folder=cache)
    specs = [
        s
        for s in pages._Parts(path.read_text(encoding="utf-8")).scripts("application/json")
        if '"$schema"' in s
    ]
    assert not any("hacked" in spec for spec in specs[1:])
    with pages.opened(browser, path) as page:
        pages.drawn_charts(page)
        for slider in page.locator(".slider input").all():
            slider.fill("0")
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img").count() == 0


def odd_series() -> Iterator[tuple[str, ScoreTable]]:
    yield (
        "undefined",
        ScoreTable(
            [
                pages.a_model(
                    [r | pages.undefined("zero", *pages.SCORES) for r in m.rows], m.source, step=m.step
                )
                for m in run(1, 2)
            ]
        ),
    )
    cross = [pages.a_model(pages.scored_rows(i, attention="cross"), f"r/step{i}", step=i) for i in (1, 2)]
    yield "cross", ScoreTable(cross)
    yield "same step", ScoreTable([*run(3), *run(3)])
    yield "negative steps", ScoreTable(run(-3, 0, 4, name="r"))
    heads = [
        pages.a_model([r for r in m.rows if r["head"] is not None], m.source, step=m.step) for m in run(1, 2)
    ]
    yield "heads alone", ScoreTable(heads)
    first, second = run(1, 2)
    other = [row | {"component": "other"} for row in second.rows]
    yield "nothing in common", ScoreTable([first, pages.a_model(other, second.source, step=2)])
    wild = [row | {"layer": None, "head": "x", "symmetry": math.inf, "symmetry_z": 0.0} for row in first.rows]
    yield "wrong types", ScoreTable([first, pages.a_model(wild, second.source, step=2)])


@pytest.mark.parametrize(("name", "table"), list(odd_series()), ids=[name for name, _ in odd_series()])
def test_odd_series_give_a_page_and_a_screen_without_complaints(
    browser: Any, cache: Path, tmp_path: Path, name: str, table: ScoreTable
) -> None:
    with pages.opened(browser, write_page(table, tmp_path / "p.html", cache_folder=cache)) as page:
        pages.drawn_charts(page)
        page.locator(".slider input").first.fill("0")
        shown(page, 0)
        assert "NaN" not in page.locator("body").inner_text()
        assert page.locator('.chart path[d*="NaN"], .chart [transform*="NaN"]').count() == 0
    if name != "wrong types":
        assert list(renderables(table, width=100))


def test_rows_of_a_run_take_less_than_200_bytes_each(cache: Path) -> None:
    models = [
        pages.a_model(pages.scored_rows(i, n_layers=12, n_heads=12), f"r/checkpoint-{i}", step=i)
        for i in range(8)
    ]
    html = page_html(ScoreTable(models), cache_folder=cache)
    store = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[0]
    assert len(json.loads(store)[0]["rows"]) == 8 * 12 * 13
    assert len(store) / (8 * 12 * 13) < 200


# ---- in the terminal ---------------------------------------------------------------------------------------


def screen(table: Any, width: int, unicode: bool = True) -> list[str]:
    import io

    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    for item in renderables(table, width=width, unicode=unicode):
        console.print(item)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 60, 76, 82, 96, 112])
@pytest.mark.parametrize("unicode", [True, False])
def test_run_has_one_line_per_step_that_fits(trajectory: ScoreTable, width: int, unicode: bool) -> None:
    lines = screen(ScoreTable(trajectory.models[:4]), width, unicode)
    assert not [line for line in lines if "…" in line or len(line) > width]
    numbers = [line.strip("| ").split()[0] for line in lines if re.match(r"[| ]+\d", line)]
    assert numbers == ["5", "5", "20", "100"]
    assert unicode or all(line.isascii() for line in lines)


def test_long_run_is_thinned_out_and_keeps_its_ends() -> None:
    lines = screen(ScoreTable(run(*range(0, 1200, 10))), 100)
    numbers = [line.split()[0] for line in lines if re.match(r" +[\d,]+ ", line)]
    assert len(numbers) == 40
    assert (numbers[0], numbers[-1]) == ("0", "1,190")
    assert any("40 of 120 steps" in line for line in lines)


def test_parts_are_tables_of_their_own_in_the_terminal() -> None:
    titles = [line for line in screen(with_parts(), 100) if "self-attention" in line]
    assert [title.split(":")[0] for title in titles] == [
        "encoder.layer",
        "encoder.layer, nope part",
        "encoder.layer, rope part",
    ]


def test_median_of_a_step_is_that_of_whole_layers_and_the_heads_stand_beside_it() -> None:
    models = run(20, 30)
    for row in models[0].heads:
        row["symmetry"] = -0.5
    line = next(line for line in screen(ScoreTable(models), 120) if re.match(r" +20 ", line))
    assert float(line.split()[2]) == pytest.approx(0.1)
    assert " -0.500 " in line
