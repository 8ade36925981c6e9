"""`qkform compare` as a person meets it: on the terminal, as JSON and CSV, as a page and as files of charts."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from qkform.cli import main
from qkform.comparisons import CompareTable
from qkform.report import page_html, save_plots, write_page
from qkform.report.comparesection import curve_points
from qkform.report.screens import renderables
from qkform.targets import written_by_us
from qkform.training.comparing import compare
from tests import test_report as pages
from tests.arm_records import falling, write_run
from tests.test_compare import FAST, SLOW

cache, browser = pages.cache, pages.browser
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("shown") / "runs"
    for seed in range(3):
        write_run(root / "standard" / f"seed-{seed}", falling(SLOW, 3 + seed / 10), seed=seed)
        write_run(
            root / "matched" / f"seed-{seed}", falling(FAST, 2.9), seed=seed, init="matched", symmetry=0.3
        )
        write_run(root / "decoupled" / f"seed-{seed}", falling(0.002), seed=seed, attention="decoupled")
    write_run(root / "other" / "seed-0", falling(FAST), seed=0, data=[HOSTILE])
    return root


@pytest.fixture(scope="module")
def table(runs):
    return compare([runs], at_loss=5.2, baseline="standard")


def printed(table: CompareTable, width: int, *, unicode: bool = True) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, emoji=False, markup=False)
    for item in renderables(table, width=width, unicode=unicode):
        console.print(item)
    return file.getvalue()


def test_json_is_the_record(runs, capsys):
    assert main(["compare", str(runs), "--at-loss", "5.2", "--baseline", "standard", "--format", "json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["schema"] == "qkform.compare/1"
    assert {"arms", "pairs"} <= set(document)
    assert document["settings"]["at_loss"] == 5.2
    assert "note: other is not paired with standard: data differs" in shown.err
    assert CompareTable._from_document(document) == compare([runs], at_loss=5.2, baseline="standard")


def test_csv_has_a_line_per_row(runs, table, capsys):
    assert main(["compare", str(runs), "--at-loss", "5.2", "--baseline", "standard", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == len(table)
    assert rows[0]["arm"] == "decoupled"


@pytest.mark.parametrize("width", [80, 160])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(table, width):
    text = printed(table, width)
    assert max(map(len, text.split("\n"))) <= width
    assert "…" not in text
    assert "never" in text
    assert "\x1b" not in text
    assert ("each seed" in text) == (width == 160)
    assert "not paired, since data differs" in text


def test_what_is_true_of_every_measure_is_said_once_and_no_column_is_empty(runs, cache):
    two = compare([runs / arm / f"seed-{seed}" for arm in ("standard", "matched") for seed in range(2)])
    text = printed(two, 80)
    assert "\nno interval: 2 seeds, and 3 are the least\n" in text.replace(" \n", "\n")
    assert "interval" not in text.replace("no interval", "")
    html = page_html(two, cache_folder=cache)
    specs = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    assert not [
        spec for spec in specs if '"low:Q"' in spec or '"field": "low"' in spec or '"field":"low"' in spec
    ]


def test_large_counts_fit_too(tmp_path):
    for arm, rate, more in (("standard", SLOW, {}), ("matched", FAST, {"init": "matched"})):
        for seed in range(3):
            curve = falling(rate, 3 + seed / 10, steps=100_000, every=5000)
            curve = {step: 3 + seed / 10 + 2 * 0.999 ** (step * rate) for step in curve}
            write_run(tmp_path / arm / f"seed-{seed}", curve, seed=seed, steps=100_000, **more)
    text = printed(compare([tmp_path]), 80)
    assert "…" not in text
    assert " M" in text


def test_one_arm_alone_is_shown_too(runs, tmp_path, cache):
    alone = compare([runs / "standard"])
    assert "standard (baseline)" in printed(alone, 80)
    assert "nothing to compare it with" in page_html(alone, cache_folder=cache)


def test_ascii_alone_where_the_terminal_has_no_more(table):
    text = printed(table, 80, unicode=False)
    assert not [c for c in text if not c.isascii()]


def test_faults_are_one_message(tmp_path, capsys):
    for arguments, message in (
        ([], "name at least one folder of runs"),
        ([str(tmp_path / "none")], "is not there"),
        ([str(tmp_path)], "there is no record.jsonl"),
        ([str(tmp_path), "--html", "x.txt"], "must end in .html"),
        ([str(tmp_path), "--window", "2"], "a centred median is over 1, 3, 5"),
        ([str(tmp_path), "--at-loss", "nan"], "--at-loss nan: expected a held-out loss above 0"),
    ):
        assert main(["compare", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_files_are_known_as_ours(table, tmp_path, cache):
    for name in ("c.json", "c.csv", "c.parquet"):
        assert written_by_us(table.save(tmp_path / name))
    again = CompareTable.load(tmp_path / "c.json")
    assert page_html(again, cache_folder=cache)  # a record that was loaded has no curves, and has a page


def test_the_mean_curve_is_there_where_every_seed_is(table):
    points = curve_points(table)
    means = [row for row in points if row["arm"] == "standard" and row["seed"] is None]
    assert [row["step"] for row in means] == list(range(0, 101, 10))
    at_zero = [row["held_out"] for row in points if (row["arm"], row["step"]) == ("standard", 0)]
    assert at_zero[-1] == pytest.approx(sum(at_zero[:-1]) / 3)


def test_long_curves_are_thinned_out_and_keep_their_ends(table):
    rows = [{**row, "step": step} for row in table.curves[:1] for step in range(5000)]
    points = [p for p in curve_points(replace(table, curves=rows)) if p["seed"] is not None]
    assert len(points) == 400
    assert (points[0]["step"], points[-1]["step"]) == (0, 4999)


@pytest.mark.slow
def test_every_chart_becomes_a_file(table, tmp_path):
    written = save_plots(table, tmp_path, formats=["svg"])
    assert len(written) == 12
    assert {"compare-held-out.svg", "compare-difference-faster.svg"} <= {path.name for path in written}
    for path in written:
        assert "NaN" not in path.read_text()


def test_names_are_text_on_the_page_and_nothing_else(table, cache):
    page = page_html(table, cache_folder=cache)
    assert HOSTILE not in page
    assert "&lt;/script&gt;&lt;img src=x" in page
    assert page.count('<div class="chart"') == 12


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_drawn_and_no_name_acts(
    table: Any, browser: Any, cache: Any, tmp_path: Any, width: int
) -> None:
    path = write_page(table, tmp_path / "compare.html", cache_folder=cache)
    with pages.opened(browser, path, width) as page:
        assert pages.drawn_charts(page) == 12
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        text = page.locator("main").inner_text()
    assert "data differs" in text
    assert HOSTILE[:20] in text
    assert "never" in text
