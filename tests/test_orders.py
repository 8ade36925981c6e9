"""Orders of fused tensors: the rows that a part names are the rows that the model's own code splits off."""

from __future__ import annotations

import numpy as np
import pytest

from qkform.errors import LayoutError
from qkform.layouts.order import Sizes, cut, outputs, parsed

INPUTS = 3


def rows_of(part: str, sizes: Sizes) -> list[int]:
    """The row numbers of a part, in the order of its heads."""
    order = part.partition(": ")[0]
    numbered = np.arange(outputs(order, sizes))[:, None].repeat(INPUTS, 1)
    return [int(r) for r in cut(part, sizes).of(numbered)[..., 0].ravel()]


@pytest.mark.parametrize(
    ("part", "sizes", "rows"),
    [
        ("q|k|v: q", Sizes(4, 2, 1), [0, 1, 2, 3]),
        ("q|k|v: k", Sizes(4, 2, 1), [4, 5]),
        ("q|k|v: k", Sizes(3, 1, 2), [6, 7]),
        ("heads x [q|k|v]: q", Sizes(2, 2, 2), [0, 1, 6, 7]),
        ("heads x [q|k|v]: k", Sizes(2, 2, 2), [2, 3, 8, 9]),
        ("groups x [q|k|v]: q", Sizes(4, 2, 1), [0, 1, 4, 5]),
        ("groups x [q|k|v]: k", Sizes(4, 2, 1), [2, 6]),
        ("4 x [q|v|k]: q", Sizes(4, 4, 1), [0, 3, 6, 9]),
        ("4 x [q|v|k]: k", Sizes(8, 8, 1), [4, 5, 10, 11, 16, 17, 22, 23]),
        ("heads x [q|gate]: q", Sizes(2, 1, 2), [0, 1, 4, 5]),
        ("heads x [nope|rope]: rope", Sizes(2, 2, 5, (("nope", 3), ("rope", 2))), [3, 4, 8, 9]),
        ("latent|rope: latent", Sizes(2, 2, 5, (("latent", 4), ("rope", 2))), [0, 1, 2, 3]),
        ("latent|rope: rope", Sizes(2, 1, 5, (("latent", 4), ("rope", 2))), [4, 5]),
        ("k|v: k", Sizes(4, 2, 2), [0, 1, 2, 3]),
    ],
)
def test_a_part_is_the_rows_that_its_order_gives_it(part: str, sizes: Sizes, rows: list[int]) -> None:
    assert rows_of(part, sizes) == rows


@pytest.mark.parametrize(
    "order", ["q|k|v", "heads x [q|k|v]", "groups x [q|k|v]", "2 x [q|v|k]", "heads x [v|k|q]"]
)
def test_the_parts_of_an_order_are_all_its_rows_and_none_twice(order: str) -> None:
    sizes = Sizes(4, 4 if "heads" in order else 2, 3)
    rows = [r for item in parsed(order)[1] for r in rows_of(f"{order}: {item}", sizes)]
    assert sorted(rows) == list(range(outputs(order, sizes)))


def test_a_cut_of_one_block_is_a_view() -> None:
    weight = np.zeros((12, 5))
    assert np.shares_memory(cut("q|k|v: k", Sizes(2, 2, 2)).of(weight), weight)


@pytest.mark.parametrize(
    "order", ["", "q|", "|q", "q k v", "heads[q|k]", "heads x [q|k", "q|k]", "0 x [q|k]", "layers x [q|k]"]
)
def test_nonsense_is_no_order(order: str) -> None:
    with pytest.raises(LayoutError, match="no order"):
        parsed(order)


def test_heads_that_do_not_fill_the_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 heads of 'q'"):
        cut("4 x [q|v|k]: q", Sizes(3, 3, 2))
    with pytest.raises(LayoutError, match="no 'gate'"):
        cut("q|k|v: gate", Sizes(3, 3, 2))


# ---- against the code that splits ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "order", "kv_heads"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, "groups x [q|k|v]", 2),
        ({"new_decoder_architecture": False, "multi_query": True}, "q|k|v", 1),
        ({"new_decoder_architecture": False, "multi_query": False}, "heads x [q|k|v]", 6),
    ],
)
def test_falcon_splits_its_rows_like_this(settings: dict[str, object], order: str, kv_heads: int) -> None:
    import torch
    from transformers import FalconConfig
    from transformers.models.falcon.modeling_falcon import FalconAttention

    config = FalconConfig(hidden_size=24, num_attention_heads=6, num_hidden_layers=1, alibi=False, **settings)
    attention = FalconAttention(config, layer_idx=0)
    sizes = Sizes(6, kv_heads, 4)
    rows = outputs(order, sizes)
    assert attention.query_key_value.weight.shape[0] == rows
    q, k, _ = attention._split_heads(torch.arange(rows)[None, None])
    assert rows_of(f"{order}: q", sizes) == q.ravel().tolist()
    k = k[0, 0, :: 6 // kv_heads] if order.startswith("groups") else k[0, 0]  # repeated for each query head
    assert rows_of(f"{order}: k", sizes) == k.ravel().tolist()


def test_bloom_splits_its_rows_head_by_head() -> None:
    import torch
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention

    attention = BloomAttention(BloomConfig(hidden_size=24, n_head=6), layer_idx=0)
    sizes = Sizes(6, 6, 4)
    q, k, _ = attention._reshape(torch.arange(72)[None, None])
    for item, mine in (("q", q), ("k", k)):
        assert rows_of(f"heads x [q|k|v]: {item}", sizes) == mine[0, :, 0].ravel().tolist()
