"""Labs on the GPU at real widths, cut to what steps in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def open_gpu_lab() -> Iterator[Callable[..., Any]]:
    """Opens labs of two layers at full width, and closes the last one after the test."""
    from memlab.lab.lab import Lab

    labs: list[Lab] = []

    def open_lab(architecture: str = "qwen3-30b-a3b", **options: Any) -> Lab:
        labs.append(Lab(architecture, backend="cuda", **{"num_layers": 2, "seq_length": 2048, **options}))
        return labs[-1]

    yield open_lab
    for lab in labs:
        lab.close()
