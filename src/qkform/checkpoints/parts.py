"""The tensors that lie under one path and together store one weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from qkform.checkpoints.base import Checkpoint, TensorInfo
from qkform.errors import CheckpointError

_QUANT_STATE = "weight.quant_state.bitsandbytes__"
_BITSANDBYTES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


@dataclass(frozen=True)
class Parts:
    """One module of a checkpoint; `config` is the model's `quantization_config`, {} where there is none."""

    checkpoint: Checkpoint
    path: str
    config: Mapping[str, Any]

    def name(self, last: str) -> str:
        return f"{self.path}.{last}" if self.path else last

    def info(self, last: str) -> TensorInfo | None:
        return self.checkpoint.tensors.get(self.name(last))

    def present(self, *lasts: str) -> list[str]:
        return [self.name(last) for last in lasts if self.name(last) in self.checkpoint.tensors]

    def quant_state(self) -> str | None:
        """The name of the tensor in which bitsandbytes keeps how 4-bit codes are to be read."""
        return next(iter(self.present(*(f"{_QUANT_STATE}{kind}" for kind in ("nf4", "fp4")))), None)

    def under(self, last: str) -> list[str]:
        """What bitsandbytes keeps beside its codes."""
        state = self.quant_state()
        return [*self.present(*(f"{last}.{word}" for word in _BITSANDBYTES)), *([state] if state else [])]

    def fail(self, last: str, reason: str) -> NoReturn:
        info = self.info(last)
        where = "" if info is None else f" in {info.file}"
        raise CheckpointError(f"tensor {self.name(last)!r}{where} {reason}")
