"""Elementwise operations, reductions and contractions."""
# ruff: noqa: E501  (an expression is one string on one line)

from typing import Any

from programs import Draw, same

from program_ops.registry import indexed, op, tame, templates

# --- elementwise ----------------------------------------------------------------------------------

templates(
    "unary",
    3,
    [
        "jnp.sin({0} * 2)",
        "jnp.cos({0})",
        "jnp.tanh({0})",
        "jnp.exp(jnp.sin({0}))",
        "jnp.abs({0})",
        "-{0}",
        "jnp.square(jnp.sin({0}))",
        "jnp.sqrt(0.1 + jnp.abs({0}))",
        "jnp.log1p(jnp.abs({0}))",
        "jax.nn.relu({0})",
        "jax.nn.gelu({0})",
        "jax.nn.sigmoid({0})",
        "jax.nn.softplus({0})",
        "jnp.sign({0})",
        "jnp.floor({0} * 3)",
        "lax.erf({0})",
        "1 / (1.5 + jnp.abs({0}))",
        "jnp.expm1(jnp.sin({0}))",
        "lax.rsqrt(0.5 + {0} ** 2)",
        "jnp.cbrt({0} + 2)",
        "jax.nn.silu({0})",
        "jnp.clip({0}, -0.5, 0.7)",
        "jnp.round({0} * 2)",
        "lax.stop_gradient({0})",
        "jnp.sin({0} ** 3)",
        "jnp.abs(lax.complex({0}, 0.5 + {0}))",
        "lax.log(1.2 + jnp.sin({0}))",
        "jnp.nan_to_num({0})",
        "clipped_gradient({0})",
        "jnp.arctan({0})",
        "lax.reduce_precision({0}, 8, 10)",
        "jnp.where({0} > 0, {0}, 0.5)",
        "jnp.log(jnp.where({0} > 0, {0} + 0.1, 1))",
        "jax.nn.leaky_relu({0})",
        "lax.digamma(1.5 + jnp.abs({0}))",
        "jnp.sinc({0})",
        "jnp.select([{0} > 1, {0} > 0], [{0} * 2, -{0}], 0.3)",
    ],
)
templates(
    "integer unary",
    1,
    [
        "-{0}",
        "jnp.abs({0})",
        "{0} % 5",
        "{0} // 2",
        "{0} << 1",
        "~{0}",
        "{0} & 3",
        "jnp.sign({0})",
        "{0} ^ 5",
        "lax.population_count({0})",
        "jnp.clip({0}, 0, 4)",
        "{0} * 3 % 7",
    ],
    "i",
)
templates(
    "cast",
    2,
    [
        "jnp.floor({0} * 2).astype(np.int32)",
        "{0} > 0.1",
        "{0}.astype(bool)",
        "jnp.isfinite({0})",
        "jnp.clip(jnp.round({0} * 3), -9, 9).astype(np.int8)",
        "jnp.clip({0} * 9, 0, 200).astype(np.uint8)",
    ],
)
templates(
    "cast to float", 2, ["jnp.sin({0}.astype(F))", "{0} * F(0.25)", "jnp.where({0} > 0, F(1.5), F(-1))"], "ib"
)
templates("bool unary", 0.5, ["~{0}", "{0}.astype(np.int32)", "{0} ^ True"], "b")

FLOAT_BINARY = [
    "{0} + {1}",
    "{0} - {1}",
    "{0} * {1}",
    "{0} / (1.5 + jnp.abs({1}))",
    "jnp.maximum({0}, {1})",
    "jnp.minimum({0}, {1})",
    "jnp.arctan2({0}, 1.5 + {1} ** 2)",
    "jnp.hypot({0}, 0.3 + {1})",
    "jnp.logaddexp({0}, {1})",
    "jnp.where({0} > {1}, {0}, {1} * 2)",
    "(1 + jnp.abs({0})) ** jnp.sin({1})",
    "{0} > {1}",
    "{0} <= {1}",
    "jnp.mod({0}, 1.5 + jnp.abs({1}))",
    "lax.nextafter(*jnp.broadcast_arrays({0}, {1}))",
    "jnp.clip({0}, {1} - 1, {1} + 1)",
    "jnp.float_power(1.5 + jnp.sin({0}), 2) * {1}",
    "jnp.copysign({0}, {1})",
]
INT_BINARY = [
    "{0} + {1}",
    "{0} - {1}",
    "{0} * {1} % 11",
    "jnp.maximum({0}, {1})",
    "{0} // (jnp.abs({1}) % 5 + 1)",
    "{0} & {1}",
    "{0} % (jnp.abs({1}) % 5 + 1)",
    "{0} == {1}",
    "{0} < {1}",
    "{0} | {1}",
    "jnp.where({0} > {1}, {0}, 3)",
    "jnp.gcd({0}, {1})",
]
BOOL_BINARY = ["{0} & {1}", "{0} | {1}", "{0} ^ {1}", "jnp.where({0}, {1}, False)"]


@op("binary", 5)
def _binary(d: Draw) -> Any:
    kind = d.rng.choices("fib", [8, 2, 1])[0]
    a = d.pick(kind=kind)
    b, index = d.mate(a, kind)
    codes = {"f": FLOAT_BINARY, "i": INT_BINARY, "b": BOOL_BINARY}[kind]
    code = d.choice(codes)
    if d.rng.random() < 0.3 and not index:
        return code.replace("{0}", "{2}").replace("{1}", "{0}").replace("{2}", "{1}"), [a, b]
    return indexed(code, index), [a, b]


@op("where", 1.5)
def _where(d: Draw) -> Any:
    a = d.pick()
    if d.rng.random() < 0.5:
        c, index, test = a, "", "({1} > 0.2)"
    else:
        c, index = d.mate(a, "b")
        test = "{1}"
    other = d.choice(["0", "-1e9", "jnp.inf", "{0} * 2", "{0}.mean()"])
    code = indexed("jnp.where(TEST, {0}, OTHER)".replace("TEST", test).replace("OTHER", other), index)
    if other in ("-1e9", "jnp.inf"):
        code = (
            d.choice(["jnp.exp(-jnp.abs(%s))", "jnp.minimum(jnp.abs(%s), 2)", "1 / (1 + jnp.abs(%s))"]) % code
        )
    return code, [a, c]


@op("mixed dtypes", 0.7)
def _mixed(d: Draw) -> Any:
    a = d.pick()
    b, index = d.mate(a, "ib")
    return indexed(
        d.choice(["jnp.sin({0} * {1})", "jnp.cos({0} + {1})", "jnp.where({1} > 0, {0}, 1)"]), index
    ), [a, b]


@op("outer", 1.5)
def _outer(d: Draw) -> Any:
    a, b = d.pick(1), d.pick(1)
    return d.choice(
        [
            "{0}[:, None] * {1}",
            "{0}[:, None] - {1}[None]",
            "jnp.outer({0}, {1})",
            "{0}[:, None] > {1}",
            "jnp.meshgrid({0}, {1}, indexing='ij')[1] + {0}[:, None]",
            "jnp.exp(-jnp.abs({0}[:, None] - {1}))",
        ]
    ), [a, b]


# --- reductions -----------------------------------------------------------------------------------


@op("reduction", 6)
def _reduction(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    if d.rng.random() < 0.25:
        axes: Any = None
    else:
        axes = d.axes(x)
        axes = axes[0] if len(axes) == 1 else axes
    keep = d.choice(["", ", keepdims=True"])
    code = d.choice(
        [
            "jnp.sin(jnp.sum({0}, A))",
            "jnp.mean({0}, A)",
            "jnp.max({0}, A)",
            "jnp.min({0}, A)",
            "jnp.prod(1 + 0.3 * jnp.sin({0}), A)",
            "jnp.any({0} > 0.5, A)",
            "jnp.all({0} > -1, A)",
            "jax.nn.logsumexp({0}, A)",
            "jnp.std({0} + 0.1, A)",
            "jnp.var({0}, A)",
            "jnp.count_nonzero({0} > 0, A)",
            "jnp.sqrt(0.1 + jnp.sum({0} ** 2, A))",
            "jnp.ptp({0}, A)",
            "jnp.nanmax({0}, A)",
            "jnp.nanmean({0}, A)",
            "jnp.mean({0}, A, where={0} > -1)",
            "jnp.sum({0}, A, where={0} > 0) * 0.2",
            "jnp.max({0}, A, where={0} < 1, initial=-2)",
            "jnp.average({0}, A, weights=1.5 + jnp.sin({0}))",
            "jnp.sin(jnp.linalg.norm({0} + 2, axis=AXES))",
            "jnp.mean(jnp.abs({0}), A) - jnp.max({0}, A)",
            "jnp.amin(-jnp.abs({0}), A)",
        ]
    )
    if "AXES" in code:
        code, keep = code.replace("AXES", str(None if axes is None or isinstance(axes, tuple) else axes)), ""
    return code.replace("A)", f"axis={axes}{keep})").replace("A,", f"axis={axes}{keep},"), [x]


@op("integer reduction", 1.5)
def _integer_reduction(d: Draw) -> Any:
    x = d.pick((1, 2, 3), "ib")
    axis = d.choice([None, d.axis(x)])
    codes = [
        "jnp.sum({0}, A)",
        "jnp.max({0}, A)",
        "jnp.min({0}, A)",
        "jnp.any({0} > 0, A)",
        "jnp.all({0} > 0, A)",
        "jnp.mean({0}, A, dtype=F)",
    ]
    if x.kind == "i":
        codes += [
            "jnp.bitwise_and.reduce({0}, A)",
            "jnp.bitwise_or.reduce({0}, A)",
            "jnp.bitwise_xor.reduce({0}, A)",
            "jnp.argmax({0}, A)",
            "jnp.argmin({0}, A)",
        ]
    code = d.choice(codes)
    if "reduce" in code or "arg" in code:
        axis = d.axis(x)
    return code.replace("A)", f"axis={axis})").replace("A,", f"axis={axis},"), [x]


templates(
    "position",
    1.5,
    [
        "jnp.argmax({0}, AXIS)",
        "jnp.argmin({0}, AXIS)",
        "jnp.argmax({0})",
        "jnp.argmin({0}, AXIS, keepdims=True)",
        "jnp.argmax({0} > 0, AXIS)",
    ],
    rank=(1, 2, 3),
)
templates(
    "softmax",
    2.5,
    [
        "jax.nn.softmax({0}, AXIS)",
        "jax.nn.log_softmax({0}, AXIS) * 0.3",
        "jax.nn.standardize({0}, AXIS, epsilon=0.1)",
        "{0} - {0}.mean(AXIS, keepdims=True)",
        "{0} / (0.1 + jnp.abs({0}).max(AXIS, keepdims=True))",
        "jax.nn.softmax({0}, where={0} > -0.5, initial=-jnp.inf, axis=AXIS)",
    ],
    rank=(1, 2, 3),
)
# XLA may use the initial value any number of times, so it must be an identity.
templates(
    "generic reduce",
    0.7,
    [
        "lax.reduce({0}, F(0), lambda a, b: a + b, (AXIS,))",
        "lax.reduce({0}, F(-jnp.inf), lambda a, b: jnp.maximum(a, b), (AXIS,))",
        "lax.reduce({0}, F(1), lambda a, b: a * b, (AXIS,))",
        "lax.reduce(({0}, {0} * 2), (F(0), F(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (AXIS,))[1]",
    ],
    rank=(1, 2, 3),
)


# --- contractions ---------------------------------------------------------------------------------


@op("einsum", 5)
def _einsum(d: Draw) -> Any:
    kind = d.rng.choices("fi", [9, 1])[0]
    a, b = d.pick((1, 2, 3), kind), d.pick((1, 2, 3), kind)
    left = list("abc"[: a.rank])
    right, contracted = [], []
    for new, dim in zip("xyz", b.shape, strict=False):
        free = [k for k, other in zip("abc", a.shape, strict=False) if same(dim, other) and k not in right]
        right.append(d.choice(free) if free and d.rng.random() < 0.8 else new)
    common = [letter for letter in left if letter in right]
    for letter in common:
        if d.rng.random() < 0.65:
            contracted.append(letter)
    out = [letter for letter in dict.fromkeys(left + right) if letter not in contracted]
    while len(out) > 3 or (len(out) > 1 and d.rng.random() < 0.1):
        out.remove(d.choice(out))
    d.rng.shuffle(out)
    code = f"jnp.einsum('{''.join(left)},{''.join(right)}->{''.join(out)}', {{0}}, {{1}})"
    return tame(f"0.5 * {code}") if kind == "f" else f"{code} % 9", [a, b]


@op("gram", 2)
def _gram(d: Draw) -> Any:
    x = d.pick(2)
    return tame(
        "0.5 * "
        + d.choice(
            [
                "({0} @ {0}.T)",
                "({0}.T @ {0})",
                "(jax.nn.softmax({0} @ {0}.T) @ {0})",
                "jnp.tensordot({0}, {0}, ((0,), (0,)))",
                "jnp.vdot({0}, {0})",
                "jnp.einsum('ij,ij->i', {0}, {0})",
                "jnp.inner({0}, {0})",
                "jnp.dot({0}, {0}.T)",
            ]
        )
    ), [x]


@op("dense", 2)
def _dense(d: Draw) -> Any:
    x = d.pick((1, 2, 3), where=lambda v: isinstance(v.shape[-1], int))
    return tame(f"0.5 * {{0}} @ K({d.number()}, {x.shape[-1]}, {d.choice([2, 3, 4])})"), [x]


@op("attention", 0.7)
def _attention(d: Draw) -> Any:
    x = d.pick(3, where=lambda v: isinstance(v.shape[2], int))
    y = d.pick(3, where=lambda v: same(v.shape[1], x.shape[1]) and same(v.shape[2], x.shape[2]))
    return d.choice(
        [
            "jax.nn.dot_product_attention({0}, {1}, {1})",
            "jax.nn.dot_product_attention({0}, {0}, {0}, is_causal=True)",
        ]
    ), [x, y]


@op("causal attention", 1)
def _causal(d: Draw) -> Any:
    x = d.pick(2)
    return "jax.nn.softmax(jnp.where(jnp.tri({0}.shape[0], dtype=bool), {0} @ {0}.T, -1e9)) @ {0}", [x]
