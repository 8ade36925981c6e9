"""The error tree: every error has one base, is drawn in the tree, and is what Python calls such a mistake."""

from __future__ import annotations

import inspect
import re

import pytest

import qkform as qk
from qkform import errors

OURS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}
DRAWN = dict(re.findall(r"[├└]── (\w+) +(\*?)", errors.__doc__ or ""))


def test_every_error_is_drawn_in_the_tree() -> None:
    assert set(DRAWN) == set(OURS) - {"QKFormError"}
    assert all(issubclass(kind, errors.QKFormError) for kind in OURS.values())


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_an_argument_that_does_not_fit_is_a_value_error(name: str) -> None:
    assert issubclass(OURS[name], ValueError) is (DRAWN[name] == "*")


def test_bad_arguments_are_value_errors() -> None:
    surgery = pytest.importorskip("qkform.surgery")
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 2, 3, 4)
    for call in (
        lambda: surgery.decouple_(torch.nn.MultiheadAttention(6, 2), init="diagnoal"),
        lambda: surgery.param_groups(torch.nn.MultiheadAttention(6, 2), lr=-1.0),
        lambda: qk.attention.decoupled_attention(q, q, q, q),
        lambda: qk.scan("sample:minilm", gamma="two"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        assert isinstance(caught.value, errors.QKFormError)


def test_of_a_live_model_python_words_are_said() -> None:
    """No flag of the command line and no file: there is neither."""
    nn = pytest.importorskip("torch").nn
    odd = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)})
    for model in (nn.Sequential(nn.Linear(4, 4)), nn.ModuleDict({"layers": nn.ModuleList([odd])})):
        for call in (
            qk.scan,
            qk.sites.find,
            qk.surgery.decouple_,
            qk.surgery.symmetrize_,
            lambda model: qk.surgery.param_groups(model, lr=1.0),
            lambda model: qk.surgery.set_attention_(model, "exclusive"),
            qk.surgery.collapse_,
        ):
            with pytest.raises(errors.QKFormError) as caught:
                call(model)
            said = str(caught.value)
            assert "--" not in said
            assert "config.json" not in said
            if call in (qk.scan, qk.sites.find):
                assert "heads=" in said
            elif call is not qk.surgery.collapse_:
                assert isinstance(caught.value, errors.SurgeryError)
                assert "give a transformers model, or a module that holds nn.MultiheadAttention" in said
    with pytest.raises(errors.LayoutError, match=r"For example: heads=N, q='layers\.{layer}\.q\.weight'"):
        qk.scan(model)
