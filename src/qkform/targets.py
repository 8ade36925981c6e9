"""Where the commands write: places are checked before a scan, and filled after it.

What qkform wrote, it may write again. Any other file that is there stays as it is where a source may need it: in the
folders that a source is read from, and anywhere if it looks like a part of a model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qkform.errors import RecordError

if TYPE_CHECKING:
    from qkform.comparisons import CompareTable
    from qkform.differences import DiffTable
    from qkform.flows import FlowTable
    from qkform.records import ScoreTable
    from qkform.report.runset import RunSet

_HEAD = 4096  # bytes in which a file of ours shows that it is one
_SHOWN = re.compile(
    rb"<!doctype html>.{0,2000}<meta name=\"generator\" content=\"qkform\b", re.DOTALL | re.IGNORECASE
)
_DOCUMENT = re.compile(rb'\s*\{\s*"schema":\s*"qkform\.')
_MODEL_FILE = re.compile(
    r".*config\.json|.*\.index\.json|(special_tokens|added_tokens|tokenizer|vocab|merges|model|params|modules).*"
    r"|modeling.*|.*\.(py|onnx_data|data|model|h5|msgpack|pb|tflite|pkl|npy)",
    re.IGNORECASE,
)
_LONG_MODELS, _LONG_ROWS = 5, 5_000  # from here on a page takes more than a second
_LISTED = 10_000  # files of a folder that are looked at for links
_DEEPEST = 4  # adapters of adapters that are followed


def check(sources: Sequence[str], out: Sequence[Path], html: Path | None, plots: Path | None) -> None:
    """A target that cannot be written, or that would destroy something, is refused before the scan, not after it."""
    for path in out:
        if path.suffix.lower() not in (".json", ".csv", ".parquet"):
            raise RecordError(f"--out {path}: the name must end in .json, .csv or .parquet")
        if path.suffix.lower() == ".parquet":
            from qkform.records import extra

            extra("polars")
    if html is not None and html.suffix.lower() not in (".html", ".htm") and not html.is_dir():
        raise RecordError(f"--html {html}: the name must end in .html")
    if plots is not None and not plots.is_dir():
        if plots.exists():
            raise RecordError(
                f"--plots {plots}: it is a file; name a folder, which is made if it is not there"
            )
        if plots.is_symlink():
            raise RecordError(
                f"--plots {plots}: it is a link to {os.readlink(plots)}, which is not there; make that folder, or name "
                "another"
            )
    targets = [*out, *([] if html is None else [html])]
    read = [place for source in sources for place in _places(source)]
    for i, path in enumerate(targets):
        if path.is_dir():
            raise RecordError(f"cannot write {path}: it is a folder")
        folder = path.absolute().parent
        if not folder.is_dir():
            raise RecordError(f"cannot write {path}: there is no folder {folder}")
        if any(_same(path, other) for other in targets[:i]):
            raise RecordError(f"{path} is named twice as a place to write to")
        if path.is_file() and not written_by_us(path):
            _spare(path, read)


def _spare(path: Path, read: Sequence[Path]) -> None:
    """RecordError for a file, not of ours, that a model may need."""
    real = _real(path)
    leads = f" (it leads to {real})" if path.is_symlink() else ""
    for source in read:
        if _same(path, source) or any(_within(real, folder, deep) for folder, deep in _folders(source)):
            raise RecordError(
                f"writing {path}{leads} would overwrite a file of the model {source}; choose another name"
            )
    if _is_model_file(real):
        raise RecordError(
            f"{path}{leads} looks like a file of a model, and is not overwritten; choose another name"
        )


def written_by_us(path: Path) -> bool:
    """Whether a file is empty, or one that qkform wrote: it says so where it begins, or, as parquet, where it ends."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if head.startswith(b"PAR1"):
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
                return _has_our_columns(file.read())
    except OSError:
        return False  # what cannot be read cannot be told to be ours
    return (
        not head
        or bool(_DOCUMENT.match(head) or _SHOWN.match(head))
        or _has_our_columns(head.partition(b"\n")[0])
    )


def _has_our_columns(text: bytes) -> bool:
    """Of the rows of scores, differences, a flow, a comparison, or runs; those that every version had are enough."""
    return any(
        all(name in text for name in names)
        for names in (
            (b"source", b"module", b"kv_head", b"row_excess", b"column_excess"),
            (b"source_a", b"source_b", b"symmetry_change", b"relative_change"),
            (b"ratio", b"gap", b"gain", b"simulated_sharpness"),
            (b"baseline", b"measure", b"baseline_value", b"arm_never"),
            (b"run", b"arm", b"tracker_seconds", b"normalised_entropy"),
        )
    )


def _places(source: str) -> list[Path]:
    """The files or folders that a source may mean; none for what is no path."""
    if not source or source.startswith("sample:"):
        return []
    found = [Path(source)]
    if source.startswith("~"):
        with suppress(RuntimeError):  # no such user
            found.append(Path(source).expanduser())
    return [path for path in found if _exists(path)]


def _folders(source: Path, depth: int = 0) -> Iterator[tuple[Path, bool]]:
    """The folders that a source is read from, links followed; and whether what lies deeper counts as well."""
    folder = source if source.is_dir() else source.parent
    real = _real(folder)
    yield real, True
    if source.is_symlink():
        yield _real(source).parent, False
    for name in {folder.absolute().name, real.name} & {"onnx"}:
        yield (real if real.name == name else folder.absolute()).parent, False
    try:
        with os.scandir(folder) as listed:
            for _, entry in zip(range(_LISTED), listed, strict=False):
                if entry.is_symlink():
                    yield _real(Path(entry.path)).parent, False
    except OSError:
        return
    base = _base(folder)
    if base is not None and depth < _DEEPEST:
        for place in (Path(base), folder / base):
            if _exists(place):
                yield from _folders(place, depth + 1)


def _base(folder: Path) -> str | None:
    """The model that an adapter names."""
    from qkform.checkpoints.choice import ADAPTER_CONFIG

    try:
        with (folder / ADAPTER_CONFIG).open("rb") as file:
            config = json.loads(file.read(2**20))
    except (OSError, ValueError, RecursionError):
        return None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return base if isinstance(base, str) and base else None


def _within(real: Path, folder: Path, deep: bool) -> bool:
    return real.is_relative_to(folder) if deep else real.parent == folder


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):  # a loop of links
        return path.absolute()


def _same(a: Path, b: Path) -> bool:
    return _real(a) == _real(b)


def _is_model_file(real: Path) -> bool:
    """Whether a file looks like weights, a config, or what else a model needs; wherever it lies."""
    from qkform.checkpoints.choice import READ

    cached = real.parent.name == "blobs" or any(
        part.startswith("models--") for part in real.parts
    )  # the hub's
    return cached or real.name.lower().endswith(READ) or _MODEL_FILE.fullmatch(real.name) is not None


def write(
    table: ScoreTable | DiffTable | FlowTable | CompareTable | RunSet,
    out: Sequence[Path],
    html: Path | None,
    plots: Path | None,
) -> Iterator[str]:
    """Write every file that was asked for; one line of what was written after each, and before one that takes long."""
    long = len(getattr(table, "models", ())) >= _LONG_MODELS or len(table.rows) >= _LONG_ROWS
    for path in out:
        table.save(path)
        yield f"saved {path}"
    if html is not None:
        from qkform.report import write_page

        if long:
            yield f"writing {html}"
        write_page(table, html)
        yield f"wrote {html}"
    if plots is not None:
        from qkform.report import save_plots

        if long:
            yield f"drawing charts into {plots}"
        yield f"wrote {len(save_plots(table, plots))} files into {plots}"
