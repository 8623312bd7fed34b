"""Predictions next to measurements as Markdown: how far off they are over all, and step by step."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.analysis.accuracy import FIGURES, Errors, Pair
from memlab.analysis.limits import Limit
from memlab.fitting.measured_margin import measured_margin
from memlab.units import GIB
from memlab.views.text.results import measured_on

_HEAD = """
## How accurate predictions are
Each step below was measured on the hardware that is named. It was predicted on a CPU by Megatron's own code, on tensors
without values. An error is a share of the measured value; it is below zero if the prediction is too low. The column
*under-estimated* has the share of the steps with such an error. The error of a saving is given if the saving is over 64
MiB. The activation peak is the peak of forward and backward minus the start of the step. All numbers include the
remainders that torch's allocator leaves unsplit, up to 1 MiB per block. If the name of a step has "routing counts", its
prediction uses the numbers of tokens that the measured router sent to each expert.
In all other predictions of models with experts, each token chooses its experts at random, which spreads the tokens more
evenly than the untrained routers did.
"""


def accuracy_page(pairs: Sequence[Pair], hardware: str = "") -> str:
    """Writes the errors of all steps together and of each step.

    Single ranks and ranks of jobs are separate, and so are versions of Transformer Engine if there are several.

    Args:
        pairs: Predictions with their measurements.
        hardware: What the measured steps ran on, for records that do not say it.
    """
    single = [pair for pair in pairs if pair.measured.scenario.layout.world_size == 1]
    of_jobs = [pair for pair in pairs if pair.measured.scenario.layout.world_size > 1]
    engines = sorted({_engine(pair) for pair in pairs})
    lines = [_HEAD.strip(), ""]
    for title, both in (("One rank", single), ("Every rank of jobs with several ranks", of_jobs)):
        for engine in engines:
            group = [pair for pair in both if _engine(pair) == engine]
            named = f"{title}, Transformer Engine {engine}" if len(engines) > 1 else title
            if group:
                lines += [f"### {named}", _versions(group, hardware), "", *_summary(group), "", *_steps(group), ""]
    return "\n".join(lines)


def _engine(pair: Pair) -> str:
    return pair.measured.scenario.versions.transformer_engine


def _versions(pairs: Sequence[Pair], hardware: str) -> str:
    predicted = ", ".join(f"{package} {version}" for package, version in pairs[0].predicted.versions.items())
    return f"{measured_on((pair.measured for pair in pairs), hardware)} Predicted with {predicted}."


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
        "| step | setting | peak GiB | peak error | activation peak GiB | activation peak error | saving error |",
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


_LIMITS_HEAD = """
## The limit of what fits
A limit is the smallest memory with which a step completes. Bisection finds it: each attempt limits the memory that
torch may reserve. For a measured limit, each attempt takes the step in a fresh process on the GPU. For a predicted
limit, memlab takes the step once, without a limit, and each attempt repeats the step's requests for memory in a
simulated allocator with so much memory. The error is below zero if the predicted limit is lower than the measured one.
Because this happens, memlab adds a margin to the predicted limit, and says "fits" only if there is more memory than the
sum of both. The last column says whether memlab still says "fits" for too little memory, that is, for less than the
step needs. Where experts are spread over ranks, the predicted limit is the highest of three random routings. If the
name of a step has "routing counts", its prediction instead uses the numbers of tokens that the measured router sent to
each expert.
"""


def limits_page(limits: Sequence[tuple[Limit, Limit]]) -> str:
    """Writes measured limits, at least one, beside predicted ones."""
    rows = [
        '| step | setting | measured GB | predicted GB | error | memlab says "fits" from GB | for too little |',
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    num_too_low = 0
    for measured, predicted in limits:
        said_from = predicted.fits_bytes * (1 + measured_margin(measured.scenario).share)
        is_too_low = said_from <= measured.fails_bytes
        num_too_low += is_too_low
        cells = (
            str(measured.scenario),
            str(measured.settings),
            f"{measured.fails_bytes / 1e9:.2f} to {measured.fits_bytes / 1e9:.2f}",
            f"{predicted.fails_bytes / 1e9:.2f} to {predicted.fits_bytes / 1e9:.2f}",
            f"{measured.error_of(predicted):+.2%}",
            f"{said_from / 1e9:.2f}",
            "yes" if is_too_low else "no",
        )
        rows.append("| " + " | ".join(cells) + " |")
    largest = max((measured.error_of(predicted) for measured, predicted in limits), key=abs)
    summary = (
        f"The largest error of {len(limits)} limits is {largest:+.2%}. In {num_too_low} of the {len(limits)} cases, "
        f'memlab says "fits" for too little memory. {_hardware(limits)}'
    )
    return "\n".join([_LIMITS_HEAD.strip(), "", summary, "", *rows, ""])


def _hardware(limits: Sequence[tuple[Limit, Limit]]) -> str:
    predicted = ", ".join(f"{name} {value}" for name, value in limits[0][1].versions.items())
    return f"{measured_on(measured for measured, _ in limits)} Predicted with {predicted}."
