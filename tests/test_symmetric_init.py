"""Symmetric starts: each arm begins as it promises, in W and in the score, and leaves the rest of the model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import qkform as qk
from qkform import sites
from qkform.errors import SurgeryError
from qkform.form.rotary import Rotary
from qkform.surgery import arms, chance, rebuilt, record
from tests import truth

transformers = pytest.importorskip("transformers")
PROMISES = {"matched": 1.0, "indefinite": 1.0, "skew": -1.0}
FOUR = (*PROMISES, "orthogonal")
ALL = (*FOUR, "script", "script_scale", "mimetic")
PARTIAL = {"rope_parameters": {"partial_rotary_factor": 0.67, "rope_theta": 90.0}}  # 4 of 6 coordinates turn
ALONE = {"num_key_value_heads": 6, "num_attention_heads": 6}  # a key head for every query head
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "gpt2": ("gpt2", {}),  # fused, transposed
    "llama, grouped": ("llama", {}),
    "llama": ("llama", ALONE),
    "mistral, multi-query": ("mistral", {"num_key_value_heads": 1}),
    "gptj": ("gptj", {}),  # interleaved, partial
    "gpt_neox": ("gpt_neox", PARTIAL),  # fused per head, partial
    "modernbert": ("modernbert", {}),  # fused, rotary, layers of two kinds
    "t5": ("t5", {"d_kv": 6}),
    "vit": ("vit", {}),
    "whisper": ("whisper", {}),  # queries have a bias, keys have none
    "qwen3": (
        "qwen3",
        ALONE | {"rms_norm_eps": 1e-24},
    ),  # norms on queries and keys, exact but for their epsilon
    "albert": ("albert", {}),  # one attention for all layers
}
ROTARY = ("llama", "llama, grouped", "mistral, multi-query", "gptj", "gpt_neox", "modernbert", "qwen3")


def tiny(name: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """A new model of a case of the truth test, initialised as its own class does, in float32; and inputs for it."""
    case = next(c for c in truth.CASES if c.name == name)
    truth.quiet()
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**case.settings, **settings})
    # its own attention, which notes the queries and keys it is given
    model = getattr(transformers, case.build)._from_config(config, attn_implementation=truth._interface())
    return model.eval(), truth.FEEDS[case.feed](config)


def model_of(key: str) -> Any:
    name, settings = MODELS[key]
    return tiny(name, **settings)[0]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], model: Any) -> int:
    """How many numbers of the state of a model are others than before, to the bit."""
    return sum(int((tensor != before[name]).sum()) for name, tensor in model.state_dict().items())


def asymmetry(model: Any, inputs: Any, promise: float) -> dict[str, float]:
    """max |s_ij - promise s_ji| / max |s| of the queries and keys that the model itself compares, per attention.

    Of each head; summed over the layer where heads share keys.
    """
    recorder, _ = truth.forward(model, inputs)
    found = {}
    places = {site.module: site.path for site in sites.find(model) if site.layer.attention == "self"}
    for call in recorder.calls:
        if call.module in places:
            group = call.query.shape[1] // call.key.shape[1]
            s = call.query @ call.key.repeat_interleave(group, 1).transpose(-1, -2)  # (B, H, T, T)
            s = s.sum(1) if group > 1 else s
            found[places[call.module]] = float((s - promise * s.mT).abs().max() / s.abs().max())
    assert sorted(found) == sorted(places.values())
    return found


# ---- what begins as promised -------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", PROMISES)
@pytest.mark.parametrize("key", MODELS)
def test_the_scan_shows_what_an_arm_promises(key: str, arm: str) -> None:
    model = model_of(key)
    old = qk.scan(model, signature="none").layers
    starts = qk.surgery.symmetrize_(model, arm=arm)
    table = qk.scan(model, signature="none")
    rows = [row for row in table.layers if row["attention"] == "self"]
    norms = [row["norm"] for row in old if row["attention"] == "self"]
    assert [start.path for start in starts] == [row["module"] for row in rows]
    for start, row, norm in zip(starts, rows, norms, strict=True):
        assert (start.arm, start.promised) == (arm, PROMISES[arm])
        assert start.symmetry == row["symmetry"] == pytest.approx(PROMISES[arm], abs=1e-6)
        assert (start.norm, start.norm_before) == (row["norm"], norm)
        heads = [head for head in table.heads if head["module"] == start.path]
        assert list(start.head_symmetry) == [head["symmetry"] for head in heads]
        assert list(start.head_norms) == [head["norm"] for head in heads]
        grouped = len(heads) > len({head["kv_head"] for head in heads})
        assert (start.reason is not None) == grouped
        if not grouped:
            assert start.head_symmetry == pytest.approx([PROMISES[arm]] * len(heads), abs=1e-6)
        else:
            assert "read one key head" in str(start.reason)
            assert all(abs(s) < 0.9 for s in start.head_symmetry)


@pytest.mark.parametrize("arm", PROMISES)
@pytest.mark.parametrize("key", MODELS)
def test_a_model_scores_a_pair_alike_from_both_sides(key: str, arm: str) -> None:
    """The law itself, on the queries and keys that the forward pass compares, rotated and normed: s_ij = +-s_ji."""
    name, settings = MODELS[key]
    model, inputs = tiny(name, **settings)
    model.double()
    assert min(asymmetry(model, inputs, PROMISES[arm]).values()) > 0.1
    starts = qk.surgery.symmetrize_(model, arm=arm, seed=3)
    assert [start.flags for start in starts] == [()] * len(starts)
    exact = 1e-6 if key == "qwen3" else 1e-12  # its norms compute in float32 whatever the model is in
    assert max(asymmetry(model, inputs, PROMISES[arm]).values()) < exact


@pytest.mark.parametrize("arm", PROMISES)
@pytest.mark.parametrize("key", ROTARY)
def test_a_rotary_form_is_symmetric_at_every_distance(key: str, arm: str) -> None:
    """W_{-n} = +-W_n^T; of the layer's sum, and of each head that has keys of its own."""
    model = model_of(key)
    starts = qk.surgery.symmetrize_(model, arm=arm, seed=1)
    for site, start in zip(sites.find(model), starts, strict=True):
        layer = site.snapshot()
        turning = layer.positions.rotary(layer.d_head, 1)
        assert turning.dims == (4 if key in ("gptj", "gpt_neox") else layer.d_head)
        for n in (0, 1, 7):
            ahead, behind = layer.form_with(offset=n), layer.form_with(offset=-n)
            forms = [(ahead.total(), behind.total())]
            forms += [(ahead, behind)] if start.reason is None else []
            for there, back in forms:
                w, other = there.matrix(), back.matrix()
                off = np.linalg.norm(other - PROMISES[arm] * np.swapaxes(w, 1, 2)) / np.linalg.norm(w)
                assert off < 1e-6


@pytest.mark.parametrize("key", ["bert", "gpt2", "modernbert", "gptj"])
def test_what_a_form_does_to_a_token_itself(key: str) -> None:
    """Matched: every token attracts itself; skew: none does; indefinite: as many directions attract as repel."""
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)).double()
    for arm in PROMISES:
        model = model_of(key).double()
        qk.surgery.symmetrize_(model, arm=arm)
        for site in sites.find(model):
            total = site.form().total()
            own = torch.einsum("td,de,te->t", x, torch.from_numpy(total.matrix()[0]), x)
            positive, negative, energy = (float(v[0]) for v in total.signature())
            if arm == "matched":
                assert own.min() > 0.0
                assert (negative, energy) == (0.0, 1.0)
            elif arm == "skew":
                assert own.abs().max() < 1e-12 * total.norm()[0] * 24
            else:
                assert own.min() < 0.0 < own.max()
                assert positive == negative


def test_the_control_has_no_symmetry_and_the_same_factors() -> None:
    """At a size where chance is small: 16 key heads of 32, at any distance of a rotary model too."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    for name, more in (("bert", {"hidden_size": 256}), ("llama", sizes)):
        values = {}
        for arm in ("matched", "orthogonal"):
            model, _ = tiny(name, **{"num_attention_heads": 8, "num_hidden_layers": 1, **more})
            (start,) = qk.surgery.symmetrize_(model, arm=arm)
            (site,) = sites.find(model)
            values[arm] = torch.linalg.svdvals(site.w_k().detach().double())
            assert (start.expected is None) == (arm == "matched")
            if arm == "orthogonal":
                assert start.promised is None
                assert start.expected is not None
                assert abs(start.symmetry - start.expected[0]) < 5 * start.expected[1]
                assert abs(start.symmetry) < 0.06
                assert max(abs(s) for s in start.head_symmetry) < 0.2
                if name == "llama":
                    at = [site.snapshot().form_with(offset=n).total().symmetry()[0] for n in (1, 7, -3)]
                    assert max(abs(s) for s in at) < 0.2
        np.testing.assert_allclose(values["orthogonal"], values["matched"], rtol=1e-5)


PLANES = Rotary("half", (1.0, 0.3, 0.1, 0.03))


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "one W_Q"])
@pytest.mark.parametrize(
    "rotary", [None, PLANES, Rotary("half", (1.0, 0.1), start=3)], ids=["plain", "all", "half"]
)
def test_what_symmetry_the_control_has_by_chance(rotary: Rotary | None, shared: bool) -> None:
    """Mean and standard deviation over J, against W as a whole matrix."""
    generator = torch.Generator().manual_seed(0)
    w_q = torch.randn(3, 11, 8, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 1.0, 8)
    w_q = w_q[:1].expand(3, 11, 8) if shared else w_q
    c = torch.tensor([1.0, 0.4, 2.5], dtype=torch.float64)
    turning = arms.planes(8, rotary)

    def make(head: int, drawn: Any) -> torch.Tensor:
        return arms.random(turning, head, drawn)

    def whole(head: int) -> torch.Tensor:
        return c[head] * w_q[head] @ make(head, generator).T @ w_q[head].T

    every = torch.stack([torch.stack([whole(g) for g in range(3)]).sum(0) for _ in range(500)])
    symmetry = (every * every.mT).sum((1, 2)) / every.square().sum((1, 2))
    mean, deviation = chance.by_chance(w_q, c, make, generator)
    assert abs(mean - symmetry.mean()) < 4 * symmetry.std() / chance.DRAWS**0.5
    assert 0.6 < deviation / symmetry.std() < 1.6
    j = [make(g, torch.Generator().manual_seed(5)) for g in range(3)]
    w = sum(c[g] * w_q[g] @ j[g].T @ w_q[g].T for g in range(3))
    exact = chance.by_chance(w_q, c, lambda g, _: j[g], None)
    assert exact == pytest.approx((float((w * w.T).sum() / w.square().sum()), 0.0), abs=1e-14)


def test_no_seed_of_the_control_is_refused() -> None:
    """Heads that share the columns of W_Q have symmetry by chance; so much is expected, and each J is as good."""
    off = []
    for seed in range(16):
        torch.manual_seed(seed)
        layer = nn.MultiheadAttention(96, 12)
        with torch.no_grad():
            layer.in_proj_weight[:96] = layer.in_proj_weight[:8].repeat(12, 1)
        (start,) = qk.surgery.symmetrize_(layer, arm="orthogonal", seed=seed, rotary=PLANES)
        mean, deviation = start.expected
        off.append(abs(start.symmetry - mean) / deviation)
        assert 0.1 < deviation < 0.8
    assert max(off) < 5.0
    assert np.mean(off) > 0.3


def test_the_control_of_one_orthonormal_head_is_haars() -> None:
    """Mean 1/d_head and standard deviation sqrt(2)/d_head; rank, not d_head, counts where some columns are small."""
    generator = torch.Generator().manual_seed(0)
    w_q = torch.linalg.qr(torch.randn(40, 16, generator=generator, dtype=torch.float64)).Q[None]

    def make(head: int, drawn: Any) -> torch.Tensor:
        return arms.random(arms.planes(16, None), head, drawn)

    for many in (16, 8):
        w_q[:, :, many:] *= 1e-3
        mean, deviation = chance.by_chance(w_q, torch.ones(1), make, generator)
        assert mean == pytest.approx(1 / many, abs=4 * 2**0.5 / many / chance.DRAWS**0.5)
        assert deviation == pytest.approx(2**0.5 / many, rel=0.5)


# ---- what stays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", FOUR)
@pytest.mark.parametrize("key", MODELS)
def test_only_key_weights_change(key: str, arm: str) -> None:
    """To the bit: queries, values, biases and all else; and the keys keep their Frobenius norm, head by head."""
    model = model_of(key)
    chosen = [site for site in sites.find(model) if site.layer.attention == "self"]
    before = weights(model)
    keys, queries = ([getattr(s, side)().detach().clone() for s in chosen] for side in ("w_k", "w_q"))
    starts = qk.surgery.symmetrize_(model, arm=arm, seed=2)
    moved = 0
    for site, k, q, start in zip(chosen, keys, queries, starts, strict=True):
        assert torch.equal(site.w_q(), q)
        new = site.w_k().detach()
        moved += int((new != k).sum())
        np.testing.assert_allclose(new.norm(dim=(1, 2)), k.norm(dim=(1, 2)), rtol=1e-6)
        group = site.layer.n_heads // site.layer.n_kv_heads
        sums = q.reshape(-1, group, *q.shape[1:]).sum(1)
        np.testing.assert_allclose(start.c, k.norm(dim=(1, 2)) / sums.norm(dim=(1, 2)), rtol=1e-6)
    assert 0.9 * sum(k.numel() for k in keys) < moved == changed(before, model)


@pytest.mark.parametrize("arm", ALL)
def test_a_layer_draws_from_its_own_seed(arm: str) -> None:
    """Its numbers depend on (seed, its place): not on torch's state, which stays, nor on the other layers."""
    one, other = (tiny("llama", **ALONE)[0] for _ in range(2))
    short, _ = tiny("llama", **ALONE, num_hidden_layers=1)
    short.layers[0].load_state_dict(one.layers[0].state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    qk.surgery.symmetrize_(one, arm=arm, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    qk.surgery.symmetrize_(other, arm=arm, seed=4)
    qk.surgery.symmetrize_(short, arm=arm, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    first = one.layers[0].state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in short.layers[0].state_dict().items())
    if arm == "matched":
        return
    third, _ = tiny("llama", **ALONE)
    qk.surgery.symmetrize_(third, arm=arm, seed=5)
    read = turned if arm in FOUR else sites.Site.w_k
    drawn = [read(site).detach() for model in (one, third) for site in sites.find(model)]
    for i, j in enumerate(drawn):
        assert not any(torch.allclose(j, other, atol=1e-2) for other in drawn[:i])


def turned(site: Any) -> torch.Tensor:
    """W_K in terms of W_Q, per head: J, for the arms that have one."""
    j = torch.linalg.lstsq(site.w_q().detach(), site.w_k().detach()).solution
    return j / j[:, 0].norm(dim=1)[:, None, None]


# ---- J -----------------------------------------------------------------------------------------------------


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, Rotary | None]:
    """A head size, and how it turns: any style, any part of it, or not at all."""
    pairs = draw(st.integers(0, 5))
    start = draw(st.integers(0, 3))
    d_head = max(2, start + 2 * pairs + draw(st.integers(0, 3)))
    if pairs == 0:
        return d_head, None
    frequencies = tuple(draw(st.floats(1e-3, 3.0)) for _ in range(pairs))
    return d_head, Rotary(draw(st.sampled_from(("half", "interleaved"))), frequencies, start)


@given(heads(), st.sampled_from(FOUR), st.integers(0, 3), st.integers(0, 99))
def test_j_is_orthogonal_and_commutes_with_the_rotation(
    head: tuple[int, Rotary | None], arm: str, number: int, seed: int
) -> None:
    d_head, rotary = head
    planes = arms.planes(d_head, rotary)
    assert sorted([*planes.free, *(i for pair in planes.pairs for i in pair)]) == list(range(d_head))
    if arms.ARMS[arm].problem(planes) is not None:
        assert (arm == "skew" and d_head % 2) or (
            arm == "indefinite" and len(planes.pairs) + len(planes.free) < 2
        )
        return
    j = arms.ARMS[arm].make(planes, number, torch.Generator().manual_seed(seed)).numpy()
    np.testing.assert_allclose(j @ j.T, np.eye(d_head), atol=1e-14)
    if arm in PROMISES:
        assert np.array_equal(j.T, PROMISES[arm] * j)
    if arm == "indefinite":
        positive = int((np.diag(j) > 0).sum())
        assert abs(2 * positive - d_head) == (d_head % 2 if planes.free else 2 * (len(planes.pairs) % 2))
    if arm == "orthogonal":  # as much of every plane is symmetric as is skew
        assert np.abs(np.diag(j @ j)[[i for pair in planes.pairs for i in pair]]).max(initial=0.0) < 1e-12
    if rotary is not None:
        for distance in (1, 7):
            turn = rotary.turned(np.eye(d_head), distance)
            np.testing.assert_allclose(turn @ j, j @ turn, atol=1e-12)


@pytest.mark.parametrize(("d_head", "rotary"), [(7, None), (6, Rotary("half", (1.0, 0.5, 0.1)))])
def test_what_is_left_over_alternates_between_key_heads(d_head: int, rotary: Rotary | None) -> None:
    generator = torch.Generator().manual_seed(0)
    planes = arms.planes(d_head, rotary)
    sums = [int(arms.ARMS["indefinite"].make(planes, head, generator).trace()) for head in range(4)]
    left = 1 if rotary is None else 2
    assert sums == [left, -left, left, -left]


def test_signs_and_ways_are_drawn() -> None:
    """Not the same coordinates for every head: or the fast planes of a rotary model would all repel."""
    generator = torch.Generator().manual_seed(0)
    planes = arms.planes(8, Rotary("half", (1.0, 0.5, 0.1, 0.01)))
    for arm in ("indefinite", "skew", "orthogonal"):
        drawn = torch.stack([arms.ARMS[arm].make(planes, 0, generator) for _ in range(64)])
        assert drawn.abs().mean(0).max() > 0.5
        assert drawn.mean(0).abs().max() < 0.4
    free = torch.stack([arms.random(arms.planes(4, None), 0, generator) for _ in range(400)])
    assert free.mean(0).abs().max() < 0.15  # Haar: no direction is preferred
    np.testing.assert_allclose((free**2).mean(0), 0.25, atol=0.06)
    assert torch.linalg.det(free).mean().abs() < 0.25  # nor turns to reflections


# ---- arms of others ------------------------------------------------------------------------------------------

VALUES = {  # how the values lie, written down by hand: (name, rows) of the state
    "bert": [("encoder.layer.0.attention.self.value.weight", None)],
    "gpt2": [("h.0.attn.c_attn.weight", np.arange(48, 72)), ("h.0.attn.c_attn.bias", np.arange(48, 72))],
    "llama, grouped": [("layers.0.self_attn.v_proj.weight", None)],
    "gpt_neox": [
        (
            "layers.0.attention.query_key_value.weight",
            np.concatenate([18 * h + np.arange(12, 18) for h in range(4)]),
        )
    ],
    "modernbert": [("layers.0.attn.Wqkv.weight", np.arange(48, 72))],
    "whisper": [
        ("encoder.layers.0.self_attn.v_proj.weight", None),
        ("encoder.layers.0.self_attn.v_proj.bias", None),
    ],
    "t5": [("encoder.block.0.layer.0.SelfAttention.v.weight", None)],
}


def value_of(state: dict[str, torch.Tensor], name: str, rows: Any) -> torch.Tensor:
    if rows is None:
        return state[name]
    return state[name][:, rows].T if "c_attn.weight" in name else state[name][rows]


@pytest.mark.parametrize("key", VALUES)
def test_script_rebuilds_queries_keys_and_values_as_linear_layers(key: str) -> None:
    """Weights and biases uniform in +-1/sqrt(d_model); the query weight is the key weight; biases are apart."""
    model = model_of(key)
    before = weights(model)
    chosen = [site for site in sites.find(model) if site.layer.attention == "self"]
    starts = qk.surgery.symmetrize_(model, arm="script")
    bound = 24**-0.5
    touched = 0
    for site, start in zip(chosen, starts, strict=True):
        q, k, b_q, b_k = (
            None if t is None else t.detach() for t in (site.w_q(), site.w_k(), site.b_q(), site.b_k())
        )
        assert torch.equal(q, k.repeat_interleave(len(q) // len(k), 0))
        drawn = [t for t in (k, b_q, b_k) if t is not None]
        if b_q is not None and b_k is not None:
            assert not torch.equal(b_q, b_k)
        assert start.flags == (("bias",) if b_q is not None else ())
        assert start.head_symmetry == pytest.approx([1.0] * len(q), abs=1e-6)
        touched += sum(t.numel() for t in (q, k, b_q, b_k) if t is not None)
        assert all(t.abs().max() <= bound for t in drawn)
        assert abs(k.std() / (bound / 3**0.5) - 1) < 0.1
    for name, rows in VALUES[key]:
        old, new = value_of(before, name, rows), value_of(weights(model), name, rows)
        assert not (old == new).any()
        assert 0.8 * bound < new.abs().max() <= bound
    # and nothing but them: values are as large as keys, and biased where the values are
    moved = changed(before, model)
    per_layer = [rebuilt.find_values(site) for site in chosen]
    values = sum(int(np.prod(v.weight.shape)) + (0 if v.bias is None else v.bias.shape[0]) for v in per_layer)
    assert moved == touched + values


@pytest.mark.parametrize("key", ["bert", "gpt2", "llama, grouped", "whisper"])
def test_the_control_of_script_differs_in_the_query_weight_alone(key: str) -> None:
    one, other = model_of(key), model_of(key)
    qk.surgery.symmetrize_(one, arm="script")
    starts = qk.surgery.symmetrize_(other, arm="script_scale")
    q = sum(site.w_q().numel() for site in sites.find(one) if site.layer.attention == "self")
    assert changed(weights(one), other) == q
    for site, start in zip(
        [s for s in sites.find(other) if s.layer.attention == "self"], starts, strict=True
    ):
        assert start.promised is None
        assert abs(start.symmetry) < 0.4
        ratio = float(site.w_q().detach().norm() ** 2 / site.w_q().numel() * 3 * 24)
        assert ratio == pytest.approx(1.0, abs=0.15)


def test_mimetic_weights_are_the_nearest_of_their_rank() -> None:
    """One head as wide as the model holds alpha Z + beta I itself; narrower ones share its singular values evenly."""
    layer = nn.MultiheadAttention(60, 1)
    before = weights(layer)
    qk.surgery.symmetrize_(layer, arm="mimetic")
    w = sites.find(layer)[0].form().matrix()[0].astype(np.float64)
    z = (w - 0.7 * np.eye(60)) / 0.7
    assert abs(z.mean()) < 4 / 60**1.5
    assert z.std() * 60**0.5 == pytest.approx(1.0, abs=0.05)
    assert torch.equal(before["out_proj.weight"], layer.state_dict()["out_proj.weight"])
    assert changed(before, layer) == 2 * 60 * 60
    model = model_of("bert")
    qk.surgery.symmetrize_(model, arm="mimetic")
    for site in sites.find(model):
        q, k = site.w_q().detach().double(), site.w_k().detach().double()
        grams = q.mT @ q, k.mT @ k
        np.testing.assert_allclose(*grams, atol=1e-6)
        diagonal = grams[0].diagonal(dim1=1, dim2=2)
        np.testing.assert_allclose(grams[0], torch.diag_embed(diagonal), atol=1e-6)
        assert (diagonal.diff(dim=1) < 0).all()  # the largest first, none left out
        assert diagonal.min() > 0.7


def test_mimetic_query_heads_of_a_group_have_matrices_of_their_own() -> None:
    model = model_of("llama, grouped")
    qk.surgery.symmetrize_(model, arm="mimetic")
    for site in sites.find(model):
        w = site.form().matrix()
        for h in range(1, len(w)):
            assert np.linalg.norm(w[h] - w[0]) > 0.3 * np.linalg.norm(w[0])
        traces = np.trace(w, axis1=1, axis2=2)
        assert (traces > 0.5 * site.layer.d_head).all()


# ---- other makes of models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_float_type_keeps_its_promise(dtype: torch.dtype, arm: str) -> None:
    """As exactly as the type holds it: the rounding of W_K enters squared."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 20), 2, enable_nested_tensor=False).to(
        dtype
    )
    before = weights(encoder)
    old = [site.w_q().detach().clone() for site in sites.find(encoder)]
    starts = qk.surgery.symmetrize_(encoder, arm=arm)
    assert [start.path for start in starts] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(tensor.dtype == dtype for tensor in encoder.parameters())
    promised = {"script": 1.0, **PROMISES}.get(arm)
    if promised is not None:
        off = {torch.float64: 1e-12, torch.float32: 3e-7, torch.float16: 1e-5, torch.bfloat16: 1e-3}[dtype]
        assert max(abs(s - promised) for start in starts for s in start.head_symmetry) < off
    if arm in FOUR:
        assert changed(before, encoder) <= 2 * 24 * 24
        for site, q in zip(sites.find(encoder), old, strict=True):
            assert torch.equal(site.w_q(), q)
            assert torch.equal(site.module.in_proj_weight[48:], before[f"{site.path}.in_proj_weight"][48:])


def test_the_numbers_drawn_do_not_depend_on_the_type() -> None:
    forms = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(32, 2).bfloat16().to(dtype)  # the same weights in all three
        qk.surgery.symmetrize_(layer, arm="orthogonal", seed=9)
        forms.append(sites.find(layer)[0].w_k().detach().double())
    np.testing.assert_allclose(forms[1], forms[0], atol=1e-6)
    assert torch.equal(forms[2], forms[1].bfloat16().double())  # computed in float32, rounded once


def test_a_layer_of_torch_scores_a_pair_alike() -> None:
    """By its own attention weights: log p_ij - log p_ji is a difference of two row constants where s_ij = s_ji."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 3, batch_first=True).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)

    def cycle() -> torch.Tensor:
        p = layer(x, x, x, average_attn_weights=False)[1].log()  # (2, 3, 11, 11)
        a = p - p.mT
        return (a[..., 0, 1] + a[..., 1, 2] + a[..., 2, 0]).abs().max()

    assert cycle() > 1e-2
    qk.surgery.symmetrize_(layer, arm="indefinite")
    assert cycle() < 1e-12


def test_cross_attention_is_left_and_listed() -> None:
    model = model_of("whisper")
    cross = {s.path: s.w_k().detach().clone() for s in sites.find(model) if s.layer.attention == "cross"}
    starts = qk.surgery.symmetrize_(model, arm="script")
    assert [entry["module"] for entry in starts.left] == list(cross)
    assert all("two sequences" in entry["reason"] for entry in starts.left)
    for site in sites.find(model):
        if site.path in cross:
            assert torch.equal(site.w_k(), cross[site.path])
    assert len(starts) == 5
    assert starts[-1].path == starts[4].path
    assert [start.path for start in starts[:2]] == [start.path for start in list(starts)[:2]]


class Headwise(nn.Module):
    """W_Q and W_K per head, as TransformerLens has them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("W_Q", "W_K", "W_V"):
            setattr(self, name, nn.Parameter(torch.randn(3, 12, 4)))


def test_weights_per_head_whose_positions_are_not_described() -> None:
    model = nn.ModuleDict({"attn": Headwise()})
    with pytest.raises(
        SurgeryError, match=r"^attn: how its model knows positions is not described.*rotary=None"
    ):
        qk.surgery.symmetrize_(model, arm="skew")
    before = weights(model)
    (start,) = qk.surgery.symmetrize_(model, arm="skew", rotary=None)
    assert start.symmetry == pytest.approx(-1.0, abs=1e-6)
    assert torch.equal(model["attn"].W_V, before["attn.W_V"])
    model = nn.ModuleDict({"attn": Headwise()})
    qk.surgery.symmetrize_(model, arm="indefinite", rotary=Rotary("interleaved", (1.0, 0.2)))
    j = torch.linalg.lstsq(model["attn"].W_Q, model["attn"].W_K).solution[0].detach()
    c = j[0, 0]
    assert torch.allclose(j, torch.diag(torch.stack([c, c, -c, -c])), atol=1e-5)
    for arm in ("matched", "script"):  # these fit any rotation
        model = nn.ModuleDict({"attn": Headwise()})
        before = weights(model)
        (start,) = qk.surgery.symmetrize_(model, arm=arm)
        assert start.symmetry == pytest.approx(1.0, abs=1e-6)
        assert bool((before["attn.W_V"] == model["attn"].W_V).any()) == (arm == "matched")


def test_queries_that_are_the_keys_are_symmetric_as_they_are() -> None:
    model = model_of("bert")
    for layer in model.encoder.layer:
        layer.attention.self.key = layer.attention.self.query
    before = weights(model)
    for arm in ("skew", "indefinite", "orthogonal", "script_scale", "mimetic"):
        with pytest.raises(SurgeryError, match=r"layer.0.attention.self: queries and keys are one parameter"):
            qk.surgery.symmetrize_(model, arm=arm)
    starts = qk.surgery.symmetrize_(model, arm="matched")
    assert [start.symmetry for start in starts] == pytest.approx([1.0] * 3)
    assert starts[0].c == pytest.approx((1.0,) * len(starts[0].c))
    assert changed(before, model) == 0


def test_layers_with_the_same_weights_are_written_once() -> None:
    model, other = model_of("bert"), model_of("bert")
    first, second = (model.encoder.layer[i].attention.self for i in (0, 1))
    second.query.weight, second.key.weight = first.query.weight, first.key.weight
    starts = qk.surgery.symmetrize_(model, arm="orthogonal")
    assert [start.path for start in starts] == [f"encoder.layer.{i}.attention.self" for i in (0, 2)]
    assert [dict(entry) for entry in starts.left] == [
        {
            "module": "encoder.layer.1.attention.self",
            "reason": "its weights are those of encoder.layer.0.attention.self",
        }
    ]
    first, second = (other.encoder.layer[i].attention.self for i in (0, 1))
    second.key.weight = first.key.weight
    with pytest.raises(SurgeryError, match=r"layer.1.attention.self and .*layer.0.*have one W_K and two W_Q"):
        qk.surgery.symmetrize_(other, arm="orthogonal")


# ---- what is not in W ------------------------------------------------------------------------------------------


def noisy(model: Any, name: str) -> None:
    """Every parameter with this in its name becomes random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if name in path:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)


def agreeing(model: Any) -> None:
    noisy(model, "q_norm")
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.k_norm.weight.copy_(layer.self_attn.q_norm.weight)


QWEN = ("qwen3", ALONE | {"rms_norm_eps": 1e-24})
PHI = (
    "phi",
    {"qk_layernorm": True, "num_attention_heads": 6, "num_key_value_heads": 6, "layer_norm_eps": 1e-24},
)
ODDITIES: list[tuple[tuple[str, dict[str, Any]], Any, str, tuple[str, ...]]] = [
    (("bert", {}), lambda m: noisy(m, "query.bias"), "matched", ("bias",)),
    (("gpt2", {}), lambda m: noisy(m, "c_attn.bias"), "skew", ("bias",)),
    (("whisper", {}), lambda m: noisy(m, "q_proj.bias"), "matched", ("bias",)),
    (QWEN, agreeing, "matched", ()),
    (QWEN, agreeing, "indefinite", ()),
    (QWEN, agreeing, "skew", ("qk_norm",)),
    (QWEN, lambda m: noisy(m, "q_norm"), "matched", ("qk_norm",)),
    (QWEN, lambda m: noisy(m, "_norm"), "indefinite", ("qk_norm",)),
    (("qwen3", {"rms_norm_eps": 1e-24}), lambda m: None, "matched", ("qk_norm",)),  # grouped
    (("qwen3", {"rms_norm_eps": 1e-24}), lambda m: None, "script", ()),
    (PHI, lambda m: None, "indefinite", ("qk_norm",)),  # J does not keep the mean that this norm takes away
    (PHI, lambda m: None, "matched", ()),
    (PHI, lambda m: noisy(m, "q_layernorm.bias"), "matched", ("qk_norm",)),
]


@pytest.mark.parametrize(("key", "change", "arm", "flags"), ODDITIES)
def test_a_flag_says_that_the_score_is_not_as_w(
    key: Any, change: Any, arm: str, flags: tuple[str, ...]
) -> None:
    """Biases and norms of queries and keys are not in W: flagged where they break the law of the score, only there."""
    model, inputs = tiny(key[0], **key[1])
    model.double()
    change(model)
    starts = qk.surgery.symmetrize_(model, arm=arm)
    promise = PROMISES.get(arm, 1.0)
    assert all(abs(start.symmetry - promise) < 1e-12 for start in starts)
    assert {start.flags for start in starts} == {flags}
    off = asymmetry(model, inputs, promise)
    assert min(off.values()) > 1e-4 if flags else max(off.values()) < 1e-6


# ---- all or nothing ------------------------------------------------------------------------------------------


def spoilt(what: str) -> Any:
    """A model whose last layer cannot be changed, or not as its arm would have it."""
    model = model_of("bert")
    last = model.encoder.layer[2].attention.self
    if what == "parametrized":
        nn.utils.parametrize.register_parametrization(last.key, "weight", nn.Tanh())
    elif what == "zero":
        nn.init.zeros_(last.key.weight)
    elif what == "zero queries":
        with torch.no_grad():
            last.query.weight[:6].zero_()
    elif what == "nan":
        nn.init.constant_(last.query.weight, float("nan"))
    elif what == "meta":
        last.key.to("meta")
    elif what == "no values":
        last.values = last.value
        del last.value
    return model


@pytest.mark.parametrize(
    ("what", "arm", "message"),
    [
        (
            "parametrized",
            "matched",
            r"layer.2.*parametrized; write before.*symmetrize the model before it is changed",
        ),
        ("zero", "matched", r"layer.2.attention.self: W_K of key head 0 is zero.*initialise"),
        ("zero queries", "skew", r"layer.2.attention.self: W_Q of key head 0 is zero"),
        ("nan", "orthogonal", r"layer.2.attention.self: W_Q is not finite"),
        ("meta", "matched", "it is on the meta device"),
        ("no values", "script", r"layer.2.attention.self: .*no value projection was found.*mimetic"),
    ],
)
def test_nothing_is_written_where_one_layer_cannot_be(what: str, arm: str, message: str) -> None:
    model = spoilt(what)
    before = {n: t.clone() for n, t in model.state_dict().items() if not t.is_meta}
    with pytest.raises(SurgeryError, match=message):
        qk.surgery.symmetrize_(model, arm=arm)
    after = model.state_dict()
    assert all(torch.equal(t, after[n]) or (what == "nan" and ".2." in n) for n, t in before.items())
    assert record.changes(model) == []


@pytest.mark.parametrize("arm", ["matched", "script"])
def test_a_promise_that_is_not_kept_is_undone(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is measured after writing; where one fails all is put back."""
    model = model_of("whisper")
    before = weights(model)
    if arm == "script":
        monkeypatch.setitem(rebuilt.REBUILT, arm, rebuilt.Rebuilt(1.0, True, rebuilt.script_scale))
        message = r"encoder.layers.0.self_attn: the arm 'script' promises symmetry \+1"
    else:
        monkeypatch.setitem(arms.ARMS, arm, arms.Arm(1.0, arms.random, arms._any))
        message = r"encoder.layers.0.self_attn: the arm 'matched' promises symmetry \+1"
    with pytest.raises(SurgeryError, match=message):
        qk.surgery.symmetrize_(model, arm=arm)
    assert changed(before, model) == 0
    assert record.changes(model) == []


def haar(p: arms.Planes, head: int, generator: Any) -> torch.Tensor:
    return arms._haar(p.d_head, generator)


def longer(p: arms.Planes, head: int, generator: Any) -> torch.Tensor:
    return arms.random(p, head, generator) * (1.0 + 1e-9)


def mixed(p: arms.Planes, head: int, generator: Any) -> torch.Tensor:
    """Turns of planes that are not the model's."""
    return arms.random(arms.Planes(tuple((i, i + 1) for i in range(0, p.d_head, 2)), ()), head, generator)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (haar, "does not commute with the rotation, by"),
        (mixed, "does not commute with the rotation, by"),
        (longer, r"is not orthogonal, by 2\.0e-09"),
        (arms.identity, r"has a symmetry of its own in a rotary plane, by 2\.0e\+00"),
        (arms.quarter_turns, r"has a symmetry of its own in a rotary plane, by 2\.0e\+00"),
    ],
)
def test_a_j_that_is_none_is_not_written(make: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the control promises of J is checked itself: W need not show it."""
    model = model_of("llama")
    before = weights(model)
    monkeypatch.setitem(arms.ARMS, "orthogonal", arms.Arm(None, make, arms._any))
    with pytest.raises(
        SurgeryError, match=rf"^layers.0.self_attn: the arm 'orthogonal' has drawn .*J {message}"
    ):
        qk.surgery.symmetrize_(model, arm="orthogonal")
    assert changed(before, model) == 0


@pytest.mark.parametrize("arm", FOUR)
def test_keys_that_do_not_read_as_they_were_written_are_put_back(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: one number of one head that is off by its last digit is noticed in every arm."""
    model = model_of("gpt2")
    before = weights(model)
    write = sites.Site.write_
    calls = []

    def off(site: Any, **values: Any) -> None:
        calls.append(site.path)
        if len(calls) == 2:
            values["w_k"] = values["w_k"].clone()
            values["w_k"][1, 2, 3] = torch.nextafter(values["w_k"][1, 2, 3], torch.tensor(9.0))
        write(site, **values)

    monkeypatch.setattr(sites.Site, "write_", off)
    with pytest.raises(SurgeryError, match=r"^h.1.attn: W_K does not hold what was written, c W_Q J"):
        qk.surgery.symmetrize_(model, arm=arm)
    assert changed(before, model) == 0
    assert record.changes(model) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"arm": "symmetric"}, r"^no arm 'symmetric'; known: matched, indefinite, skew, orthogonal, script"),
        ({"seed": -1}, r"^seed is -1; expected a whole number from 0"),
        ({"seed": True}, r"^seed is True"),
        ({"seed": 1.5}, r"^seed is 1.5"),
        ({"arm": "skew", "rotary": "half"}, r"^rotary is 'half'; expected 'auto', None or"),
        (
            {"arm": "skew", "rotary": Rotary("half", (1.0,) * 3)},
            r"6 coordinates turn and a head has 4\. J has to",
        ),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SurgeryError, match=message):
        qk.surgery.symmetrize_(nn.MultiheadAttention(12, 3), **asked)


def test_heads_too_small_for_an_arm() -> None:
    odd, _ = tiny("t5")  # d_kv 7
    with pytest.raises(
        SurgeryError, match=r"SelfAttention: d_head is 7, and a skew form.*another arm than 'skew'"
    ):
        qk.surgery.symmetrize_(odd, arm="skew")
    for arm, message in (("indefinite", "one coordinate has one sign"), ("orthogonal", "d_head is 1")):
        with pytest.raises(SurgeryError, match=message):
            qk.surgery.symmetrize_(nn.MultiheadAttention(4, 4), arm=arm)
    turning, _ = tiny("llama", head_dim=2)
    with pytest.raises(SurgeryError, match="one rotary plane has one sign"):
        qk.surgery.symmetrize_(turning, arm="indefinite")
    wide = nn.ModuleDict({"attn": Headwise()})
    wide["attn"].W_Q = wide["attn"].W_K = nn.Parameter(torch.randn(3, 3, 4))
    wide["attn"].W_K = nn.Parameter(torch.randn(3, 3, 4))
    with pytest.raises(SurgeryError, match="d_head 4 is more than d_model 3"):
        qk.surgery.symmetrize_(wide, arm="mimetic")


def test_positions_that_nobody_has_described() -> None:
    model = transformers.ReformerModel(
        transformers.ReformerConfig(
            vocab_size=61, hidden_size=24, num_attention_heads=2, attention_head_size=12, attn_layers=["local"] * 2,
            feed_forward_size=20, is_decoder=True, axial_pos_embds_dim=[8, 16], axial_pos_shape=[4, 4],
        )
    )  # fmt: skip
    before = weights(model)
    with pytest.raises(
        SurgeryError, match=r"self_attention: how 'reformer' knows positions is not described\. J has"
    ):
        qk.surgery.symmetrize_(model, arm="orthogonal")
    assert changed(before, model) == 0
    assert [start.symmetry for start in qk.surgery.symmetrize_(model)] == pytest.approx([1.0, 1.0])


def test_a_model_of_cross_attention_alone() -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 20)
    model = nn.ModuleDict({"multihead_attn": layer.multihead_attn})
    with pytest.raises(SurgeryError, match=r"no self-attention.*multihead_attn: cross-attention"):
        qk.surgery.symmetrize_(model)


# ---- the record ------------------------------------------------------------------------------------------------


def test_the_change_is_recorded_in_the_model() -> None:
    model = model_of("bert")
    qk.surgery.symmetrize_(model, arm="indefinite", seed=7)
    (change,) = record.changes(model)
    assert [change[name] for name in ("change", "arm", "seed")] == ["symmetrize", "indefinite", 7]
    assert change["sites"] == [site.path for site in sites.find(model)]
    json.dumps(model.config.qkform)
    other = model_of("bert")
    qk.surgery.symmetrize_(torch.compile(other, backend="eager"), arm="indefinite", seed=7)
    assert record.changes(other) == record.changes(model)


def test_a_second_arm_is_refused() -> None:
    """What it would start from, and the norms it would report as before, are no longer the model's own."""
    model = model_of("bert")
    qk.surgery.symmetrize_(model, arm="orthogonal", seed=1)
    before = weights(model)
    with pytest.raises(SurgeryError, match=r"given the arm 'orthogonal' already.*build the model again"):
        qk.surgery.symmetrize_(model, arm="skew")
    assert changed(before, model) == 0


def test_a_decoupled_model_is_refused() -> None:
    model = model_of("bert")
    record.note(model, "decouple", init="diagonal")
    before = weights(model)
    for asked in (model, torch.compile(model, backend="eager"), nn.ModuleDict({"module": model})):
        with pytest.raises(SurgeryError, match=r"recouple_\(model\), symmetrize_\(model\), then decouple_"):
            qk.surgery.symmetrize_(asked)
    assert changed(before, model) == 0


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_order_of_changes(name: str) -> None:
    """Symmetrize, then decouple: a matched head begins with a positive self score. The other order is refused."""
    model, _ = tiny(name, attention_probs_dropout_prob=0.0, attn_pdrop=0.0)
    qk.surgery.symmetrize_(model)
    qk.surgery.decouple_(model)
    v = [parameter for path, parameter in model.named_parameters() if path.endswith("self_score.v")]
    assert len(v) == 3
    assert all(bool((w > 0).all()) for w in v)
    assert [entry["change"] for entry in record.changes(model)] == ["symmetrize", "decouple"]
    model, _ = tiny(name, attention_probs_dropout_prob=0.0, attn_pdrop=0.0)
    qk.surgery.decouple_(model)
    with pytest.raises(SurgeryError, match="decoupled already"):
        qk.surgery.symmetrize_(model)
    qk.surgery.recouple_(model)
    assert qk.surgery.symmetrize_(model)[2].symmetry == pytest.approx(1.0, abs=1e-6)


def test_a_split_weight_is_refused() -> None:
    model = model_of("gpt2")
    qk.surgery.param_groups(model, lr=1e-3, qk_lr_ratio=2.0)
    before = weights(model)
    with pytest.raises(
        SurgeryError, match=r"h.0.attn: .*parametrized.*; symmetrize the model before it is changed"
    ):
        qk.surgery.symmetrize_(model)
    assert changed(before, model) == 0


def test_a_saved_start_is_loaded_with_its_record(tmp_path: Path) -> None:
    model = model_of("bert")
    qk.surgery.symmetrize_(model, arm="skew", seed=11)
    model.save_pretrained(tmp_path)
    loaded = qk.surgery.from_pretrained(type(model), tmp_path)
    (change,) = record.changes(loaded)
    assert [change[name] for name in ("change", "arm", "seed")] == ["symmetrize", "skew", 11]
    assert changed(weights(model), loaded) == 0
