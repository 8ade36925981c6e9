"""The wheel: every file of the package is in it, and it scans where nothing but its declared dependencies is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from safetensors.numpy import save_file

from tests.conftest import BERT_CONFIG, bert_tensors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "qkform"
NO_REGISTRY = ("No matching distribution", "NewConnectionError", "Failed to establish", "Temporary failure")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from this tree by the back end that is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    save_file(bert_tensors(np.random.default_rng(0)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(BERT_CONFIG))
    return folder


def test_the_wheel_is_the_package_file_by_file(wheel):
    here = {
        f"qkform/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        there = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    print(f"{wheel.name}: {len(there)} files, {wheel.stat().st_size / 1e6:.2f} MB")
    assert sorted(here) == sorted(there)
    assert [name for name in here if here[name] != there[name]] == []
    assert {Path(name).suffix for name in there} >= {".py", ".toml", ".j2", ".css", ".js"}
    assert "qkform/py.typed" in there
    assert len(licences) == 1


def test_a_wheel_scans_where_only_its_dependencies_are(wheel, checkpoint, tmp_path):
    """Without torch and all else that the tests have: an environment into which the core's dependencies are linked."""
    python = environment(tmp_path / "clean")
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    )
    for dist in dependencies(Distribution.at(unpacked_metadata(wheel, tmp_path)).requires or []):
        link(dist, packages)
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    assert run(python, "-c", "import torch", check=False).returncode != 0
    scans(python.parent / "qkform", checkpoint, tmp_path)
    where = run(python, "-c", "import qkform; print(qkform.__file__)").stdout.strip()
    assert Path(where).is_relative_to(packages)


@pytest.mark.slow
@pytest.mark.timeout(900)  # it fetches 250 MB
def test_a_wheel_installs_and_scans_in_a_clean_environment(wheel, checkpoint, tmp_path):
    python = environment(tmp_path / "clean")
    constraints = str(ROOT / "constraints.txt")
    done = pip("--python", str(python), "install", "-c", constraints, str(wheel), check=False)
    if done.returncode and any(sign in done.stderr for sign in NO_REGISTRY):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr
    assert pip("--python", str(python), "check").returncode == 0
    assert run(python, "-c", "import torch", check=False).returncode != 0
    scans(python.parent / "qkform", checkpoint, tmp_path)


def scans(command, checkpoint, tmp_path):
    """What a newcomer does first: rows, a page, charts, and help."""
    page = tmp_path / "page.html"
    done = run(command, "scan", str(checkpoint), "--format", "json", "--html", str(page))
    table = json.loads(done.stdout)
    assert table["schema"] == "qkform.scan/1"
    assert all(row["symmetry"] is not None for row in table["models"][0]["rows"])
    assert "my-model" in page.read_text()
    assert "qkform train" in run(command, "train", "--help").stdout
    refused = run(command, "train", "--steps", "1", "--out", str(tmp_path / "out"), check=False)
    assert refused.returncode == 2
    assert "pip install 'qkform[train]'" in refused.stderr
    assert not (tmp_path / "out").exists()


def environment(folder):
    """A virtual environment with nothing in it; its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    return folder / "bin" / "python"


def unpacked_metadata(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        archive.extract(name, tmp_path / "metadata")
    return tmp_path / "metadata" / Path(name).parent


def dependencies(requirements):
    """The installed distributions that these requirements ask for, and what those ask for."""
    found: dict[str, Distribution] = {}
    wanted = [(Requirement(text), {""}) for text in requirements]
    while wanted:
        requirement, extras = wanted.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        seen = requirement.name in found
        found[requirement.name] = dist = distribution(requirement.name)
        if not seen or requirement.extras:
            more = {"", *requirement.extras}
            wanted += [(Requirement(text), more) for text in dist.requires or ()]
    return list(found.values())


def link(dist, packages):
    for name in {Path(str(file)).parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
        target = packages / name
        if not target.exists():
            target.symlink_to(dist.locate_file(name))


def pip(*arguments, check=True):
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, check=check)


def run(*command, check=True):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, env=clean)
    assert not check or done.returncode == 0, done.stderr
    return done
