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
        turned = moved - (moved * w).sum() / (w * w).sum() * w
        sine = np.linalg.norm(turned) / np.linalg.norm(w)
        expected = 2.0 * sine * np.sqrt((1 - a.symmetry()[h] ** 2) / (13**2 - 1))
        assert found.null_std[h] == pytest.approx(expected, rel=1e-2 if size > 1e-4 else 1e-5)


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


@pytest.mark.parametrize(("d", "k", "r"), [(16, 3, 0.05), (16, 3, 1.0), (24, 6, 0.3), (24, 2, 4.0)])
def test_the_null_is_what_random_turns_give(d, k, r):
    """Mean and standard deviation of the change of symmetry over random changes at one angle."""
    rng = np.random.default_rng(5)
    a = a_form(rng, n=1, g=1, d=d, k=k)
    w = a.matrix()[0]
    w /= np.linalg.norm(w)
    factors = rng.normal(size=(2, d, k))
    left, right = (
        np.linalg.svd(f, full_matrices=False)[0] for f in factors
    )  # every change has this spectrum
    spectrum = np.linspace(1.0, 2.0, k)
    changes = []
    for _ in range(4000):
        turn_left, turn_right = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
        moved = turn_left @ (left * spectrum) @ right.T @ turn_right
        moved -= (moved * w).sum() * w
        moved *= r / np.linalg.norm(moved)
        b = 1.3 * (w + moved)
        changes.append(reference.symmetry(b) - a.symmetry()[0])
    one = np.eye(d)[None]
    found = change(qk.BilinearForm(w[None], one), qk.BilinearForm(b[None], one))
    mean, std = float(found.null_mean[0]), float(found.null_std[0])
    assert np.mean(changes) == pytest.approx(mean, abs=4 * std / np.sqrt(4000))
    assert np.std(changes) == pytest.approx(std, rel=0.06)


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
    for values in (found.size, found.cosine, found.null_mean, found.null_std):
        assert np.isfinite(values).tolist() == [True, False, False, True]
