"""`Experiment`: everything that decides what a training run computes, as one frozen dataclass = YAML = flags."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from qkform.errors import ExperimentError
from qkform.runs.experiments import NOT_COMPUTED
from qkform.training.checked import checked, plain
from qkform.training.presets import PRESETS

_HALVES = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
PRESET = object()  # the default of a field whose value the preset has


def option(
    group: str,
    help: str,
    default: Any = PRESET,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field: where the command line lists it, what it says, its default, and the range of numbers."""
    facts = {"group": group, "help": help, "least": least, "above": above, "most": most}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=facts)
    return field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is trained, on what, how, and with which changes of the query-key form.

    A field that is not given has the value of the preset: `Experiment(preset="tiny", objective="clm")` is complete,
    and every field of it can be read. Everything is checked at once; ExperimentError names the field and what would
    work. Two equal experiments on one machine give equal runs.

    >>> Experiment(objective="clm").model
    'modernbert-decoder'
    >>> Experiment(attention="decoupled", qk_lr_ratio=4).lr
    0.003
    """

    preset: str = option(
        "Model", "Sizes and settings to start from: tiny (two CPU cores), mini, base or large.", "tiny"
    )
    objective: Literal["mlm", "clm"] = option("Model", "Masked tokens, or the next one.", "mlm")
    model: str = option(
        "Model", "Model type of transformers, as in a config.json; the preset has one per objective."
    )
    config: Mapping[str, Any] = option("Model", "Overrides of the model's config, as NAME=VALUE.", {})

    data: tuple[str, ...] = option(
        "Data",
        "Text files, folders, JSONL, parquet, or a datasets id; sotu: the State of the Union.",
        ("sotu",),
    )
    text_field: str = option("Data", "JSONL, parquet, datasets: the field that has the text.", "text")
    split: str = option("Data", "datasets: the split.", "train")
    dataset_config: str | None = option("Data", "datasets: the configuration.", None)
    revision: str | None = option("Data", "datasets: branch, tag or commit.", None)
    tokenizer: str | None = option(
        "Data", "Folder or id of a tokenizer; one is trained on the data unless given.", None
    )
    vocabulary: int = option("Data", "Size of the tokenizer that is trained.", least=260)
    seq_len: int = option("Data", "Tokens of a sequence.", least=2)
    mask_rate: float = option("Data", "mlm: share of the tokens that is masked.", above=0, most=1)
    held_out: int = option(
        "Data", "Held-out sequences whose loss is measured; they are never trained on.", 256, least=1
    )
    on_error: Literal["raise", "skip"] = option(
        "Data", "Lines, rows and texts that are damaged or none: stop, or skip and count them.", "raise"
    )

    attention: Literal["standard", "decoupled", "exclusive", "no-diagonal"] = option(
        "Form",
        "What a token's score with itself is: W's, its own, taken out of the values, or none.",
        "standard",
    )
    self_score_init: Literal["diagonal", "zero", "spread"] = option(
        "Form", "decoupled: how the self scores start.", "diagonal"
    )
    init: Literal[
        "standard", "matched", "indefinite", "skew", "orthogonal", "script", "script_scale", "mimetic"
    ] = option("Form", "How W_Q and W_K start: as the model has it, or an arm of symmetrize_.", "standard")
    qk_lr_ratio: float = option("Form", "Multiplies the learning rate of W_Q and W_K.", 1.0, above=0)

    optimizer: Literal["adamw", "sgd"] = option("Optimizer", "AdamW, or gradient descent.")
    lr: float = option("Optimizer", "Learning rate at its highest.", above=0)
    betas: tuple[float, ...] = option("Optimizer", "adamw: the two decay rates of its averages.", least=0)
    eps: float = option("Optimizer", "adamw: added to the root of the second average.", 1e-8, above=0)
    momentum: float = option("Optimizer", "sgd: momentum.", 0.0, least=0)
    weight_decay: float = option(
        "Optimizer", "Per unit of learning rate, of weights that are no norm and no bias.", least=0
    )
    schedule: Literal["linear", "cosine", "constant"] = option(
        "Optimizer", "How the rate falls after the warm-up."
    )
    warmup_steps: int = option("Optimizer", "Steps in which the rate rises from 0.", least=0)
    clip: float = option("Optimizer", "Largest norm of the gradient; 0: any.", least=0)

    steps: int = option("Run", "Updates of the weights.", least=1)
    batch_size: int = option(
        "Run", "Sequences of a step, over all processes and accumulated micro-batches.", least=1
    )
    accumulation: int = option("Run", "Micro-batches of a step.", least=1)
    seed: int = option(
        "Run", "Of the weights, the order of the data, masks and dropout.", 0, least=0, most=2**32 - 1
    )
    precision: Literal["fp32", "bf16", "fp16"] = option("Run", "Type of the products; fp16 needs a GPU.")
    parallel: Literal["ddp", "fsdp"] = option(
        "Run", "With several processes: copies of the model, or shards of it.", "ddp"
    )
    compile: bool = option("Run", "Compile the model with torch.compile.", False)
    stop_at_loss: float | None = option(
        "Run", "Stop at the first tracked step whose held-out loss is at most this.", None, above=0
    )
    track_every: int = option("Run", "Steps from one line of the record to the next.", least=1)
    conflict: bool = option(
        "Run", "Record whether a token's pair with itself works against the others.", False
    )
    save_every: int = option("Run", "Steps from one checkpoint to the next.", least=1)
    keep: int = option("Run", "Checkpoints that are kept.", 2, least=1)
    report_to: tuple[str, ...] = option("Run", "Other trackers, as transformers' Trainer names them.", ())

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            raise ExperimentError(f"preset: {self.preset!r:.60} is none of {', '.join(PRESETS)}")
        chosen, kinds = PRESETS[self.preset], get_type_hints(type(self))
        for one in fields(self):
            value = getattr(self, one.name)
            if value is PRESET:
                value = chosen.models.get(self.objective) if one.name == "model" else chosen.values[one.name]
            object.__setattr__(self, one.name, checked(one.name, value, kinds[one.name], one.metadata))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        micro, left = divmod(self.batch_size, self.accumulation)
        if left or not micro:
            raise ExperimentError(
                f"accumulation: {self.accumulation} micro-batches cannot share a batch_size of {self.batch_size} "
                "sequences equally; batch_size counts all sequences of a step"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ExperimentError(
                f"betas: {list(self.betas)}; expected two numbers from 0 and below 1, as 0.9 0.98"
            )
        if not self.data:
            raise ExperimentError("data: nothing is named; expected files, folders or a datasets id, or sotu")
        if self.momentum >= 1:
            raise ExperimentError(f"momentum: {self.momentum}; expected a number from 0 and below 1")
        if self.momentum and self.optimizer != "sgd":
            raise ExperimentError(
                f"momentum: {self.momentum} is for sgd, and optimizer is {self.optimizer}; see betas"
            )

    @property
    def model_config(self) -> dict[str, Any]:
        """Overrides of the model's config: the preset's, and over them `config`."""
        chosen = PRESETS[self.preset]
        return {**chosen.size, **chosen.config.get(self.model, {}), **self.config}

    def replace(self, **changes: Any) -> Experiment:
        """The experiment with some fields changed; what is as its preset has it follows a new preset or objective.

        `dataclasses.replace` keeps what the old ones had chosen: an encoder where a decoder is wanted.

        >>> Experiment(lr=1e-3).replace(objective="clm").model
        'modernbert-decoder'
        """
        bare = Experiment(preset=self.preset, objective=self.objective)
        values = {one.name: (getattr(self, one.name), one.default is PRESET) for one in fields(self)}
        kept = {
            n: value for n, (value, of_preset) in values.items() if not of_preset or value != getattr(bare, n)
        }
        return Experiment.from_dict({**kept, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and YAML have them, in the order of the fields."""
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        """An experiment of names and values; ExperimentError names the nearest field for one that is unknown."""
        known = {one.name for one in fields(cls)}
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name).replace("-", "_"), sorted(known), 1, 0.5)
                raise ExperimentError(
                    f"{name}: no such option; "
                    + (f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}")
                )
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path, **over: Any) -> Experiment:
        """The experiment of a YAML file, with some options given anew. ExperimentError names the file."""
        values = read_yaml(Path(path))
        try:
            return cls.from_dict({**values, **over})
        except ExperimentError as error:
            raise ExperimentError(f"{path}: {error}") from None

    def to_yaml(self) -> str:
        """All fields, one a line."""
        return "".join(f"{name}: {_yaml(value)}\n" for name, value in self.to_dict().items())

    def differences(self, other: Experiment) -> list[str]:
        """Names of the fields in which what is computed differs; not of how often it is saved or reported."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [name for name in mine if mine[name] != theirs[name] and name not in NOT_COMPUTED]


def _yaml(value: Any) -> str:
    """JSON, which is YAML but for the two halves in which it writes characters beyond U+FFFF."""

    def whole(halves: re.Match[str]) -> str:
        letter = json.loads(f'"{halves[0]}"')
        return f"\\U{ord(letter):08x}"

    return _HALVES.sub(whole, json.dumps(value))


def read_yaml(path: Path) -> dict[str, Any]:
    """The options of a YAML file; ExperimentError with file and line where it is none."""
    from qkform.training.strict_yaml import LARGEST, loaded

    try:
        with path.open("rb") as file:  # perhaps a pipe
            values = loaded(file.read(LARGEST + 1).decode("utf-8"), str(path))
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path}: not YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ExperimentError(f"{path}: expected options and their values, as in `objective: clm`")
    return values
