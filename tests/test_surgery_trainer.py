"""A changed model in transformers' own Trainer: killed and resumed it is the model of an unbroken run, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import qkform as qk
from qkform.surgery import record
from qkform.surgery.split import is_split

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, KILLED = 4, 2


class Killed(RuntimeError):
    pass


class Kill(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the run as a signal would: in the middle of a step after a checkpoint was written."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == KILLED + 1:
            raise Killed


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=24, n_layer=2, n_head=3, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.1,
        embd_pdrop=0.1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def changed(seed: int) -> Any:
    model = gpt2(seed)
    qk.surgery.symmetrize_(model, seed=seed)
    return qk.surgery.decouple_(model, init="spread", seed=seed)


def trainer(folder: Path, *callbacks: Any, seed: int = 0) -> Any:
    model = changed(seed)
    groups = qk.surgery.param_groups(model, lr=3e-3, qk_lr_ratio=4.0, weight_decay=0.01)
    args = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=KILLED, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], disable_tqdm=True, seed=7, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    tokens = torch.arange(2 * STEPS * 9).reshape(2 * STEPS, 9) * 7 % 31
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(
        model, args, train_dataset=rows, optimizers=(torch.optim.AdamW(groups), None), callbacks=[*callbacks]
    )


def test_killed_and_resumed_it_is_the_model_of_an_unbroken_run(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    killed = trainer(tmp_path / "killed", Kill())
    with pytest.raises(Killed):
        killed.train()
    resumed = trainer(tmp_path / "killed", seed=1)  # other weights, that are not to be seen again
    resumed.train(resume_from_checkpoint=True)
    assert any(is_split(module) for module in resumed.model.modules())
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name

    # The rates of each group went their way, v learned, and Q and K at four times the rate.
    rates = {group["name"]: group["lr"] for group in resumed.optimizer.param_groups}
    assert rates["qk/decay"] == 4 * rates["rest/decay"]
    scores = [name for name in found if name.endswith("self_score.v")]
    assert len(scores) == 2
    start = changed(0).state_dict()
    assert not any(torch.equal(found[name], start[name]) for name in scores)

    # Files have the stock names and v, nothing of the split.
    filed = load_file(tmp_path / "killed" / f"checkpoint-{STEPS}" / "model.safetensors")
    stock = set(gpt2(0).state_dict()) - {"lm_head.weight"}
    assert set(filed) == stock | set(scores)

    # And the last checkpoint is a folder that surgery loads.
    loaded = qk.surgery.from_pretrained(
        transformers.AutoModelForCausalLM, tmp_path / "killed" / f"checkpoint-{STEPS}"
    )
    assert [entry["change"] for entry in record.changes(loaded)] == ["symmetrize", "decouple"]
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, resumed.model.eval()(tokens).logits)
