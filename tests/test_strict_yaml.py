"""YAML as people write it: whatever stands in a file, it is taken as it stands or refused with its line, and soon."""

from __future__ import annotations

import pytest

from qkform.errors import ExperimentError
from qkform.training import Experiment
from qkform.training.grid import Grid
from qkform.training.strict_yaml import LARGEST, loaded

TENFOLD = "".join(f"l{i}: &l{i} [{','.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 9))
CHAIN = "".join(f"l{i}: &l{i} [*l{i - 1}]\n" for i in range(1, 90))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: 1\nseed: 2024-13-45", "x:2: not YAML: '2024-13-45' is no value: month must be in 1..12"),
        ("steps: !!int foo", "x:1: not YAML: 'foo' is no value"),
        ("steps: !!bool foo", "x:1: not YAML: 'foo' is no value"),
        ("steps: !!timestamp foo", "x:1: not YAML: 'foo' is no value"),
        ("steps: !!int ''", "x:1: not YAML: '' is no value"),
        (f"steps: {'9' * 5000}", "x:1: not YAML: '9999"),
        (f"config: {'{a: ' * 3000}", "x:1: nested more than 32 levels deep"),
        (f"l0: &l0 [1]\n{TENFOLD}", "x:6: aliases repeat more than an experiment can hold"),
        (f"l0: &l0 [1]\n{CHAIN}", "aliases repeat more than an experiment can hold"),
        ("config: &a {b: [*a]}", "x:1: *a stands within what it names"),
        ("seed: 1\nlr: 1\nseed: 2\n", "x:3: seed is there twice, first in line 1"),
        ("config: {a: 1, a: 1}", "x:1: a is there twice, first in line 1"),
        ("seed: 010", "x:1: 010 is counted in eights or sixties"),
        ("steps: 1:30", "x:1: 1:30 is counted in eights or sixties"),
        ("lr: 1\n---\nlr: 2", "x:2: not YAML: but found another document"),
        ("lr: \0", "x: not YAML: unacceptable character"),
        ("#" * (LARGEST + 1), "x: more than 262,144 characters"),
    ],
    ids=lambda text: text[:20],
)
def test_what_no_experiment_can_mean_is_refused_with_its_line(text, said):
    with pytest.raises(ExperimentError) as error:
        loaded(text, "x")
    assert said in str(error.value)


def test_what_people_write_means_what_it_says():
    text = "base: &all {lr: 3e-4, seed: 0, at: 0.5, big: 1_000}\none: {<<: *all, lr: 1}\ntwo: [*all, *all]\nday: '010'"
    base = {"lr": 0.0003, "seed": 0, "at": 0.5, "big": 1000}
    assert loaded(text, "x") == {"base": base, "one": {**base, "lr": 1}, "two": [base, base], "day": "010"}


def test_experiments_and_grids_are_read_so(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text("arms:\n  a: {}\n  a: {init: matched}\nseeds: [0]\n")
    for kind in (Grid, Experiment):
        with pytest.raises(ExperimentError, match=r"one\.yaml:3: a is there twice, first in line 2"):
            kind.load(path)
