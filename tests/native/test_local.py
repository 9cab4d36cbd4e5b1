"""Element-wise work of the native engine (arith.c) against numpy."""

import numpy as np
import numpy.typing as npt
import pytest

from ucc_hetero.native.libraries import ffi, lib
from ucc_hetero.types import DTYPES, OPS

NUMPY_OPS = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "LAND": np.logical_and,
    "LOR": np.logical_or, "LXOR": np.logical_xor, "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip
INTS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
CASES = [
    *((dtype, op) for dtype in INTS for op in NUMPY_OPS),
    *((dtype, op) for dtype in ("float16", "float32", "float64") for op in ("SUM", "PROD", "MAX", "MIN")),
    *((dtype, op) for dtype in ("complex64", "complex128") for op in ("SUM", "PROD")),
]


def fresh(dtype: str, n: int, rng: np.random.Generator) -> npt.NDArray[np.generic]:
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, n, dtype=kind, endpoint=True)
    values = rng.standard_normal(n)
    return (values + 1j * rng.standard_normal(n)).astype(kind) if kind.kind == "c" else values.astype(kind)


@pytest.mark.parametrize(("dtype", "op"), CASES)
@pytest.mark.parametrize("n", [0, 1, 1023])
def test_combine_is_numpys(dtype: str, op: str, n: int) -> None:
    rng = np.random.default_rng()
    src, dst = fresh(dtype, n, rng), fresh(dtype, n, rng)
    with np.errstate(over="ignore"):
        want = NUMPY_OPS[op](dst, src).astype(dtype)
    code = DTYPES[dtype].code
    assert lib.ucch_combine(OPS[op].code, code, ffi.from_buffer(src), ffi.from_buffer(dst), n) == 0
    if dtype.startswith("complex"):
        # The compiler and numpy may fuse the multiplications of a complex product differently.
        np.testing.assert_allclose(dst, want, rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)
    else:
        np.testing.assert_array_equal(dst, want)


@pytest.mark.parametrize("dtype", sorted({dtype for dtype, _ in CASES}))
def test_elements_may_begin_anywhere(dtype: str) -> None:
    """MPI takes any address; whether the compiler was told so shows under sanitizers."""
    n, size = 1023, np.dtype(dtype).itemsize
    rng = np.random.default_rng()
    src, dst = (np.frombuffer(bytearray(n * size + 1), np.uint8)[1:] for _ in range(2))
    src.view(dtype)[:], dst.view(dtype)[:] = fresh(dtype, n, rng), fresh(dtype, n, rng)
    with np.errstate(over="ignore"):
        want = np.add(dst.view(dtype), src.view(dtype))
    code = DTYPES[dtype].code
    assert lib.ucch_combine(OPS["SUM"].code, code, ffi.from_buffer(src), ffi.from_buffer(dst), n) == 0
    np.testing.assert_array_equal(dst.view(dtype), want)


@pytest.mark.parametrize(("dtype", "op"), [("float32", "BAND"), ("complex64", "MAX"), ("float16", "LXOR")])
def test_combine_refuses_what_it_lacks(dtype: str, op: str) -> None:
    data = np.ones(4, dtype)
    pointer = ffi.from_buffer(data)
    assert lib.ucch_combine(OPS[op].code, DTYPES[dtype].code, pointer, pointer, 4) == lib.UCCH_FAIL_ARGUMENT


def cast(values: npt.NDArray[np.generic], source: str, target: str, into: str) -> npt.NDArray[np.generic]:
    out = np.full(values.size, 7, into)
    codes = DTYPES[source].code, DTYPES[target].code
    assert lib.ucch_cast(*codes, ffi.from_buffer(values), ffi.from_buffer(out), values.size) == 0
    return out


def test_every_float16_survives_the_way_to_float32_and_back() -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    floats = cast(halves, "float16", "float32", "float32")
    np.testing.assert_array_equal(floats, halves.astype(np.float32))
    back = cast(floats, "float32", "float16", "float16")
    np.testing.assert_array_equal(back, halves)


def test_float32_rounds_to_the_nearest_float16() -> None:
    rng = np.random.default_rng()
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = np.array([65504, 65519.996, 65520, 2**-24, 2**-25, 2**-25 * 1.0001, 6.1e-5, 0, -0.0, np.inf], np.float32)
    values = np.concatenate([bits.view(np.float32), edges, -edges])
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(cast(values, "float32", "float16", "float16"), want)


def test_bfloat16_rounds_to_even() -> None:
    rng = np.random.default_rng()
    values = rng.standard_normal(100_000).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    want = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(cast(values, "float32", "bfloat16", "uint16"), want)
    widened = cast(want, "bfloat16", "float32", "float32")
    np.testing.assert_array_equal(widened.view(np.uint32), want.astype(np.uint32) << 16)


@pytest.mark.parametrize("dtype", [*INTS, "float16", "float32", "float64", "complex64", "complex128"])
def test_scale_divides_and_truncates(dtype: str) -> None:
    data = fresh(dtype, 501, np.random.default_rng())
    if np.dtype(dtype).kind in "iu":
        # Towards zero, unlike numpy's floor division.
        want = np.array([abs(int(v)) // 3 * (1 if v >= 0 else -1) for v in data], dtype)
    else:
        want = (data / np.array(3, data.real.dtype)).astype(dtype)
    assert lib.ucch_scale(DTYPES[dtype].code, ffi.from_buffer(data), data.size, 3.0) == 0
    if np.dtype(dtype).kind == "c":
        np.testing.assert_allclose(data, want, rtol=4 * np.finfo(dtype).eps)
    else:
        np.testing.assert_array_equal(data, want)
