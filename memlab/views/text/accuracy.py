"""Predictions next to measurements as Markdown: how far off they are over all, and step by step."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.analysis.accuracy import FIGURES, Errors, Pair
from memlab.units import GIB
from memlab.views.text.results import hardware_of

_HEAD = """
## How accurate predictions are
Each step below was measured on the hardware that is named, and predicted by Megatron's own code on fake tensors, on a
CPU. Errors are shares of the measured value; below zero too little was predicted. A saving is judged if it is over
64 MiB. Remainders that torch's allocator leaves unsplit, up to 1 MiB per block, are in all figures. The measured models
were not trained, so their routers chose experts about as chance does; the predictions draw the experts at random.
"""


def accuracy_page(pairs: Sequence[Pair], hardware: str = "") -> str:
    """Writes the errors of all steps together and of each step; single ranks and ranks of jobs are separate.

    Args:
        pairs: Predictions with their measurements.
        hardware: What the measured steps ran on, for records that do not say it.
    """
    single = [pair for pair in pairs if pair.measured.scenario.layout.world_size == 1]
    of_jobs = [pair for pair in pairs if pair.measured.scenario.layout.world_size > 1]
    lines = [_HEAD.strip(), ""]
    for title, group in (("One rank", single), ("Every rank of jobs with several ranks", of_jobs)):
        if group:
            lines += [f"### {title}", _versions(group, hardware), "", *_summary(group), "", *_steps(group), ""]
    return "\n".join(lines)


def _versions(pairs: Sequence[Pair], hardware: str) -> str:
    seen = set()
    for pair in pairs:
        record = pair.measured
        versions = ", ".join(f"{package} {version}" for package, version in record.versions.items())
        seen.add(f"{record.backend}, {hardware_of(record, hardware)} ({versions})")
    predicted = pairs[0].predicted.versions
    here = ", ".join(f"{package} {version}" for package, version in predicted.items())
    return f"Measured on {'; '.join(sorted(seen))}. Predicted with {here}."


def _summary(pairs: Sequence[Pair]) -> list[str]:
    rows = ["| error of | steps | median | worst | under-estimated |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, error_of in FIGURES.items():
        errors = Errors.of(error_of(pair) for pair in pairs)
        if errors is not None:
            under = f"{errors.under_estimated:.0%}"
            rows.append(f"| {name} | {errors.count} | {errors.median:.4%} | {errors.worst:.4%} | {under} |")
    return rows


def _steps(pairs: Sequence[Pair]) -> list[str]:
    rows = [
        "| step | setting | peak GiB | error | activations GiB | error | saving's error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for pair in pairs:
        measured, saving = pair.measured, pair.saving_error
        cells = (
            str(measured.scenario),
            str(measured.settings),
            f"{measured.peak_allocated_bytes / GIB:.3f}",
            f"{pair.peak_error:+.4%}",
            f"{measured.activation_peak_bytes / GIB:.3f}",
            f"{pair.activation_peak_error:+.3%}",
            "" if saving is None else f"{saving:+.2%}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return rows
