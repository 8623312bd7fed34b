"""A fault in the code that a case's kernel runs turns the suite red, and every report says what, where and under what."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from memlab.regression.run.kept_runs import kept_runs
from memlab.regression.summary import CaseResult, Summary, read_summary
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

FAULTS = """\
from contextlib import nullcontext

from memlab.model import apply_settings
from memlab.model.retention import remedies
recomputes_moe = apply_settings._FLAGS["moe_layer_recompute"]
remedies.detach = nullcontext
apply_settings._FLAGS["offload_moe_act"] = lambda module, settings: False
apply_settings._FLAGS["moe_layer_recompute"] = lambda module, settings: (
    recomputes_moe(module, settings) and module.layer_number != 2
)
"""
"""Each is seen by one case alone: the remedy does nothing, an offload module is left out, one layer is not recomputed."""


@dataclass(frozen=True)
class Night:
    """A run of the faulty code, held against baselines of the healthy one."""

    exit_codes: list[int]
    output: str
    page: str
    summary: Summary

    def case(self, name: str) -> CaseResult:
        (result,) = [result for result in self.summary.results if result.name == f"steps-name={name}"]
        return result


@pytest.fixture(scope="module", params=["cpu", "simulated"])
def night(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Night:
    root = tmp_path_factory.mktemp("planted")
    (root / "labs").mkdir()
    write_lab(root / "labs", STEPS, name="steps", record='finish({"plain": plain, name: changed})')
    suite = root / "papermill_runs" / "suites" / "planted.yaml"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE.format(request.param))
    # A kernel runs what is in its profile before its first cell; the process that judges does not.
    startup = root / "ipython" / "profile_default" / "startup" / "faults.py"
    startup.parent.mkdir(parents=True)

    def memlab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memlab", *map(str, arguments)]
        environment = os.environ | {"IPYTHONDIR": str(root / "ipython")}
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)

    healthy = memlab("nightly", suite, "--jobs", "2", "--allow-missing")
    updated = memlab("baseline", "update", suite)
    startup.write_text(FAULTS)
    faulty = memlab("nightly", suite, "--jobs", "2")
    run = kept_runs(root / "papermill_runs" / "runs")[-1]
    codes = [done.returncode for done in (healthy, updated, faulty)]
    return Night(codes, faulty.stdout + faulty.stderr, (run / "index.html").read_text(), read_summary(run))


CASES = {
    "remedy": ("residual_bytes", "embedding.word_embeddings", "full uniform 1, detach"),
    "offload": ("offloaded_bytes_by_module/moe_act", "moe_act", "offload expert_fc1+moe_act"),
    "recompute": ("recomputed_bytes", "decoder.layers.1.mlp", "recompute moe"),
}
"""What each fault must be reported by: a metric, the module at fault or where the bytes were born, the settings."""


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
    for words in (metric, module, f"settings of {name}: {settings}", "look at the code since the baseline's commit"):
        assert words in text
    failed = night.page[: night.page.index("All cases")].replace("<wbr>", "")
    part = failed[failed.index(f'id="case-{quote(case.name)}"') :].partition('<details class="case')[0]
    for words in (metric, module, settings):
        assert words in part
