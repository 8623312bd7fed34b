"""Rules by which NeMo-RL refuses a job before any engine sees it (main of August 2026)."""

from __future__ import annotations

from memlab.config.architectures import Architecture
from memlab.jobs.frameworks.framework import Reading
from memlab.jobs.frameworks.refused_options import Rule, check_rules

_MEGATRON, _DTENSOR, _OPTIMIZER = "policy.megatron_cfg", "policy.dtensor_cfg", "policy.megatron_cfg.optimizer"
_PACKED, _DYNAMIC = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
_ONLY_OF_EXPERTS = {"expert_fc1", "moe_act", "fused_group_mlp"}
_UNCHECKED = "NRL_IGNORE_TP_ACCURACY_CHECK"


def _has(job: Reading, key: str) -> bool:
    return job.entries.get(key) is True


def _ranks(job: Reading, section: str, kind: str) -> int:
    name = f"{kind}_model_parallel_size" if section == _MEGATRON and kind != "context" else f"{kind}_parallel_size"
    size = job.entries.get(f"{section}.{name}")
    return size if isinstance(size, int) else 1


def _offloaded(job: Reading) -> set[str]:
    modules = job.entries.get(f"{_MEGATRON}.offload_modules")
    return {*modules} if isinstance(modules, list) else set()


def _offloads(job: Reading) -> bool:
    return _has(job, f"{_MEGATRON}.fine_grained_activation_offloading")


def _has_no_fraction(job: Reading) -> bool:
    fraction = job.entries.get(f"{_OPTIMIZER}.optimizer_offload_fraction")
    return isinstance(fraction, (int, float)) and not 0 < fraction <= 1


def _of_all(section: str) -> tuple[Rule, ...]:
    """Returns the rules of ``Policy`` (models/policy/lm_policy.py)."""
    return (
        (
            lambda job: _has(job, f"{_MEGATRON}.enabled") and _has(job, f"{_DTENSOR}.enabled"),
            *(f"{_MEGATRON}.enabled with {_DTENSOR}.enabled", "switch one of the two off", "engine"),
        ),
        (
            lambda job: _has(job, _DYNAMIC) and _has(job, _PACKED),
            *(f"{_DYNAMIC} with {_PACKED}", "switch one of the two off", "is_packed"),
        ),
        (
            lambda job: _has(job, _DYNAMIC) and _ranks(job, section, "pipeline") > 1,
            *(f"{_DYNAMIC} with pipeline stages", "switch it off", "pipeline_model_parallel_size"),
        ),
        (
            lambda job: _has(job, "policy.draft.enabled") and (section == _DTENSOR or _has(job, _PACKED)),
            "policy.draft.enabled with DTensor or with packed sequences",
            *("leave the draft model out", "is_packed"),
        ),
    )


_OF_MEGATRON: tuple[Rule, ...] = (
    *_of_all(_MEGATRON),
    (
        lambda job: _ranks(job, _MEGATRON, "context") > 1 and job.entries.get(_PACKED) is False,
        *(f"context parallel ranks without {_PACKED}", f"set {_PACKED} to true", "context_parallel_size"),
    ),
    (
        lambda job: _ranks(job, _MEGATRON, "context") > 1 and _has(job, f"{_MEGATRON}.use_fused_linear_logprobs"),
        *("use_fused_linear_logprobs with context parallel ranks", "leave it out", "context_parallel_size"),
    ),
    (
        lambda job: _has(job, f"{_OPTIMIZER}.optimizer_cpu_offload") and _has_no_fraction(job),
        "optimizer_cpu_offload with an optimizer_offload_fraction that is not above 0 and at most 1",
        *("set the fraction, which is 0 in NeMo-RL's examples", "optimizer_offload_fraction"),
    ),
    (
        lambda job: (
            _has(job, f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d")
            and job.entries.get(f"{_OPTIMIZER}.optimizer_cpu_offload") is False
        ),
        *("overlap_cpu_optimizer_d2h_h2d without optimizer_cpu_offload", "leave it out", "optimizer_cpu_offload"),
    ),
    (
        lambda job: (
            _has(job, f"{_OPTIMIZER}.optimizer_cpu_offload")
            and job.entries.get(f"{_OPTIMIZER}.use_distributed_optimizer") is False
        ),
        *("optimizer_cpu_offload without use_distributed_optimizer", "switch it on", "use_distributed_optimizer"),
    ),
)
"""nemo_rl/models/megatron/setup.py."""
_OF_DTENSOR: tuple[Rule, ...] = (
    *_of_all(_DTENSOR),
    (
        lambda job: _ranks(job, _DTENSOR, "context") > 1 and _has(job, _PACKED),
        *(f"context parallel ranks with {_PACKED}", f"set {_PACKED} to false", "context_parallel_size"),
    ),
    (
        lambda job: (
            min(_ranks(job, _DTENSOR, "context"), _ranks(job, _DTENSOR, "tensor")) > 1
            and _has(job, f"{_DTENSOR}.sequence_parallel")
        ),
        *("sequence_parallel with context parallel ranks", "switch it off", "context_parallel_size"),
    ),
    (
        lambda job: (
            _has(job, f"{_DTENSOR}.lora_cfg.enabled")
            and _has(job, f"{_DTENSOR}.lora_cfg.use_triton")
            and _ranks(job, _DTENSOR, "tensor") > 1
        ),
        *("lora_cfg.use_triton with tensor parallel ranks", "switch use_triton off", "tensor_model_parallel_size"),
    ),
    (
        lambda job: _has(job, f"{_DTENSOR}.lora_cfg.enabled") and not _has(job, f"{_DTENSOR}._v2"),
        *(f"adapters without {_DTENSOR}._v2", "set it to true", "lora_rank"),
    ),
    (
        lambda job: (
            _has(job, f"{_DTENSOR}.cpu_offload") and _has(job, f"{_DTENSOR}._v2") and job.values.get("world_size") == 1
        ),
        *("cpu_offload on one rank", "switch it off, or use more ranks", "fsdp_cpu_offload"),
    ),
)
"""nemo_rl/models/automodel/setup.py."""


def check_megatron(reading: Reading) -> None:
    """Checks the rules of jobs with Megatron.

    Raises:
        CannotStartError: If one refuses the job.
    """
    check_rules(reading, _OF_MEGATRON, "NeMo-RL refuses")
    _warn_of_passes(reading, _MEGATRON)


def check_dtensor(reading: Reading) -> None:
    """Checks the rules of jobs with DTensor, as `check_megatron`."""
    check_rules(reading, _OF_DTENSOR, "NeMo-RL refuses")
    _warn_of_passes(reading, _DTENSOR)


def check_offloaded(reading: Reading, architecture: Architecture) -> None:
    """Checks that a dense model offloads no modules of experts, as `check_megatron`."""
    named = ", ".join(sorted(_offloaded(reading) & _ONLY_OF_EXPERTS))
    rule: Rule = (
        lambda job: _offloads(job) and not architecture.routes and named,
        *(f"{named} in offload_modules of a model without experts", "leave it out", "offload_modules"),
    )
    check_rules(reading, (rule,), "NeMo-RL refuses")


def _warn_of_passes(reading: Reading, section: str) -> None:
    """Warns of other rows without gradients, which the environment of a job may allow under tensor parallelism."""
    rows, others = (reading.entries.get(f"policy.{name}") for name in ("train_micro_batch_size", "logprob_batch_size"))
    is_allowed = reading.entries.environment.get(_UNCHECKED) or _has(reading, "loss_fn.force_on_policy_ratio")
    if None not in (rows, others) and rows != others and _ranks(reading, section, "tensor") >= 4 and not is_allowed:
        reading.warnings.append(
            f"policy.logprob_batch_size is {others} with train_micro_batch_size {rows} and 4 or more tensor parallel "
            f"ranks, which NeMo-RL refuses: set both to the same, or export {_UNCHECKED}=1"
        )
