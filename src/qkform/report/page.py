"""One self-contained HTML page of scores, differences, a flow or runs: works offline, makes no request.

Names in a checkpoint are hostile until shown otherwise. Text goes through jinja2's autoescape; rows and
charts go into the page as JSON without the characters that end an element; scripts run only if their SHA-256
stands in the page's Content-Security-Policy; and a row is only data to a chart, never part of an expression.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from qkform.comparisons import CompareTable
from qkform.differences import DiffTable
from qkform.flows import FlowTable, ratio_name
from qkform.records import Row, ScoreTable, write_whole
from qkform.report import charts, words
from qkform.report.bundle import javascript
from qkform.report.comparesection import CompareSection
from qkform.report.comparewords import MEANINGS
from qkform.report.diffsection import DiffSection
from qkform.report.flowsection import WORDS, FlowSection
from qkform.report.rows import DIFF_POINT_COLUMNS, POINT_COLUMNS, Points, text
from qkform.report.runcharts import HEADINGS
from qkform.report.runsection import WORDS as RUN_WORDS
from qkform.report.runsection import RunsSection
from qkform.report.runset import RunSet
from qkform.report.sections import Section, both_scores
from qkform.report.series import entries, labels
from qkform.report.trainedsection import Trained, TrainedSection

Shown = ScoreTable | DiffTable | FlowTable | CompareTable | RunSet
# < > & cannot end the element or open a comment; all that is not ASCII, U+2028 too, json.dumps escapes itself
_JSON_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def write_page(
    table: Shown,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
    trained: Trained | None = None,
) -> Path:
    """Write the page of `table` to `path`, whole or not at all; returns the path. See `page_html`.

    Raises RecordError where `path` cannot be written.
    """
    target = Path(path)
    html = page_html(table, title=title, cache_folder=cache_folder, trained=trained)
    write_whole(target, lambda to: to.write_bytes(html.encode()))
    return target


def page_html(
    table: Shown,
    *,
    title: str | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
    trained: Trained | None = None,
) -> str:
    """The page as text, about 1 MB and the rows: summaries, charts, conventions, and a table of every row.

    Models that belong together, steps of one run or distances of one model, have one section with a slider.
    `trained` adds runs of two objectives to the page of a `ScoreTable`.
    `cache_folder` keeps the charting library between calls, see `qkform.report.bundle.javascript`.
    """
    if isinstance(table, DiffTable):
        return _diff_html(table, title, cache_folder)
    if isinstance(table, FlowTable):
        return _flow_html(table, title, cache_folder)
    if isinstance(table, CompareTable):
        return _compare_html(table, title, cache_folder)
    if isinstance(table, RunSet):
        return _runs_html(table, title, cache_folder)
    found = entries(table)
    names = labels(found)
    models = [
        Section(i, name, entry, _chart) for i, (name, entry) in enumerate(zip(names, found, strict=True))
    ]
    plane = _plane(models)
    return _rendered(
        "page.html.j2",
        any(model.all_groups for model in models) or trained is not None,
        cache_folder,
        title=text(title) if title else _title(names),
        models=models,
        errors=[{"source": text(e.source), "message": text(e.message)} for e in table.errors],
        totals=_totals(models, table),
        plane=plane and _chart(plane, "all"),
        trained=trained and TrainedSection(trained, _chart),
        conventions=words.conventions(
            (model.label, words.in_common(model.entry.models, model.unit)) for model in models
        ),
        scores=words.SCORES,
        data=_json(_store(models)),
    )


def policy(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy under which these inline scripts run, no other does, nothing is fetched."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _diff_html(diff: DiffTable, title: str | None, cache_folder: str | os.PathLike[str] | None) -> str:
    section = DiffSection(diff, _chart)
    return _rendered(
        "diff.html.j2",
        bool(section.groups),
        cache_folder,
        title=text(title) if title else f"From {section.a} to {section.b}",
        diff=section,
        conventions=words.conventions([("this comparison", diff.conventions)]),
        scores=words.DIFF_SCORES,
        data=_json(
            [
                {"name": f"d{i}", "entry": 0, "part": group.part}
                | packed_rows({}, group.rows, DIFF_POINT_COLUMNS)
                for i, group in enumerate(section.groups)
            ]
        ),
    )


def _flow_html(table: FlowTable, title: str | None, cache_folder: str | os.PathLike[str] | None) -> str:
    section = FlowSection(table, _chart)
    return _rendered(
        "flow.html.j2",
        bool(section.ends),
        cache_folder,
        title=text(title) if title else "One layer of attention in training",
        flow=section,
        conventions=[(["this task"], section.pairs)],
        scores=WORDS,
        data="[]",
    )


def _compare_html(table: CompareTable, title: str | None, cache_folder: str | os.PathLike[str] | None) -> str:
    section = CompareSection(table, _chart)
    return _rendered(
        "compare.html.j2",
        bool(section.differences or section.curves),
        cache_folder,
        title=text(title) if title else f"Against {section.baseline}",
        compare=section,
        conventions=[(["this comparison"], section.settings)],
        scores=MEANINGS,
        data="[]",
    )


def _runs_html(runs: RunSet, title: str | None, cache_folder: str | os.PathLike[str] | None) -> str:
    section = RunsSection(runs, _chart)
    drawn = {
        "loss": section.loss,
        "compared": section.compared,
        "by_layer": section.by_layer,
        "sharpness": section.sharpness,
        "own": list(section.own),
        "conflict": section.conflict,
    }
    ratios = [ratio_name(row["ratio"]) for row in runs.flow.rows] if runs.flow else []
    return _rendered(
        "runs.html.j2",
        any(drawn.values()),
        cache_folder,
        title=text(title) if title else _runs_title(runs),
        runs=section,
        **drawn,
        thinned=section.thinned,
        titles=HEADINGS,
        ratios=("the ratio " if len(ratios) == 1 else "the ratios ") + ", ".join(ratios),
        conventions=section.conventions,
        scores=RUN_WORDS,
        data=_json(section.store()),
    )


def _runs_title(runs: RunSet) -> str:
    names = [run.name for run in runs.runs]
    return f"The form in training: {names[0]}" if len(names) == 1 else "The form in training"


def _rendered(
    template: str, with_charts: bool, cache_folder: str | os.PathLike[str] | None, *, data: str, **shown: Any
) -> str:
    import jinja2
    from markupsafe import Markup

    scripts = [Markup(_resource("page.js"))]
    if with_charts:
        scripts.insert(0, Markup(javascript(cache_folder)))
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["signed"] = _signed
    environment.filters["score"] = lambda value: "–" if value is None else _signed(value)
    environment.filters["json"] = _json  # autoescaped: for attributes
    return environment.get_template(template).render(
        data=Markup(data),
        css=Markup(_resource("page.css")),
        scripts=scripts,
        policy=policy(scripts),
        **shown,
    )


def _plane(models: Sequence[Section]) -> Any:
    """The chart of all models; None where no row has both scores, or a series alone, which has its own, is there."""
    rows = Points(row for model in models for row in model.rows)
    if not both_scores(rows) or (len(models) == 1 and models[0].entry.kind):
        return None
    colours = {model.label: model.colour for model in models}
    return charts.plane(rows, colours=colours, legend=False, width="container", held_as="rows")


def _chart(chart: Any, data: str) -> dict[str, Any]:
    """A chart whose rows are those that the page holds under the name `data`: "all", an entry's, or one group's."""
    from markupsafe import Markup

    spec = chart.to_dict(validate=False)  # half the time of a page; the tests hold every chart to the schema
    return {"spec": Markup(_json(spec)), "data": data, "height": chart.height}


def _store(models: Sequence[Section]) -> list[dict[str, Any]]:
    """Every row once: per group the columns in which its rows differ, and the values that they all share."""
    return [
        {"name": f"g{model.index}-{number}", "entry": model.index, "part": group.part}
        | packed_rows({"source": model.label}, group.rows, POINT_COLUMNS)
        for model in models
        for number, group in enumerate(model.all_groups)
    ]


def packed_rows(shared: Mapping[str, Any], rows: Sequence[Row], columns: Sequence[str]) -> dict[str, Any]:
    """Rows as the page holds them: the columns in which they differ, and the values that all share."""
    first = rows[0]
    varying = [c for c in columns if any(row[c] != first[c] for row in rows)]
    shared = {**shared} | {c: first[c] for c in columns if c not in varying}
    return {"shared": shared, "columns": varying, "rows": [[row[c] for c in varying] for row in rows]}


def _totals(models: Sequence[Section], table: ScoreTable) -> str:
    single = sum(model.entry.kind is None for model in models)
    parts = [words.counted(single, "model")] if single or not models else []
    for kind, noun in (("step", "training step"), ("offset", "distance")):
        stops = [len(model.entry.models) for model in models if model.entry.kind == kind]
        parts += [f"{words.counted(n, noun)} of one model" for n in stops[:3]]
        if len(stops) > 3:
            parts[-3:] = [f"{sum(stops)} {noun}s of {len(stops)} models"]
    parts += [
        words.counted(sum(len(m.layers) for m in models), "layer"),
        words.counted(sum(len(m.heads) for m in models), "head"),
    ]
    if table.errors:
        parts.append(words.counted(len(table.errors), "source") + " that could not be read")
    return " · ".join(parts)


def _title(names: Sequence[str]) -> str:
    return f"Query–key form of {names[0]}" if len(names) == 1 else "Query–key forms"


def _signed(value: float) -> str:
    """0.123, and a negative one with the minus sign that typography has."""
    shown = f"{value:.3f}" if abs(value) >= 0.001 or value == 0.0 else f"{value:.1e}"
    return shown.replace("-", "\u2212")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_JSON_ESCAPES)


def _resource(name: str) -> str:
    return files("qkform.report").joinpath(name).read_text(encoding="utf-8")
