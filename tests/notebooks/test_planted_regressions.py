"""A fault in the code that a case runs turns the suite red, and every report says what, where and under what."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch
from urllib.parse import quote

import pytest

from memlab.cli import main
from memlab.engines.megatron import apply_settings
from memlab.engines.megatron.retention import remedies
from memlab.regression.run.kept_runs import kept_runs
from memlab.regression.summary import CaseResult, Summary, read_summary
from tests.notebooks.in_process import cells_in_this_process
from tests.notebooks.small_labs import write_lab

pytestmark = pytest.mark.notebook

STEPS = """\
from memlab import Lab, MemorySettings, finish
full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
settings = {
    "remedy": full | {"checkpoint_input_remedy": "detach"},
    "offload": {"offload_modules": ["expert_fc1", "moe_act"], "min_offloaded_tensor_size": 0},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
lab = Lab("qwen3-moe-tiny", num_layers=2, seq_length=256)
plain, changed = lab.step(), lab.step(MemorySettings(**settings[name]))
"""
SUITE = (
    "backend: {}\ntimeout_seconds: 120\ncases:\n  - {{lab: steps, matrix: {{name: [remedy, offload, recompute]}}}}\n"
)


@contextmanager
def faults() -> Iterator[None]:
    """Each is seen by one case alone: the remedy does nothing, an offload module is left out, one layer is not recomputed."""
    recomputes_moe = apply_settings._FLAGS["moe_layer_recompute"]
    flags = {
        "offload_moe_act": lambda module, settings: False,
        "moe_layer_recompute": lambda module, settings: recomputes_moe(module, settings) and module.layer_number != 2,
    }
    with patch.object(remedies, "detach", nullcontext), patch.dict(apply_settings._FLAGS, flags):
        yield


@dataclass(frozen=True)
class Night:
    """A run of the faulty code, compared with baselines of the healthy one."""

    exit_codes: list[int]
    output: str
    page: str
    summary: Summary

    def case(self, name: str) -> CaseResult:
        (result,) = [result for result in self.summary.results if result.name == f"steps-name={name}"]
        return result


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=pytest.mark.slow), "simulated"])
def night(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Night:
    root = tmp_path_factory.mktemp("planted")
    (root / "labs").mkdir()
    write_lab(root / "labs", STEPS, name="steps", record='finish({"plain": plain, name: changed})')
    suite = root / "papermill_runs" / "suites" / "planted.yaml"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE.format(request.param))

    def memlab(*arguments: str | Path) -> int:
        return main([*map(str, arguments)])

    output = io.StringIO()
    with cells_in_this_process(), redirect_stdout(output), redirect_stderr(output):
        codes = [memlab("nightly", suite, "--jobs", "1", "--allow-missing"), memlab("baseline", "update", suite)]
        output.truncate(output.seek(0))
        with faults():
            codes.append(memlab("nightly", suite, "--jobs", "1"))
    run = kept_runs(root / "papermill_runs" / "runs")[-1]
    return Night(codes, output.getvalue(), (run / "index.html").read_text(), read_summary(run))


CASES = {
    "remedy": ("residual_bytes", "embedding.word_embeddings", "full uniform 1, detach"),
    "offload": ("offloaded_bytes_by_module/moe_act", "moe_act", "offload expert_fc1+moe_act"),
    "recompute": ("recomputed_bytes", "decoder.layers.1.mlp", "recompute moe"),
}
"""What each fault must be reported by: a metric, the module at fault or where the bytes were allocated, the settings."""


def test_healthy_code_is_green_and_a_planted_fault_turns_each_case_red(night: Night) -> None:
    assert night.exit_codes == [0, 0, 1], night.output
    assert night.summary.headline == "3 of 3 cases failed"
    assert {result.status for result in night.summary.results} == {"changed"}


@pytest.mark.parametrize("name", CASES)
def test_the_record_under_the_settings_is_named_and_no_other(night: Night, name: str) -> None:
    assert {difference.record for difference in night.case(name).differences} == {name}


@pytest.mark.parametrize("name", CASES)
def test_summary_text_and_page_name_metric_module_and_settings(night: Night, name: str) -> None:
    metric, module, settings = CASES[name]
    case = night.case(name)
    (difference,) = [difference for difference in case.differences if difference.metric == metric]
    assert module in f"{difference.module} {metric}"
    assert case.settings_of(name) == settings
    text = night.output[night.output.index(f"{case.name}: changed") :].partition("\n\n")[0]
    for words in (
        metric,
        module,
        f"settings of {name}: {settings}",
        "nothing but the code since the baseline's commit",
    ):
        assert words in text
    failed = night.page[: night.page.index("All cases")].replace("<wbr>", "")
    part = failed[failed.index(f'id="case-{quote(case.name)}"') :].partition('<details class="case')[0]
    for words in (metric, module, settings):
        assert words in part
