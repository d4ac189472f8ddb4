"""How an example is checked against its spec; `test_spec.py` is about writing specs."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxtyping import AbstractDtype, Complex, Float, Inexact, Int, Integer, Num, Real, Shaped, UInt

from jaxbatch._errors import SpecError
from jaxbatch._spec import Spec, spec


class Half(AbstractDtype):
    dtypes = ("bfloat16", "float16")  # pyright: ignore[reportAssignmentType]  # jaxtyping takes any sequence


def whole(*trees: Any, names: str = "xyzw") -> Spec:
    return Spec.from_trees(trees, tuple(names[: len(trees)]))


def check(tree: Any, value: Any):
    """Return the only leaf of a checked one-argument example."""
    (leaf,), _ = whole(tree).check((value,))
    return leaf


def same(a: np.ndarray, b: np.ndarray) -> None:
    assert type(a) is np.ndarray
    assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), (a, b)


f32, f16, bf16 = (functools.partial(np.array, dtype=each) for each in ("float32", "float16", jnp.bfloat16))
i32, i8, i4 = (functools.partial(np.array, dtype=each) for each in ("int32", "int8", jnp.int4))
u64, u32, u8 = (functools.partial(np.array, dtype=each) for each in ("uint64", "uint32", "uint8"))
c64 = functools.partial(np.array, dtype="complex64")

# (shape, dtype, value, what the leaf becomes)
CASTS = (
    ("n", "int32", np.array([1, 2]), i32([1, 2])),
    ("n", "int32", np.array([-(2**31), 2**31 - 1]), i32([-(2**31), 2**31 - 1])),
    ("n", "int32", u64([7]), i32([7])),
    ("n", "int32", np.array([7], ">i4"), i32([7])),
    ("n", "uint8", [0, 255], u8([0, 255])),
    ("n", "int4", [-8, 7], i4([-8, 7])),
    ("n", "int32", i4([-8, 7]), i32([-8, 7])),
    ("n", "int64", np.array([5]), i32([5])),
    ("n", "int32", [True, False], i32([1, 0])),
    ("n", "float32", np.array([True]), f32([1])),
    ("n", "float32", [1, 2**24, -(2**24)], f32([1, 2**24, -(2**24)])),
    ("n", "float32", np.array([2**62, -(2**63)]), f32([2**62, -(2**63)])),
    ("n", "bfloat16", [256, 257.5], bf16([256, 258])),
    ("n", "float32", np.array([1.1, np.nan, np.inf, -np.inf]), f32([1.1, np.nan, np.inf, -np.inf])),
    ("n", "float32", np.array([3.4028235e38, 1e-300]), f32([3.4028235e38, 0])),
    ("n", "float32", f16([1.5]), f32([1.5])),
    ("n", "float32", bf16([1.5]), f32([1.5])),
    ("n", "float16", bf16([1.5]), f16([1.5])),
    ("n", "float8_e4m3fn", [448.0, np.nan], np.array([448.0, np.nan], jnp.float8_e4m3fn)),
    ("n", "float64", np.array([1.5]), f32([1.5])),
    ("n", "complex64", np.array([1.5, 2]), c64([1.5, 2])),
    ("n", "complex64", [1, 2**24], c64([1, 2**24])),
    ("n", "complex64", np.array([1 + 2j]), c64([1 + 2j])),
    ("n", "bool", [True, False], np.array([True, False])),
    ("", "float32", 1.0, f32(1)),
    ("", "float32", 1, f32(1)),
    ("", "float32", True, f32(1)),
    ("", "float32", np.float64(1), f32(1)),
    ("", "float32", np.int32(1), f32(1)),
    ("", "float32", jnp.float32(1), f32(1)),
    ("", "int32", 3, i32(3)),
    ("n", "int32", [], i32([])),
    ("n m", "int32", [[], []], np.zeros((2, 0), "int32")),
    ("n m", "float32", [[1, 2.5], [3, 4]], f32([[1, 2.5], [3, 4]])),
    ("n", "float32", (1, 2), f32([1, 2])),
    ("n", "float32", [np.float32(1), jnp.float32(2)], f32([1, 2])),
    ("n", Float, np.array([1.1]), f32([1.1])),
    ("n", Float, f16([1.5]), f16([1.5])),
    ("n", Float, bf16([1.5]), bf16([1.5])),
    ("n", Float, [1, 2], f32([1, 2])),
    ("n", Float, [True], f32([1])),
    ("n", Float, [], f32([])),
    ("n", Int, [], i32([])),
    ("n", Int, np.array([1]), i32([1])),
    ("n", Int, i8([1]), i8([1])),
    ("n", Int, u8([1]), i32([1])),
    ("n", Int, [True], i32([1])),
    ("n", UInt, [3], u32([3])),
    ("n", UInt, u8([3]), u8([3])),
    ("n", Integer, u64([3]), u32([3])),
    ("n", Num, [True], i32([1])),
    ("n", Num, np.array([1j]), c64([1j])),
    ("n", Real, [1.5], f32([1.5])),
    ("n", Inexact, [1], f32([1])),
    ("n", Complex, [1], c64([1])),
    ("n", Complex, [1.5], c64([1.5])),
    ("n", Shaped, [True], np.array([True])),
    ("n", Shaped, [], f32([])),
    ("n", Half, bf16([1.5]), bf16([1.5])),
    ("n", Half, [1.5], bf16([1.5])),
)


@pytest.mark.parametrize(("shape", "dtype", "value", "leaf"), CASTS)
def test_safe_casts_happen(shape, dtype, value, leaf):
    same(check(spec(shape, dtype), value), leaf)


# (shape, dtype, value, the message)
REFUSED = (
    ("n", "int32", np.array([1, 2**31]), "`x` holds 2147483648, which does not fit int32 (-2147483648 to "),
    ("n", "int32", np.array([-(2**31) - 1]), "`x` holds -2147483649, which does not fit int32"),
    ("n", "int64", np.array([2**31]), "JAX has 64-bit types only with `jax_enable_x64`"),
    ("n", "uint8", [256], "`x` holds 256, which does not fit uint8 (0 to 255)"),
    ("n", "uint8", i8([-1]), "`x` holds -1, which does not fit uint8"),
    ("n", "int4", [8], "`x` holds 8, which does not fit int4 (-8 to 7)"),
    ("n", Int, [2**40], "`x` holds 1099511627776, which does not fit int32"),
    ("n", Shaped, np.array([2**40]), "which does not fit int32"),
    ("n", "int32", [2**70], "`x` holds a Python integer that does not fit 64 bits"),
    ("n", "float32", [2**70], "`x` holds a Python integer that does not fit 64 bits"),
    ("n", "float32", [2**63 + 1, -1], "`x` holds Python integers that do not fit one 64-bit integer type"),
    ("n", "float32", [2**24 + 1], "`x` holds 16777217, which float32 cannot represent exactly. Pass floats"),
    ("n", "float32", [2**63 - 1], "`x` holds 9223372036854775807, which float32 cannot represent"),
    ("n", "float32", u64([2**64 - 1]), "`x` holds 18446744073709551615, which float32"),
    ("n", "bfloat16", i32([257]), "`x` holds 257, which bfloat16 cannot represent exactly"),
    ("n", "float8_e4m3fn", [1024], "`x` holds 1024, which float8_e4m3fn cannot represent"),
    ("n", "complex64", [2**24 + 1], "`x` holds 16777217, which complex64 cannot represent exactly"),
    ("n", Float, [2**24 + 1], "`x` holds 16777217, which float32 cannot represent exactly"),
    ("n", "float32", np.array([0, 1e300]), "`x` holds 1e+300, which float32 (up to 3.40282e+38) cannot hold"),
    ("n", "float16", f32([-1e5]), "`x` holds -100000.0, which float16 (up to 65504) cannot hold"),
    ("n", "float8_e4m3fn", f32([np.inf]), "`x` holds inf, which float8_e4m3fn"),
    ("n", "float4_e2m1fn", f32([100]), "`x` holds 100.0, which float4_e2m1fn (up to 6) cannot hold"),
    ("n", "complex64", np.array([1e300j]), "which complex64 (up to 3.40282e+38) cannot hold"),
    (
        "n",
        "int32",
        [1.0],
        "`x` has dtype float64, expected int32: fractions would be lost; round and cast it",
    ),
    ("n", "int32", np.zeros(0), "`x` has dtype float64, expected int32"),
    ("n", "float32", [1j], "`x` has dtype complex128, expected float32: the imaginary part would be lost"),
    ("n", "int32", [1j], "the imaginary part would be lost"),
    ("n", "bool", [1], "`x` has dtype int64, expected bool: numbers other than 0 and 1 would be lost"),
    ("n", Int, [1.5], "`x` has dtype float64, expected Int. Cast it yourself, or change the spec"),
    ("n", Float, [1j], "`x` has dtype complex128, expected Float"),
    ("n", "float32", ["a"], "`x` has dtype <U1, which JAX cannot compute with"),
    ("", "float32", "text", "`x` has dtype <U4, which JAX cannot compute with"),
    ("n", "float32", np.array([None, 1]), "`x` has dtype object, which JAX cannot compute with"),
    ("n", "float32", {"a": 1}, "`x` has dtype object"),
    ("n", "int64", np.array(["2020-01-01"], "M8[D]"), "`x` has dtype datetime64[D]"),
    ("n", "float32", np.ones(2, np.longdouble), "which JAX cannot compute with"),
    ("n m", "float32", [[1, 2], [3]], "`x` is a nested list whose parts differ in shape or are no numbers"),
    ("n", "float32", np.ma.array([1.0], mask=[True]), "`x` is a NumPy masked array, and its mask"),
    ("n", "float32", None, "`x` is None. An absent key and None mean the same"),
    (
        "n",
        "float32",
        np.ones((2, 3), "float32"),
        "`x` has rank 2 (shape (2, 3)), expected rank 1 (float32[n]).",
    ),
    ("n", "float32", 1.0, "`x` has rank 0 (shape ()), expected rank 1"),
    ("", "float32", [1.0], "`x` has rank 1 (shape (1,)), expected rank 0 (float32[])"),
    ("4*h", "float32", np.ones(5), "`x` axis 0 has size 5, which is not `4*h` for any h >= 0"),
    ("n+2", "float32", np.ones(1), "`x` axis 0 has size 1, which is not `n+2` for any n >= 0"),
    ("n 64", "float32", np.ones((3, 63)), "`x` axis 1 has size 63, expected 64. Every example has this size"),
    ("n n", "float32", np.ones((2, 3)), "`x` axis 1 (dim `n`) has size 3, expected 2 for `n`, because `x`"),
)


@pytest.mark.parametrize(("shape", "dtype", "value", "message"), REFUSED)
def test_what_would_change_an_example_is_refused(shape, dtype, value, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        check(spec(shape, dtype), value)


def test_typed_keys_and_traced_values_are_refused_with_the_way_out():
    with pytest.raises(
        SpecError, match=re.escape("`x` has dtype key<fry>: typed PRNG keys cannot be padded")
    ):
        check(spec("2", "uint32"), jax.random.key(0))
    with pytest.raises(SpecError, match="`x` is traced by a JAX transformation.*use `jaxbatch.mask`"):
        jax.jit(lambda x: check(spec("n", "float32"), x))(np.ones(3, np.float32))


def test_with_64_bit_types_on_they_are_kept():
    exact, family = spec("n", "int64"), spec("n", Float)
    with jax.enable_x64(True):
        same(check(exact, [2**40]), np.array([2**40]))
        same(check(family, [1.5]), np.array([1.5]))
        same(check(spec("n", Int), np.array([2**40])), np.array([2**40]))
        same(check(family, [2**24 + 1]), np.array([2.0**24 + 1]))
        same(check(spec("n", "int32"), [1]), i32([1]))
        assert whole(exact, family).dtypes() == (np.dtype("int64"), np.dtype("float64"))
        with pytest.raises(SpecError, match="`x` holds 9007199254740993, which float64 cannot represent"):
            check(spec("n", "float64"), [2**53 + 1])
    same(check(exact, [1]), i32([1]))
    same(check(family, [1.5]), f32([1.5]))


def test_dtypes_are_known_without_an_example():
    expected = {Float: "float32", Int: "int32", UInt: "uint32", Complex: "complex64", Num: "float32"}
    expected |= {Shaped: "float32", Integer: "int32", Half: "bfloat16", "float64": "float32", "int8": "int8"}
    found = whole([spec("n", dtype) for dtype in expected]).dtypes()
    assert found == tuple(map(np.dtype, expected.values()))


def test_an_array_that_fits_is_passed_on_itself_and_never_written():
    for shape, array in (("n", f32([1, 2])), ("n m", np.ones((2, 3), "float32")), ("", f32(1)[...])):
        array.flags.writeable = False
        assert check(spec(shape, "float32"), array) is array
    ids = np.array([1, 2])
    leaf = check(spec("n", "int32"), ids)
    leaf[0] = 9
    assert ids.tolist() == [1, 2]


PAIR = {"ids": spec("n", "int32"), "mask": spec("n", "bool")}
IDS, MASK = i32([1, 2]), np.array([True, False])


class Batch(collections.UserDict): ...


SPELLINGS = (
    {"ids": IDS, "mask": MASK},
    {"mask": MASK, "ids": IDS},
    {"ids": IDS, "mask": MASK, "labels": None},
    collections.OrderedDict(mask=MASK, ids=IDS),
    Batch(mask=MASK, ids=IDS),
)


@pytest.mark.parametrize("value", SPELLINGS)
@pytest.mark.parametrize("tree", [PAIR, {**PAIR, "extra": None}, dict(reversed(PAIR.items()))])
def test_key_order_kind_of_mapping_and_none_for_absent_make_no_difference(tree, value):
    leaves, lengths = whole(tree).check((value,))
    assert leaves[0] is IDS and leaves[1] is MASK and lengths == (2,)


Point = collections.namedtuple("Point", ["a", "b"])
NESTED = [spec("n", "int32"), {"p": (spec("m", "int32"), None)}, Point(spec("", "int32"), None)]
ABSENT = "An absent key and None mean the same, and both are refused unless the spec has None there. Give it"

STRUCTURES = (
    (PAIR, {"ids": IDS}, f"`x['mask']` is missing. {ABSENT}"),
    (PAIR, {"ids": IDS, "mask": None}, f"`x['mask']` is None. {ABSENT}"),
    (PAIR, None, f"`x` is None. {ABSENT}"),
    (
        PAIR,
        {"ids": IDS, "mask": MASK, "more": 1},
        "`x['more']` is not in the spec, which has ['ids', 'mask']",
    ),
    (PAIR, [IDS, MASK], "`x` is a list of 2, expected a dict with keys ['ids', 'mask'], as in the spec"),
    (PAIR, IDS, "`x` is of type ndarray, expected a dict with keys ['ids', 'mask']"),
    ({"a": None}, {"a": 1}, "`x['a']` is of type int, but the spec has None there. Leave it out"),
    (NESTED, [IDS, {"p": (IDS, None)}], "`x` is a list of 2, expected a list of 3"),
    (NESTED, [IDS, {"p": (IDS,)}, Point(1, None)], "`x[1]['p']` is a tuple of 1, expected a tuple of 2"),
    (NESTED, [IDS, {"p": (IDS, 3)}, Point(1, None)], "`x[1]['p'][1]` is of type int, but the spec has None"),
    (NESTED, [IDS, {"p": (IDS, None)}, (1, None)], "`x[2]` is a tuple of 2, expected a Point of 2"),
    (NESTED, [IDS, {"p": (None, None)}, Point(1, None)], "`x[1]['p'][0]` is None."),
    (NESTED, [IDS, {"p": (IDS, None)}, Point(1.5, None)], "`x[2].a` has dtype float64, expected int32"),
)


@pytest.mark.parametrize(("tree", "value", "message"), STRUCTURES)
def test_a_wrong_structure_is_refused_with_the_path_to_the_difference(tree, value, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        whole(tree).check((value,))


def test_a_nested_example_is_flattened_in_the_order_of_the_spec():
    leaves, lengths = whole(NESTED, spec("m", "float32")).check(
        ([IDS, {"p": ([1, 2, 3], None)}, Point(5, None)], [1, 2, 3])
    )
    assert [leaf.tolist() for leaf in leaves] == [[1, 2], [1, 2, 3], 5, [1, 2, 3]]
    assert lengths == (2, 3)


def test_arguments_are_counted_and_must_agree_on_shared_dims():
    spec_of_two = whole({"ids": spec("n", "int32")}, spec("m 2*n-1", "float32"))
    assert spec_of_two.check(({"ids": IDS}, np.ones((5, 3)))).lengths == (2, 5)
    with pytest.raises(SpecError, match=re.escape("an example has 2 arguments (x, y), got 1.")):
        spec_of_two.check(({"ids": IDS},))
    message = (
        "`y` axis 1 (dim `n`) has size 4, expected 3 for `2*n-1`, because `x['ids']` axis 0 makes `n` 2. "
        "One name has one length within an example; make them agree, or rename one in the spec."
    )
    with pytest.raises(SpecError, match=re.escape(message)):
        spec_of_two.check(({"ids": IDS}, np.ones((5, 4))))


def test_empty_dims_have_length_0():
    assert whole(spec("n, m", "float32")).check((np.ones((0, 3)),)).lengths == (0, 3)


def test_an_example_without_arrays_is_allowed():
    assert whole(None).check((None,)) == ((), ())


# How long an example takes says nothing on a busy machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

axes = st.one_of(
    st.integers(0, 4).map(str),
    st.builds(
        lambda coefficient, name, offset: f"{coefficient}*{name}{offset:+}",
        st.integers(1, 3),
        st.sampled_from("nmk"),
        st.integers(0, 2),
    ),
)
leaves = st.tuples(
    st.lists(axes, max_size=3), st.sampled_from(["float32", "int8", "bool", "bfloat16", "int64"])
)


@patient
@given(
    st.recursive(leaves, lambda trees: st.dictionaries(st.sampled_from("abc"), trees, max_size=3)),
    st.fixed_dictionaries({name: st.integers(0, 5) for name in "nmk"}),
)
def test_an_example_of_the_specs_own_shapes_gives_back_the_lengths(tree, lengths):
    tree = jax.tree.map(
        lambda leaf: spec(tuple(leaf[0]), leaf[1]), tree, is_leaf=lambda t: isinstance(t, tuple)
    )
    described = whole(tree, [tree])
    arrays = [np.zeros(*each) for each in zip(described.shapes(lengths), described.dtypes(), strict=True)]
    leaves, found = described.check(jax.tree.unflatten(described.treedef, arrays))
    assert all(leaf is array for leaf, array in zip(leaves, arrays, strict=True))
    assert found == tuple(lengths[dim] for dim in described.dims)


integers = st.sampled_from(["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "int4"])
floats = st.sampled_from(["float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])


@patient
@given(integers, integers | floats, st.data())
def test_an_integer_is_cast_exactly_when_no_value_changes(source, target, data):
    info = jnp.iinfo(source)
    near = [sign * 2**power + step for power in range(64) for sign in (1, -1) for step in (-1, 0, 1)]
    value = data.draw(st.sampled_from([each for each in near if int(info.min) <= each <= int(info.max)]))
    array = np.array([value]).astype(source) if abs(value) < 2**63 else np.array([value], source)
    with np.errstate(all="ignore"):
        there = array.astype(jax.dtypes.canonicalize_dtype(target))
    # Python compares integers and floats of any size exactly.
    back = float(there[0]) if jnp.issubdtype(there.dtype, np.floating) else int(there[0])
    if back == value:
        same(check(spec("n", target), array), there)
    else:
        with pytest.raises(SpecError, match=f"`x` holds {value}, which"):
            check(spec("n", target), array)
