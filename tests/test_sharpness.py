"""`sharpness` and the proxies: how concentrated attention is, and whether it says what the model decides by."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import spearmanr

from qkform import dynamics
from qkform.dynamics import (
    attention_mass,
    comprehensiveness,
    leave_one_out,
    rank_correlation,
    sharpness,
    sufficiency,
)
from qkform.errors import DynamicsError

MEASURES = (
    "entropy",
    "normalised_entropy",
    "effective_tokens",
    "largest",
    "participation",
    "gini",
    "normalised_gini",
    "mass",
)


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    """Weights that sum to 1."""
    w = np.random.default_rng(seed).exponential(size=shape) ** 2
    return w / w.sum(-1, keepdims=True)


# ---- closed forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 15), (3, 4), (5, 50)])
@pytest.mark.parametrize("gap", [0.0, 0.5, 2.0, 5.0])
def test_two_groups_have_their_closed_forms(m: int, n: int, gap: float) -> None:
    """THEORY section 1: m tokens share alpha, n the rest."""
    alpha = m * math.exp(gap) / (m * math.exp(gap) + n)
    p = np.concatenate([np.full(m, alpha / m), np.full(n, (1 - alpha) / n)])[None]
    found = sharpness(p, tokens=list(range(m)))
    entropy = -alpha * math.log(alpha / m) - (1 - alpha) * math.log((1 - alpha) / n)
    gini = alpha - m / (m + n)
    expected = {
        "entropy": entropy,
        "normalised_entropy": entropy / math.log(m + n),
        "effective_tokens": math.exp(entropy),
        "largest": alpha / m,
        "participation": 1 / (alpha**2 / m + (1 - alpha) ** 2 / n),
        "gini": gini,
        "normalised_gini": gini * (m + n) / (m + n - 1),
        "mass": alpha,
    }
    for name, value in expected.items():
        scale = m + n if name in ("effective_tokens", "participation") else max(1.0, entropy)
        assert abs(getattr(found, name)[0] - value) <= 1e-15 * scale, name
    assert found.keys.tolist() == [m + n]


def test_uniform_and_single_weights_are_the_ends() -> None:
    uniform, single = sharpness(np.full((1, 8), 1 / 8)), sharpness(np.eye(8)[:1])
    assert [float(getattr(uniform, name)[0]) for name in MEASURES[:-1]] == pytest.approx(
        [math.log(8), 1, 8, 1 / 8, 8, 0, 0], abs=1e-14
    )
    assert [float(getattr(single, name)[0]) for name in MEASURES[:-1]] == pytest.approx(
        [0, 0, 1, 1, 1, 7 / 8, 1], abs=1e-14
    )


def test_gini_is_the_mean_difference() -> None:
    """G = sum_ij |p_i - p_j| / (2 N sum p), whatever the order."""
    p = rows(4, 9)
    expected = np.abs(p[:, :, None] - p[:, None]).sum((1, 2)) / (2 * 9)
    assert_allclose(sharpness(p).gini, expected, atol=1e-15)
    assert_allclose(sharpness(p[:, ::-1]).gini, expected, atol=1e-15)


# ---- closed keys -------------------------------------------------------------------------------------------


def test_closed_keys_have_no_part_in_anything() -> None:
    """A padded row is the row without its padding, whatever stands there."""
    p, hidden = rows(2, 3, 5, 9), np.random.default_rng(1).random((2, 1, 1, 9)) < 0.4
    mask = ~hidden
    tokens = np.arange(9) % 3 == 0
    for filler in (0.0, 0.3, np.nan, -1.0):
        given = np.where(mask, p, filler)
        found = sharpness(given, mask, tokens=tokens)
        for b in range(2):
            kept = mask[b, 0, 0]
            expected = sharpness(p[b][..., kept], tokens=tokens[kept])
            for name in MEASURES:
                assert_allclose(getattr(found, name)[b], getattr(expected, name), rtol=1e-12, atol=1e-14)
            assert (found.keys[b] == kept.sum()).all()


def test_causal_rows_count_their_past_alone() -> None:
    mask = np.tril(np.ones((6, 6), dtype=bool))
    p = mask / mask.sum(1, keepdims=True)
    found = sharpness(p, mask)
    assert found.keys.tolist() == [1, 2, 3, 4, 5, 6]
    assert_allclose(found.effective_tokens, np.arange(1, 7), rtol=1e-14)
    assert_allclose(found.normalised_entropy[1:], 1.0)
    assert np.isnan(found.normalised_entropy[0])
    assert_allclose(found.gini, 0.0, atol=1e-15)
    assert sharpness(p).normalised_gini[0] == pytest.approx(1.0)  # all six keys counted: another question


def test_rows_with_one_key_have_no_choice() -> None:
    found = sharpness(np.array([[0.4, 0.6]]), np.array([[False, True]]), tokens=[1])
    assert [
        float(getattr(found, n)[0]) for n in ("entropy", "effective_tokens", "largest", "gini", "mass")
    ] == [*(0.0, 1.0, 1.0, 0.0, 1.0)]
    assert np.isnan([found.normalised_entropy[0], found.normalised_gini[0]]).all()


@pytest.mark.parametrize("weights", [[[0.5, 0.5]], [[np.nan, np.nan]], [[0.0, 0.0]]])
def test_rows_without_keys_have_no_sharpness(weights: Any) -> None:
    found = sharpness(np.array(weights), np.zeros((1, 2), dtype=bool), tokens=[0])
    assert found.keys.tolist() == [0]
    assert all(np.isnan(getattr(found, name)[0]) for name in MEASURES)
    nothing = sharpness(np.array([[0.0, 0.0], [0.5, 0.5]]))
    assert np.isnan(nothing.entropy).tolist() == [True, False]


def test_weights_are_those_of_the_choice_among_open_keys() -> None:
    p = rows(3, 6)
    for name in MEASURES[:-1]:
        assert_allclose(
            getattr(sharpness(p * 0.7), name), getattr(sharpness(p), name), rtol=1e-13, atol=1e-14
        )


# ---- kinds of arrays ---------------------------------------------------------------------------------------


def test_torch_and_numpy_give_the_same() -> None:
    p, mask = rows(2, 3, 5, 5), np.tril(np.ones((5, 5), dtype=bool))
    expected = sharpness(p, mask, tokens=[0, 3])
    for given in (mask, torch.from_numpy(mask), torch.from_numpy(mask).long()):
        found = sharpness(torch.from_numpy(p).requires_grad_(), given, tokens=[0, 3])
        for name in MEASURES:
            value = getattr(found, name)
            assert isinstance(value, torch.Tensor)
            assert value.dtype == torch.float64
            assert not value.requires_grad
            assert_allclose(value.numpy(), getattr(expected, name), rtol=1e-13, atol=1e-15)
        assert found.keys.dtype == torch.int64
    assert_allclose(sharpness(p, torch.from_numpy(mask)).entropy, expected.entropy)
    low = sharpness(torch.from_numpy(p).to(torch.bfloat16), mask)
    assert low.entropy.dtype == torch.float64
    assert_allclose(low.entropy.numpy(), expected.entropy, atol=0.02)


def test_it_agrees_with_the_statistics_of_attention() -> None:
    from qkform.attention import attention_statistics

    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 7, 4).double(), torch.randn(2, 3, 7, 4).double()
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    p = (q @ k.mT / 2).masked_fill(~mask, -torch.inf).softmax(-1)
    found, expected = sharpness(p, mask), attention_statistics(q, k, is_causal=True)
    assert_allclose(found.entropy, expected.entropy, atol=1e-12)
    assert_allclose(found.effective_tokens, expected.effective_keys, rtol=1e-12)
    assert_allclose(found.largest, expected.largest, rtol=1e-12)
    assert_allclose(found.normalised_entropy[..., 1:], expected.normalised_entropy[..., 1:], atol=1e-12)
    assert torch.equal(found.keys, expected.keys)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([[0.5, 0.5]],), "weights is a list"),
        ((np.ones((1, 0)),), r"weights has shape \(1, 0\)"),
        ((np.ones((1, 2), dtype=int),), "holds int64"),
        ((np.array([[-0.1, 1.1]]),), "weights go down to -0.1"),
        ((np.ones((1, 2)), np.ones((1, 3), dtype=bool)), r"mask has shape \(1, 3\).*\(1, 2\)"),
        ((np.ones((1, 2)), np.zeros((1, 2))), "mask holds float64; expected bool"),
        ((torch.ones(1, 2), torch.tensor([[2, 1]])), "mask holds torch.int64"),
        ((torch.ones(1, 2), torch.ones(3, 1, 3, dtype=torch.bool)), "mask has shape"),
    ],
)
def test_what_does_not_fit_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DynamicsError, match=message):
        sharpness(*given)
    with pytest.raises(DynamicsError, match="tokens has position 2; there are 2 keys"):
        sharpness(np.ones((1, 2)), tokens=[2])


# ---- attention mass ----------------------------------------------------------------------------------------


def test_mass_over_layers_is_their_mean_and_their_largest() -> None:
    weights, tokens = rows(3, 2, 4, 5, 5), np.array([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=bool)
    by_layer = np.stack([(w.mean(1)[:, -1] * tokens).sum(-1) for w in weights])
    assert_allclose(attention_mass(weights, tokens), by_layer.mean(0), rtol=1e-14)
    assert_allclose(attention_mass(weights, tokens, layers="max"), by_layer.max(0), rtol=1e-14)
    assert_allclose(
        attention_mass(list(weights), tokens, row=2)[0],
        (weights[:, 0].mean(1)[:, 2] * tokens[0]).sum(-1).mean(),
    )
    assert_allclose(
        attention_mass(weights, tokens, row=np.array([2, -1])),
        [attention_mass(weights, tokens, row=2)[0], attention_mass(weights, tokens)[1]],
    )


def test_rollout_multiplies_the_layers() -> None:
    weights = rows(3, 1, 2, 4, 4)
    mixed = [0.5 * w[0].mean(0) + 0.5 * np.eye(4) for w in weights]
    expected = (mixed[2] @ mixed[1] @ mixed[0])[-1]
    for j in range(4):
        assert_allclose(attention_mass(weights, [j], layers="rollout"), [expected[j]], rtol=1e-13)
    alone = weights[2, 0].mean(0) @ weights[1, 0].mean(0) @ weights[0, 0].mean(0)
    assert_allclose(attention_mass(weights, [1], layers="rollout", residual=0.0), [alone[-1, 1]], rtol=1e-13)
    assert_allclose(attention_mass(weights, [0, 1, 2, 3], layers="rollout"), [1.0], rtol=1e-14)


@pytest.mark.parametrize("layers", ["mean", "max", "rollout"])
def test_padding_has_no_part_in_the_mass(layers: Any) -> None:
    """The mass of a padded sequence is that of the sequence alone, on its last own token."""
    short = rows(2, 1, 3, 4, 4)
    padded = rows(2, 1, 3, 6, 6, seed=1)
    padded[..., :4, :4] = short
    mask = (np.arange(6) < 4)[None, None, None]
    tokens = np.array([[True, False, True, False, True, True]])
    expected = attention_mass(short, tokens[:, :4], layers=layers)
    assert_allclose(attention_mass(padded, tokens, mask, layers=layers), expected, rtol=1e-13)
    rows_too = mask & mask.swapaxes(-1, -2)
    assert_allclose(attention_mass(padded, tokens, rows_too, layers=layers), expected, rtol=1e-13)
    assert np.isnan(attention_mass(padded, tokens, rows_too, layers=layers, row=5)).all()
    found = attention_mass(
        torch.from_numpy(padded), torch.from_numpy(tokens), torch.from_numpy(mask), layers=layers
    )
    assert_allclose(found.numpy(), expected, rtol=1e-13)


def test_masses_that_make_no_sense() -> None:
    weights = rows(1, 1, 1, 3, 3)
    with pytest.raises(DynamicsError, match="layers='median'; known: mean, max, rollout"):
        attention_mass(weights, [0], layers="median")  # type: ignore[arg-type]
    with pytest.raises(DynamicsError, match="row is 3"):
        attention_mass(weights, [0], row=3)
    with pytest.raises(DynamicsError, match=r"expected \(B, n_heads, N, N\)"):
        attention_mass(weights[0], [0])


# ---- what the model says without them ----------------------------------------------------------------------


def test_leaving_out_and_keeping_the_tokens_attended_to_most() -> None:
    x, weights = [7, 1, 5, 2, 4], [0.5, 0.05, 0.3, 0.05, 0.1]

    def f(tokens: list[int]) -> float:
        return sum(tokens) / 100

    assert comprehensiveness(f, x, weights, share=0.4) == pytest.approx(0.12)
    assert sufficiency(f, x, weights, share=0.4) == pytest.approx(0.07)
    assert comprehensiveness(f, x, weights, share=0.2) == pytest.approx(0.07)
    assert comprehensiveness(f, x, weights, share=0.21) == pytest.approx(0.12)  # ceil
    assert sufficiency(f, x, weights, share=1) == 0.0
    assert comprehensiveness(f, x, [1, 1, 1, 1, 1], share=0.1) == pytest.approx(0.07)  # ties: the earlier
    assert_allclose(leave_one_out(f, x), np.array(x) / 100)


def test_order_and_kind_of_the_tokens_are_kept() -> None:
    seen: list[Any] = []

    def f(tokens: Any) -> Any:
        seen.append(tokens)
        return tokens[0] * 0.0 + len(tokens)

    for x in (np.array([3, 1, 2]), torch.tensor([3, 1, 2]), [3, 1, 2], (3, 1, 2)):
        seen.clear()
        assert comprehensiveness(f, x, [0.1, 0.6, 0.3], share=0.3) == 1.0
        assert [type(s) for s in seen] == [type(x)] * 2
        assert [list(map(int, s)) for s in seen] == [[3, 1, 2], [3, 2]]


def test_closed_tokens_are_never_given_to_the_model() -> None:
    x, mask, weights = [7, 1, 99, 2, 99], [1, 1, 0, 1, 0], [0.2, 0.1, 0.4, 0.1, 0.9]

    def f(tokens: list[int]) -> float:
        assert 99 not in tokens
        return float(sum(tokens))

    assert comprehensiveness(f, x, weights, share=0.5, mask=mask) == 8.0  # ceil(0.5 * 3) = 2
    assert sufficiency(f, x, weights, share=0.5, mask=mask) == 2.0
    assert leave_one_out(f, x, mask=mask).tolist()[:2] == [7.0, 1.0]
    assert np.isnan(leave_one_out(f, x, mask=mask)[[2, 4]]).all()
    assert rank_correlation(weights, leave_one_out(f, x, mask=mask), mask=mask) == pytest.approx(
        spearmanr([0.2, 0.1, 0.1], [7, 1, 2]).statistic
    )


@pytest.mark.parametrize("seed", range(6))
def test_rank_correlation_is_spearmans_with_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 5, 17), rng.integers(0, 7, 17) + 0.5
    assert rank_correlation(a, torch.from_numpy(b)) == pytest.approx(spearmanr(a, b).statistic, abs=1e-14)
    assert rank_correlation(a, -a) == -1.0
    assert rank_correlation(np.exp(a), a) == 1.0


def test_rank_correlations_that_do_not_exist() -> None:
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
    assert math.isnan(rank_correlation([1], [2]))
    assert math.isnan(rank_correlation([1, math.nan, 3], [1, 2, 3]))
    assert rank_correlation([1, math.nan, 3], [1, 2, 3], mask=[True, False, True]) == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comprehensiveness(sum, [1, 2], [0.5, 0.5], share=0), "share is 0"),
        (lambda: comprehensiveness(sum, [1, 2], [1.0]), r"weights has shape \(1,\) for 2 tokens"),
        (lambda: sufficiency(lambda x: np.ones(2), [1, 2], [0.5, 0.5]), r"f returned \(2,\)"),
        (lambda: leave_one_out(sum, [1, 2], mask=[True]), r"mask has shape \(1,\)"),
        (lambda: leave_one_out(sum, [1, 2], mask=[0.5, 1.0]), "expected"),
        (lambda: rank_correlation([1, 2], [1, 2, 3]), "no two values of the same entries"),
    ],
)
def test_proxies_say_what_does_not_fit(call: Any, message: str) -> None:
    with pytest.raises(DynamicsError, match=message):
        call()


# ---- names -------------------------------------------------------------------------------------------------


def test_public_names_are_functions_whatever_was_imported_first() -> None:
    import qkform.dynamics.conflicts
    import qkform.dynamics.spread  # noqa: F401

    for name in dynamics.__all__:
        assert getattr(dynamics, name).__doc__
        assert callable(getattr(dynamics, name)) or name in ("agreement", "one_layer")
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(dynamics, "nonsense")  # noqa: B009


def test_measuring_weights_needs_no_torch() -> None:
    code = (
        "import sys, numpy as np, qkform.dynamics as d; d.sharpness(np.ones((2, 3)))\n"
        "d.rank_correlation([1, 2], [3, 4]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# ---- what is no attention, or no tokens ---------------------------------------------------------------------


def test_positions_are_positions_whatever_kind_of_integer_they_are():
    weights = np.array([[0.5, 0.3, 0.2]])
    for tokens in ([1], (np.int64(1),), [np.int32(-2)]):
        assert_allclose(sharpness(weights, tokens=tokens).mass, [0.3])
    for tokens in (np.array([1]), torch.tensor([0]), 1, np.int64(1)):  # one would count for every key
        with pytest.raises(DynamicsError, match="tokens has shape"):
            sharpness(weights, tokens=tokens)


def test_weights_without_an_end_have_no_measures():
    weights = np.array([[np.inf, 1.0], [np.nan, 1.0], [0.5, 0.5]])
    assert_allclose(sharpness(weights).entropy, [np.nan, np.nan, math.log(2)])
    with pytest.raises(DynamicsError, match="masked array"):
        sharpness(np.ma.masked_array([0.5, 0.5], [True, False]))


def total(tokens):
    return sum(float(token) for token in tokens)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: comprehensiveness(total, "abc", [1, 2, 3]), "x is a str; expected tokens"),
        (lambda: leave_one_out(total, {1: 2}), "x is a dict"),
        (lambda: leave_one_out(total, 3), "x is a int"),
        (lambda: leave_one_out(total, torch.ones(1, 3, dtype=torch.int64)), r"shape \(1, 3\)"),
        (lambda: leave_one_out(None, [1, 2]), "f is a NoneType"),
        (lambda: sufficiency(total, [1, 2], [0.5, math.nan]), "weights is NaN at open token 1"),
        (lambda: sufficiency(total, [1, 2], [0.5, 0.5], mask=[0, 0]), "closes every token"),
        (lambda: sufficiency(total, [1, 2], [0.5, 0.5], share="all"), "share is 'all'"),
        (lambda: sufficiency(total, [1, 2], ["a", "b"]), "real numbers"),
        (lambda: rank_correlation([[1], [1, 2]], [1, 2]), "real numbers"),
        (lambda: rank_correlation([1, 2], [1j, 2]), "real numbers"),
        (lambda: attention_mass(None, [0]), "weights is a NoneType"),
        (lambda: attention_mass(np.ones((1, 1, 1, 2, 2)), [0], residual=1.5), "residual is 1.5"),
        (lambda: attention_mass(np.ones((1, 1, 1, 2, 2)), [0], residual=math.nan), "residual is nan"),
        (lambda: attention_mass(np.ones((1, 1, 1, 2, 2)), [0], layers=["mean"]), "known: mean, max"),
        (lambda: attention_mass(np.ones((1, 2, 1, 2, 2)), [0], row=[0, 1, 1]), "one for each of 2"),
        (lambda: attention_mass([np.ones((1, 1, 2, 2)), np.ones((1, 1, 3, 3))], [0]), "differ in shape"),
    ],
)
def test_what_has_no_proxy_says_why(ask, words):
    with pytest.raises(DynamicsError, match=words):
        ask()


def test_no_open_token_leaves_nothing_out_and_bfloat16_counts():
    assert np.isnan(leave_one_out(total, [1, 2], mask=[0, 0])).all()
    weights = torch.tensor([0.25, 0.75], dtype=torch.bfloat16)
    assert (
        comprehensiveness(lambda x: x.sum().bfloat16(), torch.tensor([3.0, 4.0]), weights, share=0.5) == 4.0
    )
    assert rank_correlation(weights, [1, 2]) == 1.0
