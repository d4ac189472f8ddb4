"""What one writes without jaxbatch: the encoder once more with a batch axis and a mask, and a bucketed loop.

`Probe` is the same loop with the mask left out. Its answers are wrong for every padded text, so it is in no
table; the difference in time is what masking costs.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jaxbatch as jb
from models import bert

from ..batching import pad
from ..workloads import MAX_TOKENS, Workload
from .base import Answers, Settings, System
from .jax_programs import ONE_THREAD, Programs, encoder, in_flight
from .with_jaxbatch import grid_of, jobs_file

Batch = tuple[int, int, list[int]]
"""Padded size, rows, and which texts."""


def embed_batch(model: bert.Bert) -> Callable[..., jax.Array]:
    """Return the encoder of `model` for padded batches: `(params, ids [rows, n], lengths [rows])`."""
    config, einsum = model.config, model.form.einsum
    heads, d = config.num_attention_heads, config.hidden_size

    def norm(p: Any, x: jax.Array) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + config.layer_norm_eps) * p["scale"] + p["bias"]

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return einsum("rnd,df->rnf", x, p["kernel"]) + p["bias"]

    def attention(p: Any, x: jax.Array, bias: jax.Array) -> jax.Array:
        rows, n, _ = x.shape
        split = (rows, n, heads, d // heads)
        q, k, v = (dense(p[name], x).reshape(split).swapaxes(1, 2) for name in ("query", "key", "value"))
        scores = einsum("rhqd,rhkd->rhqk", q / math.sqrt(d // heads), k) + bias
        if model.form.attention == "softmax":
            mixed = einsum("rhqk,rhkd->rhqd", nn.softmax(scores), v)
        else:
            weights = jnp.exp(scores - scores.max(-1, keepdims=True))
            mixed = einsum("rhqk,rhkd->rhqd", weights, v) / weights.sum(-1, keepdims=True)
        return dense(p["output"], mixed.swapaxes(1, 2).reshape(rows, n, d))

    def embed(params: bert.Params, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        p, n = params["params"], ids.shape[1]
        mask = jnp.arange(n) < lengths[:, None]
        bias = jnp.where(mask, 0.0, -1e30)[:, None, None, :]
        x = p["words"]["embedding"][ids] + p["positions"]["embedding"][:n] + p["types"]["embedding"][0]
        x = norm(p["norm"], x)
        for i in range(config.num_hidden_layers):
            layer = p[f"layer_{i}"]
            x = norm(layer["attention_norm"], x + attention(layer["attention"], x, bias))
            h = nn.gelu(dense(layer["intermediate"], x), approximate=False)
            x = norm(layer["output_norm"], x + dense(layer["output"], h))
        mean = (x * mask[:, :, None]).sum(1) / lengths[:, None]
        return mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)

    return embed


class ByHand(System):
    """The hand-written loop over the same batches in the same buckets as jaxbatch.

    The batches are given to it, so planning is not in its time.
    """

    def __init__(self, settings: Settings, ladder: int | None, streams: int = 1):
        super().__init__(settings)
        self._ladder, self._streams = ladder, streams

    def load(self, workload: Workload) -> None:
        self._model, params = encoder(self.settings)
        options = ONE_THREAD if self._streams > 1 else None
        self._programs = Programs(self.function(self._model), params, options)
        self._batches = self._plan(workload)

    def function(self, model: bert.Bert) -> Callable[..., jax.Array]:
        return embed_batch(model)

    def run(self, workload: Workload) -> Answers:
        all_lengths = workload.lengths["n"]
        vectors = np.empty((len(all_lengths), 384), np.float32)

        def start(batch: Batch) -> jax.Array:
            size, rows, indices = batch
            lengths = np.full(rows, size, np.int32)
            lengths[: len(indices)] = all_lengths[indices]
            return self.start(pad([workload.items[i] for i in indices], size, rows, np.int32), lengths)

        def keep(batch: Batch, output: jax.Array) -> None:
            vectors[batch[2]] = np.asarray(output)[: len(batch[2])]

        single = len(all_lengths) == 1  # the first result after a cold start
        batches = [(MAX_TOKENS, 1, [0])] if single else self._batches
        in_flight(batches, start, keep, self._streams)
        self.padded_cells, self.programs = sum(s * rows for s, rows, _ in batches), len(self._programs)
        return vectors

    def start(self, ids: np.ndarray, lengths: np.ndarray) -> jax.Array:
        return self._programs(ids, lengths)

    def _plan(self, workload: Workload) -> list[Batch]:
        """Return jaxbatch's batches: those it used, or if it did not run, those it would use."""
        file = jobs_file(self.settings, self._ladder)
        if file.exists():
            return [tuple(each) for each in json.loads(file.read_text())]
        grid = grid_of(self._ladder, workload, self.settings)
        jobs = jb.batched(self._model.embed, (None, 0), grid=grid).explain(workload.lengths).jobs
        return [(job.bucket["n"], job.bucket["rows"], list(job.indices)) for job in jobs]


class Probe(ByHand):
    """The function of one text, vmapped and not masked, over the same batches: right only without padding."""

    def function(self, model: bert.Bert) -> Callable[..., jax.Array]:
        return jax.vmap(model.embed, (None, 0))

    def start(self, ids: np.ndarray, lengths: np.ndarray) -> jax.Array:
        return self._programs(ids)
