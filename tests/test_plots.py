"""Charts as files, from Python and from the page: whole, on white, titled, and never where they should not be."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from qkform.errors import RecordError
from qkform.records import ScoreTable
from qkform.report import save_plots, write_page
from qkform.report.plots import file_name
from tests import test_report as pages
from tests.test_differences import a_diff
from tests.test_series import run

cache, browser = pages.cache, pages.browser
PNG = b"\x89PNG\r\n\x1a\n"


def small(**more: Any) -> ScoreTable:
    return ScoreTable([pages.a_model(pages.scored_rows(1, n_layers=2, n_heads=2), **more)])


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_every_chart_of_a_model_is_a_file(tmp_path: Path) -> None:
    paths = save_plots(small(), tmp_path / "new" / "plots", formats=["svg"])
    assert names(paths) == [
        "01-acme-small-encoder-layer-symmetry-heads.svg",
        "01-acme-small-encoder-layer-symmetry-layers.svg",
        "01-acme-small-encoder-layer-directionality-heads.svg",
        "01-acme-small-encoder-layer-directionality-layers.svg",
        "01-acme-small-encoder-layer-attraction.svg",
        "00-plane.svg",
    ]
    assert sorted(path.name for path in (tmp_path / "new" / "plots").iterdir()) == sorted(names(paths))
    for path in paths:
        root = ElementTree.fromstring(path.read_bytes())
        text = " ".join(root.itertext())
        assert "acme/small" in text
        assert 'fill="white"' in path.read_text()


def test_series_and_diffs_have_their_charts(tmp_path: Path) -> None:
    found = names(save_plots(ScoreTable(run(5, 10)), tmp_path / "run", formats=["svg"]))
    assert {name for name in found if "over-steps" in name or "path" in name} == {
        "01-runs-a-checkpoint-plane-path.svg",
        "01-runs-a-checkpoint-encoder-layer-symmetry-over-steps.svg",
        "01-runs-a-checkpoint-encoder-layer-directionality-over-steps.svg",
    }
    heads = (tmp_path / "run" / "01-runs-a-checkpoint-encoder-layer-symmetry-heads.svg").read_text()
    assert "step 10" in heads
    found = names(save_plots(a_diff(), tmp_path / "diff", formats=["svg"]))
    assert len(found) == 5
    assert "diff-01-encoder-layer-plane-arrows.svg" in found


def test_png_has_two_pixels_per_pixel_of_the_chart(tmp_path: Path) -> None:
    table = ScoreTable([pages.a_model([r for r in pages.scored_rows(1, n_layers=1) if r["head"] is None])])
    png, svg = save_plots(table, tmp_path)[:2]
    assert png.read_bytes().startswith(PNG)
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    root = ElementTree.fromstring(svg.read_bytes())
    assert (width, height) == pytest.approx(
        (2 * float(root.get("width", 0)), 2 * float(root.get("height", 0))), abs=2
    )


def test_hostile_names_cannot_leave_the_folder_or_meet(tmp_path: Path) -> None:
    bad = [
        "../../etc/passwd",
        "a/b",
        "a\\b",
        "A B",
        "\x00\x1b[2J\n",
        "con",
        "x" * 5000,
        "\udcff",
        "",
        *pages.HOSTILE,
    ]
    models = []
    for name in bad:
        rows = pages.scored_rows(1, n_layers=1, n_heads=1, component=name)
        models.append(pages.a_model([r | {"part": name, "attention": name} for r in rows], name))
    paths = save_plots(ScoreTable(models), tmp_path / "in", formats=["svg"])
    assert {path.resolve().parent for path in paths} == {(tmp_path / "in").resolve()}
    assert len({path.name.lower() for path in paths}) == len(paths) >= len(bad)
    for path in paths:
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,200}\.svg", path.name)
        root = ElementTree.fromstring(path.read_bytes())
        assert not {element.tag.split("}")[-1] for element in root.iter()} & {
            "script",
            "img",
            "image",
            "foreignObject",
        }
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_names_never_meet() -> None:
    taken: set[str] = set()
    found = [
        file_name(parts, taken) for parts in (["a", "b"], ["A-b"], ["a b"], ["a-b-2"], ["x" * 99], ["x" * 98])
    ]
    assert found == ["a-b", "a-b-2", "a-b-3", "a-b-2-2", "x" * 40, "x" * 40 + "-2"]


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"'pdf'.*png, svg"):
        save_plots(small(), tmp_path / "p", formats=["pdf"])
    assert not (tmp_path / "p").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write plots to"):
        save_plots(small(), tmp_path / "file")
    (tmp_path / "linked").mkdir()
    outside = tmp_path / "outside.svg"
    outside.write_text("mine")
    (tmp_path / "linked" / "01-acme-small-encoder-layer-symmetry-heads.svg").symlink_to(outside)
    with pytest.raises(RecordError, match="it is a link"):
        save_plots(small(), tmp_path / "linked", formats=["svg"])
    assert outside.read_text() == "mine"


def test_nothing_to_draw_is_no_file(tmp_path: Path) -> None:
    assert save_plots(ScoreTable([pages.a_model([])]), tmp_path) == []
    assert save_plots(a_diff([]), tmp_path) == []


@pytest.mark.parametrize(("kind", "begin"), [("SVG", b"<svg"), ("PNG", PNG)])
def test_chart_is_saved_from_the_page(
    browser: Any, cache: Path, tmp_path: Path, kind: str, begin: bytes
) -> None:
    path = write_page(ScoreTable(run(5, 10)), tmp_path / "p.html", cache_folder=cache)
    with pages.opened(browser, path) as page:
        charts = page.locator(".chart").count()
        buttons = page.get_by_role("button", name=re.compile(f"^save .* as {kind}$"))
        assert buttons.count() == charts
        with page.expect_download() as download:
            page.get_by_role("button", name=f"save Symmetry of every head as {kind}").click()
        saved = tmp_path / "saved"
        download.value.save_as(saved)
        assert download.value.suggested_filename == f"qkform-g0-0-symmetry-of-every-head-at-10.{kind.lower()}"
        content = saved.read_bytes()
        assert content.startswith(begin)
        if kind == "SVG":
            root = ElementTree.fromstring(content)
            first = root[0]
            assert (first.tag.split("}")[-1], first.get("fill")) == ("rect", "white")
            assert len(content) > 2000
        else:
            width = page.locator("#model-0 .chart svg").nth(3).bounding_box()["width"]
            assert struct.unpack(">I", content[16:20])[0] == pytest.approx(2 * width, abs=4)


def test_plane_of_all_models_is_saved_too(browser: Any, cache: Path, tmp_path: Path) -> None:
    path = write_page(small(), tmp_path / "p.html", cache_folder=cache)
    with pages.opened(browser, path) as page, page.expect_download() as download:
        page.get_by_role("button", name="save Symmetry against directionality as SVG").click()
    assert download.value.suggested_filename == "qkform-all-symmetry-against-directionality.svg"
