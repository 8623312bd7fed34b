"""The page of published jobs: predicted beside measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memlab.units import GIB, MIB

if TYPE_CHECKING:
    from memlab.lab.published import Compared

_HEADS = (
    "job", "GPU", "ranks", "measured peak MiB", "predicted MiB", "difference", "difference MiB",
    "between steps MiB", "predicted MiB", "difference MiB", "not modelled",
)  # fmt: skip
_INTRODUCTION = """# Published jobs

What others measured, beside what memlab predicts from their arguments. `memlab published` prints this page.

Megatron-LM's tests log the bytes of torch's allocator on the last rank: the peak since the process began, and what is
allocated after a step (`training_log` in `megatron/training/training.py`, 0.16.1). A peak can thus include building the
model and saving a checkpoint. Torch's allocator counts the whole block that it gives, which may be up to 1 MiB larger
than the request, and which block it gives depends on all that the process allocated before. In jobs of 1 to 3 GiB this
makes 0 to 10 MiB, at the peak and between steps, and a prediction matches only a part of it. The jobs ran with other
versions of Megatron, Transformer Engine and cuDNN than memlab's, named in `labs/results/published_jobs.json` with
repository, path and commit.
What is known of a difference is below the table. A large one that has no line there is not explained yet.
"""
_OF_GPUS = """
## What GPUs showed

Scripts of ms-swift state in a comment, as whole GiB, what their authors' GPUs showed. Beside it is what memlab predicts
of torch's reserved bytes, with what CUDA and its libraries take outside torch. Their rows are as long as their data,
and memlab takes the longest row that the script allows.
"""
_HEADS_OF_GPUS = ("job", "ranks", "shown GiB", "predicted GiB", "difference GiB", "what is known of it")


def published_page(rows: Sequence[Compared]) -> str:
    """Returns the page as Markdown."""
    predicted = [row for row in rows if not row.reason and not row.job.is_of_gpu]
    lines = [_INTRODUCTION, f"| {' | '.join(_HEADS)} |"]
    lines.append(f"| --- | --- |{' ---: |' * (len(_HEADS) - 3)} --- |")
    lines += [f"| {' | '.join(_cells(row))} |" for row in predicted]
    if predicted:
        errors = [abs(row.error) for row in predicted]
        count = sum(not row.job.is_of_gpu for row in rows)
        summary = f"{len(predicted)} of {count} jobs are predicted: the difference is {statistics.median(errors):.3%}"
        lines += ["", f"{summary} in the median, and at most {max(errors):.3%}."]
    known = [f"- {row.job.name}: {row.job.terms}" for row in predicted if row.job.terms]
    lines += ["", *known] if known else []
    refused = (row for row in rows if row.reason)
    lines += ["", *(f"- {row.job.name}, {row.job.peak_bytes / MIB:,.1f} MiB: {row.reason}" for row in refused)]
    of_gpus = [row for row in rows if not row.reason and row.job.is_of_gpu]
    if of_gpus:
        lines += [_OF_GPUS, f"| {' | '.join(_HEADS_OF_GPUS)} |", "| --- | ---: | ---: | ---: | ---: | --- |"]
        lines += [f"| {' | '.join(_cells_of_gpu(row))} |" for row in of_gpus]
    return "\n".join(lines).rstrip()


def _cells(row: Compared) -> list[str]:
    job = row.job
    between = job.between_steps_bytes
    return [
        job.name,
        job.gpu,
        str(job.num_ranks),
        f"{job.peak_bytes / MIB:,.1f}",
        f"{row.peak_bytes / MIB:,.1f}",
        f"{row.error:+.3%}",
        f"{(row.peak_bytes - job.peak_bytes) / MIB:+,.1f}",
        "" if between is None else f"{between / MIB:,.1f}",
        f"{row.between_steps_bytes / MIB:,.1f}",
        "" if between is None else f"{(row.between_steps_bytes - between) / MIB:+,.1f}",
        ", ".join(row.not_modelled),
    ]


def _cells_of_gpu(row: Compared) -> list[str]:
    shown, predicted = row.job.peak_bytes / GIB, row.peak_bytes / GIB
    cells = [row.job.name, str(row.job.num_ranks), f"{shown:.0f}", f"{predicted:.1f}", f"{predicted - shown:+.1f}"]
    return [*cells, row.job.terms]
