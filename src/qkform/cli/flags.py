"""Flags that several commands have, each with its help in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

FORM = Group("Another form", help="Change the form that is scored; the result says so.", sort_key=1)
SCORES = Group("Scores", sort_key=1)
UNKNOWN = Group(
    "Layouts that are not known", help="Heads outrank the config; names take {layer}.", sort_key=2
)
HUB = Group(
    "Hub ids", help="org/name, hf://org/name[@revision][/path], or the address of a model.", sort_key=3
)

Quiet = Annotated[
    bool,
    Parameter(
        name=["--quiet", "-q"],
        negative="",
        help="No progress and no notes on stderr; errors and warnings stay.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Shown:
    """What becomes of the answer."""

    format: Annotated[
        Literal["human", "json", "csv"],
        Parameter(help="What goes to stdout: a table to read, one JSON document, or CSV rows."),
    ] = "human"
    out: Annotated[
        tuple[Path, ...],
        Parameter(
            negative="",
            show_default=False,
            help="Also save the rows to this file (.json, .csv or .parquet); may be repeated.",
        ),
    ] = ()
    html: Annotated[Path | None, Parameter(help="Also write one self-contained page to look at.")] = None
    plots: Annotated[
        Path | None, Parameter(help="Also write every chart into this folder, as PNG and SVG.")
    ] = None
    quiet: Quiet = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a checkpoint is read and what of it is scored: options of `qkform.scan` and `qkform.diff` by name."""

    gamma: Annotated[
        float,
        Parameter(
            group=SCORES,
            help="A row or column is an outlier above mean + GAMMA standard deviations of the norms.",
        ),
    ] = 2.0
    heads: Annotated[int | None, Parameter(group=UNKNOWN, help="Query heads per layer.")] = None
    kv_heads: Annotated[int | None, Parameter(group=UNKNOWN, help="Key heads per layer.")] = None
    head_dim: Annotated[int | None, Parameter(group=UNKNOWN, help="Width of a head.")] = None
    q: Annotated[
        str | None,
        Parameter(
            name="--q",
            group=UNKNOWN,
            help="Name of the query weights, for example 'blocks.{layer}.attn.wq.weight'.",
        ),
    ] = None
    k: Annotated[str | None, Parameter(name="--k", group=UNKNOWN, help="Name of the key weights.")] = None
    transposed: Annotated[
        bool,
        Parameter(
            group=UNKNOWN,
            negative="",
            help="The weights of --q and --k are stored (in, out), not (out, in).",
        ),
    ] = False
    fold_norm: Annotated[
        bool,
        Parameter(
            group=FORM,
            negative="",
            help="Multiply the gain of the norm in front into W_Q and W_K, and add its bias to theirs.",
        ),
    ] = False
    bias: Annotated[
        bool,
        Parameter(
            group=FORM, negative="", help="Take the form of [x, 1]: biases are one more row of W_Q and W_K."
        ),
    ] = False
    qk_norm: Annotated[
        bool,
        Parameter(
            group=FORM,
            negative="",
            help="Multiply the gains of the norms on queries and keys into W_Q and W_K.",
        ),
    ] = False
    token: Annotated[
        str | None,
        Parameter(
            group=HUB,
            help="Access token for private and gated models; better: `hf auth login`, or HF_TOKEN in the environment.",
        ),
    ] = None
    download: Annotated[
        bool,
        Parameter(
            group=HUB,
            negative="",
            help="Fetch whole files into the hub cache where a model cannot be read in parts (no safetensors).",
        ),
    ] = False
