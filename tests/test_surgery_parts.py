"""Parts of one model, changed one after the other: each is recorded at its own place, and all of them load."""

from __future__ import annotations

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
SITES = {part: [f"model.{part}.layers.{i}.self_attn" for i in (0, 1)] for part in ("encoder", "decoder")}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "collapse": qk.surgery.collapse_,
    "decouple": lambda part: qk.surgery.decouple_(part, init="spread"),
    "set_attention": lambda part: qk.surgery.set_attention_(part, "exclusive"),
    "symmetrize": qk.surgery.symmetrize_,
}
# The last is not undone: it is a start.
UNDONE: dict[str, Callable[[Any], Any]] = {
    "collapse": qk.surgery.factorize_,
    "decouple": qk.surgery.recouple_,
    "set_attention": lambda part: qk.surgery.set_attention_(part, "standard"),
}


def bart() -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        vocab_size=31,
        max_position_embeddings=16,
        dropout=0.0,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config).eval()


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=20
    )
    return transformers.BertModel(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS, decoder_input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_one_part_after_the_other(change: str, tmp_path: Path) -> None:
    model = bart()
    for part in ("encoder", "decoder"):
        CHANGES[change](getattr(model.model, part))
    first, second = record.changes(model)
    assert (first["change"], first["sites"]) == (change, SITES["encoder"])
    assert (second["change"], second["sites"]) == (change, SITES["decoder"])
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.BartForConditionalGeneration, tmp_path)
    assert record.changes(loaded) == record.changes(model)
    assert torch.equal(logits(loaded), logits(model))
    rates = {g["name"]: g["lr"] for g in qk.surgery.param_groups(loaded, lr=1.0)}
    assert {"qk/decay", "ov/decay"} <= set(rates)
    if change in UNDONE:
        UNDONE[change](loaded.model.encoder)
        assert record.changes(loaded) == [second]


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_alone_is_built_again_alone(change: str, tmp_path: Path) -> None:
    model = bart()
    stock = set(model.state_dict())
    CHANGES[change](model.model.decoder)
    (entry,) = record.changes(model)
    assert entry["sites"] == SITES["decoder"]
    assert not any("encoder.layers" in name for name in set(model.state_dict()) - stock)
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.BartForConditionalGeneration, tmp_path)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("change", ["decouple", "symmetrize"])
def test_a_part_is_not_changed_twice(change: str) -> None:
    model = bart()
    CHANGES[change](model.model.decoder)
    for again in (model.model.decoder, model):
        with pytest.raises(SurgeryError, match=r"already"):
            CHANGES[change](again)
    assert len(record.changes(model)) == 1


def test_what_was_collapsed_in_the_whole_is_factorized_in_a_part() -> None:
    model = bart()
    before = logits(model)
    qk.surgery.collapse_(model)
    qk.surgery.factorize_(model.model.decoder)
    (entry,) = record.changes(model)
    assert entry["sites"] == SITES["encoder"]
    assert (logits(model) - before).abs().max() < 1e-5
    qk.surgery.factorize_(model)
    assert record.changes(model) == []
    attention = model.model.encoder.layers[0].self_attn
    qk.surgery.collapse_(attention)
    qk.surgery.factorize_(model)
    qk.surgery.collapse_(model)
    qk.surgery.factorize_(attention)
    assert record.changes(model)[0]["sites"] == [*SITES["encoder"][1:], *SITES["decoder"]]
    qk.surgery.factorize_(model)
    assert (logits(model) - before).abs().max() < 1e-5
    assert list(model.state_dict()) == list(bart().state_dict())


def test_a_record_of_collapse_that_names_no_attention(tmp_path: Path) -> None:
    model = bart()
    qk.surgery.collapse_(model.model.decoder)
    model.config.qkform["changes"][0]["sites"] = ["model.decoder.layers.7.self_attn"]
    model.save_pretrained(tmp_path)
    with pytest.raises(SurgeryError, match=r"says that model\.decoder\.layers\.7\.self_attn was collapsed"):
        qk.surgery.from_pretrained(transformers.BartForConditionalGeneration, tmp_path)


def test_factorize_needs_what_was_collapsed_together() -> None:
    """BERT has its output projection beside the attention, not in it."""
    model = qk.surgery.collapse_(bert())
    with pytest.raises(SurgeryError, match=r"together with output\.dense, which is not in"):
        qk.surgery.factorize_(model.encoder.layer[0].attention.self)
    qk.surgery.factorize_(model.encoder.layer[0].attention)


def test_a_record_of_collapse_without_sites_is_of_the_whole_model(tmp_path: Path) -> None:
    """As records were before they named what was collapsed."""
    model = qk.surgery.collapse_(bert())
    del model.config.qkform["changes"][0]["sites"]
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.BertModel, tmp_path)
    assert list(loaded.state_dict()) == list(model.state_dict())
