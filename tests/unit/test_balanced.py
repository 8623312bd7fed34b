"""Work that is spread over engines: the same results in the same order, whatever becomes of an engine."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.lab.search_workers import front_of, open_workers
from memlab.ranks.balanced import Balanced, CallLostError
from memlab.ranks.local_processes import LocalProcesses, _without_main_module
from memlab.ranks.ranks import Engine, Ranks
from memlab.regression.nightly import Options, run_suite
from memlab.regression.run.case_on_engine import SERVED
from memlab.regression.suite.suite import read_suite
from memlab.regression.summary import read_summary
from memlab.units import MIB
from tests.notebooks.small_suites import write_suite

CALLS = "tests.unit.served_calls:Calls"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.start(3) as ranks:
        yield ranks


def processes(file: Path) -> list[int]:
    """The process that runs a call, and the engine that started it."""
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(word) for word in file.read_text().split()]


def test_calls_are_answered_each_and_an_error_is_that_of_the_method(ranks: Ranks) -> None:
    reports: list[str] = []
    with Balanced(ranks, CALLS) as engines:
        answers = [engines.submit("square", number, on_report=reports.append) for number in range(20)]
        failed = engines.submit("fail")
        assert [answer.result(60) for answer in answers] == [number * number for number in range(20)]
        with pytest.raises(KeyError, match="a key") as error:
            failed.result(60)
    assert "engine" in error.value.__notes__[0]
    assert sorted(reports) == sorted(f"squaring {number}" for number in range(20))


def test_a_call_whose_process_is_killed_is_repeated_on_another_engine(ranks: Ranks, tmp_path: Path) -> None:
    begun: list[Engine] = []
    with Balanced(ranks, CALLS) as engines:
        answer = engines.submit("wait_the_first_time", tmp_path / "pids", on_start=begun.append)
        pid, _ = processes(tmp_path / "pids")
        os.kill(pid, signal.SIGKILL)
        assert answer.result(60) != pid
        assert len({one.number for one in begun}) == 2
        assert len(engines) == 3, "the engine itself is not lost"


def test_a_call_that_ends_each_process_fails_by_name_and_the_others_go_on(ranks: Ranks) -> None:
    with Balanced(ranks, CALLS) as engines:
        deadly = engines.submit("die")
        answers = [engines.submit("square", number) for number in range(6)]
        with pytest.raises(CallLostError, match=r"^lost 3 times: engine \d+ \(process \d+ on .*signal 9") as error:
            deadly.result(60)
        assert all(f"engine {one.number} (" in str(error.value) for one in ranks.engines)
        assert [answer.result(60) for answer in answers] == [0, 1, 4, 9, 16, 25]


def test_closing_ends_what_runs(ranks: Ranks, tmp_path: Path) -> None:
    with Balanced(ranks, CALLS) as engines:
        answer = engines.submit("wait_the_first_time", tmp_path / "pids")
        pid, _ = processes(tmp_path / "pids")
    with pytest.raises(CallLostError, match="closed"):
        answer.result(0)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)


def test_a_script_that_has_its_calls_served_is_not_run_again_by_the_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('run as', __name__, flush=True)\n"
        "from memlab.ranks.balanced import Balanced\n"
        "from memlab.ranks.local_processes import LocalProcesses\n"
        f"print(Balanced(LocalProcesses(1), {CALLS!r}).submit('square', 3).result(60))\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["run as __main__", "9"], done.stderr


def test_a_process_that_another_thread_starts_meanwhile_knows_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    script.__file__ = "/a/script.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    with _without_main_module(), ThreadPoolExecutor(1) as other:
        own = spawn.get_preparation_data("own")
        of_another = other.submit(spawn.get_preparation_data, "other").result()
    assert of_another == spawn.get_preparation_data("other")
    assert [*own] == [key for key in of_another if not key.startswith("init_main_")] != [*of_another]


def test_the_output_of_a_dropped_process_is_closed() -> None:
    places = LocalProcesses(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        del places
        gc.collect()
    assert not [str(one.message) for one in seen]


def test_nothing_is_started_after_the_end() -> None:
    places, ended = LocalProcesses(1), threading.Event()
    engines = Balanced(places, CALLS)

    def close(_: object) -> None:
        engines.close()
        ended.set()

    with pytest.raises(CallLostError, match="closed"):
        engines.submit("square", 3, on_start=close).result(60)
    assert ended.wait(60)
    for thread in [each for each in threading.enumerate() if each.name == "memlab-0"]:
        thread.join(60)
    assert places.engines[0]._process is None


def test_a_call_after_the_end_is_refused_and_one_whose_callback_fails_is_ended(ranks: Ranks, tmp_path: Path) -> None:
    with Balanced(ranks, CALLS) as engines:

        def fail(line: str) -> None:
            raise OSError(f"cannot write {line}")

        with pytest.raises(OSError, match="cannot write squaring 3"):
            engines.submit("square", 3, on_report=fail).result(60)
        assert engines.submit("square", 4).result(60) == 16
    with pytest.raises(CallLostError, match="closed"):
        engines.submit("square", 5).result(0)


@pytest.mark.notebook
def test_a_nightly_on_engines_says_which_engine_ran_each_case(ranks: Ranks, tmp_path: Path) -> None:
    suite = read_suite(write_suite(tmp_path, "backend: cpu\ncases:\n  - {lab: small, matrix: {name: [good, exits]}}\n"))
    lines: list[str] = []
    with Balanced(ranks, SERVED) as engines:
        _, folder = run_suite(suite, suite.cases, Options(allow_missing=True), lines.append, engines)
    good, exits = read_summary(folder).results
    assert (good.name, good.status, exits.status) == ("small-name=good", "new", "failed")
    assert "the kernel exited early" in exits.message and exits.folder == "small-name=exits.failed"
    names = {f"engine {one.number} on {one.host}" for one in ranks.engines}
    assert {good.engine, exits.engine} <= names and good.engine != exits.engine
    assert f"small-name=good: started on {good.engine}" in lines
    assert good.engine in (folder / "index.html").read_text()
    assert not list(folder.glob(".*"))


def test_a_search_on_engines_finds_what_one_process_finds_even_if_an_engine_is_killed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = Scenario.of(architecture="qwen3-moe-tiny", num_layers=1, seq_length=32)
    options = {"limit_bytes": 768 * MIB, "resolution_bytes": 1, "max_steps": 8}
    with open_workers(1) as workers:
        alone = front_of(MemorySettings(), [scenario], workers, **options)
    lines: list[str] = []

    class Progress:
        def write(self, text: str) -> None:
            lines.append(text)
            if " predicted, " in text and sum(" predicted, " in line for line in lines) == 3:
                os.kill(ranks.engines[0].pid, signal.SIGKILL)

        def flush(self) -> None:
            pass

    with capsys.disabled(), monkeypatch.context() as patches:
        patches.setattr(sys, "stderr", Progress())
        with open_workers(ranks) as workers:
            together = front_of(MemorySettings(), [scenario], workers, **options)
    assert together == alone
    assert len(together.points) == 8 and together.num_left > 0
    assert any(point.fits for point in together.points)
    for line, one in zip("".join(lines).splitlines(), together.points, strict=True):
        assert f": {one.settings}: " in line
