"""From which terms the error of a prediction comes: the tensors, or what torch's allocator gave beyond their sizes.

    python -m benchmarks.error_terms measure FOLDER [--seconds 50]      on a GPU
    python -m benchmarks.error_terms predict FOLDER                     anywhere; compares with what FOLDER contains

A measured step keeps its timeline, and how many tokens its routers sent to each expert. It is predicted twice: with
experts drawn at random, as predictions of measured steps are, and with the measured numbers. A part of the error that
the second prediction does not have comes from the routers; of what is left, the table says how much is in tensors
("requested") and how much in rounding and unsplit remainders ("added"), by category, at the measured peak.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import accuracy
from memlab import Lab, TrainingState
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.record.step_record import StepRecord
from memlab.record.timeline import Timeline

STORED: dict[str, Any] = {"fp8_format": "e4m3", "fp8_param_gather": True}
STATES: tuple[dict[str, Any], ...] = (
    {},
    STORED | {"fp8_recipe": "tensorwise"},
    STORED | {"fp8_recipe": "delayed"},
    STORED | {"fp8_recipe": "tensorwise"},  # again, to see how much differs from lab to lab
    {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    {"fp8_format": "hybrid"},
)
"""What is measured of Qwen3-30B-A3B: the states whose prediction is furthest off, and what they are compared with."""
USUAL: dict[str, Any] = accuracy.USUAL


def measure(folder: Path, seconds: float) -> None:
    """Takes a step in each state, until the time is over; writes each at once."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "steps.jsonl").open("w") as lines:
        for number, values in enumerate(STATES):
            if time.monotonic() - started > seconds:
                print(f"{len(STATES) - number} states are left out: {seconds:.0f} s are over")
                return
            with Lab("qwen3-30b-a3b", num_layers=2, state=TrainingState(**values), **USUAL) as lab:
                with accuracy.noting_routes() as counts:
                    record = accuracy.with_routes(lab.step(), counts)
                assert record.timeline is not None
                record.timeline.save(folder / f"{number}.npz")
            lines.write(json.dumps(record.to_dict() | {"peak_by_module": {}}) + "\n")
            lines.flush()
            print(f"{time.monotonic() - started:.0f} s: {record.scenario.state}, {record}", flush=True)


def predict(folder: Path) -> None:
    """Predicts what was measured, and prints the terms of each error."""
    for number, line in enumerate((folder / "steps.jsonl").read_text().splitlines()):
        measured = StepRecord.from_dict(json.loads(line))
        truth, routing = Timeline.load(folder / f"{number}.npz"), measured.scenario.routing
        print(f"\n{measured.scenario.state}: peak {truth.peak_bytes():,} bytes in {truth.peak_phase()}")
        print(f"  tokens of the fullest expert, by layer: {[max(layer) for layer in routing.counts]}")
        for each in (Routing(kind="random", seed=measured.scenario.seed), routing):
            guess = _predicted(replace(measured.scenario, routing=each))
            print(f"  routing {each}: error {guess.peak_bytes() - truth.peak_bytes():+,} bytes")
            for term, (requested, added) in _terms(truth, guess).items():
                print(f"    {term:<16} requested {requested:+14,}    added {added:+14,}")


def _predicted(scenario: Scenario) -> Timeline:
    values: dict[str, Any] = {name: getattr(scenario, name) for name in ("num_layers", "state", "routing")}
    with Lab(scenario.architecture, **values, **USUAL, backend="simulated") as lab:
        timeline = lab.step().timeline
    assert timeline is not None
    return timeline


def _terms(truth: Timeline, guess: Timeline) -> dict[str, tuple[int, int]]:
    """Returns predicted minus measured bytes at each one's peak, by category: requested, and added by the allocator."""
    parts = []
    for timeline in (truth, guess):
        at = timeline.peak_index()
        allocated, requested = timeline.breakdown(at), timeline.breakdown(at, with_rounding=False)
        parts.append({name: (requested.get(name, 0), allocated[name] - requested.get(name, 0)) for name in allocated})
    none = (0, 0)
    terms = {}
    for name in dict.fromkeys([*parts[0], *parts[1]]):
        (of_truth, added_to_truth), (of_guess, added_to_guess) = (part.get(name, none) for part in parts)
        terms[name] = (of_guess - of_truth, added_to_guess - added_to_truth)
    return terms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "predict"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no further state after this time")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        measure(arguments.folder, arguments.seconds)
    else:
        predict(arguments.folder)
