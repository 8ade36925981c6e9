"""`qkform train`: flags and files, what it prints and where, exit codes."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest

from tests.trained import events, same_weights, small, write_text

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("accelerate", reason="training needs accelerate")
pytest.importorskip("tokenizers", reason="training needs tokenizers")

from qkform.cli import main
from qkform.cli.progress import Line
from qkform.cli.train import _folder
from qkform.training import Experiment
from qkform.training.watch import Progress


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def desk(tmp_path_factory, tmp_path, monkeypatch):
    monkeypatch.setenv("QKFORM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags(experiment):
    """An experiment as the flags that differ from the preset's."""
    standard, words = Experiment(preset=experiment.preset).to_dict(), []
    for name, value in experiment.to_dict().items():
        if value == standard[name]:
            continue
        words.append(f"--{name.replace('_', '-')}")
        pairs = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else value
        words += [str(one) for one in (pairs if isinstance(pairs, list) else [pairs])]
    return words


def test_a_file_beside_a_record_is_that_of_a_run_by_its_name_alone(desk):
    (desk / "record.jsonl").write_text("")
    assert _folder(Path("matched.yaml"), None) == Path("runs/matched")
    assert _folder(Path("experiment.yaml"), None) == Path()
    assert _folder(Path("experiment.yaml"), Path("out")) == Path("out")


def test_flags_and_a_file_say_the_same(desk, text, capsys):
    experiment = small(text, steps=2, warmup_steps=1, betas=(0.8, 0.9))
    assert main(["train", *flags(experiment), "--out", "a"]) == 0
    out, err = capsys.readouterr()
    assert out == "a\n"
    said = err.splitlines()
    assert "the unigram entropy" in "".join(said)
    assert [line.split("  ")[0] for line in said if line.startswith("step")] == ["step 0/2", "step 2/2"]
    assert "tokens/s" in err
    assert "warning: this run never left the unigram plateau" in err
    assert said[-1].startswith("finished at step 2: held-out loss ")
    assert Experiment.load("a/experiment.yaml") == experiment
    (desk / "one.yaml").write_text(experiment.to_yaml())
    assert main(["train", "one.yaml", "--quiet"]) == 0  # a file's run has a folder of the file's name
    out, err = capsys.readouterr()
    assert out == "runs/one\n"
    assert err.startswith("warning: this run never left")
    assert err.count("\n") == 1
    assert same_weights(desk / "a", desk / "runs" / "one")


def test_resuming_needs_the_folder_alone(desk, text, capsys, monkeypatch):
    show = Line.show

    def interrupting(self, p):
        show(self, p)
        if p.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Line, "show", interrupting)
    experiment = small(text, steps=6)
    (desk / "one.yaml").write_text(experiment.to_yaml())
    assert main(["train", "one.yaml", "--out", "a"]) == 130
    assert "interrupted; go on with: qkform train --resume --out a" in capsys.readouterr().err
    assert events(desk / "a")[-1] == {"event": "interrupted", "step": 3}
    monkeypatch.setattr(Line, "show", show)
    assert main(["train", "--resume", "--out", "a"]) == 0
    assert "everything is as it was: exact\ngoing on from step 3\n" in capsys.readouterr().err
    assert main(["train", "a/experiment.yaml", "--resume"]) == 0
    assert "has ended already, at step 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0", "--out", "a"], "lr: 0.0; expected a number above 0"),
        (["--lrr", "0", "--out", "a"], "Did you mean --lr"),
        (["--config", "hidden_size", "--out", "a"], "expected NAME=VALUE"),
        (["--config", "hiden_size=3", "--out", "a"], "did you mean hidden_size?"),
        (["--preset", "tinny", "--out", "a"], "preset: 'tinny' is none of tiny"),
        ([], "give --out, the folder of the run"),
        (["none.yaml"], "none.yaml: cannot be read"),
        (["--resume", "--out", "none"], "holds no run to go on with"),
        (["--model", "gpt2", "--out", "a"], "transformers has no mlm model of type 'gpt2'"),
        (["--model", "berd", "--out", "a"], "did you mean bert"),
        (["--seq-len", "99999", "--out", "a"], "max_position_embeddings of the model is 8192"),
        (["--data", "not/here.txt", "--out", "a"], "not/here.txt"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(words, said, desk, text, capsys):
    where = [] if "--data" in words or not words or "none.yaml" in words else ["--data", str(text)]
    assert main(["train", *words, *where]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
    assert not (desk / "a" / "experiment.yaml").exists()


def test_a_line_that_is_watched_is_written_over(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = Line(10)
    line.show(Progress(0, 20, math.nan, None, 0.0, math.nan))
    line.show(Progress(10, 20, 3.0, 4.5, 1234.5, 3725.0))
    line.say("note")
    err = capsys.readouterr().err
    assert err.startswith("\rstep 0/20")
    assert "\rstep 10/20  loss 3.000  held-out 4.500  1,234 tokens/s  1:02:05 left" in err
    assert err.endswith("\nnote\n")
