"""The progress bar: what it shows, and that a run never depends on it."""

import importlib.util
import itertools
import threading

import numpy as np
import pytest
from ragged import normals

import jaxbatch as jb
from jaxbatch._progress import ProgressBar

VECTOR = jb.spec("n", "float32")


def double(x):
    return x * 2


def run() -> jb.Batched:
    return jb.batched(double, spec=VECTOR, grid=jb.Grid(n=[4, 8], rows=[2]))


@pytest.fixture
def closed(monkeypatch):
    """Return the bars that were closed, in order."""
    bars, leave = [], ProgressBar.__exit__
    monkeypatch.setattr(
        ProgressBar, "__exit__", lambda self, *args: (bars.append(self), leave(self, *args))[1]
    )
    return bars


def test_a_bar_shows_examples_their_speed_and_the_padding_on_stderr(capsys, closed):
    got = run()(normals([3, 4, 8, 6]), progress=True)
    assert len(got) == 4
    out, err = capsys.readouterr()
    assert out == "" and "jaxbatch.batched(double)" in err
    assert "4/4" in err and "examples/s" in err and "12.5% padding" in err
    (bar,) = closed
    assert bar._bar.finished and not bar._bar.live.is_started


def test_results_are_the_same_and_nothing_is_shown_unless_it_is_asked_for(capsys):
    xs = normals([3, 4, 8, 6])
    for one, two in zip(run()(xs, progress=True), run()(xs), strict=True):
        np.testing.assert_array_equal(one, two)
    capsys.readouterr()
    run()(xs)
    list(run().map(xs))
    assert capsys.readouterr() == ("", "")


def test_a_bar_over_a_list_knows_its_total_and_one_over_a_generator_does_not(capsys):
    list(run().map(normals([3] * 5), progress=True))
    assert "5/5" in capsys.readouterr().err
    list(run().map(iter(normals([3] * 5)), progress=True))
    assert "5/?" in capsys.readouterr().err


def test_examples_that_are_errors_count_as_done(capsys):
    got = run()([*normals([3, 4]), "a text", *normals([100])], errors="return", progress=True)
    assert isinstance(got[2], jb.SpecError) and isinstance(got[3], jb.OversizeError)
    assert "4/4" in capsys.readouterr().err


def test_the_bar_is_closed_when_the_run_fails_or_is_left(capsys, closed):
    with pytest.raises(jb.SpecError):
        run()([*normals([3]), "a text"], progress=True)
    assert len(closed) == 1
    stream = run().map((np.ones(3, np.float32) for _ in itertools.count()), progress=True)
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]  # it is a generator

    def failing():
        yield from normals([3] * 20)
        raise KeyError("the source broke")

    with pytest.raises(KeyError, match="the source broke"):
        list(run().map(failing(), progress=True))
    assert len(closed) == 3
    assert not any(bar._bar.live.is_started for bar in closed)


def test_a_bar_that_cannot_be_drawn_leaves_the_run_alone(monkeypatch, capsys):
    def broken(self):
        raise OSError("stderr is closed")

    for method in ("_open", "_draw"):
        with monkeypatch.context() as patch:
            patch.setattr(ProgressBar, method, broken)
            assert len(run()(normals([3, 4, 8, 6]), progress=True)) == 4
            assert len(list(run().map(normals([3, 4, 8, 6]), progress=True))) == 4


def test_two_bars_at_once_do_not_stop_each_other(capsys):
    streams = [run().map(normals([3] * 40), progress=True) for _ in range(2)]
    assert len(list(zip(*streams, strict=True))) == 40


def test_a_bar_has_no_thread(capsys):
    before = set(threading.enumerate())
    stream = run().map(normals([3] * 40), progress=True)
    next(stream)
    named = [thread for thread in threading.enumerate() if thread not in before]
    assert named == []
    assert len(list(stream)) == 39


def test_without_rich_the_message_says_what_to_install_before_anything_runs(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "rich" else find(name, *a)
    )
    for call in (run(), run().map):
        with pytest.raises(
            ImportError, match=r"jaxbatch.batched\(double\): .* pip install 'jaxbatch\[demo\]'"
        ):
            call(normals([3]), progress=True)
    assert len(run()(normals([3]))) == 1
