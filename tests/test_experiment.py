"""An experiment: one dataclass = YAML = flags, checked at once, with the field's name in every message."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path

import pytest

from qkform.cli.train import Asked
from qkform.errors import ExperimentError
from qkform.training import Experiment
from qkform.training.experiment import PRESET
from qkform.training.presets import PRESETS


def test_a_field_that_is_not_given_has_the_value_of_the_preset():
    tiny, mini = Experiment(), Experiment(preset="mini")
    assert (tiny.lr, tiny.betas, tiny.seq_len, tiny.warmup_steps, tiny.mask_rate) == (
        3e-3,
        (0.9, 0.98),
        64,
        100,
        0.3,
    )
    assert (mini.lr, mini.precision, mini.steps, mini.warmup_steps) == (5e-5, "fp16", 200_000, 200)
    assert (mini.batch_size, mini.accumulation) == (256, 8)  # 32 sequences at a time, eight times
    assert Experiment(preset="mini", lr=1).lr == 1.0


def test_one_architecture_for_both_objectives():
    for name in PRESETS:
        masked, causal = Experiment(preset=name), Experiment(preset=name, objective="clm")
        assert masked.model_config == causal.model_config
        assert {masked.model, causal.model} in ({"modernbert", "modernbert-decoder"}, {"bert"})


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [("tiny", (128, 4, 4)), ("mini", (256, 4, 4)), ("base", (768, 12, 12)), ("large", (1024, 24, 16))],
)
def test_presets_have_the_sizes_they_are_named_for(preset, sizes):
    config = Experiment(preset=preset).model_config
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == sizes


def test_yaml_gives_the_experiment_back(tmp_path):
    path = tmp_path / "one.yaml"
    odd = Experiment(
        objective="clm",
        config={"hidden_size": 36},
        data=("a.txt", "b: c"),
        lr=1e-4,
        eps=1e-12,
        stop_at_loss=3,
        report_to=["x"],
    )
    path.write_text(odd.to_yaml())
    assert Experiment.load(path) == odd
    assert Experiment.load(path, lr=2).lr == 2.0
    assert Experiment.from_dict(odd.to_dict()) == odd
    assert odd.to_yaml().count("\n") == len(fields(Experiment))


def test_what_json_writes_and_yaml_reads_otherwise_comes_back(tmp_path):
    odd = [
        1e-6,
        1e16,
        -2.5e-5,
        "1e-6",
        "smile \U0001f600",
        "half \ud800",
        "a\\ud83d\\ude00",
        "\x7f",
        "0x1",
        "1_0",
    ]
    one = Experiment(config={"odd": odd, "norm_eps": 1e-12}, data=("texts/\U0001f600.txt",))
    (tmp_path / "e.yaml").write_text(one.to_yaml())
    assert Experiment.load(tmp_path / "e.yaml") == one
    (tmp_path / "e.yaml").write_text("config: {norm_eps: 1e-6, name: '1e-6', version: 1.2.3}")
    assert Experiment.load(tmp_path / "e.yaml").config == {
        "norm_eps": 1e-6,
        "name": "1e-6",
        "version": "1.2.3",
    }


def test_yaml_as_people_write_it(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text("objective: clm\nlr: 3e-4\ndata: some.txt\nconfig:\n  hidden_size: 64\n")
    read = Experiment.load(path)
    assert (read.lr, read.data, read.model) == (3e-4, ("some.txt",), "modernbert-decoder")
    assert read.model_config["hidden_size"] == 64


def endless():
    inner = {}
    inner["a"] = inner
    return inner


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lrr": 1}, "lrr: no such option; did you mean lr?"),
        ({"qk-lr-ratio": 1}, "qk-lr-ratio: no such option; did you mean qk_lr_ratio?"),
        ({"preset": "huge"}, "preset: 'huge' is none of tiny, mini, base, large"),
        ({"objective": "mlmm"}, "objective: 'mlmm' is none of mlm, clm"),
        ({"attention": ["decoupled"]}, "attention: "),
        ({"lr": "fast"}, "lr: 'fast'; expected a number above 0"),
        ({"lr": 0}, "lr: 0; expected a number above 0"),
        ({"lr": float("nan")}, "lr: nan; expected a number above 0"),
        ({"steps": 1.5}, "steps: 1.5; expected a whole number from 1"),
        ({"steps": True}, "steps: True; expected a whole number from 1"),
        ({"mask_rate": 1.2}, "mask_rate: 1.2; expected a number above 0 to 1"),
        ({"compile": 1}, "compile: 1; expected true or false"),
        ({"model": 3}, "model: 3; expected a text"),
        ({"config": ["a"]}, "config: "),
        ({"config": {"a": float("inf")}}, "config: "),
        (
            {"batch_size": 10, "accumulation": 4},
            "accumulation: 4 micro-batches cannot share a batch_size of 10",
        ),
        ({"betas": [0.9]}, "betas: [0.9]; expected two numbers"),
        ({"betas": [0.9, 1]}, "betas: [0.9, 1.0]; expected two numbers"),
        ({"data": []}, "data: nothing is named"),
        ({"momentum": 0.9}, "momentum: 0.9 is for sgd, and optimizer is adamw"),
        ({"momentum": 1, "optimizer": "sgd"}, "momentum: 1.0; expected"),
        ({"steps": 10**400}, "expected a whole number from 1, and none beyond 9223372036854775807"),
        ({"lr": 10**5000}, "lr: a int that is too long to show; expected a number above 0"),
        ({"lr": "9" * 5000}, "lr: '999"),
        ({"config": {"a": {"b": date(2024, 1, 2)}}}, "config: a: b: datetime.date(2024, 1, 2), a date; "),
        ({"config": {"a": [b"x"]}}, "config: a: b'x', a bytes; expected plain values"),
        ({"config": {"a": {1: 0, "1": 2}}}, "config: a: 1 is there as a number and as a text"),
        ({"config": {"a": endless()}}, "nested more than 30 levels deep"),
        ({"data": ""}, "data: '' names nothing"),
        ({"data": ["a.txt", " "]}, "data: ' ' names nothing"),
        ({"tokenizer": ""}, "tokenizer: '' names nothing"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_work(given, said):
    with pytest.raises(ExperimentError) as error:
        Experiment.from_dict(given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: [", "not YAML"),
        ("- lr", "expected options"),
        ("lr: x", "lr: 'x'"),
        (b"\xff", "not YAML"),
        ("", "expected options"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ExperimentError, match=said) as error:
        Experiment.load(path)
    assert "bad.yaml" in str(error.value)
    with pytest.raises(ExperimentError, match=r"none\.yaml: cannot be read"):
        Experiment.load(tmp_path / "none.yaml")


def test_every_field_is_a_flag_and_says_what_it_is():
    assert [one.name for one in fields(Asked)] == [one.name for one in fields(Experiment)]
    assert all(one.metadata["help"].endswith(".") for one in fields(Experiment))


def test_what_is_saved_or_reported_makes_no_other_experiment():
    one = Experiment()
    assert one.differences(Experiment(save_every=1, keep=9, report_to=["tensorboard"])) == []
    assert one.differences(Experiment(lr=1, seed=3)) == ["lr", "seed"]


def test_experiments_cannot_be_changed():
    with pytest.raises(AttributeError):
        Experiment().lr = 1
    with pytest.raises(TypeError):
        Experiment(config={"a": 1}).config["a"] = 2


def test_what_was_not_given_follows_a_new_preset_and_objective():
    given = Experiment(lr=1e-3, seed=4, config={"hidden_dropout_prob": 0.1})
    other = given.replace(objective="clm", batch_size=32)
    assert other == Experiment(
        lr=1e-3, seed=4, config={"hidden_dropout_prob": 0.1}, objective="clm", batch_size=32
    )
    assert (other.model, other.lr) == ("modernbert-decoder", 1e-3)
    mini = other.replace(preset="mini")
    assert (mini.model, mini.vocabulary, mini.lr, mini.batch_size) == ("bert", 8192, 1e-3, 32)
    assert Experiment.from_dict(given.to_dict()).replace(objective="clm") == given.replace(objective="clm")
    assert Experiment(lr=0.003).replace(preset="mini") == Experiment().replace(
        preset="mini"
    )  # as they are equal
    sent = pickle.loads(pickle.dumps(given))  # noqa: S301
    assert sent.replace(objective="clm").model == "modernbert-decoder"
    with pytest.raises(ExperimentError, match="did you mean objective"):
        given.replace(objectiv="clm")


def test_an_experiment_goes_where_values_go():
    one = Experiment(config={"a": {"b": [1, {"c": None}]}})
    through = pickle.loads(pickle.dumps(one))  # noqa: S301
    for other in (through, copy.deepcopy(one), Experiment(**asdict(one))):
        assert (other, hash(other), other.to_yaml()) == (one, hash(one), one.to_yaml())
        with pytest.raises(TypeError):
            other.config.update(a=2)
    assert len({one, copy.copy(one), Experiment(config={"a": 2})}) == 2


def test_presets_lie_in_the_package():
    assert (Path(__file__).parent.parent / "src/qkform/training/presets.toml").exists()
    assert set(PRESETS) == {"tiny", "mini", "base", "large"}


def test_presets_have_a_value_for_every_field_that_leaves_it_to_them_and_for_no_other():
    left = {one.name for one in fields(Experiment) if one.default is PRESET} - {"model"}
    assert all(set(preset.values) == left for preset in PRESETS.values())
