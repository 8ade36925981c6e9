"""The model of an experiment: built from its config with the seed's weights, and changed as the experiment says."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qkform.errors import ExperimentError, QKFormError
from qkform.training.data import special_ids
from qkform.training.experiment import Experiment
from qkform.training.presets import PRESETS

_SPECIAL = tuple(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep", "mask"))
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


def build_model(experiment: Experiment, tokenizer: Any) -> Any:
    """The model at step 0, on the CPU in float32, in train mode: a function of the experiment and the tokenizer.

    The vocabulary and the special tokens are the tokenizer's. Changes are made in this order: the init arm, then the
    attention. Learning rates of their own are the optimizer's matter (`qkform.training.engine`). torch's random state
    is left as it was.

    ExperimentError for a model type that transformers does not have, or not for this objective, for overrides its
    config does not know, and for sequences or a vocabulary it has no room for; SurgeryError for a change it cannot
    take.
    """
    config = model_config(experiment, tokenizer)
    with _seeded(experiment.seed):
        try:
            model = model_class(experiment, config).from_config(config)
        except QKFormError:
            raise
        except Exception as error:  # whatever a model class thinks of its config
            raise ExperimentError(f"config: no {experiment.model} can be built: {error}") from error
    if (
        tokenizer.pad_token_id is None
    ):  # its place was given to a token of the text, which is to be learnt like any
        model.get_input_embeddings().padding_idx = None
    change_(model, experiment)
    return model.train()


def change_(model: Any, experiment: Experiment) -> None:
    """Make the changes of the experiment in a model, in place."""
    from qkform import surgery

    if experiment.init != "standard":
        surgery.symmetrize_(model, arm=experiment.init, seed=experiment.seed)
    if experiment.attention == "decoupled":
        surgery.decouple_(model, init=experiment.self_score_init, seed=experiment.seed)
    elif experiment.attention != "standard":
        surgery.set_attention_(model, experiment.attention)


def model_config(experiment: Experiment, tokenizer: Any) -> Any:
    """The config of transformers that the experiment describes; without a tokenizer, to see whether there is one."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = experiment.model
    if kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(kind, list(CONFIG_MAPPING), 3)
        raise ExperimentError(
            f"model: transformers has no model type {kind!r:.60}"
            + (f"; did you mean {' or '.join(close)}?" if close else "")
        )
    overrides = _overrides(experiment, CONFIG_MAPPING[kind])
    values: dict[str, Any] = {}
    if tokenizer is not None:
        found = special_ids(tokenizer)
        values = {name: _absent(CONFIG_MAPPING[kind], name) for name in _SPECIAL if name not in found} | found
    if experiment.objective == "clm" and hasattr(CONFIG_MAPPING[kind](), "is_decoder"):
        values["is_decoder"] = True
    try:
        config = AutoConfig.for_model(kind, **{**values, **overrides})
    except Exception as error:  # a class of its own for every kind of wrong value
        raise ExperimentError(f"config: {' '.join(str(error).split())}") from error
    for name in _DROPOUTS:
        if hasattr(config, name) and name not in experiment.config:
            setattr(config, name, 0.0)
    _refuse_small(experiment, config, tokenizer)
    return config


def _absent(config_class: Any, name: str) -> int | None:
    """What stands for a special token that the tokenizer does not have: None, or 0 where the config insists on one."""
    try:
        config_class(**{name: None})
    except Exception:  # a class of its own for every kind of wrong value
        return 0
    return None


def check(experiment: Experiment) -> None:
    """What can be said of the model before there is any data: ExperimentError as from `build_model`."""
    model_class(experiment, model_config(experiment, None))


def model_class(experiment: Experiment, config: Any) -> Any:
    """The Auto class of transformers for the objective; ExperimentError where it has no model of this type."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    classes: Mapping[str, Any] = {"mlm": AutoModelForMaskedLM, "clm": AutoModelForCausalLM}
    auto = classes[experiment.objective]
    if type(config) not in auto._model_mapping:
        other = next((name for name, one in classes.items() if type(config) in one._model_mapping), None)
        likely = next(
            (m for p in PRESETS.values() for o, m in p.models.items() if o == experiment.objective), None
        )
        remedy = f"it has one for {other}; " if other else ""
        raise ExperimentError(
            f"model: transformers has no {experiment.objective} model of type {experiment.model!r}; {remedy}"
            f"{likely!r} would work"
        )
    return auto


def _overrides(experiment: Experiment, config_class: Any) -> dict[str, Any]:
    """What the config of this type knows of the preset's sizes, and `config`; ExperimentError if it knows not all."""
    standard = config_class()
    ours = {name for preset in PRESETS.values() for name in preset.config.get(experiment.model, {})}
    known = ours | {name for name in dir(standard) if not name.startswith("_")}
    known |= set(getattr(config_class, "attribute_map", {}))
    for name in experiment.config:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1, 0.5)
            raise ExperimentError(
                f"config: a {experiment.model} has no {name!r}"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    native = getattr(
        config_class, "attribute_map", {}
    )  # hidden_size -> n_embd: one name, so that `config` wins
    given = {name: value for name, value in experiment.model_config.items() if name in known}
    return {native.get(name, name): value for name, value in given.items()}


def _refuse_small(experiment: Experiment, config: Any, tokenizer: Any) -> None:
    room = getattr(config, "max_position_embeddings", None)
    if isinstance(room, int) and experiment.seq_len > room:
        raise ExperimentError(
            f"seq_len: {experiment.seq_len}, and max_position_embeddings of the model is {room}; give shorter "
            f"sequences, or config max_position_embeddings={experiment.seq_len}"
        )
    if tokenizer is not None and config.vocab_size < len(tokenizer):
        raise ExperimentError(
            f"config: vocab_size is {config.vocab_size}, and the tokenizer has {len(tokenizer)} tokens; leave "
            "vocab_size away and it will fit, or name the tokenizer that the model is for"
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
