"""The cache of tokens: the whole text, split once and for all; whole or absent whatever happens to who makes it."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from qkform.errors import DataError
from qkform.training import data
from qkform.training.data import cache as caching
from qkform.training.data.split import split
from qkform.training.data.vocabulary import encoder
from tests.test_data import write_texts

pytest.importorskip("transformers", reason="a tokenizer needs transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizer")
    corpus = data.corpus(write_texts(root / "texts"), cache=root)
    return data.tokenizer("trained", corpus, vocab_size=60, cache=root)


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def made_folders(cache):
    return sorted(path.name for path in (cache / "tokens").iterdir() if path.is_dir())


def flat(tokens):
    """All tokens of both parts, what the last sequence left over included."""
    return [
        np.fromfile(tokens.folder / f"{part}.bin", tokens.manifest["dtype"]).tolist()
        for part in ("train", "held_out")
    ]


# ---- what is in it


def test_the_two_parts_are_the_text_whole_documents_each_with_its_end(texts, cache, tokenizer):
    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, held_out=0.2, cache=cache)
    parts = flat(tokens)
    found = []
    for part in parts:
        assert part[-1] == 3
        found.append([tokenizer.decode(ids) for ids in split_at(part, 3)])
    originals = [path.read_text() for path in sorted(texts.glob("*.txt"))]
    assert sorted(found[0] + found[1]) == sorted(originals)
    assert found[0] == [text for text in originals if text not in found[1]]  # in order
    info = tokens.info
    assert info["documents"] == 40
    assert info["held_out_documents"] == len(found[1])
    assert info["held_out_by"] == "document"
    assert [info["n_tokens"], info["held_out_tokens"]] == [len(part) for part in parts]
    assert 0.1 <= info["held_out_tokens"] / (info["n_tokens"] + info["held_out_tokens"]) <= 0.3
    assert tokens.train.shape == (len(parts[0]) // 7, 7) == (info["n_sequences"], 7)
    assert tokens.train.ravel().tolist() == parts[0][: tokens.train.size]
    assert tokens.held_out.ravel().tolist() == parts[1][: tokens.held_out.size]
    assert tokens.train.dtype == np.dtype("<u2")
    assert json.loads(json.dumps(info)) == info


def split_at(ids, separator):
    out = [[]]
    for i in ids:
        if i == separator:
            out.append([])
        else:
            out[-1].append(i)
    return out[:-1]


def test_a_long_document_in_pieces_is_one_document(tmp_path, cache, tokenizer, monkeypatch):
    from qkform.training.data import files

    folder = write_texts(tmp_path / "texts", documents=3)
    for path in folder.iterdir():
        path.write_text("".join(f"{word}\n" for word in path.read_text().split()))
    whole = flat(data.prepare(data.corpus(folder, cache=cache), tokenizer, 4, held_out=0, cache=cache))
    monkeypatch.setattr(files, "STRETCH", 30)
    monkeypatch.setattr(caching, "BATCH_PIECES", 3)
    monkeypatch.setattr(caching, "BLOCK", 11)
    again = tmp_path / "again"
    assert (
        flat(data.prepare(data.corpus(folder, cache=again), tokenizer, 4, held_out=0, cache=again)) == whole
    )


def test_many_tokens_need_four_bytes(texts, cache, tokenizer):
    import copy

    large = copy.deepcopy(tokenizer)
    large.add_tokens([f"<{i}>" for i in range(2**16)])
    tokens = data.prepare(data.corpus(texts, cache=cache), large, 7, cache=cache)
    assert tokens.train.dtype == np.dtype("<u4")
    small = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    assert flat(tokens) == flat(small)


def test_ids_with_gaps_have_their_room(tmp_path, cache):
    import tokenizers
    import transformers

    words = {"[SEP]": 2, "[UNK]": 3, "states": 5, "law": 70_000}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    gaps = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, sep_token="[SEP]", unk_token="[UNK]"
    )
    (tmp_path / "a.txt").write_text("states law other " * 9)
    tokens = data.prepare(data.corpus(tmp_path / "a.txt", cache=cache), gaps, 3, held_out=0, cache=cache)
    assert tokens.train[0].tolist() == [5, 70_000, 3]
    assert tokens.vocab_size == data.special_ids(gaps)["vocab_size"] == 70_001


def test_the_unigram_is_of_the_tokens(texts, cache, tokenizer):
    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, held_out=0.2, cache=cache)
    train, held_out = flat(tokens)
    p = np.bincount(train) / len(train)
    assert tokens.unigram("clm").entropy == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), rel=1e-12)
    ordinary = [i for i in train if i != 3]
    q = np.bincount(ordinary) / len(ordinary)
    assert tokens.unigram("mlm").entropy == pytest.approx(-(q[q > 0] * np.log(q[q > 0])).sum(), rel=1e-12)
    occurs = sorted({*train, *held_out})
    smooth = (np.bincount(train, minlength=60) + 1)[occurs]
    cost = {i: -np.log(n / smooth.sum()) for i, n in zip(occurs, smooth, strict=True)}
    assert tokens.unigram("clm").held_out == pytest.approx(np.mean([cost[i] for i in held_out]), rel=1e-12)
    assert tokens.info["unigram_entropy"] == tokens.unigram("clm").entropy


def test_skipped_text_is_counted_in_the_information(texts, cache, tokenizer):
    (texts / "050.txt").write_bytes(b"good\n\xff\xff\nfine\n")
    tokens = data.prepare(data.corpus(texts, on_error="skip", cache=cache), tokenizer, 7, cache=cache)
    assert tokens.info["skipped"] == {"not UTF-8": 1}
    assert tokens.info["skipped_places"][0].startswith(str(texts / "050.txt") + ":2: ")
    with pytest.raises(DataError, match=r"050\.txt:2: not UTF-8"):
        data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    assert len(made_folders(cache)) == 1


# ---- found again, or made again


def test_tokens_are_made_once_and_the_length_is_a_view(texts, cache, tokenizer):
    said: list[str] = []
    keys = set()
    for seq_len in (7, 7, 16):
        corpus = data.corpus(texts, cache=cache)
        tokens = data.prepare(corpus, tokenizer, seq_len, cache=cache, on_progress=said.append)
        keys.add(tokens.key)
        assert tokens.train.shape[1] == seq_len
    assert said == [f"tokenizing {texts}"]
    assert made_folders(cache) == [*keys]


def test_the_same_text_under_another_name_is_found_and_called_by_it(texts, cache, tokenizer):
    first = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    moved = texts.rename(texts.with_name("moved"))
    again = data.prepare(data.corpus(moved, cache=cache), tokenizer, 7, cache=cache)
    assert again.key == first.key
    assert again.info["corpus"] == str(moved)


def test_a_long_text_is_told_of_on_the_way(texts, cache, tokenizer, monkeypatch):
    monkeypatch.setattr(caching, "TOLD_CHARACTERS", 5000)
    said: list[str] = []
    data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache, on_progress=said.append)
    size = sum(path.stat().st_size for path in texts.iterdir())
    assert 2 <= len(said) - 1 <= size // 5000
    assert said[-1] == f"tokenizing {texts}: 0 million characters"


def test_a_changed_corpus_is_another_cache_and_the_old_one_stays(texts, cache, tokenizer):
    def prepared(**options):
        return data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache, **options)

    first = prepared()
    before = flat(first)
    path = texts / "000.txt"
    old, status = path.read_text(), path.stat()
    path.write_text(old[::-1])  # the same size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # and the same time
    second = prepared()
    assert second.key != first.key
    assert flat(second) != flat(first) == before
    with pytest.raises(DataError, match=r"the text has changed since .*; go on with the old text"):
        second.check_same(first.info)
    second.check_same(second.info)
    path.write_text(old)
    assert prepared().key == first.key
    third = prepared(held_out=0.1)
    with pytest.raises(DataError, match=r"the share of held-out text has changed"):
        third.check_same(first.info)


def test_a_text_that_changes_while_it_is_read_is_refused(texts, cache, tokenizer, monkeypatch):
    original = caching._divide

    def meanwhile(*arguments):
        (texts / "000.txt").write_text("other text")
        return original(*arguments)

    monkeypatch.setattr(caching, "_divide", meanwhile)
    with pytest.raises(DataError, match="changed while it was read; nothing was kept, run it again"):
        data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    assert made_folders(cache) == []


@pytest.mark.parametrize("harm", ["cut", "altered", "missing", "manifest"])
def test_damaged_tokens_are_made_again(texts, cache, tokenizer, harm):
    def prepared(say=None):
        return data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache, on_progress=say)

    tokens = prepared()
    before = flat(tokens)
    path = tokens.folder / "train.bin"
    bytes_ = path.read_bytes()
    if harm == "cut":
        status = path.stat()
        path.write_bytes(bytes_[:-2])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif harm == "altered":
        path.write_bytes(bytes_[:-2] + b"\x09\x00")
    elif harm == "missing":
        path.unlink()
    else:
        (tokens.folder / "manifest.json").write_text("{")
    said: list[str] = []
    assert flat(prepared(said.append)) == before
    assert "damaged" in said[0]


def test_a_copied_cache_with_other_times_is_still_whole(texts, cache, tokenizer):
    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    os.utime(tokens.folder / "train.bin", ns=(1, 1))
    said: list[str] = []
    data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache, on_progress=said.append)
    assert said == []


def test_tokens_go_to_another_process(texts, cache, tokenizer):
    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    _ = tokens.train
    again = pickle.loads(pickle.dumps(tokens))  # noqa: S301
    assert len(pickle.dumps(tokens)) < 20_000
    assert (again.train == tokens.train).all()


def test_the_lock_is_let_go(texts, cache, tokenizer):
    import filelock

    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    path = cache / "tokens" / f"{tokens.key}.lock"
    with caching._locked(path, print):
        other = filelock.FileLock(path)
        with pytest.raises(filelock.Timeout):
            other.acquire(timeout=0)
    other.acquire(timeout=0)
    other.release()


# ---- what is wrong is said


def test_too_little_text_is_said(tmp_path, cache, tokenizer):
    (tmp_path / "a.txt").write_text("states union law" * 4)
    corpus = data.corpus(tmp_path / "a.txt", cache=cache)
    with pytest.raises(DataError, match=r"a\.txt: \d+ tokens to train on, fewer than one sequence of 64"):
        data.prepare(corpus, tokenizer, 64, cache=cache)
    with pytest.raises(DataError, match=r"a\.txt: \d tokens held out, fewer than one sequence of 4"):
        data.prepare(corpus, tokenizer, 4, cache=cache)
    (tmp_path / "b.txt").write_bytes(b"union\n\xff\n")
    skipping = data.corpus(tmp_path / "b.txt", cache=cache, on_error="skip")
    with pytest.raises(
        DataError, match=r"of 64 \(1 left out: not UTF-8 \(1\); the first: .*b\.txt:2: not UTF-8\)"
    ):
        data.prepare(skipping, tokenizer, 64, cache=cache)
    nothing = data.prepare(corpus, tokenizer, 4, held_out=0, cache=cache)
    assert len(nothing.held_out) == 0
    assert nothing.info["held_out_unigram"] is None
    for wrong in ({"seq_len": 1}, {"seq_len": 4, "held_out": 0.6}, {"seq_len": 4, "held_out": -0.1}):
        with pytest.raises(DataError, match=next(reversed(wrong))):
            data.prepare(corpus, tokenizer, cache=cache, **wrong)


def test_a_vocabulary_that_the_model_lacks_is_named(texts, cache, tokenizer):
    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)
    tokens.check_vocabulary(60)
    with pytest.raises(
        DataError, match=r"tokenizer trained on .* has ids up to 59 and bert has room for vocab_size=59"
    ):
        tokens.check_vocabulary(59, "bert")


# ---- kills, crowds, full disks

START = """
import sys, time
from pathlib import Path
from tokenizers import Tokenizer
from qkform.training import data
from qkform.training.data import cache

texts, root, file = map(Path, sys.argv[1:])

class Light:  # the same ids without the seconds that importing transformers takes
    name_or_path = "light"
    backend_tokenizer = Tokenizer.from_file(str(file))
    pad_token_id, unk_token_id, cls_token_id, sep_token_id, mask_token_id = all_special_ids = range(5)
    bos_token_id = eos_token_id = None
    def get_vocab(self):
        return self.backend_tokenizer.get_vocab()
    def __len__(self):
        return len(self.get_vocab())

def go():
    tokens = data.prepare(data.corpus(texts, cache=root), Light(), 7, cache=root, on_progress=print)
    print(tokens.key, len(tokens.train))

original = cache._divide
def halfway(seconds):
    def slow(*arguments):
        print("half", flush=True)
        time.sleep(seconds)
        return original(*arguments)
    cache._divide = slow
"""


@pytest.fixture
def child(texts, cache, tokenizer, tmp_path):
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))

    def start(code, **options):
        command = [
            sys.executable,
            "-u",
            "-c",
            START + code,
            *map(str, (texts, cache, tmp_path / "tokenizer.json")),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    return start


def test_a_build_that_was_killed_halfway_is_made_again(child, texts, cache, tokenizer):
    process = child("halfway(60)\ngo()")
    while "half" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (left,) = made_folders(cache)
    assert left.startswith(".tmp-")
    said: list[str] = []
    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache, on_progress=said.append)
    assert made_folders(cache) == [tokens.key]
    assert said == [f"tokenizing {texts}"]


def test_two_processes_at_once_make_it_once(child, texts, cache, tokenizer):
    first = child("halfway(1)\ngo()")
    while "half" not in first.stdout.readline():
        assert first.poll() is None, first.stderr.read()
    said: list[str] = []
    begun = time.monotonic()
    tokens = data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache, on_progress=said.append)
    out, error = first.communicate(timeout=60)
    assert first.returncode == 0, error
    assert said == ["another process is making these tokens; waiting for it"]
    assert time.monotonic() - begun > 0.2
    assert out.split() == [tokens.key, str(len(tokens.train))]


def test_a_full_disk_is_said_and_leaves_nothing(texts, cache, tokenizer, child):
    def narrow():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    code = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ngo()\n"
    process = child(code, preexec_fn=narrow)
    _, error = process.communicate(timeout=60)
    assert "DataError: cannot keep the tokens of" in error
    assert "nothing half-written was left. Make room" in error
    assert "During handling" not in error
    assert made_folders(cache) == []
    data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=cache)


def test_a_cache_that_cannot_be_written_is_named(texts, cache, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"cannot keep the tokens of .*file.*name a folder that can be written: cache="
    ):
        data.prepare(data.corpus(texts, cache=cache), tokenizer, 7, cache=tmp_path / "file")


# ---- the split


def test_the_split_takes_whole_documents_and_equal_texts_together():
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 500, size=400)
    hashes = rng.integers(0, 2**63, size=400).astype(np.uint64)
    hashes[[7, 11, 300]] = 5  # the smallest, so that they are taken
    found = split(lengths, hashes, 0.05)
    assert found.by == "document"
    is_held_out = np.repeat(found.is_held_out, np.diff(found.stops, prepend=0))
    starts = np.cumsum(lengths) - lengths
    per_document = is_held_out[starts]
    for start, length, side in zip(starts, lengths, per_document, strict=True):
        assert (is_held_out[start : start + length] == side).all()
    assert per_document[[7, 11, 300]].all()
    assert 0.025 <= is_held_out.mean() <= 0.075
    assert found.documents == per_document.sum()
    assert (np.diff(found.is_held_out.astype(int)) != 0).all()  # stretches are as long as they can be
    order = rng.permutation(400)  # the place in the corpus does not matter, the text does
    moved = split(lengths[order], hashes[order], 0.05)
    moved_mask = np.repeat(moved.is_held_out, np.diff(moved.stops, prepend=0))
    moved_starts = np.cumsum(lengths[order]) - lengths[order]
    assert (moved_mask[moved_starts] == per_document[order]).all()


@pytest.mark.parametrize(
    "lengths", [[1000], [10_000, 100], [7, 500_000, 9, 11]], ids=["one", "uneven", "one among small"]
)
def test_few_or_uneven_documents_give_the_end_of_each(lengths):
    lengths = np.array(lengths)
    found = split(lengths, np.arange(len(lengths), dtype=np.uint64), 0.05)
    assert found.by == "tail"
    assert found.stops[1::2].tolist() == np.cumsum(lengths).tolist()
    sizes = np.diff(found.stops, prepend=0)
    assert sizes[1::2].tolist() == [int(n * 0.05) for n in lengths]
    assert found.is_held_out.tolist() == [False, True] * len(lengths)


def test_one_document_is_cut_and_its_first_part_ends_too(tmp_path, cache, tokenizer):
    (tmp_path / "a.txt").write_text("states law people union " * 50)
    tokens = data.prepare(
        data.corpus(tmp_path / "a.txt", cache=cache), tokenizer, 4, held_out=0.1, cache=cache
    )
    train, held_out = flat(tokens)
    (ids,) = encoder(tokenizer)([(tmp_path / "a.txt").read_text()])
    assert tokens.info["held_out_by"] == "tail"
    assert train == [*ids[: len(train) - 1], 3]
    assert held_out == [*ids[len(train) :], 3]
    assert len(held_out) == int(0.1 * (len(ids) + 1))
