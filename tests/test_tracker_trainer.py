"""The tracker as a callback of transformers' Trainer: the right losses, nothing disturbed, resumed exactly."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from qkform.dynamics import Tracker
from qkform.dynamics.tracker_events import held_out_in
from qkform.errors import DynamicsError, RecordError
from qkform.runs import RunRecord
from tests.test_tracker import batch_of, bert, without_clock


class Texts(torch.utils.data.Dataset):
    """Sequences of several lengths, padded, with labels."""

    def __init__(self, seed, count):
        self.batch = batch_of(seed, count)

    def __len__(self):
        return len(self.batch["labels"])

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.batch.items()}


def masking(features):
    """A collator that draws, as those of masked language models do."""
    batch = {name: torch.stack([f[name] for f in features]) for name in features[0]}
    drawn = torch.rand(batch["labels"].shape) < 0.3
    batch["input_ids"] = batch["input_ids"].masked_fill(drawn, 3)
    return batch


def trainer(folder, callbacks=(), model=None, held_out=True, **over):
    torch.manual_seed(0)
    arguments = {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 100,
        "save_strategy": "no",
        "eval_strategy": "steps" if held_out else "no",
        "eval_steps": 100,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_pin_memory": False,
    }
    return Trainer(
        bert() if model is None else model,
        TrainingArguments(**(arguments | over)),
        train_dataset=Texts(7, 10),
        eval_dataset=Texts(8, 5) if held_out else None,
        data_collator=masking,
        callbacks=list(callbacks),
    )


def losses(run):
    return {each["step"]: each["loss"] for each in run.state.log_history if "loss" in each}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.jsonl"


def test_it_is_a_callback_of_the_trainer(path):
    assert isinstance(Tracker(path=path), TrainerCallback)
    assert type(Tracker(path=path)) is type(Tracker(path=path))
    assert isinstance(Tracker(path=path), Tracker)
    assert Tracker(path=path).on_something_new(1, two=2) is None


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_does_not_notice_and_the_losses_are_those_of_the_steps(tmp_path, path, accumulation):
    over = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4 // accumulation}
    plain = trainer(tmp_path / "a", logging_steps=1, **over)
    plain.train()
    drawn = torch.rand(3)
    tracker = Tracker(every=2, path=path)
    tracked = trainer(tmp_path / "b", [tracker], **over)
    tracked.train()
    assert torch.equal(drawn, torch.rand(3))
    for a, b in zip(plain.model.parameters(), tracked.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tracked.model.modules())
    assert tracked.args.eval_on_start is False
    record = RunRecord.load(path)
    steps, found = record.series("loss")
    assert steps == [0, 2, 4, 5]
    assert found == [None, *(losses(plain)[step] for step in (2, 4, 5))]
    evaluations = {e["step"]: e["eval_loss"] for e in tracked.state.log_history if "eval_loss" in e}
    assert record.series("held_out") == (steps, [evaluations[step] for step in steps])
    assert record.end == {"event": "end", "step": 5, "reason": "finished"}
    rates = [each["learning_rate"] for each in plain.state.log_history if "loss" in each]
    assert record.series("rates.0")[1][1:] == [rates[step - 1] for step in (2, 4, 5)]


def test_tokens_are_those_that_are_no_padding(tmp_path, path):
    run = trainer(tmp_path, [Tracker(every=3, path=path)], include_num_input_tokens_seen="no")
    run.train()
    counted = RunRecord.load(path).series("tokens")[1]
    again = tmp_path / "again.jsonl"
    run = trainer(tmp_path, [Tracker(every=3, path=again)], include_num_input_tokens_seen="non_padding")
    run.train()
    assert RunRecord.load(again).series("tokens")[1] == counted
    assert counted[-1] == run.state.num_input_tokens_seen


@pytest.mark.parametrize("prefix", ["eval", "eval_books", "test"])
def test_a_metric_that_is_called_a_loss_is_not_the_held_out_loss(prefix):
    metrics = {
        f"{prefix}_aux_loss": 7.0,
        f"{prefix}_mlm_loss": 8.0,
        f"{prefix}_loss": 2.5,
        f"{prefix}_runtime": 1.0,
    }
    assert held_out_in(metrics) == 2.5, "in the Trainer's order"
    assert held_out_in(dict(reversed(metrics.items()))) == 2.5
    assert held_out_in({"epoch": 1.0}) is None


def test_the_first_held_out_batch_is_the_probe(tmp_path, path):
    trainer(tmp_path, [Tracker(every=5, path=path)]).train()
    record = RunRecord.load(path)
    assert record.start["probe"]["sequences"] == 2
    assert record.start["probe"]["tokens"] == 12
    assert (tmp_path / "probe.safetensors").exists()
    assert all(0 < value < 1 for value in record.series("normalised_entropy", layer=1, head=2)[1])


def test_without_a_held_out_set_weights_and_losses_are_recorded(tmp_path, path):
    trainer(tmp_path, [Tracker(every=2, path=path)], held_out=False).train()
    record = RunRecord.load(path)
    assert record.series("loss")[0] == [0, 2, 4, 5]
    assert record.series("held_out")[1] == [None] * 4
    assert record.series("entropy", layer=0)[1] == [None] * 4
    assert record.start["probe"] is None


class Stop(TrainerCallback):
    """Raises where a kill might strike, or stops training."""

    def __init__(self, event, step, stop=False):
        self.step, self.stop = step, stop
        setattr(self, event, self._at)

    def _at(self, args, state, control, **had):
        if state.global_step == self.step:
            if not self.stop:
                raise KeyboardInterrupt
            control.should_training_stop = True


@pytest.mark.parametrize(
    ("event", "step"),
    [
        pytest.param("on_step_begin", 4, marks=pytest.mark.slow),
        pytest.param("on_pre_optimizer_step", 5, marks=pytest.mark.slow),
        ("on_evaluate", 6),
        pytest.param("on_save", 6, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_record_of_an_unbroken_one(tmp_path, path, event, step):
    over = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3}
    whole = trainer(tmp_path / "a", [Tracker(every=2, path=path)], **over)
    whole.train()
    broken = tmp_path / "broken.jsonl"
    tracker = Tracker(every=2, path=broken)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "b", [tracker, Stop(event, step)], **over).train()
    tracker.abandon()
    tracker = Tracker(every=2, path=broken)
    again = trainer(tmp_path / "b", [tracker], bert(3), **over)
    again.train(resume_from_checkpoint=True)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    one, other = RunRecord.load(path), RunRecord.load(broken)
    assert without_clock(one.steps) == without_clock(other.steps)
    assert [e["event"] for e in other.events] == ["resume", "end"]
    assert other.events[0]["step"] == (6 if event == "on_save" else 3)
    assert other.events[0]["exact"] is True
    assert other.series("seconds")[1] == sorted(other.series("seconds")[1])


@pytest.mark.slow
def test_states_of_callbacks_may_be_restored_by_the_trainer(tmp_path, path):
    over = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    tracker = Tracker(every=2, path=path)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, [tracker, Stop("on_step_begin", 3)], **over).train()
    tracker.abandon()
    again = trainer(
        tmp_path, [Tracker(every=2, path=path)], restore_callback_states_from_checkpoint=True, **over
    )
    again.train(resume_from_checkpoint=True)
    record = RunRecord.load(path)
    assert record.series("tokens")[0] == [0, 2, 4]
    assert record.events[0]["exact"] is True


def test_a_record_is_not_begun_twice(tmp_path, path):
    trainer(tmp_path, [Tracker(every=5, path=path)]).train()
    before = path.read_bytes()
    with pytest.raises(RecordError, match="holds a run already, up to step 5; resume it"):
        trainer(tmp_path, [Tracker(every=5, path=path)]).train()
    assert path.read_bytes() == before
    with pytest.raises(DynamicsError, match=r"resumes after step 3, and the Trainer begins after step 0"):
        trainer(tmp_path, [Tracker(every=5, path=path, resume=3)]).train()
    trainer(tmp_path, [Tracker(every=5, path=path, resume=0)]).train()
    steps = [json.loads(line) for line in before.splitlines() if b'"event"' not in line]
    assert without_clock(RunRecord.load(path).steps) == without_clock(steps)


@pytest.mark.parametrize("event", [pytest.param("on_step_end", marks=pytest.mark.slow), "on_evaluate"])
def test_a_run_that_stops_early_has_its_last_step(tmp_path, path, event):
    stop = Stop(event, 3, stop=True)
    trainer(tmp_path, [Tracker(every=2, path=path), stop], eval_steps=3).train()
    record = RunRecord.load(path)
    assert record.series("loss")[0] == [0, 2, 3]
    assert record.series("loss")[1][-1] is not None
    assert record.end == {"event": "end", "step": 3, "reason": "stopped"}


def test_a_held_out_batch_that_is_no_probe_costs_the_attention_alone(tmp_path, path, monkeypatch):
    from qkform.dynamics import tracker_events

    def odd(dataloader, sequences):
        return {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3, dtype=torch.long)}

    monkeypatch.setattr(tracker_events, "first_of", odd)  # floats are no tokens
    run = trainer(tmp_path, [Tracker(every=5, path=path)])
    with pytest.warns(UserWarning, match="no attention weights: the model cannot be called with the probe"):
        run.train()
    record = RunRecord.load(path)
    assert record.series("entropy", layer=0)[1] == [None, None]
    assert None not in record.series("symmetry", layer=0)[1]
    assert None not in record.series("held_out")[1]
    assert [event["event"] for event in record.events] == ["unmeasured", "end"]


@pytest.mark.slow
def test_a_compiled_model_is_tracked_and_its_tokens_counted(tmp_path, path):
    plain = tmp_path / "plain.jsonl"
    trainer(tmp_path, [Tracker(every=2, path=plain)], bert(dropout=0.0)).train()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    run = trainer(tmp_path, [Tracker(every=2, path=path)], bert(dropout=0.0), **compiled)
    run.train()
    one, other = RunRecord.load(plain), RunRecord.load(path)
    assert one.layers == other.layers
    assert one.series("tokens") == other.series("tokens")
    for row, expected in zip(other.rows, one.rows, strict=True):
        for name in ("loss", "held_out", "symmetry", "norm", "entropy"):
            assert (row[name] or 0.0) == pytest.approx(expected[name] or 0.0, rel=1e-4), name
