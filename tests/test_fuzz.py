"""Every reader on mutated good files: a sound tensor or a QKFormError, and nothing outside the folder is touched.

The long, coverage-guided runs are `python -m tests.fuzz TARGET`; their last recorded outcome is in SECURITY.md.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkform.checkpoints import opening
from tests import fuzz


@cache
def seeds(name: str) -> list[bytes]:
    found = fuzz.TARGETS[name].seeds()
    with fuzz.scratch() as folder:
        for seed in found:
            fuzz.run(fuzz.TARGETS[name], seed, folder, watched=False)
    return found


def edited(seed: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    data = bytearray(seed)
    for kind, at, value in edits:
        at %= len(data) + 1
        match kind:
            case "set":
                data[at : at + len(value)] = value
            case "insert":
                data[at:at] = value
            case "cut":
                del data[at : at + len(value) * 3]
            case "end":
                del data[at:]
    return bytes(data)


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "set", "insert", "cut", "end"]),
        st.integers(0, 2**16),
        st.one_of(
            st.binary(min_size=1, max_size=9),
            st.sampled_from(
                [b"\xff" * 8, b"\xff" * 4, b"\0" * 8, b"\x7f", b"-1", b"1e999", b'"', b"[", b"{}"]
            ),
        ),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", sorted(fuzz.TARGETS))
def test_mutated_files_are_read_or_refused(name: str) -> None:
    outcomes: set[str] = set()

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(range(len(seeds(name)))), EDITS)
    def check(which: int, edits: list[tuple[str, int, bytes]]) -> None:
        with fuzz.scratch() as folder:
            outcomes.add(fuzz.run_quietly(fuzz.TARGETS[name], edited(seeds(name)[which], edits), folder))

    check()
    with fuzz.scratch() as folder:
        outcomes.add(fuzz.run_quietly(fuzz.TARGETS[name], seeds(name)[0], folder))
    assert len(outcomes) > 1, "mutants of one kind alone test little"


def test_a_member_whose_own_header_has_another_name_is_refused() -> None:
    """What the directory says is sound; the name in front of the bytes is not UTF-8, and says that it is."""
    seed = bytearray(seeds("pickled")[0])
    start = seed.index(b"PK\x03\x04")
    seed[start + 7] |= 0x08  # the name is UTF-8
    seed[start + 30] = 0x80
    with fuzz.scratch() as folder:
        assert fuzz.run_quietly(fuzz.TARGETS["pickled"], bytes(seed), folder) == "CheckpointError"


@pytest.mark.parametrize("name", sorted(fuzz.TARGETS))
def test_seeds_are_sound(name: str) -> None:
    for seed in seeds(name):
        with fuzz.scratch() as folder:
            assert fuzz.run_quietly(fuzz.TARGETS[name], seed, folder) == "read"


@pytest.mark.parametrize("what", ["opens", "runs", "swallows"])
def test_a_reader_that_escapes_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = opening.open_checkpoint

    def escaping(path: Path, source: str | None = None) -> object:
        if what == "runs":
            subprocess.run([sys.executable, "-c", ""], check=True)
        else:
            try:
                Path("/etc/hostname").open().close()
            except fuzz.Escaped:
                if what == "opens":
                    raise
        return real(path, source)

    monkeypatch.setattr("qkform.checkpoints.open_checkpoint", escaping)
    seed = seeds("safetensors")[0]
    with fuzz.scratch() as folder, pytest.raises(fuzz.Escaped):
        fuzz.run(fuzz.TARGETS["safetensors"], seed, folder)
