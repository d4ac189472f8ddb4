"""BERT for one text: token ids in, hidden states out, with no mask, batch axis or size branch in it.

Loads the usual folder of `model.safetensors` and `config.json` (a Hugging Face snapshot, or what
`models.weights.fetch` leaves behind). The form is that of the paper (https://arxiv.org/abs/1810.04805):
learned positions, layer norm after each residual, exact gelu.

    model, params = bert.load(models.weights.fetch("minilm"))
    vector = model.embed(params, tokens)

It can be computed in several forms, and which is the fastest depends on the device: see `Form`.
"""

import dataclasses
import functools
import json
import math
import re
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int

Params = dict[str, Any]
"""Variables for `Bert.apply`: `{"params": {...}}`, float32; kernels in the dtype of the form's products."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The entries of a Hugging Face `config.json` that shape the model, under their own names.

    `mlm_head` is ours: whether the weights have the head that `logits` and `splade` need.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    mlm_head: bool = False

    def __post_init__(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads"
            )

    @classmethod
    def from_json(cls, path: str | PathLike) -> "Config":
        """Read `config.json`; a variant of BERT that this file does not build is a `ValueError`."""
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, supported in _ONLY_SUPPORTED.items():
            if found.get(name, supported) != supported:
                raise ValueError(f"{path}: `{name}` is {found[name]!r}; only {supported!r} is supported")
        names = [field.name for field in dataclasses.fields(cls) if field.name != "mlm_head"]
        missing = [name for name in ("model_type", *names[:5]) if name not in found]
        if missing:
            raise ValueError(f"{path}: no entry {', '.join(missing)}; is this the config of a BERT?")
        mlm_head = "BertForMaskedLM" in found.get("architectures", ())
        return cls(**{name: found[name] for name in names if name in found}, mlm_head=mlm_head)


_ONLY_SUPPORTED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class Form:
    """How the model is computed: the same function, up to rounding. Measure before you choose.

    Times are of MiniLM on a CPU with AMX, 16 to 256 tokens; nothing of it may be assumed of another device.

    Attributes:
      attention: "softmax", as in the paper, or "late": exponentials weigh the values first, and their sum
        divides what comes out, n x d numbers instead of n x n. 1.0 to 1.2 times as fast in float32, 1.1 to
        1.7 in bfloat16. The largest score is subtracted first, as in a softmax: MiniLM's own scores go up to
        89, and exp(89) is not a float32.
      products: the dtype of the operands of matrix products; sums and all else stay float32. "bfloat16" is 3
        to 4 times as fast with AMX, and moves MiniLM's unit vectors by up to 2e-3.
    """

    attention: Literal["softmax", "late"] = "softmax"
    products: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        for name, choices in (("attention", ("softmax", "late")), ("products", ("float32", "bfloat16"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"Form: {name}={getattr(self, name)!r}; use one of {', '.join(choices)}")

    def einsum(self, equation: str, x: Array, y: Array) -> Array:
        """Contract two arrays, with operands of the form's dtype and a float32 result."""
        x, y = x.astype(self.products), y.astype(self.products)
        return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


class Dense(nn.Module):
    """A matrix product and a bias."""

    features: int
    form: Form

    @nn.compact
    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n features"]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return self.form.einsum("nd,df->nf", x, kernel) + bias


class Attention(nn.Module):
    """Multi-head self-attention of every token to every token."""

    config: Config
    form: Form

    @nn.compact
    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        n, d = x.shape
        heads = self.config.num_attention_heads
        split = (n, heads, d // heads)
        # Heads first: with heads in the middle, XLA takes up to three times as long on a CPU.
        q, k, v = (
            Dense(d, self.form, name=name)(x).reshape(split).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = self.form.einsum("hqd,hkd->hqk", q / math.sqrt(d // heads), k)
        if self.form.attention == "softmax":
            mixed = self.form.einsum("hqk,hkd->hqd", nn.softmax(scores), v)
        else:
            weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=2, keepdims=True)))
            mixed = self.form.einsum("hqk,hkd->hqd", weights, v) / weights.sum(axis=2, keepdims=True)
        return Dense(d, self.form, name="output")(mixed.swapaxes(0, 1).reshape(n, d))


class Layer(nn.Module):
    """Attention, then an MLP, each added to its input and normalised."""

    config: Config
    form: Form

    @nn.compact
    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        config, form, d = self.config, self.form, x.shape[1]
        x = _norm(config, "attention_norm")(x + Attention(config, form, name="attention")(x))
        h = nn.gelu(Dense(config.intermediate_size, form, name="intermediate")(x), approximate=False)
        return _norm(config, "output_norm")(x + Dense(d, form, name="output")(h))


class WordHead(nn.Module):
    """The masked-word head: compare each token, transformed, with the embeddings of all words."""

    config: Config
    form: Form

    @nn.compact
    def __call__(self, x: Float[Array, "n d"], words: Float[Array, "vocab d"]) -> Float[Array, "n vocab"]:
        x = nn.gelu(Dense(x.shape[1], self.form, name="dense")(x), approximate=False)
        x = _norm(self.config, "norm")(x)
        bias = self.param("bias", nn.initializers.zeros, (words.shape[0],))
        return self.form.einsum("nd,vd->nv", x, words) + bias


class Bert(nn.Module):
    """The encoder, and what people read off it: `embed`, `logits`, `splade`."""

    config: Config
    form: Form = Form()

    def setup(self):
        config, d = self.config, self.config.hidden_size
        self.words = nn.Embed(config.vocab_size, d)
        self.positions = nn.Embed(config.max_position_embeddings, d)
        self.types = nn.Embed(config.type_vocab_size, d)
        self.norm = _norm(config)
        self.layer = [Layer(config, self.form) for _ in range(config.num_hidden_layers)]
        if config.mlm_head:
            self.head = WordHead(config, self.form)

    def __call__(self, tokens: Int[Array, " n"]) -> Float[Array, "n d"]:
        """Return the last hidden state of each token; every token is of type 0 (one sentence)."""
        n = tokens.shape[0]
        x = self.norm(self.words(tokens) + self.positions.embedding[:n] + self.types.embedding[0])
        for layer in self.layer:
            x = layer(x)
        return x

    def logits(self, tokens: Int[Array, " n"]) -> Float[Array, "n vocab"]:
        """Return the masked-word logits of each token; needs weights with `mlm_head`."""
        if not self.config.mlm_head:
            raise ValueError("these weights have no masked-word head; load a `BertForMaskedLM`")
        return self.head(self(tokens), self.words.embedding)

    @nn.nowrap
    def embed(self, params: Params, tokens: Int[Array, " n"]) -> Float[Array, " d"]:
        """Return the unit vector of a text: the mean over all its tokens, [CLS] and [SEP] included.

        This is how sentence-transformers reads all-MiniLM-L6-v2.
        """
        mean = jnp.mean(self.bind(params)(tokens), axis=0)
        return mean / jnp.maximum(jnp.linalg.norm(mean), 1e-12)

    @nn.nowrap
    def splade(self, params: Params, tokens: Int[Array, " n"]) -> Float[Array, " vocab"]:
        """Return a sparse vector over the vocabulary: the words that the text is about, weighted.

        Source: SPLADE, https://arxiv.org/abs/2109.10086, its max-pooled form.
        """
        return jnp.max(jnp.log1p(nn.relu(self.bind(params).logits(tokens))), axis=0)


def _norm(config: Config, name: str | None = None) -> nn.LayerNorm:
    # The two-pass variance: the fast one loses digits where the mean is large, and this must match BERT.
    return nn.LayerNorm(epsilon=config.layer_norm_eps, use_fast_variance=False, name=name)


# -- Loading --------------------------------------------------------------------------------------------

_HUGGING_FACE = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "layer/attention/query": "encoder.layer.{}.attention.self.query",
    "layer/attention/key": "encoder.layer.{}.attention.self.key",
    "layer/attention/value": "encoder.layer.{}.attention.self.value",
    "layer/attention/output": "encoder.layer.{}.attention.output.dense",
    "layer/attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "layer/intermediate": "encoder.layer.{}.intermediate.dense",
    "layer/output": "encoder.layer.{}.output.dense",
    "layer/output_norm": "encoder.layer.{}.output.LayerNorm",
    "head/dense": "cls.predictions.transform.dense",
    "head/norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
}
"""Our modules and theirs."""

_NEVER_READ = re.compile(r"^pooler\.|position_ids$|^cls\.predictions\.decoder\.|^cls\.seq_relationship\.")
"""Heads that this file does not have, position numbers, and copies of the tied word embeddings."""


def load(path: str | PathLike, form: Form = Form()) -> tuple[Bert, Params]:
    """Load the model and its weights from a folder with `config.json` and `model.safetensors`.

    Args:
      path: the folder.
      form: how the model is computed.

    Raises:
      ValueError: a weight is missing, unknown or of the wrong shape, or the config is not a plain BERT's.
      FileNotFoundError: one of the two files is not there.
    """
    config, weights = Path(path, "config.json"), Path(path, "model.safetensors")
    for file in (config, weights):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there; expected the folder of a saved BERT")
    model = Bert(Config.from_json(config), form)
    try:
        return model, convert(model, safetensors.numpy.load_file(weights))
    except ValueError as error:
        raise ValueError(f"{weights}: {error}") from error


def convert(model: Bert, weights: dict[str, np.ndarray]) -> Params:
    """Rename and transpose Hugging Face weights into `model`'s params, each used exactly once.

    Names may have the prefix `bert.`, and TensorFlow's `gamma` and `beta` for `weight` and `bias`.
    """
    weights = {_modern(name): weight for name, weight in weights.items()}
    weights = {name: weight for name, weight in weights.items() if not _NEVER_READ.search(name)}
    wanted = {_hugging_face(path): (path, shape) for path, shape in _shapes(model).items()}
    missing, unknown = sorted(wanted.keys() - weights), sorted(weights.keys() - wanted)
    if missing or unknown:
        raise ValueError(f"missing weights: {missing or 'none'}; unknown weights: {unknown or 'none'}")
    params = {}
    for name, (path, shape) in wanted.items():
        # A torch `Linear` keeps [out, in], a Flax `Dense` [in, out].
        weight = weights[name].T if path[-1] == "kernel" else weights[name]
        if weight.shape != shape:
            raise ValueError(f"`{name}`, as [in, out], has shape {weight.shape}; the config says {shape}")
        params[path] = jnp.asarray(weight, model.form.products if path[-1] == "kernel" else jnp.float32)
    return {"params": unflatten_dict(params)}


def _shapes(model: Bert) -> dict[tuple[str, ...], tuple[int, ...]]:
    method = "logits" if model.config.mlm_head else "__call__"
    init = functools.partial(model.init, method=method)
    variables = jax.eval_shape(init, jax.random.key(0), jnp.zeros(1, jnp.int32))
    return jax.tree.map(jnp.shape, flatten_dict(variables["params"]))


def _hugging_face(path: tuple[str, ...]) -> str:
    """Return their name: for `layer_3/output/kernel`, `encoder.layer.3.output.dense.weight`."""
    ours, leaf = "/".join(path[:-1]), path[-1]
    number = re.match(r"layer_(\d+)/", ours)
    theirs = _HUGGING_FACE[re.sub(r"^layer_\d+/", "layer/", ours)].format(number and number[1])
    return f"{theirs}.{'bias' if leaf == 'bias' else 'weight'}"


def _modern(name: str) -> str:
    name = name.removeprefix("bert.")
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_TENSORFLOW[m[1]]}", name)


_TENSORFLOW = {"gamma": "weight", "beta": "bias"}
