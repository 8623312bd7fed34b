"""``memlab predict``: measure's flags and keys, ranks, and whether a step fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memlab.cli import main
from memlab.fitting.fit import judge_fit
from memlab.fitting.verdict import USUAL_OUTSIDE_BYTES
from memlab.lab import Lab
from memlab.record import StepRecord
from memlab.settings import MemorySettings
from memlab.units import GIB, MIB, parse_bytes

TINY = ["phi-4-tiny", "--num-layers", "2", "--seq-length", "64"]


def test_it_prints_the_keys_of_measure(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["measure", *TINY, "--backend", "cpu", "--json"]) == 0
    measured = json.loads(capfd.readouterr().out)
    assert main(["predict", *TINY, "--json", "--out", str(tmp_path), "--snapshot"]) == 0
    predicted = json.loads(capfd.readouterr().out)
    assert predicted.keys() == measured.keys()
    assert predicted["scenario"] == measured["scenario"]
    assert predicted["loss"] is None and predicted["backend"] == "simulated"
    assert StepRecord.load(tmp_path).to_dict() == StepRecord.from_dict(predicted).to_dict()
    assert (tmp_path / "snapshot.pickle").exists()


def test_every_kind_of_rank_and_the_worst(capfd: pytest.CaptureFixture[str]) -> None:
    job = ["--world-size", "4", "--pipeline-model-parallel-size", "2", "--num-microbatches", "2", "--rank", "all"]
    assert main(["predict", *TINY, *job, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [rank["scenario"]["layout"]["rank"] for rank in found["ranks"]] == [0, 2]
    peaks = {rank["scenario"]["layout"]["rank"]: rank["peak_allocated_bytes"] for rank in found["ranks"]}
    assert found["worst_rank"] == max(peaks, key=lambda rank: peaks[rank])
    assert main(["predict", *TINY, *job]) == 0
    assert "<- worst" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--rank 1", "rank is 1, must be from 0 to 0"),
        ("--rank first", "'first' is not a whole number"),
        ("--world-size 3 --pipeline-model-parallel-size 2", "the job has 3 ranks, must be a multiple of 2"),
        ("--gpu-memory 80Gi", "'80Gi' is no size of memory: write a number and a unit, such as 80GiB"),
        ("--routing skewed:2", "phi-4-tiny has no experts: leave it out"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(flags: str, refusal: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *TINY, *flags.split()]) == 2
    printed, complaint = capfd.readouterr()
    assert printed == ""
    assert refusal in complaint and complaint.count("\n") == 1


def test_a_step_that_does_not_fit_names_what_does() -> None:
    with Lab("phi-4-tiny", num_layers=4, seq_length=2048, backend="simulated") as lab:
        tried: list[MemorySettings] = []

        def step(settings: MemorySettings, room_bytes: int | None) -> StepRecord:
            lab.device_memory_bytes = room_bytes
            tried.append(settings)
            return lab.step(settings)

        plain = step(MemorySettings(), None)
        roomy = judge_fit(plain, step, GIB + USUAL_OUTSIDE_BYTES)
        assert roomy.fits and roomy.alternatives == () and len(tried) == 1
        assert roomy.margin_bytes == GIB - plain.peak_allocated_bytes

        tight = judge_fit(plain, step, plain.peak_allocated_bytes - 8 * MIB + USUAL_OUTSIDE_BYTES)
        assert not tight.fits and tight.margin_bytes == -8 * MIB
        assert tight.alternatives
        costs = [(choice.recomputed_operations, choice.moved_bytes) for choice in tight.alternatives]
        assert costs == sorted(costs)
        lab.device_memory_bytes = None
        for choice in tight.alternatives:
            assert lab.step(choice.settings).peak_allocated_bytes == choice.peak_allocated_bytes
            assert choice.peak_allocated_bytes <= plain.peak_allocated_bytes - 8 * MIB

        tried.clear()
        hopeless = judge_fit(plain, step, plain.static_bytes - MIB + USUAL_OUTSIDE_BYTES)
        assert not hopeless.fits and hopeless.alternatives == () and tried == []


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GiB", 80 * GIB), ("80 GB", 80 * 10**9), ("1.5TiB", 1536 * GIB), ("4096", 4096), ("1KiB", 1024)],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 gib", "1e3", "0", "0.0001"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size of memory"):
        parse_bytes(text)
