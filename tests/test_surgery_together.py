"""Two changes of one model: the function is what both documents say, or the second is refused and changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkform.errors import AttentionError, SurgeryError
from qkform.surgery import (
    CircuitAttention,
    collapse_,
    decouple_,
    factorize_,
    param_groups,
    record,
    recouple_,
    set_attention_,
    symmetrize_,
    unsplit_,
)

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(1, 15).reshape(2, 7)
INPUT = torch.arange(2 * 7 * 24.0).reshape(2, 7, 24).sin()


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    text = {
        "vocab_size": 31,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    made: Any
    if name == "bert":
        small = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 20}
        made = transformers.BertForMaskedLM(
            transformers.BertConfig(
                **small, **text, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            )
        )
    elif name == "gpt2":
        quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=24, n_head=3, n_layer=2, n_positions=16, **text, **quiet)
        )
    else:
        layer = nn.TransformerEncoderLayer(24, 4, 20, dropout=0.0, batch_first=True)
        made = nn.TransformerEncoder(layer, 2)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    for parameter_name, parameter in made.named_parameters():
        if "bias" in parameter_name:
            nn.init.normal_(parameter, std=0.3)
    return made.double().eval()


def computed(model: Any) -> Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        if isinstance(model, nn.TransformerEncoder):
            padding = torch.arange(7) >= torch.tensor([7, 4])[:, None]
            # Rows of padding are zeros on the nested path alone.
            out: Tensor = model(INPUT.double(), src_key_padding_mask=padding)[~padding]
            return out
        mask = torch.ones_like(TOKENS)
        mask[1, 4:] = 0
        found: Tensor = model(TOKENS, attention_mask=mask).logits[mask.bool()]
        return found


CHANGES: dict[str, Callable[[Any], Any]] = {
    "symmetrize": symmetrize_,
    "decouple": decouple_,
    "exclusive": lambda model: set_attention_(model, "exclusive"),
    "collapse": collapse_,
    "split": lambda model: param_groups(model, lr=1e-3, qk_lr_ratio=2.0),
}
# Those that change the function, in the order in which they do what their documents say.
ORDER = ("symmetrize", "decouple", "exclusive")
# first -> the second ones that are refused; and after a split where there is a fused weight to split
REFUSED = {
    "symmetrize": {"symmetrize"},
    "decouple": {"symmetrize", "decouple", "exclusive", "collapse"},
    "exclusive": {"decouple", "collapse"},
    "collapse": {"symmetrize", "decouple", "exclusive", "collapse"},
    "split": set(),
}
SPLIT = {"bert": set(), "gpt2": {"symmetrize", "collapse"}, "encoder": set(CHANGES) - {"split"}}


@pytest.mark.parametrize("second", CHANGES)
@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("name", ["bert", "gpt2", "encoder"])
def test_the_function_is_what_both_say_or_nothing_is_changed(name: str, first: str, second: str) -> None:
    model = model_of(name)
    CHANGES[first](model)
    before, keys, changes = computed(model), list(model.state_dict()), record.changes(model)
    if second in (SPLIT[name] if first == "split" else REFUSED[first]):
        with pytest.raises(SurgeryError, match=r"already|is decoupled|exclusive|collapsed|split|parametri"):
            CHANGES[second](model)
        assert torch.equal(computed(model), before)
        assert list(model.state_dict()) == keys
        assert record.changes(model) == changes
        return
    CHANGES[second](model)
    expected = model_of(name)
    for change in ORDER:
        if change in {first, second}:
            CHANGES[change](expected)
    torch.testing.assert_close(computed(model), computed(expected), rtol=0, atol=1e-9)


def test_undone_in_turn_everything_is_as_it_was() -> None:
    model, stock = model_of("encoder"), model_of("encoder")
    assert model.use_nested_tensor
    for do, undo in ((decouple_, recouple_), (collapse_, factorize_), (CHANGES["split"], unsplit_)):
        do(model)
        assert model.use_nested_tensor is (do is CHANGES["split"])
        undo(model)
        assert model.use_nested_tensor
        torch.testing.assert_close(computed(model), computed(stock), rtol=0, atol=1e-9)
    assert {k: v for k, v in vars(model).items() if not k.startswith("_")}.keys() == {
        k: v for k, v in vars(stock).items() if not k.startswith("_")
    }.keys()


def test_attentions_with_a_forward_of_their_own_are_not_collapsed() -> None:
    class Own(nn.MultiheadAttention):  # type: ignore[misc]
        def forward(self, *given: Any, **more: Any) -> Any:
            return super().forward(*given, **more)

    with pytest.raises(SurgeryError, match="Own with a forward of its own"):
        collapse_(nn.ModuleList([Own(8, 2)]))


class Wrapped(nn.Module):  # type: ignore[misc]
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_changes_of_parameters_come_before_wrapping() -> None:
    wrapper = type("DistributedDataParallel", (Wrapped,), {})
    for change in (decouple_, collapse_, CHANGES["split"]):
        model = model_of("gpt2")
        keys = list(model.state_dict())
        with pytest.raises(
            SurgeryError, match=r"wrapped .*before it is wrapped|wrapped by Dist.*before the model is"
        ):
            change(wrapper(model))
        assert list(model.state_dict()) == keys
        assert record.changes(model) == []
    for done, undo in ((decouple_, recouple_), (collapse_, factorize_)):
        model = model_of("gpt2")
        done(model)
        with pytest.raises(
            SurgeryError, match=rf"wrapped by DistributedDataParallel.* {undo.__name__} makes or takes"
        ):
            undo(wrapper(model))
        undo(model)
    for change in (symmetrize_, CHANGES["exclusive"]):  # which leave the parameters where they are
        model = model_of("gpt2")
        change(wrapper(model))
        assert len(record.changes(model)) == 1


def test_data_parallel_training_of_a_changed_model() -> None:
    """One process of gloo: gradients of v are reduced, and a change of the wrapped model is refused."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = model_of("encoder").train()
        ddp = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(SurgeryError, match="wrapped by DistributedDataParallel"):
            decouple_(ddp)
        decouple_(model)
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp(INPUT.double()).square().sum().backward()
        assert bool(model.layers[0].self_attn.self_score.v.grad.any())
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "encoder"])
def test_a_compiled_model_is_compiled_anew_after_a_change(name: str) -> None:
    model = model_of(name)
    compiled = torch.compile(model, backend="eager")
    before = computed(model)
    given = INPUT.double() if name == "encoder" else TOKENS

    def called(module: Any) -> Tensor:
        with torch.no_grad():
            out = module(given)
        return out if isinstance(out, Tensor) else out.logits

    stock = called(compiled)
    for change, undo in (
        (decouple_, recouple_),
        (CHANGES["exclusive"], lambda m: set_attention_(m, "standard")),
        (collapse_, factorize_),
    ):
        change(compiled)
        torch.testing.assert_close(called(compiled), called(model), rtol=0, atol=1e-9)
        if change is not collapse_:
            assert not torch.allclose(called(compiled), stock, atol=1e-3)
        undo(compiled)
        torch.testing.assert_close(called(compiled), stock, rtol=0, atol=1e-9)
    torch.testing.assert_close(computed(model), before, rtol=0, atol=1e-9)


def test_masks_that_do_not_fit_a_circuit_attention_are_refused() -> None:
    attention, x = CircuitAttention(8, 2), torch.randn(4, 5, 8)
    wrong: list[dict[str, Tensor]] = [
        {"attn_mask": torch.zeros(4, 5, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(5, 5, dtype=torch.long)},
        {"key_padding_mask": torch.zeros(5, 4, dtype=torch.bool)},
        {"key_padding_mask": torch.zeros(4, 5, dtype=torch.long)},
    ]
    for given in wrong:
        with pytest.raises(AttentionError, match=next(iter(given))):
            attention(x, **given)
    for mask in (torch.zeros(8, 5, 5), torch.zeros(5, 5), torch.zeros(4, 2, 5, 5), torch.zeros(1, 1, 5, 5)):
        torch.testing.assert_close(attention(x, attn_mask=mask)[0], attention(x)[0])
    for sizes in ((0, 1), (16, 0)):
        with pytest.raises(SurgeryError, match="expected a number from 1"):
            CircuitAttention(*sizes)
    for options, reason in (
        ({"d_head": -1}, "d_head is -1"),
        ({"d_head": 0}, "d_head is 0"),
        ({"dropout": 2.0}, "dropout"),
    ):
        with pytest.raises(SurgeryError, match=reason):
            CircuitAttention(8, 2, **options)
