"""Rules of NeMo-RL (7ea279ab) that refuse a job before an engine starts: each with a value that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from memlab.jobs.job import Job
from tests.unit.job_files import read_job

_MEGATRON, _DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
_OPTIMIZER, _ADAPTERS = f"{_MEGATRON}.optimizer", f"{_DTENSOR}.lora_cfg"
_PACKED, _DYNAMIC = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
_SAME: dict[str, Any] = {
    "grpo.num_prompts_per_step": 8,
    "grpo.num_generations_per_prompt": 8,
    "policy.train_global_batch_size": 64,
    "policy.train_micro_batch_size": 1,
    "policy.max_total_sequence_length": 4096,
    "policy.make_sequence_length_divisible_by": 8,
    _PACKED: False,
    "cluster.gpus_per_node": 8,
    "cluster.num_nodes": 1,
}
_JOBS: dict[str, dict[str, Any]] = {
    "megatron": {"policy.model_name": "Qwen/Qwen3-30B-A3B", f"{_MEGATRON}.enabled": True, f"{_DTENSOR}.enabled": False},
    "dtensor": {
        "policy.model_name": "Qwen/Qwen3-8B",
        f"{_MEGATRON}.enabled": False,
        f"{_DTENSOR}.enabled": True,
        f"{_DTENSOR}._v2": True,
    },
}


def read(folder: Path, engine: str, changes: dict[str, Any]) -> Job:
    tree: dict[str, Any] = {}
    for key, value in (_SAME | _JOBS[engine] | changes).items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return read_job(yaml.safe_dump(tree, sort_keys=False), folder, "job.yaml")


_CONTEXT = {f"{_MEGATRON}.context_parallel_size": 2, f"{_DTENSOR}.context_parallel_size": 2}
_OFFLOAD = {f"{_MEGATRON}.fine_grained_activation_offloading": True}
_ON_HOST = {f"{_OPTIMIZER}.optimizer_cpu_offload": True, f"{_OPTIMIZER}.optimizer_offload_fraction": 1.0}
_PLAIN = _ON_HOST | {f"{_OPTIMIZER}.use_precision_aware_optimizer": False}


@pytest.mark.parametrize(
    ("engine", "refused", "accepted"),
    [
        ("megatron", {f"{_DTENSOR}.enabled": True}, {f"{_DTENSOR}.enabled": False}),
        ("megatron", {_DYNAMIC: True, _PACKED: True}, {_DYNAMIC: True}),
        ("dtensor", {_DYNAMIC: True, _PACKED: True}, {_PACKED: True}),
        ("megatron", {_DYNAMIC: True, f"{_MEGATRON}.pipeline_model_parallel_size": 2}, {f"{_MEGATRON}.pipeline_model_parallel_size": 2}),
        ("dtensor", {"policy.draft.enabled": True}, {"policy.draft.enabled": False}),
        ("megatron", {"policy.draft.enabled": True, _PACKED: True}, {_PACKED: True}),
        ("megatron", _CONTEXT, _CONTEXT | {_PACKED: True}),
        ("dtensor", _CONTEXT | {_PACKED: True}, _CONTEXT),
        ("megatron", _ON_HOST | {f"{_OPTIMIZER}.optimizer_offload_fraction": 0.0}, _ON_HOST),
        ("megatron", _PLAIN | {f"{_OPTIMIZER}.use_distributed_optimizer": False}, _PLAIN),
        ("megatron", {f"{_OPTIMIZER}.optimizer_cpu_offload": False, f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d": True}, {}),
        ("dtensor", _CONTEXT | {f"{_DTENSOR}.tensor_parallel_size": 2, f"{_DTENSOR}.sequence_parallel": True}, _CONTEXT | {f"{_DTENSOR}.tensor_parallel_size": 2}),
        ("dtensor", {f"{_ADAPTERS}.enabled": True, f"{_DTENSOR}._v2": False}, {f"{_DTENSOR}._v2": False}),
        ("dtensor", {f"{_ADAPTERS}.enabled": True, f"{_ADAPTERS}.use_triton": True, f"{_DTENSOR}.tensor_parallel_size": 2}, {f"{_DTENSOR}.tensor_parallel_size": 2}),
        ("dtensor", {f"{_DTENSOR}.cpu_offload": True, "cluster.gpus_per_node": 1}, {f"{_DTENSOR}.cpu_offload": True}),
        (
            "megatron",
            _OFFLOAD | {f"{_MEGATRON}.offload_modules": ["moe_act"], "policy.model_name": "Qwen/Qwen3-8B"},
            _OFFLOAD | {f"{_MEGATRON}.offload_modules": ["core_attn"], "policy.model_name": "Qwen/Qwen3-8B"},
        ),
    ],
)  # fmt: skip
def test_what_nemo_rl_refuses_is_refused(
    engine: str, refused: dict[str, Any], accepted: dict[str, Any], tmp_path: Path
) -> None:
    assert "NeMo-RL refuses" in (read(tmp_path, engine, refused).cannot_start or "")
    assert read(tmp_path, engine, accepted).cannot_start is None


def test_other_rows_without_gradients_are_warned_of_unless_the_job_allows_them(tmp_path: Path) -> None:
    """NeMo-RL's own tests of such recipes export the variable."""
    keys = {"policy.logprob_batch_size": 4, f"{_MEGATRON}.tensor_model_parallel_size": 4}
    keys |= {f"{_MEGATRON}.sequence_parallel": True}
    said = [one for one in read(tmp_path, "megatron", keys).warnings if "NRL_IGNORE_TP_ACCURACY_CHECK" in one]
    assert len(said) == 1 and read(tmp_path, "megatron", keys).cannot_start is None
    allowed = read(tmp_path, "megatron", keys | {"loss_fn.force_on_policy_ratio": True})
    assert not [one for one in allowed.warnings if "NRL_IGNORE_TP_ACCURACY_CHECK" in one]


def test_a_fork_s_own_section_is_not_taken_for_an_engine_that_memlab_lacks(tmp_path: Path) -> None:
    """``policy.dtensor_v2_cfg`` in place of ``policy.dtensor_cfg``, as forks of NeMo-RL have it."""
    job = read(tmp_path, "dtensor", {f"{_DTENSOR}.enabled": False, "policy.dtensor_v2_cfg.enabled": True})
    assert "asks for one of policy.megatron_cfg and policy.dtensor_cfg" in str(job.not_supported)
    assert [one.effect for one in job.not_modelled if one.key.startswith("policy.dtensor_v2_cfg")] == ["unknown"]
