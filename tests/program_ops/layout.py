"""Operations that move cells: reshapes, slices, joins, cumulative operations and sorting."""
# ruff: noqa: E501  (an expression is one string on one line)

from typing import Any

from programs import Draw, same

from program_ops.registry import op, templates

# --- layout ---------------------------------------------------------------------------------------


@op("transpose", 2)
def _transpose(d: Draw) -> Any:
    x = d.pick((2, 3), "fib")
    order = list(range(x.rank))
    d.rng.shuffle(order)
    return f"{{0}}.transpose({', '.join(map(str, order))})", [x]


@op("expand", 1)
def _expand(d: Draw) -> Any:
    x = d.pick((0, 1, 2), "fib")
    y = d.pick((1, 2, 3), None)
    axis = d.rng.randint(0, x.rank)
    return d.choice(
        [
            f"jnp.expand_dims({{0}}, {axis})",
            "jnp.broadcast_to({0}, ({1}.shape[0], *{0}.shape))",
            f"jnp.stack([{{0}}, {{0}}], {axis})",
            f"jnp.broadcast_to(jnp.expand_dims({{0}}, {axis}), (*{{0}}.shape[:{axis}], 3, *{{0}}.shape[{axis}:]))",
        ]
    ), [x, y]


templates(
    "squeeze",
    0.5,
    ["jnp.squeeze({0}[None], 0)", "jnp.squeeze(jnp.expand_dims({0}, AXIS), AXIS)"],
    "fib",
    (1, 2),
)


@op("reshape", 4)
def _reshape(d: Draw) -> Any:
    x = d.pick((1, 2, 3), "fib")
    codes = ["{0}.reshape(-1)", "{0}.ravel()", "jnp.ravel({0}.T)"]
    if x.rank == 3:
        codes += [
            "{0}.reshape({0}.shape[0], -1)",
            "{0}.reshape(-1, {0}.shape[2])",
            "{0}.transpose(2, 0, 1).reshape({0}.shape[2], -1)",
            "{0}.reshape({0}.shape[0] * {0}.shape[1], {0}.shape[2])",
        ]
    if x.rank == 2:
        codes += [
            "{0}.reshape({0}.shape[1], {0}.shape[0])",
            "{0}.reshape(1, -1)",
            "{0}.reshape({0}.shape[0], 1, {0}.shape[1])",
        ]
    for axis, dim in enumerate(x.shape):
        for k in (2, 3, 4):
            try:
                divides = same(dim % k, 0) and not same(dim, k)
            except Exception:
                divides = False
            if divides and x.rank < 3:
                rest = f"{{0}}.shape[{axis}] // {k}"
                before, after = f"*{{0}}.shape[:{axis}]", f"*{{0}}.shape[{axis + 1}:]"
                codes += [
                    f"{{0}}.reshape({before}, {k}, {rest}, {after})",
                    f"{{0}}.reshape({before}, {rest}, {k}, {after})",
                ]
    for k in (2, 3, 4):
        if any(isinstance(dim, int) and dim % k == 0 for dim in x.shape):
            codes += [f"{{0}}.reshape(-1, {k})", f"{{0}}.reshape({k}, -1)"]
    if len(x.ragged) == 2:
        a, b = x.ragged
        codes += [f"{{0}}.reshape({{0}}.shape[{b}], -1)", f"{{0}}.reshape(-1, {{0}}.shape[{a}])"]
    return d.choice(codes), [x]


@op("concatenate", 3)
def _concatenate(d: Draw) -> Any:
    x = d.pick((1, 2, 3), "fib")
    axis = d.axis(x)
    y = d.pick(
        x.rank,
        x.kind,
        lambda v: (
            v.dtype == x.dtype
            and all(k == axis or same(p, q) for k, (p, q) in enumerate(zip(v.shape, x.shape, strict=True)))
        ),
    )
    order = d.choice(["{0}, {1}", "{1}, {0}", "{0}, {1}, {0}", "{1}, {1}, {0}"])
    if d.rng.random() < 0.3:
        first = ", ".join(":1" if k == axis else ":" for k in range(x.rank))
        order += f", {{0}}[{first}]"
    return f"jnp.concatenate([{order}], {axis})", [x, y]


@op("stack", 1)
def _stack(d: Draw) -> Any:
    x = d.pick((0, 1, 2))
    y = d.pick(x.rank, "f", lambda v: all(map(same, v.shape, x.shape)))
    return f"jnp.stack([{{0}}, {{1}}, {{0}}], {d.rng.randint(0, x.rank)})", [x, y]


@op("pad", 3)
def _pad(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    lo, hi = d.rng.randint(0, 3), d.rng.randint(0, 3)
    if d.rng.random() < 0.5:
        lo, hi, inner = d.rng.randint(-2, 3), d.rng.randint(-2, 3), d.choice([0, 0, 1, 2])
        config = ", ".join(f"({lo}, {hi}, {inner})" if k == axis else "(0, 0, 0)" for k in range(x.rank))
        return f"lax.pad({{0}}, F(0.5), [{config}])", [x]
    if d.rng.random() < 0.2:
        lo = d.choice([f"{{0}}.shape[{axis}]", f"{{0}}.shape[{axis}] // 2", f"9 - {{0}}.shape[{axis}]"])
    pads = ", ".join(f"({lo}, {hi})" if k == axis else "(0, 0)" for k in range(x.rank))
    mode = d.choice(
        ["constant_values=0.3", "mode='edge'", "mode='constant'", "mode='wrap'", "mode='reflect'"]
    )
    return f"jnp.pad({{0}}, ({pads},), {mode})", [x]


SLICES = [
    "1:",
    ":-1",
    "::2",
    "1::2",
    "::-1",
    "::-2",
    "-2:",
    ":2",
    "2:-1",
    "::3",
    "-1::-3",
    ":1",
    "-3:-1",
    "1:-1:2",
    "-2::-1",
]


@op("slice", 4)
def _slice(d: Draw) -> Any:
    x = d.pick((1, 2, 3), "fib")
    axis = d.axis(x)
    size = f"{{0}}.shape[{axis}]"
    part = d.choice(
        [
            *SLICES,
            f"{size} // 2:",
            f":{size} // 2 + 1",
            f"{size} - 1:",
            f":({size} + 1) // 2",
            f"{size} // 3::2",
        ]
    )
    if d.rng.random() < 0.3:
        part = d.choice(["0", "-1", f"{size} // 2", f"-{size}", f"{size} - 1", "1", "-2"])
    index = ", ".join(part if k == axis else ":" for k in range(x.rank))
    return f"{{0}}[{index}]", [x]


@op("lax slice", 0.7)
def _lax_slice(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    size = f"{{0}}.shape[{axis}]"
    start, stop = d.choice(
        [("0", size), ("1", size), (f"{size} // 2", size), ("0", f"{size} - 1"), (f"{size} - 1", size)]
    )
    return f"lax.slice_in_dim({{0}}, {start}, {stop}, {d.choice([1, 1, 2, 3])}, {axis})", [x]


templates(
    "split",
    1,
    [
        "jnp.split({0}, [1], AXIS)[1]",
        "jnp.split({0}, [SIZE // 2], AXIS)[0]",
        "jnp.split({0}, [SIZE // 2], AXIS)[1]",
        "lax.split({0}, (1, SIZE - 1), AXIS)[1]",
        "lax.split({0}, (SIZE - 1, 1), AXIS)[1]",
        "jnp.split({0}, 2, AXIS)[1]",
    ],
    rank=(1, 2, 3),
)
templates(
    "move",
    4,
    [
        "jnp.flip({0}, AXIS)",
        "jnp.roll({0}, 1, AXIS)",
        "jnp.roll({0}, -3, AXIS)",
        "jnp.roll({0}, SIZE // 2, AXIS)",
        "jnp.repeat({0}, 2, AXIS)",
        "jnp.repeat({0}, 3, axis=AXIS)",
        "jnp.flip({0})",
        "jnp.roll({0}, 2)",
        "jnp.swapaxes({0}, AXIS, 0)",
        "jnp.moveaxis({0}, AXIS, -1)",
    ],
    "fib",
    (1, 2, 3),
)
templates(
    "difference",
    1,
    [
        "jnp.diff({0}, axis=AXIS)",
        "jnp.diff({0}, axis=AXIS, prepend=0)",
        "jnp.gradient({0}, axis=AXIS)",
        "jnp.ediff1d({0})",
        "jnp.trapezoid({0}, axis=AXIS)",
    ],
    rank=(1, 2, 3),
)
templates(
    "rotate",
    0.7,
    [
        "jnp.rot90({0})",
        "jnp.rot90({0}, 2)",
        "jnp.fliplr({0})",
        "jnp.tril({0})",
        "jnp.triu({0}, 1)",
        "jnp.tril({0}, -1)",
        "{0}.T",
    ],
    "fi",
    (2,),
)


@op("tile", 1.5)
def _tile(d: Draw) -> Any:
    x = d.pick((1, 2), "fib")
    reps = [d.choice([1, 2, 3]) for _ in range(x.rank)]
    if d.rng.random() < 0.2:
        y = d.pick((1, 2), None)
        return f"jnp.tile({{0}}, ({', '.join(map(str, [*reps[:-1], '{1}.shape[0]']))},))", [x, y]
    return f"jnp.tile({{0}}, {tuple(reps)})", [x]


templates(
    "diagonal",
    1,
    [
        "jnp.diag({0})",
        "jnp.diagonal({0}, 1)",
        "jnp.trace({0})",
        "jnp.eye({0}.shape[0], dtype=F) @ {0}",
        "jnp.fill_diagonal({0}, 0.5, inplace=False)",
    ],
    rank=(2,),
)
templates("make diagonal", 0.4, ["jnp.diag({0})", "jnp.vander({0}, 3) * 0.2", "jnp.diag({0}, 1)"], rank=(1,))
templates(
    "kronecker", 0.4, ["jnp.kron({0}, K(1, 2))", "jnp.kron(K(1, 2), {0})", "jnp.block([{0}, {0}])"], rank=(1,)
)


# --- cumulative and order -------------------------------------------------------------------------


@op("cumulative", 4)
def _cumulative(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis, reverse = d.axis(x), d.choice(["", ", reverse=True"])
    code = d.choice(
        [
            "jnp.sin(lax.cumsum({0}, A))",
            "lax.cumprod(1 + 0.3 * jnp.sin({0}), A)",
            "lax.cummax({0}, A)",
            "lax.cummin({0}, A)",
            "lax.cumlogsumexp({0}, A)",
        ]
    )
    return code.replace("A)", f"{axis}{reverse})"), [x]


templates(
    "cumulative integers",
    0.7,
    [
        "jnp.cumsum({0}, AXIS) % 9",
        "lax.cummax({0}.astype(np.int32), AXIS, reverse=True)",
        "jnp.cumsum({0} > 0, AXIS) % 5",
        "lax.cummin({0}.astype(np.int32), AXIS)",
    ],
    "ib",
    (1, 2, 3),
)
templates("associative scan", 0.3, ["lax.associative_scan(jnp.maximum, {0}, axis=AXIS)"], rank=(1, 2, 3))
templates(
    "sort",
    2,
    [
        "jnp.sort({0}, AXIS)",
        "jnp.sort({0}, AXIS, descending=True)",
        "jnp.sort({0}, AXIS, stable=False)",
        "jnp.median({0}, AXIS)",
        "lax.sort(({0}, jnp.cos({0})), dimension=AXIS, num_keys=1)[1]",
        "lax.sort((jnp.floor({0}), {0}), dimension=AXIS, num_keys=2)[1]",
    ],
    rank=(1, 2, 3),
)
templates(
    "argsort",
    1.5,
    [
        "jnp.argsort({0}, AXIS)",
        "jnp.argsort({0}, AXIS, descending=True)",
        "jnp.argsort(jnp.argsort({0}, AXIS), AXIS)",
    ],
    "fi",
    (1, 2, 3),
)
templates(
    "top k",
    0.7,
    [
        "lax.top_k({0}, 1)[0]",
        "lax.top_k({0}, 1)[1]",
        "jax.lax.approx_max_k({0}, 1)[0]",
        "lax.top_k({0}, {0}.shape[-1])[0]",
    ],
    rank=(1, 2),
)
templates(
    "quantile",
    0.7,
    [
        "jnp.quantile({0}, 0.3, axis=AXIS)",
        "jnp.percentile({0}, 70, axis=AXIS, method='nearest')",
        "jnp.quantile({0}, 0.5, axis=AXIS, method='lower')",
    ],
    rank=(1, 2),
)


@op("search", 0.7)
def _search(d: Draw) -> Any:
    a, v = d.pick(1), d.pick((0, 1, 2))
    return d.choice(
        [
            "jnp.searchsorted(jnp.sort({0}), {1})",
            "jnp.digitize({1}, jnp.sort({0}))",
            "jnp.searchsorted(jnp.sort({0}), {1}, side='right', method='compare_all')",
            "jnp.interp({1}, jnp.arange({0}.shape[0], dtype=F), {0})",
            "jnp.isin({1}, {0})",
        ]
    ), [a, v]
