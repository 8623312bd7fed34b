"""The report, the JUnit file and the table: what they contain, and that any reader can read them."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np

from memlab.regression.baseline import Baseline, read_baseline, write_baseline
from memlab.regression.compare import compare_with_baseline
from memlab.regression.report.junit import junit_xml
from memlab.regression.report.report import write_reports
from memlab.regression.report.summary_text import summary_table
from memlab.regression.summary import Summary, read_summary
from tests.notebooks.small_suites import difference_of, measured, result_of, summary_of
from tests.unit.builders import record_of, training_step

CHANGED = result_of(
    "changed<case>",
    status="changed",
    message="2 metrics differ from the baseline of 2026-01-01, commit abc1234",
    measured=measured(peak_allocated_bytes=2**21),
    baseline=measured(),
    differences=(
        difference_of(module="+1.00 MiB in decoder.layers.1.mlp", changed="setting offload_modules: a+b -> a"),
        difference_of(metric="offloaded_bytes_by_module/moe_act", baseline=2**16, now=None),
    ),
)
FAILED = result_of(
    "broken",
    status="failed",
    message="small.ipynb failed in cell 3 of 4 (Part 1): \x1b[31mZeroDivisionError\x1b[0m: division by zero",
    measured=None,
    folder="broken.failed",
)
MISSING = result_of("bare", status="no baseline", message="it has no baseline yet")
NEW = result_of("new", status="new", message="no baseline yet, which --allow-missing lets pass")
PASSED = result_of("passed", baseline=measured())
RED = summary_of(PASSED, CHANGED, FAILED, MISSING, NEW)
VOID = {"meta", "br", "wbr"}


class Checker(HTMLParser):
    """Checks that tags are closed in order, and collects text, links and ids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [values[name] or "" for name in ("href", "src") if name in values]
        self.ids += [values["id"] or ""] if "id" in values else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(folder: Path, summary: Summary, history: list[tuple[Path, Summary]] | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    write_reports(folder, summary, history or [])
    return (folder / "index.html").read_text()


def test_a_run_outside_git_has_no_commit(tmp_path: Path) -> None:
    assert " · no commit · " in page_of(tmp_path, replace(RED, commit="nocommit"))
    assert " · commit abc1234 · " in page_of(tmp_path, replace(RED, commit="abc1234"))


def test_the_page_says_first_what_failed_and_why(tmp_path: Path) -> None:
    html = page_of(tmp_path, RED)
    page = Checker(html)
    text = "".join(page.text)
    assert text.index("3 of 5 cases failed") < text.index("What failed, and why") < text.index("All cases")
    first_screen = text[: text.index("All cases")]
    for words in (
        "changed<case>",
        "peak_allocated_bytes of plain (offload expert_fc1+moe_act) +1.00 MiB (+100.00%), largest part +1.00 MiB in decoder.layers.1.mlp",
        "offloaded_bytes_by_module/moe_act of plain gone",
        "changed: setting offload_modules: a+b → a",
        "offloaded_bytes_by_module/moe_act",
        "1,048,576",
        "2,097,152",
        "ZeroDivisionError",
        "it has no baseline yet",
    ):
        assert words in first_screen
    assert text.index("passed") > text.index("All cases")
    assert text.count("✓") == 2


def test_a_change_common_to_several_cases_is_named_once(tmp_path: Path) -> None:
    same = replace(CHANGED, name="other")
    pages = [page_of(tmp_path / "alike", summary_of(CHANGED, same, MISSING))]
    unlike = replace(same, differences=(replace(CHANGED.differences[0], changed="parameter seq_length: 64 -> 32"),))
    unexplained = replace(CHANGED, differences=(replace(CHANGED.differences[0], changed=""),))
    pages.append(page_of(tmp_path / "unlike", summary_of(CHANGED, unlike)))
    alike, apart = ("".join(Checker(page).text).partition("All cases")[0] for page in pages)
    assert alike.count("setting offload_modules: a+b → a") == 1
    assert "changed in 2 of them: setting offload_modules: a+b → a" in alike
    page = page_of(tmp_path / "code", summary_of(unexplained, replace(unexplained, name="other")))
    assert "changed in 2 of them: nothing but the code since the baseline's commit" in "".join(Checker(page).text)
    assert "changed:" not in "".join(Checker(pages[0]).text), "a case where nothing changed says nothing of it"
    assert apart.count("changed: setting offload_modules: a+b → a") == 1
    assert apart.count("changed: parameter seq_length: 64 → 32") == 1


def test_the_page_needs_no_network_and_no_other_file(tmp_path: Path) -> None:
    html = page_of(tmp_path, RED)
    page = Checker(html)
    assert "<script" not in html
    assert not re.search(r"url\(|@import|https?://", html)
    files = {link for link in page.links if not link.startswith("#")}
    assert files == {"summary.json", "junit.xml", "broken.failed/log.txt"}, "links only to what is there"
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)) == 5
    assert "prefers-color-scheme: dark" in html


def test_a_green_page_says_so_and_names_no_failure(tmp_path: Path) -> None:
    text = "".join(Checker(page_of(tmp_path, summary_of(PASSED, NEW))).text)
    assert "2 cases passed" in text
    assert "failed" not in text.replace(".case.failed", "")


def test_the_trend_of_a_metric_runs_over_the_kept_runs(tmp_path: Path) -> None:
    history = [
        (tmp_path / f"{number}", summary_of(result_of("passed", measured=measured(peak_allocated_bytes=peak))))
        for number, peak in enumerate((2**18, 2**19, 2**18))
    ]
    html = page_of(tmp_path / "now", summary_of(result_of("passed", baseline=measured())), history)
    assert html.count("peak_allocated_bytes over 4 runs") == 1
    points = re.search(r'peak_allocated_bytes over 4 runs">.*?points="(.*?)"', html)
    assert points is not None
    heights = [float(point.split(",")[1]) for point in points.group(1).split()]
    assert len(heights) == 4
    assert heights[0] == heights[2] > heights[1] > heights[3] > 0, "higher values are drawn higher"
    assert "step_seconds (not compared)" in "".join(Checker(html).text)
    assert html.count('<i class="green"') == 4


def test_only_a_value_that_fails_is_red(tmp_path: Path) -> None:
    green = result_of("passed", measured=measured(loss=1.75, step_seconds=9.0), baseline=measured())
    assert '"dot off"' not in page_of(tmp_path / "green", summary_of(green))
    page = page_of(tmp_path / "red", summary_of(green, replace(CHANGED, differences=CHANGED.differences[:1])))
    assert page.count('"dot off"') == 1


def test_a_step_is_drawn_over_that_of_a_kept_run_that_agrees_with_the_baseline(tmp_path: Path) -> None:
    now, agreeing, other = tmp_path / "now", tmp_path / "agreeing", tmp_path / "other"
    for folder, recompute in ((now, True), (agreeing, False), (other, True)):
        record_of(training_step(recompute=recompute)).save(folder / CHANGED.folder / "records" / "plain")
    result = result_of(CHANGED.name, measured=measured())
    history = [(agreeing, summary_of(result)), (other, summary_of(CHANGED))]
    html = page_of(now, summary_of(CHANGED), history)
    (drawing,) = re.findall(r'<svg class="step".*?</svg>', html)
    was, is_now = re.findall(r'class="(?:was|now)" d="(.*?)"', drawing)
    assert was != is_now
    alone = page_of(now, summary_of(CHANGED), history[1:])
    (drawing,) = re.findall(r'<svg class="step".*?</svg>', alone)
    assert re.findall(r'class="(?:was|now)" d="(.*?)"', drawing) == [is_now] or "was" not in drawing


def test_a_kept_step_that_cannot_be_read_is_not_drawn_and_the_page_says_so(tmp_path: Path) -> None:
    now, kept = tmp_path / "now", tmp_path / "kept"
    for folder in (now, kept):
        record_of(training_step()).save(folder / CHANGED.folder / "records" / "plain")
    with (kept / CHANGED.folder / "records" / "plain" / "timeline.npz").open("wb") as columns:
        np.savez(columns, nanoseconds=np.zeros(1))
    html = page_of(now, summary_of(CHANGED), [(kept, summary_of(result_of(CHANGED.name, measured=measured())))])
    assert "is not drawn" in html
    assert html.count('<svg class="step"') == 1


def test_junit_counts_errors_and_failures_and_carries_the_differences(tmp_path: Path) -> None:
    page_of(tmp_path, RED)
    root = ET.fromstring((tmp_path / "junit.xml").read_text())
    (suite,) = root
    assert root.tag == "testsuites"
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "errors": "1", "skipped": "0"}
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {"passed", "changed<case>", "broken", "bare", "new"}
    assert all(
        float(case.get("time") or "") == 3.0 and case.get("classname") == "small.small"
        for case in suite.iter("testcase")
    )
    failure = cases["changed<case>"].find("failure")
    assert failure is not None
    assert failure.text is not None
    assert "1,048,576" in failure.text
    assert "changed: setting offload_modules: a+b -> a" in failure.text
    error = cases["broken"].find("error")
    assert error is not None
    assert "ZeroDivisionError" in (error.get("message") or "")
    assert cases["passed"].find("failure") is None


def test_the_summary_reads_back(tmp_path: Path) -> None:
    page_of(tmp_path, RED)
    read = read_summary(tmp_path)
    assert read.headline == RED.headline
    assert read.results[1].differences == CHANGED.differences
    assert read.results[0].measured == PASSED.measured


def test_the_table_names_case_metric_baseline_now_difference_and_setting() -> None:
    table = summary_table(RED)
    (line,) = [line for line in table.splitlines() if "peak_allocated_bytes" in line]
    assert line.split() == [
        "plain", "peak_allocated_bytes", "1,048,576", "2,097,152", "+1.00", "MiB", "(+100.00%)", "+1.00",
        "MiB", "in", "decoder.layers.1.mlp",
    ]  # fmt: skip
    assert "  settings of plain: offload expert_fc1+moe_act" in table
    assert "  changed: setting offload_modules: a+b -> a" in table
    assert "changed<case>: changed" in table


def test_the_hardware_is_in_every_form_of_the_report_and_never_compared(tmp_path: Path) -> None:
    here = replace(measured(), hardware={"gpu": "<H200>, 141 GiB", "driver": "570.1"})
    elsewhere = replace(here, hardware={"gpu": "H100"})
    assert not compare_with_baseline(elsewhere, here, "cuda")
    run = summary_of(result_of(measured=here, baseline=elsewhere))
    text = "".join(Checker(page_of(tmp_path, run)).text)
    assert "gpu: <H200>, 141 GiB · driver: 570.1" in text
    assert "hardware: gpu <H200>, 141 GiB, driver 570.1" in summary_table(run)
    properties = {p.get("name"): p.get("value") for p in ET.parse(tmp_path / "junit.xml").getroot().iter("property")}
    assert properties["hardware gpu"] == "<H200>, 141 GiB"
    assert read_summary(tmp_path).results[0].measured == here
    unnamed = replace(PASSED, name="unnamed")
    assert "hardware gpu" in junit_xml(replace(run, results=(unnamed, *run.results))), "whichever case names it"
    assert "hardware" not in summary_table(summary_of(PASSED)), "records of an older memlab have none"
    path = tmp_path / "small.json"
    write_baseline(path, Baseline(backend="cpu", case="small", date="2026-01-01", commit="abc1234", measured=here))
    assert "H200" not in path.read_text()
    read = read_baseline(path)
    assert read is not None
    assert not compare_with_baseline(read.measured, here, "cpu")
