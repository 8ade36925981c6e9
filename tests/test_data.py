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
        assert batches.counted(3) == (batch["labels"] != -100).sum() > 0
