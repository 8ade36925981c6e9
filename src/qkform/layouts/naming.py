"""Q and K found by their names alone: pairs of projections in one module, in a model that no family file describes.

Only names that leave no doubt are taken: two matrices side by side, one called a query and one a key. How many heads
they hold must follow from the config and be borne out by the shapes (`scopes`); what does not follow is listed with
the reason, never guessed. Fused tensors are left alone: their names do not tell the order of what is in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qkform.layouts.match import MAX_NAME, MAX_PARTS, HasShape, Place, is_number

QUERY_TO_KEY: Mapping[str, str] = {
    "q_proj": "k_proj",
    "query": "key",
    "q": "k",
    "q_lin": "k_lin",
    "to_q": "to_k",
    "wq": "wk",
    "w_q": "w_k",
    "Wq": "Wk",
    "W_q": "W_k",
    "W_Q": "W_K",
    "linear_q": "linear_k",
    "q_linear": "k_linear",
    "query_proj": "key_proj",
    "proj_q": "proj_k",
    "project_q": "project_k",
    "query_layer": "key_layer",
    "query_projection": "key_projection",
    "queries": "keys",
    "add_q_proj": "add_k_proj",
    "to_query": "to_key",
}
_CROSS = re.compile(
    r"(?i)(?:^|[._])(?:cross_?att\w*|x_?attn\w*|encoder_att\w*|enc_dec_att\w*|encdecattention|multihead_attn|attn2|src_attn)"
    r"(?:[._]|$)"
)


@dataclass(frozen=True)
class Pair:
    """A query and a key matrix of one module; `suffix` is ".weight" or "" where the tensor is the name itself."""

    place: Place
    q: str
    k: str
    suffix: str

    @property
    def q_tensor(self) -> str:
        return self._tensor(self.q)

    @property
    def k_tensor(self) -> str:
        return self._tensor(self.k)

    def _tensor(self, name: str) -> str:
        return f"{self.place.module}.{name}{self.suffix}".removeprefix(".")


def pairs(tensors: Mapping[str, HasShape]) -> Iterator[Pair]:
    """Every pair of query and key matrices whose names say so, with the place of its module."""
    found: dict[str, list[tuple[list[str], str, str]]] = {}  # path with numbers left out -> modules
    for name in tensors:
        if len(name) > MAX_NAME:
            continue
        stem = name.removesuffix(".weight").removesuffix(".linear")
        module, _, last = stem.rpartition(".")
        key = QUERY_TO_KEY.get(last)
        suffix = name[len(stem) :]
        if key is None or len(tensors[name].shape) < 2 or name.count(".") > MAX_PARTS:
            continue
        if f"{module}.{key}{suffix}".removeprefix(".") in tensors:
            parts = module.split(".") if module else []
            shape = ".".join("#" if is_number(p) else p for p in (*parts, last))
            found.setdefault(shape, []).append((parts, last, suffix))
    for modules in found.values():
        at = _layer_position([parts for parts, _, _ in modules])
        for parts, last, suffix in modules:
            module = ".".join(parts)
            place = (
                Place(module, module, 0)
                if at is None
                else Place(module, ".".join(parts[:at]), int(parts[at]))
            )
            yield Pair(place, last, QUERY_TO_KEY[last], suffix)


def _layer_position(modules: Sequence[Sequence[str]]) -> int | None:
    """Which part of the paths numbers the layers: the last number that differs between them, or the last at all.

    In `block.3.layer.0.SelfAttention` it is the 3: the 0 is the same in every block.
    """
    numbers = [i for i, part in enumerate(modules[0]) if is_number(part)]
    varying = [i for i in numbers if len({parts[i] for parts in modules}) > 1]
    return varying[-1] if varying else numbers[-1] if numbers else None


def layer_place(module: str) -> Place:
    """The place of a module by the last number in its path."""
    parts = module.split(".") if module else []
    at = next((i for i in reversed(range(len(parts))) if is_number(parts[i])), None)
    return Place(module, module, 0) if at is None else Place(module, ".".join(parts[:at]), int(parts[at]))


def is_cross(module: str) -> bool:
    """Whether a module is called cross-attention."""
    return bool(_CROSS.search(module))
