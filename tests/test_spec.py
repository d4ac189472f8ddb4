"""How specs are written and read from annotations; `test_spec_check.py` is about examples."""

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, Integer, Key, PyTree, Shaped, UInt8

from jaxbatch._errors import SpecError
from jaxbatch._spec import ArraySpec, Axis, DtypeFamily, Spec, argument_names, shared_dims, spec

if TYPE_CHECKING:
    from somewhere import Unknown  # pyright: ignore[reportMissingImports]  # the case under test

N, D = Axis(1, "n", 0), Axis(1, "d", 0)

SHAPES = (
    ("", ()),
    ((), ()),
    ("n", (N,)),
    (" n ", (N,)),
    ("n, 64", (N, Axis(0, None, 64))),
    ("n 64", (N, Axis(0, None, 64))),
    ("n,64,", (N, Axis(0, None, 64))),
    ("n,d n", (N, D, N)),
    (("n", 64, "2*n-1"), (N, Axis(0, None, 64), Axis(2, "n", -1))),
    ("4*h, 4*w, 3", (Axis(4, "h", 0), Axis(4, "w", 0), Axis(0, None, 3))),
    ("n+1 1+n n-2 n+n 3+4 0", (Axis(1, "n", 1),) * 2 + (Axis(1, "n", -2), Axis(2, "n", 0), 7, 0)),
    ("batch_size x1 größe", tuple(Axis(1, name, 0) for name in ("batch_size", "x1", "größe"))),
)


@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_a_shape_is_read_as_these_axes(shape, axes):
    assert spec(shape, "float32").axes == tuple(Axis(0, None, a) if isinstance(a, int) else a for a in axes)


BAD_SHAPES = (
    ("n,,m", "an entry between two commas is missing"),
    (", n", "an entry between two commas is missing"),
    ("n + 1", "`+` is not a size. Supported are names (`n`), numbers (`64`) and linear expressions"),
    ("2n", "`2n` is not a size"),
    ("n*m", "`n*m` is not a size"),
    ("n*4", "`n*4` is not a size"),
    ("n//2", "`n//2` is not a size"),
    ("n+m", "`n+m` combines two dims"),
    ("...", "`...` is not a size"),
    ("*b", "`*b` is not a size"),
    ("#n", "`#n` is not a size"),
    ("_", "`_` cannot name a dim"),
    ("rows", "`rows` cannot name a dim"),
    ("max", "`max` cannot name a dim"),
    ("(n)", "`(n)` is not a size"),
    ("-1", "`-1` does not grow with its dim, or is negative"),
    ("8-n", "`8-n` does not grow with its dim"),
    ("n-n", "`n-n` does not grow with its dim"),
    (("n", True), "an entry is neither a string nor an integer"),
    (("n", ""), "`` is not a size"),
)


@pytest.mark.parametrize(("shape", "message"), BAD_SHAPES)
def test_a_bad_shape_says_what_is_supported(shape, message):
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        spec(shape, "float32")
    assert str(caught.value).startswith(f"spec({shape!r}, 'float32'): ")


def test_a_bare_number_is_no_shape():
    with pytest.raises(SpecError, match=r"spec\(3, 'float32'\): the shape is neither a string nor a tuple"):
        inspect.unwrap(spec)(3, "float32")  # without the type check of the tests


DTYPES = (
    ("float32", "float32"),
    (jnp.bfloat16, "bfloat16"),
    ("bfloat16", "bfloat16"),
    (bool, "bool"),
    (np.dtype(">i4"), "int32"),
    (jnp.int4, "int4"),
    ("int64", "int64"),
    (float, "float64"),
)


@pytest.mark.parametrize(("dtype", "name"), DTYPES)
def test_a_dtype_is_whatever_numpy_or_jax_takes_for_one(dtype, name):
    found = spec("n", dtype).dtype
    assert isinstance(found, np.dtype) and found == np.dtype(name) and found.isnative


@pytest.mark.parametrize("dtype", [None, "nope", object, "U3", "M8[s]", "longdouble", "V4", 3])
def test_a_dtype_that_jax_does_not_have_is_refused(dtype):
    with pytest.raises(SpecError, match="is not a dtype that JAX computes with"):
        spec("n", dtype)


def test_typed_prng_keys_are_refused_with_the_way_out():
    with pytest.raises(
        SpecError, match=re.escape('Pass raw key data, jax.random.key_data(key), with spec "2", "uint32"')
    ):
        spec("", jax.random.key(0).dtype)


# How long an example takes says nothing on a busy machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

axes = st.one_of(
    st.integers(0, 9).map(str),
    st.builds(
        lambda coefficient, name, offset: f"{coefficient}*{name}{offset:+}",
        st.integers(1, 4),
        st.sampled_from("nmk"),
        st.integers(-3, 3),
    ),
)


@patient
@given(st.lists(axes, max_size=4), st.sampled_from(["float32", "int8", "bfloat16"]))
def test_the_repr_of_a_spec_builds_an_equal_one(shape, dtype):
    array_spec = spec(", ".join(shape), dtype)
    assert eval(repr(array_spec)) == array_spec
    assert hash(eval(repr(array_spec))) == hash(array_spec)
    assert spec(tuple(shape), dtype) == array_spec


@patient
@given(st.integers(1, 5), st.integers(-4, 4), st.integers(0, 50))
def test_solve_undoes_size_and_refuses_every_size_between(coefficient, offset, length):
    axis = Axis(coefficient, "n", offset)
    size = axis.size({"n": length})
    assert size == coefficient * length + offset
    assert axis.solve(size) == length
    for step in range(1, coefficient):
        with pytest.raises(SpecError, match=r"which is not `.*` for any n >= 0"):
            axis.solve(size + step)
    with pytest.raises(SpecError, match="for any n >= 0"):
        axis.solve(offset - 1)


def test_shapes_may_be_symbolic():
    n, m = jax.export.symbolic_shape("n, m")
    whole = Spec.from_trees(({"a": spec("4*n, 2*m-1, 3", "int8")}, spec("n", "int8")), ("x", "y"))
    assert whole.shapes({"n": n, "m": m}) == ((4 * n, 2 * m - 1, 3), (n,))
    assert whole.shapes({"n": 2, "m": 5}) == ((8, 9, 3), (2,))


def test_a_whole_spec_names_paths_and_dims_in_order():
    tree = {"mask": spec("n", "bool"), "ids": [spec("m", "int32"), (spec("n+1", "int32"),)], "none": None}
    whole = Spec.from_trees((tree, spec("k, n", "float32")), ("x", "y"))
    assert whole.paths == ("x['ids'][0]", "x['ids'][1][0]", "x['mask']", "y")
    assert whole.dims == ("m", "n", "k")
    assert whole.treedef == jax.tree.structure((tree, 0))
    assert repr(whole) == (
        "Spec(x['ids'][0]: int32[m], x['ids'][1][0]: int32[n+1], x['mask']: bool[n], y: float32[k, n])"
    )
    again = Spec.from_trees((dict(reversed(tree.items())), spec("k n", "float32")), ("x", "y"))
    assert again == whole and hash(again) == hash(whole)
    assert whole != Spec.from_trees((tree, spec("k, n", "float16")), ("x", "y"))


def test_a_tree_of_anything_but_specs_is_refused_with_its_path():
    with pytest.raises(SpecError, match=re.escape("the spec of `x['a'][0]` is 'n'. Use jaxbatch.spec(")):
        Spec.from_trees(({"a": ("n", "float32")},), ("x",))


SCALE = jnp.ones(())


def one(params, x: Float[Array, "n 4*d"], scale: Float32[Array, ""] = SCALE): ...


def several(x: Int[Array, "n"], y: "Bool[Array, 'n-1 width=3']", params: Any, *rest: UInt8[Array, "k"]): ...


class Callable:
    def __call__(self, params, x: BFloat16[Array, "n"]): ...

    def method(self, x: Integer[Array, "n"]): ...


class Module(eqx.Module):
    weight: Array

    def __call__(self, x: Float32[Array, "n"]): ...


FLOAT = spec("n, 4*d", Float)

ANNOTATED = (
    (one, (False, True), {"x": FLOAT}),
    (one, (False, True, True), {"x": FLOAT, "scale": spec("", "float32")}),
    (jax.jit(one), (False, True), {"x": FLOAT}),
    (functools.partial(one, {}), (True,), {"x": FLOAT}),
    (functools.partial(one, scale=SCALE), (False, True), {"x": FLOAT}),
    (functools.partial(jax.jit(functools.partial(one, {}))), (True,), {"x": FLOAT}),
    (several, (True, True), {"x": spec("n", Int), "y": spec("n-1, 3", "bool")}),
    (several, (False, False, False, True), {"rest[0]": spec("k", "uint8")}),
    (Callable(), (False, True), {"x": spec("n", "bfloat16")}),
    (Callable().method, (True,), {"x": spec("n", Integer)}),
    (Module(jnp.ones(3)), (True,), {"x": spec("n", "float32")}),
    (one, (False, False), {}),
)


@pytest.mark.parametrize(("f", "per_example", "expected"), ANNOTATED)
def test_specs_are_read_from_annotations(f, per_example, expected):
    found = Spec.from_annotations(f, per_example)
    assert found == Spec.from_trees(tuple(expected.values()), tuple(expected))


def test_every_jaxtyping_class_is_a_dtype_or_a_family():
    for name in ("Float8e4m3fn", "Int4", "UInt64", "Complex64", "Float16"):
        assert isinstance(spec("n", getattr(jaxtyping, name)).dtype, np.dtype)
    for name in ("Float", "Int", "UInt", "Integer", "Inexact", "Complex", "Num", "Real", "Shaped"):
        found = spec("n", getattr(jaxtyping, name)).dtype
        assert isinstance(found, DtypeFamily) and str(found) == name
    assert spec("n", Bool).dtype == np.dtype("bool")


def test_a_union_of_array_types_with_one_shape_and_dtype_is_one_annotation():
    def f(x: Float[Array | np.ndarray, "n"]): ...

    def g(x: Float[Array, "n"] | Int[Array, "n"]): ...

    assert Spec.from_annotations(f, (True,)).leaves == (spec("n", Float),)
    with pytest.raises(SpecError, match="which is not one jaxtyping array; pass spec="):
        Spec.from_annotations(g, (True,))


def test_a_name_that_only_type_checkers_know_spoils_its_own_argument_alone():
    def f(x: "Int[Array, 'n']", y: "Unknown"): ...

    assert Spec.from_annotations(f, (True, False)).leaves == (spec("n", Int),)
    with pytest.raises(SpecError, match="argument `y` of `f`: has annotation 'Unknown', but .* pass spec="):
        Spec.from_annotations(f, (False, True))


def test_string_annotations_see_the_names_of_an_enclosing_function():
    from jaxtyping import UInt as Alias

    def f(x: "Alias[Array, 'n']"):
        return Alias

    assert Spec.from_annotations(f, (True,)).leaves == (spec("n", Alias),)


def annotated(annotation):
    def f(x): ...

    f.__annotations__["x"] = annotation
    return f


BAD_ANNOTATIONS = (
    (dict[str, Array], "is annotated dict[str, Array], which is not one jaxtyping array"),
    (Array, "is annotated Array, which is not one jaxtyping array"),
    (PyTree[Float[Array, "n"]], "which is not one jaxtyping array"),
    (int, "is annotated int, which is not one jaxtyping array"),
    (Float[Array, "..."], "is annotated Float[Array, '...']: `...` leaves a size open"),
    (Float[Array, "n *b"], "`*b` leaves a size open"),
    (Float[Array, "_"], "`_` leaves a size open"),
    (Float[Array, "#n"], "`#n` leaves a size open"),
    (Float[Array, "?n"], "`?n` leaves a size open"),
    (Float[Array, "{n}"], "`{n}` leaves a size open"),
    (Float[Array, "n*m"], "is annotated Float[Array, 'n*m'], but `n*m` is not a size"),
    (Float[Array, "min(n,m)"], "`min(n,m)` is not a size"),
    (Key[Array, ""], "is annotated Key: typed PRNG keys cannot be padded"),
)


@pytest.mark.parametrize(("annotation", "message"), BAD_ANNOTATIONS)
def test_other_annotations_are_refused_with_the_advice_to_pass_spec(annotation, message):
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        Spec.from_annotations(annotated(annotation), (True,))
    assert str(caught.value).startswith("argument `x` of `f`: ")
    assert "pass spec=" in str(caught.value) or "raw key data" in str(caught.value)


def test_a_missing_annotation_and_a_wrong_count_are_refused():
    with pytest.raises(SpecError, match="argument `params` of `one`: has no annotation. .*pass spec="):
        Spec.from_annotations(one, (True, True))
    with pytest.raises(SpecError, match="`one` takes 3 positional arguments, and in_axes has 4 entries"):
        Spec.from_annotations(one, (True,) * 4)
    with pytest.raises(SpecError, match=re.escape("argument `args[0]` of `dict`: has no annotation")):
        Spec.from_annotations(dict, (True,))


def test_argument_names_are_those_of_the_signature():
    assert argument_names(one, 2) == ("params", "x")
    assert argument_names(one) == ("params", "x")
    assert argument_names(several, 5) == ("x", "y", "params", "rest[0]", "rest[1]")
    assert argument_names(functools.partial(one, {})) == ("x",)
    assert argument_names(dict, 2) == ("args[0]", "args[1]")
    with pytest.raises(SpecError, match="`several` takes any number of arguments; give in_axes"):
        argument_names(several)
    with pytest.raises(SpecError, match="`dict` has no signature to read; give in_axes"):
        argument_names(dict)


def test_shared_arguments_bind_the_named_axes_of_their_annotations():
    def f(
        w: Float[Array, "d k"], x: Float[Array, "n d"], b: Float[Array, "k 2*h"], tree: dict, t: "Unknown"
    ): ...

    others = ({"a": 1}, None)
    assert shared_dims(f, (0, 2, 3, 4), (np.ones((3, 5)), np.ones((5, 8)), *others)) == {"d": 3, "k": 5}
    assert shared_dims(f, (0,), (np.ones(3),)) == {}
    assert shared_dims(f, (0, 2), (np.ones((3, 5)), np.ones((6, 8)))) == {"d": 3}
    assert shared_dims(f, (9,), (np.ones(3),)) == {}
    assert shared_dims(f, (), ()) == {}
    assert shared_dims(dict, (0,), (np.ones(3),)) == {}


def test_a_spec_is_an_array_spec_and_a_leaf_of_a_tree():
    assert isinstance(spec("n", Shaped), ArraySpec)
    assert jax.tree.leaves([spec("n", "int32")]) == [spec("n", "int32")]
    assert str(spec("n, 2*m+1", Float)) == "Float[n, 2*m+1]"
