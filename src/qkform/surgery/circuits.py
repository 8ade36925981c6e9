"""Which circuit a parameter of a model belongs to: "qk", "ov", "self_score" or "rest".

Q and K are known: a site says which rows of which parameter they are. V is called as K is, with a v in place of the k,
or is what a fused tensor holds beside them. The output projection is the one matrix of the attention that is left, by
its name, or by its shape where no name is known. Where neither says it, the matrix stays in "rest".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkform.sites import Share, Site
from qkform.sites.parameters import clean
from qkform.surgery.collapsed import STOCK, CircuitAttention, projections
from qkform.surgery.split import parts

Circuit = Literal["qk", "ov", "self_score", "rest"]
CIRCUITS: tuple[Circuit, ...] = ("qk", "ov", "self_score", "rest")

# Output projections, as models call them; a path of two words is a module in a module.
_OUTPUTS = re.compile(
    r"(?:.+\.)?(?:o|o_proj|out_proj|c_proj|dense|wo|w_o|o_lin|out_lin|proj|to_out(?:\.0)?|linear_out|out|out_linear|"
    r"output_proj(?:ection)?|out_projection|output|output\.dense|attention_output|linear_o|proj_out)(?:\.linear)?",
    re.IGNORECASE,
)
# Other terms of the score, and what is no projection.
_ELSE = re.compile(r"pos|rel|query|key|gate|norm", re.IGNORECASE)
# Beside the module of Q and K, where they have one of their own (BERT's attention.self and attention.output).
_BESIDE = re.compile(r"output\.dense|out_proj|o_proj|dense", re.IGNORECASE)


def circuits(root: Any, sites: Sequence[Site]) -> dict[int, Circuit]:
    """The circuit of each parameter, by id; parameters that are in none of the dictionary are "rest".

    `root` is the model without wrappers. A fused tensor that is not split counts as "qk". A norm on queries or keys is
    "rest": it is a gain, not a row of W_Q or W_K.
    """
    named = [(clean(name), p) for name, p in root.named_parameters(remove_duplicate=False)]
    found: dict[int, Circuit] = {id(p): "self_score" for n, p in named if "self_score" in n.split(".")}
    below: dict[str, list[int]] = {}
    for name, parameter in named:
        words = name.split(".")
        for i in range(1, len(words) + 1):
            below.setdefault(".".join(words[:i]), []).append(id(parameter))

    def put(path: str, circuit: Circuit) -> bool:
        """Everything at or under a path that has no circuit yet."""
        for key in below.get(path, ()):
            found.setdefault(key, circuit)
        return path in below

    for path, circuit in _of_collapsed(root):
        put(path, circuit)
    for share in (share for site in sites for share in site.parameters()):
        halves = parts(share.at.owner, share.at.attribute)
        if halves is None:
            put(share.name, "qk")
        else:
            found.setdefault(id(halves.qk), "qk")
            found.setdefault(id(halves.rest), "ov")
    for site in sites:
        for share in site.parameters():
            path = share.name.rpartition(".")[0]
            if not f"{site.path}.".startswith(f"{path}." if path else ""):
                # a projection of its own, with what an adapter adds to it
                put(path, "qk")
    for site in sites:
        for name in (*values(site), *value_biases(site)):
            put(name, "ov")
        for name in outputs(site, found):
            put(name, "ov")
    return found


def has_collapsed(root: Any) -> bool:
    """Whether the model has an attention whose circuits are free matrices."""
    return any(isinstance(m, CircuitAttention) or getattr(m, STOCK, None) for m in root.modules())


def _of_collapsed(root: Any) -> Iterator[tuple[str, Circuit]]:
    """Paths of the parameters of attentions that are, or were, collapsed."""
    for path, module in root.named_modules():
        dot = f"{clean(path)}." if path else ""
        if isinstance(module, CircuitAttention):
            for name, _ in module.named_parameters(recurse=False):
                yield f"{dot}{name}", "ov" if name in ("W_OV", "W_V", "W_O", "b_O") else "qk"
        elif getattr(module, STOCK, None):
            places = projections(module, clean(path))
            yield places.get("q") or places["fused"], "qk"
            yield places["o"], "ov"


def fused(site: Site) -> Iterator[tuple[Share, NDArray[np.bool_]]]:
    """The parameters of a site that hold more than queries and keys: a share of each, and (rows,) which rows are those.

    Parameters that are split already are among them.
    """
    rows: dict[tuple[int, str], tuple[Share, NDArray[np.bool_]]] = {}
    for share in site.parameters():
        if share.rows is None:
            continue
        key = (id(share.at.owner), share.at.attribute)
        _, chosen = rows.setdefault(key, (share, np.zeros(share.at.shape[share.dim], dtype=np.bool_)))
        chosen[share.rows.reshape(-1)] = True
    return ((share, chosen) for share, chosen in rows.values() if not chosen.all())


def values(site: Site) -> list[str]:
    """Paths of the value projection where it is apart from the keys: of a module, or of parameters. Often one."""
    weight = site.shares["w_k"].name
    path, _, attribute = weight.rpartition(".")
    known = _paths(site)
    if path != site.path:
        above, _, last = path.rpartition(".")
        inside = path.removeprefix(f"{site.path}.").count(".")  # key.linear: the word stands one higher
        for _ in range(inside + 1):
            called = value_name(last)
            if called is not None and f"{above}.{called}".removeprefix(".") in known:
                return [f"{above}.{called}".removeprefix(".")]
            above, _, last = above.rpartition(".")
        return []
    called = value_name(attribute)
    return [f"{path}.{called}".removeprefix(".")] if f"{path}.{called}".removeprefix(".") in known else []


def value_biases(site: Site) -> list[str]:
    """Paths of a value bias that stands in the attention itself, beside one of queries or keys: b_V, v_bias."""
    dot = f"{site.path}." if site.path else ""
    biases = [site.shares[side].name for side in ("b_q", "b_k") if side in site.shares]
    own = {name.removeprefix(dot) for name in biases if name.rpartition(".")[0] == site.path}
    called = {value_name(re.sub(r"(?<![A-Za-z])([qQ])(?![A-Za-z])", _as_key, name)) for name in own}
    return [f"{dot}{name}" for name in called if name and f"{dot}{name}" in _paths(site)]


def _as_key(query: re.Match[str]) -> str:
    return "k" if query[1] == "q" else "K"


def outputs(site: Site, found: Mapping[int, Circuit]) -> list[str]:
    """Paths of the output projection: of a module, or of parameters; empty where it is not recognised.

    `found` are the parameters that are known to be something else.
    """
    dot = f"{site.path}." if site.path else ""
    if f"{dot}W_O" in _paths(site):
        return [f"{dot}W_O", f"{dot}b_O"]
    inside = _matrices(site, dot, found)
    by_name = [path for path in inside if _OUTPUTS.fullmatch(path.removeprefix(dot))]
    if len(by_name) == 1:
        return by_name
    above = site.path.rpartition(".")[0]
    if (
        not by_name and above and not above.rpartition(".")[2].isdigit()
    ):  # there stand other parts of the layer
        beside = _matrices(site, f"{above}.", found)
        by_name = [path for path in beside if _BESIDE.fullmatch(path.removeprefix(f"{above}."))]
        if len(by_name) == 1 and site.layer.d_model in beside[by_name[0]]:
            return by_name
    shape = sorted((site.layer.n_heads * site.layer.d_head, site.layer.d_model))
    fitting = [
        p for p, its in inside.items() if sorted(its) == shape and not _ELSE.search(p.removeprefix(dot))
    ]
    return fitting if len(fitting) == 1 else []


def _matrices(site: Site, dot: str, found: Mapping[int, Circuit]) -> dict[str, tuple[int, ...]]:
    """Linear maps under a path that are in no circuit yet, by the path of their module, with the shape."""
    from torch import nn

    matrices = {}
    for path, module in site.live.tree.modules.items():
        weight = module._parameters.get("weight") if path.startswith(dot) and path != dot[:-1] else None
        if (
            weight is not None
            and weight.ndim == 2
            and not isinstance(module, nn.Embedding)
            and id(weight) not in found
        ):
            matrices[path] = tuple(weight.shape)
    return matrices


def _paths(site: Site) -> set[str]:
    return {*site.live.tree.modules, *site.live.parameters}


def value_name(key: str) -> str | None:
    """What the value projection is called where the key projection has this name; None for other names."""
    for pattern, value in (
        (r"key", "value"),
        (r"Key", "Value"),
        (r"(?<![A-Za-z])([wW]?)k(?![A-Za-z])", r"\1v"),
        (r"(?<![A-JL-Za-z])K(?![a-z])", "V"),
    ):
        changed, count = re.subn(pattern, value, key)
        if count:
            return changed
    return None
