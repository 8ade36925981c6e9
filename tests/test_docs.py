"""Every command and code block of README and docs is run: as printed, against a stand-in, or listed with a reason.

What trains is run by `make test-all`: page by page, in order, `qkform train` with sizes that take seconds.
"""

from __future__ import annotations

import glob
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import run_records
from tests.conftest import BERT_CONFIG, bert_tensors

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "api").glob("*.md")),
]

# Lines that are not run here, each with its reason. A line that is in no page any more fails the count below.
SKIPPED = {
    "make demo": "runs in a fresh clone; its command, `qkform demo`, is run in tests/test_demo.py",
    "make setup": "made the environment that runs this test",
    "make test": "is what runs this test",
    "make check": "its own step in CI",
    "make docs": "a part of `make check`",
    "make test-all": "is what runs this test, too",
    "python benchmarks/large.py --save benchmarks/results": "the same, and 15 GB of disk",
    "python benchmarks/attention.py --save benchmarks/results": "ten minutes of measurement; the record is there",
    "python benchmarks/tracker.py --save benchmarks/results": "minutes of training; the record is there",
    "python benchmarks/step.py --save benchmarks/results": "minutes of training; the record is there",
    "make bench": "minutes of measurement; figures are recorded under benchmarks/results",
    "pip install .": "would change the environment that runs this test",
    'pip install -c constraints.txt ".[frames]"': "the same",
    "qkform scan BAAI/bge-small-en-v1.5": "asks the hub; tests/test_hub.py does so against a local server",
    "qkform scan EleutherAI/pythia-70m --revision step1000,step10000,step143000 --html steps.html": "the same",
    "qkform scan EleutherAI/pythia-70m --revision step1000,step143000 --html steps.html": "the same",
    "qkform scan hf://org/name@v1/sub/folder": "the same",
    "python -m tests.fuzz TARGET --runs 100000": "an hour; the recorded outcome is benchmarks/results/fuzz.txt",
    "qkform sweep grid.yaml --workers 2": "trains for an hour; tests/test_sweep.py sweeps with a stand-in",
    "qkform sweep grid.yaml --workers 8 --gpus 1 --ray auto": "the same on a cluster; tests/test_sweep_ray.py",
    "torchrun --nproc-per-node 8 -m qkform train matched.yaml": "eight processes; the tests of training have two",
    "torchrun --nproc-per-node 8 -m qkform train matched.yaml --parallel fsdp": "the same",
    "python -m tests.survey --write docs/families.md": "rewrites a page; tests/test_families.py compares it",
}


# `qkform train` of a page, in seconds: these values stand in for those of the line.
SMALL = {
    "--steps": "2",
    "--warmup-steps": "1",
    "--batch-size": "4",
    "--seq-len": "16",
    "--held-out": "4",
    "--track-every": "1",
    "--save-every": "1",
    "--config": "hidden_size=32 intermediate_size=32 num_hidden_layers=1 num_attention_heads=2",
}
# A block or line that trains, or loads what training loads.
TRAINS = re.compile(r"^qkform train(?!.* --help)|\brun\(|\bTrainer\(|\bdata\.prepare\(", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks():
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            if not match.group(1).startswith("{"):  # {toctree} and the like are for the site
                found.append(Block(page.name, line, match.group(1), match.group(2)))
    return found


PYTHON = [b for b in blocks() if b.language == "python"]
COMMANDS = [(b, line) for b in blocks() if b.language == "" for line in b.text.strip().splitlines()]
TRAINING = list(
    dict.fromkeys(b.page for b in blocks() if TRAINS.search(b.text) and b.language in ("", "python"))
)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working folder with stand-ins for what the pages speak of: ./my-model, ./trained, ./runs, ./grid.yaml, ..."""
    rng = np.random.default_rng(0)
    custom = {
        f"blocks.{i}.mixer.{n}.weight": rng.normal(size=(w, 6)).astype(np.float32)
        for i in range(2)
        for n, w in (("wq", 8), ("wk", 4))
    }
    for name, tensors, config in (
        ("my-model", bert_tensors(rng), BERT_CONFIG),
        ("pretrained", bert_tensors(rng), BERT_CONFIG),
        ("finetuned", bert_tensors(rng), BERT_CONFIG),
        ("runs/checkpoints/checkpoint-10", bert_tensors(rng), BERT_CONFIG),
        ("runs/checkpoints/checkpoint-20", bert_tensors(rng), BERT_CONFIG),
        ("custom", custom, None),
        ("no-config", bert_tensors(rng), None),
    ):
        (tmp_path / name).mkdir(parents=True)
        save_file(tensors, tmp_path / name / "model.safetensors")
        if config:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
    for name, ratio in (("a", 1.0), ("b", 4.0)):
        run_records.run(tmp_path / "trained" / name, steps=5, qk_lr_ratio=ratio)
    arms = {"standard": {"init": "standard"}, "matched": {"init": "matched"}}
    for (arm, change), seed in itertools.product(arms.items(), range(3)):
        place = tmp_path / "runs" / arm / f"seed-{seed}"
        run_records.run(place, steps=10, rise=0.1 * len(arm), seed=seed, **change)
    grid = {"base": {"preset": "tiny"}, "arms": arms, "seeds": [0, 1, 2]}
    (tmp_path / "grid.yaml").write_text(json.dumps(grid))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", [b for b in PYTHON if not TRAINS.search(b.text)], ids=str)
def test_python_blocks_run_as_printed(block, desk):
    run_python(block.text)


@pytest.mark.parametrize(
    "line",
    dict.fromkeys(line for _, line in COMMANDS if line not in SKIPPED and not TRAINS.search(line)),
    ids=lambda line: line[:60],
)
def test_commands_run_as_printed(line, desk):
    run_command(line, desk)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a page starts many processes that load transformers
@pytest.mark.parametrize("page", TRAINING)
def test_pages_that_train_run_in_order(page, desk):
    shutil.rmtree(desk / "runs")
    for block in (b for b in blocks() if b.page == page):
        if block.language == "python":
            run_python(block.text)
            continue
        for line in block.text.strip().splitlines():
            if line not in SKIPPED and TRAINS.search(line):
                run_command(line, desk)


@pytest.mark.parametrize("line", dict.fromkeys(line for _, line in COMMANDS if "qkform " in line))
def test_commands_are_what_the_command_line_takes(line):
    """Those that are not run too: every option exists and takes such a value."""
    from qkform.cli import app

    words = shlex.split(line[line.index("qkform ") :])[1:]
    app.parse_args(words, exit_on_error=False, print_error=False)


def run_python(text):
    done = run_here([sys.executable, "-W", "error", "-c", text])
    assert done.returncode == 0, done.stderr


def run_here(command):
    """The command in the working folder, with the package of this tree, whichever is installed."""
    here = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=here)


def run_command(line, desk):
    if line.startswith("qkform train") and not {"--help", "--resume"} & set(line.split()):
        for flag, value in SMALL.items():
            line = f"{re.sub(rf' {flag} [^ ]+', '', line)} {flag} {value}"
    words = [p for word in shlex.split(line) for p in (sorted(glob.glob(word)) if "*" in word else [word])]
    assert words[0] == "qkform", f"{line!r} is neither a qkform command nor listed as skipped"
    done = run_here([sys.executable, "-m", *words])
    assert done.returncode == 0, done.stderr
    assert done.stdout or "--quiet" in words
    for flag, value in itertools.pairwise(words):
        if flag in ("--out", "--html", "--plots"):
            assert (desk / value).stat().st_size > 0


def test_every_block_is_run_or_listed():
    everything = blocks()
    lines = [line for _, line in COMMANDS]
    skipped = [line for line in lines if line in SKIPPED]
    slow = [b for b in PYTHON if TRAINS.search(b.text)]
    trains = [line for line in lines if line not in SKIPPED and TRAINS.search(line)]
    print(
        f"{len(everything)} blocks: {len(PYTHON)} of Python run, {len(slow)} of them slow; of {len(lines)} command "
        f"lines {len(lines) - len(skipped)} run, {len(trains)} of them slow, and {len(skipped)} are listed as skipped"
    )
    assert {b.language for b in everything} <= {"", "python", "yaml"}
    stale = set(SKIPPED) - set(lines)
    assert not stale, f"listed as skipped, and in no page: {stale}"
    assert len(PYTHON) >= 4
    assert len(lines) - len(skipped) >= 10


def anchors(page):
    """The anchors of a page's headings, as they are made of them where pages are shown."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_and_pictures_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" in target:
                continue
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} points to {target}"
            assert not anchor or anchor in anchors(there), f"{page.name} points to {target}#{anchor}"


def test_every_anchor_that_a_docstring_names_is_a_heading():
    for path in (ROOT / "src").rglob("*.py"):
        for page, anchor in re.findall(r"docs/([a-z-]+\.md)#([a-z_-]+)", path.read_text()):
            assert anchor in anchors(ROOT / "docs" / page), f"{path.name} points to {page}#{anchor}"


def test_every_score_is_in_the_table_of_the_mathematics():
    import qkform

    table = (ROOT / "docs" / "math.md").read_text()
    from qkform.records import COLUMNS

    for name in COLUMNS:
        if callable(getattr(qkform.BilinearForm, name, None)) and name not in ("head", "kv_head"):
            assert f"`{name}(" in table


def test_every_column_is_explained():
    from qkform.records import COLUMNS

    page = (ROOT / "docs" / "getting-started.md").read_text()
    for name in COLUMNS:
        assert f"`{name}`" in page


@pytest.fixture
def docstrings(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("docstrings")


def test_a_docstring_on_the_site_is_prose_tables_and_text_as_written(docstrings):
    text = [
        "W is `x y` and `Site`s, *not* |markup|_ here, `of two",
        "lines`.",
        "",
        "    s_ij = a * b      i != j",
        "",
        "name   what it",
        "       is, in [-1, 1]",
        "a_b    another",
        "",
        ">>> f(1)",
        "2",
        "",
    ]
    lines = docstrings.rendered(text)
    assert lines[0] == r"W is ``x y``\  and ``Site``\ s, \*not\* \|markup\|\_ here, ``of two"
    assert lines[1] == r"lines``\ ."
    assert [line.strip() for line in lines if line.strip()][2:] == [
        ".. code-block:: text",
        "s_ij = a * b      i != j",
        ".. list-table::",
        ":class: names",
        "* - name",
        "- what it is, in [-1, 1]",
        r"* - a\_b",
        "- another",
        ".. code-block:: pycon",
        ">>> f(1)",
        "2",
    ]


def test_a_name_without_a_page_is_a_fault_only_if_it_is_ours_and_does_not_exist(docstrings):
    class Python:
        name = "py"

    def is_only_said(target):
        return docstrings._is_only_said(None, Python, {"reftarget": target})

    assert is_only_said("torch.Tensor")
    assert is_only_said("qkform.records.SourceFault")
    assert not is_only_said("qkform.surgery.symmetrise_")
    assert not docstrings._is_only_said(None, None, {"reftarget": "math"})


def test_grids_on_the_pages_are_grids(tmp_path):
    pytest.importorskip("yaml", reason="grids are YAML")
    from qkform.training import Grid

    grids = [b for b in blocks() if b.language == "yaml"]
    assert grids
    for block in grids:
        (tmp_path / "grid.yaml").write_text(block.text)
        assert len(list(Grid.load(tmp_path / "grid.yaml").runs())) > 1
