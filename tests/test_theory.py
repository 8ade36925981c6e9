"""`qkform theory` and its record: what is printed, saved and shown, and that nothing in a loaded record can act."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qkform.cli import main
from qkform.dynamics.one_layer import Flow
from qkform.errors import DynamicsError, RecordError
from qkform.flows import MEASURES, FlowTable, ratio_name
from qkform.report import flowcharts, page_html, write_page
from qkform.report.flowsection import FlowSection
from qkform.report.screens import renderables
from qkform.targets import written_by_us
from tests import test_report as pages

cache, browser = pages.cache, pages.browser

SMALL = ["--classes", "3", "--common", "5", "--distractors", "4"]
PUBLISHED = (
    "--classes 20 --per-class 50 --common inf --relevant 5 --distractors 50 --queries-per-class 50 --scale 1 "
    "--loss 1e-4 --ratios .01,1/10"
)


def answered(capsys: Any, *arguments: str) -> Any:
    assert main(["theory", *arguments]) == 0
    return capsys.readouterr().out


def small(**more: Any) -> Flow:
    return Flow(classes=3, common=5, distractors=4, **more)


@pytest.fixture(scope="module")
def table() -> FlowTable:
    return small(attention="factorized").table([1 / 4, 1, 4], 0.1)


def test_json_is_the_record(capsys):
    document = json.loads(answered(capsys, "one-layer", *SMALL, "--ratios", "1/4,2", "--format", "json"))
    assert list(document) == ["schema", "task", "rows"]
    assert document["schema"] == "qkform.theory/1"
    assert [list(row) for row in document["rows"]] == [["ratio", *MEASURES, "simulated"]] * 2
    assert [row["ratio"] for row in document["rows"]] == [0.25, 2.0]
    for row in document["rows"]:
        end = small().closed_form(row["ratio"], 0.1)
        assert {name: row[name] for name in MEASURES} == {name: getattr(end, name) for name in MEASURES}
        assert row["simulated"] == pytest.approx({name: row[name] for name in MEASURES}, rel=1e-6)


def test_the_task_of_a_record_makes_its_flow_again(capsys):
    flags = [
        "--attention",
        "factorized",
        "--output",
        "factorized",
        "--start",
        "0.02,0.03",
        "--imbalance",
        "-0.1,0.2",
    ]
    flags += ["--objective", "squared", "--loss", "0.05", "--scale", "1/3", "--no-simulate", "--ratios", "3"]
    document = json.loads(answered(capsys, "one-layer", *SMALL, *flags, "--format", "json"))
    task, (row,) = document["task"], document["rows"]
    assert row["simulated"] is None
    assert (task["start"], task["imbalance"], task["scale"], task["objective"]) == (
        [0.02, 0.03],
        [-0.1, 0.2],
        1 / 3,
        "squared",
    )
    loss, exact = task.pop("loss"), task.pop("exact")
    flow = Flow(**task)
    assert flow.closed_form(3.0, loss).gap == row["gap"]
    assert exact is flow.exact is True


def test_published_rows_from_the_command(capsys):
    assert main(["theory", "one-layer", *PUBLISHED.split(), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    found = [tuple(f"{row[n]:.3f}" for n in ("gain", "gap", "sharpness")) for row in document["rows"]]
    assert found == [("81.669", "0.559", "0.149"), ("42.282", "1.395", "0.287")]
    assert [row["simulated"] for row in document["rows"]] == [None, None]
    assert document["task"]["common"] == "inf"
    assert err == "note: endless common tokens have closed forms alone; nothing is simulated\n"


def test_a_flow_whose_closed_form_is_approximate_says_so(capsys):
    flags = [
        *SMALL,
        "--attention",
        "factorized",
        "--queries-per-class",
        "1",
        "--ratios",
        "1",
        "--no-simulate",
    ]
    assert main(["theory", "one-layer", *flags]) == 0
    assert "its closed form is approximate" in capsys.readouterr().err
    assert main(["theory", "one-layer", *flags, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_design_names_the_ratio(capsys):
    rows = list(
        csv.DictReader(io.StringIO(answered(capsys, "design", "--sharpness", "0.95", "--format", "csv")))
    )
    assert list(rows[0]) == list(FlowTable.columns())
    assert float(rows[0]["ratio"]) == pytest.approx(47.4828, abs=6e-5)
    assert float(rows[0]["simulated_sharpness"]) == pytest.approx(0.95, rel=1e-6)


def test_the_screen_has_a_line_per_ratio(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = answered(capsys, "one-layer", "--ratios", "1/16,0.3,16", "--output", "factorized")
    lines = [line.split() for line in out.splitlines()]
    assert ["1/16", "0.066668", "(0.066668)"] in [line[:3] for line in lines]
    assert {"1/16", "0.3", "16"} <= {line[0] for line in lines if line}
    assert "output factorized" in out
    assert "8 classes of 2 tokens" in out


@pytest.mark.parametrize("width", [50, 66, 76, 94, 120])
@pytest.mark.parametrize("unicode", [True, False])
def test_the_screen_fits_its_width(table, width, unicode):
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, emoji=False, markup=False)
    for item in renderables(table, width=width, unicode=unicode):
        console.print(item)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert unicode or text.isascii()
    assert ("█" in text or "#" in text) == (width >= 104)
    assert text.count("(") == 3 * (
        (width >= 60) + (width >= 72) + 2 * (width >= 92)
    )  # measured beside closed forms


def test_ratios_are_named_as_they_are_written():
    assert [ratio_name(r) for r in (1 / 16, 0.25, 4.0, 0.3, 23.98734, 1 / 3, 0.0, 1e9)] == [
        "1/16",
        "1/4",
        "4",
        "0.3",
        "23.9873",
        "1/3",
        "0",
        "1000000000",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one-layer", "--ratios", "x"], "--ratios 'x': expected numbers"),
        (["one-layer", "--ratios", "1/0"], "--ratios '1/0'"),
        (["one-layer", "--ratios", "-1"], "ratio is -1.0"),
        (["one-layer", "--loss", "5"], "loss is 5.0; that is not reached by training"),
        (["one-layer", "--common", "2.5"], "common is 2.5"),
        (["one-layer", "--common", "inf"], "scale=1.0"),
        (["one-layer", "--start", "1,2,3"], "or two of them"),
        (["one-layer", "--attention", "factorized", "--start", "0"], "never moves"),
        (["one-layer", "--out", "x.txt"], "--out x.txt"),
        (["design", "--sharpness", "0.01"], "starts at 0.0625 and sharpens towards 1"),
        (["design"], "sharpness"),
        (["one-layer", "--attention", "merged"], "merged"),
    ],
)
def test_what_cannot_be_used_is_one_message(arguments, words, capsys):
    assert main(["theory", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_without_scipy_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.special", None)
    assert main(["theory", "one-layer"]) == 2
    assert 'pip install "qkform[theory]"' in capsys.readouterr().err


def test_a_record_comes_back_from_its_file(table, tmp_path):
    path = table.save(tmp_path / "flow.json")
    again = FlowTable.load(path)
    assert again == table
    assert len(again) == 3
    assert again.points == ()
    assert written_by_us(path)
    assert written_by_us(table.save(tmp_path / "flow.csv"))
    assert written_by_us(table.save(tmp_path / "flow.parquet"))
    assert table.to_polars()["simulated_gap"].to_list() == [row["simulated"]["gap"] for row in table.rows]
    assert "<td>0.25</td>" in table._repr_html_()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["rows"][0].update(gap="<b>"),
        lambda d: d["rows"][0].update(more=1),
        lambda d: d["rows"][0]["simulated"].pop("gain"),
        lambda d: d["rows"][0].update(simulated=[1]),
        lambda d: d.update(rows={}),
        lambda d: d.pop("task"),
        lambda d: d.update(schema="qkform.scan/1"),
    ],
)
def test_a_record_that_is_not_whole_is_refused(table, tmp_path, spoil):
    document = table.to_dict()
    spoil(document)
    path = tmp_path / "spoiled.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RecordError):
        FlowTable.load(path)


def test_a_table_needs_a_ratio():
    with pytest.raises(DynamicsError, match="there is no ratio"):
        small().table([], 0.1)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_every_simulated_point_lies_on_its_line(table):
    flow = small(attention="factorized")
    for point in table.points:
        if point["kind"] in ("line", "simulated"):
            assert point["up"] == pytest.approx(
                flow.slope(point["ratio"]) * point["across"], rel=1e-6, abs=1e-9
            )
    assert {point["kind"] for point in table.points} == {"line", "simulated", "curve"}


def test_charts_follow_the_schema(table):
    section = FlowSection(table, lambda chart, name: {"chart": chart})
    for chart in (
        flowcharts.phase_plane(section.points),
        flowcharts.way(section.points),
        flowcharts.against_ratio(section.points, "sharpness"),
        flowcharts.against_ratio(section.points, "entropy"),
    ):
        chart.to_dict()
    assert flowcharts.colours(1) == ["#440154"]
    assert flowcharts.colours(4) == ["#440154", "#3b528b", "#21918c", "#5ec962"]


def test_page_has_the_numbers_and_says_how_far_apart_they_are(table, cache):
    html = page_html(table, cache_folder=cache)
    assert "attention factorized · output collapsed" in html
    for row in table.rows:
        assert f"<td>{row['gain']:.5g}</td>" in html
    assert "Closed form and simulation differ by" in html
    assert html.count('class="chart"') == 4


def test_page_of_a_loaded_record_has_its_end_points(table, tmp_path, cache):
    html = page_html(FlowTable.load(table.save(tmp_path / "flow.json")), cache_folder=cache)
    assert html.count('class="chart"') == 2
    assert "end points alone" in html


def test_pages_of_little(table, cache):
    assert "The record has no rows" in page_html(FlowTable({}, []), cache_folder=cache)
    frozen = small().table([0.0], 0.1, simulated=False)
    assert page_html(frozen, cache_folder=cache).count('class="chart"') == 2
    one = small().table([2.0], 0.1, simulated=False)
    assert page_html(one, cache_folder=cache).count('class="chart"') == 4
    assert "approximate here" in page_html(
        small(attention="factorized", queries_per_class=1).table([1.0], 0.1, simulated=False),
        cache_folder=cache,
    )


def test_hostile_tasks_stay_text(table, cache):
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    rows = [{**table.rows[0], "gain": math.inf, "ratio": math.nan}]
    html = page_html(
        FlowTable({"attention": bad, bad: bad, "objective": bad, "classes": bad}, rows), cache_folder=cache
    )
    assert "<script>alert" not in html
    assert "<img src=x" not in html


@pytest.mark.parametrize("width", [390, 1280])
def test_page_draws_every_chart_and_asks_for_nothing(
    browser: Any,
    table: FlowTable,
    tmp_path: Path,
    cache: Path,
    width: int,
) -> None:
    path = write_page(table, tmp_path / "flow.html", cache_folder=cache)
    with pages.opened(browser, path, width) as page:
        assert pages.drawn_charts(page) == 4
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".chart").nth(2).locator(".mark-line.role-mark path").count() == 3


def test_the_command_writes_page_and_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = answered(
        capsys,
        "one-layer",
        *SMALL,
        "--ratios",
        "1,4",
        "--html",
        "flow.html",
        "--out",
        "flow.json",
        "--plots",
        "plots",
    )
    assert "sharpness" in out
    assert "<h1>One layer of attention in training</h1>" in Path("flow.html").read_text()
    assert len(FlowTable.load("flow.json").rows) == 2
    names = ("flow-entropy", "flow-phase-plane", "flow-sharpness", "flow-way")
    assert sorted(path.name for path in Path("plots").iterdir()) == sorted(
        f"{name}.{form}" for name in names for form in ("png", "svg")
    )
    assert "The straight line of training" in Path("plots/flow-phase-plane.svg").read_text()


def test_the_page_about_it_has_the_sharpness_that_the_closed_form_gives():
    """The table of docs/theory.md, to its four digits."""
    page = (Path(__file__).parent.parent / "docs" / "theory.md").read_text()
    circuits = {
        "both collapsed": ("collapsed", "collapsed"),
        "output factorized": ("collapsed", "factorized"),
        "attention factorized": ("factorized", "collapsed"),
        "both factorized": ("factorized", "factorized"),
    }
    for name, (attention, output) in circuits.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        said = [float(cell) for cell in line.split("|")[2:7]]
        flow = Flow(attention=attention, output=output)
        found = [flow.closed_form(ratio, 0.1).sharpness for ratio in (1 / 16, 1 / 4, 1, 4, 16)]
        assert said == pytest.approx(found, abs=5e-5)
