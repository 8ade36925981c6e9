"""`qkform demo` and the figures that README and getting-started promise, on the real samples."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

import qkform as qk
from qkform.cli import main
from qkform.samples import SAMPLES

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
    assert main(["demo", "--quiet"]) == 0
    out, _ = capsys.readouterr()
    page = tmp_path / "qkform-demo.html"
    assert out.strip().splitlines()[-1] == str(page)
    text = page.read_text()
    assert len(re.findall(r"<!doctype html>", text, re.IGNORECASE)) == 1
    assert "sample:minilm" in text
    assert "sample:smollm2" in text


def test_samples_lists_every_sample_with_its_path(capsys):
    assert main(["samples", "--quiet"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"sample:{name}" for name in SAMPLES]
    assert len(lines) == 4
    assert all(Path(line.split("\t")[-1]).exists() for line in lines)
