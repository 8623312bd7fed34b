"""The flex dispatcher: what a layer keeps, by hand, equal replays, tokens that a rank receives, buffers outside torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.package_info import MINOR

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.exchange_buffers import exchange_buffers
from memlab.config.layout import Layout
from memlab.config.routing import reached_tokens
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.fitting.outside_torch import outside_torch_of
from memlab.jobs.job import Job
from memlab.jobs.writing import written
from memlab.lab.lab import Lab
from tests.unit.live import FULL

pytestmark = pytest.mark.versions

TOKENS, EXPERTS, CHOSEN, RANKS = 64, 8, 2, 4
SPREAD: dict[str, Any] = {"layout": Layout(expert_model_parallel_size=RANKS, data_parallel_size=RANKS)}
DEEP_EP, HYBRID_EP = (
    TrainingState(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    for backend in ("deepep", "hybridep")
)


def test_what_a_layer_keeps_with_each_library_by_hand() -> None:
    def kept(state: TrainingState) -> int:
        peaks = []
        for num_layers in (5, 4):
            sizes: dict[str, Any] = {"num_layers": num_layers, "seq_length": TOKENS, "replay": False}
            with Lab("qwen3-moe-tiny", **sizes, **SPREAD, backend=of_the_cpu_backend(), state=state) as lab:
                lab.step()
                peaks.append(lab.step().peak_allocated_bytes)
        return peaks[0] - peaks[1]

    rows, own, channels = TOKENS * CHOSEN, EXPERTS // RANKS, 20 // 2
    received = 120  # of 256 tokens: 128 rows for two of eight experts, of which 28 / 8 tokens would choose both
    handle = TOKENS * RANKS * (1 + 4) + 4 * RANKS * (RANKS + 2 * channels) + 4 * received
    choices = TOKENS * CHOSEN * (8 + 4) + received * CHOSEN * 8
    multihot = received * CHOSEN + 2 * 8 * rows + received * own * (1 + 4)
    row_id_map = 4 * received * (2 * own + 1)
    by_deep_ep = handle + choices + multihot + row_id_map
    maps = 4 * TOKENS * RANKS + TOKENS + RANKS * TOKENS * own
    by_hybrid_ep = maps + 4 * (RANKS * 512) * own + 4 * TOKENS * EXPERTS + 4 * rows
    if MINOR >= 19:  # a layer's manager drops what it has received, and HybridEP's has a flag
        by_deep_ep, by_hybrid_ep = by_deep_ep - received * CHOSEN * (8 + 4), by_hybrid_ep + 1
    assert kept(DEEP_EP) - kept(HYBRID_EP) == by_deep_ep - by_hybrid_ep


@pytest.mark.parametrize(
    ("state", "settings"),
    [
        pytest.param(DEEP_EP, FULL, id="deepep, full"),
        pytest.param(HYBRID_EP, MemorySettings(), id="hybridep"),
        # Each library with the other settings.
        pytest.param(DEEP_EP, MemorySettings(), id="deepep", marks=pytest.mark.slow),
        pytest.param(HYBRID_EP, FULL, id="hybridep, full", marks=pytest.mark.slow),
    ],
)
def test_a_replayed_layer_is_the_stepped_one(state: TrainingState, settings: MemorySettings) -> None:
    sizes: dict[str, Any] = {"num_layers": 6, "seq_length": TOKENS, "routing": "random:3"}
    records = []
    for replay in (False, True):
        with Lab("qwen3-moe-tiny", **sizes, **SPREAD, backend="simulated", state=state, replay=replay) as lab:
            lab.step(settings)
            records.append(lab.step(settings))
    for figure in ("peak_allocated_bytes", "peak_reserved_bytes", "static_bytes", "residual_bytes"):
        assert getattr(records[0], figure) == getattr(records[1], figure), figure


@pytest.mark.parametrize(
    ("experts", "topk", "own", "groups"),
    [(128, 8, range(16), None), (8, 2, range(2, 4), None), (256, 8, range(4), (8, 4))],
)
def test_received_tokens_are_those_of_drawn_choices(
    experts: int, topk: int, own: range, groups: tuple[int, int] | None
) -> None:
    num_tokens, rng = 5_000, np.random.default_rng(0)
    order = np.argsort(rng.random((num_tokens, experts)), axis=1)
    if groups is not None:  # the groups of a token come first, in any order of their experts
        among = np.argsort(np.argsort(rng.random((num_tokens, groups[0])), axis=1), axis=1) < groups[1]
        is_chosen = np.take_along_axis(among, order // (experts // groups[0]), axis=1)
        order = np.take_along_axis(order, np.argsort(~is_chosen, axis=1, kind="stable"), axis=1)
    chosen = order[:, :topk]
    rows = np.bincount(chosen.ravel(), minlength=experts).tolist()
    drawn = int(np.isin(chosen, list(own)).any(axis=1).sum())
    assert reached_tokens(num_tokens, rows, own, topk, groups or (None, None)) == pytest.approx(drawn, rel=0.03)


def test_received_tokens_lie_within_their_bounds() -> None:
    """Each token goes to all of the rank's experts, or one expert has all of its rows."""
    assert reached_tokens(100, [100, 100, 0, 0], range(2), 2, (None, None)) == 100
    assert reached_tokens(100, [90, 10, 50, 50], range(2), 2, (None, None)) in range(90, 101)
    assert reached_tokens(100, [0, 0, 100, 100], range(2), 2, (None, None)) == 0


def _job(state: TrainingState, ranks: int, **values: Any) -> Scenario:
    layout = Layout(expert_model_parallel_size=ranks, data_parallel_size=ranks)
    return Scenario.of("qwen3-30b-a3b", seq_length=4096, layout=layout, state=state, **values)


def test_buffers_by_hand() -> None:
    """Within one node, and between two: of 10 channels with 8 peers each."""
    mebibyte, page = 2**20, 2**21
    of_a_token = 2 * 2048 + 8 + 128 * (8 + 4 + 4)
    by_nvlink = 10 * 8 * (5 * 4 + 256 * of_a_token)
    assert exchange_buffers(_job(DEEP_EP, 8)) == (-(-by_nvlink // page) * page + 32 * mebibyte,) * 2
    least, most = exchange_buffers(_job(DEEP_EP, 16))
    of_two_nodes = 10 * 8 * (7 * 4 + 288 * of_a_token)
    assert least == -(-of_two_nodes // page) * page + (32 + 512) * mebibyte
    assert most - least == 512 * mebibyte
    tokens = 8 * 4096  # all of them may go to one rank: as rows, their probabilities, scales, and the map of all
    assert exchange_buffers(_job(HYBRID_EP, 8)) == (tokens * (2 * 2048 + 4 * 128 + 4 * 16 + 128),) * 2
    least, most = exchange_buffers(_job(HYBRID_EP, 16))
    assert least < most  # whether 16 GPUs reach one another by NVLink is not known
    wider = exchange_buffers(_job(TrainingState(moe_token_dispatcher_type="flex", moe_deepep_num_sms=40), 8))
    assert wider.least_bytes > exchange_buffers(_job(DEEP_EP, 8)).least_bytes
    assert exchange_buffers(_job(TrainingState(), 8)) == (0, 0)


def test_the_range_outside_torch_has_the_buffers_and_says_that_they_are_read() -> None:
    plain, flex = outside_torch_of(_job(TrainingState(), 16)), outside_torch_of(_job(DEEP_EP, 16))
    assert flex.exchange_buffer_bytes == exchange_buffers(_job(DEEP_EP, 16)).least_bytes
    assert flex.nccl_bytes < plain.nccl_bytes  # no rank sends rows by NCCL
    assert "for buffers of experts on nodes of eight GPUs or more, read and not measured" in str(flex)
    assert "read and not measured" not in str(plain)


@pytest.mark.parametrize(
    ("model", "state", "ranks", "message"),
    [
        ("qwen3-moe-tiny", DEEP_EP, 1, r"'flex' with expert_model_parallel_size 1 .* by a rule of Megatron-Core"),
        ("qwen3-moe-tiny", HYBRID_EP, 1, "must have more ranks"),
        (
            "deepseek-v3",
            DEEP_EP,
            256,
            "'deepep' with 256 ranks .* must be one of 2, 4, 8, 16, 24, 32, 64, 128, 144, 160",
        ),
        (
            "qwen3-moe-tiny",
            replace(DEEP_EP, moe_deepep_num_sms=21),
            2,
            "is 21, must be even by a rule of DeepEP: .* 20",
        ),
    ],
)
def test_what_megatron_or_the_library_refuses(model: str, state: TrainingState, ranks: int, message: str) -> None:
    layout = Layout(expert_model_parallel_size=ranks, data_parallel_size=ranks)
    with pytest.raises(ValueError, match=message):
        Scenario.of(model, num_layers=4, layout=layout, state=state)


def test_a_live_lab_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"is 'flex', whose backend 'hybridep' memlab only predicts: choose alltoall"):
        Lab("qwen3-moe-tiny", **SPREAD, backend="cpu", state=HYBRID_EP)


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ("--moe-token-dispatcher-type flex", DEEP_EP),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", DEEP_EP),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", HYBRID_EP),
    ],
)
def test_a_script_says_which_library(lines: str, state: TrainingState, tmp_path: Path) -> None:
    job = script(lines, tmp_path)
    found = job.required()[0].state
    for name in ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_deepep_num_sms"):
        assert getattr(found, name) == getattr(state, name)
    assert not [one.key for one in job.not_modelled if "dispatcher" in one.key or "deepep" in one.key]


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ("--moe-enable-deepep", "moe_token_dispatcher_type allgather, must have flex by a rule of Megatron-Core"),
        (
            "--moe-enable-deepep --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            "moe_flex_dispatcher_backend hybridep, must have deepep",
        ),
    ],
)
def test_deepep_without_its_dispatcher_cannot_start(lines: str, rule: str, tmp_path: Path) -> None:
    assert rule in str(script(lines, tmp_path).cannot_start)


def script(lines: str, folder: Path) -> Job:
    (folder / "run.sh").write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 2048 --ffn-hidden-size 6144 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --seq-length 4096 "
        "--max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --swiglu "
        "--disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 8 "
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --bf16 --vocab-size 151936 "
        f"--expert-model-parallel-size 8 --moe-router-dtype fp32 {lines}"
    )
    return Job.read(folder / "run.sh")


@pytest.mark.parametrize(("kind", "is_said"), [("flex", True), ("allgather", False)])
def test_a_written_job_of_slime_says_the_dispatcher_that_slime_keeps(kind: str, is_said: bool) -> None:
    layout = Layout(expert_model_parallel_size=8, data_parallel_size=8)
    state = TrainingState.of_options({"moe_token_dispatcher_type": kind})
    new = written("slime", Scenario.of("qwen3-30b-a3b", layout=layout, state=state), MemorySettings())
    assert ("--moe-token-dispatcher-type flex" in new.lines) is is_said
    assert ("moe_token_dispatcher_type" in new.unsaid) is not is_said
