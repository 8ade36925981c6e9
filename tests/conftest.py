"""Shared by all tests: tiny checkpoints written the way real ones are, and the count of skips at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

# One BLAS thread in xdist's workers and in the commands that tests start: two of each fight over two cores.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# No test waits for a network; those of the hub serve their own, and say so.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A loaded machine is slow, not wrong; and what CI runs must not depend on luck.
settings.register_profile("qkform", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("qkform")


# Of these tests' many cases every so-manieth is in each run, from the first on; the others are left to `make test-all`.
# What each says is said by the cases that stay; the rest are more families, arms and combinations of the same law.
# A step shares no factor with the number of kinds within each family, so that no kind is left out of all.
THINNED = {
    "test_decouple.py::test_attentions_are_what_the_values_are_weighed_with": 2,
    "test_decouple.py::test_every_kind_of_attention_decodes_as_it_reads": 3,
    "test_decouple.py::test_every_kind_of_attention_is_its_definition": 3,
    "test_decouple_families.py::test_future_tokens_cannot_change_past_outputs": 2,
    "test_decouple_families.py::test_generation_depends_on_v": 2,
    "test_decouple_families.py::test_padded_and_unpadded_agree": 3,
    "test_decouple_families.py::test_recoupling_gives_the_old_model_back_bit_for_bit": 3,
    "test_decouple_families.py::test_self_attention_alone_gets_a_self_score": 3,
    "test_decouple_starts.py::test_a_matched_start_keeps_the_mean_self_score": 3,
    "test_decouple_starts.py::test_fused_weights_are_split_before_or_after": 4,
    "test_decouple_starts.py::test_the_spread_start_differs_from_token_to_token_as_before": 2,
    "test_decouple_families.py::test_each_step_with_a_cache_is_the_full_forward": 2,
    "test_change.py::test_the_null_is_what_noise_on_the_weights_gives": 2,
    "test_docs.py::test_commands_run_as_printed": 2,
    "test_docs.py::test_python_blocks_run_as_printed": 2,
    "test_factorize.py::test_a_hugging_face_model_is_collapsed_and_taken_apart_again": 3,
    "test_factorize.py::test_a_stock_attention_is_collapsed_and_taken_apart_again": 3,
    "test_factorize.py::test_pruned_weights_with_biases_have_exact_factors": 3,
    "test_hostile.py::test_a_bad_config_is_refused": 2,
    "test_hostile.py::test_a_bad_index_is_refused": 2,
    "test_hostile.py::test_a_bad_safetensors_file_is_refused": 2,
    "test_hub.py::test_weights_that_are_refused_after_their_header": 3,
    "test_options.py::test_form_at_a_distance_is_what_the_model_scores_and_mistakes_are_noticed": 3,
    "test_surgery_building.py::test_the_changes_are_made_anew": 3,
    "test_surgery_loading.py::test_a_malformed_change": 2,
    "test_surgery_loading.py::test_a_model_in_a_module_of_ones_own_has_the_record_in_its_config": 3,
    "test_surgery_loading.py::test_a_v_that_is_no_finite_floats": 2,
    "test_surgery_loading.py::test_a_part_that_was_changed_is_found_in_the_whole": 3,
    "test_surgery_loading.py::test_models_made_from_one_config_change_one_by_one": 3,
    "test_surgery_loading.py::test_saved_and_loaded_is_the_same_model": 2,
    "test_symmetric_init.py::test_a_model_scores_a_pair_alike_from_both_sides": 2,
    "test_symmetric_init.py::test_the_scan_shows_what_an_arm_promises": 2,
    "test_surgery_together.py::test_the_function_is_what_both_say_or_nothing_is_changed": 5,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `THINNED` leaves out."""
    seen: dict[str, int] = {}
    for item in items:
        test = item.nodeid.rpartition("/")[2].partition("[")[0]
        if test in THINNED:
            seen[test] = seen.get(test, -1) + 1
            if seen[test] % THINNED[test]:
                item.add_marker(pytest.mark.slow)


def bert_tensors(
    rng: np.random.Generator, layers: int = 2, d: int = 12, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    tensors = {}
    for i in range(layers):
        for name in ("query", "key", "value"):
            path = f"encoder.layer.{i}.attention.self.{name}"
            tensors[f"{path}.weight"] = rng.normal(size=(d, d)).astype(dtype)
            tensors[f"{path}.bias"] = rng.normal(size=d).astype(dtype)
    return tensors


BERT_CONFIG = {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Write tensors and a config as a model folder; returns its path."""

    def write(tensors: dict[str, np.ndarray], config: Any = BERT_CONFIG, name: str = "my-model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (folder / "config.json").write_text(text)
        return folder

    return write


@pytest.fixture
def bert(write_model: Callable[..., Path]) -> Path:
    """A random two-layer BERT."""
    return write_model(bert_tensors(np.random.default_rng(0)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped, each with its reason above")
