"""Live labs for the tests. Megatron has its process groups once a process, so one lab is open at a time."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

# Before torch is imported, and for what tests start: a thread that waits for the others of an operation computes in vain,
# and several processes run tests at the same time. The tensors are too small to gain by a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test finds what another one, or the user, has predicted.
os.environ["MEMLAB_PREDICTIONS"] = ""

import memlab.regression  # noqa: F401  # before any test imports nbformat, without the 2 s that its imports take


def pytest_configure(config: pytest.Config) -> None:
    """Imports Megatron before a test does, which then would import more of torch's compiler (memlab/engines/megatron/__init__.py).

    The process that only hands tests out to others, with ``-n``, runs none, and imports neither torch nor Megatron.
    """
    if config.getoption("dist", "no") == "no":
        gc.disable()  # until all is imported, see below
        import_module("memlab.lab.lab")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests with the marker ``last`` behind all others."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.fixture(scope="session", autouse=True)
def _collections_pass_libraries_over() -> None:
    """A lab collects garbage after each change, and would look through all of torch and Megatron in every test."""
    gc.freeze()  # without a collection, which would visit all of it once more
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Collections pass over what a test has imported too, such as transformers, and over what a file's tests keep.

    While a lab is open, nothing is hidden: memlab looks for its tensors among the objects that collections visit.
    """
    num_modules = len(sys.modules)
    result = yield
    is_file_left = nextitem is None or nextitem.path != item.path
    if is_file_left or (len(sys.modules) > num_modules and sys.modules["memlab.lab.lab"].Lab._open is None):
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """A shell's background ignores SIGINT and SIGQUIT, nohup SIGHUP, and what they start inherits that: tests send them."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def open_lab() -> Iterator[Callable[..., Any]]:
    """Opens small labs, of two layers if a test does not say more, and closes the last one after the test."""
    from memlab.lab.lab import Lab

    labs: list[Lab] = []

    def open_lab(architecture: str = "qwen3-moe-tiny", **options: Any) -> Lab:
        labs.append(Lab(architecture, backend="cpu", **{"num_layers": 2, "seq_length": 128, **options}))
        return labs[-1]

    yield open_lab
    for lab in labs:
        lab.close()
