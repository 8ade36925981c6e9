"""Every command and code block of README and docs is run: as printed, against a stand-in, or listed with a reason."""

from __future__ import annotations

import glob
import itertools
import json
import re
import shlex
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
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]

# Lines that are not run here, each with its reason. A line that is in no page any more fails the count below.
SKIPPED = {
    "make demo": "runs in a fresh clone; its command, `qkform demo`, is run in tests/test_demo.py",
    "make setup": "made the environment that runs this test",
    "make test": "is what runs this test",
    "make check": "its own step in CI",
    "python benchmarks/large.py --save benchmarks/results": "the same, and 15 GB of disk",
    "python benchmarks/attention.py --save benchmarks/results": "ten minutes of measurement; the record is there",
    "make bench": "minutes of measurement; figures are recorded under benchmarks/results",
    "qkform train --preset tiny --objective mlm --steps 1000 --seed 0 --out runs/encoder": "minutes of training",
    "qkform train --preset tiny --objective clm --steps 1000 --seed 0 --out runs/decoder": "the same",
    "qkform train matched.yaml": "the same",
    "qkform train matched.yaml --seed 2 --out runs/matched-2": "the same",
    "qkform train --resume --out runs/encoder": "the same; tests/test_engine.py resumes small runs",
    "torchrun --nproc-per-node 8 -m qkform train matched.yaml": "the same, on eight GPUs",
    "torchrun --nproc-per-node 8 -m qkform train matched.yaml --parallel fsdp": "the same",
    "pip install .": "would change the environment that runs this test",
    'pip install -c constraints.txt ".[frames]"': "the same",
    "qkform scan BAAI/bge-small-en-v1.5": "asks the hub; tests/test_hub.py does so against a local server",
    "qkform scan EleutherAI/pythia-70m --revision step1000,step10000,step143000 --html steps.html": "the same",
    "qkform scan EleutherAI/pythia-70m --revision step1000,step143000 --html steps.html": "the same",
    "qkform scan hf://org/name@v1/sub/folder": "the same",
    "python -m tests.fuzz TARGET --runs 100000": "an hour; the recorded outcome is benchmarks/results/fuzz.txt",
    "python -m tests.survey --write docs/families.md": "rewrites a page; tests/test_families.py compares it",
}


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
        for match in re.finditer(r"^```([a-z]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(page.name, line, match.group(1), match.group(2)))
    return found


PYTHON = [b for b in blocks() if b.language == "python"]
COMMANDS = [(b, line) for b in blocks() if b.language == "" for line in b.text.strip().splitlines()]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working folder with the stand-ins that the pages speak of: ./my-model, ./custom, ./no-config, ./trained/a."""
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
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_run_as_printed(block, desk):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line", dict.fromkeys(line for _, line in COMMANDS if line not in SKIPPED), ids=lambda line: line[:60]
)
def test_commands_run_as_printed(line, desk):
    words = [p for word in shlex.split(line) for p in (sorted(glob.glob(word)) if "*" in word else [word])]
    assert words[0] == "qkform", f"{line!r} is neither a qkform command nor listed as skipped"
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout or "--quiet" in words
    for flag, value in itertools.pairwise(words):
        if flag in ("--out", "--html", "--plots"):
            assert (desk / value).stat().st_size > 0


def test_every_block_is_run_or_listed():
    everything = blocks()
    lines = [line for _, line in COMMANDS]
    skipped = [line for line in lines if line in SKIPPED]
    print(
        f"{len(everything)} blocks: {len(PYTHON)} of Python run; of {len(lines)} command lines "
        f"{len(lines) - len(skipped)} run and {len(skipped)} are listed as skipped"
    )
    assert {b.language for b in everything} <= {"", "python"}
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
