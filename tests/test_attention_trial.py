"""The trial of fused kernels: what it finds, what follows, and that nobody else sees it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkform.attention import decoupled_attention, fused, parts, trial
from qkform.errors import AttentionError
from tests.attention_cases import arguments, distance, with_gradients

PLAIN = fused.KERNELS["cpu"]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts others in the place of the CPU's kernels; nothing was tried yet."""

    def change(**changes: Any) -> None:
        monkeypatch.setitem(fused.KERNELS, "cpu", PLAIN._replace(**changes))
        trial.looked_at.cache_clear()

    change()
    yield change
    trial.looked_at.cache_clear()


# ---- what is found -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [1, 16, 80])
def test_kernels_that_agree_with_the_reference_are_used(use: Any, dtype: torch.dtype, d: int) -> None:
    assert trial.disagreement("cpu", dtype, d) is None
    decoupled_attention(*arguments((2, 2, 5, 5), d, dtype=dtype), impl="flash")


def _top_left(*args: Any, mask: Tensor | None, causal: bool, **rest: Any) -> Any:
    return PLAIN.forward(*args, mask=mask, causal=causal and mask is None, **rest)


def _row_by_row(*args: Any, mask: Tensor | None, **rest: Any) -> Any:
    """Reads row i of a mask at i times its length, where overlapping rows are not."""
    if mask is not None and mask.shape[2] > 1 and mask.stride(2) < mask.shape[3]:
        mask = torch.zeros(mask.shape, dtype=mask.dtype)
    return PLAIN.forward(*args, mask=mask, **rest)


def _first_sequence(*args: Any, mask: Tensor | None, **rest: Any) -> Any:
    return PLAIN.forward(*args, mask=None if mask is None else mask[:1], **rest)


def _one_head(*args: Any, mask: Tensor | None, **rest: Any) -> Any:
    return PLAIN.forward(*args, mask=None if mask is None else mask[:, :1], **rest)


def _mean_of_none(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, closed: Any, **rest: Any) -> Any:
    """A row without keys takes the mean of all, as a softmax over the least numbers does."""
    out, lse = PLAIN.forward(q, k, v, mask=mask, closed=closed, **rest)
    if closed is not None:
        rows = closed().expand(lse.shape)
        out = torch.where(
            rows[..., None], v.repeat_interleave(q.shape[1] // v.shape[1], 1).mean(2, True), out
        )
        lse = lse.masked_fill(rows, math.log(k.shape[2]))
    return out, lse


def _own_lse(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
    """Computes the log-sum-exp anew and does not look at the one that it is given."""
    out, lse = PLAIN.forward(q, k, v, closed=None, **options)
    return PLAIN.backward(grad, q, k, v, out, lse, **options)


def _slightly_off(*args: Any, **options: Any) -> Any:
    gq, gk, gv = PLAIN.backward(*args, **options)
    return gq, gk * 1.01, gv


def _nan(*args: Any, **options: Any) -> Any:
    out, lse = PLAIN.forward(*args, **options)
    return out * math.nan, lse


OTHERS = {
    "causal or a mask, not both": {"forward": _top_left},
    "a mask without overlapping rows": {"forward": _row_by_row},
    "one padding for all sequences": {"forward": _first_sequence},
    "one mask for all heads": {"forward": _one_head},
    "empty rows take the mean": {"forward": _mean_of_none},
    "a log-sum-exp of its own": {"backward": _own_lse},
    "keys' gradients one hundredth off": {"backward": _slightly_off},
    "NaN": {"forward": _nan},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_kernels_that_mean_something_else_are_found(use: Any, kind: str) -> None:
    use(**OTHERS[kind])
    with pytest.warns(RuntimeWarning, match=r"cpu for float64, 16 features per head, differ .* by [0-9n]"):
        assert trial.disagreement("cpu", torch.float64, 16) is not None


# ---- what follows --------------------------------------------------------------------------------------------


def test_rejected_kernels_are_not_used_and_one_warning_says_so(use: Any) -> None:
    use(backward=_slightly_off)
    inputs = arguments((2, 2, 5, 5))
    with pytest.warns(RuntimeWarning, match="takes the reference") as seen:
        auto = with_gradients(decoupled_attention, inputs)
    assert len(seen) == 1
    with_gradients(decoupled_attention, inputs)  # silent: a warning is an error here
    assert distance(auto, with_gradients(decoupled_attention, inputs, impl="reference")) == 0
    with pytest.raises(AttentionError, match=r"cpu for float64, 5 features .* differ from the reference by"):
        decoupled_attention(*inputs, impl="flash")


def test_kernels_that_fail_are_not_used(use: Any) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel")

    use(forward=failing)
    with pytest.warns(RuntimeWarning, match="no such kernel"):
        decoupled_attention(*arguments((2, 2, 5, 5)))
    with pytest.raises(AttentionError, match=r"fail on 37 queries .*no such kernel"):
        decoupled_attention(*arguments((2, 2, 5, 5)), impl="flash")


def test_a_lack_of_memory_is_raised_and_not_remembered(use: Any) -> None:
    short = []

    def forward(*args: Any, **options: Any) -> Any:
        if not short:
            short.append("once")
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(short) == 1:
            short.append("twice")
            torch.empty(10**15)
        return PLAIN.forward(*args, **options)

    use(forward=forward)
    inputs = arguments((2, 2, 5, 5))
    with pytest.raises(torch.OutOfMemoryError):
        decoupled_attention(*inputs)
    with pytest.raises(RuntimeError, match="allocate memory"):
        decoupled_attention(*inputs)
    decoupled_attention(*inputs, impl="flash")


def test_kernels_are_tried_once(use: Any) -> None:
    calls = []

    def forward(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return PLAIN.forward(*args, **options)

    use(forward=forward)
    decoupled_attention(*arguments((2, 2, 5, 5)), is_causal=True)
    assert len(calls) > 5
    calls.clear()
    decoupled_attention(*arguments((2, 2, 5, 5)), is_causal=True)
    assert len(calls) == 1
    decoupled_attention(*arguments((2, 2, 5, 5), 6), is_causal=True)
    assert len(calls) > 5


def test_kernels_that_read_no_overlapping_rows_get_blocks(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def careful(*args: Any, mask: Tensor | None, **options: Any) -> Any:
        assert mask is None or mask.shape[2] == 1 or mask.stride(2) >= mask.shape[3]
        return PLAIN.forward(*args, mask=mask, **options)

    monkeypatch.setattr(parts, "REVERSE_FROM", 1)
    monkeypatch.setattr(parts, "BLOCK", 3)
    use(any_strides=False, forward=careful)
    inputs = arguments((2, 2, 7, 7))
    flash, reference = (with_gradients(decoupled_attention, inputs, impl=i) for i in ("flash", "reference"))
    assert distance(flash, reference) < 1e-12


# ---- nobody sees it, and it sees nobody ------------------------------------------------------------------------


def test_the_trial_runs_while_compiling(use: Any) -> None:
    torch._dynamo.reset()
    inputs = arguments((2, 2, 5, 5))
    compiled = torch.compile(decoupled_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    found = compiled(*inputs)
    assert trial.looked_at.cache_info().currsize == 1
    assert distance([found], [decoupled_attention(*inputs, impl="flash")]) == 0


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x),
    ],
    ids=["inference", "no gradient", "autocast", "default device", "hooks"],
)
def test_the_callers_modes_do_not_reach_it(use: Any, mode: Any) -> None:
    inputs = arguments((2, 2, 5, 5))
    with mode():
        decoupled_attention(*inputs, impl="flash")
    assert trial.looked_at.cache_info().currsize == 1


def test_transforms_of_functions_do_not_reach_it(use: Any) -> None:
    inputs = arguments((2, 2, 5, 5))
    torch.func.grad(lambda *x: decoupled_attention(*x).sum())(*inputs)
    assert trial.looked_at.cache_info().currsize == 1


def test_whoever_watches_operators_does_not_see_it(use: Any) -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    inputs = arguments((2, 2, 5, 5))
    parts._hidden.cache_clear()  # the mask that is kept is made by operators
    with Count() as first:
        decoupled_attention(*inputs)
    parts._hidden.cache_clear()
    with Count() as second:
        decoupled_attention(*inputs)
    assert first.calls == second.calls > 0


def test_the_number_of_threads_stays(use: Any) -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:

        def forward(*args: Any, **options: Any) -> Any:
            seen.append(torch.get_num_threads())
            return PLAIN.forward(*args, **options)

        use(forward=forward)
        assert trial.disagreement("cpu", torch.float64, 8) is None
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_importing_attention_does_not_import_the_compiler() -> None:
    code = "import sys, qkform.attention; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


@CARD
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [8, 64, 128, 256])
def test_a_cards_kernels_agree_with_the_reference(dtype: torch.dtype, d: int) -> None:
    assert trial.disagreement("cuda:0", dtype, d) is None
