"""Exclusive and no-diagonal attention: what they leave out, and that they agree with their definitions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import qkform as qk
from qkform.attention import reference
from qkform.errors import AttentionError

LARGEST = 1e-12  # in float64


@dataclass(frozen=True)
class Case:
    """Sizes, a kind of mask, and where the queries stand."""

    heads: int = 4
    groups: int = 4
    n: int = 7
    m: int = 7
    causal: bool = False
    mask: str = "none"
    start: int | Tensor | None = None
    d: int = 5
    d_v: int = 5

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        start = "" if self.start is None else f"-from{int(self.start)}"
        return f"{kind}-{self.mask}-h{self.heads}.{self.groups}-n{self.n}.{self.m}{start}"

    def inputs(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        make = torch.Generator().manual_seed(seed)
        shapes = (
            (self.heads, self.n, self.d),
            (self.groups, self.m, self.d),
            (self.groups, self.m, self.d_v),
        )
        return tuple(
            torch.randn(2, *shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes
        )

    def place(self) -> Tensor:
        """(N,): the key of each query's own token."""
        return torch.arange(self.n) + (self.m - self.n if self.start is None else int(self.start))

    def attn_mask(self) -> Tensor | None:
        place, keys = self.place()[:, None], torch.arange(self.m)
        lengths = torch.tensor([self.m, (self.m + 1) // 2])[:, None, None, None]
        own = keys == place
        masks = {
            "none": lambda: None,
            "right padding": lambda: keys < lengths,  # (2, 1, 1, M)
            "left padding": lambda: keys >= self.m - lengths,  # with is_causal: rows without keys
            "keys": lambda: keys % 3 != 1,  # (M,)
            "window": lambda: (place - keys).abs() < 3,  # (N, M)
            "documents": lambda: (place // 3 == keys // 3)[None, None],
            "not itself": lambda: ~own,
            "empty rows": lambda: ((place % 2 == 0) & (keys >= 0))[None],  # (1, N, M)
            "bias": lambda: torch.randn(
                1, self.heads, self.n, self.m, generator=torch.Generator().manual_seed(9), dtype=torch.float64
            ),
            "float padding": lambda: torch.zeros(2, 1, self.n, self.m, dtype=torch.float64).masked_fill(
                keys >= lengths, -math.inf
            ),
            "float empty rows": lambda: torch.zeros(self.n, 1, dtype=torch.float64).masked_fill(
                place % 2 == 1, -math.inf
            ),  # (N, 1)
        }
        return masks[self.mask]()

    def options(self) -> dict[str, object]:
        return {
            "attn_mask": self.attn_mask(),
            "is_causal": self.causal,
            "query_start": self.start,
            "enable_gqa": self.heads != self.groups,
        }


MASKS = (
    "none",
    "right padding",
    "left padding",
    "keys",
    "window",
    "documents",
    "not itself",
    "empty rows",
    "bias",
    "float padding",
    "float empty rows",
)
BOTH = (False, True)
CASES = [
    *(Case(causal=causal, mask=mask) for causal in BOTH for mask in MASKS),
    *(Case(causal=causal, groups=2, mask=mask) for causal in BOTH for mask in ("none", "left padding")),
    *(Case(causal=causal, n=1, m=1) for causal in BOTH),
    *(Case(causal=causal, n=2, m=2, heads=3, groups=1) for causal in BOTH),
    *(
        Case(causal=c, n=n, m=9, groups=2, mask=mask)
        for c in BOTH
        for n in (1, 3)
        for mask in ("none", "bias")
    ),
    *(Case(causal=True, n=3, m=9, start=start, mask="right padding") for start in (0, 4, torch.tensor(4))),
    *(Case(causal=True, n=3, m=9, start=start, groups=1) for start in (0, 4, torch.tensor(6))),
    Case(causal=True, n=1, m=9, start=4),
]


def by_name(case: Case) -> str:
    return str(case) + ("-tensor" if isinstance(case.start, Tensor) else "")


def agree(one: object, other: object, inputs: tuple[Tensor, ...], *, largest: float = LARGEST) -> None:
    """The two functions give the same outputs and the same gradients of every input."""
    results = []
    for function in (one, other):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        back = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
        results.append([out, *torch.autograd.grad(out, leaves, back)])
    for name, a, b in zip(("output", *"qkv"), *results, strict=True):
        assert a.isfinite().all(), name
        assert (a - b).abs().max() <= largest, f"{name}: {(a - b).abs().max():.1e}"


# ---- exclusive ------------------------------------------------------------------------------------------------------


def exclusive(case: Case, **more: object):
    return lambda q, k, v: qk.attention.exclusive_attention(q, k, v, **case.options(), **more)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_exclusive_is_its_formula(case):
    options = {name: value for name, value in case.options().items() if name != "enable_gqa"}
    agree(exclusive(case), lambda q, k, v: reference.exclusive(q, k, v, **options), case.inputs())


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_exclusive_output_is_orthogonal_to_the_own_value(case):
    q, k, v = case.inputs()
    out = exclusive(case)(q, k, v)
    own = v.repeat_interleave(case.heads // case.groups, 1)[:, :, case.place()]
    assert (out * own).sum(-1).abs().max() < 1e-13


def test_exclusive_is_standard_attention_less_its_part_along_the_own_value():
    case = Case(causal=True, groups=2)
    q, k, v = case.inputs()
    difference = exclusive(case)(q, k, v) - scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    own = v.repeat_interleave(2, 1)
    cosine = torch.cosine_similarity(difference, own, dim=-1).abs()
    assert (cosine - 1).abs().max() < 1e-12


def test_exclusive_of_a_token_that_sees_only_itself_is_zero():
    case = Case(causal=True)
    q, k, v = case.inputs()
    assert exclusive(case)(q, k, v)[:, :, 0].abs().max() < 1e-15
    only_itself = torch.eye(7, dtype=torch.bool)
    assert qk.attention.exclusive_attention(q, k, v, attn_mask=only_itself).abs().max() < 1e-15


def test_exclusive_does_not_see_how_much_a_token_attends_to_itself():
    """A larger own score moves weight to v_i, and the rest shrinks by one factor: the direction stays."""
    q, k, v = Case().inputs()
    more = torch.eye(7, dtype=torch.float64) * 1.5
    one = qk.attention.exclusive_attention(q, k, v)
    other = qk.attention.exclusive_attention(q, k, v, attn_mask=more)
    assert (other.norm(dim=-1) < one.norm(dim=-1)).all()
    assert (torch.cosine_similarity(one, other, dim=-1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_exclusive_takes_values_of_any_size(size):
    """|v|^2 is out of range: the formula as it stands gives NaN or takes nothing away."""
    q, k, v = Case(n=5, m=5).inputs()
    one = qk.attention.exclusive_attention(q, k, v)
    other = qk.attention.exclusive_attention(q, k, size * v)
    assert (other / size - one).abs().max() < 1e-14


def test_exclusive_takes_nothing_along_a_zero_value():
    q, k, v = Case().inputs()
    v[:, :, 2] = 0.0
    v.requires_grad_()
    out = qk.attention.exclusive_attention(q, k, v)
    standard = scaled_dot_product_attention(q, k, v)
    assert torch.equal(out[:, :, 2], standard[:, :, 2])
    gradient = torch.autograd.grad(out[:, :, 2].sum(), v, retain_graph=True)[0]
    assert torch.equal(gradient, torch.autograd.grad(standard[:, :, 2].sum(), v)[0])
    assert torch.autograd.grad(out.square().sum(), v)[0].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_exclusive_takes_any_scale(scale):
    """The fused kernels mask before they scale: 0 times -inf, or +inf."""
    case = Case(causal=True)
    agree(
        lambda q, k, v: qk.attention.exclusive_attention(q, k, v, is_causal=True, scale=scale),
        lambda q, k, v: reference.exclusive(q, k, v, is_causal=True, scale=scale),
        case.inputs(),
    )


def test_exclusive_gradients_are_those_of_its_values():
    case = Case(heads=2, groups=1, n=3, m=4, causal=True, d=2, d_v=3)
    inputs = [x[:1].requires_grad_() for x in case.inputs()]
    assert torch.autograd.gradcheck(exclusive(case), inputs)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # vmap of the fused kernel, looped
def test_exclusive_gradients_through_torch_func():
    q, k, v = Case().inputs()
    batches = [torch.stack((x, x.flip(0))) for x in (q, k, v)]

    def gradients(attention):
        def loss(*inputs: Tensor) -> Tensor:
            return attention(*inputs, is_causal=True).square().sum()

        one = torch.func.grad(loss, (0, 1, 2))
        return [*one(q, k, v), *torch.func.vmap(one)(*batches)]

    for a, b in zip(*map(gradients, (qk.attention.exclusive_attention, reference.exclusive)), strict=True):
        assert a.abs().max() > 0.1
        assert (a - b).abs().max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exclusive_in_low_precision(dtype):
    case = Case(n=33, m=33, causal=True, groups=2, d=16, d_v=16)
    exact = exclusive(case)(*case.inputs())
    out = exclusive(case)(*case.inputs(dtype=dtype))
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() < 8 * eps
    own = case.inputs(dtype=dtype)[2].repeat_interleave(2, 1).double()
    assert ((out.double() * own).sum(-1) / own.norm(dim=-1)).abs().max() < 4 * eps


def test_exclusive_takes_the_difference_in_float32():
    q, k, v = Case(n=33, m=33, d=16, d_v=64).inputs(dtype=torch.bfloat16)
    y, wide = scaled_dot_product_attention(q, k, v).double(), v.double()
    exact = y - (y * wide).sum(-1, keepdim=True) / wide.square().sum(-1, keepdim=True) * wide
    out = qk.attention.exclusive_attention(q, k, v).double()
    assert ((out - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()  # one rounding


def test_exclusive_under_autocast_has_the_type_that_attention_has_there():
    case = Case(causal=True)
    inputs = case.inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = exclusive(case)(*inputs)
        assert out.dtype == scaled_dot_product_attention(*inputs).dtype
        mixed = (inputs[0].bfloat16(), *inputs[1:])  # a rotary embedding leaves q and k of other types than v
        assert torch.equal(exclusive(case)(*mixed), out)
    assert (out - exclusive(case)(*inputs)).abs().max() < 0.05


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_exclusive_rows_closed_by_the_least_number_keep_their_scores(dtype, causal):
    """As eager masks of Hugging Face close whole rows: in bfloat16 the least number of float32 would be -inf."""
    case = Case(n=9, m=9, causal=causal)
    q, k, v = case.inputs(dtype=dtype)
    mask = torch.zeros(1, 1, 9, 9).masked_fill(torch.arange(9) % 3 == 1, torch.finfo(torch.float32).min)
    mask[:, :, :4] = torch.finfo(torch.float32).min
    options = {"attn_mask": mask, "is_causal": causal}
    out = qk.attention.exclusive_attention(q, k, v, **options)
    exact = reference.exclusive(q.double(), k.double(), v.double(), **options)
    assert (out.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps
    assert (exact[:, :, 1:4] != 0).any(-1).all()


def test_exclusive_shows_nan_in_a_mask():
    q, k, v = Case().inputs()
    mask = torch.zeros(7, 7, dtype=torch.float64)
    mask[4, 2] = math.nan
    for attention in (qk.attention.exclusive_attention, reference.exclusive):
        out = attention(q, k, v, attn_mask=mask)
        assert out[:, :, 4].isnan().all()
        assert out[:, :, [0, 1, 2, 3, 5, 6]].isfinite().all()


def test_exclusive_dropout_drops_weights_and_stays_orthogonal():
    q, k, v = Case(n=64, m=64).inputs()
    torch.manual_seed(0)
    out = qk.attention.exclusive_attention(q, k, v, dropout_p=0.5)
    assert not torch.allclose(out, qk.attention.exclusive_attention(q, k, v))
    assert (out * v).sum(-1).abs().max() < 1e-13


def test_exclusive_future_tokens_cannot_change_past_outputs():
    case = Case(causal=True)
    q, k, v = case.inputs()
    before = exclusive(case)(q, k, v)
    for x in (q, k, v):
        x[:, :, 4:] += 1.0
    after = exclusive(case)(q, k, v)
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.allclose(before[:, :, 4:], after[:, :, 4:])


@pytest.mark.parametrize("function", ["exclusive_attention", "no_diagonal_attention"])
def test_steps_with_a_cache_equal_the_whole(function):
    attention = getattr(qk.attention, function)
    q, k, v = Case(n=6, m=6, groups=2).inputs()
    whole = attention(q, k, v, is_causal=True, enable_gqa=True)
    room = [
        torch.cat((x, torch.full_like(x, 7.0)), 2) for x in (k, v)
    ]  # a static cache: keys past the last token
    for n in range(6):
        for stop in (n + 1, min(n + 2, 6)):
            step = q[:, :, n:stop]
            grown = attention(step, k[:, :, :stop], v[:, :, :stop], is_causal=True, enable_gqa=True)
            static = attention(step, *room, is_causal=True, enable_gqa=True, query_start=torch.tensor(n))
            assert (grown - whole[:, :, n:stop]).abs().max() < 1e-14
            assert (static - whole[:, :, n:stop]).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (2, 7, 5)}, r"query has shape \(2, 7, 5\)"),
        ({"key": (2, 4, 7, 6)}, r"key \(2, 4, 7, 6\)"),
        ({"value": (2, 4, 6, 5)}, r"value \(2, 4, 6, 5\)"),
        ({"key": (2, 2, 7, 5), "value": (2, 2, 7, 5)}, "enable_gqa=True"),
        ({"query_start": 1}, "query_start is 1"),
        ({"query_start": torch.tensor(1)}, "query_start is 1"),
        ({"query_start": 0.5}, "query_start is 0.5"),
        ({"query": (2, 4, 8, 5)}, "8 queries for 7 keys"),
        ({"attn_mask": (6, 7)}, r"attn_mask has shape \(6, 7\)"),
    ],
)
def test_exclusive_says_what_does_not_fit(change, message):
    shapes = {"query": (2, 4, 7, 5), "key": (2, 4, 7, 5), "value": (2, 4, 7, 5)} | change
    arguments = {name: torch.zeros(x) if isinstance(x, tuple) else x for name, x in shapes.items()}
    with pytest.raises(AttentionError, match=message):
        qk.attention.exclusive_attention(**arguments)


@pytest.mark.parametrize("impl", ["reference", "flash"])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(causal=True, groups=2), Case(n=3, causal=True, mask="right padding", groups=2)],
    ids=by_name,
)
def test_exclusive_implementations_agree(case, impl):
    agree(exclusive(case), exclusive(case, impl=impl), case.inputs())


def test_exclusive_flash_says_why_it_cannot_be_used():
    q, k, v = Case().inputs()
    for more, reason in (
        ({"dropout_p": 0.3}, "dropout_p is 0.3"),
        ({"value": torch.zeros(2, 4, 7, 6, dtype=torch.float64)}, "value has 6 features"),
        ({"attn_mask": torch.zeros(7, 7, dtype=torch.float64, requires_grad=True)}, "requires a gradient"),
    ):
        given = {"query": q, "key": k, "value": v} | more
        with pytest.raises(AttentionError, match=f"impl='flash' cannot be used: .*{reason}"):
            qk.attention.exclusive_attention(**given, impl="flash")
        for impl in ("auto", "reference"):
            assert qk.attention.exclusive_attention(**given, impl=impl).isfinite().all()


@pytest.mark.parametrize("function", ["exclusive_attention", "no_diagonal_attention"])
def test_an_implementation_or_a_dropout_that_is_none(function):
    attention = getattr(qk.attention, function)
    for wrong, message in (
        ({"impl": "fast"}, "impl is 'fast'; known: auto"),
        ({"dropout_p": 2.0}, "dropout_p is 2.0"),
    ):
        with pytest.raises(AttentionError, match=message):
            attention(*Case().inputs(), **wrong)


# ---- no diagonal ----------------------------------------------------------------------------------------------------


def no_diagonal(case: Case, **more: object):
    return lambda q, k, v: qk.attention.no_diagonal_attention(q, k, v, **case.options(), **more)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_no_diagonal_is_the_diagonal_in_the_mask(case):
    options = {name: value for name, value in case.options().items() if name != "enable_gqa"}
    agree(no_diagonal(case), lambda q, k, v: reference.no_diagonal(q, k, v, **options), case.inputs())


def test_no_diagonal_row_without_other_keys_is_zero_with_zero_gradients():
    case = Case(causal=True)
    leaves = [x.requires_grad_() for x in case.inputs()]
    out = no_diagonal(case)(*leaves)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert out[:, :, 1:].abs().sum(-1).min() > 0
    for gradient in torch.autograd.grad(out[:, :, 0].sum(), leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_diagonal_does_not_see_the_own_value():
    q, k, v = Case().inputs()
    before = no_diagonal(Case())(q, k, v)
    v[:, :, 3] += 10.0
    k[:, :, 3] -= 10.0
    after = no_diagonal(Case())(q, k, v)
    assert torch.equal(before[:, :, 3], after[:, :, 3])
    assert not torch.allclose(before[:, :, 2], after[:, :, 2])


def test_no_diagonal_is_the_limit_of_the_decoupled_score():
    q, k, v = Case().inputs()
    limit = qk.attention.decoupled_attention(q, k, v, torch.full((2, 4, 7), -2000.0, dtype=torch.float64))
    assert (no_diagonal(Case())(q, k, v) - limit).abs().max() < 1e-15


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_no_diagonal_takes_any_scale(scale, causal):
    """The fused kernels mask before they scale, and the self score is scaled: 0 times -inf, or +inf."""
    agree(
        lambda q, k, v: qk.attention.no_diagonal_attention(q, k, v, is_causal=causal, scale=scale),
        lambda q, k, v: reference.no_diagonal(q, k, v, is_causal=causal, scale=scale),
        Case().inputs(),
    )
    q, k, v = Case().inputs()
    with pytest.raises(AttentionError, match="scale"):
        qk.attention.no_diagonal_attention(q, k, v, is_causal=causal, scale=scale, impl="flash")


def test_no_diagonal_says_that_integers_do_not_fit():
    q = torch.zeros(2, 4, 7, 5, dtype=torch.int64)
    with pytest.raises(AttentionError, match="one floating type"):
        qk.attention.no_diagonal_attention(q, q, q)
    with pytest.raises(AttentionError, match=r"query has shape \(\)"):
        qk.attention.no_diagonal_attention(torch.zeros(()), q, q)


# ---- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch.compile's own import
@pytest.mark.slow
@pytest.mark.parametrize("function", ["exclusive_attention", "no_diagonal_attention"])
def test_compiled_equals_eager(function):
    attention = getattr(qk.attention, function)
    case = Case(causal=True, groups=2, n=9, m=9, d=8, d_v=8)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, enable_gqa=True)

    agree(run, torch.compile(run, fullgraph=True), case.inputs(), largest=1e-12)
