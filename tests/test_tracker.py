"""The tracker in a plain loop: what it records is what is there, and training does not notice."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import qkform as qk
from qkform.dynamics import Tracker, conflict, sharpness
from qkform.dynamics.capture import observe
from qkform.errors import DynamicsError, RecordError
from qkform.form.null import null_variance
from qkform.runs import RunRecord

SIZES = {
    "vocab_size": 29,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 17,
    "max_position_embeddings": 16,
}


def bert(seed=0, dropout=0.1):
    torch.manual_seed(seed)
    return BertForMaskedLM(
        BertConfig(**SIZES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def batch_of(seed, sequences=3, length=7):
    ids = torch.randint(29, (sequences, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.roll(1, 1).masked_fill(mask == 0, -100),
    }


def train(model, steps, tracker=None, optimizer=None, first=1):
    """A plain loop; the batches are a function of the step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    if tracker is not None and first == 1:
        tracker.step(0, optimizer=optimizer)
    for step in range(first, steps + 1):
        batch = batch_of(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if tracker is not None:
            tracker.step(step, loss=loss, optimizer=optimizer, batch=batch)
    return optimizer


def without_clock(steps):
    return [{k: v for k, v in s.items() if "seconds" not in k and "per_second" not in k} for s in steps]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def test_a_line_holds_what_scan_and_attention_say(path):
    model = bert()
    probe = batch_of(99)
    with Tracker(model, every=2, path=path, probe=probe, experiment={"seed": 0}) as tracker:
        train(model, 3, tracker)
    record = RunRecord.load(path)
    assert [step["step"] for step in record.steps] == [0, 2, 3]
    assert record.end["reason"] == "finished"
    assert record.start["model"] == {"class": "BertForMaskedLM", "model_type": "bert"}
    scanned = qk.scan(copy.deepcopy(model).double()).models[0]
    for i, row in enumerate(record.steps[-1]["layers"]):
        whole, heads = scanned.layers[i], [h for h in scanned.heads if h["layer"] == i]
        for name in ("symmetry", "symmetry_z", "directionality", "norm"):
            assert row[name] == pytest.approx(whole[name], rel=1e-10)
            assert row["heads"][name] == pytest.approx([h[name] for h in heads], rel=1e-10)
        assert row["null_sd"] == pytest.approx(null_variance(12, whole["effective_rank"]) ** 0.5, rel=1e-10)
    watched = observe(model, probe)
    for row, each in zip(record.steps[-1]["layers"], watched, strict=True):
        (_, _, weights, open_), *_ = each.calls[0].weights()
        asking = probe["attention_mask"].bool()[:, None, :, None]
        expected = sharpness(weights, open_ & asking)
        for name in ("entropy", "normalised_entropy", "largest"):
            heads = np.nanmean(getattr(expected, name).numpy(), (0, 2))
            np.testing.assert_allclose(row["heads"][name], heads, rtol=1e-6)
            np.testing.assert_allclose(row[name], heads.mean(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_every_type_are_measured_as_a_scan_measures_them(path, dtype):
    model = bert().to(dtype)
    with Tracker(model, every=1, path=path) as tracker:
        tracker.step(0)
    (line,) = RunRecord.load(path).steps
    scanned = {(row["module"], row["head"]): row for row in qk.scan(copy.deepcopy(model).double()).rows}
    for layer in line["layers"]:
        for name in ("symmetry", "directionality", "norm"):
            assert layer[name] == pytest.approx(scanned[layer["module"], None][name], rel=1e-10, abs=1e-12)
            heads = [scanned[layer["module"], head][name] for head in range(3)]
            assert layer["heads"][name] == pytest.approx(heads, rel=1e-10, abs=1e-12)


def test_what_lowers_the_precision_of_products_lowers_no_measure(path, tmp_path):
    model = bert()
    model.bert.encoder.layer[0].attention.self.query.weight.data[3] *= 9  # a form with outliers
    with Tracker(model, every=1, path=path) as tracker:
        tracker.step(0)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            Tracker(model, every=1, path=tmp_path / "low.jsonl") as tracker,
        ):
            tracker.step(0)
    finally:
        torch.set_float32_matmul_precision(before)
    high, low = (RunRecord.load(p).steps[0]["layers"] for p in (path, tmp_path / "low.jsonl"))
    assert high == low


def test_training_does_not_notice(path):
    plain, tracked = bert(), bert()
    torch.manual_seed(1)
    train(plain, 5)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    with Tracker(tracked, every=1, path=path, probe=batch_of(99), conflict=2) as tracker:
        train(tracked, 5, tracker)
    assert torch.equal(drawn, torch.rand(3))
    for a, b in zip(plain.parameters(), tracked.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.grad is None
    assert tracked.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tracked.modules())


def test_loss_tokens_and_rates(path):
    model = bert(dropout=0.0)
    optimizer = torch.optim.SGD(
        [
            {"params": list(model.bert.parameters()), "lr": 0.1, "name": "body"},
            {"params": model.cls.predictions.transform.parameters(), "lr": 0.3},
        ]
    )
    with Tracker(model, every=2, path=path) as tracker:
        train(model, 4, tracker, optimizer)
    steps = RunRecord.load(path).steps
    assert [step["tokens"] for step in steps] == [0, 2 * 19, 4 * 19]
    assert steps[0]["loss"] is None
    assert steps[0]["layers"][0]["entropy"] is None
    assert [step["rates"] for step in steps] == [{"body": 0.1, "1": 0.3}] * 3
    again = bert(dropout=0.0)
    optimizer = torch.optim.SGD(
        [
            {"params": list(again.bert.parameters()), "lr": 0.1},
            {"params": again.cls.predictions.transform.parameters(), "lr": 0.3},
        ]
    )
    train(again, 1, optimizer=optimizer)
    assert steps[1]["loss"] == again(**batch_of(2)).loss.item()


def test_conflict_is_that_of_the_probe(path):
    model = bert()
    with Tracker(model, path=path, probe=batch_of(99), conflict=3) as tracker:
        tracker.step(0)
    found = conflict(model, batch_of(99), permutations=3)
    for row, each in zip(RunRecord.load(path).steps[0]["layers"], found, strict=True):
        assert row["conflict"] == {
            "cosine": each.cosine.tolist(),
            "null_mean": each.null_cosine.tolist(),
            "null_sd": each.null_spread.tolist(),
            "excess": each.excess.tolist(),
            "share": each.share.tolist(),
        }


def test_a_resumed_run_has_the_record_of_an_unbroken_one(path, tmp_path):
    whole = bert()
    torch.manual_seed(1)
    with Tracker(whole, every=2, path=path, probe=batch_of(99)) as tracker:
        train(whole, 6, tracker)
    model, broken = bert(), tmp_path / "broken.jsonl"
    torch.manual_seed(1)
    tracker = Tracker(model, every=2, path=broken, probe=batch_of(99))
    optimizer = train(model, 3, tracker)
    parts = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), tracker.state_dict())
    kept = copy.deepcopy(parts)
    train(model, 5, tracker, optimizer, first=4)
    tracker.abandon()
    model = bert(1)
    model.load_state_dict(kept[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(kept[1])
    torch.set_rng_state(kept[2])
    with pytest.raises(RecordError, match="holds a run already, up to step 4; resume it"):
        Tracker(model, every=2, path=broken).step(4)
    with Tracker(model, every=2, path=broken, resume=3) as tracker:
        tracker.load_state_dict(kept[3])
        train(model, 6, tracker, optimizer, first=4)
    one, other = RunRecord.load(path), RunRecord.load(broken)
    assert without_clock(one.steps) == without_clock(other.steps)
    assert one.start["layers"] == other.start["layers"]
    (event, _) = other.events
    assert event["step"] == 3
    assert event["exact"] is True
    seconds = other.series("seconds")[1]
    assert seconds == sorted(seconds)


def test_requests_that_make_no_sense(path, tmp_path):
    with pytest.raises(DynamicsError, match="every is 0; it is a number of steps"):
        Tracker(bert(), every=0, path=path)
    with pytest.raises(RecordError, match="it is a folder; name a file in it"):
        Tracker(bert(), path=tmp_path)
    with pytest.raises(DynamicsError, match="no self-attention"):
        Tracker(torch.nn.Linear(3, 3), path=path).step(0)
    with pytest.raises(DynamicsError, match="the probe has no labels"):
        Tracker(bert(), path=path, probe={"input_ids": torch.ones(1, 3, dtype=torch.long)}, conflict=True)
    assert not path.exists()


def test_a_probe_that_the_model_cannot_be_called_with(path):
    with pytest.raises(
        DynamicsError, match=r"cannot be called with the probe, which has pixels: ValueError: You must"
    ):
        Tracker(bert(), path=path, probe={"pixels": torch.ones(1, 3)}).step(0)
    assert not path.exists() or path.stat().st_size == 0
    with pytest.raises(DynamicsError, match=r"probe\['ids'\] is a list"):
        Tracker(bert(), path=path, probe={"ids": [1, 2]})


def test_a_resumed_run_needs_its_probe_and_its_model(path):
    with Tracker(bert(), path=path, probe=batch_of(99)) as tracker:
        tracker.step(0)
    Tracker(bert(), path=path, probe=batch_of(99), resume=0).step(1)
    with pytest.raises(RecordError, match=r"was begun with another probe; give none: it is in .*probe\.safe"):
        Tracker(bert(), path=path, probe=batch_of(98), resume=0).step(1)
    other = BertForMaskedLM(BertConfig(**(SIZES | {"num_hidden_layers": 1})))
    with pytest.raises(RecordError, match="the record of another model"):
        Tracker(other, path=path, resume=0).step(1)
    path.with_name("probe.safetensors").unlink()
    with pytest.raises(RecordError, match=r"the probe of .* is missing: put .*probe\.safetensors back"):
        Tracker(bert(), path=path, resume=0).step(1)


def test_a_resume_elsewhere_is_not_exact(path, monkeypatch):
    with Tracker(bert(), every=2, path=path) as tracker:
        train(bert(), 2, tracker)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 3)
    tracker = Tracker(bert(), every=2, path=path, resume=1)
    tracker.step(2)
    tracker.abandon()
    event = RunRecord.load(path).events[-1]
    assert event["exact"] is False
    assert event["reason"] == f"threads was {threads} and is {threads + 3}"
    monkeypatch.undo()
    Tracker(bert(), every=2, path=path, resume=1).step(2)
    assert "how many tokens and seconds" in RunRecord.load(path).events[-1]["reason"]


def test_compiled_and_decoupled_models(path, tmp_path):
    model = qk.surgery.decouple_(bert(dropout=0.0))
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.self_score.v.normal_()
    with Tracker(model, path=path, probe=batch_of(99)) as tracker:
        tracker.step(0)
    found = RunRecord.load(path)
    v = model.bert.encoder.layer[1].attention.self.self_score.v
    sizes = found.steps[0]["layers"][1]["heads"]["self_norm"]
    np.testing.assert_allclose(sizes, v.detach().double().norm(dim=1), rtol=1e-6)
    other = tmp_path / "compiled.jsonl"
    with Tracker(torch.compile(model, backend="eager"), path=other, probe=batch_of(99)) as tracker:
        tracker.step(0)
    assert without_clock(RunRecord.load(other).steps) == without_clock(found.steps)


def test_padded_queries_of_a_decoder_do_not_count(path):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 9, "num_layers": 1, "num_heads": 3, "vocab_size": 29}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    batch = batch_of(99)
    with Tracker(model, path=path, probe=batch) as tracker:
        tracker.step(0)
    rows = RunRecord.load(path).steps[0]["layers"]
    assert [row["module"].split(".")[0] for row in rows] == ["encoder", "decoder"]
    watched = observe(model, batch)
    for row, each in zip(rows, watched, strict=True):
        (_, _, weights, open_), *_ = each.calls[0].weights()
        expected = sharpness(weights, open_ & batch["attention_mask"].bool()[:, None, :, None])
        np.testing.assert_allclose(
            row["heads"]["largest"], np.nanmean(expected.largest.numpy(), (0, 2)), rtol=1e-6
        )


def test_steps_that_come_in_the_wrong_order(path):
    model = bert()
    tracker = Tracker(model, every=2, path=path)
    tracker.step(0)
    tracker.step(2)
    with pytest.raises(RecordError, match="has step 2 already, and step 2 comes before or is it"):
        tracker.step(2)
    with pytest.raises(DynamicsError, match="step is -1"):
        tracker.step(-1)
    with pytest.raises(DynamicsError, match="experiment is a str; it is a mapping"):
        Tracker(model, path=path, experiment="tiny")
    with pytest.raises(DynamicsError, match="the event 'end' is the tracker's own"):
        tracker.event("end")
    tracker.event("note", text="a line of its own")
    tracker.step(3, last=True)
    tracker.close("stop_at_loss")
    record = RunRecord.load(path)
    assert record.series("loss")[0] == [0, 2, 3]
    assert [event["event"] for event in record.events] == ["note", "end"]
    assert record.end["reason"] == "stop_at_loss"


def test_held_out_losses_are_computed_where_they_are_recorded(path):
    seen = []
    with Tracker(bert(), every=2, path=path, held_out=lambda: seen.append(1) or 2.5 + len(seen)) as tracker:
        train(bert(), 3, tracker)
    assert RunRecord.load(path).series("held_out") == ([0, 2, 3], [3.5, 4.5, 5.5])
    with pytest.raises(DynamicsError, match="held_out is True; that is for a Trainer"):
        Tracker(bert(), path=path.with_name("a.jsonl"), held_out=True).step(0)
    with (
        pytest.raises(DynamicsError, match="conflict is measured on a probe"),
        Tracker(bert(), path=path.with_name("b.jsonl"), conflict=True) as tracker,
    ):
        tracker.step(0)
    assert not path.with_name("b.jsonl").exists()
