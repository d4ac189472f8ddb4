"""Loops, branches and calls; sizes as values, random draws, linear algebra."""
# ruff: noqa: E501  (an expression is one string on one line)

from typing import Any

from programs import Draw, Value, same

from program_ops.registry import op, templates

# --- control flow ---------------------------------------------------------------------------------


@op("scan", 5)
def _scan(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    items = "{0}" if axis == 0 else f"jnp.moveaxis({{0}}, {axis}, 0)"
    init = d.choice([f"jnp.zeros({items}.shape[1:], F)", f"0.5 * {items}[0]", f"{items}[-1]"])
    operands, captured = [x], ""
    rest = tuple(dim for k, dim in enumerate(x.shape) if k != axis)
    if d.rng.random() < 0.5:
        y, index = d.mate(Value("", rest, x.dtype))
        operands.append(y)
        captured = f" + {{1}}{index}"
    body = d.choice(
        [
            f"(jnp.tanh(c * 0.5 + y{captured}), c)",
            f"(jnp.sin(c + y{captured}), c * y)",
            f"(c * 0.5 + jnp.cos(y{captured}) - y.mean(), c + y.sum())",
            f"(jnp.maximum(c, y{captured}), (c > y).astype(np.int32))",
            f"(jax.nn.relu(y{captured}) * 0.7 + c * 0.3, jnp.sum(c))",
            f"(c - 0.1 * lax.stop_gradient(y){captured}, jnp.sin(c))",
        ]
    )
    reverse = d.choice(["", ", reverse=True"])
    return f"lax.scan(lambda c, y: {body}, {init}, {items}{reverse})[{d.choice([0, 1, 1])}]", operands


@op("scan by position", 1.5)
def _scan_by_position(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    reverse = d.choice(["", ", reverse=True"])
    return d.choice(
        [
            f"lax.scan(lambda c, i: (jnp.sin(c + {{0}}[i]), c), jnp.zeros({{0}}.shape[1:], F), jnp.arange({{0}}.shape[0]){reverse})[1]",
            f"lax.scan(lambda c, _: (jnp.sin(c * 2), c.mean()), {{0}}, None, length={{0}}.shape[0]{reverse})[0]",
            f"lax.scan(lambda c, i: (c.at[i].set(c[i - 1] * 0.5 + i), None), {{0}}, jnp.arange({{0}}.shape[0]){reverse})[0]",
            f"lax.scan(lambda c, y: (lax.while_loop(lambda s: jnp.sum(jnp.abs(s)) > 1, lambda s: s * 0.6, c + y), c), jnp.zeros({{0}}.shape[1:], F), {{0}}{reverse})[1]",
            f"lax.scan(lambda c, y: (lax.cond(jnp.sum(y) > 0, lambda: jnp.sin(c + y), lambda: c), c), jnp.zeros({{0}}.shape[1:], F), {{0}}{reverse})[1]",
            "lax.scan(lambda c, k: (jnp.sin(c * k + c.mean()), None), {0}, K(5, 3))[0]",
            "lax.map(lambda r: jnp.sin(r * r.sum()), {0})",
            "lax.scan(lambda c, y: (c + 1, jnp.sin(y * c)), 0, {0})[1]",
        ]
    ), [x]


@op("loop", 3)
def _loop(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    size = f"{{0}}.shape[{axis}]"
    item = f"lax.dynamic_index_in_dim({{0}}, i, {axis}, False)"
    return d.choice(
        [
            f"lax.fori_loop(0, {size}, lambda i, c: jnp.sin(c + {item}), {{0}}[{', '.join('0' if k == axis else ':' for k in range(x.rank))}])",
            f"lax.fori_loop(1, {size}, lambda i, c: lax.dynamic_update_index_in_dim(c, 0.5 * {item}, i - 1, {axis}), {{0}})",
            "lax.fori_loop(0, 3, lambda i, c: jnp.sin(c + i) - c.mean(), {0})",
            f"lax.fori_loop(0, {size}, lambda i, c: jnp.cos(0.5 * c + i + c.mean()), {{0}})",
            "lax.while_loop(lambda c: jnp.max(jnp.abs(c)) > 0.5, lambda c: c * 0.6, {0})",
            "lax.while_loop(lambda c: (c[1] < 6) & (jnp.sum(c[0]) < 2), lambda c: (c[0] + 0.3, c[1] + 1), ({0}, 0))[0]",
            "lax.while_loop(lambda c: (c[1] < 6) & (c[0].mean() < 0.4), lambda c: (jnp.sin(c[0] + 0.7), c[1] + 1), ({0}, 0))[1]",
            f"lax.while_loop(lambda c: c[1] < {size} + 3, lambda c: (jnp.sin(c[0] * 2), c[1] + 2), ({{0}}, 0))[0]",
        ]
    ), [x]


@op("branch", 2)
def _branch(d: Draw) -> Any:
    x = d.pick()
    if d.rng.random() < 0.4:
        i = d.pick(0, "i")
        return (
            "lax.switch({1}, [lambda a: jnp.sin(a * 2), lambda a: a - jnp.mean(a), lambda a: jnp.flip(a)], {0})",
            [x, i],
        )
    return d.choice(
        [
            "lax.cond(jnp.sum({0}) > 0, lambda a: jnp.sin(a * 2), lambda a: a - jnp.mean(a), {0})",
            "lax.cond(jnp.max({0}) > 1, lambda: jnp.cumsum(jnp.ravel({0})) * 0.1, lambda: jnp.ravel({0})[::-1])",
            "lax.cond({0}.mean() > 0, lambda a: lax.while_loop(lambda s: jnp.sum(jnp.abs(s)) > 1, lambda s: s * 0.5, a), lambda a: a, {0})",
        ]
    ), [x]


@op("call", 3)
def _call(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    y, index = d.mate(x)
    return d.choice(
        [
            f"jax.checkpoint(lambda a: jnp.sin(jnp.cumsum(jnp.cos(a), {axis})))({{0}})",
            f"jax.jit(lambda a, b: jnp.sin(a * b.sum() + b{index}))({{0}}, {{1}})",
            f"jax.checkpoint(lambda a, b: jax.nn.softmax(a + b{index}, {axis}))({{0}}, {{1}})",
            f"jax.jit(jax.checkpoint(lambda a: a.mean({axis}) + jax.jit(jnp.max)(a)))({{0}})",
            "jax.checkpoint(lambda a: lax.scan(lambda c, y: (jnp.sin(c + y), c), a[0], a)[1], policy=jax.checkpoint_policies.dots_saveable)({0})",
        ]
    ), [x, y]


@op("vmap", 4)
def _vmap(d: Draw) -> Any:
    x = d.pick((2, 3))
    axis = d.axis(x)
    rows = d.choice(
        [
            "r * r.sum()",
            "jnp.cumsum(r, 0) * 0.3",
            "jnp.flip(r)",
            "r[-1]",
            "r[::2]",
            "jnp.sort(r, 0)",
            "r[jnp.argmax(r.ravel()) % r.shape[0]]",
            "lax.dynamic_slice_in_dim(r, jnp.argmax(r), 1)",
            "lax.dynamic_update_slice_in_dim(r, r[:1] * 3, jnp.argmin(r), 0)",
            "r.at[jnp.argmax(r) % 4].add(1.5)",
            "r.at[jnp.argmin(r) % 3].get(mode='clip')",
            "lax.cond(r.sum() > 0, lambda: r * 2, lambda: r - r.mean())",
            "lax.scan(lambda c, y: (jnp.sin(c + y), c), r[0], r)[1]",
            "lax.while_loop(lambda s: jnp.sum(jnp.abs(s)) > 1, lambda s: s * 0.6, r)",
            "jnp.concatenate([r, r[:1]])",
            "r.reshape(-1)",
            "jnp.roll(r, 1)",
            "jnp.tanh(r @ r) if r.ndim == 1 else jnp.sin(r @ r.T)",
            "jnp.argmax(r)",
            "jnp.argsort(r, 0)",
            "lax.fori_loop(0, r.shape[0], lambda i, c: jnp.sin(c + r[i]), r[0])",
            "jax.ops.segment_sum(r, jnp.arange(r.shape[0]) % 3, num_segments=3)",
            "jnp.convolve(r.ravel(), K(3, 3), mode='same')",
            "jax.random.normal(jax.random.key(3), r.shape, F) * r",
        ]
    )
    out = d.choice(["", ", out_axes=-1"])
    return f"jax.vmap(lambda r: {rows}, in_axes={axis}{out})({{0}})", [x]


@op("vmap of two", 1.5)
def _vmap_of_two(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    y = d.pick((1, 2), "fi", lambda v: same(v.shape[0], x.shape[axis]))
    if y.kind == "i":
        return d.choice(
            [
                f"jax.vmap(lambda r, i: jnp.ravel(r)[jnp.ravel(i)[0] % 2], in_axes=({axis}, 0))({{0}}, {{1}})",
                f"jax.vmap(lambda r, i: lax.dynamic_slice_in_dim(jnp.ravel(r), jnp.ravel(i)[0], 1), in_axes=({axis}, 0))({{0}}, {{1}})",
                f"jax.vmap(lambda r, i: jnp.ravel(r).at[jnp.ravel(i)].add(2.0, mode='drop'), in_axes=({axis}, 0))({{0}}, {{1}})",
            ]
        ), [x, y]
    return d.choice(
        [
            f"jax.vmap(lambda r, s: jnp.sin(r.sum() * s), in_axes=({axis}, 0))({{0}}, {{1}})",
            f"jax.vmap(lambda r, s: jnp.sin(jnp.outer(r, s)).sum(0), in_axes=({axis}, 0))({{0}}, {{1}})",
            "jax.vmap(lambda s: jnp.max({0} * s.mean()))({1})",
        ]
    ), [x, y]


@op("inner derivative", 2)
def _inner_derivative(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    inner = d.choice(
        [
            f"jnp.sin(jnp.cumsum(a, {axis}))",
            "jnp.sin(a) * a.mean()",
            f"jax.nn.softmax(a, {axis}) * a",
            f"jnp.max(a, {axis}) ** 2",
            "jnp.sin(a @ a.T)" if x.rank == 2 else "jnp.sin(a) ** 2",
            "jnp.sqrt(0.1 + jnp.sum(a ** 2))",
        ]
    )
    return d.choice(
        [
            f"jnp.sin(jax.grad(lambda a: jnp.sum({inner}))({{0}}))",
            f"jnp.sin(jax.jvp(lambda a: {inner}, ({{0}},), (jnp.cos({{0}}),))[1])",
            f"jnp.sin(jax.vjp(lambda a: {inner}, {{0}})[1](jnp.cos({inner.replace('a.', '{0}.').replace('(a', '({0}').replace('* a', '* {0}')}))[0])",
        ]
    ), [x]


# --- sizes, random draws, linear algebra ----------------------------------------------------------

templates(
    "size as value",
    3,
    [
        "{0} / SIZE",
        "jnp.sin({0} * SIZE)",
        "jnp.arange(SIZE)",
        "jnp.arange(SIZE, dtype=F) / SIZE",
        "jnp.linspace(0, 1, SIZE)",
        "jnp.full({0}.shape, 0.5, F)",
        "jnp.eye(SIZE, dtype=F)",
        "jnp.tri(SIZE, dtype=bool)",
        "jnp.ones({0}.shape, F) * SIZE * 0.1",
        "jnp.arange(1, SIZE + 1)[::-1]",
        "jnp.asarray(SIZE)",
        "lax.broadcasted_iota(np.int32, {0}.shape, AXIS)",
        "jnp.cos(jnp.arange(SIZE, dtype=F)[:, None] * K(7, 4))",
        "jnp.indices({0}.shape)[0]",
        "jnp.arange(0, SIZE, 2)",
        "jnp.arange(SIZE // 2 + 1)",
        "jnp.float32(SIZE) * jnp.mean({0})",
        "jnp.zeros((SIZE, 3), F)",
        "{0} * (lax.broadcasted_iota(np.int32, {0}.shape, AXIS) < SIZE // 2)",
    ],
    "f",
    (1, 2, 3),
)
templates(
    "random",
    2,
    [
        "jax.random.normal(jax.random.key(3), {0}.shape, F)",
        "jax.random.uniform(jax.random.key(4), {0}.shape[::-1], F)",
        "jax.random.randint(jax.random.key(5), {0}.shape, 0, 9)",
        "jax.random.bernoulli(jax.random.key(6), 0.4, {0}.shape)",
        "{0} + 0.1 * jax.random.gumbel(jax.random.key(7), {0}.shape, F)",
        "jax.random.normal(jax.random.fold_in(jax.random.key(3), SIZE), {0}.shape, F)",
        "jax.random.permutation(jax.random.key(8), {0})",
        "jax.vmap(lambda k: jax.random.normal(k, (2,), F))(jax.random.split(jax.random.key(9), SIZE))",
        "jax.random.normal(jax.random.PRNGKey(3), (2, SIZE), F)",
        "jax.random.categorical(jax.random.key(2), {0}, AXIS)",
        "jax.random.truncated_normal(jax.random.key(3), -1, 1, {0}.shape, F)",
        "jnp.where(jax.random.bernoulli(jax.random.key(6), 0.5, {0}.shape), {0} * 2, 0)",
    ],
    "f",
    (1, 2, 3),
)


@op("linear algebra", 1)
def _linear_algebra(d: Draw) -> Any:
    x = d.pick(2)
    spd = "({0} @ {0}.T + 3 * jnp.eye({0}.shape[0], dtype=F))"
    return d.choice(
        [
            f"jnp.linalg.cholesky({spd})",
            f"jnp.linalg.inv({spd})",
            f"jnp.linalg.solve({spd}, {{0}})",
            f"jnp.log1p(jnp.abs(jnp.linalg.det({spd})))",
            f"jnp.linalg.slogdet({spd})[1]",
            f"jax.scipy.linalg.solve_triangular({spd}, {{0}}, lower=True)",
            f"jnp.linalg.eigvalsh({spd})",
            "jnp.linalg.svd({0}, compute_uv=False)",
            "jnp.linalg.qr({0})[1] ** 2",
            f"jax.scipy.linalg.cho_solve((jnp.linalg.cholesky({spd}), True), {{0}})",
        ]
    ), [x]


templates("fft", 0.2, ["jnp.abs(jnp.fft.fft({0}, axis=AXIS)) * 0.2"], rank=(1, 2))
templates(
    "positions where",
    0.7,
    [
        "jnp.nonzero({0} > 0, size=4, fill_value=0)[0]",
        "jnp.nonzero({0} > 0, size={0}.shape[0])[0]",
        "jnp.flatnonzero({0} > 0, size=3, fill_value=-1)",
    ],
    rank=(1,),
)
