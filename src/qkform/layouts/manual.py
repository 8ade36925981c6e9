"""A layout in a person's own words: where Q and K are, and what to suggest where nobody has said so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qkform.errors import LayoutError
from qkform.layouts.match import MAX_NAME, HasShape
from qkform.layouts.rules import Rule

QUERY = re.compile(
    r"(?:^|[._])(?:q|wq|w_q|q_proj|query|q_lin|to_q|query_key_value|qkv|qkv_proj|wqkv|c_attn|in_proj_weight|attn_q|attn_qkv)"
    r"(?:\.weight|$)",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"(?i)att|query|key|qkv|\bq\b|\bk\b|q_proj|k_proj|w_?q|w_?k")
_QUERY_TO_KEY = (
    ("query", "key"),
    ("q_proj", "k_proj"),
    ("attn_q", "attn_k"),
    ("to_q", "to_k"),
    ("q_lin", "k_lin"),
    ("w_q", "w_k"),
    ("W_Q", "W_K"),
    ("wq", "wk"),
    (".q.", ".k."),
)


@dataclass(frozen=True)
class Manual:
    """Names of the query and key tensors, with {layer} for the layer's number; anything may stand before."""

    q: str | None = None
    k: str | None = None
    transposed: bool = False  # stored (in, out)

    def __post_init__(self) -> None:
        if (self.q is None) != (self.k is None):
            raise LayoutError(
                "--q and --k go together: one names the query weights, the other the key weights"
            )
        if self.q is None and self.transposed:
            raise LayoutError("--transposed says how the weights of --q and --k are stored; name them")

    def rule(self) -> Rule | None:
        """The rule that the two names describe, None without names."""
        if self.q is None or self.k is None:
            return None
        q, k = self.q.split("."), self.k.split(".")
        if q == k:
            raise LayoutError(
                f"--q and --k name the same tensor {self.q!r}; fused weights need a known family"
            )
        shared = 0
        while shared < min(len(q), len(k)) - 1 and q[shared] == k[shared]:
            shared += 1
        q_tail, k_tail = ".".join(q[shared:]), ".".join(k[shared:])
        for name in (q_tail, k_tail):
            if "{layer}" in name:
                raise LayoutError(
                    f"--q {self.q!r} and --k {self.k!r} differ before {{layer}}: they must share the path of the layer"
                )
        for part in (*q, *k):
            if part not in ("{layer}", "**") and re.search(r"[{}*?\[\]]", part):
                raise LayoutError(
                    f"{part!r} is no part of a name; a pattern has names, {{layer}}, or ** between dots"
                )
        return Rule(
            family="manual",
            module=".".join(q[:shared]) or "**",
            q=q_tail,
            k=k_tail,
            exact=True,
            transposed=self.transposed,
            heads=("num_attention_heads", "n_heads", "n_head", "num_heads"),
            kv_heads=("num_key_value_heads", "n_kv_heads"),
            head_dim=("head_dim",),
            d_model=(),
            layers=(),
        )


def candidates(tensors: Mapping[str, HasShape], limit: int = 12) -> str:
    """A sentence that lists matrices which may be Q or K, layers folded together, and flags that would use them."""
    folded: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, info in tensors.items():
        if len(name) <= MAX_NAME and len(info.shape) == 2:
            key = (re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name, count=1), tuple(info.shape))
            folded[key] = folded.get(key, 0) + 1
    likely = {key: n for key, n in folded.items() if _ATTENTION.search(key[0])} or folded
    if not likely:
        return f"It holds {len(tensors)} tensors and no matrix among them."
    lines = [f"{name[:120]} {shape}" + (f" x {n}" if n > 1 else "") for (name, shape), n in likely.items()]
    rest = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
    text = f"Matrices that may be meant: {'; '.join(lines[:limit])}{rest}."
    pair = _pair([name for name, _ in likely])
    return text + (f" For example: --heads N --q '{pair[0]}' --k '{pair[1]}'" if pair else "")


def _pair(names: list[str]) -> tuple[str, str] | None:
    """Two of the names that differ as a query and a key do."""
    known = set(names)
    for name in names:
        for query, key in _QUERY_TO_KEY:
            other = key.join(name.rsplit(query, 1))
            if other != name and other in known and len(name) <= 120:
                return name, other
    return None
