"""Every error jaxbatch raises on purpose, in one tree.

    JaxbatchError
    ├── SpecError (ValueError)              an example does not match its spec
    ├── OversizeError (ValueError)          an example is larger than the largest bucket
    ├── MaskError (NotImplementedError)     padding would change the answer; refused before compiling
    ├── CompileMissError (LookupError)      frozen, and a program is missing
    ├── ArtifactError (ValueError)          a saved artifact cannot be used here
    ├── DispatcherClosedError (RuntimeError)
    ├── DeadlineError (TimeoutError)
    └── QueueFullError (queue.Full)

Each class also derives from the built-in a caller would catch. Inner code raises a short fact; the
public function that the user called adds where it happened (`with_context`).
"""

import queue
from typing import Self


class JaxbatchError(Exception):
    """The base of every error that jaxbatch raises on purpose."""

    def with_context(self, where: str) -> Self:
        """Return the same error with `where: ` put before its message; further arguments are kept."""
        message = str(self.args[0]) if self.args else ""
        self.args = (f"{where}: {message}", *self.args[1:])
        return self


class SpecError(JaxbatchError, ValueError):
    """An example, or a spec itself, does not say what it must: rank, size, dtype, structure or range."""


class OversizeError(JaxbatchError, ValueError):
    """An example is larger than the largest bucket of the grid; nothing is ever truncated.

    Attributes:
      lengths: the example's length in each ragged dim, in elements.
      limits: the largest size that the grid has in each ragged dim, in elements.
    """

    def __init__(
        self,
        message: str,
        lengths: dict[str, int] | None = None,
        limits: dict[str, int] | None = None,
    ):
        super().__init__(message)
        self.lengths = lengths or {}
        self.limits = limits or {}


class MaskError(JaxbatchError, NotImplementedError):
    """An operation's answer would depend on the padding, and no rule makes it exact."""


class CompileMissError(JaxbatchError, LookupError):
    """A program is missing and `frozen` forbids compiling it."""


class ArtifactError(JaxbatchError, ValueError):
    """A saved artifact is damaged, foreign, from the future, or not made for this machine."""


class DispatcherClosedError(JaxbatchError, RuntimeError):
    """An example was submitted to a dispatcher that no longer takes any."""


class DeadlineError(JaxbatchError, TimeoutError):
    """A request's deadline passed before it was run; it was not run."""


class QueueFullError(JaxbatchError, queue.Full):
    """The dispatcher holds as much pending work as it may."""
