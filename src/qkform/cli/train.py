"""`qkform train`: an experiment from a YAML file or flags, trained in a folder. docs/training.md is about it."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from qkform.cli.flags import Quiet
from qkform.cli.output import put, say
from qkform.cli.progress import Line
from qkform.errors import ExperimentError, QKFormError
from qkform.training.experiment import Experiment
from qkform.training.presets import PRESETS

_ORDER = ("Run", "Model", "Data", "Form", "Optimizer")
_GROUPS = {name: Group(name, sort_key=place) for place, name in enumerate(_ORDER, 1)}


def _flag(name: str, kind: Any, facts: Any) -> tuple[str, Any, Any]:
    """A field of an experiment as a flag that need not be given."""
    several = name in ("data", "config", "betas", "report_to")
    kind = tuple[str, ...] if name == "config" else kind
    tiny = PRESETS["tiny"].values.get(name)
    told = (
        ""
        if tiny is None
        else f" [tiny: {' '.join(map(str, tiny)) if isinstance(tiny, list | tuple) else tiny}]"
    )
    about = Parameter(
        group=_GROUPS[facts["group"]],
        help=facts["help"] + told,
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
    quiet: Quiet = False,
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
    """
    from qkform.training.folder import EXPERIMENT

    given = _given(asked)
    folder = _folder(file, out)
    if resume and file is None:
        file = folder / EXPERIMENT
        if not file.is_file():
            raise ExperimentError(f"{folder} holds no run to go on with: there is no {file.name} in it")
    experiment = Experiment.load(file, **given) if file is not None else Experiment.from_dict(given)

    from qkform.training.running import run

    line = Line(experiment.track_every)
    if not quiet and _first():
        say(f"training in {folder}; loading torch and transformers takes some seconds")
    try:
        finished = run(
            experiment,
            folder,
            resume=resume,
            say=line.say_warnings if quiet else line.say,
            progress=None if quiet else line.show,
        )
    except QKFormError as error:
        line.end()
        if _first():
            raise
        say(f"process {os.environ['RANK']}: error: {error}")
        return 2
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
        pairs = [_pair(text) for text in given["config"]]
        given["config"] = dict(pairs)
        if len(given["config"]) < len(pairs):
            names = [name for name, _ in pairs]
            raise ExperimentError(f"--config {max(names, key=names.count)} is there twice")
    return given


def _pair(text: str) -> tuple[str, Any]:
    from qkform.training.strict_yaml import loaded

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ExperimentError(f"--config {text[:60]!r}: expected NAME=VALUE, as in --config hidden_size=64")
    try:
        return name, loaded(value, f"--config {name[:60]}")
    except ExperimentError:
        return name, value


def _folder(file: Path | None, out: Path | None) -> Path:
    from qkform.training.folder import EXPERIMENT, RECORD

    if out is not None:
        return out
    if file is None:
        raise ExperimentError("give --out, the folder of the run, for example --out runs/first")
    if file.name == EXPERIMENT and (file.parent / RECORD).exists():  # the file is that of a run
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
