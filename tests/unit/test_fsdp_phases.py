"""Phases of reinforcement learning under FSDP: what weight syncs gather, and the passes of two models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from memlab.backends.simulated import of_the_cpu_backend
from memlab.config.layout import Layout
from memlab.config.lora import LoRA
from memlab.config.rollout import ReferencePass, Rollout
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.transformers_linears import state_dict_sizes
from memlab.fitting.weight_sync import bytes_of_sync
from memlab.jobs.job import Job
from memlab.lab.job_phases import predict_phases
from memlab.lab.lab import Lab
from memlab.units import GIB, MIB

RANKS = 8
AWAY = MemorySettings(offload_parameters=True, offload_gradients=True, offload_optimizer=True)


def scenario(name: str = "qwen3-8b", *, num_layers: int = 4, ranks: int = RANKS, **state: Any) -> Scenario:
    given = {"fp32_sharded_params": True, "reshard_after_forward": "all"} | state
    layout = Layout(data_parallel_size=ranks)
    return Scenario.of(name, num_layers=num_layers, engine="fsdp2", layout=layout, state=TrainingState(**given))


class Counted:
    """Bytes that are there as long as Python has a name for them."""

    now: ClassVar[int] = 0
    peak: ClassVar[int] = 0

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        Counted.now += num_bytes
        Counted.peak = max(Counted.peak, Counted.now)

    def __del__(self) -> None:
        Counted.now -= self.num_bytes


def gather(elements: int) -> Counted:
    return Counted(4 * elements)


def sent_by_verl(bucket: int, weights: list[tuple[str, int]]) -> None:
    buffer = Counted(bucket)
    for weight in (gather(elements) for _, elements in weights):
        assert weight.num_bytes and buffer.num_bytes


def sent_by_nemo_rl(bucket: int, weights: list[tuple[str, int]], version: int) -> None:
    def generate() -> Iterator[Counted]:
        for _, elements in weights:
            whole = gather(elements)
            yield Counted(2 * elements)
            if version == 2:
                del whole

    buffer = None
    for tensor in generate():
        buffer = buffer or Counted(bucket)
        assert tensor.num_bytes


def sent_by_skyrl(threshold: int, weights: list[tuple[str, int]]) -> None:
    def generate() -> Iterator[list[Counted]]:
        batch: list[Counted] = []
        modules = dict.fromkeys(name.rpartition(".")[0] for name, _ in weights)
        for module in modules:
            own = []
            for name, elements in weights:
                if name.rpartition(".")[0] == module:
                    whole = gather(elements)
                    own.append(Counted(2 * elements))
                    del whole
            if batch and sum(one.num_bytes for one in (*batch, *own)) > threshold:
                yield batch
                batch = []
            batch += own
            own = []
        yield batch

    for chunk in generate():
        packed = Counted(sum(one.num_bytes for one in chunk))
        assert packed.num_bytes


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen2.5-0.5b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("sender", ["verl", "nemo_rl", "nemo_rl_v1", "skyrl", "skyrl_broadcast"])
def test_a_sync_has_what_the_names_of_a_sender_keep(name: str, sender: Any) -> None:
    job, bucket = scenario(name), 96 * MIB
    weights, of_sync = [*state_dict_sizes(job.architecture, 4)], 0 if sender == "skyrl_broadcast" else bucket
    Counted.peak = Counted.now = 0
    if sender == "verl":
        sent_by_verl(bucket, weights)
    elif sender == "skyrl":
        sent_by_skyrl(bucket, weights)
    else:
        sent_by_nemo_rl(of_sync, weights, version=1 if sender == "nemo_rl_v1" else 2)
    rollout = Rollout(is_colocated=True, ranks_per_node=8, seq_length=1, bucket_bytes=bucket, sender=sender)
    found = bytes_of_sync(job, rollout, of_sync)
    # The first weight of NeMo-RL is gathered before its buffers are there, which changes nothing but for one weight.
    assert found == pytest.approx(Counted.peak, rel=0, abs=0)


def test_weights_come_from_the_host_with_their_shards() -> None:
    job, bucket = scenario(), 2 * GIB
    rollout = Rollout(is_colocated=True, ranks_per_node=8, seq_length=1, bucket_bytes=bucket, sender="verl")
    on_device, from_host = (
        bytes_of_sync(job, replace(rollout, syncs_from_host=is_away), bucket) for is_away in (False, True)
    )
    # The names of the embedding and of the first matrix live together; of the output layer there is the shard.
    embedding, first = (4 * elements for _, elements in [*state_dict_sizes(job.architecture, 1)][:2])
    norm = 4 * job.architecture.hidden_size
    assert on_device - bucket == embedding + first
    assert from_host - bucket == embedding + embedding // RANKS + norm
    assert bytes_of_sync(scenario(ranks=1), rollout, bucket) == bucket, "a rank that has all gathers nothing"


def test_fsdp1_gathers_the_whole_model_for_adapters_unless_layer_by_layer() -> None:
    lora = LoRA(rank=8, fsdp2_library="peft")
    rollout = Rollout(
        is_colocated=True, ranks_per_node=8, seq_length=1, bucket_bytes=0, sender="verl", sends_adapters=True,
        gathers_model_at_once=True,
    )  # fmt: skip
    first, second = (scenario("llama-3.1-8b", fsdp_version=version, lora=lora) for version in (1, 2))
    whole = 4 * first.architecture.with_layers(4).num_parameters
    assert bytes_of_sync(first, rollout, 0) == whole
    layer = bytes_of_sync(first, replace(rollout, gathers_model_at_once=False), 0)
    assert 0.1 * whole < layer < whole
    assert bytes_of_sync(second, rollout, 0) == 0
