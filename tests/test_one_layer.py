"""One layer of attention, solved: the closed forms against the full matrices, published figures, and their laws."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from qkform.dynamics.one_layer import Flow, Task
from qkform.dynamics.one_layer.descent import STEPS
from qkform.dynamics.one_layer.matrices import Matrices
from qkform.errors import DynamicsError, MissingExtra

RATIOS = (1 / 16, 1 / 4, 1, 4, 16)
CIRCUITS = {
    "CACO": ("collapsed", "collapsed"),
    "CAFO": ("collapsed", "factorized"),
    "FACO": ("factorized", "collapsed"),
    "FAFO": ("factorized", "factorized"),
}
# Sharpness at cross-entropy 0.1 and at squared loss 0.01 of the default task, integrated independently of this code.
SHARPNESS = {
    ("CACO", "ce"): (0.158596, 0.249687, 0.400839, 0.623737, 0.853934),
    ("CAFO", "ce"): (0.066668, 0.077786, 0.112316, 0.204419, 0.416685),
    ("FACO", "ce"): (0.394408, 0.724983, 0.979572, 0.997541, 0.999542),
    ("FAFO", "ce"): (0.067994, 0.133408, 0.414673, 0.947089, 0.995789),
    ("CACO", "squared"): (0.075099, 0.096560, 0.139400, 0.216445, 0.346906),
    ("CAFO", "squared"): (0.063367, 0.065891, 0.075100, 0.104417, 0.184221),
    ("FACO", "squared"): (0.096694, 0.173387, 0.324950, 0.606700, 0.950217),
    ("FAFO", "squared"): (0.063451, 0.066235, 0.114244, 0.346239, 0.904006),
}
LOSS = {"ce": 0.1, "squared": 0.01}
FOUR = ("gap", "gain", "sharpness", "entropy")


def flow_of(name="CACO", **more):
    attention, output = CIRCUITS[name]
    return Flow(attention=attention, output=output, **more)


@pytest.mark.parametrize(("name", "objective"), SHARPNESS)
def test_sharpness_at_a_loss_rises_with_the_ratio_as_tabled(name, objective):
    flow = flow_of(name, objective=objective)
    found = [flow.closed_form(ratio, LOSS[objective]).sharpness for ratio in RATIOS]
    assert found == pytest.approx(SHARPNESS[name, objective], abs=1e-6)
    assert all(a < b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(("name", "objective"), SHARPNESS)
def test_full_matrices_end_where_the_closed_form_says(name, objective):
    flow = flow_of(name, objective=objective)
    for ratio in RATIOS:
        said, run = flow.closed_form(ratio, LOSS[objective]), flow.simulate(ratio, LOSS[objective])
        for one in FOUR:
            assert getattr(run, one) == pytest.approx(getattr(said, one), rel=1e-6), one
        assert run.loss == pytest.approx(LOSS[objective], rel=1e-9)
        assert max(run.off_ray_qk, run.off_ray_ov, run.line_drift, run.unlike) < 1e-6


@pytest.mark.parametrize(
    ("ratio", "gain", "gap", "sharpness"), [(0.01, 81.669, 0.559, 0.149), (0.1, 42.282, 1.395, 0.287)]
)
def test_published_rows_of_the_reduced_flow(ratio, gain, gap, sharpness):
    """Printed in the notebooks of the repository of arXiv 2608.06776."""
    flow = Flow(
        classes=20, per_class=50, common=math.inf, relevant=5, distractors=50, queries_per_class=50, scale=1.0
    )
    end = flow.closed_form(ratio, 1e-4)
    assert f"{end.gain:.3f} {end.gap:.3f} {end.sharpness:.3f}" == f"{gain:.3f} {gap:.3f} {sharpness:.3f}"


def test_the_printed_equations_run_to_the_same_end():
    """The reduced flow as that README prints it, integrated: gap, gain and time when the loss is reached."""
    classes, b, m, n, ratio = 20, 50, 5, 50, 0.1

    def printed(_, state):
        gap, gain = state
        sharp = m * math.exp(gap) / (m * math.exp(gap) + n)
        below = math.exp(sharp * gain) + classes - 1
        return [
            ratio * (classes - 1) * sharp * (1 - sharp) * gain / (classes * b**2 * below),
            sharp / (b * below),
        ]

    def above(_, state):
        sharp = m * math.exp(state[0]) / (m * math.exp(state[0]) + n)
        return math.log1p((classes - 1) * math.exp(-sharp * state[1])) - 1e-4

    above.terminal = True
    run = solve_ivp(printed, (0, 1e12), [0, 0], method="DOP853", rtol=1e-11, atol=1e-12, events=above)
    flow = Flow(classes, b, math.inf, m, n, queries_per_class=b, scale=1.0)
    end, course = flow.closed_form(ratio, 1e-4), flow.time_course(ratio, 1e-4)
    assert run.y[:, -1] == pytest.approx([end.gap, end.gain], rel=1e-8)
    assert run.t[-1] == pytest.approx(course.time[-1], rel=1e-8)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 10.0])
def test_printed_constants_are_ours_where_common_tokens_have_no_end(ratio):
    """That README prints 1/(M b²) for the gap; ours is smaller by the part of the common tokens, B/C."""
    task = Task(20, 50, math.inf, 5, 50, 50, 1.0)
    assert task.k_qk == pytest.approx(1 / (20 * 50**2))
    finite = Task(20, 50, 400, 5, 50, 50, 1.0)
    assert finite.k_qk == pytest.approx(task.k_qk * (1 + 50 / 400))
    wide = Flow(20, 50, 10**9, 5, 50, queries_per_class=50, scale=1.0).closed_form(ratio, 1e-4)
    endless = Flow(20, 50, math.inf, 5, 50, queries_per_class=50, scale=1.0).closed_form(ratio, 1e-4)
    assert wide.gap == pytest.approx(endless.gap, rel=1e-6)


# ---- the task and its constants ----------------------------------------------------------------------------


def test_constants_of_the_default_task():
    task = Task()
    assert task.vocabulary == 33
    assert task.score_scale == 33**-0.5
    assert task.k_qk == pytest.approx(0.003788, abs=5e-7)
    assert task.k_ov == pytest.approx(1 / 14)
    assert task.sigma_qk == pytest.approx(16.2481, abs=5e-5)
    assert task.sigma_ov == pytest.approx(2**0.5)


TASKS = [
    Task(),
    Task(5, 3, 12, 2, 8),
    Task(4, 2, 7, 3, 9),
    Task(3, 2, 5, 1, 4, 2),
    Task(3, 4, 6, 2, 3, None, 0.7),
]


@pytest.mark.parametrize("objective", ["ce", "squared"])
@pytest.mark.parametrize("task", TASKS, ids=str)
def test_the_gradient_at_a_point_of_the_rays_is_the_reduced_one(task, objective):
    """W_QK and W_OV on their rays: the full gradient lies on them, and is as long as k says."""
    model, flow = Matrices(task, objective, seed=3), Flow(objective=objective)
    gap, gain = 0.8, 1.7
    loss, g_qk, g_ov = model.gradients(gap / task.score_scale * model.ray_qk, gain * model.ray_ov)
    sharp = float(task.sharpness(gap))
    pull = flow.goal.pull(sharp * gain, task.classes)
    assert loss == pytest.approx(flow.goal.loss(sharp * gain, task.classes), rel=1e-12)
    assert -model.gap(g_qk) == pytest.approx(task.k_qk * sharp * (1 - sharp) * gain * pull, rel=1e-12)
    assert -model.gain(g_ov) == pytest.approx(task.k_ov * sharp * pull, rel=1e-12)
    np.testing.assert_allclose(g_qk, model.gap(g_qk) / task.score_scale * model.ray_qk, atol=1e-15)
    np.testing.assert_allclose(g_ov, model.gain(g_ov) * model.ray_ov, atol=1e-15)
    modes = 1 if task.queries_per_class is None else task.classes
    lengths = np.linalg.svd(model.ray_qk, compute_uv=False)[:modes] / task.score_scale
    assert math.sqrt((lengths**2).mean()) == pytest.approx(task.sigma_qk)
    np.testing.assert_allclose(
        np.linalg.svd(model.ray_ov, compute_uv=False)[: task.classes - 1], task.sigma_ov, rtol=1e-12
    )


@pytest.mark.parametrize("objective", ["ce", "squared"])
def test_gradients_of_the_matrices_are_those_of_the_loss(objective):
    task = Task(3, 2, 5, 3, 4, 2)
    model, rng = Matrices(task, objective, seed=1), np.random.default_rng(2)
    w_qk, w_ov = rng.normal(size=(2, model.d, model.d))
    loss, g_qk, g_ov = model.gradients(w_qk, w_ov)
    assert loss == pytest.approx(model.loss(w_qk, w_ov), rel=1e-14)
    along, step = rng.normal(size=(2, model.d, model.d)), 1e-5
    for weights, gradient, moved in (
        (w_qk, g_qk, lambda t: (w_qk + t * along[0], w_ov)),
        (w_ov, g_ov, lambda t: (w_qk, w_ov + t * along[1])),
    ):
        direction = along[0] if weights is w_qk else along[1]
        slope = (model.loss(*moved(step)) - model.loss(*moved(-step))) / (2 * step)
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-7)


def test_sequences_hold_what_the_task_says_and_never_the_query():
    task = Task(3, 2, 5, 3, 4, 2)  # more relevant tokens than a class has: one comes twice
    model = Matrices(task, "ce")
    assert len(model.counts) == 3 * 2 * 5 * 2
    assert model.counts.shape[1] == task.vocabulary - task.query_tokens
    own = model.counts[:, :6].reshape(-1, 3, 2).sum(2)
    np.testing.assert_array_equal(own, 3 * np.eye(3)[model.labels])
    np.testing.assert_array_equal(model.counts[:, 6:].sum(1), 4)
    np.testing.assert_array_equal(model.query // 2, model.labels)
    assert len(np.unique(np.column_stack([model.counts, model.query]), axis=0)) == len(model.counts)
    sharp, entropy = model.attention(np.zeros((model.d, model.d)))
    np.testing.assert_allclose(sharp, 3 / 7)
    np.testing.assert_allclose(entropy, math.log(7))


def test_what_the_end_point_says_of_attention_is_what_its_row_gives():
    flow = Flow(5, 3, 12, 2, 8)
    end = flow.closed_form(4.0, 0.1)
    row = np.array([end.sharpness / 2] * 2 + [(1 - end.sharpness) / 8] * 8)
    assert end.entropy == pytest.approx(-(row * np.log(row)).sum())
    assert end.effective_tokens == pytest.approx(math.exp(end.entropy))
    assert end.largest == row.max()
    ordered = np.sort(row)
    gini = 2 * (np.arange(1, 11) * ordered).sum() / 10 - 11 / 10
    assert end.gini == pytest.approx(gini)


# ---- the line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imbalance", [0.0, 0.3, -0.3, (0.05, -0.7)])
@pytest.mark.parametrize("name", CIRCUITS)
def test_the_integrals_are_those_of_the_speed(name, imbalance):
    """Their slopes, by differences; the inverses undo them."""
    if name != "FAFO":
        imbalance = imbalance if isinstance(imbalance, float) and name != "CACO" else 0.0
    flow = flow_of(name, imbalance=imbalance)
    step = 1e-5
    for x in (0.02, 0.6, 4.0):
        for circuit in (flow.qk, flow.ov):
            speed = float(circuit.speed(x))
            for integral, on_top in (
                (circuit.clock, 1.0),
                (circuit.phi_qk, 1 + flow.task.odds * math.exp(x)),
                (circuit.phi_ov, x),
            ):
                slope = (integral(x + step * x) - integral(x - step * x)) / (2 * step * x)
                assert float(slope) == pytest.approx(on_top / speed, rel=1e-7)
            assert float(circuit.at(circuit.clock(x))) == pytest.approx(x, rel=1e-12)
            assert float(circuit.gain(circuit.phi_ov(x))) == pytest.approx(x, rel=1e-9)


@pytest.mark.parametrize("name", CIRCUITS)
def test_gap_and_gain_of_the_trajectory_undo_each_other(name):
    flow = flow_of(name)
    for ratio in RATIOS:
        end = flow.closed_form(ratio, 0.1)
        assert flow.gap_at(end.gain, ratio) == pytest.approx(end.gap, rel=1e-9)
        assert flow.gain_at(end.gap, ratio) == pytest.approx(end.gain, rel=1e-9)
        half = flow.gap_at((flow.first[1] + end.gain) / 2, ratio)
        across, up = flow.grown(half, (flow.first[1] + end.gain) / 2)
        assert float(up) == pytest.approx(flow.slope(ratio) * float(across), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 5])
def test_other_sizes_end_where_the_closed_form_says(seed):
    for name, known in {
        "CACO": (0.2552, 0.3345, 0.4715, 0.6667, 0.8614),
        "FAFO": (0.2025, 0.2094, 0.3343, 0.8191, 0.9906),
    }.items():
        flow = flow_of(name, classes=5, per_class=3, common=12, relevant=2, distractors=8)
        ends = [flow.closed_form(ratio, 0.1) for ratio in RATIOS]
        assert [end.sharpness for end in ends] == pytest.approx(known, abs=6e-5)
        run = flow.simulate(4.0, 0.1, seed=seed)
        assert [getattr(run, one) for one in FOUR] == pytest.approx(
            [getattr(ends[3], one) for one in FOUR], rel=1e-6
        )


@pytest.mark.parametrize("imbalance", [0.3, (-0.2, 0.5)])
@pytest.mark.parametrize("factor_ratio", [1.0, 4.0])
def test_unbalanced_factors_run_on_their_own_line(imbalance, factor_ratio):
    flow = flow_of("FAFO", imbalance=imbalance)
    end, run = flow.closed_form(1.0, 0.1), flow.simulate(1.0, 0.1, factor_ratio=factor_ratio)
    assert [getattr(run, one) for one in FOUR] == pytest.approx([getattr(end, one) for one in FOUR], rel=1e-6)
    assert max(run.line_drift, run.balance_drift, run.off_ray_qk, run.off_ray_ov) < 1e-6
    assert end.sharpness != pytest.approx(flow_of("FAFO").closed_form(1.0, 0.1).sharpness, rel=1e-3)


def test_an_imbalance_that_vanishes_is_balance():
    tiny, none = flow_of("FAFO", imbalance=1e-9), flow_of("FAFO")
    assert tiny.closed_form(1.0, 0.1).gap == pytest.approx(none.closed_form(1.0, 0.1).gap, rel=1e-9)


def test_an_unbalanced_circuit_moves_from_zero():
    flow = flow_of("FAFO", imbalance=0.2, start=0.0)
    assert flow.simulate(1.0, 0.1).sharpness == pytest.approx(flow.closed_form(1.0, 0.1).sharpness, rel=1e-6)


def test_factors_keep_the_difference_of_their_squares_from_any_start():
    """U^T U/e1 - V^T V/e2, from Gaussian factors that learn at unequal rates, while the loss falls a hundredfold."""
    run = flow_of("FAFO").simulate(2.0, 0.02, noise=0.3, factor_ratio=4.0)
    assert run.loss == pytest.approx(0.02)
    assert run.off_ray_ov > 0.05  # no symmetric start, no ray: the law does not need one
    assert run.balance_drift < 1e-7
    assert math.isnan(run.line_drift)


def test_collapsed_circuits_forget_a_small_random_start():
    """Within 4e-4 of the closed form from zero, for Gaussian entries up to 0.01."""
    run, end = Flow().simulate(4.0, 0.1, noise=1e-2), Flow().closed_form(4.0, 0.1)
    assert run.sharpness == pytest.approx(end.sharpness, abs=4e-4)


def test_class_specific_queries():
    task = {
        "classes": 6,
        "per_class": 2,
        "common": 12,
        "relevant": 1,
        "distractors": 11,
        "queries_per_class": 1,
    }
    collapsed, factorized = flow_of("CACO", **task), flow_of("FAFO", **task)
    ends = [collapsed.closed_form(ratio, 0.1) for ratio in RATIOS]
    assert [end.sharpness for end in ends] == pytest.approx(
        (0.1458, 0.2161, 0.3364, 0.5247, 0.7617), abs=6e-5
    )
    run = collapsed.simulate(16.0, 0.1)
    assert [getattr(run, one) for one in FOUR] == pytest.approx(
        [getattr(ends[4], one) for one in FOUR], rel=1e-6
    )
    assert collapsed.exact
    assert not factorized.exact
    two = flow_of("CACO", **task | {"queries_per_class": 3})
    assert two.simulate(4.0, 0.1).gap == pytest.approx(two.closed_form(4.0, 0.1).gap, rel=1e-6)
    run = factorized.simulate(4.0, 0.1)
    assert run.off_ray_qk > 0.01  # its ray has unequal singular values, so it leaves it
    assert factorized.closed_form(4.0, 0.1).sharpness == pytest.approx(run.sharpness, rel=0.2)


@pytest.mark.parametrize(
    ("size", "known"),
    [(1e-4, (0.9274, 0.1940)), (1e-2, (0.9693, 0.2926)), (1e-1, (0.9782, 0.3855)), (1.0, (0.9836, 0.5166))],
)
def test_which_parameterization_is_sharper_depends_on_the_start(size, known):
    """Factorized attention sharpens; with a factorized output too, the size of the start decides (FACO, FAFO)."""
    task = Task()
    start = (size / task.sigma_qk, size / task.sigma_ov)
    both = flow_of("FAFO", start=start).closed_form(1.0, 0.1).sharpness
    attention = flow_of("FACO", start=(start[0], 0.0)).closed_form(1.0, 0.1).sharpness
    assert (attention, both) == pytest.approx(known, abs=6e-5)


# ---- laws of the end point ---------------------------------------------------------------------------------


@given(
    name=st.sampled_from(sorted(CIRCUITS)),
    objective=st.sampled_from(["ce", "squared"]),
    ratio=st.floats(1e-3, 1e3),
    times=st.floats(1.01, 100),
    loss=st.floats(1e-3, 0.3),
    start=st.floats(1e-6, 0.05),
)
def test_a_faster_query_key_circuit_is_sharper_at_the_same_loss(name, objective, ratio, times, loss, start):
    flow = flow_of(name, objective=objective, start=None if name == "CACO" else start)
    slow, fast = flow.closed_form(ratio, loss), flow.closed_form(ratio * times, loss)
    assert fast.sharpness > slow.sharpness
    assert fast.gap > slow.gap
    assert fast.gain < slow.gain
    assert fast.entropy < slow.entropy or fast.sharpness < 1 / 16 + 1e-6  # where entropy is flat to rounding
    for end in (slow, fast):
        margin = float(flow.task.sharpness(end.gap)) * end.gain
        assert float(flow.goal.loss(margin, flow.classes)) == pytest.approx(loss, rel=1e-9)


@given(
    name=st.sampled_from(sorted(CIRCUITS)),
    sharpness=st.floats(0.07, 0.999),
    loss=st.floats(1e-4, 0.5),
)
def test_the_design_rule_undoes_the_closed_form(name, sharpness, loss):
    flow = flow_of(name)
    ratio = flow.ratio_for(sharpness, loss)
    assert flow.closed_form(ratio, loss).sharpness == pytest.approx(sharpness, rel=1e-9)


@pytest.mark.parametrize(
    ("sharpness", "ratio"), [(0.2, 0.1288), (0.5, 1.9481), (0.853934, 16.0000), (0.95, 47.4828)]
)
def test_designed_runs_end_as_designed(sharpness, ratio):
    flow = Flow()
    assert flow.ratio_for(sharpness, 0.1) == pytest.approx(ratio, abs=6e-5)
    assert flow.simulate(flow.ratio_for(sharpness, 0.1), 0.1).sharpness == pytest.approx(sharpness, rel=1e-6)


def test_scaling_the_score_is_scaling_the_rate_by_its_square():
    """Collapsed, from zero: s -> s sqrt(r) and eta_QK -> r eta_QK end alike."""
    base = Flow().closed_form(9.0, 0.1)
    scaled = Flow(scale=3 * 33**-0.5).closed_form(1.0, 0.1)
    assert [getattr(scaled, one) for one in FOUR] == pytest.approx(
        [getattr(base, one) for one in FOUR], rel=1e-12
    )
    assert Flow(scale=3 * 33**-0.5).simulate(1.0, 0.1).gap == pytest.approx(base.gap, rel=1e-6)


def test_the_end_point_of_collapsed_circuits_solves_its_equation():
    """ln(o/c) + o - c = (rho/2) z² (1 + 1/o)², o the odds of sharp attention."""
    flow = Flow()
    for ratio in RATIOS:
        end = flow.closed_form(ratio, 0.1)
        odds, c, z = end.sharpness / (1 - end.sharpness), 1 / 15, math.log(7 / math.expm1(0.1))
        left = math.log(odds / c) + odds - c
        assert left == pytest.approx(flow.slope(ratio) / 2 * z**2 * (1 + 1 / odds) ** 2, rel=1e-10)


def test_attention_that_learns_without_end_is_sharp_to_leading_order():
    """1 - sharpness ~ 2 / (rho z²)."""
    flow, z = Flow(), math.log(7 / math.expm1(0.1))
    assert 1 - flow.closed_form(1e4, 0.1).sharpness == pytest.approx(2 / (flow.slope(1e4) * z**2), rel=0.01)


def test_a_ratio_of_zero_leaves_attention_as_it_was():
    end = Flow().closed_form(0.0, 0.1)
    assert (end.gap, end.sharpness) == (0.0, pytest.approx(1 / 16))
    assert flow_of("FAFO").closed_form(0.0, 0.1).gap == 0.01


# ---- time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CIRCUITS)
def test_the_time_course_is_that_of_the_matrices(name):
    flow = flow_of(name)
    for ratio in (1 / 16, 16):
        course, run = flow.time_course(ratio, 0.1), flow.simulate(ratio, 0.1)
        assert course.time[-1] == pytest.approx(run.times[-1], rel=1e-6)
        assert course.loss[-1] == pytest.approx(0.1, rel=1e-9)
        assert (np.diff(course.time) > 0).all()
        between = np.interp(run.times[5:], course.time, course.gap)
        np.testing.assert_allclose(between, run.gaps[5:], atol=0.02 * run.gaps[-1])


@pytest.mark.parametrize("name", CIRCUITS)
def test_the_time_course_does_not_depend_on_its_points(name):
    flow = flow_of(name)
    assert flow.time_course(4.0, 0.1, 20).time[-1] == pytest.approx(
        flow.time_course(4.0, 0.1, 90).time[-1], rel=1e-9
    )


@pytest.mark.parametrize("name", CIRCUITS)
def test_the_beginning_to_leading_order(name):
    """Output first; off by a few per cent where sharpness · gain is still small."""
    flow = flow_of(name, start=None if name == "CACO" else 1e-3)
    course = flow.time_course(1.0, 1.9, 60)  # ln 8 = 2.079 is the start
    gap, gain = flow.early(1.0, course.time)
    small = course.sharpness * course.gain < 0.05
    assert small.sum() > 10
    np.testing.assert_allclose(gain[small], course.gain[small], rtol=0.05)
    np.testing.assert_allclose(gap[small], course.gap[small], rtol=0.05, atol=1e-12)
    if name == "CACO":
        early = Flow().early(2.0, np.array([0.5, 1.0, 2.0]))
        np.testing.assert_allclose(early[1], early[1][1] * np.array([0.5, 1, 2]), rtol=1e-12)
        np.testing.assert_allclose(early[0], early[0][1] * np.array([0.25, 1, 4]), rtol=1e-12)


@pytest.mark.parametrize(("name", "objective"), [("CACO", "ce"), ("CACO", "squared"), ("CAFO", "squared")])
def test_attention_that_does_not_learn_has_its_course_in_closed_form(name, objective):
    flow = flow_of(name, objective=objective, start=(0.4, 0.3))
    course = flow.time_course(0.0, 0.05, 30)
    np.testing.assert_allclose(flow.frozen(course.time), course.sharpness * course.gain, rtol=1e-9)


def test_a_squared_loss_close_to_0_has_its_time_course():
    """The pull falls to 0 with the loss, and the time left grows as its logarithm: z = 1 - (1 - z0) exp(-share T)."""
    flow = Flow(objective="squared", start=(0.4, 0.3))
    for points in (2, 40):
        course = flow.time_course(0.0, 1e-9, points)
        assert len(course.time) == points
        np.testing.assert_allclose(
            1 - flow.frozen(course.time), 1 - course.sharpness * course.gain, rtol=1e-7
        )


def test_long_times_and_steep_lines_keep_their_digits():
    """x - W(x) is a logarithm that is lost where x is large: the margin grows as ln t, the gap as ln b^2."""
    times = np.array([1e15, 1e18, 1e30])
    rate = Flow().task.k_ov * Flow().task.sharpness(0.0) ** 2
    np.testing.assert_allclose(Flow().frozen(times), np.log(7 * rate * times), rtol=1e-9)
    steep = Flow().slope(1.0) / 2
    assert Flow().gap_at(1e12, 1.0) == pytest.approx(math.log(steep * 1e24 / Flow().task.odds), rel=1e-9)


def test_a_large_imbalance_is_a_fixed_speed():
    """h is the imbalance then, the same everywhere: collapsed circuits at rates that are multiplied by it."""
    flow = flow_of("FAFO", start=1e-3, imbalance=1e9)
    same = Flow(start=(1e-3, 1e-3))
    assert flow.closed_form(2.0, 0.1).gap == pytest.approx(same.closed_form(2.0, 0.1).gap, rel=1e-9)
    assert flow.gap_at(2e-3, 2.0) - 1e-3 == pytest.approx(same.gap_at(2e-3, 2.0) - 1e-3, rel=1e-6)
    assert flow.gain_at(0.2, 2.0) == pytest.approx(same.gain_at(0.2, 2.0), rel=1e-6)


def test_numbers_of_numpy_are_numbers():
    sizes = {
        "classes": np.int64(8),
        "common": np.float32(16),
        "scale": np.float64(0.5),
        "start": (np.float32(0), 0),
    }
    assert Flow(**sizes).closed_form(np.float32(4), np.float64(0.1)) == Flow(scale=0.5).closed_form(4, 0.1)
    assert flow_of("FAFO", start=np.float32(0.5)) == flow_of("FAFO", start=0.5)
    assert Flow().table(np.array([1.0, 2.0]), 0.1, simulated=False).rows[1]["ratio"] == 2.0


# ---- steps by entry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "known"), [(1 / 4, 0.1665), (1, 0.3499), (4, 0.7586), (16, 0.9999)])
def test_sign_descent_walks_a_straight_line(ratio, known):
    """gap = scale · ratio · gain, at every step; the gap waits one step for a gain to have a gradient."""
    flow = Flow()
    end = flow.sign_descent(ratio, 0.1)
    assert end.sharpness == pytest.approx(known, abs=6e-5)
    assert end.gap == pytest.approx(33**-0.5 * ratio * end.gain, rel=1e-12)
    run = flow.descend(ratio, 0.1, "sign", lr=1e-2)
    assert run.sharpness == pytest.approx(end.sharpness, rel=2e-3)
    np.testing.assert_allclose(run.gaps, 33**-0.5 * ratio * run.gains, atol=2.01 * 33**-0.5 * ratio * 1e-2)
    assert run.off_ray_qk < 1e-6


def test_sign_descent_is_on_its_line_under_a_squared_loss_of_two_classes_alone():
    """With more, targets are 1 - 1/M and -1/M: wrong logits arrive first and the loss is no function of the margin."""
    two, many = Flow(2, objective="squared"), Flow(4, 2, 5, 2, 3, scale=0.45, objective="squared")
    end, run = two.sign_descent(4.0, 0.02), two.descend(4.0, 0.02, "sign", lr=2e-3)
    assert run.gap == pytest.approx(end.gap, rel=5e-3)
    run = many.descend(3.0, 0.02, "sign", lr=2e-3)
    assert run.gap / (0.45 * 3.0 * run.gain) > 1.05  # 1.08


def test_adam_is_sharper_with_a_faster_query_key_circuit_too():
    """Its own numbers, not those of the flow: the ratio means something else under it."""
    found = [Flow().descend(ratio, 0.1, "adam", lr=1e-2).sharpness for ratio in (1 / 4, 1, 4)]
    assert found == sorted(found)
    assert found[1] == pytest.approx(0.40, abs=0.03)


def test_the_steps_of_adam_are_those_of_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    weight = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    optimizer, step, ours = torch.optim.Adam([weight], lr=1.0), STEPS["adam"](), np.zeros((3, 4))
    for size in (1e-3, 1.0, 1e-9, 0.2):
        gradient = size * rng.normal(size=(3, 4))
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        ours -= step(gradient)
        np.testing.assert_allclose(ours, weight.detach().numpy(), rtol=1e-12)


def test_small_steps_of_gradient_descent_are_the_flow():
    flow = Flow(objective="squared")
    run, end = flow.descend(4.0, 0.05, "sgd", lr=0.5), flow.closed_form(4.0, 0.05)
    assert run.sharpness == pytest.approx(end.sharpness, rel=1e-2)
    assert run.times[-1] == pytest.approx(flow.time_course(4.0, 0.05).time[-1], rel=1e-2)


# ---- what cannot be answered -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: Flow(classes=1), "classes is 1; it is 2 or more"),
        (lambda: Flow(classes="8"), "classes is '8'; it is a whole number"),
        (lambda: Flow(per_class=2.5), "per_class is 2.5; it is a whole number"),
        (lambda: Flow(distractors=0), "distractors is 0; it is 1 or more"),
        (lambda: Flow(relevant=True), "relevant is True"),
        (lambda: Flow(common=math.nan), "common is nan; it is a whole number or inf"),
        (lambda: Flow(common=math.inf), "give one: scale=1.0"),
        (lambda: Flow(queries_per_class=0), "queries_per_class is 0"),
        (lambda: Flow(scale=0.0), "scale is 0.0"),
        (lambda: Flow(attention="merged"), "attention is 'merged'; known: collapsed, factorized"),
        (lambda: Flow(objective="mse"), "objective is 'mse'; known: ce, squared"),
        (lambda: Flow(start=0.1), "start is 0.1: one number is of factorized circuits"),
        (lambda: Flow(imbalance=0.1), "imbalance is 0.1: one number is"),
        (lambda: Flow(start=(0.1,)), "a pair: attention, output"),
        (lambda: Flow(start=(-0.1, 0)), "start is -0.1 for the attention circuit"),
        (lambda: flow_of("FAFO", start=0.0), "never moves"),
        (lambda: flow_of("CAFO", start=0.0), "factorized output circuit starts at 0"),
        (lambda: Flow(imbalance=(0.1, 0)), "imbalance is 0.1 for the collapsed attention circuit"),
        (lambda: Flow().closed_form(1.0, 3.0), "cross-entropy of 8 classes falls from 2.07944 towards 0"),
        (lambda: Flow().closed_form(1.0, 0.0), "not reached"),
        (lambda: Flow().closed_form(1.0, math.nan), "not reached"),
        (lambda: Flow(objective="squared").simulate(1.0, 0.5), "falls from 0.4375"),
        (lambda: Flow().closed_form(-1.0, 0.1), "ratio is -1.0"),
        (lambda: Flow().closed_form(math.inf, 0.1), "ratio is inf"),
        (lambda: Flow(start=(1.0, 20.0)).closed_form(1.0, 1.0), "behind the start, whose loss is"),
        (lambda: Flow(start=(1.0, 20.0)).simulate(1.0, 1.0), "behind the start, whose loss is"),
        (lambda: Flow().ratio_for(0.05, 0.1), "starts at 0.0625 and sharpens towards 1"),
        (lambda: Flow().ratio_for(1.0, 0.1), "sharpness is 1.0; that is not reached"),
        (lambda: Flow(start=(0, 6.0)).ratio_for(0.9, 0.1), "below the start's 6"),
        (lambda: Flow(common=math.inf, scale=1.0).simulate(1.0, 0.1), "closed forms alone"),
        (lambda: Flow(40, 20, 400).simulate(1.0, 0.1), "320,000 over 1,200 tokens"),
        (lambda: Flow().simulate(1.0, 0.1, factor_ratio=0.0), "factor_ratio is 0.0"),
        (lambda: Flow().simulate(1.0, 0.1, noise=0.0), "noise is 0.0"),
        (lambda: Flow().simulate(1.0, 0.1, rtol=0.0), "rtol is 0.0"),
        (lambda: Flow().gap_at(-1.0, 1.0), "gain is -1.0; it starts at 0.0 and only grows"),
        (lambda: Flow().gain_at(1.0, 0.0), "not on the way"),
        (lambda: Flow().time_course(1.0, 0.1, 1), "points is 1"),
        (lambda: flow_of("CAFO").frozen(1.0), "time_course(ratio=0.0, ...)"),
        (lambda: flow_of("CAFO").sign_descent(1.0, 0.1), "collapsed circuits from 0 alone"),
        (lambda: Flow().sign_descent(0.0, 0.1), "needs one above 0"),
        (lambda: Flow().descend(1.0, 0.1, "lion"), "known: sgd, sign, adam"),
        (lambda: Flow().descend(1.0, 0.1, lr=0.0), "lr is 0.0"),
        (lambda: Flow(objective="squared").sign_descent(1.0, 0.1), "leaves the line"),
        (lambda: Flow(objective="squared").time_course(1.0, 1e-40), "1e-25 or more"),
        (lambda: Flow(classes=10**400), "is a whole number"),
        (lambda: Flow(per_class=1e300), "per_class is 1e+300; it is 1099511627776 or less"),
        (lambda: Flow(scale="1"), "scale is '1'"),
        (lambda: Flow(start="12"), "start is '12'; it is one number, or a pair"),
        (lambda: Flow(start=(0.1, None)), "start is None"),
        (lambda: Flow(imbalance=None), "imbalance is None"),
        (
            lambda: Flow(start=(1e5, 0)),
            "start is 100000.0 for the attention circuit; it is 0 or above, up to 600",
        ),
        (lambda: flow_of("FAFO", imbalance=1e-200), "from 1e-100 to 1e100 in size"),
        (lambda: Flow(objective=[]), "objective is []"),
        (lambda: Flow(attention=np.zeros(2)), "attention is array"),
        (lambda: Flow().closed_form("1", 0.1), "ratio is '1'"),
        (lambda: Flow().closed_form(np.ones(2), 0.1), "ratio is array"),
        (lambda: Flow().closed_form(1.0, None), "loss is None"),
        (lambda: Flow().ratio_for("0.5", 0.1), "sharpness is '0.5'"),
        (lambda: Flow().gap_at(None, 1.0), "gain is None"),
        (lambda: Flow().gap_at(math.inf, 1.0), "gain is inf"),
        (lambda: Flow().gain_at("1", 1.0), "gap is '1'"),
        (lambda: Flow().time_course(1.0, 0.1, 2.5), "points is 2.5; it is a whole number"),
        (lambda: Flow().frozen("soon"), "times is 'soon'"),
        (lambda: Flow().early(1.0, [-1.0]), "times is [-1.0]; times are numbers, 0 or above"),
        (lambda: Flow().simulate(1.0, 0.1, seed=-1), "seed is -1"),
        (lambda: Flow().simulate(1.0, 0.1, rtol="small"), "rtol is 'small'"),
        (lambda: Flow().table("1", 0.1), "ratio is '1'"),
    ],
)
def test_what_cannot_be_answered_says_why(ask, words):
    with pytest.raises(DynamicsError) as raised:
        ask()
    assert words in str(raised.value)


def test_scipy_is_asked_for_by_name_when_it_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(MissingExtra, match=r"qkform\[theory\]"):
        Flow().closed_form(1.0, 0.1)


def test_importing_the_package_does_not_import_scipy():
    script = (
        "import sys, qkform; qkform.dynamics.one_layer.Flow; "
        "sys.exit(any(name.split('.')[0] in ('scipy', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
