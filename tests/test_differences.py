"""Differences between two checkpoints: the record that holds them, its page, and its screen."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from qkform.differences import DIFF_COLUMNS, DiffTable
from qkform.errors import RecordError
from qkform.records import Row
from qkform.report import changes, page_html, write_page
from qkform.report.reading import change
from qkform.report.rows import diff_points
from tests import test_report as pages
from tests.test_series import screen

cache, browser = pages.cache, pages.browser
NUMBERS = [name for name, kind in DIFF_COLUMNS.items() if kind is float]


def diff_rows(seed: int = 1, *, n_layers: int = 4, n_heads: int = 3, **more: Any) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for layer in range(n_layers):
        for head in (None, *range(n_heads)):
            a, b = rng.uniform(-0.2, 0.2), rng.uniform(0.2, 0.8)
            row = dict.fromkeys(DIFF_COLUMNS) | {
                "component": "encoder.layer",
                "module": f"encoder.layer.{layer}.attention",
                "layer": layer,
                "head": head,
                "attention": "self",
                "d_model": 32,
                "d_head": 8,
                "symmetry_a": a,
                "symmetry_b": b,
                "symmetry_change": b - a,
                "null_low": -0.05,
                "null_high": 0.05,
                "symmetry_change_z": (b - a) / 0.025,
                "directionality_a": rng.uniform(-1, 1),
                "directionality_b": rng.uniform(-1, 1),
                "directionality_change": 0.1,
                "relative_change": rng.uniform(0, 0.3),
                "cosine": 0.9,
                "norm_a": 3.0,
                "norm_b": 4.0,
                "change_symmetry": 0.4,
                "change_effective_rank": 5.0,
                "flags": [],
            }
            rows.append(row | more)
    return rows


def a_diff(rows: list[Row] | None = None, **more: Any) -> DiffTable:
    given: dict[str, Any] = {"source_a": "org/base", "source_b": "org/tuned", "model_type": "bert"}
    return DiffTable(
        **given | {"conventions": {"gamma": 2.0}, "rows": diff_rows() if rows is None else rows} | more
    )


def with_gaps() -> DiffTable:
    rows = diff_rows()
    rows[2] |= dict.fromkeys(NUMBERS) | {"reason": "the weights hold NaN"}
    rows[5]["relative_change"] = math.nan
    return a_diff(
        rows, only_in_a=["encoder.layer.9.attention"], only_in_b=["x"], wall_seconds=1.5, bytes_read=9
    )


# ---- the record --------------------------------------------------------------------------------------------


def test_diff_comes_back_from_json_as_it_was_saved(tmp_path: Path) -> None:
    diff = with_gaps()
    back = DiffTable.load(diff.save(tmp_path / "diff.json"))
    assert back.to_dict() == diff.to_dict()
    assert back.to_dict()["schema"] == "qkform.diff/1"
    assert back.rows[5]["relative_change"] is None  # NaN: not defined
    assert (len(back), len(back.layers), len(back.heads)) == (16, 4, 12)
    assert back.only_in_a == ["encoder.layer.9.attention"]


def test_diff_goes_to_csv_and_frames_with_its_sources(tmp_path: Path) -> None:
    diff = with_gaps()
    lines = diff.save(tmp_path / "d.csv").read_text().splitlines()
    assert lines[0].split(",") == ["source_a", "source_b", "model_type", *DIFF_COLUMNS]
    assert len(lines) == 17
    frame = diff.to_polars()
    assert frame.shape == (16, 3 + len(DIFF_COLUMNS))
    assert frame["symmetry_change"].null_count() == 1
    assert frame["source_b"].unique().to_list() == ["org/tuned"]
    assert a_diff([]).to_pandas().shape == (0, 3 + len(DIFF_COLUMNS))
    import polars

    assert polars.read_parquet(diff.save(tmp_path / "d.parquet")).equals(frame)


@pytest.mark.parametrize(
    "broken",
    [
        {"schema": "qkform.scan/1"},
        {"rows": [{"layer": 1}]},
        {"rows": 3},
        {"source_a": ...},
    ],
)
def test_what_is_not_a_diff_is_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    document = a_diff().to_dict() | broken
    document = {key: value for key, value in document.items() if value is not ...}
    (tmp_path / "d.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"schema|not complete"):
        DiffTable.load(tmp_path / "d.json")


def test_notebook_shows_a_diff_with_its_names_escaped() -> None:
    shown = a_diff(source_a="<b>")._repr_html_()
    assert "&lt;b&gt;" in shown
    assert shown.count("<tr>") == 1 + 4


# ---- words and charts --------------------------------------------------------------------------------------


def test_reading_counts_layers_outside_the_band_of_a_random_change() -> None:
    rows = diff_rows(n_layers=4, n_heads=0)
    for row, value in zip(rows, (0.2, -0.3, 0.01, None), strict=True):
        row["symmetry_change"] = value
    assert "Of 3 layers, 1 rose and 1 fell" in change(a_diff(rows))
    parts = [row | {"part": "rope", "symmetry_change": 0.9} for row in rows]
    assert change(a_diff(rows + parts)) == change(a_diff(rows))
    assert "No layer has a change" in change(a_diff([]))


@pytest.mark.parametrize(
    ("largest", "limit"), [(0.0, 1.0), (0.013, 0.02), (0.3, 0.5), (4.0, 5.0), (730.0, 1000.0)]
)
def test_colours_of_relative_change_end_at_a_round_number(largest: float, limit: float) -> None:
    rows = diff_points(diff_rows(relative_change=largest))
    assert changes.heatmap_limit(rows, "relative_change") == limit


@pytest.mark.parametrize("width", [50, 62, 78, 92, 120])
@pytest.mark.parametrize("unicode", [True, False])
def test_screen_of_a_diff_fits_and_marks_layers_outside_the_band(width: int, unicode: bool) -> None:
    rows = diff_rows()
    rows[4]["symmetry_change"] = 0.01  # layer 1 as a whole: inside
    lines = screen(a_diff(rows), width, unicode)
    table = [line for line in lines if re.match(r"[| ]+\d", line)]
    assert len(table) == 4
    assert not [line for line in lines if "…" in line or len(line) > width]
    if width >= 78:
        assert [" *" in line for line in table] == [True, False, True, True]


def test_screen_names_what_was_not_compared() -> None:
    text = "\n".join(screen(with_gaps(), 120))
    assert "only in a: encoder.layer.9.attention" in text
    assert "only in b: x" in text


# ---- the page ----------------------------------------------------------------------------------------------


def test_page_of_a_diff_draws_every_chart(browser: Any, cache: Path, tmp_path: Path) -> None:
    path = write_page(with_gaps(), tmp_path / "p.html", cache_folder=cache)
    with pages.opened(browser, path) as page:
        assert pages.drawn_charts(page) == 5
        arrows, heat = page.locator(".chart").nth(0), page.locator(".chart").nth(1)
        assert arrows.locator(".mark-symbol.role-mark path").count() == 2 * 4  # circle and tip per layer
        assert heat.locator(pages.CELLS).count() == 12
        assert page.locator("#table tbody tr").count() == 4
        body = page.locator("body").inner_text()
        for said in ("What the yellow band means", "the weights hold NaN (layer 0 head 1)", "Only in a (1)"):
            assert said in body


def test_tip_of_an_arrow_points_from_a_to_b(browser: Any, cache: Path, tmp_path: Path) -> None:
    rows = diff_rows(n_layers=1, n_heads=0, symmetry_a=0.0, symmetry_b=0.0, symmetry_change=0.0)
    rows[0] |= {"directionality_a": -0.5, "directionality_b": 0.5, "directionality_change": 1.0}
    with pages.opened(browser, write_page(a_diff(rows), tmp_path / "p.html", cache_folder=cache)) as page:
        tip = page.locator(".chart").first.locator('.mark-symbol path[transform*="rotate"]').last
        assert "rotate(90)" in tip.get_attribute("transform")  # a triangle points up: this one to the right


def test_hostile_names_in_a_diff_stay_text(browser: Any, cache: Path, tmp_path: Path) -> None:
    rows = [
        row | {"component": bad, "module": bad, "part": bad, "reason": bad, "flags": [bad]}
        for bad in pages.HOSTILE
        for row in diff_rows(n_layers=1)
    ]
    bad = pages.HOSTILE[0]
    diff = a_diff(rows, source_a=bad, source_b=bad, model_type=bad, conventions={bad: bad}, only_in_a=[bad])
    path = write_page(diff, tmp_path / "p.html", cache_folder=cache)
    specs = [s for s in pages._Parts(path.read_text("utf-8")).scripts("application/json") if '"$schema"' in s]
    assert specs
    assert not any("hacked" in spec for spec in specs)
    with pages.opened(browser, path) as page:
        pages.drawn_charts(page)
        page.check("#with-all")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img").count() == 0


ODD = {
    "empty": a_diff([]),
    "undefined": a_diff([row | dict.fromkeys(NUMBERS) for row in diff_rows()]),
    "layers alone": a_diff([row for row in diff_rows() if row["head"] is None]),
    "heads alone": a_diff([row for row in diff_rows() if row["head"] is not None]),
    "nothing changed": a_diff(diff_rows(**dict.fromkeys(NUMBERS, 0.0))),
    "huge": a_diff(diff_rows(relative_change=1e300, symmetry_change=5.0)),
    "wrong types": a_diff(diff_rows(symmetry_a="x", layer="y", flags="z", null_low=[1])),
    "nothing known": a_diff([dict.fromkeys(DIFF_COLUMNS)]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_diffs_give_a_page_without_complaints(
    browser: Any, cache: Path, tmp_path: Path, name: str
) -> None:
    with pages.opened(browser, write_page(ODD[name], tmp_path / "p.html", cache_folder=cache)) as page:
        pages.drawn_charts(page)
        assert "NaN" not in page.locator("body").inner_text().replace("hold NaN", "")
        assert page.locator('.chart path[d*="NaN"], .chart [transform*="NaN"]').count() == 0


def test_policy_of_a_diff_is_as_strict_as_that_of_scores(cache: Path) -> None:
    html = page_html(a_diff(), cache_folder=cache)
    pages.test_policy_names_the_hash_of_every_script_and_nothing_else(html)
