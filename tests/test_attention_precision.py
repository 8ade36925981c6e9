"""Narrow types lose no more on the fused path than the definition does: small self weights, wide values, low masks."""

from __future__ import annotations

import pytest
import torch

from qkform.attention import decoupled_attention

NARROW = (torch.bfloat16, torch.float16)


def error(y, exact):
    """The largest relative error of a row."""
    return float(((y.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own", [0.0, 32.0])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_small_self_weight_is_not_lost_to_rounding(dtype, own, causal):
    torch.manual_seed(0)
    q, k = (0.3 * torch.randn(1, 2, 1024, 64, dtype=dtype) for _ in range(2))
    v = torch.randn(1, 2, 1024, 64, dtype=dtype)
    s = torch.full((1, 2, 1024), own)
    exact = decoupled_attention(*(x.double() for x in (q, k, v, s)), is_causal=causal, impl="reference")
    flash, reference = (
        error(decoupled_attention(q, k, v, s, is_causal=causal, impl=impl), exact)
        for impl in ("flash", "reference")
    )
    print(f"{flash:.4f} {reference:.4f}")
    assert flash <= 2 * reference


def test_gradients_of_the_self_score_do_not_overflow_in_float16():
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 9, 8, dtype=torch.float16) for _ in range(2))
    v = torch.full((1, 1, 9, 8), 6e4, dtype=torch.float16) * torch.where(torch.rand(1, 1, 9, 8) > 0.5, 1, -1)
    grad = torch.full((1, 1, 9, 8), 1e-3, dtype=torch.float16)
    found = []
    for impl in ("flash", "reference"):
        s = torch.zeros(1, 1, 9, requires_grad=True)
        out = decoupled_attention(q, k, v, s, impl=impl)
        found.append(torch.autograd.grad(out, s, grad)[0])
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0.05 * float(found[1].abs().max()))


def test_what_inference_mode_left_behind_serves_training():
    torch.manual_seed(0)
    given = [torch.randn(1, 2, 23, 8) for _ in range(3)] + [torch.randn(1, 2, 23)]
    with torch.inference_mode():
        decoupled_attention(*given)  # the mask of own keys is kept from here
    found = []
    for impl in ("flash", "reference"):
        leaves = [x.clone().requires_grad_() for x in given]
        found.append(torch.autograd.grad(decoupled_attention(*leaves, impl=impl).square().sum(), leaves))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
