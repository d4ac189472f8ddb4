"""Artifacts: one file with the programs, weights and specs of a batched function, and no code.

Reading order: `_archive` (the file), `_parts` (what is said of programs and specs, with `_trees`), `_tensors`
(the arrays), `_sources` and `_checkpoint` (weights from training), `_export` and `_save` (writing), `_load`
and `_stored` (reading, and the face of a traced function), `_masked` (the exported function for use inside
JAX).
"""

from ._load import Shardings as Shardings
from ._load import load as load
from ._load import references as references
from ._masked import StoredMask as StoredMask
from ._save import Options as Options
from ._save import save as save
from ._sources import Sources as Sources
from ._sources import read_weights as read_weights
from ._stored import Artifact as Artifact
from ._stored import StoredFunction as StoredFunction
