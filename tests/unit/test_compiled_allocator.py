"""The compiled allocator gives the answers of the one in Python, and is left out where numba does not work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import memlab
from memlab import Lab
from memlab.allocator import choice, compiled, machine_code
from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.compiled import CompiledAllocator
from memlab.allocator.protocol import NO_BLOCK, Allocator, Operations
from memlab.allocator.request_log import RequestLog
from memlab.commands import doctor
from memlab.config.allocator_settings import AllocatorSettings
from memlab.meter import caching_memory
from memlab.meter.events import EventLog
from memlab.meter.labels import Labels
from memlab.units import MIB
from tests.unit.allocators import compiled_from, require_equal_answers


@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 80, 10)], ids=str)
def test_both_allocators_answer_random_tables_alike(seeds: range) -> None:
    assert sum(map(require_equal_answers, seeds)) > 1000


_CALLS: dict[str, Callable[[Any], object]] = {
    "allocate": lambda allocator: allocator.allocate(5 * MIB),
    "allocate on a stream without pools": lambda allocator: allocator.allocate(5 * MIB, 7),
    "free": lambda allocator: allocator.free(2),
    "run": lambda allocator: allocator.run(Operations(np.array([(0, MIB, 0), (1, 3 * MIB, 9), (0, 0, 0)])), [-1, -1]),
    "run within a limit": lambda allocator: allocator.run(Operations(np.array([(0, 90 * MIB, 0)])), [-1], 130 * MIB),
    "makes_space": lambda allocator: allocator.makes_space(70 * MIB, 130 * MIB),
    "empty_cache": lambda allocator: allocator.empty_cache(),
    "copy": lambda allocator: allocator.copy(),
    "in_python": lambda allocator: allocator.in_python(),
    "state": lambda allocator: allocator.state([2, 3]),
}


def called_with_a_collection(call: Callable[[Any], object], allocator: Allocator, line: int) -> bool:
    """Calls, and collects garbage before a line of the allocator's code; returns whether the call has so many lines."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != compiled.__file__:
            return None
        num_lines += event == "line"
        if event == "line" and num_lines == line:
            collect(allocator)
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call(allocator)
    finally:
        sys.settrace(former)
    return num_lines >= line


def filled() -> CachingAllocator:
    allocator = CachingAllocator()
    assert [allocator.allocate(20 * MIB) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    return allocator


def collect(allocator: Allocator) -> None:
    for block in (0, 4):
        allocator.free(block)


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_what_is_freed_in_the_middle_of_a_call_is_freed_before_it_or_behind_it(call: Callable[[Any], object]) -> None:
    """Python may collect garbage at any line of the allocator: here it does at each line of a call in turn."""
    possible = []
    for first, second in ((collect, call), (call, collect)):
        python = filled()
        first(python)
        second(python)
        possible.append(python.state([1, 3]))
    for line in count(1):
        allocator = compiled_from(filled())
        if not called_with_a_collection(call, allocator, line):
            assert line > 3
            return
        assert allocator.in_python().state([1, 3]) in possible, f"line {line} of the call"


def test_a_freed_slot_without_a_block_is_an_error_of_memlab() -> None:
    operations, compiled = Operations(np.array([(0, 0, 0)])), compiled_from(CachingAllocator())
    with pytest.raises(AssertionError, match="what is freed is allocated"):
        compiled.run(operations, [NO_BLOCK])


@pytest.mark.parametrize("call", [_CALLS["allocate"], _CALLS["free"]])
def test_what_is_freed_after_an_interrupted_call_is_freed_at_once(call: Callable[[Any], object]) -> None:
    def interrupted(*_: int) -> int:
        raise KeyboardInterrupt

    allocator = compiled_from(filled())
    code, allocator._code = allocator._code, interrupted  # Ctrl-C comes at any line
    with pytest.raises(KeyboardInterrupt):
        call(allocator)
    allocator._code = code
    expected = compiled_from(filled())
    for each in (allocator, expected):
        collect(each)
    assert allocator.state([1, 3]) == expected.state([1, 3])


def test_a_long_log_is_tried_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_MANY", 3)
    allocator = CachingAllocator()
    log = RequestLog(allocator)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(100 * MIB)
    assert isinstance(choice.for_operations(3, allocator), CompiledAllocator)
    assert [log.completes_within(limit * MIB) for limit in (99, 100)] == [False, True]


def test_without_llvm_python_serves_all_and_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.delitem(sys.modules, "memlab.allocator.machine_code", raising=False)
    choice.why_not_compiled.cache_clear()
    try:
        allocator = CachingAllocator()
        assert choice.for_operations(10**9, allocator) is allocator
        assert isinstance(choice.new_allocator(AllocatorSettings()), CachingAllocator)
        doctor._report(as_json=False)
    finally:
        choice.why_not_compiled.cache_clear()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("simulated")]
    assert "ok, but steps of many micro-batches take longer: the allocator has no machine code (ModuleNotF" in line


def test_code_is_kept_and_damaged_code_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read_only, folder = tmp_path / "file" / "folder", tmp_path / "folder"
    (tmp_path / "file").touch()
    monkeypatch.setattr(machine_code, "_FOLDERS", (read_only, folder))
    machine_code._keep("code", b"machine code")
    assert machine_code._kept("code") == b"machine code"
    assert [path.name for path in folder.iterdir()] == ["code"]
    content = (folder / "code").read_bytes()
    for damaged in (b"", content[:-1], content[:-1] + b"R"):
        (folder / "code").write_bytes(damaged)
        assert machine_code._kept("code") is None


def test_a_user_without_a_home_directory_has_one_folder_for_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    spec = spec_from_file_location("machine_code_again", machine_code.__file__)
    assert spec is not None and spec.loader is not None
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    assert [folder.name for folder in again._FOLDERS] == ["__pycache__"]


def test_what_one_processor_has_compiled_serves_on_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_code.serve(compiles=True)
    monkeypatch.setattr(machine_code.llvm, "get_host_cpu_name", lambda: "another one")
    machine_code.serve.cache_clear()
    assert callable(machine_code.serve(compiles=False))


def test_without_kept_code_nothing_is_compiled_for_a_short_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_FOLDERS", ())
    machine_code.serve.cache_clear()
    choice.why_not_compiled.cache_clear()
    try:
        assert isinstance(choice.new_allocator(AllocatorSettings()), CachingAllocator)
    finally:
        machine_code.serve.cache_clear()
        choice.why_not_compiled.cache_clear()


@pytest.mark.parametrize(
    "why_not", ["", "it is kept", "it cannot be kept", "numba is not installed", "nothing can be started"]
)
def test_a_search_has_the_code_compiled_beside_it_where_that_serves_later_commands(
    why_not: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, started, said = tmp_path / "folder", list[list[str]](), list[str]()
    if why_not == "it cannot be kept":
        (tmp_path / "folder").touch()
    monkeypatch.setattr(machine_code, "_FOLDERS", (folder,))
    if why_not == "it is kept":
        machine_code._keep(machine_code._name(), b"machine code")
    if why_not == "numba is not installed":
        monkeypatch.setattr(machine_code, "version", {}.__getitem__)

    def start(command: list[str], **_: object) -> object:
        if why_not == "nothing can be started":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(command)
        return object()

    monkeypatch.setattr(choice.subprocess, "Popen", start)
    monkeypatch.setattr(choice, "_compiling", [])
    choice.compile_in_background(said.append)
    assert len(started) == len(said) == (not why_not)
    if folder.is_dir():
        assert len(list(folder.iterdir())) == (why_not == "it is kept"), (
            "nothing that only shows that it can be written"
        )


@pytest.mark.slow
def test_the_command_after_a_first_search_has_the_code(tmp_path: Path) -> None:
    """In a fresh folder, as pip leaves it: numba compiles for 10 s."""
    shutil.copytree(Path(memlab.__file__).parent, tmp_path / "memlab", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    search = [
        "search",
        "qwen3-moe-tiny",
        "--num-layers",
        "1",
        "--max-steps",
        "2",
        "--engines",
        "1",
        "--gpu-memory",
        "79GiB",
        "--json",
    ]

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memlab", *search]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    def kept() -> list[Path]:
        return list((tmp_path / "memlab" / "allocator" / "__pycache__").glob("allocator.*.o"))

    first = run()
    line = "the simulated allocator is compiled beside this command"
    assert line in first.stderr
    deadline = time.monotonic() + 300
    while not kept():
        assert time.monotonic() < deadline, first.stderr
        time.sleep(0.2)
    second = run()
    assert line not in second.stderr
    assert first.stdout == second.stdout != ""


def test_both_allocators_write_the_same_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stepped layers, of replayed passes, and of repeated micro-batches."""
    logs = []
    for allocator in (CachingAllocator, choice.new_allocator):
        monkeypatch.setattr(caching_memory, "new_allocator", allocator)
        with Lab("qwen3-moe-tiny", num_layers=2, seq_length=128, num_microbatches=12, backend="simulated") as lab:
            with lab.logging_requests() as log:
                lab.step()
            assert log is not None
            logs.append((type(log._allocator), log._entries))
            lab.step()
    (python, entries), (compiled, others) = logs
    assert (python, compiled) == (CachingAllocator, CompiledAllocator)
    assert entries == others and len(entries) > 1000


def test_a_log_is_whole_and_ends_when_another_allocator_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching_memory, "new_allocator", CachingAllocator)
    labels = Labels()
    memory = caching_memory.CachingMemory(labels, EventLog(labels))
    with memory.logging_requests() as log:
        monkeypatch.setattr(choice, "_MANY", 1)
        memory.settle(memory.trial(1))
        memory.allocator.free(memory.allocator.allocate(MIB))
    assert isinstance(memory.allocator, CompiledAllocator)
    memory.allocator.allocate(MIB)
    assert log is not None and log._entries[1::3].tolist() == [MIB, 0]
