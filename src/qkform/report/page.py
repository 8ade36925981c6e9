"""One self-contained HTML page of a ScoreTable: works offline, makes no request, runs nothing from a record.

Names in a checkpoint are hostile until shown otherwise. Text goes through jinja2's autoescape; rows and
charts go into the page as JSON without the characters that end an element; scripts run only if their SHA-256
stands in the page's Content-Security-Policy; and a row is only data to a chart, never part of an expression.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from qkform.records import ModelScores, Row, ScoreTable, write_whole
from qkform.report import charts, words
from qkform.report.bundle import javascript
from qkform.report.reading import reading
from qkform.report.rows import POINT_COLUMNS, Group, Points, groups, labels, text

# < > & cannot end the element or open a comment; all that is not ASCII, U+2028 too, json.dumps escapes itself
_JSON_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def write_page(
    table: ScoreTable,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the page of `table` to `path`, whole or not at all; returns the path. See `page_html`.

    Raises RecordError where `path` cannot be written.
    """
    target = Path(path)
    html = page_html(table, title=title, cache_folder=cache_folder)
    write_whole(target, lambda to: to.write_bytes(html.encode()))
    return target


def page_html(
    table: ScoreTable, *, title: str | None = None, cache_folder: str | os.PathLike[str] | None = None
) -> str:
    """The page as text, about 1 MB and the rows: summaries, charts, conventions, and a table of every row.

    `cache_folder` keeps the charting library between calls, see `qkform.report.bundle.javascript`.
    """
    import jinja2
    from markupsafe import Markup

    names = labels(table)
    models = [_Model(i, name, model) for i, (name, model) in enumerate(zip(names, table.models, strict=True))]
    scripts = [Markup(_resource("page.js"))]
    plane = _plane(models)
    if any(model.groups for model in models):
        scripts.insert(0, Markup(javascript(cache_folder)))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["signed"] = _signed
    return environment.from_string(_resource("page.html.j2")).render(
        title=text(title) if title else _title(names),
        models=models,
        errors=[{"source": text(e.source), "message": text(e.message)} for e in table.errors],
        totals=_totals(models, table),
        plane=plane and _chart(plane, "all"),
        conventions=words.conventions(zip(names, table.models, strict=True)),
        scores=words.SCORES,
        data=Markup(_json(_store(models))),
        css=Markup(_resource("page.css")),
        scripts=scripts,
        policy=policy(scripts),
    )


def policy(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy under which these inline scripts run, no other does, nothing is fetched."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


class _Model:
    """What the template shows of one model."""

    def __init__(self, index: int, label: str, model: ModelScores) -> None:
        self.index, self.label = index, label
        self.colour = charts.model_colour(index)
        self.source, self.format = text(model.source), text(model.format)
        self.model_type = text(model.model_type) if model.model_type else None
        self.skipped = [{k: text(s.get(k, "")) for k in ("module", "reason")} for s in model.skipped]
        self.groups = groups(model, label)
        self.layers = [row for group in self.groups for row in group.layers]
        self.heads = [row for group in self.groups for row in group.heads]
        # the sentences are made from the rows made safe: a record may hold anything
        self.reading = reading(replace(model, rows=[*self.layers, *self.heads]))

    @property
    def facts(self) -> list[tuple[str, str]]:
        masks = sorted({mask for group in self.groups for mask in group.masks})
        found = [
            ("model type", self.model_type or "not given"),
            ("format", self.format),
            ("size", words.shape(self.groups) if self.groups else "nothing scored"),
            ("mask", ", ".join(masks) or "unknown"),
        ]
        means = words.null_means(self.layers or self.heads)
        return [*found, ("1/d, random mean", means)] if means else found

    @property
    def spreads(self) -> list[words.Spread]:
        found = [
            words.spread("layer symmetry", self.layers, "symmetry"),
            words.spread("head symmetry", self.heads, "symmetry"),
            words.spread("layer directionality", self.layers, "directionality"),
        ]
        return [one for one in found if one is not None]

    @property
    def sections(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self.groups):
            yield _section(self, group, f"g{self.index}-{number}")


def _section(model: _Model, group: Group, name: str) -> dict[str, Any]:
    """One component and kind of attention: its heading, its charts, and what is missing or flagged in it."""
    kind = {"self": "self-attention", "cross": "cross-attention"}.get(group.attention, group.attention)
    energy = charts.signature(group.rows, colour=model.colour, width="container", held_as="rows")
    return {
        "component": group.component,
        "kind": kind or "attention",
        "mask": ", ".join(group.masks) or "unknown",
        "shape": words.shape([group]),
        "symmetry": _axis(model, group, "symmetry", name),
        "directionality": _axis(model, group, "directionality", name),
        "signature": _chart(energy, name) if group.has("positive_energy") else None,
        "undefined": words.undefined(group),
        "flags": words.flagged(group),
    }


def _axis(model: _Model, group: Group, axis: charts.Axis, name: str) -> dict[str, Any]:
    """Heat map and profile of one score; None in place of a chart that would have nothing to show."""
    found = [abs(row[axis]) for row in group.heads if row[axis] is not None]
    limit = charts.heatmap_limit(group.rows, axis)
    heat = charts.heatmap(group.rows, axis, width="container", held_as="rows") if found else None
    curve = (
        charts.profile(group.rows, axis, colour=model.colour, width="container", held_as="rows")
        if group.has(axis)
        else None
    )
    return {
        "limit": f"{limit:g}",
        "beyond": sum(value > limit for value in found),
        "heatmap": heat and _chart(heat, name),
        "profile": curve and _chart(curve, name),
    }


def _plane(models: Sequence[_Model]) -> Any:
    """The chart of all models; None where no row has both scores."""
    rows = Points(row for model in models for group in model.groups for row in group.rows)
    if not any(row["symmetry"] is not None and row["directionality"] is not None for row in rows):
        return None
    colours = {model.label: model.colour for model in models}
    return charts.plane(rows, colours=colours, legend=False, width="container", held_as="rows")


def _chart(chart: Any, data: str) -> dict[str, Any]:
    """A chart whose rows are those that the page holds under the name `data`: "all", or one group's."""
    from markupsafe import Markup

    spec = chart.to_dict(validate=False)  # half the time of a page; the tests hold every chart to the schema
    return {"spec": Markup(_json(spec)), "data": data, "height": chart.height}


def _store(models: Sequence[_Model]) -> list[dict[str, Any]]:
    """Every row once: per group the columns in which its rows differ, and the values that they all share."""
    return [
        {"name": f"g{model.index}-{number}", **_packed(model.label, group.rows)}
        for model in models
        for number, group in enumerate(model.groups)
    ]


def _packed(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0]
    varying = [c for c in POINT_COLUMNS if any(row[c] != first[c] for row in rows)]
    shared = {"source": label} | {c: first[c] for c in POINT_COLUMNS if c not in varying}
    return {"shared": shared, "columns": varying, "rows": [[row[c] for c in varying] for row in rows]}


def _totals(models: Sequence[_Model], table: ScoreTable) -> str:
    parts = [
        words.counted(len(models), "model"),
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
    return f"{value:.3f}".replace("-", "\u2212")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_JSON_ESCAPES)


def _resource(name: str) -> str:
    return files("qkform.report").joinpath(name).read_text(encoding="utf-8")
