"""Quantised weights as the floats they stand for: codes times scales, under the name and shape of the weight.

Each way of storing is one function here or in `packed`: it looks at the tensors that lie beside each other under one
path and returns what reads them, or refuses with the name of what does. All of it is arithmetic on whole tensors or
on their first rows; layouts see a weight of the shape that the model has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qkform.checkpoints.base import Array, Checkpoint, Need, TensorInfo
from qkform.checkpoints.derived import Derived, Made, codes, refused
from qkform.checkpoints.packed import awq, bitsandbytes_4bit, compressed_tensors, gptq
from qkform.checkpoints.parts import Parts

FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")
_BESIDE = {  # what lies beside the codes and is no weight of its own
    "qweight": ("scales", "qzeros", "g_idx"),
    "weight_packed": (
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
    ),
    "weight": (*_SCALES, "weight_format", "weight_zero_point"),
}


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every quantised weight that can be read as `X.weight`, in float32.

    What cannot be read is listed too, under the name and the shape that it has, and says so when it is asked for.
    """
    config = _settings(checkpoint.config)
    made: dict[str, Made] = {}
    hidden: list[str] = []
    for name in checkpoint.tensors:  # by names alone where nothing is quantised: remote headers stay unread
        path, _, last = name.rpartition(".")
        if last not in ("qweight", "weight_packed", "weight"):
            continue
        parts = Parts(checkpoint, path, config)
        if last != "weight" and (other := _another(parts, last)) is not None:
            made[parts.name("weight")] = refused(
                parts.info("weight") or checkpoint.tensors[name],
                f"tensors {name[-200:]!r} and {parts.name(other)[-200:]!r} both stand for one weight: which of the two "
                "the model has is not known; save it again with one",
            )
            hidden += [name]
        elif parts.present("qweight", "weight_packed") and last == "weight":
            continue  # refused above or below, at the codes
        elif last == "qweight":
            made[parts.name("weight")] = (awq if _is_awq(parts) else gptq)(parts)
            hidden += parts.present("qweight", *_BESIDE["qweight"])
        elif last == "weight_packed":
            made[parts.name("weight")] = compressed_tensors(parts)
            hidden += parts.present("weight_packed", *_BESIDE["weight_packed"])
        elif parts.quant_state() is not None and checkpoint.tensors[name].dtype == "U8":
            made[name] = bitsandbytes_4bit(parts)
            hidden += parts.under("weight")
        elif parts.present(*_SCALES) and checkpoint.tensors[name].dtype in (*FP8, "I8"):
            found = _scaled(parts, name, checkpoint.tensors[name])
            if found is not None:
                made[name] = found
                hidden += parts.present(*_BESIDE["weight"])
    return Derived(checkpoint, made, hidden) if made else checkpoint


def _another(parts: Parts, last: str) -> str | None:
    """What else stands for the weight whose codes are under `last`."""
    found = (other for other in ("weight", "qweight", "weight_packed") if other != last)
    return next((other for other in found if parts.present(other)), None)


def _settings(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The `quantization_config` of a model, or that of the sub-config which has one; {} where there is none."""
    if config is None:
        return {}
    places = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    for place in places:
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, Mapping):
                return found
    return {}


def _is_awq(parts: Parts) -> bool:
    """By the config's word, else by shapes: AWQ packs along the outputs, GPTQ along the inputs."""
    method = parts.config.get("quant_method")
    if method in ("awq", "gptq"):
        return bool(method == "awq")
    packed, scales = parts.info("qweight"), parts.info("scales")
    if packed is None or scales is None or len(packed.shape) != 2 or len(scales.shape) != 2:
        return False
    return scales.shape[1] == 8 * packed.shape[1]


# ---- one code per weight: 8-bit floats and whole numbers


def _scaled(parts: Parts, name: str, info: TensorInfo) -> Made | None:
    """`weight` times its scale; None for codes without one, which the format itself refuses."""
    as_float = replace(info, dtype=f"{info.dtype} with scales")
    if parts.info("SCB") is not None:
        return _bitsandbytes_8bit(parts, name, as_float)
    inverse, scale = parts.info("weight_scale_inv"), parts.info("weight_scale")
    if (inverse is None) == (scale is None):
        return None if inverse is None else refused(as_float, f"tensor {name!r} has two scales")
    beside = "weight_scale_inv" if scale is None else "weight_scale"
    if parts.info("weight_zero_point") is not None:
        return refused(
            as_float,
            f"tensor {name!r} in {info.file} has a zero point beside its scale, which is not read; the package "
            "compressed-tensors decompresses such a model",
        )
    found = inverse if scale is None else scale
    assert found is not None
    if len(info.shape) != 2:
        return refused(as_float, f"tensor {name!r} of shape {info.shape} has a scale; only matrices are read")
    if 0 in (*info.shape, *found.shape):
        return refused(
            as_float,
            f"tensor {name!r} of shape {info.shape} in {info.file} has a {beside} of shape {found.shape}: empty",
        )
    try:
        block = _block(info.shape, found.shape, parts.config)
    except ValueError as error:
        return refused(
            as_float, f"tensor {name!r} of shape {info.shape} in {info.file}: its {beside} {error}"
        )
    return _blockwise(parts, name, parts.name(beside), as_float, block)


def _block(shape: tuple[int, ...], scale: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, columns) that share a scale; ValueError says why none fits."""
    out, inner = shape
    if math.prod(scale) == 1:
        return out, inner
    if len(scale) == 1 and scale[0] == out:
        return 1, inner
    if len(scale) != 2:
        raise ValueError(f"has shape {scale}, which is neither one number, nor one for each row, nor blocks")
    if scale == (out, 1):
        return 1, inner
    size = _block_size(config)
    if size is None:  # the format that has `weight_scale_inv` fixes 128 by 128 where nothing is said
        if scale[0] == out and inner % scale[1] == 0:
            return 1, inner // scale[1]
        size = (128, 128)
    if scale != (-(-out // size[0]), -(-inner // size[1])):
        raise ValueError(
            f"has shape {scale}, which is not one number for each block of {size[0]} x {size[1]}"
        )
    return size


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    value = config.get("weight_block_size")
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("block_structure") is not None:
            value = weights["block_structure"]
    if isinstance(value, str) and value.count("x") == 1:  # "128x128"
        value = [int(side) if side.isdigit() and len(side) < 10 else 0 for side in value.split("x")]
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 2**31 for n in value):
        return value[0], value[1]
    return None


def _blockwise(parts: Parts, name: str, scale: str, info: TensorInfo, block: tuple[int, int]) -> Made:
    """weight[i, j] = code[i, j] * scale[i // block[0], j // block[1]]."""
    checkpoint, stored = parts.checkpoint, parts.checkpoint.tensors[scale]
    out = info.shape[0]

    def scale_rows(rows: int | None) -> int | None:
        blocks = stored.shape and stored.shape[0] == -(-out // block[0])
        return -(-rows // block[0]) if rows is not None and blocks and len(stored.shape) == 2 else None

    def needs(rows: int | None) -> list[Need]:
        return [(name, rows), (scale, scale_rows(rows))]

    def read(rows: int | None) -> Array:
        scales = codes(checkpoint, scale, scale_rows(rows)).astype(np.float32)
        scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        raw = codes(checkpoint, name, rows)
        values: Array = np.empty(raw.shape, np.float32)
        for first in range(0, len(raw), block[0]):  # a block of rows at a time: no third copy of the weight
            rows_here = slice(first, first + block[0])
            line = scales[first // block[0]]
            wide = line if line.shape[0] == 1 else np.repeat(line, block[1])[: raw.shape[1]]
            with np.errstate(all="ignore"):  # codes and scales may be NaN: so are the weights, then
                np.multiply(raw[rows_here].astype(np.float32), wide, out=values[rows_here])
        return values

    return Made(info, needs, read)


def _bitsandbytes_8bit(parts: Parts, name: str, info: TensorInfo) -> Made:
    """bitsandbytes' int8: weight = code * SCB / 127, row by row, where the codes lie in rows (format 0)."""
    scale = parts.name("SCB")
    stored, layout = parts.checkpoint.tensors[scale], parts.info("weight_format")
    sound = len(info.shape) == 2 and 0 not in info.shape and len(stored.shape) in (1, 2)
    if not sound or math.prod(stored.shape) != info.shape[0]:
        return refused(info, f"tensor {name!r} of shape {info.shape} has an SCB of shape {stored.shape}")
    turned = len(stored.shape) == 2 and stored.shape[0] == 1

    def needs(rows: int | None) -> list[Need]:
        beside = [] if layout is None else [(parts.name("weight_format"), None)]
        return [(name, rows), (scale, None if turned else rows), *beside]

    def read(rows: int | None) -> Array:
        if layout is not None and np.any(codes(parts.checkpoint, parts.name("weight_format")) != 0):
            parts.fail(
                "weight",
                "has codes in the order of a GPU's tiles, which is not read; save the model again "
                "with a current bitsandbytes",
            )
        scales = codes(parts.checkpoint, scale, None if turned else rows).astype(np.float32).reshape(-1)
        raw = codes(parts.checkpoint, name, rows)
        values: Array = raw.astype(np.float32)
        with np.errstate(all="ignore"):
            values *= (scales[: len(raw)] / np.float32(127))[:, None]
        return values

    return Made(info, needs, read)
