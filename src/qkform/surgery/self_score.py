"""`SelfScore`: the score of a token with itself as a quadratic form of its own, one vector per head."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from qkform.attention.quadratic import quadratic

_TINY = 1e-12  # under the mean square, so that a token of zeros scores 0


class SelfScore(nn.Module):  # type: ignore[misc]
    """`sum_k v_hk x_k^2`: what `decouple_` puts in the place of `q . k` where a token meets itself.

    It is registered as `self_score` on the attention module, so that its parameter is `...self_score.v` in every state
    dict. The score is unscaled: the attention multiplies it by the same scale as `q . k`.

    v           (n_heads, d_model)
    normalise   of x / rms(x), for models with norms on queries and keys, whose `q . k` is bounded too
    """

    v: nn.Parameter
    _held: dict[int, Tensor | None]  # by thread, while an attention runs: several may call one model

    def __init__(
        self,
        n_heads: int,
        d_model: int,
        *,
        normalise: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(n_heads, d_model, device=device, dtype=dtype))
        self.normalise = normalise
        self._held = {}

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d_model) -> (B, n_heads, N), in float32, in float64 for float64 x; autocast does not lower it."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        device = x.device.type
        lowered = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if lowered else nullcontext():
            x, v = x.to(wide), self.v.to(wide)
            if self.normalise:
                return (self.squares(x) @ v.mT).mT.contiguous()  # (B, N, d) (d, H) -> (B, H, N)
            return quadratic(x, v)

    def squares(self, x: Tensor) -> Tensor:
        """x^2, of x / rms(x) where the module normalises: what `v` is multiplied with."""
        squares = x * x
        return squares / (squares.mean(-1, keepdim=True) + _TINY) if self.normalise else squares

    def open(self) -> None:
        """The attention begins to run in this thread: from now to `close` it may hold a score."""
        self._held[this_thread()] = None

    def hold(self, score: Tensor) -> None:
        """Keep the score of this call until it is taken; outside of a call of the attention nothing is kept."""
        if this_thread() in self._held:
            self._held[this_thread()] = score

    def take(self) -> Tensor | None:
        """The score that is held in this thread, which is forgotten; None where there is none."""
        held = self._held.get(this_thread())
        if held is not None:
            self._held[this_thread()] = None
        return held

    def close(self) -> None:
        """The attention is done, or has raised: nothing is kept."""
        self._held.pop(this_thread(), None)

    def extra_repr(self) -> str:
        n_heads, d_model = self.v.shape
        return f"n_heads={n_heads}, d_model={d_model}" + (", normalise=True" if self.normalise else "")


def this_thread() -> int:
    """A key for what belongs to one call of a model. A compiled graph keeps nothing between modules: 0 there."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
