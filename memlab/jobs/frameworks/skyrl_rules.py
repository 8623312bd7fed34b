"""Rules of SkyRL that concern no memory, and refuse a job (0.3.0 and a9564572, main of August 2026).

They are those of ``validate_cfg``, ``validate_generator_cfg``, ``validate_inference_engine_cfg`` and
``validate_megatron_cfg`` in skyrl/train/utils/utils.py.
"""

from __future__ import annotations

import math
from typing import Any

from memlab.config.validation import is_whole_number
from memlab.jobs.frameworks.framework import CannotStartError, Reading
from memlab.jobs.frameworks.keys import WHOLE, is_given
from memlab.jobs.frameworks.megatron_keys import CHUNKS
from memlab.jobs.frameworks.own_rules import Rule, broken, check_dispatcher, one_of
from memlab.jobs.frameworks.skyrl_checkout import earlier_checkout

_TRAINER, _ALGORITHM, _PLACEMENT = "trainer", "trainer.algorithm", "trainer.placement"
_POLICY, _MEGATRON, _ENGINE = "trainer.policy", "trainer.policy.megatron_config", "generator.inference_engine"
_REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
_CORRECTION, _STEPS = "trainer.algorithm.off_policy_correction", "generator.step_wise_trajectories"


def _is_on(reading: Reading, key: str) -> bool:
    return reading.get(key) is True


def _unpadded_with_context(prefix: str, *sections: str) -> tuple[Rule, ...]:
    """Returns the rule that context parallelism needs micro-batches without padding, for both names of their key."""

    def breaks(value: Any, job: Reading) -> bool:
        sizes = [job.get(f"{section}.context_parallel_size") for section in sections]
        return value is False and any(is_whole_number(size) and size > 1 for size in sizes)

    rule = "must be true with context parallelism"
    return tuple((f"{prefix}{name}", breaks, rule) for name in ("remove_microbatch_padding", "use_sample_packing"))


_OF_ALL: tuple[Rule, ...] = (
    (
        f"{_ALGORITHM}.use_kl_in_reward",
        lambda value, job: value is True and job.get(f"{_ALGORITHM}.use_kl_loss", default=True) is not False,
        f"must be false unless {_ALGORITHM}.use_kl_loss is false",
    ),
    (
        f"{_ALGORITHM}.advantage_estimator",
        lambda value, job: value == "gae" and not is_given(job.get("trainer.critic.model.path")),
        "needs trainer.critic.model.path",
    ),
    (
        f"{_ALGORITHM}.loss_reduction",
        lambda value, job: value == "seq_mean_token_sum_norm" and job.get(f"{_ALGORITHM}.max_seq_len") is None,
        f"needs {_ALGORITHM}.max_seq_len",
    ),
    (
        f"{_ALGORITHM}.loss_reduction",
        lambda value, _: value not in _REDUCTIONS,
        "must be one of the reductions that SkyRL has",
    ),
    (
        f"{_ALGORITHM}.loss_reduction",
        lambda value, job: value == "token_mean_legacy" and _is_on(job, _STEPS),
        f"must be another one with {_STEPS}",
    ),
    (
        f"{_ALGORITHM}.policy_loss_type",
        lambda value, job: (
            value in ("clip_cov", "kl_cov")
            and any(job.get(f"{_CORRECTION}.{name}") is not None for name in ("tis_ratio_type", "sequence_mask_metric"))
        ),
        f"must be another one with {_CORRECTION}",
    ),
    one_of(f"{_CORRECTION}.tis_ratio_type", "token", "sequence"),
    one_of(f"{_CORRECTION}.sequence_mask_metric", "product", "geometric"),
    (f"{_TRAINER}.max_ckpts_to_keep", lambda value, _: value == 0, "must be another number: -1 keeps all"),
    (
        f"{_TRAINER}.mtp.enabled",
        lambda value, job: value is True and job.get(f"{_MEGATRON}.mtp_num_layers") == 0,
        f"needs {_MEGATRON}.mtp_num_layers above 0",
    ),
    (
        f"{_POLICY}.model.lora.rank",
        lambda value, job: (
            is_whole_number(value) and value > 0 and job.get(f"{_ENGINE}.backend", default="vllm") != "vllm"
        ),
        f"needs {_ENGINE}.backend vllm",
    ),
    (f"{_TRAINER}.sequence_parallel_backend", lambda value, _: value != "ulysses", "must be ulysses"),
    (
        f"{_POLICY}.language_model_only",
        lambda value, job: value is True and not _is_on(job, f"{_ENGINE}.language_model_only"),
        f"needs {_ENGINE}.language_model_only true",
    ),
    (
        "generator.merge_stepwise_output",
        lambda value, job: value is True and not _is_on(job, _STEPS),
        f"needs {_STEPS} true",
    ),
    (
        "generator.sampling_params.logprobs",
        lambda value, _: is_whole_number(value) and value > 1,
        "must be 0 or 1",
    ),
    (
        f"{_ENGINE}.run_engines_locally",
        lambda value, job: (
            value is False
            and not any(is_given(job.get(f"{_ENGINE}.external_{name}")) for name in ("proxy_url", "server_urls"))
        ),
        f"needs {_ENGINE}.external_proxy_url or external_server_urls",
    ),
    (
        f"{_TRAINER}.train_batch_size",
        lambda value, job: is_whole_number(value) and value % (job.get(f"{_TRAINER}.policy_mini_batch_size") or 256),
        f"must be a multiple of {_TRAINER}.policy_mini_batch_size",
    ),
    (
        f"{_ENGINE}.enable_return_routed_experts",
        lambda value, job: value is True and job.get(f"{_ENGINE}.distributed_executor_backend", default="ray") != "mp",
        f"needs {_ENGINE}.distributed_executor_backend mp",
    ),
)
_OF_MEGATRON: tuple[Rule, ...] = (
    (f"{_ENGINE}.backend", lambda value, _: value != "vllm", "must be vllm with trainer.strategy megatron"),
    (
        f"{_ENGINE}.weight_sync_backend",
        lambda value, _: value not in ("nccl", "delta"),
        "must be nccl with trainer.strategy megatron",
    ),
    ("trainer.critic.model.path", lambda value, _: is_given(value), "must be null with trainer.strategy megatron"),
    *(
        (
            f"trainer.{model}.sequence_parallel_size",
            lambda value, _: is_whole_number(value) and value > 1,
            "must be 1 with trainer.strategy megatron",
        )
        for model in ("policy", "ref")
    ),
    *_unpadded_with_context("trainer.", _MEGATRON, "trainer.ref.megatron_config"),
    (
        f"{_MEGATRON}.moe_enable_routing_replay",
        lambda value, job: value is True and not _is_on(job, f"{_ENGINE}.enable_return_routed_experts"),
        f"needs {_ENGINE}.enable_return_routed_experts true",
    ),
)


def check_rules(reading: Reading) -> None:
    """Checks rules of all jobs of reinforcement learning.

    Raises:
        CannotStartError: If SkyRL refuses the job.
    """
    _check(reading, _OF_ALL)
    _check_engines(reading)
    key = f"{_ENGINE}.async_engine"
    if reading.get(key) is False:  # a job that has it is of an earlier SkyRL, and starts there
        reading.warnings.append(f"{key} is False, which SkyRL refuses since 0.3: leave it out there")


def check_megatron(reading: Reading) -> None:
    """Checks rules of jobs with Megatron.

    Raises:
        CannotStartError: If SkyRL refuses the job.
    """
    _check(reading, _OF_MEGATRON)


def check_sft(reading: Reading) -> None:
    """Checks what the SFT trainer validates of jobs with Megatron (``validate_sft_cfg`` in train/config/sft_config.py).

    Raises:
        CannotStartError: If SkyRL or Megatron refuses the job.
    """
    _check(reading, _unpadded_with_context("", "megatron_config"))
    check_model(reading, "megatron_config")


def check_model(reading: Reading, megatron: str) -> None:
    """Checks what SkyRL's workers build with Megatron-Bridge.

    Args:
        megatron: The prefix of the config of Megatron.

    Raises:
        CannotStartError: If Megatron-Core refuses it, or the first forward.
    """
    transformer, values = f"{megatron}.transformer_config_kwargs", reading.values
    check_dispatcher(reading, "SkyRL", (megatron, transformer))  # ``init_configs`` sets the length
    key = f"{transformer}.{CHUNKS.name}"
    chunks = reading.converted(key, WHOLE)
    if chunks is None:
        return
    if chunks > 1 and (values.get("pipeline_model_parallel_size") or 1) > 1:
        raise CannotStartError(
            f"{key} is {chunks}, must be left out: SkyRL does not tell Megatron's schedule of chunks, which refuses a "
            "stage that has several",
            "pipeline_model_parallel_size",
        )
    reading.without_effect[key] = "a model on one stage is not divided"


def _check_engines(reading: Reading) -> None:
    """Checks that engines that share the training's GPUs have all of them, where the job says how many there are."""
    key = f"{_ENGINE}.num_engines"
    if key not in reading.entries.by_key or reading.get(f"{_PLACEMENT}.colocate_all", default=True) is not True:
        return
    sizes = [f"{_ENGINE}.{kind}_parallel_size" for kind in ("tensor", "pipeline", "data")]
    if any(entry.is_unknown for name, entry in reading.entries.by_key.items() if name in (key, *sizes)):
        return
    of_engines = [reading.get(name, default=1) for name in (key, *sizes)]
    gpus = [reading.get(f"{_PLACEMENT}.policy_num_{kind}", default=1) for kind in ("nodes", "gpus_per_node")]
    if not all(is_whole_number(number) for number in (*of_engines, *gpus)):
        return
    if math.prod(of_engines) != math.prod(gpus):
        _refuse(
            reading,
            f"{key} x the GPUs of each is {math.prod(of_engines)}, must be the {math.prod(gpus)} GPUs of the policy "
            f"with {_PLACEMENT}.colocate_all, by a rule of SkyRL: change {key}",
        )


def _check(reading: Reading, rules: tuple[Rule, ...]) -> None:
    for _, text in broken(reading, rules):
        _refuse(reading, f"{text}, by a rule of SkyRL: change one of them")


def _refuse(reading: Reading, text: str) -> None:
    """Refuses a job, and only warns of what the earlier SkyRL around it may take."""
    if (file := earlier_checkout(reading)) is None:
        raise CannotStartError(text)
    reading.warnings.append(f"{text}, or keep it if SkyRL as of {file} takes it")
