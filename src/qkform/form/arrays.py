"""The few array operations that differ between numpy and torch and that the array API does not name."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj, is_torch_array

from qkform.errors import FormError

Array = Any  # a numpy array or a torch tensor; the functions here return the kind they are given


def checked(name: str, x: Array, ndim: int, shape_in_words: str) -> Array:
    """`x` without its gradient history, or a FormError that names the argument."""
    if not is_array_api_obj(x):
        raise FormError(f"{name} is a {type(x).__name__}; pass a numpy or torch array {shape_in_words}")
    if x.ndim != ndim or 0 in x.shape:
        raise FormError(f"{name} has shape {tuple(x.shape)}; expected {shape_in_words}, no side of length 0")
    if not is_real_floating(x):
        raise FormError(f"{name} holds {x.dtype}; expected real floating-point numbers")
    if is_torch_array(x):
        if x.device.type == "meta" or str(x.layout) != "torch.strided":
            raise FormError(f"{name} is a torch tensor without dense values ({x.device}, {x.layout})")
        return x.detach()
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":  # another byte order, long double, a subclass
        wide = np.float64 if x.dtype.itemsize > 8 else x.dtype.newbyteorder("=")
        return np.asarray(x, dtype=wide)
    return x


def is_real_floating(x: Array) -> bool:
    if is_torch_array(x):
        return bool(x.dtype.is_floating_point)
    if isinstance(x, np.ndarray):  # ml_dtypes types are no np.floating: ask the type itself
        return np.issubdtype(x.dtype, np.floating) or str(x.dtype) == "bfloat16"
    return bool(array_namespace(x).isdtype(x.dtype, "real floating"))


def working_dtype(*arrays: Array) -> Any:
    """float64 if any input is, else float32: products run in the input's precision, at least float32."""
    xp = array_namespace(*arrays)
    return xp.float64 if any(a.dtype == xp.float64 for a in arrays) else xp.float32


def to(x: Array, dtype: Any) -> Array:
    """`x` in `dtype`; no copy where it already is."""
    return array_namespace(x).astype(x, dtype, copy=False)


def double(x: Array) -> Array:
    return to(x, array_namespace(x).float64)


def runs_along_columns(x: Array) -> bool:
    """True where memory runs down the first axis of the matrix `x`, as in a stored torch Linear weight."""
    if isinstance(x, np.ndarray):
        return bool(x.flags.f_contiguous and not x.flags.c_contiguous)
    if is_torch_array(x):
        return not x.is_contiguous() and x.mT.is_contiguous()
    return False


def quadratic_rows(x: Array, gram: Array) -> Array:
    """x_i G x_i^T for every row i: (d,) float64, from x (d, k) and a symmetric G (k, k)."""
    xp = array_namespace(x)
    gram = to(gram, x.dtype)
    if runs_along_columns(x):
        x = x.T  # (k, d), contiguous: the products below then stream through memory
        product = gram @ x
        axis = 0
    else:
        product = x @ gram
        axis = 1
    product *= x
    return xp.sum(product, axis=axis, dtype=xp.float64)


def energy(x: Array) -> float:
    """||x||^2 of a matrix in its own precision, in one pass along memory; inf where it overflows."""
    xp = array_namespace(x)
    flat = xp.reshape(x.T if runs_along_columns(x) else x, (-1,))
    return float(xp.linalg.vecdot(flat, flat))


def scaled(x: Array, exponent: int) -> Array:
    """x times 2**exponent, exact unless the result leaves the range of its type."""
    half = exponent // 2  # in two steps, since 2**140 is no float32
    return x * math.ldexp(1.0, half) * math.ldexp(1.0, exponent - half)


def overflow_ignored() -> AbstractContextManager[Any]:
    """numpy warns of overflow where torch does not; the caller looks at the result itself."""
    return np.errstate(over="ignore", invalid="ignore")


def like(values: list[float] | np.ndarray, x: Array) -> Array:
    """Python numbers as a float64 array of the kind, and on the device, of `x`."""
    xp = array_namespace(x)
    return xp.asarray(values, dtype=xp.float64, device=device(x))
