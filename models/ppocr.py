"""What PP-OCR's two networks share: the backbone that sees one image, and the loader of its weights.

An image of any size goes in, channels last, and a map at each scale comes out. Each block mixes space by a
3x3 filter a channel, then channels by an MLP; every other block first weighs its channels by their mean over
the whole image ("squeeze and excite"), which is where padding would reach every pixel.

Used by `models.ppocr_det` and `models.ppocr_rec`, after https://github.com/PaddlePaddle/PaddleOCR.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from .onnx_file import OnnxFile

Params = dict[str, Any]
"""Variables for `bind`: `{"params": {...}}`, float32."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Blocks of one width, led by one that brings the map to that width.

    Attributes:
      width: channels.
      squeezes: for each block, whether it weighs its channels first.
      stride: rows and columns that the leading block makes into one; None leaves that block out.
    """

    width: int
    squeezes: tuple[bool, ...]
    stride: tuple[int, int] | None = None


class Squeeze(nn.Module):
    """A factor for each channel, from the mean of every channel over the whole image."""

    slope: float = 1 / 6

    @nn.compact
    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "c"]:
        c = x.shape[-1]
        mean = jnp.mean(x, axis=(0, 1))
        return jnp.clip(self.slope * nn.Dense(c)(nn.relu(nn.Dense(c // 4)(mean))) + 0.5, 0, 1)


class Block(nn.Module):
    """Mix space, one channel at a time, then channels, one pixel at a time.

    A block that changes the scale or the width has no residual.
    """

    width: int
    stride: tuple[int, int] = (1, 1)
    squeeze: bool = False
    residual: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "h2 w2 d"]:
        c = x.shape[-1]
        x = nn.Conv(c, (3, 3), self.stride, padding=1, feature_group_count=c)(x)
        if self.squeeze:
            x = x * Squeeze()(x)
        y = nn.Dense(self.width)(nn.gelu(nn.Dense(2 * c)(x), approximate=False))
        return x + y if self.residual else y


class Stem(nn.Module):
    """From pixels to a map at a quarter of the size: coarse (a maximum) beside fine (two 2x2 filters)."""

    width: int
    out: int

    @nn.compact
    def __call__(self, image: Float[Array, "h w 3"]) -> Float[Array, "h4 w4 c"]:
        x = nn.relu(nn.Conv(self.width, (3, 3), 2, padding=1)(image))
        fine = nn.relu(nn.Conv(self.width // 2, (2, 2))(x))
        fine = nn.relu(nn.Conv(self.width, (2, 2))(fine))
        coarse = nn.max_pool(x, (2, 2), padding="SAME")
        x = nn.relu(nn.Conv(self.width, (3, 3), 2, padding=1)(jnp.concatenate([coarse, fine], axis=-1)))
        return nn.relu(nn.Dense(self.out)(x))


class Backbone(nn.Module):
    """The stem and the stages; returns the map after each stage."""

    stem: int
    stages: tuple[Stage, ...]

    @nn.compact
    def __call__(self, image: Float[Array, "h w 3"]) -> list[Float[Array, "hs ws c"]]:
        x = Stem(self.stem, self.stages[0].width)(image)
        maps = []
        for stage in self.stages:
            if stage.stride:
                x = Block(stage.width, stage.stride, residual=False)(x)
            for squeeze in stage.squeezes:
                x = Block(stage.width, squeeze=squeeze)(x)
            maps.append(x)
        return maps


# -- Loading --------------------------------------------------------------------------------------------


def fill(model: nn.Module, image: tuple[int, ...], file: OnnxFile) -> Params:
    """Fill `model`, which takes an image of this shape, with the weights of an ONNX file.

    The names in the file are running numbers, so weights are matched by order: both here and there, a layer
    comes when it runs, its kernel before its bias.

    Raises:
      ValueError: there are other weights than the model has, or of other shapes.
    """
    theirs, ours = file.in_order(), _shapes(model, image)
    if len(theirs) != len(ours):
        raise ValueError(f"there are {len(theirs)} weights; the model has {len(ours)}")
    params = {}
    for (path, shape), (name, tensor) in zip(ours.items(), theirs, strict=True):
        weight = _ours(tensor, transposed=path[-2].startswith("ConvTranspose"))
        if weight.shape != shape:
            raise ValueError(f"`{name}` has shape {tensor.shape}; {'/'.join(path)} is {shape}")
        params[path] = jnp.asarray(weight)
    return {"params": unflatten_dict(params)}


def _shapes(model: nn.Module, image: tuple[int, ...]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the shape of each parameter by path, in the order in which the model makes them."""
    paths = []

    def init(x: Array) -> Params:
        params = flatten_dict(model.init(jax.random.key(0), x)["params"])
        paths.extend(params)  # here, because a pytree would come out sorted by name
        return params

    shapes = jax.eval_shape(init, jax.ShapeDtypeStruct(image, jnp.float32))
    return {path: shapes[path].shape for path in paths}


def _ours(tensor: np.ndarray, *, transposed: bool) -> np.ndarray:
    """Return a weight as Flax keeps it: [height, width, in, out], without axes that only broadcast."""
    if tensor.ndim != 4:
        return tensor
    if tensor.shape[2:] == (1, 1):  # a 1x1 convolution, or its bias as [1, out, 1, 1]
        return tensor[0, :, 0, 0] if tensor.shape[0] == 1 else tensor[:, :, 0, 0].T
    if transposed:  # ONNX stores [in, out, ...] of the convolution that this one undoes: mirrored
        return tensor[:, :, ::-1, ::-1].transpose(2, 3, 0, 1)
    return tensor.transpose(2, 3, 1, 0)
