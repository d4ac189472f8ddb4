"""What is served: a function that costs next to nothing, and real MiniLM."""

import numpy as np

import jaxbatch as jb

Served = tuple[jb.Batched, tuple, list[np.ndarray]]
"""The batched function, its shared arguments, and examples."""


def tiny() -> Served:
    """Return a function that costs next to nothing."""
    run = jb.batched(_total, spec=jb.spec("n", "float32"), grid=jb.Grid(n=(16, 64), rows=(1, 16)))
    rng = np.random.default_rng(0)
    return run, (), [rng.normal(size=n).astype(np.float32) for n in rng.integers(1, 65, 512)]


def _total(x):
    return x.sum()


def minilm() -> Served:
    """Return real MiniLM, and texts as ids of lengths as search queries and paragraphs have them."""
    from models import bert, weights

    model, params = bert.load(weights.fetch("minilm"))
    grid = jb.Grid(n=(16, 128), rows=(1, 16), max_cells=1024)
    run = jb.batched(model.embed, (None, 0), spec=jb.spec("n", "int32"), grid=grid)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.2, 0.7, 512), 3, 128).astype(int)
    return run, (params,), [rng.integers(1000, 2000, n).astype(np.int32) for n in lengths]
