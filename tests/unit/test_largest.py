"""The largest workload that fits: its limit is predicted to fit, and the next value is predicted not to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from memlab.cli import main
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import Fp8Recipe, TrainingState
from memlab.fitting.along_front import AlongFrontInterrupted, largest_along_front
from memlab.fitting.does_it_fit import Verdict, fits
from memlab.fitting.largest import WHATS, Largest, LargestInterrupted, What, largest, unit_of, with_value
from memlab.fitting.measured_margin import limit_with_margin
from memlab.fitting.outside_torch import estimate_outside_torch
from memlab.fitting.pareto_front import Point, SearchResult
from memlab.fitting.peak_range import PeakRange
from memlab.fitting.prediction import Prediction
from memlab.lab.search_steps import stepping
from memlab.units import GIB, KIB, MIB
from memlab.views.text.largest import along_front_table

OUTSIDE_BYTES = estimate_outside_torch(Layout()).total_bytes
JOB = Scenario.of("qwen3-30b-a3b", layout=Layout(tensor_model_parallel_size=2, context_parallel_size=2))


def steps_of(bytes_per_token: float, fragmented_bytes: int, limit_bytes: int, seen: list[int]) -> Any:
    """A model of steps: 20 GiB and so much per token, with a sawtooth as the allocator's rounding makes it."""

    def predict_all(now: Sequence[Scenario], following: Sequence[Scenario]) -> list[Prediction]:
        tokens = now[0].seq_length * now[0].micro_batch_size
        seen.append(tokens)
        peak = int(20 * GIB + tokens * bytes_per_token + tokens % 1000 * KIB // 2)
        verdict: Verdict = "may fit" if peak + fragmented_bytes <= limit_bytes else "does not fit"
        if peak + fragmented_bytes <= limit_with_margin(limit_bytes, JOB):
            verdict = "fits"
        return [
            Prediction(
                rank=scenario.layout.rank,
                peak_allocated_bytes=peak,
                peak_range=PeakRange.exactly(peak),
                peak_reserved_bytes=peak,
                start_bytes=0,
                transferred_bytes=0,
                host_bytes=0,
                verdict=verdict,
                without_effect=frozenset(),
            )
            for scenario in now
        ]

    return predict_all


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("fragmented_bytes", [0, GIB // 2])
@pytest.mark.parametrize(("bytes_per_token", "most_values"), [(400 * KIB, 30), (9000 * KIB, 10)])
def test_the_limit_is_that_of_all_values(
    what: What, fragmented_bytes: int, bytes_per_token: float, most_values: int
) -> None:
    seen: list[int] = []
    steps = steps_of(bytes_per_token, fragmented_bytes, 60 * GIB, seen)
    found = largest(what, MemorySettings(), [JOB], steps, 60 * GIB)
    assert len(seen) <= most_values
    unit_tokens = JOB.seq_length if what == "micro-batch-size" else found.unit
    for verdict_limit, value in (
        (60 * GIB, found.largest_that_may_fit),
        (limit_with_margin(60 * GIB, JOB), found.largest_that_fits),
    ):
        tokens = unit_tokens
        while 20 * GIB + tokens * bytes_per_token + tokens % 1000 * KIB // 2 + fragmented_bytes <= verdict_limit:
            tokens += unit_tokens
        assert value == (tokens - unit_tokens) // (unit_tokens // found.unit)
    assert found.smallest_that_does_not_fit == (found.largest_that_may_fit or 0) + found.unit
    assert found.unit % (4 if what != "micro-batch-size" else 1) == 0


def test_nothing_may_fit_or_everything() -> None:
    none = largest("tokens", MemorySettings(), [JOB], steps_of(KIB, 0, 10 * GIB, []), 10 * GIB)
    assert none.largest_that_may_fit is None and none.smallest_that_does_not_fit == none.unit
    assert none.verdict.startswith("'none' does not fit 10.000 GiB for torch even with 64 tokens in a micro-batch")
    every = largest("micro-batch-size", MemorySettings(), [JOB], steps_of(0.01, 0, 60 * GIB, []), 60 * GIB)
    assert every.largest_that_fits == every.most == 2**14
    assert every.verdict.startswith("'none' fits with up to 16,384 sequences of 4,096 tokens in a micro-batch")


@pytest.mark.parametrize(
    ("what", "tensor_ranks", "recipe", "sequences", "unit"),
    [
        ("tokens", 1, "delayed", (1, 512), 16),
        ("tokens", 2, "delayed", (1, 512), 16),
        ("seq-length", 2, "mxfp8", (1, 512), 64),
        ("seq-length", 2, "blockwise", (1, 512), 256),
        ("seq-length", 1, "delayed", (4, 32), 4),
        ("micro-batch-size", 2, "blockwise", (4, 64), 4),
        ("micro-batch-size", 1, "delayed", (1, 64), 1),
    ],
)
def test_fp8_takes_the_multiples_of_the_unit_and_no_other_value(
    what: What, tensor_ranks: int, recipe: Fp8Recipe, sequences: tuple[int, int], unit: int
) -> None:
    def is_taken(value: int) -> bool:
        try:
            return bool(with_value(job, what, value))
        except ValueError:
            return False

    job = Scenario.of(
        "phi-4",
        micro_batch_size=sequences[0],
        seq_length=sequences[1],
        layout=Layout(tensor_model_parallel_size=tensor_ranks),
        state=TrainingState(fp8_format="e4m3", fp8_recipe=recipe),
    )
    assert unit_of(what, job) == unit
    assert [value for value in range(1, 3 * unit + 1) if is_taken(value)] == [unit, 2 * unit, 3 * unit]


def test_where_fragmentation_decides_everywhere_few_values_are_tried() -> None:
    seen: list[int] = []
    none = largest("tokens", MemorySettings(), [JOB], steps_of(400 * KIB, 100 * GIB, 60 * GIB, seen), 60 * GIB)
    assert none.largest_that_may_fit is None and none.smallest_that_does_not_fit == none.unit
    assert len(seen) <= 8


def test_ctrl_c_keeps_what_was_found() -> None:
    steps = steps_of(400 * KIB, 0, 60 * GIB, [])

    def interrupt_at_the_third(now: Sequence[Scenario], following: Sequence[Scenario]) -> list[Prediction]:
        if len(tried) == 2:
            raise KeyboardInterrupt
        return list(steps(now, following))

    tried: list[Any] = []
    with pytest.raises(LargestInterrupted) as interrupted:
        largest("tokens", MemorySettings(), [JOB], interrupt_at_the_third, 60 * GIB, on_tried=tried.append)
    found: Largest = interrupted.value.found
    assert list(found.tried) == sorted(tried, key=lambda one: one.value) and not found.is_complete
    assert "CUT SHORT" in found.verdict


def test_the_command_s_limit_and_the_next_value_are_those_of_single_steps(capfd: pytest.CaptureFixture[str]) -> None:
    memory_bytes = 144 * MIB
    flags = ["phi-4-tiny", "--num-layers", "1", "--seq-length", "64", "--engines", "1", "--largest", "tokens"]
    assert main(["search", *flags, f"--gpu-memory={OUTSIDE_BYTES + memory_bytes}B", "--json"]) == 0
    printed, told = capfd.readouterr()
    found = json.loads(printed)
    assert "tokens 64: fits" in told
    limit, over = found["largest_that_may_fit"], found["smallest_that_does_not_fit"]
    assert over == limit + found["unit"] == limit + 1
    for tokens, fit in ((limit, True), (over, False)):
        with stepping(Scenario.of("phi-4-tiny", num_layers=1, seq_length=tokens)) as steps:
            assert fits(steps(MemorySettings()), steps, memory_bytes) == fit
    assert f"{limit:,} tokens in a micro-batch of one packed row" in found["verdict"]
    along = [*flags, f"--gpu-memory={OUTSIDE_BYTES + memory_bytes}B", "--along-front", "--max-steps", "1", "--json"]
    assert main(["search", *along]) == 0
    of_front = json.loads(capfd.readouterr().out)
    assert [one["largest_that_may_fit"] for one in of_front["found"]] == [limit] and "CUT SHORT" in of_front["verdict"]


def test_ctrl_c_keeps_the_settings_of_the_front_that_were_tried() -> None:
    points = tuple(
        Point(
            settings=settings,
            peak_allocated_bytes=(9 - number) * GIB,
            recomputed_operations=number,
            transferred_bytes=0,
            host_bytes=0,
            verdict="fits",
        )
        for number, settings in enumerate((MemorySettings(), MemorySettings(recompute_granularity="selective")))
    )
    sizes = {"base": MemorySettings(), "limit_bytes": 80 * GIB, "outside_torch_bytes": 0, "resolution_bytes": 1}
    front = SearchResult(scenario=JOB, points=points, num_candidates=2, num_pruned=0, **sizes)
    predict_all = steps_of(400 * KIB, 0, 80 * GIB, [])

    def find(settings: MemorySettings) -> Largest:
        if settings != MemorySettings():
            raise KeyboardInterrupt
        return largest("tokens", settings, [JOB], predict_all, 80 * GIB)

    with pytest.raises(AlongFrontInterrupted) as error:
        largest_along_front("tokens", front, find)
    found = error.value.found
    assert found.best is not None and found.best.settings == MemorySettings() and not found.is_complete
    assert "CUT SHORT" in found.verdict and "none" in along_front_table(found)


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--largest batch", "--largest is 'batch', must be one of tokens, seq-length, micro-batch-size"),
        ("--along-front", "--along-front needs --largest"),
        ("--largest tokens --max-steps 3", "--max-steps cannot be combined with --largest"),
        ("--largest tokens --micro-batch-size 2", "--micro-batch-size is 2, must be 1 with --largest tokens"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(flags: str, refusal: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "phi-4-tiny", "--gpu-memory", "80GiB", *flags.split()]) == 2
    complaint = capfd.readouterr().err
    assert refusal in complaint and complaint.count("\n") == 1
