"""Whether jobs of FSDP2 fit, against tries on H200s with less and less memory."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest

from benchmarks.plain_fsdp2 import scenario_of, settings_of
from benchmarks.plain_fsdp2_limits import job_of
from memlab import Lab, MemorySettings
from memlab.allocator import request_log
from memlab.allocator.request_log import RequestLog
from memlab.cli import main
from memlab.config.scenario import Scenario
from memlab.fitting.does_it_fit import judge
from memlab.lab.search_steps import stepping
from memlab.units import GIB, MIB
from tests.unit.measured import measured_rows

pytest.importorskip("transformers", reason="the engine fsdp2 needs transformers: pip install 'memlab[fsdp2]'")
pytestmark = pytest.mark.versions
ROWS = {(row["name"], row["steps"]): row for row in measured_rows("h200_plain_fsdp2_limits")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "model=mistral-7b-v0.3 num_layers=8 seq_length=4096 num_ranks=8 one_process fp32_sharded_params "
            "adam_implementation=fused"
        ),
        pytest.param("model=phi-4 num_layers=8", marks=pytest.mark.slow),  # two steps need 9 % less than three
        pytest.param(
            "model=llama-3.1-8b num_layers=8 seq_length=8192 num_ranks=8 checkpointing one_process fp32_sharded_params",
            marks=pytest.mark.slow,  # fails in five steps with more memory than it completes with
        ),
    ],
)
def test_no_job_fits_where_it_failed_on_an_h200(name: str) -> None:
    row = ROWS[name, 5]
    job = job_of(row)

    with stepping(scenario_of(job)) as steps:
        record = steps(settings_of(job))
        said = {(result, judge(record, steps, limit_bytes)) for limit_bytes, result in row["tries"]}
        assert judge(record, steps, int(row["fits_bytes"] * 1.02)) == "fits"

    assert ("fails", "fits") not in said


def test_passes_without_backward_are_repeated_too() -> None:
    """Before the second one, memlab counts cuBLAS's workspace of backward: that is not what the pass leaves."""
    lab = Lab("qwen3-dense-tiny", num_layers=1, seq_length=64, engine="fsdp2", backend="simulated")
    with lab, lab.logging_requests() as requests:
        record = lab.forward_only(warm_up=True)
    assert requests is not None and record.peak_reserved_bytes is not None

    with patch.object(request_log, "_served", wraps=request_log._served) as served:
        assert requests.completes_within(2 * record.peak_reserved_bytes, further_steps=3)
    assert served.call_count == 4


def test_a_verdict_takes_no_step_twice(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["qwen3-dense-tiny", "--num-layers", "1", "--seq-length", "64", "--engine", "fsdp2"]
    with patch.object(Lab, "step", autospec=True, side_effect=Lab.step) as taken:
        assert main(["predict", *tiny, "--gpu-memory", "10GiB"]) == 0
    assert capsys.readouterr().out.startswith("fits 10.000 GiB") and taken.call_count == 1

    # The step of another process is taken once more, however many limits are asked about.
    with Lab("qwen3-dense-tiny", num_layers=1, seq_length=64, engine="fsdp2", backend="simulated") as lab:
        record = lab.step()
    with stepping(record.scenario) as steps, patch.object(Lab, "step", autospec=True, side_effect=Lab.step) as taken:
        assert [judge(record, steps, limit_bytes) for limit_bytes in (2 * GIB, GIB)] == ["fits", "fits"]
    assert taken.call_count == 1


def test_a_limit_above_all_that_is_reserved_without_one_is_not_tried() -> None:
    with stepping(Scenario.of("qwen3-dense-tiny", num_layers=2, seq_length=64, engine="fsdp2")) as steps:
        steps(MemorySettings())
    requests = steps.requests
    assert requests is not None
    least = next(num for num in range(2, 400, 2) if requests.completes_within(num * MIB, further_steps=3))
    with patch.object(RequestLog, "_most_reserved_bytes", return_value=math.inf):
        tried = [requests.completes_within(num * MIB, further_steps=3) for num in range(2, least + 40, 2)]
    assert tried == [requests.completes_within(num * MIB, further_steps=3) for num in range(2, least + 40, 2)]
