"""A table of scores for the terminal: one line per layer, small bars, medians, the null band."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qkform.records import ModelScores, Row, median_of, null_band, single_heads, values, whole_layers
from qkform.report.reading import decimals, mask_words, reading

BAR = 6  # cells on each side of zero
NOTES = 10  # more of them would hide the table
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def model_screen(model: ModelScores, *, width: int, unicode: bool = True) -> Iterator[Any]:
    """What rich prints for one model: a heading, a table per list of layers, and a reading.

    `width` in columns; from 96 on it holds every column, below 76 the bars go. `unicode=False` draws with ASCII.
    """
    from rich.text import Text

    yield heading(
        one_line(model.source),
        model.model_type,
        model.format,
        *form_words(model),
        *cost(model.bytes_read, model.wall_seconds),
    )
    for name, rows in by_list(model.rows).items():
        yield _table(*name, rows, width=width, unicode=unicode)
    yield Text(reading(model))
    yield Text(null_words(model.layers), style="dim")
    notes = _undefined(model)
    notes += [f"not scored: {one_line(e['module'])}: {one_line(e['reason'])}" for e in model.skipped]
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


def heading(name: str, model_type: str | None, *more: str) -> Any:
    """The first line of a model, a series or a comparison."""
    from rich.text import Text

    line = Text()
    line.append(name, style="bold")
    line.append("  " + ", ".join([one_line(model_type or "unknown type"), *more]), style="dim")
    return line


def form_words(model: ModelScores, *, distance: bool = True) -> list[str]:
    """What was scored, where it is not the raw form as it is stored."""
    words = [] if model.form == "raw" else [f"form with {one_line(model.form).replace(' ', ', ')}"]
    return [*words, f"at distance {model.offset}"] if distance and model.offset is not None else words


def cost(bytes_read: int, wall_seconds: float) -> list[str]:
    """["12.3 MB read", "0.4 s"], each where there was any: of models from one source the first has what all took."""
    said = [f"{_bytes(bytes_read)} read"] if bytes_read else []
    return [*said, f"{wall_seconds:.1f} s"] if wall_seconds else said


def by_list(rows: Iterable[Row]) -> dict[tuple[str, str, str | None], list[Row]]:
    """Rows by component, kind of attention and part of the score, in order of appearance."""
    groups: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["component"], row["attention"], row.get("part")), []).append(row)
    return groups


def heads_by_module(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in single_heads(rows):
        found.setdefault(row["module"], []).append(row)
    return found


def _table(
    component: str, attention: str, part: str | None, rows: list[Row], *, width: int, unicode: bool
) -> Any:
    layers = whole_layers(rows)
    columns = _columns(
        layers, heads_by_module(rows), cross=attention == "cross", width=width, unicode=unicode
    )
    title = f"{list_title(component, attention, part)}, {mask_words(layers)}{_shared_flags(layers)}"
    return table_of(title, columns, layers, unicode=unicode)


def table_of(title: str, columns: Sequence[Column], lines: Iterable[Any], *, unicode: bool) -> Any:
    """A table of one line per item of `lines`, with the footers of its columns; ASCII alone without `unicode`."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD if unicode else box.ASCII2,
        pad_edge=False,
        padding=(0, 1),
        show_footer=any(column.footer for column in columns),
        highlight=False,
    )

    def plain(text: str) -> str:
        return text if unicode else text.replace("–", "-")

    for column in columns:
        table.add_column(column.name, plain(column.footer), justify=column.justify, no_wrap=True)
    for line in lines:
        table.add_row(*(plain(column.cell(line)) for column in columns))
    return table


def list_title(component: str, attention: str, part: str | None) -> str:
    """ "model.layers, nope part: self-attention"."""
    name = one_line(component or "") or "the model"
    return f"{name}{f', {one_line(part)} part' if part else ''}: {attention}-attention"


@dataclass(frozen=True)
class Column:
    """One column: its heading, its footer, and the cell of a line."""

    name: str
    footer: str
    cell: Callable[[Any], str]
    justify: Literal["left", "right"] = "right"


def _columns(
    layers: list[Row], by_layer: dict[str, list[Row]], *, cross: bool, width: int, unicode: bool
) -> list[Column]:
    """The columns that fit; their footers are the median over layers, and the range below it."""
    bars, more = width >= 76, width >= 96

    def score(name: str) -> Column:
        found = values(layers, name)
        span = f"{decimals(min(found))} to {decimals(max(found))}" if found else "–"
        if not bars:
            return Column(name[:9], decimals(median_of(layers, name)), lambda r: decimals(r[name]))

        def cell(row: Row) -> str:
            if name == "directionality" and "no_outliers" in row["flags"]:
                return f"{decimals(row[name]):>6} no outliers"
            return f"{decimals(row[name]):>6} {bar(row[name], unicode=unicode)}"

        return Column(name, f"{decimals(median_of(layers, name)):>6}\n{span}", cell, justify="left")

    def plain(title: str, name: str, shown: Callable[[float | None], str]) -> Column:
        return Column(title, shown(median_of(layers, name)), lambda r: shown(r[name]))

    heads = [row for rows in by_layer.values() for row in rows]
    columns = [Column("layer", "median\nrange" if bars else "median", _layer_name)]
    if not cross:
        columns += [
            score("symmetry"),
            plain("z", "symmetry_z", lambda v: decimals(v, 0)),
            Column(
                "heads",
                decimals(median_of(heads, "symmetry")),
                lambda r: decimals(median_of(by_layer.get(r["module"], []), "symmetry")),
            ),
        ]
    columns.append(score("directionality"))
    if width >= 60:
        columns.append(plain("rank", "effective_rank", number))
    if more and not cross:
        columns.append(plain("attracts", "positive_energy", lambda v: decimals(v, 2)))
    own = any(row["self_norm"] is not None for row in layers)
    if width >= (108 if own else 96):
        columns.append(plain("norm", "norm", number))
    if own and (60 <= width < 76 or width >= 90):
        columns.append(plain("own |v|", "self_norm", number))
    if own and width >= 118:
        columns.append(plain("v sign", "self_sign", lambda v: decimals(v, 2)))
    return columns


def _layer_name(row: Row) -> str:
    shared = row["shared_by"]
    return f"{shared[0]}..{shared[-1]}" if shared and len(shared) > 1 else str(row["layer"])


def _undefined(model: ModelScores) -> list[str]:
    """Whole layers without a score that they should have, and why."""
    return [
        f"no score: {one_line(row['module'])}: {row['reason']}"
        for row in model.layers
        if row["effective_rank"] is None
    ]


def _shared_flags(layers: list[Row]) -> str:
    """Flags that every layer of a list carries belong into its heading."""
    flags = [f for f in layers[0]["flags"] if all(f in row["flags"] for row in layers) and f != "no_outliers"]
    return "".join(f", {flag}" for flag in flags)


def null_words(layers: Sequence[Row]) -> str:
    """Where random weights lie, and what else to keep in mind."""
    rows = [r for r in layers if r["symmetry"] is not None and r.get("part") is None]
    if not rows:
        cross = any(r["attention"] == "cross" for r in layers)
        return "Cross-attention has no symmetry: its two sides read different sequences." if cross else ""
    bands = [b for b in map(null_band, rows) if b is not None]
    if not bands:
        return ""
    low, high = min(b[0] for b in bands), max(b[1] for b in bands)
    return (
        f"Random weights of this size: symmetry {decimals(low)} to {decimals(high)} (mean +/- 2 std). "
        "Directionality below 0: the key side dominates; it scatters widely in random weights, so compare many "
        "layers. A score says nothing about the mask."
    )


def number(value: float | None) -> str:
    """Three digits of any size of number; a dash for what is not defined."""
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


def one_line(text: str, length: int = 160) -> str:
    """Names come from the file: control characters, which could move the cursor, are shown and not obeyed."""
    clean = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return clean if len(clean) <= length else clean[: length - 1] + "…"
