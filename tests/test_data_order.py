"""Order and batches: a function of seed and step, the same set however it is split, nothing skipped or told twice."""

from __future__ import annotations

import numpy as np
import pytest

from qkform.errors import DataError
from qkform.training import data, objectives
from qkform.training.data.order import Order, permutation
from qkform.training.draws import draws
from tests.test_data import write_texts

# ---- order


def test_every_epoch_has_every_sequence_once_in_an_order_of_its_own():
    order = Order(n_sequences=23, batch=5, seed=4)
    stream = np.concatenate([order.indices(step) for step in range(23 * 3)])
    epochs = stream.reshape(-1, 23)
    assert len(epochs) == 15
    for epoch in epochs:
        assert sorted(epoch) == list(range(23))
    assert len({tuple(epoch) for epoch in epochs}) == 15


def test_a_batch_may_be_larger_than_the_corpus():
    found = Order(n_sequences=3, batch=7, seed=0)
    stream = np.concatenate([found.indices(step) for step in range(3)])
    assert [sorted(epoch) for epoch in stream.reshape(-1, 3)] == [[0, 1, 2]] * 7


def test_a_step_needs_no_step_before_it():
    far = Order(1000, 16, 7)
    steps = [far.indices(step) for step in range(200)]
    permutation.cache_clear()
    for step in (150, 3, 199, 62):
        assert (Order(1000, 16, 7).indices(step) == steps[step]).all()


def test_seeds_give_other_orders_and_a_permutation_has_no_favourites():
    firsts = np.array([Order(10, 10, seed).indices(0) for seed in range(2000)])
    counts = np.array([np.bincount(column, minlength=10) for column in firsts.T])
    assert abs(counts - 200).max() < 5 * np.sqrt(200)  # each number at each place: binomial, five sd


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (1, 4), (3, 2), (2, 6)])
def test_the_shares_of_a_step_are_disjoint_and_cover_it(world_size, accumulation):
    order = Order(50, 12, 3)
    whole = order.indices(9)
    found = [
        order.rows(9, *order.share(rank, world_size, micro, accumulation))
        for micro in range(accumulation)
        for rank in range(world_size)
    ]
    assert np.concatenate(found).tolist() == whole.tolist()


def test_shares_and_seeds_that_cannot_be_are_refused():
    order = Order(50, 12, 3)
    with pytest.raises(DataError, match=r"batch of 12 .* not divisible by 2 processes x 4 micro-batches"):
        order.share(0, 2, 0, 4)
    for wrong in ((2, 2, 0, 1), (-1, 2, 0, 1), (0, 2, 3, 3)):
        with pytest.raises(DataError, match="no such share"):
            order.share(*wrong)
    with pytest.raises(DataError, match="seed=-1"):
        Order(50, 12, -1)
    with pytest.raises(DataError, match="0 sequences in batches of 12"):
        Order(0, 12, 0)
    with pytest.raises(DataError, match="step -1"):
        order.indices(-1)


# ---- random words


def test_a_row_has_the_same_words_whoever_asks():
    whole = draws((5, 1, 2), 0, 9, 7)
    assert whole.shape == (9, 7)
    for first, rows in ((0, 1), (3, 4), (8, 1)):
        assert (draws((5, 1, 2), first, rows, 7) == whole[first : first + rows]).all()
    assert len({words.tobytes() for words in whole}) == 9
    assert (draws((5, 1, 3), 0, 9, 7) != whole).all()
    assert (draws((5, 2, 2), 0, 9, 7) != whole).all()


def test_words_are_spread_evenly():
    words = draws((1, 0, 0), 0, 100, 1000)
    for half in (words >> np.uint64(32), words & np.uint64(2**32 - 1)):
        counts = np.bincount((half >> np.uint64(28)).astype(np.int64).ravel(), minlength=16)
        assert ((counts - 6250) ** 2 / 6250).sum() < 45  # chi-square of 15 degrees: one in 10,000


# ---- batches


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("transformers", reason="a tokenizer needs transformers")
    root = tmp_path_factory.mktemp("made")
    corpus = data.corpus(write_texts(root / "texts"), cache=root)
    tokenizer = data.tokenizer("trained", corpus, vocab_size=60, cache=root)
    return tokenizer, data.prepare(corpus, tokenizer, 15, held_out=0.2, cache=root)


def batches_of(made, name="mlm", seed=0, batch=12):
    tokenizer, tokens = made
    return data.Batches(tokens, objectives.objective(name, tokenizer, mask_rate=0.3), seed=seed, batch=batch)


@pytest.mark.parametrize("name", ["mlm", "clm"])
def test_rows_and_masks_are_the_same_however_a_step_is_split(made, name):
    import torch

    batches = batches_of(made, name)
    for step in (0, 3, 11):
        whole = batches.micro(step)
        for world_size, accumulation in ((2, 1), (1, 3), (2, 2), (3, 4)):
            parts = [
                batches.micro(step, rank, world_size, micro, accumulation)
                for micro in range(accumulation)
                for rank in range(world_size)
            ]
            for key in ("input_ids", "labels"):
                assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])


def test_the_tokens_of_a_batch_are_those_of_the_order(made):
    _, tokens = made
    batch = batches_of(made, "clm").micro(4)
    rows = tokens.train[batches_of(made).order.indices(4)]
    assert (batch["input_ids"].numpy() == rows).all()


def test_a_stream_is_its_steps_wherever_it_begins(made):
    import torch

    batches = batches_of(made)
    whole = list(batches.stream(0, 6, rank=1, world_size=2, accumulation=3))
    assert len(whole) == 18
    late = list(batches_of(made).stream(4, 6, rank=1, world_size=2, accumulation=3))
    for one, other in zip(whole[12:], late, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])


def test_a_sequence_gets_new_masks_each_time_and_each_seed(made):
    n = len(made[1].train)
    batches = batches_of(made, batch=n)
    first, second = batches.micro(0)["labels"].numpy(), batches.micro(1)["labels"].numpy()
    orders = [np.argsort(batches.order.indices(step)) for step in (0, 1)]
    assert ((first[orders[0]] != -100) != (second[orders[1]] != -100)).any(axis=1).mean() > 0.9
    other = batches_of(made, batch=n, seed=1)
    assert ((other.micro(0)["labels"] != -100) != (batches.micro(0)["labels"] != -100)).any()


class Lots:
    """An objective that shows its random words."""

    name = "mlm"

    def corrupted(self, ids, words):
        return ids, words.view(np.int64)


def test_masks_are_drawn_by_seed_step_and_row(made):
    def lots(seed, step):
        return data.Batches(made[1], Lots(), seed=seed, batch=12).micro(step)["labels"].numpy()

    assert (lots(3, 5) == lots(3, 5)).all()
    held_out = next(iter(data.Batches(made[1], Lots(), seed=3, batch=12).held_out(batch=12)))[
        "labels"
    ].numpy()
    for other in (lots(3, 6), lots(4, 5), lots(0, 0)[: len(held_out)]):
        assert not np.isin(other, lots(3, 5)).any()
    assert not np.isin(held_out, lots(0, 0)).any()
    assert len(np.unique(lots(3, 5))) == 12 * 15


@pytest.mark.parametrize("name", ["mlm", "clm"])
def test_held_out_batches_do_not_know_the_seed_the_size_or_the_processes(made, name):
    import torch

    _, tokens = made
    batches = batches_of(made, name, seed=0)
    n = len(tokens.held_out)
    whole = next(iter(batches.held_out(batch=n)))
    assert len(whole["input_ids"]) == n > 8
    for options in ({"batch": 3}, {"batch": n - 1}, {"batch": 1}):
        found = list(batches_of(made, name, seed=99, batch=3).held_out(**options))
        for key in ("input_ids", "labels"):
            assert torch.equal(torch.cat([part[key] for part in found]), whole[key])
    ranks = [list(batches.held_out(batch=3, rank=rank, world_size=2)) for rank in range(2)]
    assert len(ranks[0]) + len(ranks[1]) == -(-n // 3)
    assert torch.equal(ranks[1][0]["input_ids"], whole["input_ids"][3:6])
    assert sum(len(part["labels"]) for part in batches.held_out(batch=3, limit=7)) == 7
    for limit, world_size in ((None, 1), (None, 2), (7, 2), (7, 3), (7, 5), (2, 3)):
        shares = [
            len(list(batches.held_out(batch=3, limit=limit, rank=rank, world_size=world_size)))
            for rank in range(world_size)
        ]
        assert max(shares) == shares[0] == batches.held_out_rounds(3, limit, world_size)
        assert min(shares) >= shares[0] - 1
    with pytest.raises(DataError, match="at most 0 sequences"):
        list(batches.held_out(limit=0))


def test_a_part_of_the_held_out_sequences_comes_from_all_of_them(made):
    _, tokens = made
    (whole,) = batches_of(made, "clm").held_out(batch=len(tokens.held_out))
    rows = [row.tobytes() for row in tokens.held_out.astype(np.int64)]
    places = np.array([rows.index(row.tobytes()) for row in whole["input_ids"].numpy()])
    assert sorted(places) == list(range(len(rows)))
    assert abs(places[: len(rows) // 2].mean() / (len(rows) - 1) - 0.5) < 0.15


def test_no_held_out_sequence_is_trained_on(made):
    _, tokens = made
    train = {row.tobytes() for row in tokens.train}
    assert not train & {row.tobytes() for row in tokens.held_out}


def test_a_batch_of_64_by_64_takes_less_than_a_millisecond(tmp_path):
    import time

    class Stub:
        train = np.memmap(tmp_path / "tokens", "<u2", "w+", shape=(70_000, 64))

    Stub.train[:] = np.arange(70_000 * 64, dtype=np.int64).reshape(70_000, 64) % 507 + 5
    for objective in (objectives.MaskedTokens(4, (0, 1, 2, 3, 4), 512, 0.3), objectives.NextToken(0)):
        batches = data.Batches(Stub, objective, seed=0, batch=64)
        batches.micro(0)
        took = []
        for step in range(1, 60):
            begun = time.thread_time()
            batches.micro(step)
            took.append(time.thread_time() - begun)
        print(f"{objective.name}: {1e3 * np.median(took):.3f} ms a batch of 64 x 64")
        assert np.median(took) < 1e-3
