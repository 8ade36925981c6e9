"""Laws of the query-key form, and the factor formulas against the full matrix."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qkform as qk
from qkform.errors import FormError
from qkform.form import null_mean, null_variance, reference
from qkform.form.null import median_spread

SCORES = (
    "symmetry",
    "symmetry_z",
    "directionality",
    "row_excess",
    "column_excess",
    "norm",
    "effective_rank",
    "row_norms",
    "column_norms",
)
KINDS = {"numpy": np.asarray, "torch": torch.asarray}
# heads, kv heads, d_model, d_head: the factor route, the dense route (wide factors; in tiles), odd sizes
SHAPES = [
    (6, 2, 40, 7),
    (3, 3, 16, 20),
    (4, 1, 33, 5),
    (2, 1, 5, 3),
    (1, 1, 2, 1),
    (5, 5, 64, 3),
    (2, 2, 300, 8),
    (1, 1, 270, 140),
]


def random_form(shape, seed=0, *, bias=False, kind=np.asarray, dtype=np.float64):
    h, g, d, k = shape
    rng = np.random.default_rng(seed)
    w_q, w_k = rng.normal(size=(h, d, k)), rng.normal(size=(g, d, k))
    biases = {"b_q": rng.normal(size=(h, k)), "b_k": rng.normal(size=(g, k))} if bias else {}
    arrays = {n: kind(a.astype(dtype)) for n, a in {"w_q": w_q, "w_k": w_k, **biases}.items()}
    return qk.BilinearForm(arrays.pop("w_q"), arrays.pop("w_k"), **arrays)


def close(a, b, tolerance=1e-10):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    difference = np.nanmax(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0.0)
    assert difference <= tolerance, f"largest difference {difference:.2e}"


# ---- the factor formulas are the papers' formulas --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("whole_layer", [False, True], ids=["heads", "layer"])
def test_factor_scores_equal_the_full_matrix_way(shape, kind, whole_layer):
    form = random_form(shape, kind=KINDS[kind])
    form = form.total() if whole_layer else form
    matrices = [np.asarray(w) for w in form.matrix()]
    for name in SCORES:
        got = getattr(form, name)()
        assert type(got).__module__.startswith(kind)
        assert str(got.dtype).endswith("float64")
        close(got, [getattr(reference, name)(w) for w in matrices])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("whole_layer", [False, True], ids=["heads", "layer"])
def test_factor_spectrum_equals_the_full_matrix_way(shape, kind, whole_layer):
    form = random_form(shape, kind=KINDS[kind])
    form = form.total() if whole_layer else form
    matrices = [np.asarray(w) for w in form.matrix()]
    n = min(form.d_model, form.d_head)
    close(form.singular_values(), [reference.singular_values(w)[:n] for w in matrices])
    for got, w in zip(np.asarray(form.eigenvalues()), matrices, strict=True):
        want = reference.eigenvalues(w)[:n]
        assert got.shape == want.shape
        # equal as sets: pairs of equal size may come in either order
        distance = np.abs(got[:, None] - want[None, :])
        assert max(distance.min(0).max(), distance.min(1).max()) < 1e-9 * np.abs(want).max()
    want = np.array([reference.signature(w) for w in matrices]).T
    for got, expected in zip(form.signature(), want, strict=True):
        close(got, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_share_equals_the_extended_matrix_way(shape):
    h, g, _, _ = shape
    form = random_form(shape, bias=True)
    want = [
        reference.bias_share(form.w_q[i], form.w_k[i // (h // g)], form.b_q[i], form.b_k[i // (h // g)])
        for i in range(h)
    ]
    close(form.bias_share(), want)
    extended = sum(
        np.vstack([form.w_q[i], form.b_q[i]])
        @ np.vstack([form.w_k[i // (h // g)], form.b_k[i // (h // g)]]).T
        for i in range(h)
    )
    close(form.total().bias_share(), [1 - np.sum(extended[:-1, :-1] ** 2) / np.sum(extended**2)])


def test_bias_of_one_side_alone_counts():
    form = random_form((2, 2, 9, 3), bias=True)
    only_q = qk.BilinearForm(form.w_q, form.w_k, b_q=form.b_q)
    want = [reference.bias_share(form.w_q[i], form.w_k[i], form.b_q[i], np.zeros(3)) for i in range(2)]
    close(only_q.bias_share(), want)
    close(qk.BilinearForm(form.w_q, form.w_k).bias_share(), [0.0, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_leading_vectors_are_singular_and_eigen_vectors(kind):
    form = random_form((4, 2, 23, 5), kind=KINDS[kind])
    left, right = (np.asarray(x) for x in form.singular_vectors(3))
    values, vectors = (np.asarray(x) for x in form.symmetric_eigenvectors(4))
    singular = np.asarray(form.singular_values())
    for h, w in enumerate(np.asarray(form.matrix())):
        close(w @ right[h], left[h] * singular[h, :3])
        close(left[h].T @ left[h], np.eye(3))
        symmetric = (w + w.T) / 2
        close(symmetric @ vectors[h], vectors[h] * values[h])
        all_values = np.linalg.eigvalsh(symmetric)
        close(np.sort(np.abs(values[h])), np.sort(np.abs(all_values))[-4:])


@pytest.mark.parametrize(("h", "g"), [(6, 2), (8, 1), (4, 4)])
def test_grouped_queries_equal_repeated_keys(h, g):
    form = random_form((h, g, 21, 4), bias=True)
    repeated = qk.BilinearForm(
        form.w_q,
        np.repeat(form.w_k, h // g, axis=0),
        b_q=form.b_q,
        b_k=np.repeat(form.b_k, h // g, axis=0),
    )
    for name in (*SCORES, "bias_share"):
        close(getattr(form, name)(), getattr(repeated, name)())
        close(getattr(form.total(), name)(), getattr(repeated.total(), name)())
    close(form.total().matrix()[0], form.matrix().sum(0))


# ---- laws -------------------------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 24), st.integers(1, 9)).map(
    lambda t: (t[0] * t[1], t[1], t[2], t[3])
)
seeds = st.integers(0, 2**32 - 1)


@given(shapes, seeds)
def test_symmetric_heads_score_one(shape, seed):
    _, g, d, k = shape
    w = np.random.default_rng(seed).normal(size=(g, d, k))
    form = qk.BilinearForm(w, 3.0 * w)
    close(form.symmetry(), np.ones(g))
    positive, negative, energy = form.signature()
    close(positive, np.full(g, min(d, k)))
    close(negative, np.zeros(g))
    close(energy, np.ones(g))


@given(st.integers(1, 4), st.integers(2, 24), st.integers(1, 4), seeds)
def test_skew_heads_score_minus_one_and_have_no_directions(h, d, pairs, seed):
    w = np.random.default_rng(seed).normal(size=(h, d, 2 * pairs))
    turn = np.kron(np.eye(pairs), [[0.0, 1.0], [-1.0, 0.0]])
    form = qk.BilinearForm(w, w @ turn)
    close(form.symmetry(), -np.ones(h))
    positive, negative, energy = form.signature()
    close(positive, np.zeros(h))
    close(negative, np.zeros(h))
    assert np.isnan(energy).all()


@given(shapes, seeds)
def test_swapping_q_and_k_keeps_symmetry_and_negates_directionality(shape, seed):
    h, _, d, k = shape
    form = random_form((h, h, d, k), seed)
    swapped = qk.BilinearForm(form.w_k, form.w_q)
    close(swapped.symmetry(), form.symmetry())
    close(swapped.directionality(), -form.directionality())
    close(swapped.row_excess(), form.column_excess())
    close(swapped.total().directionality(), -form.total().directionality())


@given(shapes, seeds)
def test_a_change_of_head_basis_changes_nothing(shape, seed):
    _, g, _, k = shape
    form = random_form(shape, seed)
    rng = np.random.default_rng(seed + 1)
    group = shape[0] // g
    a = np.stack([np.linalg.qr(rng.normal(size=(k, k)))[0] * rng.uniform(0.5, 2.0, k) for _ in range(g)])
    inverse = np.linalg.inv(a).transpose(0, 2, 1)
    moved = qk.BilinearForm(form.w_q @ np.repeat(a, group, axis=0), form.w_k @ inverse)
    for name in SCORES:
        close(getattr(moved, name)(), getattr(form, name)(), 1e-8)


@given(shapes, seeds, st.sampled_from([1e-150, 1e-30, 1e-3, 7.0, 1e30, 1e150]))
def test_scale_changes_no_ratio(shape, seed, scale):
    form = random_form(shape, seed)
    scaled = qk.BilinearForm(form.w_q * scale, form.w_k)
    for name in ("symmetry", "symmetry_z", "directionality", "effective_rank"):
        close(getattr(scaled, name)(), getattr(form, name)(), 1e-9)
    close(scaled.norm() / scale, form.norm())
    for a, b in zip(scaled.signature(), form.signature(), strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15])
def test_float32_weights_of_extreme_size_are_scored_all_the_same(kind, scale):
    form = random_form((3, 1, 30, 4), bias=True)
    small = qk.BilinearForm(
        *(KINDS[kind]((w * scale).astype(np.float32)) for w in (form.w_q, form.w_k)),
        b_q=KINDS[kind]((form.b_q * scale).astype(np.float32)),
        b_k=KINDS[kind]((form.b_k * scale).astype(np.float32)),
    )
    for name in ("symmetry", "directionality", "effective_rank", "bias_share"):
        close(getattr(small, name)(), getattr(form, name)(), 2e-4)
    close(np.asarray(small.norm()) / scale / scale, form.norm(), 1e-5)
    close(np.asarray(small.row_norms()) / scale / scale, form.row_norms(), 1e-5)


@given(shapes, seeds)
def test_scores_stay_in_their_ranges(shape, seed):
    for form in (random_form(shape, seed, bias=True), random_form(shape, seed, bias=True).total()):
        eps = 1e-12
        assert (np.abs(form.symmetry()) <= 1 + eps).all()
        assert (np.abs(form.directionality()) <= 1 + eps).all()
        rank = form.effective_rank()
        assert (rank >= 1 - eps).all()
        assert (rank <= min(form.d_model, form.d_head) + 1e-9).all()
        assert ((form.bias_share() >= 0) & (form.bias_share() <= 1)).all()
        energy = form.signature().positive_energy
        assert ((energy >= 0) & (energy <= 1)).all()


@pytest.mark.parametrize(("d", "k", "n"), [(16, 1, 6000), (32, 4, 6000), (24, 24, 4000), (16, 40, 4000)])
def test_null_mean_and_variance_hold_for_random_weights(d, k, n):
    rng = np.random.default_rng(d + k)
    form = qk.BilinearForm(rng.normal(size=(n, d, k)), rng.normal(size=(n, d, k)))
    s, z = form.symmetry(), form.symmetry_z()
    predicted = null_variance(d, form.effective_rank()).mean()
    assert abs(s.mean() - null_mean(d)) < 4 * s.std() / np.sqrt(n)
    kurtosis = ((s - s.mean()) ** 4).mean() / s.var() ** 2
    assert abs(s.var() / predicted - 1) < 4 * np.sqrt((kurtosis - 1) / n)
    assert abs(z.mean()) < 4 / np.sqrt(n)


def test_null_variance_holds_for_a_spiky_spectrum():
    rng = np.random.default_rng(3)
    d, k, n = 24, 6, 12000
    spikes = np.exp(-np.arange(k))
    form = qk.BilinearForm(rng.normal(size=(n, d, k)) * spikes, rng.normal(size=(n, d, k)))
    z = form.symmetry_z()
    kurtosis = ((z - z.mean()) ** 4).mean() / z.var() ** 2
    assert form.effective_rank().mean() < 2.5
    assert abs(z.var() - 1) < 4 * np.sqrt((kurtosis - 1) / n)


# ---- signature near its edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_symmetric_start_stored_in_float32_has_no_repelling_direction(kind):
    """W_K = c W_Q rounded to float32, and an ill-conditioned W_Q: what a symmetric initialisation stores."""
    rng = np.random.default_rng(0)
    for spread in (np.ones(16), np.logspace(0, -3, 16)):
        w = (rng.normal(size=(3, 80, 16)) * spread).astype(np.float32)
        form = qk.BilinearForm(KINDS[kind](w), KINDS[kind]((w * np.float32(0.77)).astype(np.float32)))
        positive, negative, energy = form.signature()
        close(positive, np.full(3, 16))
        close(negative, np.zeros(3))
        close(energy, np.ones(3))


def test_counts_hold_for_ill_conditioned_factors():
    """Where Z^T Z is singular to rounding or close to it, the counts are still those of the full matrix."""
    counted = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        d, k = 40, 6
        w_q = np.linalg.qr(rng.normal(size=(d, k)))[0] * np.logspace(0, -rng.uniform(0, 9), k)
        w_q = w_q @ np.linalg.qr(rng.normal(size=(k, k)))[0]
        turn = [np.eye(k), np.diag(rng.choice([1.0, -1.0], k)), rng.normal(size=(k, k))][seed % 3]
        w_k = w_q @ turn + (seed % 2) * 10.0 ** rng.uniform(-16, -6) * rng.normal(size=(d, k))
        w = w_q @ w_k.T
        values = np.linalg.eigvalsh((w + w.T) / 2)
        values = values / np.abs(values).max()
        if ((np.abs(values) > 2e-9) & (np.abs(values) < 5e-8)).any():
            continue  # on the threshold itself
        positive, negative, _ = qk.BilinearForm(w_q[None], w_k[None]).signature()
        assert (positive[0], negative[0]) == ((values > 1e-8).sum(), (values < -1e-8).sum())
        counted += 1
    assert counted > 80


def test_skew_heads_have_no_directions_whatever_rounding_does():
    """[W_Q, W_K] of a skew head is singular, and rounding can hide it from a Cholesky factorisation."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        w = rng.normal(size=(1, 5 + seed % 7, 2))
        positive, negative, energy = qk.BilinearForm(w, w @ np.array([[0.0, 1.0], [-1.0, 0.0]])).signature()
        assert (positive[0], negative[0]) == (0.0, 0.0)
        assert np.isnan(energy[0])


def test_duplicate_columns_do_not_add_directions():
    rng = np.random.default_rng(1)
    w_q, w_k = rng.normal(size=(1, 50, 4)), rng.normal(size=(1, 50, 4))
    doubled = qk.BilinearForm(np.concatenate([w_q, w_q], 2), np.concatenate([w_k, w_k], 2))
    close(doubled.signature().positive, [4.0])
    close(doubled.signature().negative, [4.0])


# ---- heads without scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d_head", [3, 30], ids=["factors", "dense"])
def test_zero_and_nan_heads_have_no_scores_and_spoil_no_other(kind, d_head):
    good = random_form((4, 2, 20, d_head))
    w_q, w_k = good.w_q.copy(), good.w_k.copy()
    w_q[0] = 0.0
    w_q[1, 3, 1] = np.nan
    w_k[1, 0, 0] = np.inf
    w_q[3] = 0.0
    form = qk.BilinearForm(KINDS[kind](w_q), KINDS[kind](w_k))
    assert form.defects() == [
        "W_Q is all zero",
        "W_Q holds NaN or infinity",
        "W_K holds NaN or infinity",
        "W_K holds NaN or infinity",
    ]
    for name in ("symmetry", "symmetry_z", "directionality", "row_excess", "effective_rank", "bias_share"):
        assert np.isnan(np.asarray(getattr(form, name)())).all(), name
    close(form.norm(), [0.0, np.nan, np.nan, np.nan])
    close(form.row_norms()[0], np.zeros(20))
    assert np.isnan(np.asarray(form.row_norms()[1:])).all()
    assert np.isnan(np.asarray(form.signature().positive)).all()
    assert np.isnan(np.asarray(form.eigenvalues())).all()
    assert np.isnan(np.asarray(form.singular_values())).all()
    assert np.isnan(np.asarray(form.singular_vectors()[0])).all()
    assert not np.asarray(form.no_outliers()).any()

    w_k[1, 0, 0] = 1.0
    mended = qk.BilinearForm(KINDS[kind](w_q), KINDS[kind](w_k))
    alone = qk.BilinearForm(KINDS[kind](w_q[2:3]), KINDS[kind](w_k[1:2]))
    close(mended.symmetry()[2], alone.symmetry()[0])
    close(mended.directionality()[2], alone.directionality()[0])


def test_equal_rows_and_columns_have_no_outliers():
    rng = np.random.default_rng(0)
    for d in (8, 64):
        basis = np.linalg.qr(rng.normal(size=(d, d)))[0][None]
        for dtype in (np.float32, np.float64):
            form = qk.BilinearForm(basis.astype(dtype), basis.astype(dtype))
            assert form.no_outliers().all()
            close(form.directionality(), [0.0])


def test_one_heavy_column_is_key_side_dominance():
    w = np.full((1, 30, 30), 0.01)
    w[0, :, 4] = 5.0
    form = qk.BilinearForm(w, np.eye(30)[None])
    close(form.directionality(), [-1.0])
    close(form.column_excess(), [reference.column_excess(w[0])])
    close(qk.BilinearForm(np.swapaxes(w, 1, 2), np.eye(30)[None]).directionality(), [1.0])


# ---- W that cancels ----------------------------------------------------------------------------------------------


def vanishing(kind):
    """Factors that are not zero, and whose W is: exactly, or to rounding."""
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    a, b = rng.normal(size=(60, 4)), rng.normal(size=(60, 4))
    if kind == "exact":
        w_q, w_k = np.zeros((1, 60, 8)), np.zeros((1, 60, 8))
        w_q[0, :, :4], w_k[0, :, 4:] = a, b
        return w_q, w_k
    if kind == "rounding":
        return (a @ turn[:4])[None], (b @ turn[4:])[None]
    wide = np.linalg.qr(rng.normal(size=(80, 80)))[0]  # d_head > d_model: the dense route
    return (rng.normal(size=(60, 40)) @ wide[:40])[None], (rng.normal(size=(60, 40)) @ wide[40:])[None]


@pytest.mark.parametrize("case", ["exact", "rounding", "dense"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_w_that_vanishes_has_no_scores(case, dtype, kind):
    w_q, w_k = (KINDS[kind](w.astype(dtype)) for w in vanishing(case))
    form = qk.BilinearForm(w_q, w_k)
    assert form.defects() == ["W_Q W_K^T is all zero"]
    for name in ("symmetry", "symmetry_z", "directionality", "row_excess", "effective_rank", "bias_share"):
        assert np.isnan(np.asarray(getattr(form, name)())).all(), name
    assert np.isnan(np.asarray(form.signature().positive)).all()
    close(form.norm(), [0.0])


def test_heads_that_cancel_leave_a_layer_without_scores():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(1, 50, 6)), rng.normal(size=(1, 50, 6))
    total = qk.BilinearForm(np.concatenate([a, -a]), np.concatenate([b, b])).total()
    assert total.defects() == ["W_Q W_K^T is all zero"]
    assert np.isnan(total.symmetry()).all()


@pytest.mark.parametrize("spread", [1e2, 1e4, 1e6])
def test_an_ill_conditioned_head_basis_changes_nothing_either(spread):
    form = random_form((3, 1, 64, 8))
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
    s = np.logspace(0, np.log10(spread), 8)
    moved = qk.BilinearForm(form.w_q @ (u * s) @ v.T, form.w_k @ (u / s) @ v.T)
    for name in SCORES:
        close(getattr(moved, name)(), getattr(form, name)(), 1e-8)
    for got, want in zip(moved.signature(), form.signature(), strict=True):
        close(got, want)


def test_equal_rows_have_no_outliers_in_an_ill_conditioned_basis():
    rng = np.random.default_rng(0)
    signs = np.array([[1.0]])
    while signs.shape[0] < 64:
        signs = np.block([[signs, signs], [signs, -signs]])
    for seed in range(10):
        rng = np.random.default_rng(seed)
        u, v = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
        s = np.logspace(0, 2, 8)
        for dtype in (np.float32, np.float64):
            w_q, w_k = (
                (signs[:, :8] @ (u * s) @ v.T).astype(dtype),
                (signs[:, 8:16] @ (u / s) @ v.T).astype(dtype),
            )
            assert qk.BilinearForm(w_q[None], w_k[None]).no_outliers().all()


def test_rounding_beside_a_large_skew_part_is_no_direction():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(80, 16))
    turn = np.kron(np.eye(8), [[0.0, 1.0], [-1.0, 0.0]])
    extra = 1e-4 * rng.normal(size=(80, 1))  # adds 1e-8 u u^T, attracting
    form = qk.BilinearForm(np.concatenate([w, extra], 1)[None], np.concatenate([w @ turn, extra], 1)[None])
    positive, negative, _ = form.signature()
    assert (positive[0], negative[0]) == (1.0, 0.0)


def test_sums_over_query_heads_add_no_directions():
    """In float32 the rounding of these sums would count: heads of low rank that share a key head."""
    rng = np.random.default_rng(3)
    w_q = (rng.normal(size=(4, 16, 1)) * rng.normal(size=(4, 1, 16))).astype(np.float32)
    w_k = rng.normal(size=(1, 16, 16)).astype(np.float32)
    narrow, wide = (
        qk.BilinearForm(w_q, w_k).total(),
        qk.BilinearForm(*(w.astype(float) for w in (w_q, w_k))).total(),
    )
    for got, want in zip(narrow.signature(), wide.signature(), strict=True):
        close(got, want, 1e-6)


# ---- edges of the range --------------------------------------------------------------------------------------------


def test_one_dimensional_tokens_have_symmetry_and_no_z():
    form = qk.BilinearForm(np.ones((1, 1, 3)), np.ones((1, 1, 3)))
    close(form.symmetry(), [1.0])
    assert np.isnan(form.symmetry_z()).all()
    assert null_variance(1, 1.0) == 0.0


def test_scores_are_clamped_to_their_ranges():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        w = rng.normal(size=(1, 1 + seed % 7, 1 + seed % 5)).astype(np.float32)
        form = qk.BilinearForm(w, w)
        assert form.symmetry()[0] <= 1.0
        assert 1.0 <= form.effective_rank()[0] <= min(form.d_model, form.d_head)


def test_a_form_beyond_float64_has_ratios_and_an_infinite_norm():
    form = random_form((2, 1, 9, 3))
    huge = qk.BilinearForm(form.w_q * 1e200, form.w_k * 1e200)
    close(huge.symmetry(), form.symmetry())
    close(huge.directionality(), form.directionality())
    assert np.isinf(huge.norm()).all()


def test_bias_share_reaches_one():
    form = random_form((2, 2, 9, 3), bias=True)
    ones = np.ones(2)
    close(qk.BilinearForm(0 * form.w_q, form.w_k, b_q=form.b_q, b_k=form.b_k).bias_share(), ones)
    close(qk.BilinearForm(form.w_q, form.w_k, b_q=form.b_q * 1e160, b_k=form.b_k * 1e160).bias_share(), ones)
    bad = qk.BilinearForm(form.w_q, form.w_k, b_q=form.b_q * np.inf)
    assert np.isnan(bad.bias_share()).all()


@pytest.mark.parametrize("dtype", [">f8", ">f4", np.longdouble])
def test_any_byte_order_and_width_is_read(dtype):
    form = random_form((2, 1, 9, 3))
    other = qk.BilinearForm(form.w_q.astype(dtype), form.w_k.astype(dtype))
    tolerance = 1e-5 if dtype == ">f4" else 1e-10
    close(other.symmetry(), form.symmetry(), tolerance)
    if dtype != ">f4":
        assert other.matrix().dtype == np.float64


def test_mixed_precision_works_in_the_wider():
    form = random_form((2, 1, 9, 3))
    mixed = qk.BilinearForm(form.w_q, form.w_k.astype(np.float32))
    assert mixed.matrix().dtype == np.float64


# ---- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_widened_before_any_product(dtype):
    wide = random_form((4, 2, 48, 8))
    kinds = {"bfloat16": (ml_dtypes.bfloat16, torch.bfloat16), "float16": (np.float16, torch.float16)}
    np_type, torch_type = kinds[dtype]
    halves = [w.astype(np_type) for w in (wide.w_q, wide.w_k)]
    exact = qk.BilinearForm(*(h.astype(np.float64) for h in halves))
    on_torch = qk.BilinearForm(*(torch.asarray(h.astype(np.float32)).to(torch_type) for h in halves))
    for form in (qk.BilinearForm(*halves), on_torch):
        for name in SCORES:
            close(getattr(form, name)(), getattr(exact, name)(), 1e-4)
        assert str(form.matrix().dtype).endswith("float32")


def test_memory_order_changes_nothing():
    form = random_form((3, 3, 40, 6), dtype=np.float32)
    stored = [np.ascontiguousarray(np.swapaxes(w, 1, 2)).swapaxes(1, 2) for w in (form.w_q, form.w_k)]
    for name in SCORES:
        close(getattr(qk.BilinearForm(*stored), name)(), getattr(form, name)(), 1e-5)


def test_gradients_do_not_flow_and_do_not_hinder():
    w = torch.ones(1, 3, 2, requires_grad=True)
    assert not qk.BilinearForm(w, w).symmetry().requires_grad


# ---- arrays that make no form -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("w_q", "w_k", "words"),
    [
        (np.ones((2, 4)), np.ones((2, 4)), "shape"),
        (np.ones((2, 4, 3)), np.ones((2, 4, 2)), "d_head"),
        (np.ones((3, 4, 2)), np.ones((2, 4, 2)), "multiple"),
        (np.ones((2, 4, 2), dtype=np.int64), np.ones((2, 4, 2)), "floating"),
        (np.ones((2, 4, 2), dtype=complex), np.ones((2, 4, 2)), "floating"),
        (np.ones((2, 0, 2)), np.ones((2, 0, 2)), "length 0"),
        (np.ones((2, 4, 2)), torch.ones((2, 4, 2)), "different kinds"),
        ([[[1.0]]], np.ones((1, 1, 1)), "numpy or torch array"),
        (torch.ones((1, 2, 2), device="meta"), torch.ones((1, 2, 2), device="meta"), "dense values"),
        (torch.ones((1, 2, 2)).to_sparse(), torch.ones((1, 2, 2)), "dense values"),
    ],
)
def test_arrays_that_make_no_form_are_refused_in_words(w_q, w_k, words):
    with pytest.raises(FormError, match=words):
        qk.BilinearForm(w_q, w_k)


def test_a_bias_of_the_wrong_shape_is_refused():
    with pytest.raises(FormError, match=r"b_k has shape \(2, 3\); expected \(1, 3\)"):
        qk.BilinearForm(np.ones((2, 4, 3)), np.ones((1, 4, 3)), b_k=np.ones((2, 3)))


def test_a_rectangular_form_has_directionality_and_no_symmetry():
    rng = np.random.default_rng(0)
    form = qk.BilinearForm(rng.normal(size=(2, 9, 3)), rng.normal(size=(2, 5, 3)))
    want = [reference.directionality(w) for w in form.matrix()]
    close(form.directionality(), want)
    close(form.norm(), [reference.norm(w) for w in form.matrix()])
    for name in ("symmetry", "symmetry_z", "signature", "eigenvalues"):
        with pytest.raises(FormError, match="square"):
            getattr(form, name)()


def test_heads_can_be_taken_one_by_one():
    form = random_form((6, 2, 15, 4), bias=True)
    assert len(form) == 6
    for h, head in enumerate(form):
        close(head.symmetry(), form.symmetry()[h : h + 1])
        close(head.bias_share(), form.bias_share()[h : h + 1])
    with pytest.raises(FormError, match="no head 6"):
        form.head(6)


@pytest.mark.parametrize("gamma", [np.nan, np.inf, 1e300, None, "2"])
def test_a_gamma_that_is_no_number_of_deviations_is_refused(gamma):
    with pytest.raises(FormError, match="gamma"):
        random_form((1, 1, 5, 2)).directionality(gamma)


def test_the_spread_of_a_median_is_that_of_the_middle_order_statistic():
    known = {
        1: 1.0,
        2: 0.5,
        3: 1 - math.sqrt(3) / math.pi,
        4: 0.2982,
        5: 0.2868,
    }  # variances; Teichroew (1956)
    for n, variance in known.items():
        assert median_spread(n) ** 2 == pytest.approx(variance, abs=1e-4)
    drawn = np.random.default_rng(0).standard_normal((200_000, 12))
    assert median_spread(12) == pytest.approx(np.median(drawn, axis=1).std(), rel=0.01)
    assert median_spread(200) == pytest.approx(median_spread(201), rel=5e-3)
    with pytest.raises(ValueError, match="one value or more"):
        median_spread(0)
