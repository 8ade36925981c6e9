"""Loading what surgery changed: every parameter comes from the file, and the model is the one that was saved."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qkform as qk
from qkform.errors import CheckpointError, SurgeryError
from qkform.surgery import collapse_, record

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*learned bias of position")  # of T5, see test_decouple

SMALL = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 20}
TEXT = {"vocab_size": 31, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS = torch.arange(1, 15).reshape(2, 7)


def bert(**settings: Any) -> Any:
    config = transformers.BertConfig(**SMALL, **TEXT, **NO_DROPOUT, **settings)
    return transformers.BertForMaskedLM(config)


def vit() -> Any:
    config = transformers.ViTConfig(**SMALL, **NO_DROPOUT, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=24,
        n_head=3,
        n_layer=2,
        n_positions=16,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        **TEXT,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(**{**SMALL, "num_attention_heads": 4}, num_key_value_heads=2, **TEXT)
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=24,
        d_kv=8,
        num_heads=3,
        d_ff=20,
        num_layers=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **TEXT,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    config = transformers.BartConfig(
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        max_position_embeddings=16,
        dropout=0.0,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        init_std=0.3,
        **TEXT,
    )
    return transformers.BartForConditionalGeneration(config)


def clip() -> Any:
    config = transformers.CLIPConfig(
        text_config={**SMALL, **TEXT, "max_position_embeddings": 16, "eos_token_id": 7},
        vision_config={**SMALL, "image_size": 8, "patch_size": 4},
        projection_dim=10,
    )
    return transformers.CLIPModel(config)


FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (bert, "AutoModelForMaskedLM"),
    "vit": (vit, "AutoModelForImageClassification"),
    "gpt2": (gpt2, "AutoModelForCausalLM"),
    "llama": (llama, "AutoModelForCausalLM"),
    "t5": (t5, "AutoModelForSeq2SeqLM"),
}


def called(model: Any) -> dict[str, Tensor]:
    kind, image = model.config.model_type, torch.arange(2 * 3 * 64.0).reshape(2, 3, 8, 8).sin()
    if kind == "vit":
        return {"pixel_values": image}
    more = {"pixel_values": image} if kind == "clip" else {"decoder_input_ids": TOKENS[:, :5]}
    return {"input_ids": TOKENS, **(more if kind in ("clip", "t5", "bart") else {})}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found = model.eval()(**called(model))
        out: Tensor = found.logits_per_image if model.config.model_type == "clip" else found.logits
    return out


def scores(model: Any) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if n.endswith("self_score.v")}


def decoupled(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = qk.surgery.decouple_(make().eval())
    with torch.no_grad():
        for value in scores(model).values():
            value.normal_()
    return model


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers warns of while the test runs."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            lines.append(entry.getMessage())

    logger, handler = logging.getLogger("transformers"), Keep(logging.WARNING)
    before = logger.level
    logger.setLevel(logging.WARNING)  # other tests silence it
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def same(one: Any, other: Any) -> None:
    """Both are one model: class, parameters, record and output."""
    assert type(one) is type(other)
    assert record.changes(one) == record.changes(other)
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert torch.equal(logits(one), logits(other))
    for mine, theirs in zip(*(hidden(model) for model in (one, other)), strict=True):
        assert torch.equal(mine, theirs)


def hidden(model: Any) -> tuple[Tensor, ...]:
    """What the model records of its layers: transformers finds that by the model's class."""
    with torch.no_grad():
        out = model(**called(model), output_hidden_states=True)
    found: tuple[Tensor, ...] = out.get("hidden_states") or out.decoder_hidden_states
    assert len(found) == 3
    return found


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the config in a folder, in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors in a folder, in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ---- the round trip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_is_the_same_model(family: str, tmp_path: Path, said: list[str]) -> None:
    make, auto = FAMILIES[family]
    model = decoupled(make)
    stock = qk.surgery.recouple_(copy.deepcopy(model))
    assert not torch.allclose(logits(stock), logits(model), atol=1e-3)
    shard = {"max_shard_size": "12KB"} if family == "llama" else {}
    model.save_pretrained(tmp_path / "one", **shard)
    assert (len(list((tmp_path / "one").glob("*.safetensors"))) > 2) == bool(shard)
    for model_class in (getattr(transformers, auto), type(model)):
        loaded = qk.surgery.from_pretrained(model_class, tmp_path / "one")
        same(loaded, model)
        assert not loaded.training
    assert said == []
    loaded.save_pretrained(tmp_path / "two", **shard)
    assert {p.name for p in (tmp_path / "one").iterdir()} == {p.name for p in (tmp_path / "two").iterdir()}
    tensors = [
        {n: t for f in (tmp_path / each).glob("*.safetensors") for n, t in load_file(f).items()}
        for each in ("one", "two")
    ]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    for file in (tmp_path / "one").iterdir():
        if shard and ".safetensors" in file.name:
            continue  # transformers deals its tensors into shards in an order that changes by itself
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    qk.surgery.recouple_(loaded)
    same(loaded, stock)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_type_is_that_asked_for(name: str, tmp_path: Path) -> None:
    model = decoupled(llama)
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, **{name: torch.bfloat16})
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    same(loaded, model.to(torch.bfloat16))


def test_a_type_that_was_saved_is_kept(tmp_path: Path) -> None:
    model = decoupled(bert).double()
    model.save_pretrained(tmp_path)
    same(qk.surgery.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path), model)


def test_a_device_map(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = decoupled(gpt2)
    model.save_pretrained(tmp_path)
    for place in ("cpu", {"": "cpu"}):
        same(
            qk.surgery.from_pretrained(
                transformers.GPT2LMHeadModel, tmp_path, device_map=place, low_cpu_mem_usage=True
            ),
            model,
        )


def test_the_model_is_built_on_the_meta_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is held twice: the structure is restored before there are any values."""
    from qkform.surgery import self_score

    model = decoupled(bert)
    model.save_pretrained(tmp_path)
    devices = []
    real = self_score.SelfScore.__init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        devices.append(self.v.device.type)

    monkeypatch.setattr(self_score.SelfScore, "__init__", build)
    same(qk.surgery.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path), model)
    assert devices == ["meta", "meta"]


def test_pickled_weights(tmp_path: Path) -> None:
    model = decoupled(bert)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    same(qk.surgery.from_pretrained(transformers.AutoModelForMaskedLM, tmp_path), model)


def test_a_state_dict_onto_a_decoupled_model(tmp_path: Path) -> None:
    for make in (vit, t5):
        model = decoupled(make)
        torch.save(model.state_dict(), tmp_path / "state.pt")
        other = qk.surgery.decouple_(make())
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        same(other, model)
        with pytest.raises(RuntimeError, match=r"Missing key.*self_score\.v"):
            other.load_state_dict(qk.surgery.recouple_(model).state_dict())


def test_loading_trains_on(tmp_path: Path) -> None:
    model = decoupled(gpt2)
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    losses = []
    for each in (model, loaded):
        optimizer = torch.optim.SGD(each.train().parameters(), 0.1)
        each(input_ids=TOKENS, labels=TOKENS).loss.backward()
        assert all(bool(v.grad.abs().sum() > 0) for v in scores(each).values())
        optimizer.step()
        losses.append(each(input_ids=TOKENS, labels=TOKENS).loss.item())
    assert losses[0] == losses[1]


def test_a_symmetric_start_and_a_self_score(tmp_path: Path, said: list[str]) -> None:
    model = llama().eval()
    qk.surgery.symmetrize_(model, arm="matched")
    qk.surgery.decouple_(model)
    assert [change["change"] for change in record.changes(model)] == ["symmetrize", "decouple"]
    model.save_pretrained(tmp_path)
    same(qk.surgery.from_pretrained(transformers.AutoModelForCausalLM, tmp_path), model)
    assert said == []


@pytest.mark.parametrize("kind", ["exclusive", "no-diagonal"])
def test_relatives_of_attention(kind: str, tmp_path: Path, said: list[str]) -> None:
    model = gpt2().eval()
    stock = logits(model)
    qk.surgery.set_attention_(model, kind)
    assert not torch.allclose(logits(model), stock, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    same(loaded, model)
    assert said == []
    assert torch.equal(logits(qk.surgery.set_attention_(loaded, "standard")), stock)


def test_split_weights_are_saved_whole(tmp_path: Path, said: list[str]) -> None:
    model = decoupled(gpt2)
    qk.surgery.param_groups(model, lr=0.1, qk_lr_ratio=4.0)
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    same(loaded, qk.surgery.unsplit_(model))
    assert said == []


# ---- into other classes ------------------------------------------------------------------------------------


def test_another_head_or_none(tmp_path: Path, said: list[str]) -> None:
    model = decoupled(bert)
    model.save_pretrained(tmp_path / "one")
    base = qk.surgery.from_pretrained(transformers.AutoModel, tmp_path / "one", add_pooling_layer=False)
    assert record.done(base, "decouple")["sites"] == [f"encoder.layer.{i}.attention.self" for i in (0, 1)]
    with torch.no_grad():
        hidden = base(TOKENS).last_hidden_state
        assert torch.equal(hidden, model.bert(TOKENS).last_hidden_state)
    said.clear()
    base.save_pretrained(tmp_path / "two")
    other = qk.surgery.from_pretrained(transformers.AutoModelForTokenClassification, tmp_path / "two")
    assert record.done(other, "decouple")["sites"] == [
        f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)
    ]
    with torch.no_grad():
        assert torch.equal(other.bert(TOKENS).last_hidden_state, hidden)
    assert "classifier.weight" in said[0]  # a genuine one stays
    assert "self_score" not in "".join(said)


def test_a_part_of_the_model(tmp_path: Path, said: list[str]) -> None:
    model = decoupled(t5)
    model.save_pretrained(tmp_path)
    encoder = qk.surgery.from_pretrained(transformers.T5EncoderModel, tmp_path)
    assert len(record.done(encoder, "decouple")["sites"]) == 2
    with torch.no_grad():
        assert torch.equal(encoder(TOKENS).last_hidden_state, model.encoder(TOKENS).last_hidden_state)
    assert "self_score" not in "".join(said)


def test_a_model_without_a_record_loads_as_it_is(tmp_path: Path, said: list[str]) -> None:
    model = bert().eval()
    model.save_pretrained(tmp_path)
    loaded, report = qk.surgery.from_pretrained(
        transformers.AutoModelForMaskedLM, tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert loaded.config._attn_implementation == "eager"
    model.set_attn_implementation("eager")
    same(loaded, model)
    assert not any(report.values())
    assert said == []


def test_transformers_alone_loads_a_standard_model_and_says_so(tmp_path: Path, said: list[str]) -> None:
    """What it does not know it leaves out, with a report; the record stays, and decouple_ asks about it."""
    model = decoupled(bert)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert "self_score.v" in said[0]
    assert "UNEXPECTED" in said[0]
    stock = qk.surgery.recouple_(copy.deepcopy(model))
    assert torch.equal(logits(loaded), logits(stock))
    with pytest.raises(SurgeryError, match=r"qkform\.surgery\.from_pretrained"):
        qk.surgery.decouple_(loaded)


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    class Own(transformers.BertForMaskedLM):  # type: ignore[name-defined, misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = -out.logits
            return out

    model = decoupled(bert)
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(Own, tmp_path)
    assert type(loaded) is Own
    assert torch.equal(logits(loaded), -logits(model))


def test_a_config_and_a_state_dict_of_ones_own(tmp_path: Path) -> None:
    model = decoupled(llama)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    same(qk.surgery.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, config=config), model)
    given = {"config": config, "state_dict": model.state_dict()}
    loaded = qk.surgery.from_pretrained(transformers.LlamaForCausalLM, None, **given)
    assert torch.equal(logits(loaded), logits(model))
    config.num_hidden_layers = 1  # the others are not there, as in transformers
    short = qk.surgery.from_pretrained(transformers.LlamaForCausalLM, tmp_path, config=config)
    assert record.done(short, "decouple")["sites"] == ["model.layers.0.self_attn"]


def test_generation(tmp_path: Path) -> None:
    for make in (llama, t5):
        model = decoupled(make)
        model.save_pretrained(tmp_path)
        loaded = qk.surgery.from_pretrained(type(model), tmp_path)
        given = {"inputs": TOKENS, "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(loaded.generate(**given), model.generate(**given))


# ---- what is refused ---------------------------------------------------------------------------------------


# ---- parts, wholes and twins -------------------------------------------------------------------------------


PARTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "bert": (bert, "BertForMaskedLM", "bert.encoder"),
    "gpt2": (gpt2, "GPT2LMHeadModel", "transformer"),
    "bart": (bart, "BartForConditionalGeneration", "model.encoder"),
    "bart decoder": (bart, "BartForConditionalGeneration", "model.decoder"),
    "clip": (clip, "CLIPModel", "vision_model"),
    "t5": (t5, "T5ForConditionalGeneration", "encoder"),
    "layer": (bert, "BertForMaskedLM", "bert.encoder.layer.1"),
}


def decouple(model: Any) -> Any:
    qk.surgery.decouple_(model)
    with torch.no_grad():
        for value in scores(model).values():
            value.normal_()
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "decouple": decouple,
    "exclusive": lambda model: qk.surgery.set_attention_(model, "exclusive"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_was_changed_is_found_in_the_whole(
    name: str, change: str, tmp_path: Path, said: list[str]
) -> None:
    make, kind, path = PARTS[name]
    torch.manual_seed(0)
    model = make().eval()
    stock = logits(model)
    CHANGES[change](model.get_submodule(path))
    out = logits(model)
    assert not torch.allclose(out, stock, atol=1e-4)
    model.save_pretrained(tmp_path)
    said.clear()
    loaded = qk.surgery.from_pretrained(getattr(transformers, kind), tmp_path)
    assert torch.equal(logits(loaded), out)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert said == []
    loaded.save_pretrained(tmp_path / "again")
    again = qk.surgery.from_pretrained(getattr(transformers, kind), tmp_path / "again")
    assert torch.equal(logits(again), out)


@pytest.mark.parametrize("of", ["BartEncoder", None])
def test_a_record_of_a_part_is_brought_to_the_whole_that_has_it(of: str | None, tmp_path: Path) -> None:
    model = bart()
    decouple(model.model.encoder)
    model.save_pretrained(tmp_path)

    def write(config: Any) -> None:
        change = config["qkform"]["changes"][0]
        assert change["of"] == "BartForConditionalGeneration"
        change["sites"] = [site.removeprefix("model.encoder.") for site in change["sites"]]
        change["of"] = of

    edit(tmp_path, write)
    if of is None:
        with pytest.raises(
            SurgeryError, match=r"model\.decoder, model\.encoder are such parts; write the path"
        ):
            qk.surgery.from_pretrained(transformers.BartForConditionalGeneration, tmp_path)
        return
    loaded = qk.surgery.from_pretrained(transformers.BartForConditionalGeneration, tmp_path)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_of_a_changed_model_is_saved_and_loaded_by_itself(change: str, tmp_path: Path) -> None:
    model = clip()
    CHANGES[change](model)
    model.save_pretrained(tmp_path / "whole")
    model.vision_model.save_pretrained(tmp_path / "part")
    image = called(model)["pixel_values"]
    with torch.no_grad():
        out = model.eval().vision_model(image).last_hidden_state
        for folder in ("whole", "part"):
            part = qk.surgery.from_pretrained(transformers.CLIPVisionModel, tmp_path / folder)
            assert torch.equal(part(image).last_hidden_state, out)
            assert len(record.changes(part)) == 1
    whole = qk.surgery.from_pretrained(transformers.CLIPModel, tmp_path / "whole")
    assert torch.equal(logits(whole), logits(model))
    assert [len(record.changes(m)) for m in (whole, whole.vision_model, whole.text_model)] == [1, 1, 1]


class Net(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(31, 2)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method`:DeprecationWarning"
)  # on import of torch's compiler
@pytest.mark.parametrize("wrap", [Net, nn.DataParallel, torch.compile], ids=lambda wrap: wrap.__name__)
def test_a_model_in_a_module_of_ones_own_has_the_record_in_its_config(
    change: str, wrap: Any, tmp_path: Path
) -> None:
    model = bert().eval()
    outer = wrap(model)
    if wrap is nn.DataParallel and change == "decouple":
        with pytest.raises(
            SurgeryError, match=r"wrapped by DataParallel.*decouple_.*before the model is wrapped"
        ):
            CHANGES[change](outer)
        assert record.changes(model) == []
        return
    assert CHANGES[change](outer) is outer
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.BertForMaskedLM, tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert record.changes(loaded)[0]["sites"] == [f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)]


def test_undoing_a_part_leaves_the_record_of_the_rest(tmp_path: Path) -> None:
    model = bert().eval()
    decouple(model)
    qk.surgery.recouple_(model.bert.encoder.layer[0])
    (change,) = record.changes(model)
    assert change["sites"] == ["bert.encoder.layer.1.attention.self"]
    assert change["normalised"] == [False]
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.BertForMaskedLM, tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    qk.surgery.recouple_(model)
    assert record.changes(model) == []
    layer = bert().bert.encoder.layer[0]
    both = nn.ModuleList([decouple(layer)])
    qk.surgery.recouple_(both)
    assert not hasattr(layer, "qkform")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_models_made_from_one_config_change_one_by_one(change: str, part: bool, tmp_path: Path) -> None:
    one = bert(attn_implementation="eager").eval()
    config = one.config
    other, text = transformers.BertForMaskedLM(config).eval(), config.to_json_string()
    before = logits(other)
    CHANGES[change](one.bert if part else one)
    assert other.config is config
    assert config.to_json_string() == text
    assert config._attn_implementation == "eager"
    assert torch.equal(logits(other), before)
    configs = {id(m.config) for m in one.modules() if hasattr(m, "config")}
    assert configs == {id(one.config)}
    assert len(record.changes(one)) == 1
    CHANGES[change](other)
    assert not torch.allclose(logits(other), before, atol=1e-4)
    one.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(transformers.BertForMaskedLM, tmp_path)
    assert torch.equal(logits(loaded), logits(one))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoupled(bert).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, **options: Any) -> Any:
    return qk.surgery.from_pretrained(transformers.AutoModelForMaskedLM, folder, **options)


def test_a_newer_record(folder: Path) -> None:
    edit(folder, lambda config: config["qkform"].update(version=2))
    with pytest.raises(SurgeryError, match=rf"^{folder}: .*version 2; this qkform knows 1: upgrade"):
        load(folder)


@pytest.mark.parametrize(
    "found",
    [{"version": 2, "changes": []}, {"version": True, "changes": []}, {"version": 1, "changes": ["x"]}],
    ids=str,
)
def test_a_record_that_cannot_be_added_to_is_read_before_anything_is_changed(found: Any) -> None:
    model = bert().eval()
    before = logits(model)
    model.config.qkform = found
    for change in (*CHANGES.values(), collapse_):
        with pytest.raises(SurgeryError, match="record of surgery has"):
            change(model)
        assert torch.equal(logits(model), before)
        assert list(model.state_dict()) == list(bert().state_dict())


MALFORMED: list[Any] = [
    "x",
    1,
    None,
    {"sites": []},
    {"change": []},
    {"change": "decouple", "sites": "x"},
    {"change": "decouple", "sites": [1]},
    {"change": "set_attention", "kind": ["x"], "sites": ["a"]},
    {"change": "decouple", "sites": [], "normalised": 3},
    {"change": "decouple", "model": "x"},
]


@pytest.mark.parametrize("change", MALFORMED, ids=str)
def test_a_malformed_change(folder: Path, change: Any) -> None:
    edit(folder, lambda config: config["qkform"].update(changes=[change]))
    with pytest.raises(SurgeryError, match="record of surgery"):
        load(folder)


def test_an_unknown_change(folder: Path) -> None:
    edit(folder, lambda config: config["qkform"]["changes"].append({"change": "transmute"}))
    with pytest.raises(
        SurgeryError, match=r"has the change 'transmute'; known: .*decouple, .*upgrade qkform"
    ):
        load(folder)


def test_a_record_that_is_none(folder: Path) -> None:
    edit(folder, lambda config: config.update(qkform="yes"))
    with pytest.raises(SurgeryError, match=r"config.qkform is 'yes'; expected a record of surgery"):
        load(folder)


def test_a_record_of_another_model(folder: Path) -> None:
    edit(folder, lambda config: config["qkform"]["changes"][0].update(sites=["h.0.attn"]))
    with pytest.raises(SurgeryError, match=r"says that h\.0\.attn was decoupled; .* bert\.encoder\.layer\.0"):
        load(folder)


def test_a_missing_v(folder: Path) -> None:
    name = "bert.encoder.layer.1.attention.self.self_score.v"
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"^{folder}: the files have no {name}, which the record"):
        load(folder)


@pytest.mark.parametrize("ignore", [False, True])
def test_a_v_of_another_shape(folder: Path, ignore: bool) -> None:
    name = "bert.encoder.layer.1.attention.self.self_score.v"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(2, 24)}))
    with pytest.raises(CheckpointError, match=rf"{name}: \(2, 24\) in the files, \(3, 24\) expected"):
        load(folder, ignore_mismatched_sizes=ignore)


UNSOUND: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "int64": (lambda v: torch.ones_like(v, dtype=torch.int64), "holds int64"),
    "bool": (lambda v: v > 0, "holds bool"),
    "complex": (lambda v: v.to(torch.complex64), "holds complex64"),
    "nan": (lambda v: v.index_fill(0, torch.tensor(1), float("nan")), "has 24 of 72 numbers that are NaN"),
    "infinite": (lambda v: v / 0, "has 72 of 72 numbers that are NaN or infinite"),
}


@pytest.mark.parametrize(
    ("kind", "filed"),
    [*((kind, "safetensors") for kind in UNSOUND), ("int64", "bin"), ("nan", "bin"), ("int64", "state dict")],
)
def test_a_v_that_is_no_finite_floats(kind: str, filed: str, folder: Path) -> None:
    name = "bert.encoder.layer.1.attention.self.self_score.v"
    change, said = UNSOUND[kind]
    rewrite(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    options: dict[str, Any] = {}
    file = folder / "model.safetensors"
    if filed != "safetensors":
        tensors = load_file(file)
        file.unlink()
        if filed == "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            options = {"state_dict": tensors, "config": transformers.AutoConfig.from_pretrained(folder)}
    with pytest.raises(CheckpointError, match=rf"{name} {said}.*; expected finite floating-point numbers"):
        qk.surgery.from_pretrained(transformers.BertForMaskedLM, None if options else folder, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_v_of_another_floating_type(dtype: torch.dtype, folder: Path) -> None:
    name = "bert.encoder.layer.1.attention.self.self_score.v"
    before = load(folder).get_parameter(name)
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert torch.equal(load(folder).get_parameter(name), before.to(dtype).float())


def test_another_tensor_of_another_shape(folder: Path) -> None:
    name = "bert.encoder.layer.1.output.dense.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(24, 21)}))
    with pytest.raises(CheckpointError, match=rf"{name}: \(24, 21\) in the files, \(24, 20\) expected"):
        load(folder)
    assert load(folder, ignore_mismatched_sizes=True).get_parameter(name).shape == (24, 20)


def test_a_self_score_without_a_record(folder: Path) -> None:
    edit(folder, lambda config: config.pop("qkform"))
    with pytest.raises(
        CheckpointError, match=r"layer\.0\.attention\.self\.self_score\.v.* records no attention"
    ):
        load(folder)


@pytest.mark.parametrize("name", ["self_score.v", "bert.encoder.layer.7.attention.self.self_score.v"])
def test_a_self_score_of_no_attention(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3, 24)}))
    with pytest.raises(
        CheckpointError, match=rf"the files have {name}, and config.qkform records no attention"
    ):
        load(folder)


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_a_damaged_file(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"^{file}: cannot be read as safetensors"):
        load(folder)


def test_custom_code_that_an_auto_class_fetches(folder: Path) -> None:
    class Fetching(transformers.AutoModelForMaskedLM):  # type: ignore[name-defined, misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return transformers.BertForMaskedLM.from_pretrained(*args, **kwargs)

    with pytest.raises(SurgeryError, match=r"BertForMaskedLM, is custom code .* pass the class itself"):
        qk.surgery.from_pretrained(Fetching, folder)
    edit(folder, lambda config: config.pop("qkform"))
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "self_score" in name])
    assert type(qk.surgery.from_pretrained(Fetching, folder)) is transformers.BertForMaskedLM


def test_what_is_no_model_class(folder: Path) -> None:
    for wrong in (nn.Linear, "bert", transformers.AutoConfig):
        with pytest.raises(
            SurgeryError, match="is no model class; expected one of transformers, or an Auto class"
        ):
            qk.surgery.from_pretrained(wrong, folder)
