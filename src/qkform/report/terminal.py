"""A table of scores for the terminal: one line per layer, small bars, medians, the null band."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from qkform.records import ModelScores, Row, median_of, null_band, single_heads, values, whole_layers
from qkform.report.reading import decimals, mask_words, reading

BAR = 6  # cells on each side of zero
NOTES = 10  # more of them would hide the table
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def renderables(model: ModelScores, *, width: int, unicode: bool = True) -> Iterator[Any]:
    """What rich prints for one model: a heading, a table per list of layers, and a reading.

    `width` in columns; from 96 on it holds every column, below 76 the bars go. `unicode=False` draws with ASCII.
    """
    from rich.text import Text

    heading = Text()
    heading.append(_one_line(model.source), style="bold")
    heading.append(
        f"  {_one_line(model.model_type or 'unknown type')}, {model.format}, {_bytes(model.bytes_read)} read"
        f" in {model.wall_seconds:.1f} s",
        style="dim",
    )
    yield heading
    for (component, attention), rows in _groups(model).items():
        yield _table(component, attention, rows, width=width, unicode=unicode)
    yield Text(reading(model))
    yield Text(_null_words(model), style="dim")
    notes = _undefined(model)
    notes += [f"not scored: {_one_line(e['module'])}: {_one_line(e['reason'])}" for e in model.skipped]
    if len(notes) > NOTES:
        notes[NOTES:] = [f"and {len(notes) - NOTES} more, listed by --format json"]
    yield from (Text(note, style="dim") for note in notes)
    yield Text("")


def bar(value: float | None, *, unicode: bool = True, cells: int = BAR) -> str:
    """A bar from the middle: to the right for positive, to the left for negative values; 2 * cells + 1 wide."""
    middle = "│" if unicode else "|"
    if value is None:
        return " " * cells + " " + " " * cells
    eighths = round(min(abs(value), 1.0) * cells * 8)
    if not unicode:
        length = round(eighths / 8)
        ink = "#" * length
    elif value >= 0:
        ink = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    else:  # there are no blocks that fill from the right: whole cells and a half one
        ink = ("▐" if eighths % 8 >= 4 else "") + "█" * (eighths // 8)
    if value >= 0:
        return " " * cells + middle + ink.ljust(cells)
    return ink.rjust(cells) + middle + " " * cells


def _groups(model: ModelScores) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in model.rows:
        groups.setdefault((row["component"], row["attention"]), []).append(row)
    return groups


def _table(component: str, attention: str, rows: list[Row], *, width: int, unicode: bool) -> Any:
    from rich import box
    from rich.table import Table

    layers = whole_layers(rows)
    by_layer: dict[str, list[Row]] = {}
    for row in single_heads(rows):
        by_layer.setdefault(row["module"], []).append(row)
    columns = _columns(layers, by_layer, cross=attention == "cross", width=width, unicode=unicode)
    table = Table(
        title=_title(component, attention, layers),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD if unicode else box.ASCII2,
        pad_edge=False,
        padding=(0, 1),
        show_footer=True,
        highlight=False,
    )
    for column in columns:
        footer = column.footer if unicode else column.footer.replace("–", "-")
        table.add_column(column.name, footer, justify=column.justify, no_wrap=True)
    for row in layers:
        cells = [column.cell(row) for column in columns]
        table.add_row(*(cells if unicode else [cell.replace("–", "-") for cell in cells]))
    return table


def _title(component: str, attention: str, layers: list[Row]) -> str:
    name = _one_line(component) or "the model"
    return f"{name}: {attention}-attention, {mask_words(layers)}{_shared_flags(layers)}"


@dataclass(frozen=True)
class _Column:
    name: str
    footer: str
    cell: Callable[[Row], str]
    justify: Literal["left", "right"] = "right"


def _columns(
    layers: list[Row], by_layer: dict[str, list[Row]], *, cross: bool, width: int, unicode: bool
) -> list[_Column]:
    """The columns that fit; their footers are the median over layers, and the range below it."""
    bars, more = width >= 76, width >= 96

    def score(name: str) -> _Column:
        found = values(layers, name)
        span = f"{decimals(min(found))} to {decimals(max(found))}" if found else "–"
        if not bars:
            return _Column(name[:9], decimals(median_of(layers, name)), lambda r: decimals(r[name]))

        def cell(row: Row) -> str:
            if name == "directionality" and "no_outliers" in row["flags"]:
                return f"{decimals(row[name]):>6} no outliers"
            return f"{decimals(row[name]):>6} {bar(row[name], unicode=unicode)}"

        return _Column(name, f"{decimals(median_of(layers, name)):>6}\n{span}", cell, justify="left")

    def plain(title: str, name: str, shown: Callable[[float | None], str]) -> _Column:
        return _Column(title, shown(median_of(layers, name)), lambda r: shown(r[name]))

    heads = [row for rows in by_layer.values() for row in rows]
    columns = [_Column("layer", "median\nrange" if bars else "median", _layer_name)]
    if not cross:
        columns += [
            score("symmetry"),
            plain("z", "symmetry_z", lambda v: decimals(v, 0)),
            _Column(
                "heads",
                decimals(median_of(heads, "symmetry")),
                lambda r: decimals(median_of(by_layer.get(r["module"], []), "symmetry")),
            ),
        ]
    columns.append(score("directionality"))
    if width >= 60:
        columns.append(plain("rank", "effective_rank", _number))
    if more and not cross:
        columns.append(plain("attracts", "positive_energy", lambda v: decimals(v, 2)))
    if more:
        columns.append(plain("norm", "norm", _number))
    return columns


def _layer_name(row: Row) -> str:
    shared = row["shared_by"]
    return f"{shared[0]}..{shared[-1]}" if shared and len(shared) > 1 else str(row["layer"])


def _undefined(model: ModelScores) -> list[str]:
    """Whole layers without a score that they should have, and why."""
    return [
        f"no score: {_one_line(row['module'])}: {row['reason']}"
        for row in model.layers
        if row["effective_rank"] is None
    ]


def _shared_flags(layers: list[Row]) -> str:
    """Flags that every layer of a list carries belong into its heading."""
    flags = [f for f in layers[0]["flags"] if all(f in row["flags"] for row in layers) and f != "no_outliers"]
    return "".join(f", {flag} (the raw form is scored)" for flag in flags)


def _null_words(model: ModelScores) -> str:
    rows = [r for r in model.layers if r["symmetry"] is not None]
    if not rows:
        cross = any(r["attention"] == "cross" for r in model.layers)
        return "Cross-attention has no symmetry: its two sides read different sequences." if cross else ""
    bands = [b for b in map(null_band, rows) if b is not None]
    if not bands:
        return ""
    low, high = min(b[0] for b in bands), max(b[1] for b in bands)
    return (
        f"Random weights of this size: symmetry {decimals(low)} to {decimals(high)} (mean -+ 2 std). "
        "Directionality below 0: the key side dominates; it scatters widely in random weights, so compare many "
        "layers. A score says nothing about the mask."
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def _bytes(n: int) -> str:
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _one_line(text: str, length: int = 160) -> str:
    """Names come from the file: control characters, which could move the cursor, are shown and not obeyed."""
    clean = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return clean if len(clean) <= length else clean[: length - 1] + "…"
