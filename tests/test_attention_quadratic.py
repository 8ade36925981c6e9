"""The self score of x: its values and every kind of derivative are those of the formula."""

from __future__ import annotations

import pytest
import torch

from qkform.attention.quadratic import quadratic


def formula(x, v):
    return torch.einsum("bnd,hd->bhn", x * x, v)


def arguments(n=5, **options):
    torch.manual_seed(0)
    return torch.randn(2, n, 6, dtype=torch.float64, **options), torch.randn(
        3, 6, dtype=torch.float64, **options
    )


@pytest.mark.parametrize("n", [0, 1, 5])
def test_values_and_gradients_are_those_of_the_formula(n):
    x, v = arguments(n, requires_grad=True)
    grad = torch.randn(2, 3, n, dtype=torch.float64)
    torch.testing.assert_close(quadratic(x, v), formula(x, v))
    assert quadratic(x, v).is_contiguous()
    for one, two in zip(
        *(torch.autograd.grad(f(x, v), (x, v), grad) for f in (quadratic, formula)), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("which", [0, 1])
def test_only_what_is_asked_for_has_a_gradient(which):
    given = list(arguments())
    given[which].requires_grad_()
    quadratic(*given).sum().backward()
    assert given[which].grad is not None
    assert given[1 - which].grad is None


def test_second_derivatives():
    x, v = arguments(requires_grad=True)
    assert torch.autograd.gradcheck(quadratic, (x, v))
    assert torch.autograd.gradgradcheck(quadratic, (x, v))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms():
    x, v = arguments()
    for transform in (
        lambda f: torch.func.grad(lambda a: f(a, v).sum())(x),
        lambda f: torch.func.vmap(torch.func.grad(lambda a: f(a[None], v).sum()))(x),
        lambda f: torch.func.jvp(lambda a: f(a, v), (x,), (torch.ones_like(x),))[1],
        lambda f: torch.func.hessian(lambda a: f(a, v).sum())(x),
    ):
        torch.testing.assert_close(transform(quadratic), transform(formula))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found, wanted = (
            torch.autograd.forward_ad.unpack_dual(f(dual, v)).tangent for f in (quadratic, formula)
        )
        torch.testing.assert_close(found, wanted)
