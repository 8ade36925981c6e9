"""Entropy, log-sum-exp and largest weight of attention: against the whole matrix of weights, and their laws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import qkform as qk
from qkform.errors import AttentionError
from tests.test_attention_relatives import CASES, Case, by_name


def statistics(case: Case, *, decoupled: bool = False, seed: int = 0, **options: object):
    q, k, _ = case.inputs(seed)
    own = self_score(case) if decoupled else None
    return qk.attention.attention_statistics(q, k, own, **case.options(), **options)


def self_score(case: Case) -> Tensor:
    make = torch.Generator().manual_seed(5)
    return 3.0 * torch.randn(2, case.heads, case.n, generator=make, dtype=torch.float64)


def matrix(case: Case, *, decoupled: bool) -> Tensor:
    """(2, H, N, M): the scores, -inf where not allowed, written out."""
    q, k, _ = case.inputs()
    k = k.repeat_interleave(case.heads // case.groups, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    keys, place = torch.arange(case.m), case.place()[:, None]
    if decoupled:
        scores = torch.where(keys == place, self_score(case)[..., None], scores)
    scores = scores / math.sqrt(case.d)
    mask = case.attn_mask()
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    if case.causal:
        scores = torch.where(keys <= place, scores, -math.inf)
    return scores


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("decoupled", [False, True], ids=["standard", "decoupled"])
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_statistics_are_those_of_the_whole_matrix(case, decoupled, largest):
    found = statistics(case, decoupled=decoupled, largest=largest)
    scores = matrix(case, decoupled=decoupled)
    some = (scores > -math.inf).any(-1)
    weights = torch.where(some[..., None], scores.softmax(-1), 0.0)
    entropy = torch.special.entr(weights).sum(-1)
    assert torch.equal(found.keys, (scores > -math.inf).sum(-1))
    assert torch.equal(found.log_sum_exp == -math.inf, ~some)
    assert (found.log_sum_exp - scores.logsumexp(-1))[some].abs().max() < 1e-12
    assert (found.entropy - entropy).abs().max() < 1e-12
    if largest:
        assert (found.largest - weights.amax(-1)).abs().max() < 1e-12
    else:
        assert found.largest is None
    assert (found.effective_keys - torch.where(some, entropy.exp(), 0.0)).abs().max() < 1e-11
    assert torch.equal(found.normalised_entropy.isnan(), found.keys < 2)


@pytest.mark.parametrize("decoupled", [False, True], ids=["standard", "decoupled"])
@pytest.mark.parametrize("case", [c for c in CASES if c.mask[:5] not in ("bias", "float")], ids=by_name)
def test_fused_kernels_and_the_scores_in_chunks_agree(case, decoupled):
    """A float mask, here of zeros, takes the way over the scores."""
    q, k, _ = case.inputs()
    options = case.options()
    mask = options.pop("attn_mask")
    if mask is None:
        mask = torch.ones(case.n, case.m, dtype=torch.bool)
    own = self_score(case) if decoupled else None
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    one = qk.attention.attention_statistics(q, k, own, attn_mask=mask, **options)
    other = qk.attention.attention_statistics(q, k, own, attn_mask=added, **options)
    assert torch.equal(one.keys, other.keys)
    for name in ("log_sum_exp", "entropy", "largest"):
        difference = getattr(one, name).nan_to_num(neginf=0.0) - getattr(other, name).nan_to_num(neginf=0.0)
        assert difference.abs().max() < 1e-13, name


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("case", [c for c in CASES if c.mask != "bias"], ids=by_name)
def test_without_a_preference_the_entropy_is_the_log_of_the_number_of_keys(case, largest):
    q, k, _ = case.inputs()
    found = qk.attention.attention_statistics(0.0 * q, k, **case.options(), largest=largest)
    some = found.keys > 0
    log_keys = found.keys.double().log()
    assert (found.entropy - log_keys)[some].abs().max() < 1e-14
    assert (found.log_sum_exp - log_keys)[some].abs().max() < 1e-14
    assert (found.effective_keys - found.keys).abs().max() < 1e-13
    assert ((found.normalised_entropy - 1)[found.keys > 1].abs() < 1e-14).all()
    if largest:
        assert (found.largest * found.keys - some.double()).abs().max() < 1e-14


def test_a_row_with_one_key_has_no_normalised_entropy_anywhere():
    """Neither sharp nor spread: `dynamics.sharpness` says the same of the same weights."""
    q, k, _ = Case().inputs()
    found = statistics(Case(causal=True)).normalised_entropy
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(
        torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf
    )
    same = qk.dynamics.sharpness(
        scores.softmax(-1), torch.ones(7, 7, dtype=torch.bool).tril()
    ).normalised_entropy
    assert torch.equal(found.isnan(), same.isnan())
    assert found[..., 0].isnan().all()
    assert (found - same)[..., 1:].abs().max() < 1e-12


@pytest.mark.parametrize("largest", [True, False])
def test_rows_without_keys_are_zero_and_not_counted(largest):
    found = statistics(Case(mask="left padding", causal=True), largest=largest)
    empty = found.keys == 0
    assert empty[1, :, :3].all()
    assert not empty[0].any()
    assert (found.log_sum_exp[empty] == -math.inf).all()
    for values in (found.entropy, found.effective_keys):
        assert (values[empty] == 0).all()
    if largest:
        assert (found.largest[empty] == 0).all()
        assert (found.largest[~empty] > 0).all()


@pytest.mark.parametrize("largest", [True, False])
def test_one_key_takes_everything_when_the_scores_are_large(largest):
    k = torch.eye(40).expand(2, 3, 40, 40)
    q = 1e4 * k.flip(-1)  # each token looks for one other
    found = qk.attention.attention_statistics(q, k, scale=1.0, largest=largest)
    assert found.entropy.min() >= 0
    assert found.entropy.max() < 2e-3  # of log-sum-exps of 1e4, known to seven digits
    assert found.effective_keys.min() >= 1
    assert (found.log_sum_exp - 1e4).abs().max() < 1e-2
    if largest:
        assert (found.largest - 1).abs().max() < 1e-6


@pytest.mark.parametrize("mask", ["none", "right padding", "bias"])
def test_rounding_leaves_the_ranges(mask):
    """Scores of hundreds in float32: the entropy is a difference of large numbers."""
    case = Case(n=60, m=60, mask=mask)
    q, k, _ = case.inputs(dtype=torch.float32)
    found = qk.attention.attention_statistics(100 * q, k, **case.options())
    assert (found.entropy == 0).any()
    assert found.entropy.min() >= 0
    assert found.effective_keys.min() >= 1
    assert found.largest.max() <= 1


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("mask", ["none", "bias"])
def test_one_number_added_to_all_scores_moves_the_log_sum_exp_alone(mask, largest):
    case = Case(mask=mask, causal=True)
    q, k, _ = case.inputs()
    constant = torch.full((7, 7), 2.5, dtype=torch.float64)
    moved = constant if case.attn_mask() is None else case.attn_mask() + constant
    found = statistics(case, largest=largest)
    other = qk.attention.attention_statistics(q, k, attn_mask=moved, is_causal=True, largest=largest)
    assert (other.log_sum_exp - found.log_sum_exp - 2.5).abs().max() < 1e-13
    assert (other.entropy - found.entropy).abs().max() < 1e-13


@pytest.mark.parametrize("largest", [True, False])
def test_the_own_product_as_self_score_is_standard_attention(largest):
    case = Case(causal=True, mask="bias", groups=2)
    q, k, _ = case.inputs()
    own = (q * k.repeat_interleave(2, 1)).sum(-1)
    one = qk.attention.attention_statistics(q, k, own, **case.options(), largest=largest)
    other = statistics(case, largest=largest)
    assert (one.entropy - other.entropy).abs().max() < 1e-13
    assert (one.log_sum_exp - other.log_sum_exp).abs().max() < 1e-13


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
@pytest.mark.parametrize("mask", ["none", "bias", "right padding"])
def test_a_self_score_of_minus_infinity_is_no_diagonal_attention(mask, scale, largest):
    case = Case(causal=True, mask=mask)
    q, k, _ = case.inputs()
    nothing = torch.full((2, 4, 7), -math.inf)
    options = case.options()
    found = qk.attention.attention_statistics(q, k, nothing, **options, scale=scale, largest=largest)
    assert found.entropy.isfinite().all()
    others = ~torch.eye(7, dtype=torch.bool)
    given = options.pop("attn_mask")
    if given is not None and given.dtype == torch.bool:
        others = others & given
    elif given is not None:
        others = given.masked_fill(~others, -math.inf)
    other = qk.attention.attention_statistics(q, k, attn_mask=others, **options, scale=scale, largest=largest)
    assert torch.equal(found.keys, other.keys)
    assert (found.keys[:, :, 0] == 0).all()
    assert (found.entropy - other.entropy).abs().max() < 1e-13
    assert (found.log_sum_exp.exp() - other.log_sum_exp.exp()).abs().max() < 1e-12


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_chunks_do_not_show(chunk):
    for case in (
        Case(causal=True, mask="bias"),
        Case(mask="right padding", groups=1),
        Case(n=3, m=9, causal=True),
    ):
        one, other = statistics(case, decoupled=True, chunk=chunk), statistics(case, decoupled=True)
        assert torch.equal(one.keys, other.keys)
        assert (one.entropy - other.entropy).abs().max() < 1e-14
        assert (one.largest - other.largest).abs().max() < 1e-14


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype, largest):
    q, k, _ = Case(n=33, m=33).inputs(dtype=dtype)
    one = qk.attention.attention_statistics(q, k, is_causal=True, largest=largest)
    other = qk.attention.attention_statistics(q.float(), k.float(), is_causal=True, largest=largest)
    assert one.entropy.dtype == torch.float32
    assert torch.equal(one.entropy, other.entropy)


@pytest.mark.parametrize("mask", ["none", "bias"])
def test_autocast_does_not_reach_the_statistics(mask):
    case = Case(mask=mask)
    q, k, _ = case.inputs(dtype=torch.float32)
    one = qk.attention.attention_statistics(q, k, **case.options())
    with torch.autocast("cpu", torch.bfloat16):
        other = qk.attention.attention_statistics(q, k, **case.options())
    assert torch.equal(one.entropy, other.entropy)
    assert torch.equal(one.largest, other.largest)


@pytest.mark.parametrize("largest", [True, False])
def test_statistics_ask_for_no_gradient(largest):
    q, k, _ = (x.requires_grad_() for x in Case().inputs())
    found = qk.attention.attention_statistics(q, k, largest=largest)
    assert not found.log_sum_exp.requires_grad
    assert not found.entropy.requires_grad


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("score", [4e3, 4e5, -4e5])
def test_equal_scores_of_any_size_are_uniform(largest, score):
    """In float32 a log-sum-exp of 4e5 has no digit behind the point that the entropy could be taken from."""
    k = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(2)).expand(1, 1, 64, 8)
    q = score * k / k.square().sum(-1, keepdim=True)
    found = qk.attention.attention_statistics(q, k, scale=1.0, largest=largest)
    assert (found.entropy - math.log(64)).abs().max() < 1e-5
    assert (found.log_sum_exp - score).abs().max() < 1e-6 * abs(score) + 5
    if largest:
        assert (found.largest * 64 - 1).abs().max() < 1e-6


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("mask", ["none", "right padding"])
def test_what_all_keys_have_in_common_costs_no_precision(largest, mask):
    case = Case(n=90, m=90, d=16, mask=mask, groups=2)
    q, k, _ = case.inputs(dtype=torch.float32)
    k = k + 100 * torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(2))
    found = qk.attention.attention_statistics(q, k, **case.options(), largest=largest)
    exact = qk.attention.attention_statistics(q.double(), k.double(), **case.options())
    assert exact.log_sum_exp.max() > 200
    print((found.entropy - exact.entropy).abs().max())
    assert (found.entropy - exact.entropy).abs().max() < 5e-5
    assert (found.log_sum_exp - exact.log_sum_exp).abs().max() < 2e-4


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_no_row_sees_cost_no_precision(causal):
    case = Case(n=20, m=30, causal=causal, mask="none")
    q, k, _ = case.inputs(dtype=torch.float32)
    mask = torch.arange(30) < 25
    start = 3 if causal else None
    options = {"attn_mask": None if causal else mask, "is_causal": causal, "query_start": start}
    plain = qk.attention.attention_statistics(q, k, **options, largest=False)
    for garbage in (1e30, math.nan) if causal else (1e30,):
        k[:, :, 25:] = garbage
        found = qk.attention.attention_statistics(q, k, **options, largest=False)
        assert (found.entropy - plain.entropy).abs().max() < 2e-6


@pytest.mark.parametrize("largest", [True, False])
def test_rounding_stays_below_the_number_of_keys(largest):
    for m in (3, 7, 1000, 1023):
        q, k = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, m, 4)
        found = qk.attention.attention_statistics(q, k, largest=largest)
        assert found.effective_keys.max() <= m
        assert found.effective_keys.min() > m * (1 - 1e-5)
        assert found.normalised_entropy.max() <= 1


@pytest.mark.parametrize("largest", [True, False])
def test_nan_in_a_mask_is_seen(largest):
    q, k, _ = Case().inputs()
    mask = torch.zeros(7, 7, dtype=torch.float64)
    mask[4, 2] = math.nan
    found = qk.attention.attention_statistics(q, k, attn_mask=mask, largest=largest)
    row = (torch.arange(7) == 4).expand(2, 4, 7)
    for values in (found.log_sum_exp, found.entropy, found.effective_keys, found.normalised_entropy):
        assert torch.equal(values.isnan(), row)
    assert (found.keys == 7).all()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("shape", [(0, 4, 3, 5), (2, 4, 0, 5), (2, 4, 3, 0)], ids=str)
def test_no_sequences_no_queries_and_no_keys(shape, largest):
    b, h, n, m = shape
    q, k = torch.zeros(b, h, n, 4), torch.zeros(b, h, m, 4)
    found = qk.attention.attention_statistics(q, k, largest=largest)
    assert found.keys.shape == found.entropy.shape == (b, h, n)
    assert found.entropy.sum() == found.effective_keys.sum() == found.keys.sum() == 0
    assert (found.log_sum_exp == -math.inf).all()


class _Largest(TorchDispatchMode):
    """Watches the number of elements of everything that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return result


@pytest.mark.parametrize("options", [{"largest": False}, {"chunk": 5}, {}], ids=str)
def test_nothing_of_the_size_of_all_scores_is_made(options):
    b, h, n, d = 2, 8, 800, 4
    q, k = torch.randn(2, b, h, n, d)
    with _Largest() as watched:
        qk.attention.attention_statistics(q, k, torch.zeros(b, h, n), is_causal=True, **options)
    assert watched.elements <= 2**19 < b * h * n * n / 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (2, 7, 5)}, r"query has shape \(2, 7, 5\)"),
        ({"key": (2, 4, 7, 6)}, r"key \(2, 4, 7, 6\)"),
        ({"key": (2, 2, 7, 5)}, "enable_gqa=True"),
        ({"self_score": (2, 4, 6)}, r"self_score.*\(2, 4, 6\).*\(2, 4, 7\)"),
        ({"query": (2, 4, 8, 5), "self_score": (2, 4, 8)}, "8 queries for 7 keys"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.5}, "chunk is 2.5"),
        ({"query": (2, 4, 7, 0), "key": (2, 4, 7, 0)}, "of no features"),
    ],
)
def test_statistics_say_what_does_not_fit(change, message):
    chunk = change.pop("chunk", None)
    shapes = {"query": (2, 4, 7, 5), "key": (2, 4, 7, 5), "self_score": (2, 4, 7)} | change
    with pytest.raises(AttentionError, match=message):
        qk.attention.attention_statistics(*(torch.zeros(s) for s in shapes.values()), chunk=chunk)


def test_standard_attention_to_another_sequence_has_statistics_too():
    case = Case(n=9, m=4)
    q, k, _ = case.inputs()
    for largest in (True, False):
        found = qk.attention.attention_statistics(q, k, largest=largest)
        weights = (q @ k.mT / math.sqrt(5)).softmax(-1)
        assert (found.entropy - torch.special.entr(weights).sum(-1)).abs().max() < 1e-13


def test_where_a_query_stands_makes_no_difference_to_standard_bidirectional_attention():
    q, k, _ = Case().inputs()
    one = qk.attention.attention_statistics(q, k)
    other = qk.attention.attention_statistics(q, k, query_start=100)
    assert torch.equal(one.entropy, other.entropy)


@pytest.mark.parametrize("start", [1, torch.tensor(1), 0.5])
def test_statistics_name_a_start_beside_the_keys(start):
    q, k, _ = Case().inputs()
    with pytest.raises(AttentionError, match="query_start is"):
        qk.attention.attention_statistics(q, k, is_causal=True, query_start=start)
