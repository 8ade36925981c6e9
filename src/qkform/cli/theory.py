"""`qkform theory`: the one-layer flow as commands. docs/theory.md is the page about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Group, Parameter

from qkform import targets
from qkform.cli.flags import Shown
from qkform.cli.output import print_table, say, write
from qkform.errors import ConfigError

if TYPE_CHECKING:
    from qkform.dynamics.one_layer import Flow

theory = App(
    name="theory",
    help="One layer of attention, solved: how the learning rates of its circuits decide how sharp it becomes.",
)
_model = Group("Model", sort_key=1)
_task = Group("Task", help="The defaults are the task of docs/theory.md.", sort_key=2)
Kind = Literal["collapsed", "factorized"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Asked:
    """The flow that is asked about, as flags: the arguments of `qkform.dynamics.one_layer.Flow`."""

    attention: Annotated[
        Kind, Parameter(group=_model, help="W_QK is one matrix (collapsed) or W_Q W_K^T (factorized).")
    ] = "collapsed"
    output: Annotated[
        Kind, Parameter(group=_model, help="W_OV is one matrix (collapsed) or W_O W_V (factorized).")
    ] = "collapsed"
    objective: Annotated[
        Literal["ce", "squared"],
        Parameter(group=_model, help="Cross-entropy, or half the squared distance to the centred label."),
    ] = "ce"
    start: Annotated[
        str | None,
        Parameter(
            group=_model,
            allow_leading_hyphen=True,
            help="Where factorized circuits start (0.01 unless given; collapsed ones start at 0), or a pair as in "
            "0.1,0.02: the gap and the gain.",
        ),
    ] = None
    imbalance: Annotated[
        str,
        Parameter(
            group=_model,
            allow_leading_hyphen=True,
            help="u² - v² of the lengths of a factorized circuit's two factors, or a pair: attention, output.",
        ),
    ] = "0"
    classes: Annotated[int, Parameter(group=_task, help="Labels.")] = 8
    per_class: Annotated[int, Parameter(group=_task, help="Tokens that belong to a class.")] = 2
    common: Annotated[str, Parameter(group=_task, help="Tokens that belong to no class, or inf.")] = "16"
    relevant: Annotated[int, Parameter(group=_task, help="Tokens of its class in a sequence.")] = 1
    distractors: Annotated[int, Parameter(group=_task, help="Common tokens in a sequence.")] = 15
    queries_per_class: Annotated[
        int | None,
        Parameter(
            group=_task, help="Query tokens of a class; unless given, one query token serves all classes."
        ),
    ] = None
    scale: Annotated[
        str,
        Parameter(
            group=_task, help="What multiplies q·k: a number, or d^-1/2, d the size of the vocabulary."
        ),
    ] = "d^-1/2"

    def flow(self) -> Flow:
        from qkform.dynamics.one_layer import Flow

        common = _number("--common", self.common)
        return Flow(
            classes=self.classes,
            per_class=self.per_class,
            common=common,
            relevant=self.relevant,
            distractors=self.distractors,
            attention=self.attention,
            output=self.output,
            scale=None if self.scale.replace(" ", "") == "d^-1/2" else _number("--scale", self.scale),
            objective=self.objective,
            start=None if self.start is None else _one_or_two("--start", self.start),
            queries_per_class=self.queries_per_class,
            imbalance=_one_or_two("--imbalance", self.imbalance),
        )


Simulate = Annotated[bool, Parameter(help="Integrate the full matrices too.")]


@theory.command(name="one-layer")
def one_layer(
    *,
    ratios: str = "1/16,1/4,1,4,16",
    loss: float = 0.1,
    asked: Asked = Asked(),
    simulate: Simulate = True,
    shown: Shown = Shown(),
) -> int:
    """How sharp attention is when a loss is reached, for several ratios of learning rates.

    In closed form, and measured on the full matrices whose gradient flow is integrated beside it.

    Parameters
    ----------
    ratios
        Learning rates of the query-key circuit over that of the output circuit.
    loss
        The loss at which training stops.
    """
    targets.check((), shown.out, shown.html, shown.plots)
    return _answered(
        asked.flow(), [_number("--ratios", part) for part in ratios.split(",")], loss, shown, simulate
    )


@theory.command
def design(
    *,
    sharpness: float,
    loss: float = 0.1,
    asked: Asked = Asked(),
    simulate: Simulate = True,
    shown: Shown = Shown(),
) -> int:
    """The ratio of learning rates at which attention is this sharp when the loss is reached.

    The answer is the row of that ratio.

    Parameters
    ----------
    sharpness
        Attention on the relevant tokens at the end, between that of the start and 1.
    loss
        The loss at which training stops.
    """
    targets.check((), shown.out, shown.html, shown.plots)
    flow = asked.flow()
    return _answered(flow, [flow.ratio_for(sharpness, loss)], loss, shown, simulate)


def _answered(flow: Flow, ratios: Sequence[float], loss: float, shown: Shown, simulate: bool) -> int:
    endless = flow.task.common == math.inf
    table = flow.table(ratios, loss, simulated=simulate and not endless)
    write(table, shown.out, shown.html, shown.plots, shown.quiet)
    if not shown.quiet and simulate and endless:
        say("note: endless common tokens have closed forms alone; nothing is simulated")
    if not shown.quiet and not flow.exact:
        say(
            "note: factorized attention with class-specific queries leaves its ray; its closed form is approximate"
        )
    print_table(table, shown.format)
    return 0


def _one_or_two(flag: str, text: str) -> float | tuple[float, float]:
    found = [_number(flag, part) for part in text.split(",")]
    if len(found) > 2:
        raise ConfigError(f"{flag} {text[:60]!r}: expected a number, or two of them: attention,output")
    return found[0] if len(found) == 1 else (found[0], found[1])


def _number(flag: str, text: str) -> float:
    """0.25, 1/4, 3e-4 or inf."""
    try:
        return float(text) if "/" not in text else float(Fraction(text.replace(" ", "")))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(f"{flag} {text[:60]!r}: expected numbers such as 0.25, 1/4 or 3e-4") from None
