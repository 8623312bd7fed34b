"""The options of torch's allocator: what a prediction reserves with them, and what a process was started with."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memlab.allocator.caching_allocator import CachingAllocator
from memlab.allocator.protocol import EMPTY_CACHE, NO_BLOCK, Operations
from memlab.allocator.replay import Blocks
from memlab.allocator.request_log import RequestLog
from memlab.backends.allocator_environment import allocator_of_process, check_allocator, start_with
from memlab.config.allocator_settings import AllocatorSettings
from memlab.jobs.job import Job
from memlab.lab.lab import Lab
from memlab.units import GIB, MIB
from tests.unit import caching_allocator as reference

EXPANDABLE = AllocatorSettings(expandable_segments=True)


class Pages:
    """One expandable segment as sets of pages and intervals, searched from scratch (torch 2.11's Note [Expandable
    Segments] and ``find_expandable_block`` in ``c10/cuda/CUDACachingAllocator.cpp``)."""

    END = 2**40

    def __init__(self, page: int) -> None:
        self.page = page
        self.mapped: set[int] = set()
        self.live: dict[int, int] = {}

    def malloc(self, size: int) -> int:
        fitting = sorted((end - start, start) for start, end in self._free() if end - start >= size)
        chosen = fitting[0] if fitting else (0, self._lowest_with_room(size))
        for other in fitting[1:]:
            if self._with_growth(*other) >= self._with_growth(*chosen):
                break
            chosen = other
        start = chosen[1]
        self.live[start] = start + size
        self.mapped |= set(range(start // self.page, -(-(start + size) // self.page)))
        return start

    def empty_cache(self) -> None:
        for start, end in self._free():
            self.mapped -= set(range(-(-start // self.page), end // self.page))

    def _free(self) -> list[tuple[int, int]]:
        """Maximal intervals that are mapped and not allocated."""
        edges = sorted({edge for page in self.mapped for edge in (page * self.page, (page + 1) * self.page)})
        edges = sorted({*edges, *self.live.keys(), *self.live.values()})
        pieces: list[tuple[int, int]] = []
        for start, end in itertools.pairwise(edges):
            if start // self.page not in self.mapped or any(a <= start < b for a, b in self.live.items()):
                continue
            pieces = (
                [*pieces[:-1], (pieces[-1][0], end)] if pieces and pieces[-1][1] == start else [*pieces, (start, end)]
            )
        return pieces

    def _next_mapped(self, address: int) -> int:
        return min((page * self.page for page in self.mapped if page * self.page >= address), default=self.END)

    def _with_growth(self, length: int, start: int) -> int:
        end = start + length
        unmapped = end % self.page == 0 and end // self.page not in self.mapped
        return length + (self._next_mapped(end) - end if unmapped else 0)

    def _lowest_with_room(self, size: int) -> int:
        behind = {0, *(page + 1 for page in self.mapped)}
        for hole in sorted(page * self.page for page in behind - self.mapped):
            place = next((start for start, end in self._free() if end == hole), hole)
            # Between there and the next allocation everything is free or unmapped.
            if min((start for start in self.live if start >= place), default=self.END) - place >= size:
                return place
        raise AssertionError


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("h200_history", AllocatorSettings()),
        ("h200_history_expandable", EXPANDABLE),
        ("h200_history_streams", AllocatorSettings()),
        ("h200_history_streams_expandable", EXPANDABLE),
    ],
)
def test_the_simulation_reserves_what_torch_reserved_on_an_h200(name: str, settings: AllocatorSettings) -> None:
    """Torch 2.11.0's own history of random requests, after each of which the reserved bytes are compared.

    In two of the histories the requests are on three streams, which are the last column; in the others on the default
    stream.
    """
    values = json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text())
    (segment,) = values["segments"]
    simulated, reserved = CachingAllocator(settings), segment["total_size"]
    simulated.allocate(segment["blocks"][0]["size"])
    live: dict[int, int] = {}
    before = ""
    for action, address, size, *streams in values["trace"]:
        if action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
            if before != action:
                simulated.empty_cache()
        elif action == "alloc":
            live[address] = simulated.allocate(size, *streams)
            assert simulated.reserved_bytes == reserved
        elif action == "free_completed":
            simulated.free(live.pop(address))
        before = action
    assert simulated.reserved_bytes == reserved > 10 * segment["total_size"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page", [2 * MIB, 20 * MIB])
def test_an_expandable_segment_maps_the_pages_that_a_search_from_scratch_maps(seed: int, page: int) -> None:
    choose = random.Random(seed)
    mine, truth = CachingAllocator(EXPANDABLE), Pages(page)
    addresses = mine.blocks.address
    sizes = (9, 19.9) if page == 2 * MIB else (20.1, 26.5)
    live: list[tuple[int, int]] = []
    base: int | None = None
    for _ in range(250):
        if len(live) < 12 or choose.random() < 0.4:
            size = int(2 ** choose.uniform(*sizes)) // 512 * 512
            block, address = mine.allocate(size), truth.malloc(size)
            base = addresses[block] if base is None else base
            assert (addresses[block] - base, mine.num_bytes(block)) == (address, size)
            live.append((block, address))
        else:
            block, address = live.pop(choose.randrange(len(live)))
            mine.free(block)
            del truth.live[address]
        if choose.random() < 0.05:
            mine.empty_cache()
            truth.empty_cache()
        assert mine.reserved_bytes == len(truth.mapped) * page


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_split_size_mb", value) for value in (0, 1, 19, 20, 21, 1024, 2**20)),
        *(("garbage_collection_threshold", value) for value in (0, 1e-4, 0.5, 0.9999, 1, 1.5)),
    ],
)
def test_the_bounds_are_those_of_torch_s_own_parser(name: str, value: float) -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(
            f"{name}:{value:f}" if isinstance(value, float) else f"{name}:{value}"
        )
        is_accepted = True
    except (RuntimeError, ValueError):
        is_accepted = False
    with nullcontext() if is_accepted else pytest.raises(ValueError, match=f"{name} is .*must be"):
        AllocatorSettings(**{name: value})


@pytest.mark.parametrize(("seed", "split_mib"), [(0, 32), (1, 32), (2, 32), (3, 20), (4, 20)])
def test_blocks_above_max_split_size_are_never_split(seed: int, split_mib: int) -> None:
    choose = random.Random(seed)
    mine = CachingAllocator(AllocatorSettings(max_split_size_mb=split_mib))
    truth = reference.CachingAllocator(unsplit_from=split_mib * MIB)
    live: list[tuple[Any, Any]] = []
    for _ in range(500):
        if len(live) < 20 or choose.random() < 0.5:
            size = int(2 ** choose.uniform(9, 27))
            live.append((mine.allocate(size), truth.malloc(size)))
            assert mine.num_bytes(live[-1][0]) == live[-1][1].size
        else:
            mine_block, true_block = live.pop(choose.randrange(len(live)))
            mine.free(mine_block)
            truth.free(true_block)
        assert mine.reserved_bytes == truth.totals[-1][2]
    replayed = Blocks([], unsplit_from_bytes=split_mib * MIB)
    for entry in truth.trace:
        replayed.replay(entry)
    assert sum(replayed.allocated().values()) == truth.totals[-1][0]


def test_garbage_collection_returns_the_segments_that_were_free_for_longest() -> None:
    """``garbage_collect_cached_blocks``: above the threshold, segments of at least the mean age go, until it is met."""
    allocator = CachingAllocator(AllocatorSettings(garbage_collection_threshold=0.5))
    limit = 400 * MIB
    old, young, split = (allocator.allocate(size * MIB) for size in (60, 64, 100))
    allocator.free(old)
    for _ in range(10):
        assert allocator.makes_space(1 * GIB, 2 * GIB)  # searches, and lets the free block age
    allocator.free(young)
    allocator.free(split)
    split = allocator.allocate(80 * MIB)  # of the segment of 100: what is left of it cannot be returned
    assert allocator.reserved_bytes == 224 * MIB
    assert allocator.makes_space(110 * MIB, limit)
    assert allocator.reserved_bytes == 164 * MIB, "the old one makes 24 MiB, the young one may stay"
    without = CachingAllocator()
    without.free(without.allocate(300 * MIB))
    assert without.makes_space(310 * MIB, 700 * MIB)
    assert without.reserved_bytes == 300 * MIB, "the default collects nothing while there is space"


def test_garbage_collection_and_an_emptied_cache_return_segments_of_every_stream() -> None:
    allocator = CachingAllocator(AllocatorSettings(garbage_collection_threshold=0.5))
    for stream in range(3):
        allocator.free(allocator.allocate(60 * MIB, stream))
    copy = allocator.copy()
    for each in (allocator, copy):
        assert each.state([]) == copy.state([])
        assert each.makes_space(110 * MIB, 340 * MIB, stream=1)
        assert each.reserved_bytes == 0, "all have been free for as long: all go, also when fewer would do"
        for stream in range(3):
            each.free(each.allocate(60 * MIB, stream))
            assert each.reserved_bytes == (stream + 1) * 60 * MIB, "no stream gets another one's block"
            each.free(each.allocate(60 * MIB, stream))
            assert each.reserved_bytes == (stream + 1) * 60 * MIB
        each.empty_cache()
        assert each.reserved_bytes == 0


def test_oversize_blocks_are_returned_one_at_a_time_where_memory_is_short() -> None:
    """``release_available_cached_blocks``: the smallest that is large enough goes, and the others stay cached."""
    allocator = CachingAllocator(AllocatorSettings(max_split_size_mb=32))
    for block in [allocator.allocate(size * MIB) for size in (40, 100, 200)]:
        allocator.free(block)
    assert allocator.makes_space(60 * MIB, 350 * MIB)
    assert allocator.reserved_bytes == 240 * MIB


def test_expandable_segments_fit_where_fragments_of_two_segments_do_not() -> None:
    fits = {}
    for settings in (AllocatorSettings(), EXPANDABLE):
        allocator = CachingAllocator(settings)
        blocks = [allocator.allocate(9 * MIB) for _ in range(4)]
        allocator.free(blocks[1])
        allocator.free(blocks[2])
        assert allocator.reserved_bytes == 40 * MIB
        fits[settings] = allocator.makes_space(18 * MIB, 40 * MIB)
    assert fits == {AllocatorSettings(): False, EXPANDABLE: True}


def test_a_small_request_finds_no_place_in_a_large_segment_and_a_large_one_none_in_a_small_segment() -> None:
    allocator = CachingAllocator()
    for size in (2 * MIB, MIB // 2):
        allocator.allocate(size)
    assert (allocator.largest_free_bytes(2 * MIB), allocator.largest_free_bytes(512)) == (18 * MIB, 3 * MIB // 2)
    allocator.allocate(MIB), allocator.allocate(MIB // 2)
    assert not allocator.makes_space(512, 23 * MIB) and allocator.largest_free_bytes(512) == 0


def test_predicted_reserved_bytes_are_those_of_an_h200_with_expandable_segments() -> None:
    """Qwen3-30B-A3B, 2 layers, 4096 tokens, measured without memlab; torch 2.11.0, TE 2.12.0, megatron-core 0.16.1."""
    with Lab("qwen3-30b-a3b", num_layers=2, seq_length=4096, allocator=EXPANDABLE, backend="simulated") as lab:
        record = lab.step()
    assert record.static_bytes / GIB == pytest.approx(31.558, abs=6e-4)
    assert record.peak_allocated_bytes / GIB == pytest.approx(35.949, abs=6e-4)
    assert record.peak_reserved_bytes is not None
    assert record.peak_reserved_bytes / GIB == pytest.approx(36.135, abs=0.021), "one page of 20 MiB"


def test_a_log_knows_the_blocks_that_were_allocated_before_it_began() -> None:
    allocator = CachingAllocator()
    early, late = allocator.allocate(100 * MIB), allocator.allocate(10 * MIB)
    log = RequestLog(allocator)
    allocator.free(early)
    allocator.allocate(200 * MIB)
    allocator.free(late)
    allocator.allocate(100 * MIB)
    completes = {limit: log.completes_within(limit * MIB) for limit in (300, 209, 210, 299, 300)}
    assert completes == {209: False, 210: False, 299: False, 300: True}, (
        "what was freed is returned where space is short"
    )


def test_a_table_is_served_until_a_request_does_not_fit() -> None:
    allocator, blocks = CachingAllocator(), [NO_BLOCK] * 2
    rows = [(0, 60 * MIB, 0), (1, 30 * MIB, 0), (0, 0, 0), (0, 40 * MIB, 0), (EMPTY_CACHE, 0, 0), (1, 0, 0)]
    served = allocator.run(Operations(np.array(rows)), blocks, 95 * MIB)
    assert served.num_bytes.tolist() == [60 * MIB, 30 * MIB, 60 * MIB, 40 * MIB, 0, 30 * MIB]
    assert served.changes == [(0, 60 * MIB), (1, 30 * MIB)]
    assert blocks[1] == NO_BLOCK != blocks[0]
    served = allocator.run(Operations(np.array([(1, 35 * MIB, 0), (0, 0, 0)])), blocks, 94 * MIB)
    assert len(served.num_bytes) == 0 and blocks[1] == NO_BLOCK, "the request is refused, and nothing after it happens"


def test_addresses_never_run_out() -> None:
    allocator = CachingAllocator()
    for _ in range(1100):  # more than a PiB in all
        allocator.free(allocator.allocate(1024 * GIB))
        allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_options_that_do_nothing_are_named() -> None:
    settings = AllocatorSettings(garbage_collection_threshold=0.8, expandable_segments=True)
    with Lab("phi-4-tiny", num_layers=1, seq_length=64, allocator=settings, backend="simulated") as lab:
        assert set(lab.step().without_effect) == {"garbage_collection_threshold"}
        lab.device_memory_bytes = GIB
        assert lab.step().without_effect == {}
    with Lab("phi-4-tiny", num_layers=1, seq_length=64, allocator=settings, backend="cpu") as lab:
        assert set(lab.step().without_effect) == {"garbage_collection_threshold", "expandable_segments"}


def test_a_process_has_the_options_that_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert allocator_of_process() == start_with(AllocatorSettings()) == AllocatorSettings()
    with pytest.raises(ValueError, match="export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' and restart"):
        check_allocator(EXPANDABLE)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")  # so that the variable that follows is removed after the test
    assert start_with(EXPANDABLE) == EXPANDABLE
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    check_allocator(EXPANDABLE)
    assert start_with(AllocatorSettings()) == EXPANDABLE, "what the environment says counts where nothing is asked for"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    assert allocator_of_process() == EXPANDABLE
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    assert allocator_of_process() == AllocatorSettings()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert allocator_of_process() == AllocatorSettings(max_split_size_mb=128)
    options = "roundup_power2_divisions:[256:1,max_split_size_mb:64], garbage_collection_threshold:0.6"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    assert allocator_of_process() == AllocatorSettings(garbage_collection_threshold=0.6)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:")
    with pytest.raises(ValueError, match="max_split_size_mb is '' in PYTORCH_ALLOC_CONF, must be a number"):
        allocator_of_process()


REFUSED, TAKEN = "max_split_size_mb:5", "max_split_size_mb:100"
needs_torch_s_parser = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="torch shows its parser from version 2.10 on"
)


OLDER, NEWER = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
ASKS_TORCH = """
import json, os, sys, torch
taken = []
for variables in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        os.environ.update(variables)
        try:
            torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.5")
        except ValueError:
            os._exit(1)
        os._exit(0)
    taken.append(os.waitpid(child, 0)[1] == 0)
print(json.dumps(taken))
"""
"""For each environment, whether torch takes it: it reads the variables with the first setting."""


def taken_by_torch(environments: list[dict[str, str]]) -> list[bool]:
    environment = {name: text for name, text in os.environ.items() if name not in (OLDER, NEWER)}
    command = [sys.executable, "-c", ASKS_TORCH, json.dumps(environments)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    taken: list[bool] = json.loads(found.stdout)
    return taken


@needs_torch_s_parser
def test_the_older_of_two_variables_counts_as_in_torch_and_in_a_job(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, str], str]] = [
        ({NEWER: REFUSED}, REFUSED),
        ({OLDER: REFUSED}, REFUSED),
        ({OLDER: TAKEN, NEWER: REFUSED}, TAKEN),
        ({OLDER: REFUSED, NEWER: TAKEN}, REFUSED),
        ({OLDER: "", NEWER: REFUSED}, ""),
    ]
    assert taken_by_torch([variables for variables, _ in cases]) == [counts != REFUSED for _, counts in cases]
    for variables, counts in cases:
        lines = [f"export {name}={text.replace(':5', ':50')}" for name, text in variables.items()]
        for order in (lines, lines[::-1]):
            script = "\n".join([*order, "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --max_length 4096"])
            (tmp_path / "run.sh").write_text(script)
            scenario, _ = Job.read(tmp_path / "run.sh").required()
            assert scenario.allocator.max_split_size_mb == {REFUSED: 50, TAKEN: 100, "": None}[counts]


@needs_torch_s_parser
def test_the_smallest_split_size_is_torch_s() -> None:
    sizes = (19, 20)
    assert taken_by_torch([{NEWER: f"max_split_size_mb:{size}"} for size in sizes]) == [False, True]
    assert AllocatorSettings(max_split_size_mb=20).max_split_size_mb == 20
    with pytest.raises(
        ValueError, match="max_split_size_mb is 19, must be a whole number of at least 20: give another"
    ):
        AllocatorSettings(max_split_size_mb=19)
