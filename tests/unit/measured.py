"""What was measured on GPUs, in ``labs/results``, and its comparison with a prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "labs" / "results"


def measured_rows(*files: str) -> list[dict[str, Any]]:
    """Returns the rows of files, such as ``h200_user_buffers``."""
    return [json.loads(line) for file in files for line in (RESULTS / f"{file}.jsonl").read_text().splitlines()]


def measured_by_name(*files: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in measured_rows(*files)}


def assert_predicted(
    row: dict[str, Any], rank: int = 0, *, start: float, peak: float, reserves_as_much: bool = False
) -> None:
    """Checks the last step of a job in plain Megatron, up to shares of what was measured."""
    from benchmarks.plain_megatron import predict_rank

    measured, predicted = row["ranks"][rank]["steps"][-1], predict_rank(row, rank)
    assert predicted.static_bytes == pytest.approx(measured["start_bytes"], rel=start)
    assert predicted.peak_allocated_bytes == pytest.approx(measured["peak_bytes"], rel=peak)
    if reserves_as_much:
        assert predicted.peak_reserved_bytes == measured["peak_reserved_bytes"]


def assert_fsdp2_predicted(row: dict[str, Any], **errors: float) -> None:
    """Checks ``start``, ``peak`` and ``reserved`` of a job with FSDP2, up to shares of what was measured."""
    from benchmarks.plain_fsdp2 import Job, predicted_of

    measured, predicted = row["ranks"][0], predicted_of(Job(**row["job"]))
    for name, share in errors.items():
        assert predicted[name] == pytest.approx(measured[name], rel=share), name
