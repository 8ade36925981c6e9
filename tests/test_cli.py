"""What a person types and sees: formats, files, exit codes, and what the command costs to start."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import qkform
from qkform.cli import main
from qkform.records import COLUMNS
from tests.conftest import bert_tensors


def run(*arguments, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", "qkform", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_json_is_one_document_on_stdout(bert, capsys):
    assert main(["scan", str(bert), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == "qkform.scan/1"
    (model,) = document["models"]
    assert set(model) == {
        "source",
        "format",
        "model_type",
        "bytes_read",
        "wall_seconds",
        "conventions",
        "skipped",
        "rows",
    }
    assert (model["source"], model["format"], model["model_type"]) == (str(bert), "safetensors", "bert")
    assert document["errors"] == []
    assert list(model["rows"][0]) == list(COLUMNS)
    assert err == ""


def test_csv_is_rows_on_stdout(bert, capsys):
    assert main(["scan", str(bert), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 8
    assert rows[0]["source"] == str(bert)
    assert float(rows[0]["symmetry"]) == qkform.scan(bert).rows[0]["symmetry"]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 160])
def test_the_table_fits_the_terminal(bert, columns):
    done = run("scan", bert, COLUMNS=str(columns), PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert "…" not in done.stdout or columns < 60
    assert any("symmetry" in line for line in lines)
    assert "Random weights of this size" in done.stdout.replace("\n", " ")


def test_a_terminal_without_unicode_gets_ascii(bert):
    done = run("scan", bert, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "#" in done.stdout


def test_files_are_written_and_named(bert, tmp_path, capsys):
    out = [tmp_path / "a.json", tmp_path / "b.csv", tmp_path / "c.parquet"]
    flags = [x for path in out for x in ("--out", str(path))]
    assert main(["scan", str(bert), *flags, "--html", str(tmp_path / "p.html")]) == 0
    err = capsys.readouterr().err
    for path in (*out, tmp_path / "p.html"):
        assert path.stat().st_size > 0
        assert str(path) in err
    assert main(["scan", str(bert), "--quiet", "--out", str(out[0])]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scan"], "qkform scan sample:minilm"),
        (["scan", "BERT", "--format", "xml"], "xml"),
        (["scan", "BERT", "--no-such-flag"], "--no-such-flag"),
        (["scan", "BERT", "--heads", "many"], "many"),
        (["scan", "BERT", "--gamma", "nan"], "gamma"),
        (["scan", "BERT", "--out", "rows.xlsx"], ".parquet"),
        (["scan", "BERT", "--out", "no-folder/rows.csv"], "no folder"),
        (["scan", "BERT", "--html", "."], "it is a folder"),
        (["scan", "sample:nothing"], "minilm"),
        (["no-such-command"], "no-such-command"),
        (["demo", "--html", "no-folder/x.html"], "no folder"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(arguments, words, bert, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = main([str(bert) if a == "BERT" else a for a in arguments])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert words in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my-model"]


def test_a_fault_of_ours_is_exit_code_1(bert):
    script = (
        "import sys, qkform.scanner as s; s.layer_rows = lambda *a: 1 / 0\n"
        "from qkform.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "scan", str(bert)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_closed_pipe_is_no_fault(bert):
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"set -o pipefail; '{sys.executable}' -m qkform scan '{bert}' --format csv | head -c 1",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_version_and_help_name_the_program(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == qkform.__version__
    assert main(["--help"]) == 0
    assert "scan" in capsys.readouterr().out


def test_names_in_a_model_cannot_move_the_cursor(write_model, capsys):
    tensors = {f"\x1b[2J.{n}": t for n, t in bert_tensors(np.random.default_rng(0)).items()}
    assert main(["scan", str(write_model(tensors))]) == 0
    out, _ = capsys.readouterr()
    assert "\x1b" not in out
    assert "\\x1b" in out


# ---- what it costs to start ---------------------------------------------------------------------------------------

HEAVY = (
    "torch",
    "altair",
    "transformers",
    "polars",
    "pandas",
    "gguf",
    "huggingface_hub",
    "rich",
    "jinja2",
    "vl_convert",
)


@pytest.mark.parametrize(
    ("script", "allowed"),
    [
        ("import qkform; qkform.BilinearForm", ()),
        ("import qkform, sys; qkform.scan(sys.argv[1])", ()),
        ("import sys; from qkform.cli import main; main(['scan', sys.argv[1], '--format', 'json'])", ()),
        ("import sys; from qkform.cli import main; main(['scan', sys.argv[1]])", ("rich",)),
    ],
)
def test_a_scan_imports_nothing_it_does_not_need(script, allowed, bert):
    check = f"\nimport sys; print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script + check, str(bert)], capture_output=True, text=True, check=True
    )
    found = eval(done.stderr.strip().splitlines()[-1])  # noqa: S307
    assert set(found) <= {*allowed, "rich"} if "cli" in script else not found


def test_a_scan_needs_no_torch(bert):
    script = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] == 'torch': raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import qkform; print(len(qkform.scan(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(bert)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "8"


def test_help_starts_without_numpy():
    """The real measure is in benchmarks/scan.py; this pins what it rests on."""
    script = "import sys; from qkform.cli import main; main(['--help']); print('numpy' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"


def test_two_scans_at_once_write_whole_files(bert, tmp_path):
    target = tmp_path / "t.json"
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "qkform", "scan", str(bert), "-q", "--out", str(target)],
            stdout=subprocess.DEVNULL,
        )
        for _ in range(3)
    ]
    assert [w.wait(60) for w in workers] == [0, 0, 0]
    assert len(json.loads(target.read_text())["models"][0]["rows"]) == 8
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
