"""The arrows of the design: what each part of the package may import, and that its public names are what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import qkform

ROOT = Path(qkform.__file__).parent

# part -> parts of qkform it may import
ARROWS = {
    "errors": set(),
    "wrappers": set(),
    "steps": set(),
    "lazy": set(),
    "disk": set(),
    "cache": {"errors"},
    "plain": set(),
    "records": {"errors", "plain"},
    "differences": {"records", "errors"},
    "comparisons": {"records", "errors"},
    "runs": {"disk", "records", "errors"},
    "form": {"errors"},
    "checkpoints": {"errors", "wrappers"},
    "layouts": {"form", "errors"},
    "samples": {"checkpoints", "errors", "cache"},
    "options": {"layouts", "errors"},
    "scoring": {"errors", "records", "form", "layouts", "options"},
    "scanner": {
        "errors",
        "records",
        "form",
        "checkpoints",
        "layouts",
        "options",
        "samples",
        "scoring",
        "sites",
        "steps",
    },
    "sites": {"layouts", "form", "errors", "wrappers"},
    "attention": {"errors"},
    "surgery": {"lazy", "plain", "attention", "sites", "layouts", "form", "errors", "wrappers"},
    "dynamics": {
        "lazy",
        "attention",
        "form",
        "layouts",
        "sites",
        "records",
        "flows",
        "runs",
        "options",
        "scoring",
        "errors",
    },
    "training": {
        "disk",
        "lazy",
        "comparisons",
        "cache",
        "attention",
        "surgery",
        "dynamics",
        "sites",
        "form",
        "layouts",
        "checkpoints",
        "records",
        "runs",
        "samples",
        "errors",
        "wrappers",
    },
    "flows": {"records", "errors", "plain"},
    "report": {
        "form",  # how far the median of random layers scatters
        "records",
        "comparisons",
        "differences",
        "flows",
        "runs",
        "errors",
        "cache",
        "steps",
    },
    "targets": {"records", "comparisons", "differences", "flows", "errors", "report", "checkpoints"},
    "differ": {"differences", "errors", "form", "layouts", "options", "records", "scanner", "scoring"},
    "cli": {
        "errors",
        "training",
        "records",
        "comparisons",
        "differences",
        "dynamics",
        "flows",
        "options",
        "scanner",
        "differ",
        "report",
        "samples",
        "targets",
    },
    "__main__": {"cli"},
    "__init__": {
        "lazy",
        "errors",
        "form",
        "layouts",
        "records",
        "runs",
        "differences",
        "report",
        "scanner",
        "differ",
        "sites",
        "attention",
        "dynamics",
        "surgery",
        "training",
    },
}


def modules():
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            names = (
                [f"{node.module}.{a.name}" for a in node.names] if node.module == "qkform" else [node.module]
            )
        for name in names:
            parts = name.split(".")
            if parts[0] == "qkform" and len(parts) > 1:
                found.add(parts[1])
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    part = part_of(path)
    assert part in ARROWS, f"{part} has no place in the design yet"
    outward = imported(path) - {part, "__version__"}
    assert outward <= ARROWS[part], f"{part} may not import {outward - ARROWS[part]}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_command_line_prints_or_reads_the_environment(path):
    if part_of(path) in ("cli", "cache"):
        return
    text = path.read_text()
    assert not re.search(r"^\s*print\(", text, re.MULTILINE)
    allowed = path.name in ("samples.py", "sweeping.py")  # they hand it on: to pip, to the runs of a sweep
    assert allowed or not re.search(r"os\.environ|os\.getenv", text)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_exported_names_exist_and_are_documented():
    for name in qkform.__all__:
        assert getattr(qkform, name).__doc__
    assert set(qkform.__all__) <= set(dir(qkform))
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(qkform, "nonsense")  # noqa: B009


def test_every_error_is_in_the_tree_and_its_picture():
    from qkform import errors

    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, errors.QKFormError)
            assert name in errors.__doc__


def test_every_dependency_has_its_reason():
    import tomllib

    root = ROOT.parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    reasons = (root / "docs" / "dependencies.md").read_text()
    wanted = [*project["dependencies"], *(d for ds in project["optional-dependencies"].values() for d in ds)]
    for requirement in wanted:
        name = re.split(r"[<>=\[ ]", requirement)[0]
        assert name == "qkform" or f"`{name}`" in reasons, f"{name} has no reason in docs/dependencies.md"


def test_tests_that_are_thinned_out_exist():
    from tests.conftest import THINNED

    for test, every in THINNED.items():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(), f"{test} is not there any more"
        assert every > 1
