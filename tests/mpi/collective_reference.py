"""Expected results of reductions, by numpy alone, and bounds of floating-point errors."""

import os

import numpy as np

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

#: Datatypes by their name; those that numpy lacks only where ml_dtypes is installed.
NUMPY_TYPES = {
    name: np.dtype(name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        "bool", "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
FOREIGN = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
if ml_dtypes is not None:
    NUMPY_TYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in FOREIGN}

INTEGERS = tuple(name for name in NUMPY_TYPES if "int" in name)
FLOATS = tuple(name for name in ("float16", "bfloat16", "float32", "float64") if name in NUMPY_TYPES)
COMPLEX = ("complex64", "complex128")
BITS = ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")

#: Datatype -> operations. Deliberately not taken from the package's table, which is what is tested.
OPS_OF = (
    dict.fromkeys(INTEGERS, ("SUM", "PROD", "MAX", "MIN", "AVG", *BITS))
    | dict.fromkeys(FLOATS, ("SUM", "PROD", "MAX", "MIN", "AVG"))
    | dict.fromkeys(COMPLEX, ("SUM", "PROD", "AVG"))
    | {"bool": ("SUM", "PROD", "MAX", "MIN", *BITS)}
)

#: Distance from 1 to the next number.
EPSILON = {
    "float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52,
    "complex64": 2.0**-23, "complex128": 2.0**-52,
}  # fmt: skip
#: Smallest subnormal, the smallest possible difference.
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133}

_UFUNCS = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum,
    "LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor,
    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip
_BOOLEAN = {"SUM": "LOR", "PROD": "LAND", "MAX": "LOR", "MIN": "LAND"}


def operands(rng, name, count, op):
    """Random elements: any bits if they are only moved, otherwise numbers that can be reduced."""
    dtype = NUMPY_TYPES[name]
    if name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if op is None:
        return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    if name in INTEGERS:
        few = op in (*BITS, "AVG")  # zeros for logical operations; sums that AVG can divide without an overflow
        info = np.iinfo(dtype)
        low, high = (0 if info.min == 0 else -3, 4) if few else (info.min, info.max)
        return rng.integers(low, high, count, dtype=dtype)
    values = rng.uniform(0.6, 1.4, count) * rng.choice([-1.0, 1.0], count)
    if op != "PROD":
        values *= 10.0 ** rng.integers(-2, 3, count)
    if name in COMPLEX:
        return (values * np.exp(1j * rng.uniform(0, 6.28, count))).astype(dtype)
    return values.astype(dtype)


def reduced(op, name, values, ranks):
    """The reduction of ``values``, and the bound of its error (None: must be equal). AVG divides by ``ranks``."""
    if len(values) == 1:  # as in MPI the operation is not applied to one operand: LAND of a single 3 is 3
        return values[0], None
    if name == "bool":
        return _UFUNCS[_BOOLEAN.get(op, op)].reduce(values).astype(bool), None
    if name in INTEGERS:
        dtype = NUMPY_TYPES[name]
        if op == "AVG":
            total = np.add.reduce(values, dtype=dtype).astype(object)
            return np.array([int(abs(n) // ranks) * (1 if n >= 0 else -1) for n in total], dtype), None
        return _UFUNCS[op].reduce(values).astype(dtype), None
    wide = [v.astype(np.complex128 if name in COMPLEX else np.float64) for v in values]
    if op in ("MAX", "MIN"):
        return _UFUNCS[op].reduce(wide), None
    sizes = np.add.reduce([np.abs(v) for v in wide])
    if op == "PROD":
        total = np.multiply.reduce(wide)
        sizes = np.abs(total) * (3 if name in COMPLEX else 1)
    else:
        total = np.add.reduce(wide) / (ranks if op == "AVG" else 1)
        sizes = sizes / (ranks if op == "AVG" else 1)
    steps = len(values) + (op == "AVG")
    # In float32, rounded once; real devices and their libraries round at each step.
    if name in ("float16", "bfloat16") and "CASES_HIP" not in os.environ:
        bound = steps * EPSILON["float32"] * sizes + EPSILON[name] * np.abs(total)
    else:
        bound = steps * EPSILON[name] * sizes
    return total, bound + TINY.get(name, 0.0)


def differing(got, want, bound):
    if bound is None:
        if got.dtype == want.dtype:
            size = max(got.dtype.itemsize, 1)
            one, two = (a.view(np.uint8).reshape(-1, size) for a in (got, want))
            return np.flatnonzero((one != two).any(axis=1))
        return np.flatnonzero(got.astype(want.dtype) != want)
    return np.flatnonzero(~(np.abs(got.astype(want.dtype) - want) <= bound))
