"""Decoupled attention: fused kernels give what the definition says, outputs and gradients, on every road to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from qkform.attention import decoupled_attention, masks, parts
from qkform.errors import AttentionError
from tests.attention_cases import MASKS, SHAPES, B, arguments, distance, mask_of, with_gradients

EVERY = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both(inputs: list[Tensor], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    flash, reference = (
        with_gradients(decoupled_attention, inputs, enable_gqa=True, impl=impl, **options)
        for impl in ("flash", "reference")
    )
    return flash, reference


# ---- flash is the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_is_the_reference(shape: str, mask: str, is_causal: bool) -> None:
    sizes = SHAPES[shape]
    given = mask_of(mask, sizes)
    for d in (3, 16):
        inputs = arguments(sizes, d)
        flash, reference = both(inputs, attn_mask=given, is_causal=is_causal)
        assert distance(flash, reference) < 1e-12
        inputs[3][..., ::2] = -math.inf  # no self key for every second token
        flash, reference = both(inputs, attn_mask=given, is_causal=is_causal)
        assert distance(flash, reference) < 1e-12


@pytest.mark.parametrize("mask", ["none", "left", "right"])
@pytest.mark.parametrize("shape", ["two tokens", "odd", "grouped", "some steps of a cache"])
def test_long_two_sided_attention_is_the_reference(
    shape: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys reversed, or the mask block by block, as if these few tokens were many."""
    monkeypatch.setattr(parts, "REVERSE_FROM", 1)
    monkeypatch.setattr(parts, "BLOCK", 3)
    flash, reference = both(arguments(SHAPES[shape]), attn_mask=mask_of(mask, SHAPES[shape]))
    assert distance(flash, reference) < 1e-12


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("tokens", [257, 801])
def test_many_tokens(tokens: int, is_causal: bool) -> None:
    """Past the kernels' blocks, and past the length from which keys are reversed."""
    flash, reference = both(arguments((2, 1, tokens, tokens), 8), is_causal=is_causal)
    print(distance(flash, reference))
    assert distance(flash, reference) < 1e-12


@pytest.mark.parametrize("d", [1, 2, 64, 80, 256])
def test_every_head_size(d: int) -> None:
    for is_causal in (False, True):
        flash, reference = both(arguments((2, 2, 9, 9), d), is_causal=is_causal)
        assert distance(flash, reference) < 1e-12


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("start", [0, 3, 7])
def test_queries_may_stand_anywhere_among_the_keys(start: int, is_causal: bool) -> None:
    """As with a static cache, whose keys run past the last token; the start as an int or a tensor."""
    sizes = (4, 2, 5, 12)
    for given in (None, mask_of("random", sizes), mask_of("left", sizes)):
        options = {"is_causal": is_causal, "attn_mask": given}
        flash, reference = both(arguments(sizes), query_start=start, **options)
        assert distance(flash, reference) < 1e-12
        for place in (torch.tensor(start), torch.tensor([start])):
            again, defined = both(arguments(sizes), query_start=place, **options)
            assert distance(again, flash) == 0
            assert distance(defined, reference) == 0


def test_the_scale_multiplies_the_self_score() -> None:
    inputs = arguments((2, 2, 7, 7))
    for scale in (0.3, 2.0):
        flash, reference = both(inputs, is_causal=True, scale=scale)
        assert distance(flash, reference) < 1e-12
        q, k, v, own = inputs
        scaled = with_gradients(
            decoupled_attention, [scale * q, k, v, scale * own], is_causal=True, scale=1.0
        )
        assert distance(flash[:1], scaled[:1]) < 1e-12


def test_gradients_are_those_of_differences() -> None:
    mask = mask_of("random", (4, 2, 3, 5))
    inputs = [x.requires_grad_() for x in arguments((4, 2, 3, 5), 3)]
    for impl in ("flash", "reference"):
        for is_causal in (False, True):

            def attend(*tensors: Tensor, impl: Any = impl, is_causal: bool = is_causal) -> Tensor:
                return decoupled_attention(
                    *tensors, attn_mask=mask, is_causal=is_causal, enable_gqa=True, impl=impl
                )

            assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=["float32", "float16", "bfloat16"],
)
@pytest.mark.parametrize("mask", ["none", "left", "floats"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
def test_narrow_types_are_near_float64(
    dtype: torch.dtype, tolerance: float, mask: str, is_causal: bool
) -> None:
    """Outputs are near 1 in size. float16 here is for whoever hands it over; training in it takes a scaler."""
    sizes = (4, 2, 33, 33)
    inputs = arguments(sizes, 16, dtype=dtype)
    inputs[3] = inputs[3].float()
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    exact = with_gradients(
        decoupled_attention,
        [x.double() for x in inputs],
        attn_mask=mask_of(mask, sizes),
        impl="reference",
        **options,
    )
    for impl in ("flash", "reference"):
        found = with_gradients(
            decoupled_attention, inputs, attn_mask=mask_of(mask, sizes, torch.float32), impl=impl, **options
        )
        assert [x.dtype for x in found] == [dtype] * 4 + [torch.float32]
        print(impl, [distance([a], [b]) for a, b in zip(found, exact, strict=True)])
        assert distance(found[:1], exact[:1]) < tolerance
        assert distance(found[1:], exact[1:]) < 4 * tolerance


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_self_score_keeps_its_type_and_is_computed_in_that_of_the_scores(own: torch.dtype) -> None:
    for dtype in (torch.float32, torch.float64):
        inputs = arguments((2, 2, 6, 6), dtype=dtype)
        inputs[3] = inputs[3].to(own)
        wide = [*inputs[:3], inputs[3].to(dtype)]
        for impl in ("flash", "reference"):
            found = with_gradients(decoupled_attention, inputs, impl=impl)
            plain = with_gradients(decoupled_attention, wide, impl=impl)
            assert distance(found[:4], plain[:4]) == 0
            assert found[4].dtype == own
            assert distance(found[4:], [plain[4].to(own)]) == 0


@pytest.mark.parametrize("mask_type", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_float_mask_may_have_any_floating_type(mask_type: torch.dtype) -> None:
    sizes = (2, 2, 7, 7)
    mask = mask_of("floats", sizes, mask_type)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        flash, reference = both(arguments(sizes, dtype=dtype), attn_mask=mask)
        assert flash[0].dtype == reference[0].dtype == dtype
        assert distance(flash, reference) < tolerance


# ---- laws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["flash", "reference"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
def test_with_the_scores_own_diagonal_it_is_plain_attention(impl: Any, is_causal: bool) -> None:
    q, k, v, _ = arguments((6, 2, 11, 11))
    own = (q * k.repeat_interleave(3, 1)).sum(-1)
    found = decoupled_attention(q, k, v, own, is_causal=is_causal, enable_gqa=True, impl=impl)
    plain = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    assert distance([found], [plain]) < 1e-12


@pytest.mark.parametrize("impl", ["flash", "reference"])
def test_future_tokens_cannot_change_past_outputs(impl: Any) -> None:
    inputs = arguments((2, 2, 9, 9))
    before = decoupled_attention(*inputs, is_causal=True, impl=impl)
    for x in inputs:
        x[:, :, 6:] += 1.0
    after = decoupled_attention(*inputs, is_causal=True, impl=impl)
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.isclose(before[:, :, 6:], after[:, :, 6:]).any()


@pytest.mark.parametrize("impl", ["flash", "reference"])
def test_steps_of_a_cache_are_rows_of_the_whole(impl: Any) -> None:
    q, k, v, own = arguments((4, 2, 9, 9))
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "impl": impl}
    whole = decoupled_attention(q, k, v, own, **options)
    for first, end in ((0, 4), (4, 5), (5, 9)):
        step = decoupled_attention(
            q[:, :, first:end], k[:, :, :end], v[:, :, :end], own[..., first:end], **options
        )
        static = decoupled_attention(
            q[:, :, first:end], k, v, own[..., first:end], query_start=torch.tensor(first), **options
        )
        assert distance([step, static], [whole[:, :, first:end]] * 2) < 1e-12


@pytest.mark.parametrize("impl", ["flash", "reference"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
def test_a_row_without_keys_is_zero_and_moves_nothing(impl: Any, is_causal: bool) -> None:
    mask = torch.ones(B, 1, 7, 7, dtype=torch.bool)
    mask[1, :, :4] = False
    out, *grads = with_gradients(
        decoupled_attention, arguments((2, 2, 7, 7)), attn_mask=mask, is_causal=is_causal, impl=impl
    )
    assert (out[1, :, :4] == 0).all()
    for g in (grads[0], grads[3]):
        assert (g[1, :, :4] == 0).all()
        assert g.isfinite().all()
        assert (g[1, :, 5:] != 0).any()


@pytest.mark.parametrize("impl", ["flash", "reference"])
def test_no_self_score_and_no_other_key_leave_nothing(impl: Any) -> None:
    inputs = arguments((2, 2, 3, 3))
    inputs[3].fill_(-math.inf)
    out, *grads = with_gradients(decoupled_attention, inputs, is_causal=True, impl=impl)
    assert (out[:, :, 0] == 0).all()
    assert (out[:, :, 1] == inputs[2][:, :, 0]).all()  # one key left
    assert (grads[3] == 0).all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("impl", ["flash", "reference"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("argument", [0, 3], ids=["query", "self_score"])
def test_nan_stays_in_its_row(impl: Any, is_causal: bool, place: int, argument: int) -> None:
    inputs = arguments((2, 2, 6, 6))
    clean = decoupled_attention(*inputs, is_causal=is_causal, impl="reference")
    inputs[argument][0, 1, place] = math.nan
    out = decoupled_attention(*inputs, is_causal=is_causal, impl=impl)
    hit = torch.zeros(B, 2, 6, dtype=torch.bool)
    hit[0, 1, place] = True
    if is_causal and argument == 0 and place == 0:
        hit[0, 1, 0] = False  # the first row scores itself alone, and that score does not ask the query
    assert torch.equal(out.isnan().all(-1), hit)
    assert distance([out[~hit]], [clean[~hit]]) < 1e-12


def test_a_key_of_nothing_but_nan_is_seen() -> None:
    q, k, v, own = arguments((2, 1, 4, 4))
    k[0, 0, 0] = math.nan
    for impl in ("flash", "reference"):
        out = decoupled_attention(q, k, v, own, is_causal=True, enable_gqa=True, impl=impl)
        assert out[0, :, 1:].isnan().all()
        assert out[0, :, 0].isfinite().all()
        assert out[1].isfinite().all()


@pytest.mark.parametrize("impl", ["flash", "reference"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
def test_nan_in_a_mask_is_seen(impl: Any, is_causal: bool) -> None:
    mask = torch.zeros(6, 6, dtype=torch.float64)
    mask[4, 2] = math.nan
    out = decoupled_attention(*arguments((2, 2, 6, 6)), attn_mask=mask, is_causal=is_causal, impl=impl)
    assert torch.equal(out.isnan().all(-1), (torch.arange(6) == 4).expand(B, 2, 6))
    assert torch.equal(out.isnan().any(-1), out.isnan().all(-1))


def test_the_masks_own_diagonal_is_added_to_the_self_score() -> None:
    q, k, v, own = arguments((2, 2, 5, 5))
    bias = torch.randn(5, 5, dtype=torch.float64)
    flat = bias.clone()
    flat.fill_diagonal_(0)
    for impl in ("flash", "reference"):
        there = decoupled_attention(q, k, v, own, attn_mask=bias, scale=0.5, impl=impl)
        moved = decoupled_attention(q, k, v, own + 2 * bias.diagonal(), attn_mask=flat, scale=0.5, impl=impl)
        assert distance([there], [moved]) < 1e-12
    bias.fill_diagonal_(-math.inf)
    gone = decoupled_attention(q, k, v, own, attn_mask=bias)
    assert torch.equal(gone, decoupled_attention(q, k, v, own + 1, attn_mask=bias))


@pytest.mark.parametrize("impl", ["flash", "reference"])
def test_padding_does_not_change_the_tokens_that_are_there(impl: Any) -> None:
    q, k, v, own = arguments((2, 2, 9, 9))
    for is_causal in (False, True):
        for kept in (slice(0, 6), slice(3, 9)):
            mask = torch.zeros(1, 1, 1, 9, dtype=torch.bool)
            mask[..., kept] = True
            padded = decoupled_attention(q, k, v, own, attn_mask=mask, is_causal=is_causal, impl=impl)
            short = (x[:, :, kept] for x in (q, k, v, own))
            alone = decoupled_attention(*short, is_causal=is_causal, impl=impl)
            assert distance([padded[:, :, kept]], [alone]) < 1e-12


# ---- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("swapped", [True, False])
def test_the_output_lies_in_memory_as_scaled_dot_product_attentions(is_causal: bool, swapped: bool) -> None:
    inputs = [x.float() if swapped else x.float().contiguous() for x in arguments((4, 4, 9, 9), 8)]
    leaves = [x.requires_grad_() for x in inputs]
    found = decoupled_attention(*leaves, is_causal=is_causal)
    plain = scaled_dot_product_attention(*leaves[:3], is_causal=is_causal)
    assert found.stride() == plain.stride()
    for g, p in zip(
        torch.autograd.grad(found.sum(), leaves[:3]),
        torch.autograd.grad(plain.sum(), leaves[:3]),
        strict=True,
    ):
        assert g.stride() == p.stride()


def test_any_strides_will_do() -> None:
    """Parts of one fused projection, reversed features, heads expanded from one, and one gradient for everything."""
    q, k, v, own = arguments((4, 4, 9, 9), 6)
    for is_causal in (False, True):
        plain = with_gradients(decoupled_attention, [q, k, v, own], is_causal=is_causal, impl="reference")
        fused = torch.cat([q, k, v], -1)
        found = decoupled_attention(*fused.chunk(3, -1), own, is_causal=is_causal, impl="flash")
        assert distance([found], plain[:1]) < 1e-12
        columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
        assert columns[0].stride(-1) != 1
        found = decoupled_attention(*columns, own, is_causal=is_causal, impl="flash")
        assert distance([found], plain[:1]) < 1e-12
        one = [x[:, :1].expand(-1, 4, -1, -1) for x in (k, v)]
        copied = [x.clone() for x in one]
        flash = decoupled_attention(q, *one, own[:1, :1].expand(B, 4, -1), is_causal=is_causal, impl="flash")
        exact = decoupled_attention(q, *copied, own[:1, :1].expand(B, 4, -1), is_causal=is_causal)
        assert distance([flash], [exact]) < 1e-12
    sums = []
    for impl in ("flash", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, own)]
        sums.append(list(torch.autograd.grad(decoupled_attention(*leaves, impl=impl).sum(), leaves)))
    assert distance(*sums) < 1e-12


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)], ids=str)
def test_some_inputs_alone_may_want_a_gradient(wanted: tuple[int, ...]) -> None:
    inputs = arguments((4, 2, 5, 5))
    _, *every = with_gradients(decoupled_attention, inputs, enable_gqa=True)
    leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    out = decoupled_attention(*leaves, enable_gqa=True, impl="flash")
    along = torch.sin(torch.arange(1, out.numel() + 1, dtype=torch.float64)).view(out.shape)
    found = torch.autograd.grad(out, [leaves[i] for i in wanted], along)
    assert distance(list(found), [every[i] for i in wanted]) < 1e-14


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
def test_no_sequences_and_no_tokens(is_causal: bool) -> None:
    for inputs in ([x[:0] for x in arguments((2, 2, 5, 5))], [x[:, :, :0] for x in arguments((2, 2, 5, 5))]):
        flash, reference = both(inputs, is_causal=is_causal)
        assert [x.shape for x in flash] == [x.shape for x in reference]
    q, k, v, own = arguments((2, 2, 5, 5))
    flash, reference = both([q[:, :, :0], k, v, own[..., :0]], is_causal=is_causal)
    assert distance(flash, reference) == 0


def test_inputs_are_left_as_they_are() -> None:
    inputs = arguments((4, 2, 7, 7))
    mask = mask_of("floats", (4, 2, 7, 7))
    assert mask is not None
    kept = [x.clone() for x in (*inputs, mask)]
    for is_causal in (False, True):
        both(inputs, attn_mask=mask, is_causal=is_causal)
    assert all(torch.equal(a, b) for a, b in zip((*inputs, mask), kept, strict=True))


# ---- when the kernels cannot be used -------------------------------------------------------------------------


def test_auto_takes_the_reference_where_flash_cannot() -> None:
    q, k, v, own = arguments((2, 2, 5, 5))
    wide = torch.cat([v, v], -1)
    bias = torch.zeros(5, 5, dtype=torch.float64, requires_grad=True)
    roads = [
        ("dropout", (q, k, v, own), {"dropout_p": 0.5}),
        ("features", (q, k, wide, own), {}),
        ("gradient", (q, k, v, own), {"attn_mask": bias}),
        ("scale", (q, k, v, own), {"is_causal": True, "scale": 0.0}),
        ("scale", (q, k, v, own), {"is_causal": True, "scale": -1.0}),
    ]
    for why, inputs, options in roads:
        with pytest.raises(AttentionError, match=why):
            decoupled_attention(*inputs, impl="flash", **options)
        torch.manual_seed(0)
        found = decoupled_attention(*inputs, **options)
        torch.manual_seed(0)
        assert torch.equal(found, decoupled_attention(*inputs, impl="reference", **options))
    out = decoupled_attention(q, k, v, own, attn_mask=bias)
    assert torch.autograd.grad(out.pow(2).sum(), bias)[0].any()
    with torch.no_grad():
        decoupled_attention(q, k, v, own, attn_mask=bias, impl="flash")


def test_second_derivatives_raise_and_the_reference_has_them() -> None:
    inputs = arguments((2, 2, 4, 4))

    def second(impl: Any) -> Tensor:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = decoupled_attention(*leaves, is_causal=True, impl=impl)
        firsts = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in firsts), leaves[3])[0]

    with pytest.raises(AttentionError, match="impl='reference'"):
        second("auto")
    slope, step = second("reference"), 1e-5

    def norm(own: Tensor) -> float:
        leaves = [x.clone().requires_grad_() for x in (*inputs[:3], own)]
        out = decoupled_attention(*leaves, is_causal=True)
        return sum(g.pow(2).sum().item() for g in torch.autograd.grad(out.sin().sum(), leaves))

    there, back = inputs[3].clone(), inputs[3].clone()
    there[1, 1, 2] += step
    back[1, 1, 2] -= step
    assert slope[1, 1, 2].item() == pytest.approx((norm(there) - norm(back)) / (2 * step), rel=1e-6)


def loss(impl: Any = "auto") -> Any:
    return lambda *tensors: decoupled_attention(*tensors, is_causal=True, impl=impl).sin().sum()


def by_autograd(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves))


FIRST_FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@FIRST_FORWARD_MODE
def test_transforms_of_functions_give_the_right_values() -> None:
    inputs = arguments((2, 2, 5, 5))
    expected = by_autograd(loss("reference"), inputs)
    assert distance(list(torch.func.grad(loss(), EVERY)(*inputs)), expected) < 1e-14
    each = torch.func.vmap(torch.func.grad(lambda *x: loss()(*(y[None] for y in x)), EVERY))
    assert distance(list(each(*inputs)), expected) < 1e-14
    along = arguments((2, 2, 5, 5), seed=3)
    slope = sum((a * g).sum() for a, g in zip(along, expected, strict=True))
    _, tangent = torch.func.jvp(loss(), tuple(inputs), tuple(along))
    assert tangent.item() == pytest.approx(float(slope), rel=1e-12)
    with torch.autograd.forward_ad.dual_level():
        pairs = [torch.autograd.forward_ad.make_dual(x, a) for x, a in zip(inputs, along, strict=True)]
        tangent = torch.autograd.forward_ad.unpack_dual(loss()(*pairs)).tangent
    assert tangent.item() == pytest.approx(float(slope), rel=1e-12)
    second = torch.func.grad(lambda own: torch.func.grad(loss(), 3)(*inputs[:3], own).pow(2).sum())(inputs[3])
    own = inputs[3].clone().requires_grad_()
    (first,) = torch.autograd.grad(loss("reference")(*inputs[:3], own), own, create_graph=True)
    assert distance([second], list(torch.autograd.grad(first.pow(2).sum(), own))) < 1e-14
    with pytest.raises(AttentionError, match=r"torch\.func"):
        torch.func.grad(loss("flash"), EVERY)(*inputs)


@FIRST_FORWARD_MODE
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_transforms_give_the_right_values(backend: str) -> None:
    inputs = arguments((2, 2, 5, 5))
    expected = by_autograd(loss("reference"), inputs)

    def compiled(function: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend=backend, fullgraph=True)

    found = compiled(torch.func.grad(loss(), EVERY))(*inputs)
    assert distance(list(found), expected) < 1e-14
    each = torch.func.vmap(torch.func.grad(lambda *x: loss()(*(y[None] for y in x)), EVERY))
    assert distance(list(compiled(each)(*inputs)), expected) < 1e-14
    along = arguments((2, 2, 5, 5), seed=3)
    tangent = compiled(lambda *x: torch.func.jvp(loss(), x, tuple(along))[1])(*inputs)
    slope = sum((a * g).sum() for a, g in zip(along, expected, strict=True))
    assert tangent.item() == pytest.approx(float(slope), rel=1e-12)


# ---- the rest of torch ---------------------------------------------------------------------------------------


def test_the_operator_keeps_torchs_rules() -> None:
    """Schema, fake kernels, autograd and traced shapes, as `torch.library.opcheck` checks them."""
    for mask in (None, mask_of("random", (4, 2, 5, 7))):
        for is_causal in (False, True):
            inputs = [x.requires_grad_() for x in arguments((4, 2, 5, 7))]
            for place in (None, torch.tensor(1)):
                arguments_ = (*inputs, mask, is_causal, 0.5, 2, place)
                torch.library.opcheck(
                    torch.ops.qkform.decoupled_attention.default,
                    arguments_,
                    test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
                )


@pytest.mark.parametrize("shape", ["odd", "grouped"])
def test_the_backwards_fake_kernel_tells_the_strides(shape: str) -> None:
    inputs = [x.contiguous() for x in arguments(SHAPES[shape])]
    out, lse = torch.ops.qkform.decoupled_attention.default(*inputs, None, True, 0.5, 0, None)
    given = (torch.ones_like(out), *inputs, out, lse, None, True, 0.5, 0, None)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
        told = torch.ops.qkform.decoupled_attention_backward.default(*fake)
    made = torch.ops.qkform.decoupled_attention_backward.default(*given)
    assert [(x.shape, x.stride(), x.dtype) for x in told] == [(x.shape, x.stride(), x.dtype) for x in made]


@pytest.mark.parametrize(("shape", "is_causal"), [("odd", True), ("grouped", False)])
def test_compiled_is_eager(shape: str, is_causal: bool) -> None:
    """One graph, forward and backward, strides included: the compiler believes what the fake kernels say."""
    torch._dynamo.reset()
    compiled = torch.compile(decoupled_attention, backend="aot_eager", fullgraph=True)
    sizes = SHAPES[shape]
    for mask in (None, mask_of("left", sizes)):
        for change in (torch.clone, torch.Tensor.contiguous):
            inputs = [change(x) for x in arguments(sizes)]
            options = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": True}
            eager = with_gradients(decoupled_attention, inputs, **options)
            found = with_gradients(compiled, inputs, **options)
            assert distance(found, eager) == 0
            assert [x.stride() for x in found] == [x.stride() for x in eager]


def test_compiled_for_any_length_and_start() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(decoupled_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (4, 7, 9):
        q, k, v, own = arguments((2, 2, n, 12))
        eager = with_gradients(decoupled_attention, [q, k, v, own], is_causal=True)
        assert distance(with_gradients(compiled, [q, k, v, own], is_causal=True), eager) == 0
        place = torch.tensor(n - 3)
        static = decoupled_attention(q[:, :, :1], k, v, own[..., :1], is_causal=True, query_start=place)
        found = compiled(q[:, :, :1], k, v, own[..., :1], is_causal=True, query_start=place)
        assert torch.equal(found, static)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_by_the_default_compiler() -> None:
    torch._dynamo.reset()

    def block(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> Tensor:
        return decoupled_attention(q.sin(), k * 2, v + 1, own.exp(), is_causal=True, enable_gqa=True).cos()

    for shape in ("odd", "grouped"):
        inputs = [x.float() for x in arguments(SHAPES[shape])]
        found = with_gradients(torch.compile(block, fullgraph=True), inputs)
        assert distance(found, with_gradients(block, inputs)) < 1e-5


@pytest.mark.parametrize("impl", ["flash", "reference"])
def test_autocast_narrows_queries_keys_and_values(impl: Any) -> None:
    inputs = arguments((4, 2, 9, 9), 8, dtype=torch.float32)
    narrow = [x.bfloat16() if i < 3 else x for i, x in enumerate(inputs)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(decoupled_attention, inputs, is_causal=True, enable_gqa=True, impl=impl)
        wide = decoupled_attention(*arguments((2, 2, 5, 5)), impl=impl)
        plain = scaled_dot_product_attention(*inputs[:3], enable_gqa=True)
    expected = with_gradients(decoupled_attention, narrow, is_causal=True, enable_gqa=True, impl=impl)
    assert found[0].dtype == plain.dtype == torch.bfloat16
    assert [x.dtype for x in found[1:]] == [torch.float32] * 4
    assert wide.dtype == torch.float64
    assert distance(found, expected) < (1e-6 if impl == "flash" else 3e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def attend(*tensors: Tensor) -> Tensor:
        return decoupled_attention(*tensors, is_causal=True, enable_gqa=True, impl="flash")

    found = []
    for function in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=use_reentrant)):
        leaves = [x.clone().requires_grad_() for x in arguments(SHAPES["grouped"])]
        function(*leaves).sin().sum().backward()
        found.append([x.grad for x in leaves])
    assert distance(*found) == 0


def test_no_mask_that_was_not_given_grows_with_the_square_of_the_length() -> None:
    """Two-sided: one short vector, whose overlapping rows are the mask; a mask of keys: one block of queries."""
    q = k = torch.zeros(1, 1, 5000, 1)
    (part,) = parts.parts(q, k, None, False, 0)
    assert part.mask is not None
    assert part.mask.untyped_storage().size() == 4 * 9999
    keys = torch.ones(1, 1, 1, 5000, dtype=torch.bool).expand(1, 1, 5000, 5000)
    narrow = masks.as_floats(keys, q)
    assert narrow is not None
    assert narrow.shape == (1, 1, 1, 5000)
    for causal in (False, True):
        for part in parts.parts(q, k, narrow, causal, 0):
            assert part.mask is not None
            assert part.mask.untyped_storage().size() <= 4 * parts.BLOCK * 5000


class Rows(TorchDispatchMode):
    """Watches for tensors whose memory holds a row of scores for each of many queries."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.maker = 0, None  # numbers in memory; the operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(made):
            if isinstance(x, Tensor):
                numbers = x.untyped_storage().nbytes() // x.element_size()
                if numbers > self.largest:
                    self.largest, self.maker = numbers, func
        return made


@pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])
@pytest.mark.parametrize("mask", ["none", "left", "left_full", "right"])
def test_nothing_of_the_size_of_the_scores_is_made(mask: str, is_causal: bool) -> None:
    """Forward and backward, in eager mode: the largest tensor is one of the arguments, or a block of a mask of keys."""
    n, d = 2500, 4
    inputs = [x.float().requires_grad_() for x in arguments((1, 1, n, n), d)]
    given = mask_of(mask, (1, 1, n, n))
    with Rows() as watched:
        out = decoupled_attention(*inputs, attn_mask=given, is_causal=is_causal, impl="flash")
        torch.autograd.grad(out.sum(), inputs)
    print(watched.largest / n, watched.maker)
    block = parts.BLOCK if mask != "none" and not is_causal else 2 * d
    assert watched.largest <= B * block * n < B * n * n / 2


# ---- arguments that do not fit -------------------------------------------------------------------------------


def misfits() -> dict[str, tuple[tuple[Tensor, ...], dict[str, Any], str]]:
    q, k, v, own = arguments((4, 2, 5, 7), 3)
    gqa = {"enable_gqa": True}
    bits = torch.ones(5, 7, dtype=torch.int64)
    return {
        "self_score": ((q, k, v, own[..., :4]), gqa, r"self_score .*\(2, 4, 4\).*\(2, 4, 5, 3\).*\(2, 4, 5\)"),
        "integers": ((q, k, v, own.long()), gqa, "self_score is int64"),
        "dimensions": ((q[0], k, v, own), gqa, r"query has shape \(4, 5, 3\); expected \(B, heads"),
        "batch": ((q, k[:1], v[:1], own), gqa, r"\(2, 4, 5, 3\), key \(1, 2, 7, 3\).*\(2, G, M, 3\)"),
        "features": ((q[..., :2], k, v, own), gqa, r"key \(2, 2, 7, 3\).*\(2, G, M, 2\)"),
        "heads": ((q[:, :3], k, v, own[:, :3]), gqa, "G dividing 3"),
        "values": ((q, k, v[:, :, :6], own), gqa, r"value \(2, 2, 6, 3\).*\(2, 2, 7, D_v\)"),
        "grouped": ((q, k, v, own), {}, "4 heads and key 2.*enable_gqa=True"),
        "types": ((q, k.float(), v, own), gqa, "float64, float32, float64"),
        "no floats": ((q.long(), k.long(), v.long(), own), gqa, "one floating type"),
        "mask": ((q, k, v, own), {**gqa, "attn_mask": torch.ones(5, 6)}, r"\(5, 6\).*\(2, 4, 5, 7\)"),
        "mask type": ((q, k, v, own), {**gqa, "attn_mask": bits}, "attn_mask is int64"),
        "more queries": ((k, q[:, :2], q[:, :2], own[:, :2].repeat(1, 1, 2)[..., :7]), gqa, "7 queries for 5 keys"),
        "start": ((q, k, v, own), {**gqa, "query_start": 3}, "keys 3 to 7, of 7; 0 to 2 would fit"),
        "start tensor": ((q, k, v, own), {**gqa, "query_start": torch.tensor(3)}, "3: 5 queries .* of 7"),
        "start fraction": ((q, k, v, own), {**gqa, "query_start": 0.5}, "query_start is 0.5; it is an int"),
        "start word": ((q, k, v, own), {**gqa, "query_start": "a"}, "query_start is 'a'; it is an int"),
        "no features": ((q[..., :0], k[..., :0], v, own), gqa, "of no features"),
        "start pair": ((q, k, v, own), {**gqa, "query_start": torch.tensor([1, 2])}, r"shape \(2,\)"),
        "dropout": ((q, k, v, own), {**gqa, "dropout_p": 1.5}, "1.5"),
        "impl": ((q, k, v, own), {**gqa, "impl": "fast"}, "'fast'; known: auto, reference, flash"),
    }  # fmt: skip


@pytest.mark.parametrize("name", misfits())
def test_arguments_that_do_not_fit_are_named(name: str) -> None:
    inputs, options, message = misfits()[name]
    for impl in ("auto", "reference"):
        with pytest.raises(AttentionError, match=message):
            decoupled_attention(*inputs, **{"impl": impl, **options})


def test_a_start_beside_the_keys_is_found_where_its_value_can_be_read() -> None:
    """Not in a transform and not while compiling: there a tensor has no value yet."""
    inputs = arguments((2, 2, 5, 7))
    for why in ({"dropout_p": 0.5}, {"scale": -1.0}, {}):
        with pytest.raises(AttentionError, match=r"3: 5 queries .* of 7"):
            decoupled_attention(*inputs, query_start=torch.tensor(3), **why)
    starts = torch.tensor([[0], [2]])
    every = torch.func.vmap(lambda start: decoupled_attention(*inputs, query_start=start))(starts)
    each = [decoupled_attention(*inputs, query_start=int(start)) for start in starts]
    assert distance(list(every), each) < 1e-14


def test_a_device_without_kernels_is_named() -> None:
    inputs = [x.to("meta") for x in arguments((2, 2, 5, 5))]
    with pytest.raises(AttentionError, match=r"'meta'.*cpu"):
        decoupled_attention(*inputs, impl="flash")
    assert decoupled_attention(*inputs).shape == (B, 2, 5, 5)
