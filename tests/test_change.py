"""Laws of the change from one form to another, and its null against simulation."""

from __future__ import annotations

import numpy as np
import pytest

import qkform as qk
from qkform.errors import FormError
from qkform.form import reference
from qkform.form.change import change, change_form


def a_form(rng, n=4, g=2, d=13, k=3, noise=1.0):
    w_k = rng.normal(size=(g, d, k))
    return qk.BilinearForm(np.repeat(w_k, n // g, 0) + noise * rng.normal(size=(n, d, k)), w_k)


def test_the_change_form_is_the_difference_of_the_matrices():
    rng = np.random.default_rng(0)
    a, b = a_form(rng), a_form(rng)
    moved = change_form(a, b)
    np.testing.assert_allclose(moved.matrix(), b.matrix() - a.matrix(), atol=1e-12)
    np.testing.assert_allclose(moved.total().matrix(), b.total().matrix() - a.total().matrix(), atol=1e-12)
    assert moved.kv_head(3) == a.kv_head(3) == 1


def test_size_and_cosine_are_those_of_the_matrices():
    rng = np.random.default_rng(1)
    a, b = a_form(rng), a_form(rng)
    found = change(a, b)
    for h, (x, y) in enumerate(zip(a.matrix(), b.matrix(), strict=True)):
        assert found.size[h] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
        assert found.cosine[h] == pytest.approx(
            (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12
        )
        assert found.form.symmetry()[h] == pytest.approx(reference.symmetry(y - x), abs=1e-12)


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9])
def test_a_tiny_change_is_measured_to_its_own_precision(size):
    """Forms that hardly differ must not cancel: the size of a change of 1e-9 is right to six digits."""
    rng = np.random.default_rng(2)
    a = a_form(rng)
    d_q, d_k = (size * rng.normal(size=w.shape) for w in (a.w_q, a.w_k))
    b = qk.BilinearForm(a.w_q + d_q, a.w_k + d_k)
    d_q, d_k = b.w_q - a.w_q, b.w_k - a.w_k  # what the sums really are
    found = change(a, b)
    for h in range(4):
        g = a.kv_head(h)
        moved = d_q[h] @ b.w_k[g].T + a.w_q[h] @ d_k[g].T
        w = a.matrix()[h]
        assert found.size[h] == pytest.approx(np.linalg.norm(moved) / np.linalg.norm(w), rel=1e-6)
        s_a = a.symmetry()[h]
        first = 2 * (moved * (w.T - s_a * w)).sum() + (moved * (moved.T - s_a * moved)).sum()
        expected = first / np.linalg.norm(b.matrix()[h]) ** 2
        assert found.symmetry[h] == pytest.approx(expected, rel=1e-6)


def test_float32_weights_are_compared_in_double_precision():
    rng = np.random.default_rng(3)
    w_q, w_k = (rng.normal(size=(2, 40, 8)).astype(np.float32) for _ in range(2))
    nudged = np.nextafter(w_q, np.float32(np.inf))
    found = change(qk.BilinearForm(w_q, w_k), qk.BilinearForm(nudged, w_k))
    exact = [
        np.linalg.norm((nudged[h].astype(float) - w_q[h]) @ w_k[h].astype(float).T)
        / np.linalg.norm(w_q[h].astype(float) @ w_k[h].astype(float).T)
        for h in range(2)
    ]
    np.testing.assert_allclose(found.size, exact, rtol=1e-6)


def test_no_change_and_a_change_of_scale_leave_symmetry_where_it_is():
    rng = np.random.default_rng(4)
    a = a_form(rng)
    same = change(a, a)
    assert same.size.tolist() == [0.0] * 4
    assert same.cosine.tolist() == [1.0] * 4
    assert same.null_std.tolist() == [0.0] * 4
    longer = change(a, qk.BilinearForm(1.5 * a.w_q, a.w_k))
    np.testing.assert_allclose(longer.size, 0.5)
    np.testing.assert_allclose(longer.cosine, 1.0)
    assert np.abs(longer.null_mean).max() < 1e-12


HEADS = {
    "random": lambda rng, q: (q, rng.normal(size=q.shape)),
    "half symmetric": lambda rng, q: (q, 0.7 * q + 0.7 * rng.normal(size=q.shape)),
    "symmetric": lambda rng, q: (q, q.copy()),
    "skew": lambda rng, q: (q, np.stack([q[:, 1::2], -q[:, 0::2]], 2).reshape(q.shape)),
    "few directions": lambda rng, q: (
        q / np.arange(1, 9),
        (0.7 * q + 0.7 * rng.normal(size=q.shape)) / np.arange(1, 9),
    ),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("on_q", "on_k"), [(0.03, 0.0), (0.03, 0.03), (0.3, 0.3), (3.0, 3.0)])
def test_the_null_is_what_noise_on_the_weights_gives(kind, on_q, on_k):
    """z of pure noise has mean 0 and standard deviation 1; where the null is rough, it is wide and never narrow."""
    rng = np.random.default_rng(5)
    q, k = HEADS[kind](rng, rng.normal(size=(64, 8)))
    sizes = on_q * np.abs(q).mean(), on_k * np.abs(k).mean()
    noisy = [
        [(w + size * rng.normal(size=w.shape)) for w, size in zip((q, k), sizes, strict=True)]
        for _ in range(500)
    ]
    before = qk.BilinearForm(np.stack([q] * 500), np.stack([k] * 500))
    found = change(before, qk.BilinearForm(*(np.stack(side) for side in zip(*noisy, strict=True))))
    z = found.z()
    exact = kind in ("random", "half symmetric")
    assert abs(z.mean()) < (0.2 if exact else 0.45)
    assert (0.9 if exact else 0.5) < z.std() < 1.12
    assert (np.abs(z) > 2).mean() < 0.09


def test_a_change_that_no_noise_makes_stands_out():
    rng = np.random.default_rng(8)
    a = a_form(rng, n=1, g=1, d=64, k=8)
    towards = 0.1 * (a.w_k - a.w_q)  # queries become keys: more symmetric
    assert change(a, qk.BilinearForm(a.w_q + towards, a.w_k)).z()[0] > 5
    assert change(a, qk.BilinearForm(a.w_q - towards, a.w_k)).z()[0] < -5


def test_a_float32_head_that_hardly_moves_is_no_sensation():
    """Symmetries of float32 products differ by 1e-7 for want of digits; the change of symmetry must not."""
    rng = np.random.default_rng(9)
    q = rng.normal(size=(1, 256, 16)).astype(np.float32)
    for size in (1e-3, 1e-4, 1e-6):
        z = [
            change(qk.BilinearForm(q, q), qk.BilinearForm(q + n, q)).z()[0]
            for n in (size * rng.normal(size=(20, *q.shape))).astype(np.float32)
        ]
        assert np.abs(z).max() < 5


def test_biases_change_like_weights():
    rng = np.random.default_rng(10)
    a, b = (a_form(rng) for _ in range(2))
    forms = [
        qk.BilinearForm(f.w_q, f.w_k, b_q=rng.normal(size=(4, 3)), b_k=rng.normal(size=(2, 3)))
        for f in (a, b)
    ]
    wide = [
        np.stack(
            [
                np.vstack([f.w_q[h], f.b_q[h]]) @ np.vstack([f.w_k[f.kv_head(h)], f.b_k[f.kv_head(h)]]).T
                for h in range(4)
            ]
        )
        for f in forms
    ]
    moved = wide[1] - wide[0]
    share = 1 - (moved[:, :-1, :-1] ** 2).sum((1, 2)) / (moved**2).sum((1, 2))
    np.testing.assert_allclose(change_form(*forms).bias_share(), share, rtol=1e-10)
    without = change_form(forms[0], qk.BilinearForm(b.w_q, b.w_k))
    assert (without.bias_share() > 0).all()


def test_forms_of_different_shapes_have_no_difference():
    rng = np.random.default_rng(6)
    with pytest.raises(FormError, match="different shapes"):
        change(a_form(rng), a_form(rng, d=14))


def test_a_head_without_weights_has_no_change():
    rng = np.random.default_rng(7)
    a, b = a_form(rng), a_form(rng)
    w_q = b.w_q.copy()
    w_q[1] = 0.0
    w_q[2, 0, 0] = np.nan
    found = change(a, qk.BilinearForm(w_q, b.w_k))
    for values in (found.size, found.cosine, found.symmetry, found.null_mean, found.null_std):
        assert np.isfinite(values).tolist() == [True, False, False, True]
