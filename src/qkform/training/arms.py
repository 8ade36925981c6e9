"""Runs as arms of an experiment: what differs besides the seed, what an arm is called, and which is the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qkform.errors import RecordError
from qkform.runs.experiments import NOT_OF_ARM, swept_names, telling
from qkform.training.gathering import Run, differing

# Interventions, each with the values that stand for none. How self scores start matters to decoupled attention alone.
INTERVENTIONS: dict[str, tuple[Any, ...]] = {
    "attention": ("standard", None),
    "init": ("standard", None),
    "qk_lr_ratio": (1, None),
}
# Fields whose values make losses, or everything, incomparable.
OBJECTIVE = {"objective", "mask_rate"}
# Which text, and by which tokenizer: where records have the key of their tokens, that decides, and these explain.
TEXT = {"data", "text_field", "split", "dataset_config", "revision", "tokenizer", "vocabulary", "on_error"}
DATA = {*TEXT, "seq_len", "held_out"}
KEY = "tokens"  # how the key is called where it differs and no field of TEXT does: a file was changed
MODEL = {"preset", "model", "config"}


@dataclass(frozen=True)
class Arm:
    """The runs that differ in nothing but the seed and where they lie; `experiment` is without these."""

    experiment: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    name: str = ""

    @property
    def interventions(self) -> dict[str, Any]:
        """The interventions that are not at the value that stands for none."""
        return {
            name: value
            for name, value in self.experiment.items()
            if name in INTERVENTIONS and not _is_one_of(value, INTERVENTIONS[name])
        }

    @property
    def text(self) -> str | None:
        """The key of the tokens that its runs trained on; None where no record has it."""
        return next((run.text for run in self.runs if run.text is not None), None)

    def of(self, name: str) -> Any:
        """The value of a field, or the first places of the key of its tokens."""
        return (self.text or "")[:12] or None if name == KEY else self.experiment.get(name)

    @property
    def by_seed(self) -> dict[Any, Run]:
        return {run.seed: run for run in self.runs}


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Runs grouped, named, in order of appearance, those of an arm by seed.

    Raises RecordError where an arm has two runs of one seed.
    """
    arms: list[Arm] = []
    for run in runs:
        experiment = {name: value for name, value in run.experiment.items() if not _outside(name)}
        arm = next((arm for arm in arms if not apart_in(arm, Arm(experiment, [run]))), None)
        if arm is None:
            arms.append(arm := Arm(experiment))
        arm.runs.append(run)
    named = [
        Arm(arm.experiment, _by_seed(arm.runs), name) for arm, name in zip(arms, _names(arms), strict=True)
    ]
    for arm in named:
        for a, b in zip(arm.runs, arm.runs[1:], strict=False):
            if a.seed == b.seed:
                raise RecordError(
                    f"two runs of arm {arm.name} have seed {a.seed}: {a.path} and {b.path}; leave one of them out"
                )
    return named


def apart_in(a: Arm, b: Arm) -> list[str]:
    """The names of the fields in which two arms differ; where both know their tokens, those decide and no name does."""
    names = differing(a.experiment, b.experiment)
    if a.text is None or b.text is None:
        return names
    if a.text == b.text:
        return [name for name in names if name not in TEXT]
    return names if TEXT.intersection(names) else [*names, KEY]


def baseline_of(arms: Sequence[Arm], name: str | None = None) -> Arm:
    """The arm of this name; without one, the only arm that has no intervention. RecordError unless it is just one."""
    known = ", ".join(arm.name for arm in arms)
    if name is not None:
        found = [arm for arm in arms if arm.name == name]
        if not found:
            raise RecordError(f"--baseline {name}: there is no such arm; the arms are {known}")
        return found[0]
    plain = [arm for arm in arms if not arm.interventions]
    if len(plain) == 1:
        return plain[0]
    if not plain:
        raise RecordError(
            "no arm has standard attention, the standard start and ratio 1, so that none is the baseline by itself; "
            f"name one: --baseline with one of {known}"
        )
    raise RecordError(
        f"{len(plain)} arms have no intervention and differ in {', '.join(_varying(plain))}; name the baseline: "
        f"--baseline with one of {', '.join(arm.name for arm in plain)}"
    )


def apart(arm: Arm, baseline: Arm) -> tuple[str | None, str | None]:
    """Why two arms cannot be paired at all, and why their losses cannot be compared; each names the field, or is None.

    Another corpus or another model: not at all. Another objective: its loss is another quantity; what is measured on
    the weights and on the attention can still be held side by side, the model's type then differing too.
    """
    loss = None
    fields = apart_in(arm, baseline)
    for name in fields:
        if _top(name) in OBJECTIVE:
            loss = _said(name, arm, baseline)
    for name in fields:
        if loss and name == "model":
            continue
        if name == KEY:
            said = f"{arm.of(name)} in {arm.name}, {baseline.of(name)} in {baseline.name}"
            return f"the text or its tokenizer is another, by the same names (key {said})", loss
        if _top(name) in DATA | MODEL:
            return _said(name, arm, baseline), loss
    return _shapes_apart(arm, baseline), loss


def _shapes_apart(arm: Arm, baseline: Arm) -> str | None:
    a, b = (one.runs[0].record.start.get("layers") or [] for one in (arm, baseline))
    if len(a) != len(b):
        return f"the number of attention layers differs: {len(a)} and {len(b)}"
    for name in ("d_model", "n_heads", "n_kv_heads", "d_head"):
        values = [[layer.get(name) for layer in layers] for layers in (a, b)]
        if values[0] != values[1]:
            return f"{name} of the layers differs: {values[0]} and {values[1]}"
    return None


def _names(arms: Sequence[Arm]) -> list[str]:
    """The folder that holds the runs of an arm, and of no other, where every arm has one; else what tells it apart."""
    if swept := swept_names([[(run.path, run.seed) for run in arm.runs] for arm in arms]):
        return swept
    varying = sorted(_varying(arms), key=lambda one: one not in INTERVENTIONS)
    said = [{name: _value(arm.of(name)) for name in varying} for arm in arms]  # as it will be read
    told = telling(said, varying)
    names = [", ".join(f"{_last(name)}={one[name]}" for name in told) for one in said]
    names = [name or "runs" for name in names]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _varying(arms: Sequence[Arm]) -> list[str]:
    return list(dict.fromkeys(name for arm in arms for name in apart_in(arms[0], arm)))


def _by_seed(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: int(run.seed))


def _outside(name: str) -> bool:
    return _top(name) in NOT_OF_ARM


def _is_one_of(value: Any, plain: Sequence[Any]) -> bool:
    return any(value is one or (one is not None and value == one) for one in plain)


def _said(name: str, arm: Arm, baseline: Arm) -> str:
    return f"{name} differs: {_value(arm.of(name))} in {arm.name}, {_value(baseline.of(name))} in {baseline.name}"


def _top(name: str) -> str:
    return name.partition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _value(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
