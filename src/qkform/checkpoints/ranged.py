"""Safetensors on the hub: headers when a tensor is first looked at, weights by ranges, ahead of `read`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from qkform.checkpoints.ahead import AheadReader
from qkform.checkpoints.base import ByteReader, Need, TensorInfo, refuse_pointer
from qkform.checkpoints.remote import Target, Web
from qkform.checkpoints.safetensors import (
    SafetensorsCheckpoint,
    header_length,
    parse_header,
    placed,
    read_header,
    united,
)
from qkform.errors import CheckpointError

FIRST_READ = 2**16  # bytes of a large file read at once in the hope that its header is no longer
FIRST_SHARE = (
    8192  # ... and of a small file its size divided by this: what is read in vain stays below a percent
)

_DIGITS = re.compile(r"\d+")


class HubCheckpoint(SafetensorsCheckpoint):
    """Safetensors files of one commit; headers are read when a tensor is first looked at, weights ahead of `read`."""

    def __init__(
        self,
        source: str,
        commit: str,
        headers: Headers,
        reader: AheadReader,
        config: Mapping[str, Any] | None,
        config_path: Path | None,
        expected: Mapping[str, Path] | None,
    ) -> None:
        self.source, self.revision, self.config, self.config_path = source, commit, config, config_path
        self._reader = self._ahead = reader
        if expected is None:
            self.tensors = united(headers.of(list(headers.targets)), None)
        else:
            self.tensors = Indexed(headers, expected)

    def plan(self, needs: Sequence[Need]) -> None:
        """Start to fetch what will be read, in this order."""
        infos = [self.tensors[name].head(rows) for name, rows in needs if name in self.tensors]
        self._ahead.plan([(info.file, info.offset, info.nbytes) for info in infos])


class Indexed(Mapping[str, TensorInfo]):
    """Tensors by an index: names at once, the header of a shard when one of its tensors is asked for."""

    def __init__(self, headers: Headers, expected: Mapping[str, Path]) -> None:
        self._headers, self._expected = headers, expected

    @cached_property
    def _sisters(self) -> dict[str, set[Path]]:
        """Files by the patterns of the names in them."""
        found: dict[str, set[Path]] = {}
        for name, file in self._expected.items():
            found.setdefault(_DIGITS.sub("#", name[:1024]), set()).add(file)
        return found

    def __getitem__(self, name: str) -> TensorInfo:
        file = self._expected[name]
        if file not in self._headers.known:  # layers repeat: whoever asks for one asks for its sisters
            self._headers.of(sorted(self._sisters[_DIGITS.sub("#", name[:1024])]))
        return placed(name, file, self._headers.known[file])

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)

    def __contains__(self, name: object) -> bool:
        return name in self._expected


class Headers:
    """The headers of remote files, several fetched at once."""

    def __init__(
        self, web: Web, reader: AheadReader, targets: Mapping[Path, Target], local: Mapping[Path, Path]
    ) -> None:
        self.targets = targets
        self.known: dict[Path, dict[str, TensorInfo]] = {}
        self._web, self._reader, self._local = web, reader, local

    def of(self, files: Sequence[Path]) -> dict[Path, dict[str, TensorInfo]]:
        new = [file for file in files if file not in self.known]
        found: dict[Path, dict[str, TensorInfo]] = {}

        def fetch(file: Path) -> None:
            found[file] = self._header(file)

        self._reader.each([partial(fetch, file) for file in new])
        self.known.update(found)
        return {file: self.known[file] for file in files}

    def _header(self, file: Path) -> dict[str, TensorInfo]:
        if file in self._local:
            header = read_header(self._local[file], ByteReader())
            return {name: replace(info, file=file) for name, info in header.items()}
        target = self.targets[file]
        if target.size is not None and target.size < 8:
            header_length(b"", target.size, file)
        first = bytearray(8 if target.size is None else max(8, min(FIRST_READ, target.size // FIRST_SHARE)))
        size = self._web.fill(target, 0, memoryview(first))
        if size is None:
            raise CheckpointError(f"neither the repository's list nor the server says how long {file} is")
        refuse_pointer(file, bytes(first))
        length = header_length(bytes(first[:8]), size, file)
        raw = bytearray(length)
        have = min(length, len(first) - 8)
        raw[:have] = first[8 : 8 + have]
        if have < length:
            self._web.fill(target, 8 + have, memoryview(raw)[have:])
        return parse_header(bytes(raw), size, file)
