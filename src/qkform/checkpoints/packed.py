"""Several codes in one number: GPTQ, AWQ, compressed-tensors and bitsandbytes' 4-bit weights.

Each function looks at shapes and config only; what it returns reads the codes when the weight is asked for. A variant
that is not certain is refused and named, never guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qkform.checkpoints.base import Array, Need, TensorInfo
from qkform.checkpoints.derived import Made, codes, refused
from qkform.checkpoints.parts import Parts

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each nibble holds, lowest nibble first
MAX_STATE_BYTES = 2**16  # of bitsandbytes' description of one weight; real ones have about 200


class _Unfit(Exception):
    """Tensors that do not make a weight of this kind; the text completes "tensor NAME ..."."""


def _checked(parts: Parts, last: str, reader: Any) -> Made:
    """What `reader(parts)` makes, or a refusal under the shape of the codes."""
    info = parts.info(last)
    assert info is not None
    try:
        made: Made = reader(parts)
    except _Unfit as error:
        return refused(info, f"tensor {parts.name(last)!r} in {info.file} {error}")
    return made


def _matrix(parts: Parts, last: str, dtypes: tuple[str, ...]) -> TensorInfo:
    info = parts.info(last)
    if info is None:
        raise _Unfit(f"has no {last} beside it")
    if len(info.shape) != 2 or 0 in info.shape or info.dtype not in dtypes:
        raise _Unfit(
            f"comes with {last} of shape {info.shape} and type {info.dtype}; a matrix of {dtypes[0]} is needed"
        )
    return info


_FLOATS = ("F16", "BF16", "F32", "F64")


def unpacked(words: Array, bits: int, axis: int) -> Array:
    """The codes in 32-bit numbers, lowest bits first along `axis`, as uint8."""
    raw = words.view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    mask = np.uint32(2**bits - 1)
    if axis == 0:
        spread = (raw[:, None, :] >> shifts[None, :, None]) & mask
        return spread.reshape(-1, raw.shape[1]).astype(np.uint8)
    spread = (raw[:, :, None] >> shifts) & mask
    return spread.reshape(raw.shape[0], -1).astype(np.uint8)


# ---- GPTQ


def gptq(parts: Parts) -> Made:
    """GPTQ: qweight (in/n, out), qzeros (groups, out/n), scales (groups, out), g_idx (in); n codes in 32 bits.

    weight[o, i] = scales[g, o] * (code[i, o] - zero[g, o]), g = g_idx[i]. Version 1 of the format stores zero - 1.
    """
    return _checked(parts, "qweight", _gptq)


def _gptq(parts: Parts) -> Made:
    packed = _matrix(parts, "qweight", ("I32",))
    zeros, scales = _matrix(parts, "qzeros", ("I32",)), _matrix(parts, "scales", _FLOATS)
    groups, out = scales.shape
    index = parts.info("g_idx")
    bits = parts.config.get("bits")
    if bits is None and index is not None and len(index.shape) == 1:
        bits = 32 * packed.shape[0] // max(index.shape[0], 1)
    if type(bits) is not int or bits not in (2, 4, 8):
        raise _Unfit(
            f"is GPTQ with {str(bits)[:20]} bits; 2, 4 and 8 are read, the package gptqmodel reads the others"
        )
    n = 32 // bits
    inner = packed.shape[0] * n
    if packed.shape[1] != out or zeros.shape != (groups, out // n) or out % n or inner % groups:
        raise _Unfit(
            f"has shape {packed.shape}, its qzeros {zeros.shape} and its scales {scales.shape}: no GPTQ of {bits} bits"
        )
    if index is not None and (index.shape != (inner,) or index.dtype not in ("I32", "I64")):
        raise _Unfit(f"has {inner} inputs, and its g_idx shape {index.shape} and type {index.dtype}")
    method = parts.config.get("quant_method", "gptq")
    if method != "gptq":
        raise _Unfit(
            f"is quantised by {str(method)[:40]!r}; gptq and awq are read, the package {str(method)[:40]} reads it"
        )
    form = parts.config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2", None):
        raise _Unfit(
            f"is in the format {str(form)[:40]!r}; gptq and gptq_v2 are read, the package gptqmodel reads others"
        )
    offset = 0 if form == "gptq_v2" else 1
    size = parts.config.get("group_size")
    if index is None and type(size) is int and size > 0 and -(-inner // size) != groups:
        raise _Unfit(f"has {groups} groups of {inner} inputs, and the config says {size} in each")
    names = parts.present("qweight", "qzeros", "scales", "g_idx")

    def read(rows: int | None) -> Array:
        stored = {name.rpartition(".")[2]: codes(parts.checkpoint, name) for name in names}
        kept = slice(rows)
        zero = unpacked(stored["qzeros"], bits, 1).astype(np.float32)[:, kept]
        if offset and np.any(zero == 2**bits - 1):
            parts.fail("qzeros", f"has a zero point of {2**bits} or 0: readers of GPTQ do not agree on which")
        scale = stored["scales"][:, kept].astype(np.float32)
        of_input = stored["g_idx"] if "g_idx" in stored else np.arange(inner) // (inner // groups)
        if of_input.min() < 0 or of_input.max() >= groups:
            parts.fail("g_idx", f"names a group outside 0 to {groups - 1}")
        values = unpacked(stored["qweight"][:, kept], bits, 0).astype(np.float32)  # (in, out)
        with np.errstate(all="ignore"):
            values -= (zero + np.float32(offset))[of_input]
            values *= scale[of_input]
        return np.ascontiguousarray(values.T)

    return Made(_as(packed, (out, inner), f"GPTQ, {bits} bits"), _whole(names), read)


# ---- AWQ


def awq(parts: Parts) -> Made:
    """AWQ ("gemm"): qweight (in, out/8), qzeros (groups, out/8), scales (groups, out).

    weight[o, i] = scales[g, o] * (code[i, o] - zero[g, o]), g = i // group_size; nibble j holds output AWQ_ORDER[j].
    """
    return _checked(parts, "qweight", _awq)


def _awq(parts: Parts) -> Made:
    packed = _matrix(parts, "qweight", ("I32",))
    zeros, scales = _matrix(parts, "qzeros", ("I32",)), _matrix(parts, "scales", _FLOATS)
    version, bits = (
        parts.config.get("version", "gemm"),
        parts.config.get("bits", parts.config.get("w_bit", 4)),
    )
    if bits != 4 or str(version).lower() != "gemm":
        raise _Unfit(
            f"is AWQ of {str(bits)[:20]} bits, version {str(version)[:20]}; 4 bits in the version gemm are read, the "
            "package autoawq reads the others"
        )
    (inner, columns), groups = packed.shape, scales.shape[0]
    out = 8 * columns
    if scales.shape[1] != out or zeros.shape != (groups, columns) or inner % groups:
        raise _Unfit(
            f"has shape {packed.shape}, its qzeros {zeros.shape} and its scales {scales.shape}: no AWQ"
        )
    names = parts.present("qweight", "qzeros", "scales")

    def read(rows: int | None) -> Array:
        words = None if rows is None else -(-rows // 8)
        raw, zero_words, scale = (codes(parts.checkpoint, name) for name in names)
        values = _awq_codes(raw[:, :words])[:, :rows].astype(np.float32)  # (in, out)
        zero = _awq_codes(zero_words[:, :words])[:, :rows].astype(np.float32)
        size = inner // groups
        with np.errstate(all="ignore"):
            values -= np.repeat(zero, size, axis=0)
            values *= np.repeat(scale[:, :rows].astype(np.float32), size, axis=0)
        return np.ascontiguousarray(values.T)

    return Made(_as(packed, (out, inner), "AWQ, 4 bits"), _whole(names), read)


def _awq_codes(words: Array) -> Array:
    """(n, out/8) numbers -> (n, out) codes in the order of the outputs."""
    nibbles = unpacked(np.ascontiguousarray(words), 4, 1).reshape(words.shape[0], -1, 8)
    out = np.empty_like(nibbles)
    out[:, :, AWQ_ORDER] = nibbles
    return out.reshape(words.shape[0], -1)


# ---- compressed-tensors


def compressed_tensors(parts: Parts) -> Made:
    """compressed-tensors, "pack-quantized": weight_packed (out, in/n), weight_scale (out, groups), weight_shape.

    weight[o, i] = scale[o, g] * (code[o, i] - 2^(bits-1)), lowest bits first along the inputs; symmetric only.
    """
    return _checked(parts, "weight_packed", _compressed)


def _compressed(parts: Parts) -> Made:
    packed = parts.info("weight_packed")
    assert packed is not None
    instead = "the package compressed-tensors reads it"
    if packed.dtype != "I32":
        raise _Unfit(
            f"is packed as {packed.dtype} (nvfp4 or another kind); only whole numbers in I32 are read, {instead}"
        )
    packed = _matrix(parts, "weight_packed", ("I32",))
    for beside in ("weight_zero_point", "weight_g_idx", "weight_global_scale"):
        if parts.info(beside) is not None:
            raise _Unfit(f"has a {beside} beside it, which is not read; {instead}")
    scale = _matrix(parts, "weight_scale", _FLOATS)
    shape = parts.info("weight_shape")
    if shape is None or math.prod(shape.shape) != 2:
        raise _Unfit("has no weight_shape beside it")
    bits = _compressed_bits(parts.config)
    if bits is None:
        raise _Unfit(
            "is packed, and the config does not say by how many bits (quantization_config.config_groups)"
        )
    if bits not in (4, 8):
        raise _Unfit(f"is packed by {bits} bits; 4 and 8 are read, {instead}")
    n, out = 32 // bits, packed.shape[0]
    inner = packed.shape[1] * n
    if scale.shape[0] != out or inner % scale.shape[1]:
        raise _Unfit(f"of shape {packed.shape} has a weight_scale of shape {scale.shape}")
    packed_name, scale_name, shape_name = (
        parts.name(last) for last in ("weight_packed", "weight_scale", "weight_shape")
    )

    def read(rows: int | None) -> Array:
        true = [int(side) for side in codes(parts.checkpoint, shape_name).reshape(-1)]
        if true != [out, inner]:
            parts.fail(
                "weight_shape", f"says {true}, and what is packed has {[out, inner]}: padding is not read"
            )
        values = unpacked(codes(parts.checkpoint, packed_name, rows), bits, 1).astype(np.float32)
        values -= np.float32(2 ** (bits - 1))
        scales = codes(parts.checkpoint, scale_name, rows).astype(np.float32)
        with np.errstate(all="ignore"):
            values *= np.repeat(scales, inner // scale.shape[1], axis=1)
        return values

    def needs(rows: int | None) -> list[Need]:
        return [(packed_name, rows), (scale_name, rows), (shape_name, None)]

    return Made(_as(packed, (out, inner), f"compressed-tensors, {bits} bits"), needs, read)


def _compressed_bits(config: Mapping[str, Any]) -> int | None:
    """The bits of the weights, where all groups of the config agree."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    bits = {w.get("num_bits") for w in weights if isinstance(w, Mapping) and type(w.get("num_bits")) is int}
    return bits.pop() if len(bits) == 1 else None


# ---- bitsandbytes, 4 bits


def bitsandbytes_4bit(parts: Parts) -> Made:
    """bitsandbytes' nf4 and fp4: two codes in a byte, the first in its high half, and one scale for each block.

    weight[i] = quant_map[code[i]] * absmax[i // blocksize] over the flat weight; absmax may itself be quantised:
    nested_quant_map[absmax] * nested_absmax[block // nested_blocksize] + nested_offset.
    """
    return _checked(parts, "weight", _bitsandbytes)


def _bitsandbytes(parts: Parts) -> Made:
    packed, state = parts.info("weight"), parts.quant_state()
    assert packed is not None
    assert state is not None
    described = parts.checkpoint.tensors[state]
    if described.dtype != "U8" or len(described.shape) != 1 or described.nbytes > MAX_STATE_BYTES:
        raise _Unfit(f"has a description of type {described.dtype} and shape {described.shape}")
    try:
        said = json.loads(codes(parts.checkpoint, state).tobytes())
        shape = tuple(said["shape"])
        block = said["blocksize"]
        nested = said.get("nested_blocksize")
        shift = float(said.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise _Unfit("has a description that is not bitsandbytes' JSON") from None
    sides = [*shape, block, *([] if nested is None else [nested])]
    if len(shape) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in sides):
        raise _Unfit(f"is described with the shape {str(shape)[:60]} and blocks of {str(block)[:20]}")
    count = math.prod(shape)
    if len(packed.shape) not in (1, 2):
        raise _Unfit(f"has shape {packed.shape}; codes in 4 bits lie in one column")
    if math.prod(packed.shape) != -(-count // 2) or packed.shape[0] != math.prod(packed.shape):
        raise _Unfit(f"has shape {packed.shape}, and {shape} in 4 bits takes {-(-count // 2)} bytes")
    blocks = -(-count // block)
    _vector(parts, "weight.quant_map", 16)
    absmax = _vector(parts, "weight.absmax", blocks)
    if nested is not None:
        _vector(parts, "weight.nested_quant_map", 256)
        _vector(parts, "weight.nested_absmax", -(-blocks // nested))
    if (absmax.dtype == "U8") != (nested is not None):
        raise _Unfit(f"has scales of type {absmax.dtype}, and its description says the opposite")
    inner = shape[1]

    def read(rows: int | None) -> Array:
        n = count if rows is None else min(rows, shape[0]) * inner
        raw = codes(parts.checkpoint, parts.name("weight"), -(-n // 2)).reshape(-1)
        nibbles = np.stack([raw >> 4, raw & 15], axis=1).reshape(-1)[:n]
        values = codes(parts.checkpoint, parts.name("weight.quant_map")).astype(np.float32)[nibbles]
        scales = _absmax(parts, -(-n // block), nested, shift)
        with np.errstate(all="ignore"):
            whole = n // block * block
            values[:whole].reshape(-1, block)[...] *= scales[: n // block, None]
            values[whole:] *= scales[n // block :]
        return values.reshape(-1, inner)

    def needs(rows: int | None) -> list[Need]:
        n = count if rows is None else min(rows, shape[0]) * inner
        beside: list[Need] = [(name, None) for name in parts.under("weight")]
        return [(parts.name("weight"), -(-n // 2)), *beside]

    kind = state.rpartition("__")[2]
    return Made(_as(packed, (shape[0], inner), f"bitsandbytes {kind}"), needs, read)


def _vector(parts: Parts, last: str, length: int) -> TensorInfo:
    info = parts.info(last)
    if info is None or math.prod(info.shape) != length or len(info.shape) != 1:
        found = "none" if info is None else f"one of shape {info.shape}"
        raise _Unfit(f"needs a {last} of {length} numbers, and has {found}")
    return info


def _absmax(parts: Parts, blocks: int, nested: int | None, shift: float) -> Array:
    """The first `blocks` scales as float32."""
    stored = codes(parts.checkpoint, parts.name("weight.absmax"))[:blocks]
    if nested is None:
        return stored.astype(np.float32)
    table = codes(parts.checkpoint, parts.name("weight.nested_quant_map")).astype(np.float32)
    outer = codes(parts.checkpoint, parts.name("weight.nested_absmax")).astype(np.float32)
    with np.errstate(all="ignore"):
        out: Array = table[stored] * outer[np.arange(blocks) // nested] + np.float32(shift)
    return out


def _as(packed: TensorInfo, shape: tuple[int, int], dtype: str) -> TensorInfo:
    return replace(packed, shape=shape, dtype=dtype)


def _whole(names: list[str]) -> Any:
    """Needs of a kind that is packed along its inputs: every row of the weight is in all of the file's rows."""
    return lambda rows: [(name, None) for name in names]
