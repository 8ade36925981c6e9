"""`conflict`: diagonal against off-diagonal gradient, and the null that says what softmax alone makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkform import sites, surgery
from qkform.dynamics import Conflict, conflict, conflicts, decompose, fraction_negative
from qkform.dynamics.calls import Call
from qkform.dynamics.capture import Watched
from qkform.errors import DynamicsError
from tests.test_decomposition import PADDING, TOKENS, Masked, built, changed, close, labels, same, state_of

KINDS = ["bert", "gpt2", "llama", "vit", "encoder"]


def call(
    x: Tensor, slopes: Tensor, *, causal: bool = False, mask: Tensor | None = None, kind: str = "standard"
) -> Call:
    """Uniform attention over x (B, N, d) with dL/dA = slopes (B, H, N, N), by unit vectors as values."""
    batch, heads, n, _ = slopes.shape
    zeros = x.new_zeros(batch, heads, n, 2)
    unit = torch.eye(n, dtype=x.dtype).expand(batch, heads, n, n)
    return Call(x, zeros, zeros, unit, mask, causal, 0.5, kind=kind, grad=slopes)


def measured(given: Call | list[Call], permutations: int = 0, seed: int = 0) -> Conflict:
    calls = given if isinstance(given, list) else [given]
    return conflicts._conflict(Watched("here", None, None, calls), permutations, seed, None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the metric --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_scores_are_those_of_the_two_gradients(name: str) -> None:
    model, batch = built(name)
    for found, parts in zip(conflict(model, batch), decompose(model, batch), strict=True):
        assert found.module == parts.module
        for h in range(3 if name != "llama" else 6):
            d, o = parts.gamma_diagonal[h], parts.gamma_off_diagonal[h]
            s = (o + o.T) / 2
            expected = {
                "cosine": (d * s).sum() / d.norm() / s.norm(),
                "share": d.norm() ** 2 / (d.norm() ** 2 + o.norm() ** 2),
                "cancellation": 1 - (d + s).norm() / (d.norm() + s.norm()),
                "skew": ((o - o.T) / 2).norm() ** 2 / o.norm() ** 2,
            }
            for field, value in expected.items():
                close(getattr(found, field)[h], value)


@pytest.mark.parametrize("name", KINDS)
def test_the_closed_form_of_the_null_row_by_row(name: str) -> None:
    """E O = -sum_i beta_ii x_i m_i^T with m_i the mean of the other tokens that i may attend to, no padded one among
    them; and E ||sym O||^2, from the covariance of a row that is permuted."""
    model, batch = built(name)
    seen: list[Tensor] = []
    site = sites.find(model)[1]
    reader = site.module if name == "encoder" else site.shares["w_q"].at.owner
    handle = reader.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    found, parts = conflict(model, batch)[1], decompose(model, batch, beta=True)[1]
    handle.remove()
    x, beta = seen[0], parts.beta
    mean, noise = torch.zeros_like(parts.gamma), torch.zeros(len(parts.gamma), dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in beta.shape[:3])).tolist():
        keys = range(i + 1) if name in ("gpt2", "llama") else range(x.shape[1])
        others = [j for j in keys if j != i and (name == "vit" or PADDING[b, j])]
        if others:
            mean[h] -= beta[b, h, i, i] * torch.outer(x[b, i], x[b, others].mean(0))
        if len(others) > 1:
            covariance = beta[b, h, i, others].var() * (x[b, others].T.cov() * (len(others) - 1))
            # ||sym(x e^T)||^2 = (|x|^2 |e|^2 + (x . e)^2) / 2
            noise[h] += (x[b, i] @ x[b, i] * covariance.trace() + x[b, i] @ covariance @ x[b, i]) / 2
    for h, (d, o) in enumerate(zip(parts.gamma_diagonal, mean, strict=True)):
        s = (o + o.T) / 2
        close(found.null_closed[h], (d * s).sum() / d.norm() / (s.norm() ** 2 + noise[h]).sqrt())
    assert found.null.shape == (0, len(mean))
    assert torch.equal(found.excess, found.cosine - found.null_closed)
    assert found.p_value.isnan().all()
    assert found.null_spread.isnan().all()


@pytest.mark.parametrize("name", KINDS)
def test_the_closed_form_is_near_the_mean_over_permutations(name: str) -> None:
    model, batch = built(name)
    errors = [(c.null_closed - c.null_cosine).abs() for c in conflict(model, batch, permutations=150)]
    assert torch.cat(errors).max() < 0.12
    assert torch.cat(errors).mean() < 0.03


# ---- the null ----------------------------------------------------------------------------------------------


MASKS = {
    "open": (False, None),
    "causal": (True, None),
    "padded": (False, (torch.arange(6) < torch.tensor([[6], [4], [1]]))[:, None, None]),
    "both": (True, (torch.arange(6) < torch.tensor([[6], [4], [1]]))[:, None, None]),
    "by head": (False, normal(3, 2, 6, 6, seed=7) > -0.5),
}


@pytest.mark.parametrize("mask", MASKS)
def test_permutations_keep_every_row_sum(mask: str) -> None:
    """A feature that is 1 in every token sums a row: its column of O is -sum_i beta_ii x_i, permuted or not."""
    x = torch.cat([normal(3, 6, 4), torch.ones(3, 6, 1)], -1)
    causal, closed = MASKS[mask]
    given = [call(x, normal(3, 2, 6, 6, seed=1), causal=causal, mask=closed)]
    diagonal, off, mean, _ = conflicts._parts(given, None)
    close(off[:, :, -1], -diagonal[:, :, -1], 1e-12)
    close(mean[:, :, -1], off[:, :, -1], 1e-12)
    permuted = conflicts._permuted(given, None, torch.Generator().manual_seed(3))
    close(permuted[:, :, -1], off[:, :, -1], 1e-12)
    assert (permuted[:, :, :-1] - off[:, :, :-1]).abs().max() > 0.1 * off.abs().max()


@pytest.mark.parametrize("mask", MASKS)
def test_permutations_have_the_mean_of_the_closed_form(mask: str) -> None:
    x = normal(3, 6, 4) + 0.5
    causal, closed = MASKS[mask]
    given = [call(x, normal(3, 2, 6, 6, seed=1), causal=causal, mask=closed)]
    _, off, mean, noise = conflicts._parts(given, None)
    generator = torch.Generator().manual_seed(3)
    draws = torch.stack([conflicts._permuted(given, None, generator) for _ in range(1500)])
    error = draws.std(0) / len(draws) ** 0.5
    z = (draws.mean(0) - mean) / error.clamp(min=1e-12)
    assert z.abs().max() < 4.5
    assert z.square().mean().sqrt() < 1.25
    lengths = conflicts._symmetric(draws - mean).square().sum((2, 3))  # (draws, H)
    z = (lengths.mean(0) - noise) / lengths.std(0) * len(draws) ** 0.5
    assert z.abs().max() < 4
    assert (noise > 20 * lengths.std(0) / len(draws) ** 0.5).all()
    assert (
        (off - mean) / error.clamp(min=1e-12)
    ).abs().max() > 20  # the draws tell this gradient from their mean


def test_each_value_of_a_row_goes_to_each_open_key_as_often() -> None:
    """One row with one large beta: over many draws it is on every other open key equally, and never on a closed one."""
    slopes = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    slopes[0, 0, 1, 3] = 1.0
    open_keys = torch.tensor([True, True, False, True, True])
    given = call(torch.eye(5, dtype=torch.float64)[None], slopes, mask=open_keys[None, None, None])
    large = 0.5 * 0.25 * 0.75
    counts = torch.zeros(5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(900):
        row = conflicts._permuted([given], None, generator)[0, 1]
        assert row[[1, 2]].eq(0).all()
        counts += (row - large).abs() < 1e-12
    assert counts.tolist()[1:3] == [0, 0]
    assert (counts[[0, 3, 4]] - 300).abs().max() < 60


def test_a_shared_direction_makes_the_cosine_negative_for_free() -> None:
    """Self scores pay and nothing else conflicts: the cosine is far below 0, and so is the null; no excess."""
    x = normal(40, 8, 6) + 2.0
    slopes = normal(40, 5, 8, 8, seed=1) + 3 * torch.eye(8, dtype=torch.float64)
    found = measured(call(x, slopes), permutations=40)
    assert found.cosine.max() < -0.9
    assert found.fraction_negative == 1.0
    assert found.excess.abs().max() < 0.01
    assert found.p_value.min() > 0.02
    assert (found.null_cosine - found.null_closed).abs().max() < 0.01
    assert fraction_negative([found]) == (1.0, 1.0, 5)


def twins(sign: int) -> Conflict:
    """Six tokens with a twin each: what one's score with itself gains, its score with its twin gains or loses."""
    half = normal(1, 6, 20, seed=2)
    x = torch.cat([half, half + 0.05 * normal(1, 6, 20, seed=3)], 1)
    unit = torch.eye(12, dtype=torch.float64)
    return measured(call(x, (unit + sign * unit.roll(6, 1)).expand(1, 2, 12, 12)), permutations=50)


def test_conflict_beyond_the_null_is_seen() -> None:
    found = twins(-1)
    assert found.cosine.max() < -0.95
    assert found.null_cosine.min() > -0.5
    assert found.excess.max() < -0.5
    assert (found.p_value == 1 / 51).all()
    assert found.cancellation.min() > 0.9
    assert (found.excess < -2 * found.null_spread).all()


def test_agreement_is_no_conflict() -> None:
    found = twins(1)
    assert found.cosine.min() > 0.5
    assert found.excess.min() > 0.5
    assert (found.p_value == 1.0).all()
    assert found.fraction_negative == 0.0
    observed, null, count = fraction_negative([found])
    assert (observed, count) == (0.0, 2)
    assert null == float(found.null.lt(0).double().mean())
    assert 0.2 < null < 1.0


# ---- where there is no cosine ------------------------------------------------------------------------------


def test_rows_with_one_key_have_no_cosine() -> None:
    x = normal(4, 1, 3)
    found = measured(call(x, normal(4, 2, 1, 1)), permutations=3)
    for value in (found.cosine, found.null_closed, found.excess, found.p_value, found.null_cosine):
        assert value.isnan().all()
    assert math.isnan(found.fraction_negative)
    assert fraction_negative([found, found]).measured == 0
    assert fraction_negative([]).measured == 0


def test_attention_without_a_diagonal_has_no_cosine() -> None:
    model, batch = built("bert")
    for found in conflict(changed(surgery.set_attention_, model, "no-diagonal"), batch):
        assert found.cosine.isnan().all()
        assert not found.share.any()
    alone = measured(call(normal(2, 5, 3), normal(2, 1, 5, 5), kind="no-diagonal"))
    assert alone.cosine.isnan().all()


def test_heads_without_a_cosine_are_not_counted() -> None:
    slopes = normal(3, 2, 4, 4)
    slopes[:, 1] = 0.0
    found = measured(call(normal(3, 4, 5) + 1, slopes), permutations=4)
    assert found.cosine.isnan().tolist() == [False, True]
    assert fraction_negative([found]).measured == 1
    assert fraction_negative([found, found]).measured == 2


# ---- draws, calls, models ----------------------------------------------------------------------------------


def test_draws_are_those_of_the_seed() -> None:
    model, batch = built("gpt2")
    before = state_of(model)
    one = conflict(model, batch, permutations=3, seed=5)
    assert same(state_of(model), before)
    again = conflict(model, batch, permutations=3, seed=5, modules=["transformer.h.1.attn"])
    other = conflict(model, batch, permutations=3, seed=6)
    assert torch.equal(one[1].null, again[0].null)
    assert one[0].null.shape == (3, 3)
    assert not one[0].null.equal(other[0].null)
    close(one[0].excess, one[0].cosine - one[0].null.mean(0), 1e-14)
    with pytest.raises(DynamicsError, match="permutations is -1"):
        conflict(model, batch, permutations=-1)


def test_an_attention_that_runs_twice_has_one_gradient() -> None:
    x, slopes = normal(6, 5, 4) + 0.3, normal(6, 2, 5, 5, seed=1)
    whole = measured(call(x, slopes), permutations=2)
    parts = measured([call(x[:2], slopes[:2]), call(x[2:], slopes[2:])], permutations=2)
    for field in ("cosine", "share", "cancellation", "skew", "null_closed"):
        close(getattr(parts, field), getattr(whole, field), 1e-12)


@pytest.mark.parametrize("together", [1, 40])
def test_parts_make_the_same_scores(together: int, monkeypatch: Any) -> None:
    from qkform.dynamics import calls

    x, slopes = normal(3, 6, 4) + 0.3, normal(3, 2, 6, 6, seed=1)
    whole = measured(call(x, slopes, causal=True))
    monkeypatch.setattr(calls, "TOGETHER", together)
    parts = measured(call(x, slopes, causal=True), permutations=1)
    for field in ("cosine", "share", "cancellation", "skew", "null_closed"):
        close(getattr(parts, field), getattr(whole, field), 1e-12)


def test_padding_changes_nothing() -> None:
    """Scores of a padded batch are those of its sequences without the padding."""
    model, batch = built("gpt2")
    longer = {
        "input_ids": nn.functional.pad(TOKENS, (0, 3), value=4),
        "attention_mask": nn.functional.pad(PADDING, (0, 3)),
        "labels": nn.functional.pad(labels(), (0, 3), value=-100),
    }
    for found, expected in zip(conflict(model, longer), conflict(model, batch), strict=True):
        for field in ("cosine", "share", "cancellation", "skew", "null_closed"):
            close(getattr(found, field), getattr(expected, field), 1e-10)


def test_decoupled_models_have_both_gradients() -> None:
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
    model = surgery.decouple_(Masked(attention))
    nn.init.normal_(attention.self_score.v)
    given = {"x": normal(3, 5, 6)}

    def loss(y: Tensor) -> Tensor:
        return (y**3).sum()

    (found,) = conflict(model, given, loss_fn=loss, permutations=4)
    (parts,) = decompose(model, given, loss_fn=loss)
    d, o = parts.gamma_diagonal.flatten(1), ((parts.gamma + parts.gamma.mT) / 2).flatten(1)
    close(found.cosine, (d * o).sum(1) / d.norm(dim=1) / o.norm(dim=1))
    assert found.null.isfinite().all()
