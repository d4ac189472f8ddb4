"""PP-OCR's text detector for one image of any size: how likely each pixel is to lie in a line of text.

The backbone's maps, from a quarter to a 32nd of the size, are added up from coarse to fine; each sum is
filtered, brought to a quarter of the size and stacked, and two transposed convolutions restore the pixels.
After https://arxiv.org/abs/1911.08947, whose last step, a threshold, is left to the caller.

    params = ppocr_det.load(models.weights.fetch("ppocr"))
    found = ppocr_det.detect(params, image) > 0.3
"""

from os import PathLike
from pathlib import Path

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from . import onnx_file
from .ppocr import Backbone, Params, Squeeze, Stage, fill

STAGES = (
    Stage(48, squeezes=(True, False)),
    Stage(96, squeezes=(True, False), stride=(2, 2)),
    Stage(192, squeezes=(True, False, True, False), stride=(2, 2)),
    Stage(384, squeezes=(True, False), stride=(2, 2)),
)
WIDTH = 96


class Excited(nn.Module):
    """A 1x1 convolution, and on top of it the same weighed by channel."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "h w d"]:
        x = nn.Dense(self.width, use_bias=False)(x)
        return x + x * Squeeze(slope=0.2)(x)


class Filtered(nn.Module):
    """A 7x7 filter a channel, then few channels."""

    @nn.compact
    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "h w d"]:
        x = nn.Conv(WIDTH, (7, 7), padding=3, feature_group_count=WIDTH)(x)
        return Excited(WIDTH // 4)(x)


class Detector(nn.Module):
    """The backbone, a feature pyramid over its maps, and the way back to pixels."""

    @nn.compact
    def __call__(self, image: Float[Array, "3 32*h 32*w"]) -> Float[Array, "32*h 32*w"]:
        maps = Backbone(24, STAGES)(image.transpose(1, 2, 0))
        coarse_to_fine = [Excited(WIDTH)(x) for x in reversed(maps)]
        sums = coarse_to_fine[:1]
        for x in coarse_to_fine[1:]:
            sums.append(x + enlarge(sums[-1], 2))
        sums = [Filtered()(x) for x in sums]
        x = jnp.concatenate([enlarge(x, n) for x, n in zip(sums, (8, 4, 2, 1), strict=True)], axis=-1)
        x = nn.relu(nn.Conv(WIDTH // 4, (3, 3), padding=1)(x))
        x = nn.relu(nn.ConvTranspose(WIDTH // 4, (2, 2), (2, 2), padding="VALID")(x))
        x = nn.ConvTranspose(1, (2, 2), (2, 2), padding="VALID")(x)
        return nn.sigmoid(x[:, :, 0])


def enlarge(x: Float[Array, "h w c"], times: int) -> Float[Array, "h2 w2 c"]:
    """Repeat each pixel, in both directions."""
    return jnp.repeat(jnp.repeat(x, times, axis=0), times, axis=1)


def detect(params: Params, image: Float[Array, "3 32*h 32*w"]) -> Float[Array, "32*h 32*w"]:
    """Return the probability that each pixel lies in a line of text.

    Args:
      params: from `load`.
      image: blue, green and red, each from -1 to 1.
    """
    return Detector().bind(params)(image)


# -- Loading --------------------------------------------------------------------------------------------

_FILE = "PP-OCRv6_det_small.onnx"


def load(path: str | PathLike) -> Params:
    """Load the weights from the folder with `PP-OCRv6_det_small.onnx`.

    Raises:
      ValueError: the file holds other weights than this model's.
    """
    path = Path(path, _FILE)
    try:
        return fill(Detector(), (3, 32, 32), onnx_file.read(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
