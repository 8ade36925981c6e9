"""Tokenizers: trained the same on any machine, kept by content, lossless; special tokens are never made from text."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from qkform.errors import DataError
from qkform.training import data
from qkform.training.data.vocabulary import SPECIALS, encoder, fingerprint, separator_id
from tests.test_data import write_texts

transformers = pytest.importorskip("transformers", reason="a tokenizer needs transformers")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return data.tokenizer("trained", data.corpus(texts, cache=cache), vocab_size=60, cache=cache)


def test_a_trained_tokenizer_has_the_asked_size_and_the_special_tokens_first(trained):
    assert len(trained) == 60
    assert trained.convert_ids_to_tokens(range(5)) == list(SPECIALS.values())
    assert data.special_ids(trained) == {
        "vocab_size": 60,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "mask_token_id": 4,
    }
    assert separator_id(trained) == 3


def test_every_text_of_the_corpus_comes_back_from_its_ids(trained, texts):
    encode = encoder(trained)
    for path in sorted(texts.glob("*.txt")):
        text = path.read_text()
        (ids,) = encode([text])
        assert trained.decode(ids) == text
        assert not set(ids) & set(trained.all_special_ids)
        assert len(ids) < len(text)


def test_what_looks_like_a_special_token_in_a_text_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("a [MASK] b [SEP] c [PAD] [UNK] [CLS]")
    corpus = data.corpus(tmp_path / "a.txt", cache=tmp_path)
    tokenizer = data.tokenizer("trained", corpus, vocab_size=40, cache=tmp_path)
    (ids,) = encoder(tokenizer)([(tmp_path / "a.txt").read_text()])
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == "a [MASK] b [SEP] c [PAD] [UNK] [CLS]"
    assert tokenizer("[MASK]")["input_ids"] == [4]  # the tokenizer itself is left as it was


def test_a_byte_that_was_never_seen_is_unknown_and_counted(trained, texts, tmp_path):
    (tmp_path / "a.txt").write_text("a state \u00e9 " * 20)
    tokens = data.prepare(data.corpus(tmp_path / "a.txt", cache=tmp_path), trained, 4, cache=tmp_path)
    assert tokens.info["unknown_tokens"] == 40  # two bytes each


def test_training_is_the_same_in_every_process(texts, trained):
    code = (
        "import sys\nfrom pathlib import Path\nfrom qkform.training.data.vocabulary import _merges\n"
        "texts = [path.read_text() for path in sorted(Path(sys.argv[1]).iterdir())]\n"
        "print(_merges(iter(texts), 60).to_str())"
    )
    found = [json.loads(trained.backend_tokenizer.to_str())["model"]]
    for seed, threads in (("1", "1"), ("2", "2"), ("3", "2")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", code, str(texts)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["model"])
    assert found == found[:1] * 4


def test_a_tokenizer_is_trained_once_for_a_text_and_a_size(texts, tmp_path):
    said: list[str] = []
    for size in (60, 60, 61):
        corpus = data.corpus(texts, cache=tmp_path)
        data.tokenizer("trained", corpus, vocab_size=size, cache=tmp_path, on_progress=said.append)
    assert len(said) == 2
    assert said[0].startswith("training a tokenizer of 60 tokens on ")


def test_a_tokenizer_that_was_left_half_written_is_trained_again(texts, tmp_path):
    corpus = data.corpus(texts, cache=tmp_path)
    data.tokenizer("trained", corpus, vocab_size=60, cache=tmp_path)
    (folder,) = [path for path in (tmp_path / "tokenizers").iterdir() if path.is_dir()]
    before = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").unlink()
    folder.rename(folder.with_name(f".tmp-{folder.name}"))
    data.tokenizer("trained", corpus, vocab_size=60, cache=tmp_path)
    assert (folder / "tokenizer.json").read_bytes() == before
    assert [path.name for path in (tmp_path / "tokenizers").iterdir() if path.is_dir()] == [folder.name]


@pytest.mark.parametrize("harm", ["cut", "altered", "missing"])
def test_a_tokenizer_that_was_damaged_in_the_cache_is_trained_again(texts, tmp_path, harm):
    corpus = data.corpus(texts, cache=tmp_path)
    before = data.tokenizer("trained", corpus, vocab_size=60, cache=tmp_path)
    (file,) = (tmp_path / "tokenizers").glob("*/tokenizer.json")
    text = file.read_text()
    if harm == "missing":
        file.unlink()
    else:
        file.write_text(
            text[:-9] if harm == "cut" else text.replace('["l","y"]', '["y","l"]').replace("ly", "yl")
        )
    after = data.tokenizer("trained", corpus, vocab_size=60, cache=tmp_path)
    assert file.read_text() == text
    assert fingerprint(after) == fingerprint(before)


def test_a_text_that_changes_while_a_tokenizer_is_trained_is_refused(tmp_path, monkeypatch):
    from qkform.training.data import vocabulary

    folder = write_texts(tmp_path / "texts", documents=3)
    original = vocabulary._merges

    def meanwhile(*arguments):
        (folder / "000.txt").write_text("other text")
        return original(*arguments)

    monkeypatch.setattr(vocabulary, "_merges", meanwhile)
    with pytest.raises(DataError, match="changed while it was read; nothing was kept"):
        data.tokenizer("trained", data.corpus(folder, cache=tmp_path), vocab_size=60, cache=tmp_path)
    assert not list((tmp_path / "tokenizers").glob("*/tokenizer.json"))


def test_a_tokenizer_by_its_folder_is_that_tokenizer(trained, tmp_path):
    trained.save_pretrained(tmp_path / "mine")
    again = data.tokenizer(tmp_path / "mine")
    assert fingerprint(again) == fingerprint(trained)
    assert again.name_or_path == str(tmp_path / "mine")
    again.add_tokens(["new"])
    assert fingerprint(again) != fingerprint(trained)


def test_a_tokenizer_in_python_is_read_too(tmp_path):
    tokenizer = transformers.ByT5Tokenizer()
    assert encoder(tokenizer)(["ab</s>"]) == [[100, 101, 63, 50, 118, 65]]
    assert fingerprint(tokenizer) == fingerprint(transformers.ByT5Tokenizer())
    assert fingerprint(tokenizer) != fingerprint(transformers.ByT5Tokenizer(extra_ids=7))


def test_what_is_no_tokenizer_is_said(texts, tmp_path, trained):
    corpus = data.corpus(texts, cache=tmp_path)
    with pytest.raises(
        DataError, match=r"no tokenizer in '.*nowhere'.*pass a folder, a hub id, or 'trained'"
    ):
        data.tokenizer(tmp_path / "nowhere")
    trained.save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(DataError, match=r"no tokenizer in '.*broken'"):
        data.tokenizer(tmp_path / "broken")
    with pytest.raises(DataError, match="a tokenizer is trained on a corpus"):
        data.tokenizer("trained")
    with pytest.raises(
        DataError, match=r"vocab_size=12: .* has 17 different bytes, which with 5 special tokens"
    ):
        data.tokenizer("trained", corpus, vocab_size=12, cache=tmp_path)
    with pytest.raises(DataError, match="vocab_size=5: at least 300"):
        data.tokenizer("trained", corpus, vocab_size=5, cache=tmp_path)
    with pytest.raises(DataError, match="vocab_size='512': expected a whole number"):
        data.tokenizer("trained", corpus, vocab_size="512", cache=tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"\xff\n\xfe\n")
    skipping = data.corpus(tmp_path / "bad.txt", cache=tmp_path, on_error="skip")
    with pytest.raises(
        DataError,
        match=r"no text to train a tokenizer on \(3 left out: not UTF-8 \(2\), no text in the file \(1\); "
        r"the first: .*bad\.txt:1: not UTF-8\)",
    ):
        data.tokenizer("trained", skipping, vocab_size=300, cache=tmp_path)
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer)
    with pytest.raises(DataError, match="neither eos_token nor sep_token"):
        separator_id(bare)
