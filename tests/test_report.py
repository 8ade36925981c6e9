"""The page: what it shows, that it needs nothing but itself, and that nothing in a record can act."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from qkform.errors import RecordError
from qkform.records import COLUMNS, ModelScores, Row, ScoreTable, SourceFault, null_band
from qkform.report import bundle, charts, page_html, write_page
from qkform.report.rows import points
from qkform.report.series import entries, labels

SCORES = ("symmetry", "symmetry_z", "directionality", "effective_rank", "positive_energy")
CHARTS_PER_GROUP = 5
CELLS = ".mark-rect.role-mark path"
HOSTILE = (
    "</script><script>window.hacked=1;alert(1)</script>",
    "<img src=x onerror='window.hacked=1;alert(1)'>",
    "\"><svg/onload=alert(1)>'",
    '{{ 7*7 }} ${alert(1)} datum[\'x\'] {"signal":"window.hacked=1"}',
    "a.b[0]\\n\u2028\u2029\u202e<!-- &lt;b&gt; -->",
)


def scored_rows(
    seed: int,
    *,
    n_layers: int = 6,
    n_heads: int = 4,
    component: str = "encoder.layer",
    attention: str = "self",
    mask: str = "bidirectional",
    d_model: int = 96,
) -> list[Row]:
    """Rows as a scan makes them: per layer one of the whole layer, then its heads."""
    rng = random.Random(seed)
    return [
        scored_row(rng, layer, head, component, attention, mask, d_model)
        for layer in range(n_layers)
        for head in (None, *range(n_heads))
    ]


def scored_row(
    rng: random.Random, layer: int, head: int | None, component: str, attention: str, mask: str, d_model: int
) -> Row:
    symmetry = max(-1.0, min(1.0, rng.gauss(0.3, 0.2)))
    attracting = rng.randint(8, 24)
    row = dict.fromkeys(COLUMNS) | {
        "component": component,
        "module": f"{component}.{layer}.attention",
        "layer": layer,
        "head": head,
        "kv_head": None if head is None else head // 2,
        "attention": attention,
        "mask": mask,
        "d_model": d_model,
        "d_head": 16,
        "symmetry": symmetry,
        "symmetry_z": (symmetry - 1 / d_model) / (math.sqrt(2) / d_model),
        "directionality": max(-1.0, min(1.0, rng.gauss(-0.3, 0.4))),
        "row_excess": rng.random(),
        "column_excess": rng.random(),
        "norm": rng.uniform(1, 9),
        "effective_rank": rng.uniform(1, 16),
        "bias_share": 0.0,
        "positive_directions": attracting,
        "negative_directions": 32 - attracting,
        "positive_energy": rng.random(),
        "flags": [],
    }
    if attention == "cross":
        row |= undefined("cross-attention has no symmetry", "symmetry", "symmetry_z", "positive_energy")
    return row


def undefined(reason: str, *names: str) -> Row:
    """What a row without these scores (all of them, if none is named) is to be updated with."""
    return {**dict.fromkeys(names or SCORES), "reason": reason}


def a_model(rows: list[Row], source: str = "acme/small", **more: Any) -> ModelScores:
    given = {"format": "safetensors", "model_type": "bert", "bytes_read": 1, "wall_seconds": 0.1}
    return ModelScores(
        source, conventions={"gamma": 2.0, "ddof": 1, "biases": False}, rows=rows, **given | more
    )


def two_models() -> ScoreTable:
    first = scored_rows(1)
    first[7] |= undefined("w_q is all zero")  # layer 1, head 1
    first[10] |= undefined("w_k is not finite")  # layer 2 as a whole
    first[12]["flags"] = ["no_outliers"]
    both = scored_rows(2, n_layers=3, component="decoder", mask="causal")
    both += scored_rows(3, n_layers=3, component="decoder", attention="cross", mask="unknown")
    skipped = [{"module": "pooler", "reason": "no key projection"}]
    return ScoreTable(
        [a_model(first, skipped=skipped), a_model(both, "acme/translate", model_type="t5")],
        [SourceFault("acme/gone", "no such file")],
    )


def hostile_table() -> ScoreTable:
    models = []
    for i, bad in enumerate(HOSTILE):
        rows = scored_rows(i, n_layers=2, n_heads=2, component=bad, mask=bad)
        for row in rows:
            row |= {"module": bad, "flags": [bad, "qk_norm"]}
        rows[1] |= undefined(bad)
        skipped = [{"module": bad, "reason": bad}]
        conventions = {bad: bad, "nested": {bad: [bad]}}
        models.append(ModelScores(bad, bad, bad, 1, 0.1, conventions, skipped, rows))
    return ScoreTable(models, [SourceFault(bad, bad) for bad in HOSTILE])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def html_of_two(cache: Path) -> str:
    return page_html(two_models(), cache_folder=cache)


@pytest.fixture(scope="module")
def hostile_html(cache: Path) -> str:
    return page_html(hostile_table(), title=HOSTILE[0], cache_folder=cache)


# ---- what is in the file -----------------------------------------------------------------------------------


class _Parts(HTMLParser):
    """The elements of a page, as (tag, attributes, text directly inside)."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.elements[-1][2].append(data)

    def scripts(self, kind: str) -> list[str]:
        return ["".join(t) for tag, a, t in self.elements if tag == "script" and a.get("type") == kind]

    def policy(self) -> str:
        metas = [a for tag, a, _ in self.elements if tag == "meta" and "http-equiv" in a]
        return metas[0]["content"] or ""


def test_policy_names_the_hash_of_every_script_and_nothing_else(html_of_two: str) -> None:
    parts = _Parts(html_of_two)
    scripts = parts.scripts("module")
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
    assert set(re.findall(r"'sha256-([^']+)'", parts.policy())) == hashes
    script_src = re.search(r"script-src ([^;]*)", parts.policy())
    assert script_src
    assert "unsafe" not in script_src[1]
    assert "default-src 'none'" in parts.policy()


def test_charting_library_is_there_once_however_many_charts(html_of_two: str) -> None:
    assert html_of_two.count('class="chart"') > 2 * CHARTS_PER_GROUP
    assert html_of_two.count("window.vegaEmbed=") == 1
    assert len(html_of_two) < 1_300_000


def test_every_row_is_there_once_and_comes_back_as_it_was(html_of_two: str) -> None:
    table = two_models()
    found = unpacked(html_of_two)
    assert len(found) == len(table)
    for row, original in zip(found, table.rows, strict=True):
        for name in ("layer", "head", "module", "reason", "positive_directions"):
            assert row[name] == original[name]
        for name in SCORES:
            assert row[name] == (None if original[name] is None else pytest.approx(original[name], rel=1e-5))


def unpacked(html: str) -> list[Row]:
    store = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[0])
    return [g["shared"] | dict(zip(g["columns"], row, strict=True)) for g in store for row in g["rows"]]


def test_hostile_names_add_no_element_and_are_not_changed(hostile_html: str) -> None:
    parts = _Parts(hostile_html)
    assert not {tag for tag, _, _ in parts.elements} & {"img", "svg", "iframe"}
    assert len(parts.scripts("module")) == 2
    assert not [a for _, a, _ in parts.elements if any(name.startswith("on") for name in a)]
    assert {row["module"] for row in unpacked(hostile_html)} == set(HOSTILE)
    for spec in parts.scripts("application/json"):
        assert not set("<>&\u2028\u2029") & set(spec)


def test_no_value_of_a_row_gets_into_a_chart_specification(hostile_html: str) -> None:
    specs = [s for s in _Parts(hostile_html).scripts("application/json") if '"$schema"' in s]
    assert len(specs) == 1 + CHARTS_PER_GROUP * len(HOSTILE)
    for spec in specs[1:]:  # the first, of all models, has their names as a domain of colours: data too
        for bad in HOSTILE:
            assert json.dumps(bad)[1:-1].translate({60: "\\u003c", 62: "\\u003e", 38: "\\u0026"}) not in spec


def test_undefined_scores_skipped_modules_and_errors_are_named_with_reasons(html_of_two: str) -> None:
    html = html_of_two
    assert "w_q is all zero (layer 1 head 1)" in html
    assert "w_k is not finite (layer 2 as a whole)" in html
    assert "cross-attention has no symmetry (all 15 rows)" in html
    assert "no_outliers: no row and no column stands out" in html
    assert "no key projection" in html
    assert "no such file" in html


def test_names_that_utf8_cannot_write_do_not_stop_the_page(cache: Path, tmp_path: Path) -> None:
    table = ScoreTable([a_model(scored_rows(1), "file\udcff")], [SourceFault("bad\ud800", "x")])
    assert write_page(table, tmp_path / "page.html", cache_folder=cache).stat().st_size > 0


def test_page_is_written_whole_or_not_at_all(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot write"):
        write_page(ScoreTable(), tmp_path / "missing" / "page.html", cache_folder=cache)
    target = write_page(two_models(), str(tmp_path / "page.html"), title="Mine & yours", cache_folder=cache)
    assert target == tmp_path / "page.html"
    assert "<h1>Mine &amp; yours</h1>" in target.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_importing_report_imports_no_charting_library() -> None:
    code = "import sys, qkform.report; print({'altair', 'vl_convert', 'jinja2'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


# ---- the charting library ----------------------------------------------------------------------------------


def test_truncated_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(bundle, "_made", lambda version: made.append(version) or "window.x = 1; // end")
    whole = bundle.javascript(tmp_path)
    (cached,) = tmp_path.iterdir()
    assert bundle.javascript(tmp_path) == whole
    assert len(made) == 1
    for damaged in (cached.read_bytes()[:-3], b"", b"\xff\xfe", whole.encode()):
        cached.write_bytes(damaged)
        assert bundle.javascript(tmp_path) == whole
    assert len(made) == 5


def test_cache_that_cannot_be_written_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_made", lambda version: "window.x = 1;")
    (tmp_path / "file").write_text("")
    assert bundle.javascript(tmp_path / "file") == "window.x = 1;"


def test_script_text_cannot_end_its_element_and_is_hashed_as_the_browser_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_made", lambda version: 'x = "</script>";\r\ny = "<!--";\r')
    assert bundle.javascript(tmp_path) == 'x = "<\\/script>";\ny = "<\\!--";\n'


# ---- rows and charts on their own --------------------------------------------------------------------------


def test_points_are_finite_and_of_the_type_of_their_column() -> None:
    row = scored_rows(1)[0] | {
        "symmetry": math.nan,
        "directionality": "<img>",
        "norm": math.inf,
        "effective_rank": 1e308,
        "layer": 2**70,
        "flags": ["a", 3],
        "d_model": 0,
    }
    (point,) = points([row])
    assert point["symmetry"] is point["directionality"] is point["norm"] is point["layer"] is None
    assert point["effective_rank"] == 1e308
    assert point["flags"] == "a, 3"
    json.dumps(point, allow_nan=False)


def test_only_whole_layers_have_a_null_band() -> None:
    rows = scored_rows(1)
    for row, point in zip(rows, points(rows), strict=True):
        band = null_band(row) if row["head"] is None else None
        found = (point["null_low"], point["null_high"])
        assert found == ((None, None) if band is None else pytest.approx(band, rel=1e-5))


def test_models_never_share_a_name() -> None:
    sources = ["same", "same", "same (2)", "x" * 300, "x" * 299, ""]
    found = labels(entries(ScoreTable([a_model([], source) for source in sources])))
    assert len(set(found)) == len(sources)
    assert max(map(len, found)) < 60


def test_heat_map_of_directionality_always_spans_one_and_of_symmetry_holds_99_in_100_heads() -> None:
    rows = scored_rows(4, n_layers=20, n_heads=10)
    limit = charts.heatmap_limit(rows, "symmetry")
    heads = [abs(row["symmetry"]) for row in rows if row["head"] is not None]
    assert sum(value > limit for value in heads) <= len(heads) / 100
    small = [row | {axis: row[axis] / 100 for axis in ("symmetry", "directionality")} for row in rows]
    assert charts.heatmap_limit(small, "symmetry") < limit / 10
    assert charts.heatmap_limit(small, "directionality") == 1.0


@pytest.mark.parametrize(
    "chart",
    [
        lambda rows: charts.plane(rows),
        lambda rows: charts.heatmap(rows, "symmetry"),
        lambda rows: charts.heatmap(rows, "directionality"),
        lambda rows: charts.profile(rows, "symmetry"),
        lambda rows: charts.profile(rows, "directionality"),
        lambda rows: charts.signature(rows),
    ],
    ids=["plane", "symmetry map", "directionality map", "symmetry", "directionality", "signature"],
)
def test_every_chart_stands_alone(chart: Any) -> None:
    import vl_convert

    spec = chart(two_models().models[0].rows).to_dict()
    svg = vl_convert.vegalite_to_svg(spec)
    assert svg.count("<path") > 20
    assert "NaN" not in svg


# ---- in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if executable is None:
        pytest.skip("no chromium on the PATH to look at the page with")
    args = ["--no-sandbox", "--disable-quic", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=args)
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Any, path: Path, width: int = 1280) -> Iterator[Any]:
    """The page when all charts are drawn. Fails if it asked for anything, complained, or opened a dialog."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached", timeout=60_000)
        yield page
        assert complaints == []
        assert requests == [path.as_uri()]
    finally:
        page.close()


def drawn_charts(page: Any) -> int:
    """How many charts are SVG drawings; fails if one is not."""
    assert page.locator(".failed").all_inner_texts() == []
    number: int = page.locator(".chart").count()
    assert page.locator(".chart svg.marks").count() == number
    return number


def column(page: Any, name: str) -> list[str]:
    """The texts of a column of the table, as shown."""
    names = [b.get_attribute("data-column") for b in page.locator("#table th button").all()]
    return page.locator(f"#table tbody td:nth-child({names.index(name) + 1})").all_inner_texts()  # type: ignore[no-any-return]


def number(text: str) -> float:
    return float(text.replace("−", "-"))


@pytest.fixture(scope="module")
def page_of_two(html_of_two: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "two.html"
    path.write_bytes(html_of_two.encode())
    return path


def test_page_draws_every_chart_and_asks_for_nothing(browser: Any, page_of_two: Path) -> None:
    with opened(browser, page_of_two) as page:
        # three groups; cross-attention has neither the two charts of symmetry nor the signature
        assert drawn_charts(page) == 1 + 3 * CHARTS_PER_GROUP - 3
        assert page.locator(".nothing").count() == 2


def test_undefined_heads_are_grey_cells_with_a_cross(browser: Any, page_of_two: Path) -> None:
    with opened(browser, page_of_two) as page:
        heat = page.locator(".chart").nth(1)
        assert heat.locator(f'.mark-rect path[fill="{charts.UNDEFINED}"]').count() == 1
        assert heat.locator(CELLS).count() == 6 * 4
        assert heat.locator(".mark-symbol.role-mark path").count() == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_page_is_never_wider_than_its_window(
    browser: Any, page_of_two: Path, tmp_path: Path, cache: Path, width: int
) -> None:
    long = a_model(scored_rows(1, component="y" * 300), "x" * 300)
    long = ScoreTable([long], [SourceFault("z" * 300, "z" * 300)])
    for path in (page_of_two, write_page(long, tmp_path / "long.html", cache_folder=cache)):
        with opened(browser, path, width) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            charts_end = "Math.max(...[...document.querySelectorAll('.chart svg')].map(RIGHT))"
            assert page.evaluate(charts_end.replace("RIGHT", "s => s.getBoundingClientRect().right")) <= width


def test_hostile_names_stay_text_in_a_browser(browser: Any, hostile_html: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(hostile_html.encode())
    with opened(browser, path) as page:
        assert drawn_charts(page) == 1 + CHARTS_PER_GROUP * len(HOSTILE)
        page.check("#with-heads")
        page.check("#with-all")
        for model in range(len(HOSTILE)):
            mark = page.locator(".chart").nth(1 + CHARTS_PER_GROUP * model).locator(CELLS).nth(0)
            mark.scroll_into_view_if_needed()
            mark.hover()
            assert "module" in page.locator("#tip").inner_text()
        for button in page.locator(".legend button").all():
            button.click()
        assert set(column(page, "reason")) - {""} == set(HOSTILE)
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img").count() == 0


def test_policy_stops_a_script_that_got_into_the_page(
    browser: Any, page_of_two: Path, tmp_path: Path
) -> None:
    html = page_of_two.read_text(encoding="utf-8")
    assert "</main>" in html
    path = tmp_path / "injected.html"
    bad = "<script>window.hacked=1</script><p onclick='window.hacked=1' id=bad>x</p>"
    path.write_text(html.replace("</main>", bad + "</main>"), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    page.click("#bad")
    assert page.evaluate("window.hacked") is None
    page.close()


def test_table_sorts_both_ways_with_undefined_scores_last(browser: Any, page_of_two: Path) -> None:
    with opened(browser, page_of_two) as page:
        heading = page.locator("#table th", has=page.locator('button[data-column="symmetry"]'))
        for direction, reverse in (("ascending", False), ("descending", True)):
            heading.locator("button").click()
            assert heading.get_attribute("aria-sort") == direction
            texts = column(page, "symmetry")
            defined = [t for t in texts if t != "–"]
            assert texts == defined + ["–"] * 4  # one layer of the first model, three of cross-attention
            assert [number(t) for t in defined] == sorted(map(number, defined), reverse=reverse)
        assert page.locator('#table th[aria-sort="descending"]').count() == 1


def test_table_sorts_from_the_keyboard(browser: Any, page_of_two: Path) -> None:
    with opened(browser, page_of_two) as page:
        page.focus('#table button[data-column="norm"]')
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")  # the heading keeps the focus
        found = [number(t) for t in column(page, "norm")]
        assert found == sorted(found, reverse=True)


def test_table_shows_layers_first_and_heads_and_one_model_on_request(browser: Any, page_of_two: Path) -> None:
    table = two_models()
    with opened(browser, page_of_two) as page:
        rows = page.locator("#table tbody tr")
        assert rows.count() == len(table.layers)
        page.check("#with-heads")
        assert rows.count() == len(table)
        page.select_option("#only", "acme/translate")
        assert rows.count() == len(table.models[1].rows)
        assert page.locator("#shown").inner_text() == f"{len(table.models[1].rows)} rows"


def test_legend_takes_a_model_out_of_the_plane(browser: Any, page_of_two: Path) -> None:
    with opened(browser, page_of_two) as page:
        marks = page.locator(".chart").first.locator(".mark-symbol path")
        before = marks.count()
        button = page.locator(".legend button").first
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        page.wait_for_timeout(100)
        assert 0 < marks.count() < before
        button.click()
        page.wait_for_timeout(100)
        assert marks.count() == before


def test_large_model_is_drawn_and_its_table_grows_as_it_is_scrolled(
    browser: Any, cache: Path, tmp_path: Path
) -> None:
    table = ScoreTable([a_model(scored_rows(1, n_layers=40, n_heads=32))])
    with opened(browser, write_page(table, tmp_path / "page.html", cache_folder=cache)) as page:
        page.check("#with-heads")
        rows = page.locator("#table tbody tr")
        first = rows.count()
        assert first < 400
        page.evaluate("document.getElementById('table-box').scrollTop = 1e9")
        page.wait_for_timeout(200)
        assert first < rows.count() < len(table)


def odd_tables() -> dict[str, ScoreTable]:
    rows = scored_rows(1, n_layers=3, n_heads=3)
    wild = [
        row | {"norm": 1e300, "symmetry_z": -1e12, "symmetry": math.nan, "row_excess": math.inf}
        for row in rows
    ]
    wrong = [row | {"symmetry": "high", "layer": "first", "flags": "x", "d_model": 0} for row in rows]
    return {
        "empty": ScoreTable(),
        "only errors": ScoreTable([], [SourceFault("a", "b")]),
        "no rows": ScoreTable([a_model([])]),
        "no rows beside a model": ScoreTable([a_model([]), a_model(rows)]),
        "all undefined": ScoreTable([a_model([row | undefined("zero") for row in rows])]),
        "one head": ScoreTable([a_model(scored_rows(1, n_layers=1, n_heads=1))]),
        "uneven heads": ScoreTable([a_model([r for r in rows if (r["head"] or 0) <= r["layer"]])]),
        "layers alone": ScoreTable([a_model([r for r in rows if r["head"] is None])]),
        "heads alone": ScoreTable([a_model([r for r in rows if r["head"] is not None])]),
        "not finite, huge": ScoreTable([a_model(wild)]),
        "wrong types": ScoreTable([a_model(wrong)]),
        "nothing known": ScoreTable([a_model([dict.fromkeys(COLUMNS)])]),
        "same source twice": ScoreTable([a_model(rows), a_model(rows)]),
        "shared layers": ScoreTable([a_model([row | {"shared_by": [0, 1, 2]} for row in rows])]),
    }


@pytest.mark.parametrize("name", odd_tables())
def test_odd_tables_give_a_page_without_complaints(
    browser: Any, cache: Path, tmp_path: Path, name: str
) -> None:
    path = write_page(odd_tables()[name], tmp_path / "page.html", cache_folder=cache)
    with opened(browser, path) as page:
        drawn_charts(page)
        assert page.locator("h1").inner_text()
        assert "NaN" not in page.locator("body").inner_text()
        assert page.locator('.chart path[d*="NaN"], .chart [transform*="NaN"]').count() == 0
