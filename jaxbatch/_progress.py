"""A progress bar for long runs, drawn by rich. It has no thread of its own: the batches move it."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from ._pipeline import Work

_INTERVAL = 0.1  # seconds between two drawings


def progress_bar(wanted: bool, where: str, total: int | None) -> "ProgressBar | None":
    """Return a bar that is not open yet, or None if it is not wanted.

    Args:
      where: what messages, and the bar itself, begin with.
      total: the number of examples; None where it is not known.

    Raises:
      ImportError: there is nothing to draw it with.
    """
    if not wanted:
        return None
    if importlib.util.find_spec("rich") is None:
        raise ImportError(
            f"{where}: progress=True draws with the package rich, which is not installed. Install it with "
            f"pip install 'jaxbatch[demo]', or pass progress=False."
        )
    return ProgressBar(where, total)


class ProgressBar:
    """Examples done, examples a second, and padding, on stderr; open inside a `with` block.

    A bar that cannot be drawn, because stderr is closed or another bar is in the way, is left out: the run
    goes on.
    """

    def __init__(self, name: str, total: int | None):
        self._name, self._total = name, total
        self._done = self._valid = self._cells = 0
        self._bar: Any = None
        self._task: Any = None
        self._start = self._drawn = 0.0

    def __enter__(self) -> "ProgressBar":
        with self._left_out_on_errors():
            self._open()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        bar = self._bar
        if bar is None:
            return
        if kind is None and self._total is not None:
            self._done = self._total  # examples that are errors were in no batch
        with self._left_out_on_errors():
            self._draw()
        with self._left_out_on_errors():
            bar.stop()

    def advance(self, work: Work) -> None:
        """Count a batch that has its results; draw if the last time is long enough ago."""
        self._done += len(work.indices)
        self._cells += work.bucket.cells
        self._valid += int(work.lengths.prod(axis=1).sum())
        with self._left_out_on_errors():
            if self._bar is not None and self._bar.get_time() - self._drawn > _INTERVAL:
                self._draw()

    @contextlib.contextmanager
    def _left_out_on_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._bar = None

    def _open(self) -> None:
        from rich import progress  # the core works without it
        from rich.console import Console

        bar = progress.Progress(
            "{task.description}",
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            "{task.fields[text]}",
            console=Console(stderr=True),
            auto_refresh=False,  # it would take a thread
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = bar.add_task(self._name, total=self._total, text="")
        self._start = self._drawn = bar.get_time()
        bar.start()
        self._bar = bar

    def _draw(self) -> None:
        self._drawn = now = self._bar.get_time()
        speed = self._done / (now - self._start) if now > self._start else 0.0
        padding = 1 - self._valid / self._cells if self._cells else 0.0
        text = f"{speed:,.0f} examples/s, {padding:.1%} padding"
        self._bar.update(self._task, completed=self._done, text=text, refresh=True)
