"""What is no tensor is refused by name, by every attention function alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkform as qk
from qkform.errors import AttentionError

TENSORS = {
    "query": torch.zeros(1, 2, 3, 5),
    "key": torch.zeros(1, 2, 3, 5),
    "value": torch.zeros(1, 2, 3, 5),
    "self_score": torch.zeros(1, 2, 3),
    "attn_mask": torch.ones(3, 3, dtype=torch.bool),
}
TAKES = {
    "decoupled_attention": ["query", "key", "value", "self_score", "attn_mask"],
    "exclusive_attention": ["query", "key", "value", "attn_mask"],
    "no_diagonal_attention": ["query", "key", "value", "attn_mask"],
    "attention_statistics": ["query", "key", "self_score", "attn_mask"],
}
EACH = [(function, name) for function, names in TAKES.items() for name in names]


@pytest.mark.parametrize(("function", "name"), EACH)
def test_what_is_no_tensor_is_refused_by_name(function: str, name: str) -> None:
    given: dict[str, Any] = {each: TENSORS[each] for each in TAKES[function]}
    call = getattr(qk.attention, function)
    call(**given)
    array = given[name].numpy()
    for other, remedy in (
        (array, rf"{name} is a numpy\.ndarray; .*torch\.from_numpy\({name}\)"),
        (array.tolist(), rf"{name} is a list; .*torch\.tensor\({name}\)"),
    ):
        with pytest.raises(AttentionError, match=remedy):
            call(**{**given, name: other})


@pytest.mark.parametrize(("function", "name"), EACH)
def test_only_what_has_a_default_may_be_none(function: str, name: str) -> None:
    given: dict[str, Any] = {each: TENSORS[each] for each in TAKES[function]}
    call = getattr(qk.attention, function)
    if name == "attn_mask" or (function == "attention_statistics" and name == "self_score"):
        call(**{**given, name: None})
        return
    with pytest.raises(AttentionError, match=f"{name} is None; expected a torch.Tensor$"):
        call(**{**given, name: None})


def test_several_numpy_arrays_name_the_first() -> None:
    q = np.zeros((1, 2, 3, 5), np.float32)
    with pytest.raises(AttentionError, match=r"query is a numpy\.ndarray"):
        qk.attention.decoupled_attention(q, q, q, q[..., 0])  # type: ignore[arg-type]
