"""Where the commands write: places are checked before a scan, and filled after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qkform.errors import RecordError

if TYPE_CHECKING:
    from qkform.differences import DiffTable
    from qkform.records import ScoreTable


def check(sources: Sequence[str], out: Sequence[Path], html: Path | None, plots: Path | None) -> None:
    """A target that cannot be written, or that would destroy something, is refused before the scan, not after it."""
    for path in out:
        if path.suffix.lower() not in (".json", ".csv", ".parquet"):
            raise RecordError(f"--out {path}: the name must end in .json, .csv or .parquet")
        if path.suffix.lower() == ".parquet":
            from qkform.records import extra

            extra("polars")
    if plots is not None and plots.exists() and not plots.is_dir():
        raise RecordError(f"--plots {plots}: it is a file; name a folder, which is made if it is not there")
    targets = [*out, *([] if html is None else [html])]
    read = [
        Path(source).expanduser() for source in sources if source and not source.startswith(("sample:", "~"))
    ]
    for i, path in enumerate(targets):
        if path.is_dir():
            raise RecordError(f"cannot write {path}: it is a folder")
        folder = path.absolute().parent
        if not folder.is_dir():
            raise RecordError(f"cannot write {path}: there is no folder {folder}")
        if any(_same(path, other) for other in targets[:i]):
            raise RecordError(f"{path} is named twice as a place to write to")
        for source in read:
            inside = _same(folder, source) or _same(folder, source.parent)
            if _same(path, source) or (inside and _is_model_file(path)):
                raise RecordError(
                    f"writing {path} would overwrite a file of the model {source}; choose another name"
                )


def _same(a: Path, b: Path) -> bool:
    try:
        return a.resolve() == b.resolve()
    except (OSError, ValueError):
        return False


def _is_model_file(path: Path) -> bool:
    """Whether a file beside the weights is one that the model needs."""
    from qkform.checkpoints.opening import READ

    return path.exists() and (path.suffix.lower() in READ or path.name.endswith("config.json"))


def write(
    table: ScoreTable | DiffTable, out: Sequence[Path], html: Path | None, plots: Path | None
) -> Iterator[str]:
    """Write every file that was asked for; one line of what was written after each."""
    for path in out:
        table.save(path)
        yield f"saved {path}"
    if html is not None:
        from qkform.report import write_page

        write_page(table, html)
        yield f"wrote {html}"
    if plots is not None:
        from qkform.report import save_plots

        yield f"wrote {len(save_plots(table, plots))} files into {plots}"
