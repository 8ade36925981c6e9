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
        "revision",
        "step",
        "offset",
        "form",
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
    assert set(found) <= set(allowed)


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


# ---- files and streams --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--html", "my-model/model.safetensors"],
        ["--out", "my-model/config.json"],
        ["--html", "my-model/../my-model/model.safetensors"],
        ["--out", "x.json", "--html", "x.json"],
        ["--out", "x.csv", "--out", "./x.csv"],
    ],
)
def test_nothing_is_written_over_the_model_or_twice(flags, bert, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = {p: p.read_bytes() for p in bert.iterdir()}
    for source in ("my-model", "my-model/model.safetensors"):
        assert main(["scan", source, *flags]) == 2
        assert "error:" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in bert.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["my-model"]


def shell(command, cwd):
    return subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True, check=False)


def test_a_reader_that_leaves_costs_no_file_and_no_message(bert, tmp_path):
    done = shell(
        f"set -o pipefail; '{sys.executable}' -m qkform scan my-model nope --format csv --out b.csv | true",
        tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "nope" in done.stderr
    assert (tmp_path / "b.csv").read_text().count("\n") == 9


@pytest.mark.parametrize(
    ("redirect", "code"), [(">&-", 0), ("2>&-", 0), (">/dev/full", 2), ("2>/dev/full", 0), (">&- 2>&-", 0)]
)
def test_streams_that_are_closed_or_full_are_no_fault(redirect, code, bert, tmp_path):
    done = shell(f"'{sys.executable}' -m qkform scan my-model --out b.csv {redirect}", tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "b.csv").exists()


@pytest.mark.parametrize("format", ["human", "json", "csv"])
def test_names_that_a_terminal_cannot_show_are_no_fault(format, write_model):
    tensors = {f"größe\u2028.{n}": t for n, t in bert_tensors(np.random.default_rng(0)).items()}
    done = run("scan", write_model(tensors, name="ö"), "--format", format, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_model_type_cannot_move_the_cursor(write_model, capsys):
    config = {"model_type": "\x1b[2J\x1b]0;x\x07", "num_attention_heads": 3}
    folder = write_model(bert_tensors(np.random.default_rng(0)), config)
    q, k = (f"encoder.layer.{{layer}}.attention.self.{n}.weight" for n in ("query", "key"))
    for format in ("human", "json"):
        assert main(["scan", str(folder), "--q", q, "--k", k, "--format", format]) == 0
        out, _ = capsys.readouterr()
        assert "\x1b" not in out
        assert "\x07" not in out


def test_a_fault_in_one_source_does_not_cost_the_others(bert, tmp_path):
    script = (
        "import sys, qkform.scanner as s\n"
        "right = s.layer_rows\n"
        "s.layer_rows = lambda layer, o: 1 / 0 if layer.layer == 1 and len(sys.argv) > 9 else right(layer, o)\n"
        "right_scan = s.scan\n"
        "s.scan = lambda source, **o: 1 / 0 if source == 'bad' else right_scan(source, **o)\n"
        "from qkform.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "scan", "bad", str(bert), "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    document = json.loads(done.stdout)
    assert [m["source"] for m in document["models"]] == [str(bert)]
    assert "internal error" in document["errors"][0]["message"]


def test_memory_that_does_not_suffice_is_no_fault_of_ours(bert, write_model, capsys, monkeypatch):
    from qkform import scanner

    big = write_model(bert_tensors(np.random.default_rng(1)), name="big")
    right = scanner.layer_rows

    def rows(layer, options):
        if layer.layer == 1 and calls.pop():
            raise MemoryError
        return right(layer, options)

    calls = [False, True]
    monkeypatch.setattr(scanner, "layer_rows", rows)
    assert main(["scan", str(big), str(bert), "--format", "json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert [m["source"] for m in document["models"]] == [str(bert)]
    assert document["errors"] == [
        {
            "source": str(big),
            "message": f"{big}: out of memory: a tensor this large does not fit; is its shape right?",
        }
    ]
    assert err == f"error: {document['errors'][0]['message']}\n"


def test_a_name_that_is_no_path_is_looked_for_here_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["scan", "nope"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: there is no file or folder named 'nope', and as a hub id: "
    )


def test_a_revision_may_be_given_for_each_side_of_a_diff(bert, capsys, monkeypatch):
    asked = {}

    def compared(a, b, **options):
        asked.update(options)
        raise qkform.errors.SourceError("enough")

    monkeypatch.setattr("qkform.differ.diff", compared)
    assert main(["diff", "org/m", "org/m", "--revision-a", "step1", "--revision-b", "step2"]) == 2
    assert (asked["revision_a"], asked["revision_b"]) == ("step1", "step2")


def test_a_message_has_a_bounded_length(write_model, capsys):
    tensors = bert_tensors(np.random.default_rng(0))
    folder = write_model(tensors)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x" * 3_000_000: "model.safetensors"}})
    )
    assert main(["scan", str(folder)]) == 2
    assert len(capsys.readouterr().err) < 3000


def test_nan_biases_are_told(write_model, capsys):
    tensors = bert_tensors(np.random.default_rng(0))
    tensors["encoder.layer.0.attention.self.query.bias"][5] = np.nan
    assert main(["scan", str(write_model(tensors)), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert "warning:" in err
    assert "head 1" in err
    rows = json.loads(out)["models"][0]["rows"]
    bad = [r for r in rows if r["bias_share"] is None]
    assert [(r["layer"], r["head"]) for r in bad] == [(0, None), (0, 1)]
    assert all("biases" in r["reason"] and r["symmetry"] is not None for r in bad)


# ---- Ctrl-C -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment", ["cyclopts", "numpy", "qkform.cli", "qkform.scanner", "qkform.report.screens"]
)
def test_an_interrupt_is_one_line_whatever_is_being_imported(moment, bert):
    program = f"""
import runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {moment!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["qkform", "scan", {str(bert)!r}]
runpy.run_module("qkform", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# ---- memory -------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_told(tmp_path):
    d = 60_000
    names = [f"encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key")]
    nbytes = 4 * d * d
    header = {
        name: {"dtype": "F32", "shape": [d, d], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * nbytes)  # holes: nothing on the disk
    config = {"model_type": "bert", "hidden_size": d, "num_attention_heads": 1, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = f"ulimit -v 4000000; '{sys.executable}' -m qkform scan . -q"
    done = shell(command, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "out of memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- steps --------------------------------------------------------------------------------------------------------


def test_a_step_that_is_there_several_times_is_told(write_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("step10", "step0010", "step20")):
        write_model(bert_tensors(np.random.default_rng(i)), name=name)
    assert main(["scan", "step10", "step20", "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["scan", "step10", "step0010", "step20", "step10", "-q"]) == 0
    assert capsys.readouterr().err == (
        "warning: step 10 is there 3 times in one run: step10, step0010, step10\n"
    )
