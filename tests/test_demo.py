"""`qkform demo` and the figures that README and getting-started promise, on the real samples."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from statistics import median

import pytest

import qkform as qk
from qkform.cli import main
from qkform.errors import MissingExtra
from qkform.samples import SAMPLES
from tests import run_records

demo = importlib.import_module("qkform.cli.demo")  # qkform.cli.demo is the command of that name

# symmetry of whole layers and of heads, measured independently from the same files: value, tolerance
KNOWN = {
    "sample:minilm": {
        "first": 0.405,
        "median": 0.491,
        "low": 0.254,
        "high": 0.640,
        "heads": 0.127,
        "within": 0.002,
    },
    "sample:smollm2": {
        "first": 0.275,
        "median": 0.094,
        "low": 0.016,
        "high": 0.397,
        "heads": 0.020,
        "within": 0.005,
    },
}


@pytest.fixture(scope="module")
def tables():
    return {name: qk.scan(name) for name in KNOWN}


@pytest.mark.parametrize("name", KNOWN)
def test_a_real_model_scores_what_was_measured_independently(name, tables):
    known, table = KNOWN[name], tables[name]
    layers = [row["symmetry"] for row in table.layers]
    got = {
        "first": layers[0],
        "median": median(layers),
        "low": min(layers),
        "high": max(layers),
        "heads": median(row["symmetry"] for row in table.heads),
    }
    for figure, value in got.items():
        assert value == pytest.approx(known[figure], abs=known["within"]), figure


def test_the_readme_promises_these_figures(tables):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for table in tables.values():
        layers = [row["symmetry"] for row in table.layers]
        heads = median(row["symmetry"] for row in table.heads)
        promised = f"| {median(layers):.3f} ({min(layers):.3f} to {max(layers):.3f}) | {heads:.3f} |"
        assert promised in readme


def test_the_demo_writes_a_page_and_prints_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--quiet", "--no-training"]) == 0
    out, _ = capsys.readouterr()
    page = tmp_path / "qkform-demo.html"
    assert out.strip().splitlines()[-1] == str(page)
    text = page.read_text()
    assert len(re.findall(r"<!doctype html>", text, re.IGNORECASE)) == 1
    assert "sample:minilm" in text
    assert "sample:smollm2" in text
    assert 'id="trained"' not in text


@pytest.fixture
def scanned(tables, monkeypatch, tmp_path):
    """The demo in an empty folder, with its scans done already."""
    table = qk.records.merged(list(tables.values()))
    monkeypatch.setattr(demo, "scan_all", lambda *args, **kwargs: (table, 0))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded_at(place, objective, seed=0, **more):
    first = run_records.start(objective=objective, seed=seed)
    return run_records.write(place, first, *run_records.lines(first, **more)) / "record.jsonl"


def charts_of(page):
    """The charts of the section of trainings: their rows."""
    section = re.search(r'<section id="trained".*?</section>', page.read_text(), re.DOTALL).group()
    specs = re.findall(r'<script type="application/json">(.*?)</script>', section, re.DOTALL)
    return section, [rows_of(json.loads(spec)) for spec in specs]


def rows_of(spec):
    """The rows of a chart, which stand in its data sets beside those of its lines."""
    return max(spec["datasets"].values(), key=len)


def test_trainings_come_onto_the_page_over_the_recorded_ones(scanned, monkeypatch, capsys):
    def made(folder, steps, quiet):
        assert (scanned / "qkform-demo.html").exists(), (
            "the scans must be on a page before the trainings begin"
        )
        for i, name in enumerate(demo.OBJECTIVES):
            recorded_at(folder / name, name, steps=5, every=100, seed=i)
        return 0

    old = [
        recorded_at(scanned / f"{name}-{seed}", name, seed, steps=11, every=100)
        for name in demo.OBJECTIVES
        for seed in range(3)
    ]
    monkeypatch.setattr(demo, "_train", made)
    monkeypatch.setattr(demo, "recorded", lambda: old)
    assert main(["demo", "--quiet"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == str(scanned / "qkform-demo.html")
    assert any(line.startswith("encoder") for line in out)
    assert any(line.startswith("decoder") for line in out)
    section, charts = charts_of(scanned / "qkform-demo.html")
    assert "6 recorded runs" in section
    assert "1,000 steps" in section
    assert len(charts) == 2
    for rows in charts:
        curves = {row["curve"] for row in rows if row["kind"].startswith("recorded")}
        assert curves == {"recorded, seed 0", "recorded, seed 1", "recorded, seed 2"}
        assert max(row["step"] for row in rows if row["curve"] in curves) == 1000
        layers = [row for row in rows if row["kind"] == "layers (thin)"]
        middle = {row["step"]: row["symmetry"] for row in rows if row["kind"] == "median layer (thick)"}
        assert max(middle) == 400
        for step, value in middle.items():
            assert value == pytest.approx(
                median(r["symmetry"] for r in layers if r["step"] == step), abs=1e-4
            )
        assert all(row["low"] < row["high"] for row in layers)
        bands = {(row["low"], row["high"]) for row in rows if row["low"] is not None}
        assert {row["kind"] for row in rows if row["low"] is None} == {"median layer (thick)"}
        assert bands == {(row["low"], row["high"]) for row in layers}, (
            "of a layer, also beside recorded medians"
        )


def test_without_recorded_runs_the_page_says_where_they_are(scanned, monkeypatch, capsys):
    monkeypatch.setattr(
        demo, "_train", lambda folder, steps, quiet: recorded_at(folder / "mlm", "mlm") and 130
    )
    monkeypatch.setattr(demo, "recorded", list)
    assert main(["demo"]) == 130  # interrupted in the second training: the first one is shown
    section, charts = charts_of(scanned / "qkform-demo.html")
    assert "they come with the repository, in results/structure" in section
    assert len(charts) == 1
    assert "no recorded runs behind" in capsys.readouterr().err


def test_a_demo_that_cannot_train_keeps_its_page(scanned, monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise MissingExtra("training needs transformers, which is not installed: pip install 'qkform[train]'")

    monkeypatch.setattr("qkform.training.run", missing, raising=False)
    assert main(["demo", "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert "no training: training needs transformers" in err
    assert out.splitlines()[-1] == str(scanned / "qkform-demo.html")
    assert 'id="trained"' not in (scanned / "qkform-demo.html").read_text()


@pytest.mark.slow
def test_the_demo_trains_both_objectives(scanned, capsys):
    assert main(["demo", "--quiet", "--steps", "3"]) == 0
    section, charts = charts_of(scanned / "qkform-demo.html")
    assert len(charts) == 2
    assert all(
        {row["step"] for row in rows if row["kind"] == "median layer (thick)"} == {0, 1, 2, 3}
        for rows in charts
    )
    assert section.count("this training, seed 0") == 2


def test_samples_lists_every_sample_with_its_path(capsys):
    assert main(["samples", "--quiet"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"sample:{name}" for name in SAMPLES]
    assert len(lines) == 4
    assert all(Path(line.split("\t")[-1]).exists() for line in lines)
