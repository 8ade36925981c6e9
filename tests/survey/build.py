"""Models from small configs, with random weights in double precision, and inputs for them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.survey.configs import FIRST_WORD, VOCABULARY
from tests.survey.trace import is_norm


class NotBuilt(Exception):
    """No model could be made from the config; says why."""


class NoModel(Exception):
    """No class takes this config: it is a part of the config of other models."""


LARGEST = 40_000_000  # parameters: a larger model is not small


class AngleZero(TorchFunctionMode):
    """Tables of rotary angles made while a model is built are for angle 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match getattr(func, "__name__", ""):
            case "cos":
                return torch.ones_like(args[0])
            case "sin":
                return torch.zeros_like(args[0])
            case "polar":
                return torch.polar(args[0], torch.zeros_like(args[1]))
        return func(*args, **(kwargs or {}))


def quiet() -> None:
    """transformers reports every save and every odd token id of a tiny config."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def classes(model_type: str, config: Any) -> list[type]:
    """Classes that take this config: those of the auto mappings first, then any of its modeling file."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: list[str] = []
    mappings = ["MODEL_MAPPING_NAMES", "MODEL_FOR_PRETRAINING_MAPPING_NAMES"]
    others = [n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES")]
    mappings += [n for n in others if n not in mappings]
    for mapping in mappings:
        value = getattr(modeling_auto, mapping, {}).get(model_type, ())
        names += [value] if isinstance(value, str) else list(value)
    found = [getattr(transformers, n, None) for n in dict.fromkeys(names)]
    package = type(config).__module__.rpartition(".")[0]
    own = []
    import importlib
    import pkgutil

    folder = importlib.import_module(package)
    for info in pkgutil.iter_modules(folder.__path__):
        if info.name.startswith("modeling_") and "flax" not in info.name and "tf_" not in info.name:
            module = importlib.import_module(f"{package}.{info.name}")
            for cls in vars(module).values():
                takes = getattr(cls, "config_class", None)
                here = isinstance(cls, type) and cls.__module__ == module.__name__
                if here and takes is type(config) and not cls.__name__.endswith("PreTrainedModel"):
                    own.append(cls)
    return list(dict.fromkeys(c for c in [*found, *own] if isinstance(c, type)))


EAGER = {"attn_implementation": "eager"}


def build(model_type: str, config: Any, *, check_size: bool = False) -> Any:
    """The first class that can be built, in double precision, with random weights."""
    quiet()
    tried = []
    found = classes(model_type, config)
    if not found:
        raise NoModel
    for cls in found:
        for options in ({**EAGER, "experts_implementation": "eager"}, EAGER, {}):
            torch.manual_seed(sum(model_type.encode()))
            size = _parameters(cls, config, options) if check_size else 0
            if size > LARGEST:
                tried.append(f"{cls.__name__} has {size:.1e} parameters")
                break
            try:
                with AngleZero():
                    model = cls._from_config(config, **options)
            except Exception as error:
                tried.append(f"{cls.__name__}: {type(error).__name__}: {str(error)[:200]}")
                continue
            return randomised(model.double().eval())
    raise NotBuilt("; ".join(dict.fromkeys(tried)) or "no model class takes this config")


def _parameters(cls: Any, config: Any, options: Mapping[str, Any]) -> int:
    """How many parameters the model would have; 0 if it cannot be laid out without memory."""
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in cls._from_config(config, **options).parameters())
    except Exception:
        return 0


def randomised(model: Any) -> Any:
    """Every parameter random: matrices keep the size of activations, norms have a gain and a bias."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.ndim >= 2:
                if "embed" in name and parameter.ndim == 2:
                    parameter.normal_()
                else:
                    parameter.normal_(0, 0.8 / math.sqrt(max(1, parameter[0].numel())))
            elif parameter.ndim == 1 and is_norm(model.get_submodule(name.rpartition(".")[0])):
                parameter.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.normal_(0.5, 0.5)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.3)
    return model


# ---- inputs -------------------------------------------------------------------------------------------------

BATCH, LENGTH = 2, 11


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def ids(length: int = LENGTH, vocabulary: int = VOCABULARY, batch: int = BATCH) -> torch.Tensor:
    low = min(FIRST_WORD, vocabulary // 2)
    return torch.randint(low, vocabulary, (batch, length), generator=_generator())


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator(), dtype=torch.float64)


def sizes(config: Any) -> Iterator[Any]:
    """A config and its sub-configs."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from sizes(value)


def _first(config: Any, *names: str, default: Any = None) -> Any:
    for part in sizes(config):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
                return value
    return default


def _image(config: Any) -> tuple[int, int, int]:
    size = _first(config, "image_size", "img_size", "input_size", default=64)
    height, width = (
        (size, size) if isinstance(size, int) else (size[-2], size[-1]) if len(size) > 1 else (size[0],) * 2
    )
    return _first(config, "num_channels", "in_channels", "in_chans", default=3), height, width


MELS = ("num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel", "input_dim", "num_mel_bands")


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs to try, likely ones first; the model says which names it takes."""
    config = model.config
    takes = inspect.signature(entry(model)).parameters
    main = getattr(model, "main_input_name", "input_ids")
    vocabulary = _first(config, "vocab_size", default=VOCABULARY)
    vocabulary = min(vocabulary, VOCABULARY) if isinstance(vocabulary, int) else VOCABULARY
    width = _first(config, "hidden_size", "d_model", "n_embd", "dim", "embed_dim", default=32)
    width = width if isinstance(width, int) else width[0]
    channels, height, across = _image(config)
    channels = channels if isinstance(channels, int) else 3
    text = {"input_ids": ids(vocabulary=vocabulary)}
    if "bbox" in takes:
        text["bbox"] = torch.randint(0, 60, (BATCH, LENGTH, 4), generator=_generator()).sort(-1).values
    decoder = {"decoder_input_ids": ids(9, vocabulary)} if "decoder_input_ids" in takes else {}
    pixels = {"pixel_values": noise(BATCH, channels, height, across)}
    mels = _first(config, *MELS, default=80)
    mels = mels if isinstance(mels, int) else 80
    frames = _first(config, "max_source_positions", default=64)
    sounds = [
        {"input_features": noise(BATCH, mels, 2 * frames)},
        {"input_features": noise(BATCH, 64, mels)},
        {"input_features": noise(BATCH, 1, 64, mels)},
        *({"input_features": noise(BATCH, 64, other)} for other in (80, 128) if other != mels),
    ]
    for name in ("input_features_mask", "feature_attention_mask"):
        if name in takes:
            for sound in sounds[:2]:
                frames_in = sound["input_features"].shape[1 if sound is sounds[1] else 2]
                sound[name] = torch.ones(BATCH, frames_in, dtype=torch.long)
    waves = [{"input_values": noise(BATCH, 4000)}, {"input_values": noise(BATCH, 1, 4000)}]
    memory = _first(config, "encoder_hidden_size", "cross_attention_hidden_size", default=width)
    states = {"encoder_hidden_states": noise(BATCH, 7, memory if isinstance(memory, int) else width)}
    options: list[dict[str, Any]] = []
    if "pixel_values" in takes and "input_ids" in takes:
        options.append({**text, **pixels, **decoder})
    if "query_embeds" in takes:
        queries = {"query_embeds": noise(BATCH, 5, width)}
        options += [{**text, **queries, **states}, {**queries, **states}]
    if main == "input_ids" or "input_ids" in takes:
        options += [{**text, **decoder}, {**text, **states}]
        books = _first(config, "num_codebooks", "n_codebooks", "num_channels", default=0)
        if isinstance(books, int) and books > 1:
            many = ids(LENGTH * books, vocabulary).reshape(BATCH, LENGTH, books)
            options += [
                {"input_ids": many},
                {"input_ids": many, **states},
                {"input_ids": many.mT.contiguous()},
            ]
        for s in sounds:
            options.append({**text, **s})
    if main == "pixel_values" or "pixel_values" in takes:
        options += [
            {**pixels, **decoder},
            {"pixel_values": noise(BATCH, 4, channels, height, across), **decoder},
        ]
        options.append({**pixels, **text})
    if "input_features" in takes:
        options += [{**s, **decoder} for s in sounds]
    if "input_values" in takes:
        options += [{**w, **decoder} for w in waves]
        options += [{"input_values": noise(BATCH, 64, mels)}, {"input_values": noise(BATCH, mels, 64)}]
    for name in ("inputs_embeds", "hidden_states", "inputs", "embeddings", "x"):
        if name in takes:
            options += [{name: noise(BATCH, LENGTH, width)}, {name: noise(BATCH, LENGTH, width), **states}]
    grids = _grids(config, takes)
    if grids:
        options = [*grids, *options]
    required = [n for n, p in takes.items() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    known = {"input_ids": text["input_ids"], **pixels, **decoder, **waves[0], **sounds[0]}
    options += _special(config, takes, text)
    if "future_values" in takes:
        options.append({"future_values": noise(BATCH, 4), "future_time_features": noise(BATCH, 4, 1)})
    if not options:
        options = [{}]
    for option in options:
        given = {k: v for k, v in option.items() if k in takes or k == main}
        for name in required:
            if name not in given:
                value = known.get(name, _required(name, width))
                if value is not None:
                    given[name] = value
        yield given


def _grids(config: Any, takes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Patches of one image of 4 by 4, as the towers take them that are told the grid."""
    grid = torch.tensor([[1, 4, 4]])
    patch = _first(config, "patch_size", default=16)
    patch = patch if isinstance(patch, int) else patch[-1]
    inner = _first(config, "in_channels", "num_channels", "in_chans", default=3)
    times = _first(config, "temporal_patch_size", default=1)
    flat = noise(16, (inner if isinstance(inner, int) else 3) * times * patch * patch)
    still = noise(16, (inner if isinstance(inner, int) else 3) * patch * patch)
    double = noise(16, 2 * still.shape[1])
    square = still.reshape(16, -1, patch, patch)
    main = next((n for n in ("hidden_states", "pixel_values", "x") if n in takes), None)
    if "spatial_shapes" in takes and "input_ids" not in takes:
        ones = torch.ones(BATCH, 16, dtype=torch.long)
        shapes = torch.tensor([[4, 4]] * BATCH)
        return [
            {
                "pixel_values": still.expand(BATCH, -1, -1),
                "pixel_attention_mask": ones,
                "spatial_shapes": shapes,
            }
        ]
    named = next(
        (n for n in ("grid_thw", "image_grid_thw", "grid_hw", "grid_hws", "grids") if n in takes), None
    )
    if main is None or named is None or "input_ids" in takes:
        return []
    shapes = (grid, grid[:, 1:])
    return [
        {main: x, named: g}
        for g in shapes
        for x in (flat, still, square, double, square[None], flat[None], still[None])
    ]


def _special(config: Any, takes: Mapping[str, Any], text: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs that only a few models know."""
    options: list[dict[str, Any]] = []
    if "flattened_patches" in takes:
        patches = noise(BATCH, 16, _first(config, "patch_embed_hidden_size", default=768))
        options.append({"flattened_patches": torch.cat([torch.ones(BATCH, 16, 2), patches], -1)})
        options[-1]["decoder_input_ids"] = ids(9)
    if "aspect_ratio_ids" in takes:
        _, height, width = _image(config)
        tiles = _first(config, "max_num_tiles", default=4)
        options.append({"pixel_values": noise(BATCH, 1, tiles, 3, height, width)})
        options[-1]["aspect_ratio_ids"] = torch.ones(BATCH, 1, dtype=torch.long)
        options[-1]["aspect_ratio_mask"] = torch.ones(BATCH, 1, tiles, dtype=torch.long)
        if "input_ids" in takes:
            options[-1].update(text)
    if "visual_feats" in takes:
        features = noise(BATCH, 5, _first(config, "visual_feat_dim", default=2048))
        options.append({**text, "visual_feats": features, "visual_pos": noise(BATCH, 5, 4)})
    if "past_values" in takes and "past_time_features" not in takes:
        channels = _first(config, "num_input_channels", default=1)
        options.append({"past_values": noise(BATCH, _first(config, "context_length", default=32), channels)})
    return options


def _required(name: str, width: int) -> Any:
    """A value for an argument that a forward cannot do without."""
    if name in (
        "inputs_embeds",
        "hidden_states",
        "query_embeds",
        "embeddings",
        "x",
        "encoder_hidden_states",
        "query",
        "context",
    ):
        return noise(BATCH, LENGTH, width)
    if "mask" in name and name != "past_observed_mask":
        return torch.ones(BATCH, LENGTH if "feature" not in name else 64, dtype=torch.long)
    if name in ("bbox", "bboxes"):
        return torch.ones(BATCH, LENGTH, 4, dtype=torch.long)
    if name in ("position_ids", "cache_position"):
        return torch.arange(LENGTH)[None].expand(BATCH, -1)
    if name == "codebook_idx":
        return 2
    if name in ("object_queries", "spatial_position_embeddings", "position_embeddings"):
        return noise(BATCH, LENGTH, width)
    if name == "past_values":
        return noise(BATCH, 14)
    if name == "past_time_features":
        return noise(BATCH, 14, 1)
    if name == "past_observed_mask":
        return torch.ones(BATCH, 14)
    if name == "audio_mel":
        return noise(BATCH, 64, 128)
    return None


def entry(model: Any) -> Callable[..., Any]:
    """What is called: forward, or encode where a model has no forward of its own."""
    unimplemented = type(model).forward is torch.nn.Module.forward
    found: Callable[..., Any] = model.encode if unimplemented and hasattr(model, "encode") else model.forward
    return found


def forward(model: Any, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of the model with these inputs."""
    called = entry(model)
    options = {"use_cache": False} if "use_cache" in inspect.signature(called).parameters else {}
    if called == model.forward:
        called = model
    return lambda: called(**inputs, **options)
