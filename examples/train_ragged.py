"""Train a small network on texts of very different lengths, then run it from the command line.

    python -m examples.train_ragged
    python -m examples.train_ragged --texts lines.txt --epochs 5 --output spacer/

The task is to put the spaces back into text: characters without spaces go in, and for each one the network
says whether a space follows. Unless you bring your own, the texts are sentences of the docstrings of the
installed numpy. The loss is written for one text at its exact size; `jaxbatch.mask` makes it one of padded
texts, and `jaxbatch.batches` brings padded texts of few shapes. The weights go into an Orbax checkpoint, that
becomes an artifact, and the command `jaxbatch run`, which knows nothing of this file, puts the spaces back.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint
from jaxtyping import Array, Float, Int

import jaxbatch as jb
from examples.embed_texts import docstrings

MAX_CHARACTERS = 256  # longer texts are left out, and counted
ROWS = 32
EXAMPLE = {"characters": jb.spec("n", "uint8"), "space_follows": jb.spec("n", "bool")}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

Example = dict[str, Any]
Params = Any


class Spacer(nn.Module):
    """A character's logit that a space follows, from the characters around it."""

    width: int = 96
    num_layers: int = 3

    @nn.compact
    def __call__(self, characters: Int[Array, "n"]) -> Float[Array, "n"]:
        x = nn.Embed(256, self.width)(characters)
        for _ in range(self.num_layers):
            x = x + nn.gelu(nn.Conv(self.width, (5,))(nn.LayerNorm()(x)))
        return nn.Dense(1)(nn.LayerNorm()(x))[:, 0]


MODEL = Spacer()


def logits_of(params: Params, characters: Int[Array, "n"]) -> Float[Array, "n"]:
    logits = MODEL.apply(params, characters)
    assert isinstance(logits, jax.Array)
    return logits


def losses(params: Params, example: Example) -> Example:
    """Return the sums over the characters of one text, with no padding, mask or batch axis in sight."""
    logits = logits_of(params, example["characters"])
    target = example["space_follows"]
    return {
        "loss": optax.sigmoid_binary_cross_entropy(logits, target).sum(),
        "right": ((logits > 0) == target).sum(),
    }


# The same for padded texts, and for rows of them.
EACH = jax.vmap(jb.mask(losses, in_axes=(None, 0), spec=EXAMPLE), in_axes=(0, None, 0))


def batch_loss(params: Params, batch: jb.PaddedBatch, count: Any) -> tuple[Any, Any]:
    """Return this batch's part of a mean over `count` characters, and how many it got right."""
    sums = EACH(batch.lengths, params, batch.arrays)
    return batch.sum(sums["loss"]) / count, batch.sum(sums["right"])


batch_gradient = jax.jit(jax.grad(batch_loss, has_aux=True))


def example_of(text: str) -> Example:
    """Return the text without spaces, and where they were; what is not ASCII becomes one character."""
    characters = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    space = characters == ord(" ")
    return {"characters": characters[~space], "space_follows": np.append(space[1:], False)[~space]}


def read(file: Path | None) -> list[str]:
    """Return the lines of a file, or sentences of docstrings, each once and with single spaces."""
    if file:
        texts = file.read_text(encoding="utf-8").splitlines()
    else:
        texts = [sentence for _, text in docstrings("numpy") for sentence in re.split(r"(?<=\.)\s", text)]
    return [text for text in dict.fromkeys(" ".join(text.split()) for text in texts) if text]


def gradient_difference(params: Params, data: Sequence[Example], batches: Callable[..., jb.Batches]) -> float:
    """Compare the gradient gathered over padded batches with that of unpadded texts, relative to its size."""
    count = sum(len(example["characters"]) for example in data)
    parts = [batch_gradient(params, batch, count)[0] for batch in batches(data)]
    padded = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    single = jax.jit(jax.grad(lambda params, example: losses(params, example)["loss"] / count))
    unpadded = jax.tree.map(lambda *leaves: sum(leaves), *(single(params, example) for example in data))
    difference = jax.tree.map(lambda a, b: a - b, padded, unpadded)
    return float(optax.tree.norm(difference) / optax.tree.norm(unpadded))


# --- from the weights to the command line ----------------------------------------------------------


def space_follows(params: Params, characters: Int[Array, "n"]) -> Float[Array, "n"]:
    """Return for each character the probability that a space follows."""
    return jax.nn.sigmoid(logits_of(params, characters))


def export(folder: Path, params: Params, grid: jb.Grid) -> Path:
    """Write the weights as a training loop does, and an artifact of them, and return its path."""
    checkpoint, artifact = folder / "checkpoint", folder / "spacer.jbx"
    shutil.rmtree(checkpoint, ignore_errors=True)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(checkpoint.resolve(), params)
    spec = jb.spec("n", "uint8")
    jb.batched(space_follows, in_axes=(None, 0), spec=spec, grid=grid).save(artifact, checkpoint)
    return artifact


def run_command(artifact: Path, data: Sequence[Example]) -> list[Any]:
    """Run texts through an artifact in a process of its own, and return the probabilities of each."""
    rows, results = artifact.with_name("texts.jsonl"), artifact.with_name("spaces.jsonl")
    lines = (json.dumps({"characters": example["characters"].tolist()}) for example in data)
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["run", artifact, rows, "-o", results]
    print("jaxbatch", *command)
    subprocess.run([sys.executable, "-m", "jaxbatch", *map(str, command)], check=True)
    return [json.loads(line)["result"] for line in results.read_text(encoding="utf-8").splitlines()]


def with_spaces(example: Example, follows: Any) -> str:
    """Return a text with spaces where they are said to follow."""
    pairs = zip(example["characters"], np.asarray(follows) > 0.5, strict=True)
    return "".join(chr(character) + " " * bool(space) for character, space in pairs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=Path, metavar="FILE", help="one text a line, UTF-8")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--sizes", type=int, default=5, metavar="N", help="padded sizes (default: 5)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keeps checkpoint and artifact")
    options = parser.parse_args(argv)

    texts = read(options.texts)
    data = [example for example in map(example_of, texts) if len(example["characters"]) <= MAX_CHARACTERS]
    held_out, train = data[::10], [example for i, example in enumerate(data) if i % 10]
    lengths = np.array([len(example["characters"]) for example in train])
    grid = jb.Grid.fit(lengths, max_sizes=options.sizes, rows=[ROWS])

    def batches(examples: Sequence[Example], seed: int | None = None) -> jb.Batches:
        return jb.batches(examples, spec=EXAMPLE, grid=grid, seed=seed)

    # Every character of an epoch weighs the same: what a batch sums up is divided by what batches have on
    # average, not by its own number of characters, which differs, or by that of padded ones.
    per_step = ROWS * lengths.mean()
    traces = []

    @jax.jit
    def step(params: Params, state: Any, batch: jb.PaddedBatch) -> tuple[Params, Any, Any, Any]:
        traces.append(batch.bucket)  # runs once for each program that is compiled
        (loss, right), gradient = jax.value_and_grad(batch_loss, has_aux=True)(params, batch, per_step)
        updates, state = OPTIMIZER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss * per_step, right

    params = MODEL.init(jax.random.key(0), np.zeros(1, np.uint8))
    state = OPTIMIZER.init(params)
    print(f"{len(train):,} texts of {lengths.min()} to {lengths.max()} characters; {grid}")
    print(f"{len(held_out):,} texts held out, {len(texts) - len(data):,} left out as too long")
    for epoch in range(options.epochs):
        sums = []
        for batch in batches(train, seed=epoch):
            params, state, loss, right = step(params, state, batch)
            sums.append((loss, right, batch.count("n"), batch.valid.size * batch.bucket["n"]))
        loss, right, count, cells = np.sum(np.array(sums, np.float64), axis=0)
        print(
            f"epoch {epoch + 1}: loss {loss / count:.3f}, {right / count:.1%} right, {len(sums)} steps, "
            f"{1 - count / cells:.0%} padding"
        )

    score = jax.jit(batch_loss)
    right, count = np.sum([(score(params, b, 1)[1], b.count("n")) for b in batches(held_out)], axis=0)
    never = 1 - np.concatenate([example["space_follows"] for example in held_out]).mean()
    few = sorted(train, key=lambda example: len(example["characters"]))[:: max(len(train) // 6, 1)][:6]
    print(f"""
held-out texts       {right / count:.1%} right; never a space would be {never:.1%}
programs compiled    {len(traces)} of at most {len(grid)}
gradient difference  {gradient_difference(params, few, batches):.1e}, padded batches to unpadded texts
""")

    with contextlib.ExitStack() as stack:
        folder = options.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        artifact = export(folder, params, grid)
        print(f"{artifact}: {artifact.stat().st_size:,} bytes, made of {folder / 'checkpoint'}")
        follows = run_command(artifact, held_out)
    targets = [example["space_follows"] for example in held_out]
    same = [(np.asarray(p) > 0.5) == t for p, t in zip(follows, targets, strict=True)]
    print(f"""
from the command     {np.concatenate(same).mean():.1%} right
it reads             {with_spaces(held_out[0], np.zeros(len(targets[0])))}
it writes            {with_spaces(held_out[0], follows[0])}""")


if __name__ == "__main__":
    main()
