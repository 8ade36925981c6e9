"""A new model from the config of a changed one: the same changes, made anew from its own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qkform as qk
from qkform.errors import SurgeryError
from qkform.surgery import record

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(2, 16).reshape(2, 7)
SMALL = {"vocab_size": 31, "num_hidden_layers": 2, "intermediate_size": 20, "pad_token_id": 0}


def bert() -> Any:
    config = transformers.BertConfig(
        **SMALL, hidden_size=24, num_attention_heads=3, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        **SMALL, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.LlamaForCausalLM(config)


def started(model: Any) -> Any:
    qk.surgery.symmetrize_(model, arm="orthogonal", seed=5)
    return qk.surgery.decouple_(model, init="spread", seed=3)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "symmetrized and decoupled": started,
    "decoupled": qk.surgery.decouple_,
    "exclusive": lambda model: qk.surgery.set_attention_(model, "exclusive"),
    "one layer": lambda model: qk.surgery.decouple_(model.base_model.get_submodule(LAYER[type(model).__name__])),
}  # fmt: skip
LAYER = {"BertForMaskedLM": "encoder.layer.1", "LlamaForCausalLM": "layers.1"}
AUTO = {bert: "AutoModelForMaskedLM", llama: "AutoModelForCausalLM"}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", AUTO, ids=lambda make: make.__name__)
def test_the_changes_are_made_anew(make: Any, change: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    CHANGES[change](model)
    model.save_pretrained(tmp_path)
    filed = transformers.AutoConfig.from_pretrained(tmp_path)
    for kind, config in ((getattr(transformers, AUTO[make]), filed), (type(model), model.config)):
        torch.manual_seed(0)  # the same weights as the first: so all of it is the same
        new = qk.surgery.from_config(kind, config)
        assert type(new) is type(model)
        assert new.config is not config
        assert record.changes(new) == record.changes(model)
        assert list(new.state_dict()) == list(model.state_dict())
        for name, value in new.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name
        assert torch.equal(logits(new), logits(model))


def test_transformers_alone_builds_the_standard_model_and_says_nothing() -> None:
    """The trap that `from_config` is for."""
    torch.manual_seed(0)
    model = qk.surgery.decouple_(bert(), init="spread")
    torch.manual_seed(0)
    silent = transformers.AutoModelForMaskedLM.from_config(copy.deepcopy(model.config))
    assert record.changes(silent) == record.changes(model)
    assert not any("self_score" in name for name in silent.state_dict())
    assert torch.equal(logits(silent), logits(qk.surgery.recouple_(model)))


def test_the_new_model_is_undone_to_the_implementation_asked_for() -> None:
    model = qk.surgery.decouple_(bert())
    new = qk.surgery.from_config(type(model), model.config, attn_implementation="eager", dtype=torch.float64)
    assert {p.dtype for p in new.parameters()} == {torch.float64}
    qk.surgery.recouple_(new)
    assert new.config._attn_implementation == "eager"
    assert not hasattr(new.config, "qkform")
    assert len(record.changes(model)) == 1


def test_a_config_without_a_record_builds_the_standard_model() -> None:
    torch.manual_seed(0)
    model = bert()
    torch.manual_seed(0)
    new = qk.surgery.from_config(transformers.AutoModelForMaskedLM, model.config)
    assert torch.equal(logits(new), logits(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": "fit"}, r"fitted to a batch.*'diagonal', 'zero' or 'spread'.*from_pretrained"),
        ({"init": "diagnoal"}, r"init='diagnoal'"),
        ({"sites": ["h.0.attn"]}, r"says that h\.0\.attn was decoupled"),
    ],
)
def test_a_record_that_cannot_be_made_anew(change: dict[str, Any], message: str) -> None:
    model = qk.surgery.decouple_(bert())
    model.config.qkform["changes"][0] |= change
    with pytest.raises(SurgeryError, match=message):
        qk.surgery.from_config(transformers.AutoModelForMaskedLM, model.config)


def test_what_is_no_model_class_and_what_is_no_config() -> None:
    with pytest.raises(SurgeryError, match="is no model class"):
        qk.surgery.from_config(torch.nn.Linear, transformers.BertConfig())
    with pytest.raises(SurgeryError, match=r"config is 'folder'; .*AutoConfig\.from_pretrained"):
        qk.surgery.from_config(transformers.AutoModelForMaskedLM, "folder")
