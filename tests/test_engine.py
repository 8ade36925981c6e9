"""Training: what a run leaves, exact resuming, processes and micro-batches that change nothing, and what stops it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
from types import SimpleNamespace

import pytest

from tests.trained import EVERYTHING, command, events, farthest, flags, lines, same_weights, small, write_text

torch = pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("accelerate", reason="training needs accelerate")
pytest.importorskip("tokenizers", reason="training needs tokenizers")

from qkform.errors import DataError, ExperimentError, TrainingError  # noqa: E402
from qkform.runs import RunRecord  # noqa: E402
from qkform.training import Experiment, models, run  # noqa: E402
from qkform.training import checkpoints as checkpointing  # noqa: E402
from qkform.training.checkpoints import checkpoints, newest, written  # noqa: E402
from qkform.training.engine import Engine  # noqa: E402
from qkform.training.folder import begin, claim, held  # noqa: E402
from qkform.training.running import _finished  # noqa: E402
from qkform.training.watch import Watch  # noqa: E402


class Killed(BaseException):
    """Ends a run from within, as a kill would: nothing that it does on the way out is asked for."""


def killed_at(step):
    """A progress that ends the run after this step."""

    def progress(p):
        if p.step == step:
            raise Killed

    return progress


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("QKFORM_CACHE")
    os.environ["QKFORM_CACHE"] = str(folder)
    yield folder
    os.environ.pop("QKFORM_CACHE")
    if before is not None:
        os.environ["QKFORM_CACHE"] = before


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing broke."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(small(text), folder)
    return folder


def test_a_run_leaves_a_stock_model_a_record_checkpoints_and_its_experiment(whole, text):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    import qkform as qk
    from qkform.runs import RunRecord
    from qkform.training import Experiment

    model = AutoModelForMaskedLM.from_pretrained(whole / "model")
    assert type(model).__name__ == "ModernBertForMaskedLM"
    assert len(AutoTokenizer.from_pretrained(whole / "model")) == model.config.vocab_size
    assert Experiment.load(whole / "experiment.yaml") == small(text)
    assert [one.step for one in checkpoints(whole / "checkpoints")[0]] == [6, 8]
    record = RunRecord.load(whole)
    assert [step["step"] for step in record.steps] == [0, 2, 4, 6, 8]
    assert record.end["reason"] == "finished"
    assert record.steps[-1]["tokens"] == 8 * 8 * 24
    scanned = qk.scan(whole / "model")
    symmetry = [row["symmetry"] for row in scanned.models[0].layers]
    assert symmetry == pytest.approx([row["symmetry"] for row in record.steps[-1]["layers"]], abs=1e-6)


def test_the_loss_and_the_rate_of_a_step_are_those_it_was_made_with(whole):
    tracked = {line["step"]: line for line in lines(whole)}
    assert tracked[0]["loss"] is None
    assert all(0 < tracked[step]["loss"] < 10 and 0 < tracked[step]["held_out"] < 10 for step in (2, 4, 6, 8))
    # two steps of warm-up, then down to 0 over the six that are left: the rate of step n is that before update n
    assert [tracked[s]["rates"]["qk/decay"] for s in (2, 4, 6, 8)] == pytest.approx(
        [1.5e-3, 2.5e-3, 1.5e-3, 5e-4]
    )


def test_a_killed_run_resumes_exactly(whole, text, tmp_path):
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", progress=killed_at(5))
    assert [line["step"] for line in lines(tmp_path / "a")] == [
        0,
        2,
        4,
    ]  # and the newest checkpoint is that of 3
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", resume=True, progress=killed_at(7))
    run(small(text), tmp_path / "a", resume=True)
    assert same_weights(tmp_path / "a", whole)
    assert lines(tmp_path / "a") == lines(whole)
    resumed = [event for event in events(tmp_path / "a") if event["event"] == "resume"]
    assert [(event["step"], event["exact"]) for event in resumed] == [(3, True), (6, True)]


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_that_was_killed_before_its_second_checkpoint_goes_on_from_step_0(whole, text, tmp_path, step):
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", progress=killed_at(step))
    run(small(text), tmp_path / "a", resume=True)
    assert same_weights(tmp_path / "a", whole)
    assert lines(tmp_path / "a") == lines(whole)
    assert [e["step"] for e in events(tmp_path / "a") if e["event"] == "resume"] == [0]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_each_is_read_once(whole, text, tmp_path, monkeypatch):
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", progress=killed_at(7))
    damaged = tmp_path / "a" / "checkpoints" / "step-6" / "model.safetensors"
    weights = bytearray(damaged.read_bytes())
    weights[-1] ^= 1
    damaged.write_bytes(weights)
    said, read, begun = [], [], []
    digest = checkpointing._sha256
    monkeypatch.setattr(checkpointing, "_sha256", lambda path: read.append(path) or digest(path))
    run(small(text), tmp_path / "a", resume=True, say=said.append, progress=lambda p: begun.append(len(read)))
    assert [line for line in said if "passed over" in line and "step-6: model.safetensors has other" in line]
    before = read[: begun[0]]  # training writes more
    assert damaged in before
    assert len(set(before)) == len(before)
    assert same_weights(tmp_path / "a", whole)
    assert lines(tmp_path / "a") == lines(whole)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(whole, text, tmp_path):
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", progress=killed_at(0))
    for one in checkpoints(tmp_path / "a" / "checkpoints")[0]:
        for path in sorted(one.path.iterdir()):
            path.unlink()
        one.path.rmdir()
    run(small(text), tmp_path / "a", resume=True)
    assert same_weights(tmp_path / "a", whole)
    assert lines(tmp_path / "a") == lines(whole)


@pytest.mark.parametrize(
    "over",
    [
        {"optimizer": "sgd", "lr": 0.1},
        pytest.param({"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}, marks=pytest.mark.slow),
        pytest.param({"objective": "clm", "accumulation": 2, **EVERYTHING}, marks=pytest.mark.slow),
        pytest.param({"config": {"mlp_dropout": 0.2, "embedding_dropout": 0.1}}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"attention": "exclusive", "init": "mimetic"}, marks=pytest.mark.slow),
        pytest.param({"attention": "no-diagonal", "schedule": "cosine"}, marks=pytest.mark.slow),
        pytest.param({"preset": "mini", "precision": "fp32", "steps": 8}, marks=pytest.mark.slow),
        pytest.param({"preset": "mini", "objective": "clm", "precision": "fp32"}, marks=pytest.mark.slow),
        pytest.param(
            {"objective": "clm", "model": "gpt2", "qk_lr_ratio": 2, "config": {"n_embd": 32, "n_layer": 2}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda over: "-".join(str(value) for value in over.values())[:60],
)
def test_every_kind_of_training_resumes_exactly(over, text, tmp_path):
    experiment = small(text, **over)
    run(experiment, tmp_path / "whole")
    with pytest.raises(Killed):
        run(experiment, tmp_path / "a", progress=killed_at(4))
    run(experiment, tmp_path / "a", resume=True)
    assert same_weights(tmp_path / "a", tmp_path / "whole")
    assert lines(tmp_path / "a") == lines(tmp_path / "whole")


def test_all_interventions_at_once_are_in_the_model_and_come_back(text, tmp_path):
    from transformers import AutoModelForMaskedLM

    import qkform as qk

    experiment = small(text, steps=3, save_every=2, **EVERYTHING)
    with pytest.raises(Killed):
        run(experiment, tmp_path / "a", progress=killed_at(2))
    run(experiment, tmp_path / "a", resume=True)
    loaded = qk.surgery.from_pretrained(AutoModelForMaskedLM, tmp_path / "a" / "model")
    names = dict(loaded.named_parameters())
    assert "model.layers.1.attn.self_score.v" in names
    assert "model.layers.1.attn.Wqkv.weight" in names  # fused, under its stock name
    assert [change["change"] for change in loaded.config.qkform["changes"]] == ["symmetrize", "decouple"]
    start, *_, last = lines(tmp_path / "a")
    assert start["layers"][0]["symmetry"] == pytest.approx(-1, abs=1e-5)
    assert last["rates"]["qk/decay"] == pytest.approx(4 * last["rates"]["ov/decay"])
    assert last["layers"][0]["conflict"]["cosine"]
    assert last["layers"][0]["heads"]["self_norm"]


SCALED = {"optimizer": "sgd", "lr": 0.3, "clip": 0}  # AdamW and a clip divide the scale of a gradient out


@pytest.mark.slow
@pytest.mark.parametrize("over", [{}, SCALED], ids=["adamw", "sgd"])
def test_accumulated_micro_batches_are_one_batch(over, text, tmp_path):
    run(small(text, **over), tmp_path / "one")
    run(small(text, accumulation=4, **over), tmp_path / "four")
    assert farthest(tmp_path / "four", tmp_path / "one") < 1e-5
    losses = [[line["loss"] for line in lines(tmp_path / name)[1:]] for name in ("one", "four")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_run_stops_at_a_loss_and_says_so(whole, text, tmp_path):
    reached = lines(whole)[2]["held_out"]
    experiment = small(text, stop_at_loss=reached)
    finished = run(experiment, tmp_path / "a")
    assert (finished.reason, finished.step, finished.held_out) == ("stop_at_loss", 4, reached)
    assert lines(tmp_path / "a") == lines(whole)[:3]
    assert events(tmp_path / "a")[-1]["reason"] == "stop_at_loss"
    before = (tmp_path / "a" / "record.jsonl").read_bytes()
    said = []
    assert run(experiment, tmp_path / "a", resume=True, say=said.append).step == finished.step
    assert any("has ended already" in text for text in said)
    assert (tmp_path / "a" / "record.jsonl").read_bytes() == before


def tiny_bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=9, max_position_embeddings=8, **sizes))


@pytest.mark.parametrize(("precision", "fused"), [("fp32", True), ("bf16", True), ("fp16", False)])
def test_a_loss_scale_has_an_optimizer_that_does_not_skip_by_itself(precision, fused):
    asking = SimpleNamespace(optimizer=None, experiment=Experiment(precision=precision), model=tiny_bert())
    assert Engine.create_optimizer(asking).defaults["fused"] is fused


def test_a_model_that_a_kill_left_out_is_saved_as_the_unbroken_run_has_it(text, tmp_path):
    experiment = small(text, steps=2, warmup_steps=1, keep=1)
    run(experiment, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(
        tmp_path / "b" / "model"
    )  # the kill came before it was there, and before what is old was cleared
    (tmp_path / "b" / "checkpoints" / ".aside-step-1").mkdir()
    run(experiment, tmp_path / "b", resume=True)
    for file in (tmp_path / "a" / "model").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / "model" / file.name).read_bytes(), file.name
    assert [path.name for path in (tmp_path / "b" / "checkpoints").iterdir()] == ["step-2"]


def test_a_step_in_which_nothing_counts_has_no_loss(text, tmp_path):
    run(
        small(text, batch_size=1, seq_len=2, mask_rate=0.15, steps=12, track_every=1, held_out=64),
        tmp_path / "a",
    )
    losses = [step["loss"] for step in lines(tmp_path / "a")[1:]]
    assert None in losses
    assert 0.0 not in losses
    assert any(isinstance(loss, float) for loss in losses)


def test_text_that_is_not_there_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("qkform.training.running._arguments", lambda *_: pytest.fail("loaded first"))
    with pytest.raises(DataError, match="no such file or folder"):
        run(Experiment(data=("nowhere.txt",)), tmp_path / "a")
    with pytest.raises(ExperimentError, match="name the folder of the files"):
        run(Experiment(data=tuple(f"{i:0100}.txt" for i in range(4000))), tmp_path / "a")


def test_a_run_without_a_held_out_loss_ends_and_says_so(tmp_path):
    said = []
    ended = _finished(tmp_path, 3, "finished", {"best": None, "held_out": math.nan}, 5.6, said.append)
    assert ended.plateau
    assert "it had no held-out loss, and the unigram entropy 5.600" in said[0]


def test_the_plateau_is_named(whole, text, tmp_path):
    said = []
    finished = run(small(text, steps=2), tmp_path / "a", say=said.append)
    assert finished.plateau
    assert "never left the unigram plateau" in said[-1]
    assert "warmup_steps is 2 and steps 2" in said[-2]
    assert f"{finished.unigram:.3f} nats, the unigram entropy" in said[-3]


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on_exactly(whole, text, tmp_path):
    def interrupt(p):
        if p.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(small(text), tmp_path / "a", progress=interrupt)
    assert newest(tmp_path / "a" / "checkpoints").step == 5  # the step that ran was finished
    run(small(text), tmp_path / "a", resume=True)
    assert same_weights(tmp_path / "a", whole)
    assert lines(tmp_path / "a") == lines(whole)


def broken_scores(engine):
    """Scores that overflow: the loss is none."""
    engine.model.model.layers[1].attn.Wqkv.weight.data.fill_(1e30)


def no_weights(engine):
    """As after an update that was too large."""
    engine.model.model.layers[0].mlp.Wo.weight.data[1] = torch.nan


def broken_gradient(engine):
    weight = engine.model.model.layers[1].mlp.Wo.weight
    weight.register_hook(lambda gradient: gradient * torch.inf)


NOT_MADE = "the weights were not updated; the last good checkpoint is"
OF_WO = r"step 6: the loss is [\d.]+, but the gradient is not finite in model\.layers\.1\.mlp\.Wo\.weight; the largest"


@pytest.mark.parametrize(
    ("breaks", "clip", "said", "weights", "last"),
    [
        (
            broken_scores,
            1,
            r"step 6: the loss is nan; the largest logit is \S+, in model\.layers\.1\.attn",
            NOT_MADE,
            5,
        ),
        (
            no_weights,
            1,
            "step 6: the loss is nan; ",
            "not finite before this step in model.layers.0.mlp.Wo.weight",
            4,
        ),
        (broken_gradient, 1, OF_WO, NOT_MADE, 5),
        pytest.param(broken_gradient, 0, OF_WO, NOT_MADE, 5, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_would_spoil_the_weights_is_not_made(
    breaks, clip, said, weights, last, text, tmp_path, monkeypatch
):
    """The step before it, which was not to be tracked, is measured where there is something to measure."""
    step = Engine.training_step

    def training_step(engine, *args, **kwargs):
        if engine.state.global_step == 5:
            breaks(engine)
        return step(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "training_step", training_step)
    with pytest.raises(TrainingError, match=said) as error:
        run(small(text, clip=clip), tmp_path / "a")
    assert weights in str(error.value)
    assert "step-3; a smaller lr" in str(error.value)
    assert events(tmp_path / "a")[-1] == {"event": "end", "step": last, "reason": "nan"}


def test_weights_that_are_no_numbers_are_not_saved(text, tmp_path, monkeypatch):
    save = Watch._save

    def spoiled(watch, step):
        if step == 6:
            watch.engine.model.model.layers[1].mlp.Wo.weight.data[3, 2] = torch.inf
        save(watch, step)

    monkeypatch.setattr(Watch, "_save", spoiled)
    with pytest.raises(
        TrainingError,
        match=r"step 6: the loss is .* are not in model\.layers\.1\.mlp\.Wo\.weight; .*step-3; a smaller",
    ):
        run(small(text), tmp_path / "a")
    assert newest(tmp_path / "a" / "checkpoints").step == 3
    assert events(tmp_path / "a")[-1]["reason"] == "nan"


def test_a_folder_with_something_in_it_is_left_alone(whole, text, tmp_path):
    with pytest.raises(TrainingError, match=r"holds a run, saved at step 8; go on with --resume"):
        run(small(text), whole)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(TrainingError, match=r"is not empty: it holds mine\.txt"):
        run(small(text), tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    with pytest.raises(TrainingError, match="is a file"):
        run(small(text), tmp_path / "mine.txt")
    with pytest.raises(TrainingError, match="holds no run to go on with"):
        run(small(text), tmp_path / "new", resume=True)


def test_another_experiment_does_not_go_on_with_a_run(whole, text):
    with pytest.raises(
        ExperimentError, match=r"^lr: 0\.003 there, 0\.1 asked for; seed: 0 there, 1 asked for"
    ):
        run(small(text, lr=0.1, seed=1), whole, resume=True)


def test_changed_text_is_noticed_and_nothing_is_lost(text, tmp_path):
    mine = write_text(tmp_path / "text", seed=1)
    with pytest.raises(Killed):
        run(small(mine), tmp_path / "a", progress=killed_at(4))
    (mine / "000.txt").write_text("other words, " * 400)
    before = (tmp_path / "a" / "record.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"the text .*changed since the run in \S+/a began; go on with"):
        run(small(mine), tmp_path / "a", resume=True)
    assert (tmp_path / "a" / "record.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("made_of", "said"),
    [
        ({"tokenizer": "another"}, ": the tokenizer has changed since"),
        ({"tokenizer": "another", "held_out": 0.1}, ": the tokenizer and the share of held-out text have"),
        (None, ": the text, the tokenizer or the share of held-out text has"),  # of an older checkpoint
    ],
)
def test_the_text_is_not_blamed_for_whatever_changed(made_of, said, whole, tmp_path):
    mine = tmp_path / "a"
    shutil.copytree(whole, mine)
    for file in mine.glob("checkpoints/*/qkform.json"):
        facts = json.loads(file.read_text())
        before = facts.pop("made_of")
        if made_of is not None:
            facts["made_of"] = {**before, **made_of}
        file.write_text(json.dumps({**facts, "data": "another"}))
    with pytest.raises(DataError, match=said):
        run(Experiment.load(mine / "experiment.yaml"), mine, resume=True)


def test_a_run_that_was_killed_before_its_end_was_noted_has_one_after(whole, tmp_path):
    mine = tmp_path / "a"
    shutil.copytree(whole, mine)
    record = mine / "record.jsonl"
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:-1]))
    assert RunRecord.load(mine).end is None
    ended = run(Experiment.load(mine / "experiment.yaml"), mine, resume=True)
    assert RunRecord.load(mine).end == events(whole)[-1] == {"event": "end", "step": 8, "reason": "finished"}
    assert ended.reason == "finished"
    assert lines(mine) == lines(whole)
    before = record.read_bytes()
    run(Experiment.load(mine / "experiment.yaml"), mine, resume=True)
    assert record.read_bytes() == before


def test_a_checkpoint_whose_contents_changed_is_passed_over(whole, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole / "checkpoints", folder)
    first, last = checkpoints(folder)[0]
    file = last.path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1  # one bit of a weight
    file.write_bytes(data)
    assert newest(folder).step == first.step
    said = checkpoints(folder, read=True)[1]
    assert said == [f"{last.path}: model.safetensors has other contents than were written"]
    facts = json.loads((first.path / "qkform.json").read_text())
    for wrong in ({"environment": 3}, {"files": ["x"]}, {"tracker": None}, {"step": 7}):
        (first.path / "qkform.json").write_text(json.dumps({**facts, **wrong}))
        with pytest.raises(TrainingError, match=r"no checkpoint in .* is whole: .*qkform\.json"):
            newest(folder)
    sizes = {name: entry["bytes"] for name, entry in facts["files"].items()}  # as they were written before
    (first.path / "qkform.json").write_text(json.dumps({**facts, "files": sizes}))
    assert newest(folder).step == first.step


def test_a_record_that_lost_lines_is_not_gone_on_with(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "a")
    record = tmp_path / "a" / "record.jsonl"
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(
        TrainingError, match=r"ends at step 0 and the checkpoint is of step 8: lines up to step 8"
    ):
        claim(tmp_path / "a", Experiment.load(tmp_path / "a" / "experiment.yaml"), resume=True)


def test_a_kill_while_the_experiment_is_written_locks_nobody_out(tmp_path):
    one, path = Experiment(), tmp_path / "experiment.yaml"
    (tmp_path / ".experiment.yaml").write_text("preset: ti")
    (tmp_path / ".lock").touch()
    assert claim(tmp_path, one, resume=False) is None
    with pytest.raises(TrainingError, match=r"\(it is empty\).*begin without --resume"):
        claim(tmp_path, one, resume=True)
    begin(tmp_path, one, None)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "experiment.yaml"]
    (tmp_path / ".experiment.yaml").write_text("preset: ti")  # of a later one
    assert claim(tmp_path, one, resume=True) is None
    assert Experiment.load(path) == one


@pytest.mark.parametrize(
    ("code", "ours"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, True), (errno.EACCES, False)]
)
def test_a_file_system_without_locks_holds_nobody_back(code, ours, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(code, "no")

    monkeypatch.setattr("fcntl.flock", flock)
    if ours:
        with held(tmp_path):
            pass
        return
    with pytest.raises(TrainingError, match="another training writes"), held(tmp_path):
        pass


def test_checkpoints_that_are_gone_are_missed(text, tmp_path):
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", progress=killed_at(4))
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    with pytest.raises(TrainingError, match="no checkpoint in"):
        run(small(text), tmp_path / "a", resume=True)


def test_a_half_written_checkpoint_is_never_picked(whole, text, tmp_path):
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", progress=killed_at(7))
    folder = tmp_path / "a" / "checkpoints"
    (folder / ".aside-step-7").mkdir()
    newer = folder / "step-6" / "training.pt"
    newer.write_bytes(newer.read_bytes()[:100])
    assert newest(folder).step == 3
    said = []
    run(small(text), tmp_path / "a", resume=True, say=said.append)
    assert any("step-6" in text and "training.pt has 100 bytes" in text for text in said)
    assert same_weights(tmp_path / "a", whole)
    assert lines(tmp_path / "a") == lines(whole)
    assert not list(folder.glob(".aside*"))


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path):

    def fill(error):
        with written(tmp_path, "step-1", {"step": 1}) as aside:
            (aside / "x").write_text("three")
            raise error

    for name in ("one", "two"):
        with written(tmp_path, "step-1", {"step": 1}) as aside:
            (aside / "x").write_text(name)
    with pytest.raises(TrainingError, match="No space left on device; what was saved before is whole"):
        fill(OSError(28, os.strerror(28)))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert (tmp_path / "step-1" / "x").read_text() == "two"
    with pytest.raises(TrainingError, match="No space left"):
        fill(RuntimeError("safetensors: I/O error: No space left on device (os error 28)"))


@pytest.mark.slow
def test_a_disk_that_fills_while_a_checkpoint_is_written_costs_no_step_before_it(
    whole, text, tmp_path, monkeypatch
):
    from qkform.training import watch

    write = watch.save_model

    def full(model, tokenizer, folder):
        write(model, tokenizer, folder)
        if folder.name.endswith("step-6"):
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    monkeypatch.setattr(watch, "save_model", full)
    with pytest.raises(
        TrainingError, match=r"step-6: No space left on device; what was saved before is whole"
    ):
        run(small(text), tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == ["step-0", "step-3"]
    monkeypatch.setattr(watch, "save_model", write)
    run(small(text), tmp_path / "a", resume=True)
    assert same_weights(tmp_path / "a", whole)
    assert lines(tmp_path / "a") == lines(whole)


def test_two_trainings_do_not_share_a_folder(text, tmp_path):
    with held(tmp_path / "a"), pytest.raises(TrainingError, match="another training writes to this folder"):
        run(small(text), tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]
    run(small(text, steps=1), tmp_path / "a")


def test_a_batch_that_processes_cannot_share_and_a_type_that_needs_a_gpu_are_refused(text, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(ExperimentError, match="precision: fp16 needs a GPU"):
            run(small(text, precision="fp16"), tmp_path / "a")
    with pytest.raises(ExperimentError, match="config: vocab_size is 40, and the tokenizer has"):
        run(small(text, config={"vocab_size": 40}), tmp_path / "b")
    with pytest.raises(DataError):
        run(small(tmp_path / "nothing"), tmp_path / "c")
    run(small(text, steps=1), tmp_path / "c")  # what failed before it began has left nothing in the way


def test_a_tracker_that_is_not_there_is_named(text, tmp_path):
    with pytest.raises(ExperimentError, match=r"^report_to: .*nonsense"):
        run(small(text, report_to=["nonsense"]), tmp_path / "a")
    assert not (tmp_path / "a" / "experiment.yaml").exists()


def test_other_trackers_hear_of_it(text, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run(small(text, steps=2, report_to=["tensorboard"]), tmp_path / "a")
    assert list((tmp_path / "a").rglob("events.out*"))


@pytest.mark.slow
def test_a_run_leaves_the_random_numbers_of_its_seed_alone(text, tmp_path):
    run(small(text, steps=1), tmp_path / "a")
    one = lines(tmp_path / "a")
    torch.manual_seed(77)
    torch.rand(5)
    run(small(text, steps=1), tmp_path / "b")
    assert lines(tmp_path / "b") == one
    run(small(text, steps=1, seed=1), tmp_path / "c")
    assert lines(tmp_path / "c") != one


@pytest.mark.parametrize(
    "few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=lambda few: "once" if few else "twice"
)
def test_a_process_that_is_killed_leaves_what_an_unbroken_one_does(whole, text, tmp_path, few):
    """The real thing: kill -9 in the middle of a step, by the operating system."""
    folder = tmp_path / "a"
    code = (
        "import os, sys\n"
        "from qkform.training import Experiment, run\n"
        "def progress(p):\n"
        "    if p.step == int(sys.argv[2]): os.kill(os.getpid(), 9)\n"
        "run(Experiment.load(sys.argv[3]), sys.argv[1], resume=len(sys.argv) > 4, progress=progress)\n"
    )
    import subprocess
    import sys

    file = tmp_path / "a.yaml"
    file.write_text(small(text).to_yaml())
    for step, resume in (("4", ()), ("7", ("resume",)))[: 1 if few else 2]:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), step, str(file), *resume],
            capture_output=True,
            text=True,
        )
        assert done.returncode == -9, done.stderr
    run(small(text), folder, resume=True)
    assert same_weights(folder, whole)
    assert lines(folder) == lines(whole)


@pytest.mark.parametrize(
    "over",
    [
        SCALED,
        pytest.param({"optimizer": "adamw"}, marks=pytest.mark.slow),
        pytest.param({**SCALED, "parallel": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=lambda over: "-".join(str(value) for value in over.values()),
)
def test_two_processes_are_one_with_the_same_batch(over, text, tmp_path):
    """Five held-out sequences in batches of two: the first process has two of the three, the second one."""
    over = {"steps": 20, "qk_lr_ratio": 4, "held_out": 5, **over}
    done = command(*flags(small(text, accumulation=2, **over), tmp_path / "two"), processes=2)
    assert done.returncode == 0, done.stderr
    run(small(text, **over), tmp_path / "one")
    assert farthest(tmp_path / "two", tmp_path / "one") < 1e-5
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert one["held_out"] == pytest.approx(two["held_out"], abs=1e-5)
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
        assert one["tokens"] == two["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mlm", "clm"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_track_save_and_resume(objective, parallel, text, tmp_path):
    experiment = small(
        text, steps=20, objective=objective, parallel=parallel, **EVERYTHING | {"conflict": False}
    )
    run(small(text, steps=20, objective=objective, **EVERYTHING | {"conflict": False}), tmp_path / "one")
    done = command(*flags(experiment, tmp_path / "two"), processes=2)
    assert done.returncode == 0, done.stderr
    assert farthest(tmp_path / "two", tmp_path / "one") < 1e-5
    file = tmp_path / "short.yaml"
    file.write_text(experiment.to_yaml())
    # stopped after some steps as a machine that shuts down would, then resumed
    import subprocess
    import sys
    import time

    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "qkform",
    ]
    folder = tmp_path / "cut"
    going = subprocess.Popen([*start, "train", str(file), "--out", str(folder)], stderr=subprocess.DEVNULL)
    while going.poll() is None and not (folder / "checkpoints" / "step-9").exists():
        time.sleep(0.02)
    going.kill()
    going.wait()
    time.sleep(2)  # its workers notice that it is gone
    done = command(*flags(experiment, folder), "--resume", processes=2)
    assert done.returncode == 0, done.stderr
    assert same_weights(folder, tmp_path / "two")
    assert lines(folder) == lines(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_compiled_training_learns_the_same(whole, text, tmp_path):
    run(small(text, compile=True), tmp_path / "a")
    assert farthest(tmp_path / "a", whole) < 1e-3


def test_a_resume_under_other_threads_says_not_exact(text, tmp_path):
    with pytest.raises(Killed):
        run(small(text), tmp_path / "a", progress=killed_at(4))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    said = []
    try:
        run(small(text), tmp_path / "a", resume=True, say=said.append)
    finally:
        torch.set_num_threads(threads)
    assert any(text.startswith("not exact: threads") for text in said)
    event = next(event for event in events(tmp_path / "a") if event["event"] == "resume")
    assert event["exact"] is False
    assert "threads" in event["reason"]


def test_facts_of_a_checkpoint_are_plain(whole):
    facts = json.loads((newest(whole / "checkpoints").path / "qkform.json").read_text())
    assert facts["reason"] == "finished"
    assert facts["experiment"]["steps"] == 8
    assert math.isfinite(facts["held_out"])


@pytest.mark.parametrize("objective", ["mlm", "clm"])
@pytest.mark.parametrize("preset", ["tiny", "mini", "base", "large"])
def test_the_model_of_every_preset_passes_its_check(preset, objective):
    models.check(Experiment(preset=preset, objective=objective))


class NoPadding:
    """As much of a tokenizer as a config asks for."""

    pad_token_id = cls_token_id = sep_token_id = mask_token_id = None
    bos_token_id, eos_token_id = 1, 2

    def __len__(self):
        return 512

    def get_vocab(self):
        return {}


def test_a_model_that_insists_on_a_padding_token_takes_a_tokenizer_without_one():
    config = models.model_config(Experiment(objective="clm"), NoPadding())
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


def test_every_token_is_learnt_by_a_tokenizer_without_padding():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = models.build_model(Experiment(objective="clm", config=sizes), NoPadding())
    model(input_ids=torch.tensor([[0, 3, 0, 4]]), labels=torch.tensor([[0, 3, 0, 4]])).loss.backward()
    fed = torch.autograd.grad(
        model.get_input_embeddings()(torch.tensor([0])).sum(), model.get_input_embeddings().weight
    )[0]
    assert fed[0].abs().sum() > 0


def test_a_mask_rate_by_which_nothing_counts_is_named(text, tmp_path):
    with pytest.raises(
        TrainingError, match=r"none of the 8 held-out sequences .* counts: mask_rate is 1e-09"
    ):
        run(small(text, objective="mlm", mask_rate=1e-9), tmp_path / "a")
