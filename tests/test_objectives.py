"""Objectives: what is asked is the token itself, or the next one; and the loss is the same however a batch is split."""

from __future__ import annotations

import numpy as np
import pytest

from qkform.errors import DataError
from qkform.training.draws import draws
from qkform.training.objectives import (
    IGNORED,
    MaskedTokens,
    NextToken,
    objective,
    summed_loss,
)

SPECIALS = (0, 1, 2, 3, 4)
RNG = np.random.default_rng(0)


def tokens(rows=400, width=101, vocab_size=40):
    return np.random.default_rng(1).integers(0, vocab_size, size=(rows, width))


def words(ids, step=0):
    return draws((7, 0, step), 0, *ids.shape)


# ---- masked tokens


def test_labels_are_the_tokens_that_were_chosen_and_nothing_else():
    ids = tokens()
    before = ids.copy()
    inputs, labels = MaskedTokens(4, SPECIALS, 40, 0.3).corrupted(ids, words(ids))
    asked = labels != IGNORED
    assert (labels[asked] == ids[asked]).all()
    assert (inputs[~asked] == ids[~asked]).all()
    assert (ids == before).all()
    assert not np.isin(ids[asked], SPECIALS).any()
    assert not np.isin(inputs[asked], (0, 1, 2, 3)).any()


@pytest.mark.parametrize(
    ("rate", "shares"),
    [(0.15, (0.8, 0.1, 0.1)), (0.3, (0.8, 0.1, 0.1)), (0.5, (0.2, 0.5, 0.3)), (0.3, (1, 0, 0))],
)
def test_as_many_are_chosen_and_treated_as_the_rule_says(rate, shares):
    ids = tokens()
    inputs, labels = MaskedTokens(4, SPECIALS, 40, rate, shares).corrupted(ids, words(ids))
    ordinary = ~np.isin(ids, SPECIALS)
    asked = labels != IGNORED

    def near(count, total, probability):
        assert abs(count - total * probability) <= 4.5 * np.sqrt(total * probability * (1 - probability))

    near(asked.sum(), ordinary.sum(), rate)
    kept = 1 / 35  # a random token is the old one as often as that
    near((inputs[asked] == 4).sum(), asked.sum(), shares[0])
    near((inputs[asked] == ids[asked]).sum(), asked.sum(), shares[2] + shares[1] * kept)
    swapped = asked & (inputs != 4) & (inputs != ids)
    near(swapped.sum(), asked.sum(), shares[1] * (1 - kept))
    if swapped.any():
        assert set(inputs[swapped]) == set(range(5, 40))


def test_every_place_is_chosen_as_often_and_independently_of_its_neighbour():
    ids = np.full((5000, 13), 9)
    _, labels = MaskedTokens(4, SPECIALS, 40, 0.3).corrupted(ids, words(ids))
    asked = labels != IGNORED
    assert abs(asked.mean(axis=0) - 0.3).max() < 4.5 * np.sqrt(0.21 / 5000)
    assert np.abs(np.corrcoef(asked.T) - np.eye(13)).max() < 4.5 / np.sqrt(5000)


def test_a_rate_of_one_asks_for_every_ordinary_token():
    ids = tokens()
    inputs, labels = MaskedTokens(4, SPECIALS, 40, 1.0, (1.0, 0.0, 0.0)).corrupted(ids, words(ids))
    assert (labels == np.where(ids > 4, ids, IGNORED)).all()
    assert (inputs == np.where(ids > 4, 4, ids)).all()


def test_rules_that_cannot_be_are_refused():
    for rate in (0, -0.1, 1.1, float("nan")):
        with pytest.raises(DataError, match="mask_rate="):
            MaskedTokens(4, SPECIALS, 40, rate)
    for shares in ((0.8, 0.1), (0.8, 0.1, 0.2), (1.1, -0.1, 0.0)):
        with pytest.raises(DataError, match="shares="):
            MaskedTokens(4, SPECIALS, 40, 0.3, shares)
    with pytest.raises(DataError, match="a vocabulary of 5 with 5 special tokens has no other"):
        MaskedTokens(4, SPECIALS, 5)


# ---- by the tokenizer


class Tokenizer:
    name_or_path = "stub"
    all_special_ids = (0, 3, 4)
    pad_token_id, eos_token_id, sep_token_id, mask_token_id = 0, None, 3, 4

    def __len__(self):
        return 39

    def get_vocab(self):
        return {"[PAD]": 0, "last": 39}


def test_an_objective_knows_its_tokenizer():
    found = objective("mlm", Tokenizer(), mask_rate=0.3)
    assert found == MaskedTokens(4, (0, 3, 4), 40, 0.3)
    assert found.name == "mlm"
    assert objective("clm", Tokenizer()) == NextToken(0)
    same = Tokenizer()
    same.pad_token_id, same.eos_token_id = 5, 5  # GPT-2 pads with its end of text, which is asked for
    assert objective("clm", same) == NextToken(None)
    with pytest.raises(DataError, match="no objective named 'nsp'; known: mlm, clm"):
        objective("nsp", Tokenizer())
    same.mask_token_id = None
    with pytest.raises(DataError, match="stub has no mask token, which mlm needs"):
        objective("mlm", same)


# ---- next tokens


def test_position_i_is_asked_for_token_i_plus_one():
    torch = pytest.importorskip("torch")
    ids = tokens(3, 7)
    inputs, labels = NextToken().corrupted(ids, words(ids))
    assert (inputs == ids).all()
    logits = torch.tensor(RNG.normal(size=(3, 7, 40)), dtype=torch.float32)
    wanted = -torch.log_softmax(logits.double(), -1)
    by_hand = sum(wanted[b, i, ids[b, i + 1]] for b in range(3) for i in range(6)) / 18
    loss = NextToken().loss({"logits": logits}, torch.from_numpy(labels))
    assert abs(float(loss - by_hand)) < 1e-6
    assert (labels != IGNORED).sum() == 18


def test_padding_is_not_asked_for():
    torch = pytest.importorskip("torch")
    ids = np.array([[7, 8, 9, 0, 0]])
    _, labels = NextToken(0).corrupted(ids, words(ids))
    assert labels.tolist() == [[IGNORED, 8, 9, IGNORED, IGNORED]]
    total, counted = summed_loss((torch.zeros(1, 5, 40),), torch.from_numpy(labels), shifted=True)
    assert counted == 2
    assert float(total) == pytest.approx(2 * np.log(40), rel=1e-6)


@pytest.mark.parametrize("name", ["mlm", "clm"])
def test_the_loss_is_the_one_that_transformers_own_models_compute(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="compares with its losses")
    task = MaskedTokens(4, SPECIALS, 40, 0.3) if name == "mlm" else NextToken()
    torch.manual_seed(0)
    if name == "mlm":
        config = transformers.BertConfig(
            vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=40, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=3, eos_token_id=3,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    ids = tokens(5, 9)
    inputs, labels = (torch.from_numpy(array) for array in task.corrupted(ids, words(ids)))
    with torch.no_grad():
        theirs = model(input_ids=inputs, labels=labels).loss
        ours = task.loss(model(input_ids=inputs), labels)
    assert abs(float(theirs - ours)) < 1e-6


# ---- one loss, however a batch is split


@pytest.mark.parametrize("name", ["mlm", "clm"])
def test_two_micro_batches_of_eight_are_one_batch_of_sixteen(name):
    torch = pytest.importorskip("torch")
    task = MaskedTokens(4, SPECIALS, 40, 0.3) if name == "mlm" else NextToken(0)
    loss = task.loss
    ids = tokens(16, 11)
    inputs, labels = (torch.from_numpy(array) for array in task.corrupted(ids, words(ids)))
    torch.manual_seed(0)
    weight = torch.randn(40, 40, requires_grad=True)

    def outputs(rows):
        return {"logits": weight[inputs[rows]]}

    total = int((labels != IGNORED).sum())
    whole = loss(outputs(slice(None)), labels)
    (gradient,) = torch.autograd.grad(whole, weight)
    for count in (total, torch.tensor(total)):
        halves = [loss(outputs(rows), labels[rows], count) for rows in (slice(8), slice(8, 16))]
        (summed,) = torch.autograd.grad(sum(halves), weight)
        assert abs(float((sum(halves) - whole).detach())) < 1e-6
        assert float((summed - gradient).abs().max()) < 1e-6
    counts = [int((labels[rows] != IGNORED).sum()) for rows in (slice(8), slice(8, 16))]
    if name == "mlm":
        assert counts[0] != counts[1]  # so that a mean of means would be another number
    assert sum(counts) == total


def test_half_precision_is_summed_in_full():
    torch = pytest.importorskip("torch")
    logits = torch.tensor(RNG.normal(size=(4, 50, 40)), dtype=torch.bfloat16)
    labels = torch.from_numpy(tokens(4, 50))
    total, _ = summed_loss({"logits": logits}, labels, shifted=False)
    exact, _ = summed_loss({"logits": logits.double()}, labels, shifted=False)
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(float(exact), rel=1e-6)


def test_a_batch_that_asks_for_nothing_costs_nothing():
    torch = pytest.importorskip("torch")
    logits = torch.randn(2, 3, 40, requires_grad=True)
    labels = torch.full((2, 3), IGNORED)
    for count in (None, 0, torch.tensor(0)):
        loss = MaskedTokens(4, SPECIALS, 40).loss({"logits": logits}, labels, count)
        loss.backward()
        assert float(loss.detach()) == 0
        assert float(logits.grad.abs().max()) == 0
