"""The compiled allocator gives the answers of the one in Python, and is left out where numba does not work."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from memlab import Lab
from memlab.allocator import choice
from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.compiled import CompiledAllocator
from memlab.allocator.protocol import NO_BLOCK, Operations
from memlab.allocator.request_log import RequestLog
from memlab.commands import doctor
from memlab.units import MIB
from tests.unit.allocators import require_equal_answers


@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 80, 10)], ids=str)
def test_both_allocators_answer_random_tables_alike(seeds: range) -> None:
    assert sum(map(require_equal_answers, seeds)) > 1000


def test_a_freed_slot_without_a_block_is_an_error_of_memlab() -> None:
    operations, compiled = Operations(np.array([(0, 0, 0)])), CompiledAllocator.of(CachingAllocator())
    with pytest.raises(AssertionError, match="what is freed is allocated"):
        compiled.run(operations, [NO_BLOCK])


def test_a_long_log_is_tried_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_SOME", 3)
    allocator = CachingAllocator()
    log = RequestLog(allocator)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(100 * MIB)
    assert isinstance(choice.for_operations(3, allocator), CompiledAllocator)
    assert [log.completes_within(limit * MIB) for limit in (99, 100)] == [False, True]


def test_without_numba_python_serves_all_and_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("memlab.allocator.compiled", "memlab.allocator.kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    choice.why_not_compiled.cache_clear()
    try:
        allocator = CachingAllocator()
        assert choice.for_operations(10**9, allocator) is allocator
        doctor._report(as_json=False)
    finally:
        choice.why_not_compiled.cache_clear()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("simulated")]
    assert "ok, but steps of many micro-batches take longer: numba does not compile the allocator (ModuleNotF" in line


def test_the_log_of_requests_is_whole_whatever_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated micro-batches are long tables, which the compiled allocator would serve without a log."""
    logs = {}
    for first in (choice._MANY, 1):
        monkeypatch.setattr(choice, "_MANY", first)
        monkeypatch.setattr(choice, "_SOME", first)
        with Lab("qwen3-moe-tiny", num_layers=2, seq_length=128, num_microbatches=12, backend="simulated") as lab:
            with lab.logging_requests() as log:
                lab.step()
            assert log is not None
            logs[first] = log._entries
            lab.step()
    compiled, python = logs.values()
    assert compiled == python and len(python) > 1000
