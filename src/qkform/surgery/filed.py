"""What the files of a decoupled model hold as `self_score.v`: looked at before transformers casts it without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from qkform.errors import CheckpointError

ENDING = ".self_score.v"


def refuse_unsound(state_dict: Mapping[str, Any] | None, files: Sequence[str] | None) -> None:
    """CheckpointError for the first self score that is not of a floating type, or that holds NaN or infinity."""
    for name, v in _scores(state_dict, files):
        words = "expected finite floating-point numbers, (n_heads, d_model)"
        if not v.is_floating_point():
            raise CheckpointError(f"{name} holds {str(v.dtype).removeprefix('torch.')}; {words}")
        lost = int((~v.float().isfinite()).sum())
        if lost:
            raise CheckpointError(
                f"{name} has {lost} of {v.numel()} numbers that are NaN or infinite; {words}: take an earlier "
                "checkpoint of this run"
            )


def _scores(
    state_dict: Mapping[str, Any] | None, files: Sequence[str] | None
) -> Iterator[tuple[str, Tensor]]:
    """Name and value, as filed, of every self score; of safetensors nothing else is read."""
    from safetensors import safe_open
    from transformers.modeling_utils import load_state_dict

    for held in [state_dict] if state_dict is not None else files or ():
        if isinstance(held, str) and held.endswith(".safetensors"):
            with safe_open(held, "pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys() if _is_score(name))  # noqa: SIM118
        else:
            tensors = load_state_dict(held) if isinstance(held, str) else held
            yield from ((name, v) for name, v in tensors.items() if _is_score(name) and isinstance(v, Tensor))


def _is_score(name: str) -> bool:
    return f".{name}".endswith(ENDING)
