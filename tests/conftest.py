"""Live labs for the tests. Megatron has its process groups once a process, so one lab is open at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def open_lab() -> Iterator[Callable[..., Any]]:
    """Opens small labs, and closes the last one after the test."""
    from memlab.lab import Lab

    labs: list[Lab] = []

    def open_lab(architecture: str = "qwen3-moe-tiny", **options: Any) -> Lab:
        labs.append(Lab(architecture, backend="cpu", **{"seq_length": 128, **options}))
        return labs[-1]

    yield open_lab
    for lab in labs:
        lab.close()
