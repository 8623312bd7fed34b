"""What a weight sync from FSDP has on the device beside the shards, at its peak: the senders of frameworks, in bytes.

Each gathers one weight after the other with ``DTensor.full_tensor``, which allocates the whole weight once, and on a
single rank returns the shard itself (torch 2.11 and 2.13). What differs is how long Python's names keep a weight, in
which type, and how many copies a sender makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memlab.config.parameters import bytes_of_shard, bytes_of_trained_shard, kept_bytes, trained_of_rank
from memlab.config.rollout import Rollout
from memlab.config.scenario import Scenario
from memlab.config.transformers_linears import state_dict_sizes

_SENT = 2
"""Bytes of a weight that is sent in bf16."""


class _Weight(NamedTuple):
    whole: int
    """Bytes of the whole weight in the shards' type; 0 where the rank has it as its shard."""
    shard: int
    """Of its shard, where that comes from the host to be gathered."""
    copy: int
    """Of its copy in the engine's type; 0 where it is sent as it was gathered."""

    @property
    def at_peak(self) -> int:
        """What it takes itself, until it is sent."""
        return self.whole + max(self.shard, self.copy)

    @property
    def sent(self) -> int:
        """What is sent of it."""
        return self.copy or self.whole


def bytes_of_sync(scenario: Scenario, rollout: Rollout, bucket_bytes: int) -> int:
    """Returns what is gathered, copied and packed at most at a time.

    Args:
        scenario: Of the training steps, with FSDP.
        rollout: Of the job, with a sender.
        bucket_bytes: Of all buckets together; of SkyRL's chunks, their threshold.
    """
    # What verl collects before it allocates its bucket has the shards on the device (``get_per_tensor_param`` in
    # verl/workers/engine/fsdp/transformer_impl.py, 0.9.1).
    loaded = kept_bytes(scenario).parameters if rollout.syncs_from_host else 0
    if rollout.sends_adapters:
        return max(_for_adapters(scenario, rollout) + loaded, bucket_bytes)
    named = [*_weights(scenario, rollout)]
    if rollout.sender == "skyrl":
        modules: dict[str, list[_Weight]] = {}
        for name, weight in named:
            modules.setdefault(name.rpartition(".")[0], []).append(weight)
        return _chunks([*modules.values()], bucket_bytes)
    sent = bucket_bytes + _one_by_one([weight for _, weight in named], rollout)
    if scenario.state.fsdp_version == 2:
        return sent
    copies, gathered = _of_state_dict(scenario)
    return max(loaded + copies + gathered, copies + sent)


def _for_adapters(scenario: Scenario, rollout: Rollout) -> int:
    """Returns what FSDP1 has on the device while verl collects adapters, which FSDP2 gathers one by one.

    All units are gathered in the shards' type, or with `layered_summon` one after the other (``collect_lora_params`` in
    verl/utils/fsdp_utils.py, 0.9.1: no unit of its own has a parameter whose name says that it is an adapter's, so that
    verl gathers each unit and moves it to the host). Then PEFT asks for a state dict, of which only adapters are taken:
    it copies the shards of all units but the root, and cuts each from a copy of the whole weight
    (``_sharded_post_state_dict_hook`` in ``_state_dict_utils.py`` of torch 2.11).
    """
    if scenario.state.fsdp_version == 2:
        return 0
    (whole, outside, layer), width, ranks = _parameters(scenario), bytes_of_shard(scenario), scenario.ranks_of_shards
    adapters = bytes_of_trained_shard(scenario) * sum(trained_of_rank(scenario)) * ranks
    copied = width * (whole - outside) + adapters
    if ranks == 1:
        return copied
    sizes = state_dict_sizes(scenario.architecture, scenario.num_layers)
    copied = copied // ranks + width * max(size for name, size in sizes if ".layers." in name)
    if rollout.gathers_model_at_once:
        return width * whole + adapters + copied
    return max(width * max(outside, layer), copied)


def _of_state_dict(scenario: Scenario) -> tuple[int, int]:
    """Returns what FSDP1's state dict is, copies of all shards, and what is gathered for it.

    That is the root, and a layer or one more copy of the largest weight of the root, of which its part is cut. A tied
    output layer has copies of its own. On a single rank the state dict is a copy of the model, and nothing is gathered
    (``_full_post_state_dict_hook`` and ``_sharded_post_state_dict_hook`` in ``_state_dict_utils.py`` of torch 2.11; the
    copy of the weight explains what an H200 had beyond the first prediction).
    """
    (whole, outside, layer), width = _parameters(scenario), bytes_of_shard(scenario)
    if scenario.ranks_of_shards == 1:
        return width * whole, 0
    model = scenario.architecture
    embedding = model.vocab_size * model.hidden_size
    copied = whole + embedding * model.share_embeddings_and_output_weights
    return width * copied // scenario.ranks_of_shards, width * (outside + max(layer, embedding))


def _parameters(scenario: Scenario) -> tuple[int, int, int]:
    """Returns the numbers of all parameters, of those outside layers, and of a layer's."""
    whole, two, one = (scenario.architecture.with_layers(count).num_parameters for count in (scenario.num_layers, 2, 1))
    return whole, 2 * one - two, two - one


def _weights(scenario: Scenario, rollout: Rollout) -> Iterator[tuple[str, _Weight]]:
    """Yields each weight by its name."""
    ranks, width, state = scenario.ranks_of_shards, bytes_of_shard(scenario), scenario.state
    comes_from_host = (rollout.syncs_from_host and state.fsdp_version == 2) or state.fsdp_cpu_offload
    # verl sends the shards' own type (``async_send_weights`` in bucketed_weight_transfer.py, 0.9.1).
    is_cast = rollout.sender != "verl" and width != _SENT
    for name, elements in state_dict_sizes(scenario.architecture, scenario.num_layers):
        size = width * elements
        shard, copy = size // ranks if comes_from_host else 0, _SENT * elements if is_cast else 0
        yield name, _Weight(size, 0, copy) if ranks == 1 and shard else _Weight(size if ranks > 1 else 0, shard, copy)


def _one_by_one(weights: list[_Weight], rollout: Rollout) -> int:
    """Returns the peak of weights that are sent one by one.

    The consumer's name of a weight lives until the next one is there, and in version 1 of NeMo-RL's policy also the
    generator's name of the whole weight until the next is gathered (``dtensor_params_generator``, 7ea279ab).
    """
    peak = last = whole = 0
    for weight in weights:
        peak = max(peak, last + whole + weight.whole + weight.shard, last + weight.at_peak)
        last = weight.sent
        whole = weight.whole if rollout.sender == "nemo_rl_v1" and weight.copy else 0
    return peak


def _chunks(modules: list[list[_Weight]], threshold: int) -> int:
    """Returns the peak of SkyRL's chunks of modules, each packed into one tensor.

    The consumer's names keep a chunk and its packed tensor while the next chunk's weights are gathered, and the packed
    one until the next has been allocated (``yield_module_grouped_chunks`` in weight_extractor_utils.py and
    ``_send_chunks_vllm_native`` in cuda_ipc_strategy.py, a9564572).
    """
    peak = packed = chunk = 0
    for module in [*modules, []]:
        size = 0
        for weight in module:
            peak = max(peak, 2 * packed + chunk + size + weight.at_peak)
            size += weight.sent
        if chunk and (not module or chunk + size > threshold):
            peak = max(peak, 2 * chunk + size + packed)
            packed, chunk = chunk, 0
        chunk += size
    return peak
