"""Charts as files: every chart of a table as PNG or SVG, on white, with its title, under a name that is safe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from qkform.comparisons import CompareTable
from qkform.differences import DiffTable
from qkform.errors import RecordError
from qkform.flows import FlowTable
from qkform.records import ScoreTable, values, write_whole
from qkform.report import changes, charts, comparecharts, flowcharts, paths, runplots
from qkform.report.comparesection import CURVES, arm_colours, curve_points, difference_charts
from qkform.report.comparewords import NAMES
from qkform.report.flowscreen import circuit_words, task_words
from qkform.report.flowsection import picture_points, safe_rows
from qkform.report.look import INK, QUIET, Axis, model_colour
from qkform.report.rows import (
    Group,
    Points,
    clean,
    diff_groups,
    distinct,
    groups,
    shortened,
    text,
    whole_score,
)
from qkform.report.runset import RunSet
from qkform.report.sections import KINDS, both_scores
from qkform.report.series import UNITS, Entry, entries, labels

Shown = ScoreTable | DiffTable | FlowTable | CompareTable | RunSet
FORMATS = ("png", "svg")
SCALE = 2.0  # pixels of a PNG per pixel of the chart
_WIDTH, _WIDE = 640, 720
_LONGEST = 40  # characters of a name from the record in a file's name


def save_plots(
    table: Shown,
    folder: str | os.PathLike[str],
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Write every chart of `table` into `folder`, each file whole or not at all; returns their paths.

    One file per chart, model, list of layers and format, named like "01-acme-small-encoder-layer-symmetry-heads.png".
    Of a series, the charts over its steps or distances, and the others of its last step or shortest distance. PNG
    has two pixels per pixel of the chart. The folder is made where it is missing. Raises RecordError for another
    format, or a place that cannot be written.
    """
    for name in formats:
        if name not in FORMATS:
            raise RecordError(f"cannot write plots as {name!r}: the formats are {', '.join(FORMATS)}")
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"cannot write plots to {target}: {error.strerror or error}") from None
    taken: set[str] = set()
    written = []
    for parts, title, chart in _plots(table):
        spec = _with_title(chart, title).to_dict(validate=False)
        name = file_name(parts, taken)
        for form in dict.fromkeys(formats):
            path = target / f"{name}.{form}"
            if path.is_symlink():
                raise RecordError(f"cannot write {path}: it is a link, which may lead out of the folder")
            if path.exists() and not _is_picture(path):
                raise RecordError(f"cannot write {path}: it is there, and is no chart; name another folder")
            content = _drawn(spec, form)
            _write(path, content)
            written.append(path)
    return written


def _plots(table: Shown) -> Iterator[tuple[list[str], list[str], Any]]:
    """(parts of the name, lines of the title, chart) for every chart of a record."""
    if isinstance(table, DiffTable):
        return _diff_plots(table)
    if isinstance(table, CompareTable):
        return _compare_plots(table)
    if isinstance(table, RunSet):
        flow = [] if table.flow is None else _flow_plots(table.flow)
        return chain(runplots.plots(table), flow)
    return _flow_plots(table) if isinstance(table, FlowTable) else _score_plots(table)


def _is_picture(path: Path) -> bool:
    """Whether a file is what `save_plots` writes under such a name, and may write again."""
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError:
        return False
    return not head or (head.startswith(b"\x89PNG\r\n") if path.suffix == ".png" else b"<svg" in head)


def _write(path: Path, content: bytes) -> None:
    write_whole(path, lambda to: to.write_bytes(content))


def file_name(parts: Sequence[str], taken: set[str]) -> str:
    """A name of [a-z0-9-] from `parts`, each bounded, that is not in `taken`; it is added there."""
    base = "-".join(filter(None, map(_slug, parts)))
    name, n = base, 1
    while name in taken:
        n += 1
        name = f"{base}-{n}"
    taken.add(name)
    return name


def _slug(part: str) -> str:
    """The end of a text, from the beginning of a word on where it is long."""
    word = re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-")
    if len(word) <= _LONGEST:
        return word
    word = word[-_LONGEST:]
    return word.partition("-")[2] if "-" in word else word


def _score_plots(table: ScoreTable) -> Iterator[tuple[list[str], list[str], Any]]:
    """(parts of the name, lines of the title, chart) for every chart of a table."""
    found = entries(table)
    names = labels(found)
    every = []
    for i, (label, entry) in enumerate(zip(names, found, strict=True)):
        lists = groups(entry.models, label, distances=entry.kind == "offset")
        prefix = [f"{i + 1:02d}", label]
        whole = Points(row for group in whole_score(lists) for row in group.rows)
        every += [row for row in whole if not entry.kind or row["stop"] == entry.start]
        if entry.kind and both_scores([row for row in whole if row["head"] is None]):
            chart = paths.plane_paths(whole, entry.kind, now_stop=entry.start, width=_WIDE)
            over = f"marks: {_at(entry)}; lines: all {UNITS[entry.kind]}s"
            yield [*prefix, "plane-path"], ["Symmetry against directionality", clean(label), over], chart
        for group in lists:
            yield from _group_plots(entry, group, prefix, clean(label), model_colour(i))
    if both_scores(every):
        colours = {label: model_colour(i) for i, label in enumerate(names)}
        named = Points({**row, "source": clean(row["source"])} for row in every)
        cleaned = {clean(label): colour for label, colour in colours.items()}
        chart = charts.plane(named, colours=cleaned, width=_WIDE)
        yield ["00", "plane"], ["Symmetry against directionality", "large: whole layers; small: heads"], chart


def _group_plots(
    entry: Entry, group: Group, prefix: Sequence[str], label: str, colour: str
) -> Iterator[tuple[list[str], list[str], Any]]:
    name = [*prefix, *_list_words(group)]
    of = f"{label}: {_list_title(group)}"
    shown = group.at(entry.start) if entry.kind else group
    of_shown = f"{of}, {_at(entry)}" if entry.kind else of
    axes: tuple[Axis, Axis] = ("symmetry", "directionality")
    for axis in axes:
        if entry.kind and any(row[axis] is not None for row in group.layers):
            chart = paths.path(group.rows, axis, entry.kind, width=_WIDE, height=320)
            yield (
                [*name, axis, f"over-{UNITS[entry.kind]}s"],
                [f"{axis.title()} over {UNITS[entry.kind]}s", of],
                chart,
            )
        if any(row[axis] is not None for row in shown.heads):
            chart = charts.heatmap(shown.rows, axis, width=_WIDTH)
            yield [*name, axis, "heads"], [f"{axis.title()} of every head", of_shown], chart
        if shown.has(axis):
            chart = charts.profile(shown.rows, axis, colour=colour, width=_WIDTH)
            yield [*name, axis, "layers"], [f"{axis.title()} by layer", of_shown], chart
    if shown.has("positive_energy"):
        chart = charts.signature(shown.rows, colour=colour, width=_WIDTH)
        yield [*name, "attraction"], ["Attraction and repulsion by layer", of_shown], chart


def _diff_plots(diff: DiffTable) -> Iterator[tuple[list[str], list[str], Any]]:
    a, b = distinct([diff.source_a, diff.source_b])
    for i, group in enumerate(diff_groups(diff)):
        name = ["diff", f"{i + 1:02d}", *_list_words(group)]
        of = f"from {clean(a)} to {clean(b)}: {_list_title(group)}"
        columns: tuple[changes.Change, changes.Change] = ("symmetry_change", "relative_change")
        for column in columns:
            title = changes.CHANGES[column].capitalize()
            if values(group.heads, column):
                chart: Any = changes.heatmap(group.rows, column, width=_WIDTH)
                yield [*name, column, "heads"], [f"{title} of every head", of], chart
            if group.has(column):
                chart = changes.profile(group.rows, column, width=_WIDTH)
                yield [*name, column, "layers"], [f"{title} by layer", of], chart
        if changes.both_ends(group.rows):
            chart = changes.arrows(group.rows, width=_WIDE)
            yield [*name, "plane-arrows"], ["From a (circle) to b (tip), an arrow per layer", of], chart


def _flow_plots(table: FlowTable) -> Iterator[tuple[list[str], list[str], Any]]:
    points = picture_points(table.points, safe_rows(table.rows))
    of = [clean(", ".join(circuit_words(table.task))), clean(task_words(table.task))]
    if any(point["kind"] == "line" for point in points):
        chart: Any = flowcharts.phase_plane(points, width=_WIDE)
        yield ["flow", "phase-plane"], ["The straight line of training", *of], chart
        chart = flowcharts.way(points, width=_WIDE, height=320)
        yield ["flow", "way"], ["From the start to the loss, in gap and gain", *of], chart
    if any(point["kind"] == "end" and point["ratio"] > 0 for point in points):
        for measure in ("sharpness", "entropy"):
            chart = flowcharts.against_ratio(points, measure, width=_WIDE, height=320)
            yield ["flow", measure], [f"{measure.capitalize()} when the loss is reached", *of], chart


def _compare_plots(table: CompareTable) -> Iterator[tuple[list[str], list[str], Any]]:
    points, colours = curve_points(table), arm_colours(table)
    against = f"against {clean(text(table.settings.get('baseline')))}"
    for name in CURVES:
        if any(row[name] is not None for row in points):
            chart: Any = comparecharts.curves(points, name, colours, width=_WIDE, height=360)
            yield ["compare", name], [NAMES[name].capitalize(), "thin: each seed; thick: their mean"], chart
    for name in ("normalised_entropy", "symmetry"):
        if any(row[name] is not None and row["smoothed"] is not None for row in points):
            at = table.settings.get("at_loss")
            chart = comparecharts.against_loss(points, name, colours, at, width=_WIDE)
            yield ["compare", name, "loss"], [f"{NAMES[name].capitalize()} against the held-out loss"], chart
    for name, title, chart in difference_charts(table, colours, width=_WIDTH):
        yield ["compare", "difference", name], [title.capitalize(), against], chart


def _at(entry: Entry) -> str:
    return f"{UNITS[entry.kind or 'step']} {entry.values[entry.start]:,}"


def _list_words(group: Group) -> list[str]:
    return [group.component, *([] if group.attention == "self" else [group.attention]), group.part]


def _list_title(group: Group) -> str:
    part = f", {shortened(clean(group.part), 24)} part" if group.part else ""
    kind = KINDS.get(group.attention, shortened(clean(group.attention), 24))
    return f"{shortened(clean(group.component), 40) or 'attention'}{part}, {kind}"


def _with_title(chart: Any, lines: Sequence[str]) -> Any:
    import altair as alt

    title = alt.TitleParams(
        text=lines[0],
        subtitle=list(lines[1:]),
        anchor="start",
        fontSize=15,
        fontWeight=600,
        color=INK,
        subtitleColor=QUIET,
        offset=12,
    )
    return chart.properties(title=title, background="white", padding=16)


def _drawn(spec: dict[str, Any], form: str) -> bytes:
    import vl_convert

    from qkform.report.bundle import vega_lite_version

    # no address is allowed: a chart holds its rows, and nothing in a record may make it ask for more
    options: dict[str, Any] = {"vl_version": vega_lite_version(), "allowed_base_urls": []}
    if form == "svg":
        return vl_convert.vegalite_to_svg(spec, **options).encode()
    return vl_convert.vegalite_to_png(spec, scale=SCALE, **options)
