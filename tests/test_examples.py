"""Every script in examples/ runs as it is and prints what it found, without a warning and within a minute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# What each prints that it found, and whether it is quick enough for every run of the tests.
FOUND = {
    "scan_and_plot": r"6 of 6 layers are more than two standard deviations away",
    "plain_loop": r"attn 0: \+1\.000 .*\n(.*\n)*loss \d\.\d+ at step 30, \d\.\d+ at step 90",
    "trainer_callback": r"   0 .*\n  10 .*\n  20 .*\n  30 .*\n  40 +\d+\.\d+ ",
    "sharpen": r"they differ by \d\.\de-(0[6-9]|1\d) at most",
    "compare_arms": r"held_out: [+-][\d.e-]+ over 2 seeds",
}
QUICK = ("scan_and_plot", "sharpen")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FOUND]
)
def test_example_runs_and_prints_what_it_found(name, tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent / "src")},
    )
    print(f"{name}: {time.monotonic() - began:.1f} s")
    assert done.returncode == 0, done.stderr
    assert re.search(FOUND[name], done.stdout), done.stdout


def test_every_example_is_run_says_what_it_is_and_is_short():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in scripts} == set(FOUND)
    for path in scripts:
        text = path.read_text()
        assert text.startswith('"""')
        assert len(text.splitlines()) <= 80
        compile(text, str(path), "exec")


@pytest.mark.parametrize("name", FOUND)
def test_names_that_an_example_imports_exist(name):
    pytest.importorskip("torch", reason="examples train")
    for line in (EXAMPLES / f"{name}.py").read_text().splitlines():
        if re.match(r"(from|import) qkform", line):
            exec(line, {})  # noqa: S102 - a line of our own
