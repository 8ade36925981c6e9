"""`qkform train`: an experiment from a YAML file or flags, trained in a folder. docs/training.md is about it."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from qkform.cli.output import put, say, say_lines
from qkform.errors import ExperimentError
from qkform.training.experiment import Experiment

if TYPE_CHECKING:
    from qkform.training.watch import Progress

_ORDER = ("Run", "Model", "Data", "Form", "Optimizer")
_GROUPS = {name: Group(name, sort_key=place) for place, name in enumerate(_ORDER, 1)}


def _flag(name: str, kind: Any, facts: Any) -> tuple[str, Any, Any]:
    """A field of an experiment as a flag that need not be given."""
    several = name in ("data", "config", "betas", "report_to")
    kind = tuple[str, ...] if name == "config" else kind
    about = Parameter(
        group=_GROUPS[facts["group"]],
        help=facts["help"],
        show_default=False,
        consume_multiple=several,
        negative=() if kind is not bool else None,
    )
    return name, Annotated[kind | None, about], None


if TYPE_CHECKING:
    Asked = Any
    _NONE: Any
else:
    _KINDS = get_type_hints(Experiment)
    Asked = Parameter(name="*")(
        make_dataclass(
            "Asked",
            [_flag(one.name, _KINDS[one.name], one.metadata) for one in fields(Experiment)],
            frozen=True,
            kw_only=True,
        )
    )
    Asked.__module__ = __name__  # make_dataclass says "types", and cyclopts takes it for a builtin then
    Asked.__doc__ = "Every field of an experiment, as a flag; None: not given."
    _NONE = Asked()


def train(
    file: Path | None = None,
    /,
    *,
    out: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    asked: Asked = _NONE,
) -> int:
    """Train a model on real text and record what its attention's form becomes.

    Writes OUT/model (as save_pretrained does), OUT/record.jsonl, OUT/checkpoints and OUT/experiment.yaml. Flags outrank
    the file, the file outranks the preset. Ctrl-C saves a checkpoint; --resume goes on after it, or after any kill.
    Several processes: torchrun --nproc-per-node N -m qkform train ...

    Parameters
    ----------
    file
        An experiment in YAML: the flags below by name, `qk_lr_ratio: 4`.
    out
        Folder of the run: new, or empty. Of a file NAME.yaml it is runs/NAME unless given.
    resume
        Go on from the newest checkpoint in OUT, with the experiment that is there.
    quiet
        No progress and no notes on stderr; errors and warnings stay.
    """
    given = _given(asked)
    folder = _folder(file, out)
    if resume and file is None:
        file = folder / "experiment.yaml"
        if not file.is_file():
            raise ExperimentError(f"{folder} holds no run to go on with: there is no {file.name} in it")
    experiment = Experiment.load(file, **given) if file is not None else Experiment.from_dict(given)

    from qkform.training.run import run

    line = _Line(experiment.track_every)
    try:
        finished = run(
            experiment,
            folder,
            resume=resume,
            say=line.say_warnings if quiet else line.say,
            progress=None if quiet else line.show,
        )
    except KeyboardInterrupt:
        line.end()
        if _first():
            say(f"interrupted; go on with: qkform train --resume --out {folder}")
        return 130
    finally:
        line.end()
        _leave()
    if _first():
        if not quiet:
            say(f"{finished.reason} at step {finished.step}: held-out loss {finished.held_out:.3f} nats")
        put(f"{folder}\n")
    return 0


def _given(asked: Any) -> dict[str, Any]:
    """The flags that were given, with --config NAME=VALUE as a mapping."""
    values = {one.name: getattr(asked, one.name) for one in fields(asked)}
    given = {name: value for name, value in values.items() if value is not None}
    if "config" in given:
        given["config"] = dict(_pair(text) for text in given["config"])
    return given


def _pair(text: str) -> tuple[str, Any]:
    import yaml  # type: ignore[import-untyped]

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ExperimentError(f"--config {text[:60]!r}: expected NAME=VALUE, as in --config hidden_size=64")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        return name, value


def _folder(file: Path | None, out: Path | None) -> Path:
    if out is not None:
        return out
    if file is None:
        raise ExperimentError("give --out, the folder of the run, for example --out runs/first")
    if (file.parent / "record.jsonl").exists():  # the file is that of a run
        return file.parent
    return Path("runs") / file.stem


def _first() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _leave() -> None:
    """Leave the group of processes, where there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class _Line:
    """Progress on stderr: one line that is written over where a person watches, lines at tracked steps otherwise."""

    def __init__(self, every: int) -> None:
        self.every, self.last = every, 0.0
        self.live = sys.stderr.isatty()
        self.open = False

    def say(self, text: str) -> None:
        self.end()
        say(text)

    def say_warnings(self, text: str) -> None:
        if text.startswith(("warning", "not exact")):
            self.say(text)

    def show(self, p: Progress) -> None:
        now = time.monotonic()
        due = p.step % self.every == 0 or p.step == p.steps
        if not due and not (self.live and now - self.last > 0.2):
            return
        self.last = now
        loss = f"  loss {p.loss:.3f}" if not math.isnan(p.loss) else ""
        held_out = f"  held-out {p.held_out:.3f}" if p.held_out is not None else ""
        rate = (
            f"  {p.tokens_per_second:,.0f} tokens/s  {_clock(p.seconds_left)} left"
            if p.tokens_per_second
            else ""
        )
        text = f"step {p.step}/{p.steps}{loss}{held_out}{rate}"
        if not self.live:
            say(text)
            return
        width = shutil.get_terminal_size().columns - 1
        try:
            sys.stderr.write(f"\r{text[:width]:<{width}}")
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more
            return
        self.open = True

    def end(self) -> None:
        if self.open:
            say_lines("")
            self.open = False


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
