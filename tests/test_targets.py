"""Nothing that a model is made of is ever overwritten; what qkform wrote may be written again."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from qkform import targets
from qkform.cli import main
from qkform.errors import RecordError
from tests.conftest import bert_tensors


@pytest.fixture
def here(bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(here, capsys, source, *flags):
    """The message of a command that writes nothing."""
    before = contents(here)
    assert main(["scan", source, *flags]) == 2
    assert contents(here) == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


def test_a_link_elsewhere_that_leads_to_the_weights(here, capsys):
    (here / "page.html").symlink_to("my-model/model.safetensors")
    (here / "rows.json").symlink_to("my-model/config.json")
    for source in ("my-model", "my-model/model.safetensors"):
        assert "model.safetensors" in refused(here, capsys, source, "--html", "page.html")
        assert "config.json" in refused(here, capsys, source, "--out", "rows.json")
    # of a model that is not even scanned
    shutil.copytree("my-model", "other")
    assert "looks like a file of a model" in refused(here, capsys, "other", "--html", "page.html")


def test_the_index_of_a_sharded_model(here, capsys):
    tensors = bert_tensors(np.random.default_rng(0))
    (here / "idx").mkdir()
    save_file(tensors, here / "idx/model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (here / "idx/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy("my-model/config.json", "idx/config.json")
    for source in ("idx", "idx/model.safetensors.index.json", "my-model"):
        refused(here, capsys, source, "--out", "idx/model.safetensors.index.json")


@pytest.mark.parametrize("base", ["base", "../base", "{here}/base"])
def test_the_base_of_an_adapter(base, here, capsys):
    shutil.move("my-model", "base")
    (here / "base/notes.html").write_text("mine")
    (here / "lora").mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": base.format(here=here)}
    (here / "lora/adapter_config.json").write_text(json.dumps(config))
    (here / "page.html").symlink_to("base/notes.html")
    assert "of the model lora" in refused(here, capsys, "lora", "--html", "base/notes.html")
    assert "of the model lora" in refused(here, capsys, "lora", "--html", "page.html")


def test_an_adapter_that_is_its_own_base_does_not_go_round(here):
    (here / "lora").mkdir()
    (here / "lora/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "lora"}))
    (here / "x.html").write_text("mine")
    targets.check(["lora"], [], here / "x.html", None)


def test_the_files_that_the_links_of_a_folder_lead_to(here, capsys):
    (here / "hc/store").mkdir(parents=True)
    (here / "hc/snapshot").mkdir()
    shutil.move("my-model/model.safetensors", "hc/store/b1")
    shutil.move("my-model/config.json", "hc/snapshot/config.json")
    (here / "hc/snapshot/model.safetensors").symlink_to("../store/b1")
    (here / "page.html").symlink_to("hc/store/b1")
    assert "of the model hc/snapshot" in refused(here, capsys, "hc/snapshot", "--html", "page.html")
    linked = "hc/snapshot/model.safetensors"
    assert f"of the model {linked}" in refused(here, capsys, linked, "--html", "page.html")


def test_the_cache_of_the_hub_is_no_place_to_write_to(here, capsys):
    (here / "models--a--b/blobs").mkdir(parents=True)
    (here / "models--a--b/blobs/b1").write_text("weights")
    (here / "page.html").symlink_to("models--a--b/blobs/b1")
    refused(here, capsys, "my-model", "--html", "page.html")


def test_the_folder_above_one_called_onnx(here, capsys):
    (here / "ox/onnx").mkdir(parents=True)
    (here / "ox/onnx/model.onnx").write_bytes(b"")
    (here / "ox/notes.json").write_text("{}")
    for source in ("ox/onnx", "ox/onnx/model.onnx"):
        refused(here, capsys, source, "--out", "ox/notes.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "notes.json", "sub/deep.json"])
def test_whatever_else_lies_beside_the_weights(name, here, capsys):
    (here / "my-model/sub").mkdir()
    (here / "my-model" / name).write_text("{}")
    for source in ("my-model", "./my-model/model.safetensors", str(here / "my-model")):
        refused(here, capsys, source, "--out", f"my-model/{name}")
    assert "must end in .html" in refused(here, capsys, "my-model", "--html", f"my-model/{name}")


@pytest.mark.parametrize("name", ["modeling.py", "model.onnx_data", "x.safetensors", "config.json"])
def test_a_page_is_called_html_and_leads_to_no_part_of_a_model(name, here, capsys):
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / name).write_text("precious")
    assert "must end in .html" in refused(here, capsys, "my-model", "--html", f"elsewhere/{name}")
    (here / "page.htm").symlink_to(f"elsewhere/{name}")
    assert "looks like a file of a model" in refused(here, capsys, "my-model", "--html", "page.htm")


def test_both_models_of_a_difference_are_spared(here, capsys):
    shutil.copytree("my-model", "b")
    (here / "b/notes.json").write_text("{}")
    assert main(["diff", "my-model", "b", "--out", "b/notes.json"]) == 2
    assert (here / "b/notes.json").read_text() == "{}"


def test_what_we_wrote_is_written_again_also_beside_the_weights(here, capsys):
    names = ["rows.json", "rows.csv", "rows.parquet"]
    flags = [x for name in names for x in ("--out", f"my-model/{name}")]
    everything = [*flags, "--html", "my-model/page.html"]
    for command in (["scan", "my-model"], ["diff", "my-model", "my-model"], ["scan", "my-model"]):
        assert main([*command, *everything]) == 0, capsys.readouterr().err
        for name in (*names, "page.html"):
            assert targets.written_by_us(here / "my-model" / name)
    assert not targets.written_by_us(here / "my-model/config.json")
    assert not targets.written_by_us(here / "my-model/model.safetensors")


def test_a_file_of_the_user_elsewhere_may_be_overwritten(here):
    (here / "notes.html").write_text("old")
    targets.check(["my-model"], [], here / "notes.html", None)


def test_a_page_that_takes_long_is_announced(here, capsys, write_model):
    for i in range(4):
        write_model(bert_tensors(np.random.default_rng(i)), name=f"m{i}")
    models = ["my-model", *(f"m{i}" for i in range(4))]
    assert main(["scan", *models[:4], "--html", "few.html"]) == 0
    assert capsys.readouterr().err == "wrote few.html\n"
    assert main(["scan", *models, "--html", "many.html"]) == 0
    assert capsys.readouterr().err == "writing many.html\nwrote many.html\n"
    assert main(["scan", *models, "--html", "many.html", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_chart_of_a_page_is_not_copied_over_and_over(here, monkeypatch):
    import altair

    from qkform.report.page import page_html
    from qkform.scanner import scan

    made = []
    init = altair.LayerChart.__init__
    monkeypatch.setattr(
        altair.LayerChart, "__init__", lambda self, *a, **k: (made.append(1), init(self, *a, **k))[1]
    )
    html = page_html(scan("my-model"))
    charts = html.count('"$schema"')
    assert charts >= 4
    assert len(made) <= 3 * charts  # altair's own methods, called one after the other, make 9 of each


def test_a_link_to_nowhere_is_no_folder_for_charts(here, capsys):
    (here / "charts").symlink_to("gone")
    assert "a link to gone, which is not there" in refused(here, capsys, "my-model", "--plots", "charts")


def test_charts_replace_charts_and_nothing_else(here):
    from qkform.report import save_plots
    from qkform.scanner import scan

    table = scan("my-model", signature="none")
    first = save_plots(table, here / "charts", ["svg"])
    assert save_plots(table, here / "charts", ["svg"]) == first
    first[0].write_text("a letter")
    with pytest.raises(RecordError, match="is no chart"):
        save_plots(table, here / "charts", ["svg"])
    assert first[0].read_text() == "a letter"
