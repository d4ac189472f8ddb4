"""Operations at positions: gather, scatter, dynamic slices, convolutions and pooling."""
# ruff: noqa: E501  (an expression is one string on one line)

from typing import Any

from programs import Draw, NoFit, Value, same

from program_ops.registry import op, tame, templates

# --- indexing -------------------------------------------------------------------------------------


def indices(d: Draw) -> tuple[str, list[Value], int]:
    """Return code of an integer index array for `{1}`, its operand and its rank."""
    if d.rng.random() < 0.35:
        return (
            d.choice(
                [f"I({d.number()}, 3)", f"I({d.number()}, 2, 2)", f"I({d.number()}, 5, low=-2, high=9)"]
            ),
            [],
            1,
        )
    i = d.pick((0, 1, 2), "i", lambda v: v.dtype.kind == "i")
    return "{1}", [i], i.rank


@op("gather", 4)
def _gather(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    i, operands, _ = indices(d)
    axis = d.axis(x)
    at = ", ".join("I" if k == axis else ":" for k in range(x.rank))
    code = d.choice(
        [
            f"{{0}}.at[{at}].get(mode='clip')",
            f"{{0}}.at[{at}].get(mode='fill', fill_value=0.7)",
            f"jnp.take({{0}}, I, {axis}, mode='wrap')",
            f"jnp.take({{0}}, I, {axis}, mode='clip')",
            f"{{0}}[{at.replace('I', f'I % {{0}}.shape[{axis}]')}]",
            f"jnp.take({{0}}, I, {axis}, fill_value=0)",
            f"{{0}}[{at.replace('I', f'-1 - I % {{0}}.shape[{axis}]')}]",
        ]
    )
    return code.replace("I", i) if not i.startswith("I") else code.replace("I", "\0").replace("\0", i), [
        x,
        *operands,
    ]


@op("look up", 1.5)
def _look_up(d: Draw) -> Any:
    i = d.pick((0, 1, 2), "i")
    return d.choice(
        [
            f"K({d.number()}, 6, 3)[jnp.clip({{0}}, 0, 5)]",
            f"jnp.take(K({d.number()}, 6), {{0}}, mode='clip')",
            "jax.nn.one_hot({0}, 5, dtype=F)",
            f"K({d.number()}, 3, 6).at[:, {{0}}].get(mode='fill', fill_value=0)",
        ]
    ), [i]


@op("gather along", 1)
def _gather_along(d: Draw) -> Any:
    x = d.pick((1, 2))
    axis = d.axis(x)
    return d.choice(
        [
            "jnp.take_along_axis({0}, jnp.argsort({0}, A), A)",
            "jnp.take_along_axis({0}, jnp.argmax({0}, A, keepdims=True), A)",
            "jnp.take_along_axis({0}, jnp.argsort(-{0}, A)[::-1], A, mode='clip')",
        ]
    ).replace("A)", f"{axis})").replace("A,", f"{axis},"), [x]


@op("gather pairs", 1)
def _gather_pairs(d: Draw) -> Any:
    x = d.pick((2, 3))
    i = d.pick((0, 1), "i", lambda v: v.dtype.kind == "i")
    return d.choice(
        [
            "{0}.at[{1}, {1}].get(mode='clip')",
            "{0}.at[{1}, 0].get(mode='fill', fill_value=0)",
            "{0}[{1} % {0}.shape[0], {1} % {0}.shape[1]]",
            "{0}.at[..., {1}].get(mode='clip')",
            "{0}.at[jnp.arange({0}.shape[0]), 0].get(mode='clip')",
        ]
    ), [x, i]


@op("scatter", 4)
def _scatter(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    method = d.choice(["add", "add", "max", "min", "mul", "subtract", "set"])
    mode = d.choice(["", ", mode='drop'", ", mode='clip'" if method != "set" else ""])
    operands = [x]
    if method == "set":
        i = d.choice(
            [
                "np.array([0, 2, 5])",
                "0",
                "-1",
                "1:",
                "::2",
                ":-1",
                f"{{0}}.shape[{axis}] // 2:",
                "np.array([3])",
                "-2:",
            ]
        )
    else:
        i, more, _ = indices(d)
        operands += more
    at = ", ".join(i if k == axis else ":" for k in range(x.rank))
    value = d.choice(["0.7", "-1.5", "jnp.mean({0})", "0.5 * {0}.at[AT].get(mode='clip')"])
    return f"{{0}}.at[{at}].{method}({value.replace('AT', at)}{mode})", operands


@op("scatter rows", 2)
def _scatter_rows(d: Draw) -> Any:
    x = d.pick((1, 2))
    index, operands = "{1}", [x]
    if d.rng.random() < 0.6:
        index = "(jnp.argsort({0}.reshape({0}.shape[0], -1).sum(1)) * 2 % 7 - 1)"
    else:
        operands.append(d.pick(1, "i", lambda v: v.dtype.kind == "i" and same(v.shape[0], x.shape[0])))
    code = d.choice(
        [
            "jax.ops.segment_sum({0}, {1}, num_segments=5)",
            "jnp.maximum(jax.ops.segment_max({0}, {1}, num_segments=4), -3)",
            "jnp.clip(jax.ops.segment_min({0}, {1}, num_segments=4), -3, 3)",
            "jax.ops.segment_prod(1 + 0.3 * jnp.sin({0}), {1}, num_segments=3)",
            "jax.ops.segment_sum({0}, {1}, num_segments={0}.shape[0])",
            "jnp.zeros((6, *{0}.shape[1:]), F).at[{1}].add({0})",
            "jnp.zeros_like({0}).at[{1}].max({0}, mode='clip')",
            "jnp.bincount(jnp.abs({1}), length=6)",
            "jax.ops.segment_sum({0}, jnp.sort({1}), num_segments=5, indices_are_sorted=True)",
            "{0}.at[{1}].add({0}, mode='drop')",
        ]
    )
    return code.replace("{1}", index), operands


@op("permute", 1)
def _permute(d: Draw) -> Any:
    x = d.pick((1, 2))
    order = "jnp.argsort({0}.reshape({0}.shape[0], -1).sum(1))"
    return d.choice(
        [
            "{0}[%s]",
            "jnp.zeros_like({0}).at[%s].set({0})",
            "jnp.zeros_like({0}).at[%s].set({0}, unique_indices=True)",
        ]
    ) % order, [x]


@op("write into table", 1)
def _write_into_table(d: Draw) -> Any:
    x = d.pick((1, 2), where=lambda v: all(isinstance(k, int) for k in v.shape[1:]))
    rest = "".join(f", {k}" for k in x.shape[1:])
    table = f"K({d.number()}, 48{rest})"
    return d.choice(
        [
            f"jnp.asarray({table}).at[: {{0}}.shape[0]].set({{0}})[:20]",
            f"jnp.asarray({table}).at[: {{0}}.shape[0]].add({{0}})[:20]",
            f"{{0}} + jnp.asarray({table})[: {{0}}.shape[0]]",
            f"lax.dynamic_update_slice_in_dim(jnp.asarray({table}), {{0}}, 2, 0)[:20]",
        ]
    ), [x]


@op("dynamic slice", 3)
def _dynamic_slice(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    axis = d.axis(x)
    operands = [x]
    start = d.choice(["1", "-1", f"{{0}}.shape[{axis}] - 1", f"{{0}}.shape[{axis}] // 2"])
    if d.rng.random() < 0.6:
        operands.append(d.pick(0, "i"))
        start = "{1}"
    size = d.choice(
        ["1", "1", f"{{0}}.shape[{axis}]", f"({{0}}.shape[{axis}] + 1) // 2", f"{{0}}.shape[{axis}] - 1"]
    )
    part = d.choice(["* 2", "[::-1]"])
    return d.choice(
        [
            f"lax.dynamic_slice_in_dim({{0}}, {start}, {size}, {axis})",
            f"lax.dynamic_index_in_dim({{0}}, {start}, {axis}, keepdims=False)",
            f"lax.dynamic_update_slice_in_dim({{0}}, 2 * lax.dynamic_slice_in_dim({{0}}, 0, {size}, {axis}), {start}, {axis})",
            f"lax.dynamic_update_index_in_dim({{0}}, jnp.mean({{0}}, {axis}), {start}, {axis})",
            f"lax.dynamic_update_slice_in_dim(jnp.flip({{0}}), lax.slice_in_dim({{0}}, 0, {size}, 1, {axis}){part}, {start}, {axis})",
        ]
    ), operands


@op("integer of data", 1)
def _integer(d: Draw) -> Any:
    x = d.pick((0, 1, 2, 3))
    if x.rank == 0:
        return "jnp.floor({0} * 4).astype(np.int32)", [x]
    return d.choice(
        ["jnp.sum({0} > 0).astype(np.int32)", "jnp.argmax({0})", "(jnp.sum({0}) * 3).astype(np.int32) % 5"]
    ), [x]


# --- windows --------------------------------------------------------------------------------------


def padding(d: Draw, axes: int, low: int = 0) -> str:
    if d.rng.random() < 0.6:
        return d.choice(["'SAME'", "'SAME'", "'VALID'", "'SAME_LOWER'"])
    return f"({', '.join(f'({d.rng.randint(low, 2)}, {d.rng.randint(low, 2)})' for _ in range(axes))},)"


@op("conv 1d", 5)
def _conv1d(d: Draw) -> Any:
    x = d.pick((2, 3), where=lambda v: isinstance(v.shape[-1], int) and v.shape[-1] > 0)
    features, width, out = x.shape[-1], d.choice([1, 2, 3, 4, 5]), d.choice([1, 2, 4])
    groups = features if d.rng.random() < 0.2 else 1
    kernel = f"K({d.number()}, {width}, {features // groups}, {out * groups})"
    if d.rng.random() < 0.4:
        kernel += " * jnp.cos({0}.sum() / 9)"  # of no cells too: XLA does not say what NaN times padding is
    spatial = padding(d, 1, -1)
    explicit = spatial.startswith("(")
    left = "{0}[None]" if x.rank == 2 else "{0}"
    back = "[0]" if x.rank == 2 else ""
    options = f", feature_group_count={groups}" if groups > 1 else ""
    if d.rng.random() < 0.2:
        options += ", rhs_dilation=(2,)"
    if explicit and d.rng.random() < 0.4:
        options += f", lhs_dilation=({d.choice([2, 3])},)"
    numbers = "dimension_numbers=('NWC', 'WIO', 'NWC')"
    if d.rng.random() < 0.15 and groups == 1 and not explicit and spatial != "'SAME_LOWER'":
        code = f"lax.conv_transpose({left}, {kernel}, ({d.choice([1, 2, 3])},), {spatial}, {numbers})"
    else:
        code = f"lax.conv_general_dilated({left}, {kernel}, ({d.choice([1, 1, 2, 3])},), {spatial}, {numbers}{options})"
    return tame(f"0.5 * {code}{back}"), [x]


@op("conv 2d", 2)
def _conv2d(d: Draw) -> Any:
    x = d.pick((2, 3), where=lambda v: len(v.ragged) == 2)
    if x.rank == 3 and not isinstance(x.shape[2], int):
        raise NoFit
    features = 1 if x.rank == 2 else x.shape[2]
    h, w, out = d.choice([1, 2, 3]), d.choice([1, 2, 3, 4]), d.choice([1, 2])
    left = "{0}[None, :, :, None]" if x.rank == 2 else "{0}[None]"
    strides = (d.choice([1, 2, 3]), d.choice([1, 1, 2]))
    kernel = f"K({d.number()}, {h}, {w}, {features}, {out})"
    numbers = "dimension_numbers=('NHWC', 'HWIO', 'NHWC')"
    if d.rng.random() < 0.15:
        code = f"lax.conv_transpose({left}, {kernel}, {strides}, {d.choice(['SAME', 'VALID'])!r}, {numbers})"
    else:
        code = f"lax.conv_general_dilated({left}, {kernel}, {strides}, {padding(d, 2)}, {numbers})"
    return tame(f"0.5 * {code}[0]"), [x]


@op("conv of two", 1)
def _conv_of_two(d: Draw) -> Any:
    x, y = d.pick(1), d.pick(1)
    pads = d.choice(["[(0, 0)]", "[({1}.shape[0] - 1, {1}.shape[0] - 1)]", "[(1, 1)]", "'SAME'"])
    return tame(
        f"lax.conv_general_dilated({{0}}[None, None], {{1}}[None, None], ({d.choice([1, 1, 2])},), {pads})[0, 0]"
    ), [x, y]


@op("conv over ragged features", 1)
def _conv_features(d: Draw) -> Any:
    x = d.pick(2, where=lambda v: 1 in v.ragged)
    kernel = f"jnp.cos(lax.broadcasted_iota(F, (3, {{0}}.shape[1], 2), 1) + K({d.number()}, 3, 1, 2))"
    return tame(
        f"0.3 * lax.conv_general_dilated({{0}}[None], {kernel}, ({d.choice([1, 2])},), {padding(d, 1)}, dimension_numbers=('NWC', 'WIO', 'NWC'))[0]"
    ), [x]


@op("pool", 4)
def _pool(d: Draw) -> Any:
    x = d.pick((1, 2, 3))
    window: list[Any] = [d.choice([1, 2, 3]) for _ in range(x.rank)]
    if d.rng.random() < 0.2:
        axis = d.axis(x)
        window[axis] = f"{{0}}.shape[{axis}]" if d.rng.random() < 0.3 else f"({{0}}.shape[{axis}] + 1) // 2"
    strides = tuple(d.choice([1, 1, 2, 3]) for _ in range(x.rank))
    most = [w - 1 if isinstance(w, int) else 2 for w in window]
    pads = d.choice(
        [
            "'SAME'",
            "'SAME'",
            "'VALID'",
            f"({', '.join(f'({d.rng.randint(0, m)}, {d.rng.randint(0, m)})' for m in most)},)",
        ]
    )
    options = f", window_dilation={tuple(d.choice([1, 2]) for _ in window)}" if d.rng.random() < 0.15 else ""
    which = d.choice(["-jnp.inf, lax.max", "jnp.inf, lax.min", "0.0, lax.add", "1.0, lax.mul"])
    code = f"lax.reduce_window({{0}}, F({which.split(',')[0]}), {which.split(', ')[1]}, ({', '.join(map(str, window))},), {strides}, {pads}{options})"
    if "lax.m" in which:
        return f"jnp.clip({code}, -3, 3)", [x]
    if d.rng.random() < 0.5:  # an average that leaves the padding out of its count
        return f"{code} / {code.replace('({0}', '(jnp.ones_like({0})')}".replace("F(0.0)", "F(0)"), [x]
    return tame(code), [x]


templates(
    "resize",
    0.7,
    [
        "jax.image.resize({0}, (2 * {0}.shape[0], {0}.shape[1]), 'linear')",
        "jax.image.resize({0}, (2 * {0}.shape[0], {0}.shape[1]), 'nearest')",
        "jax.image.resize({0}, (5, 3), 'linear')",
        "jax.image.resize({0}, ({0}.shape[0], 6), 'cubic')",
    ],
    rank=(2,),
)
