"""The phases of verl's own actor and reference model, without an inference engine.

verl's ``ActorRolloutRefWorker`` computes log-probabilities of both models, updates the actor, and hands its weights to
verl's own sender. What the sender tells the engine over its socket is dropped, and the engine itself is absent.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
NUM_ROUNDS = 2


def overrides(of_model: Path, rows: int, num_microbatches: int, num_ranks: int, seq_length: int) -> dict[str, str]:
    """Returns the overrides of ``verl.trainer.main_ppo``, before those of a job: FSDP2 with a reference model."""
    prompt = seq_length // 4
    sequences = str(rows * num_microbatches * num_ranks)
    return {
        "algorithm.adv_estimator": "grpo",
        f"{MODEL}.path": str(of_model),
        f"+{MODEL}.override_config.attn_implementation": "sdpa",  # flash-attn is not needed then
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.use_kl_loss": "true",
        f"{ACTOR}.ppo_mini_batch_size": sequences,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": str(rows),
        f"{ACTOR}.fsdp_config.use_torch_compile": "false",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": str(rows),
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.load_format": "safetensors",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": str(rows),
        "data.train_batch_size": sequences,
        "data.max_prompt_length": str(prompt),
        "data.max_response_length": str(seq_length - prompt),
        "trainer.n_gpus_per_node": str(num_ranks),
    }


def take(words: list[str], lengths: list[int], around: Callable[..., Any], *, on_gpu: bool) -> None:
    """Runs the phases of some rounds.

    Args:
        words: All overrides.
        lengths: Of this rank's sequences.
        around: Returns a phase, given its name and a function, that is measured.
        on_gpu: Whether there is one.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.padding import left_right_2_no_padding

    with initialize_config_module("verl.trainer.config", version_base=None):
        values = [f"+{MODEL}.load_tokenizer=false", f"{ACTOR}.optim.total_training_steps=3"]
        config = compose("ppo_trainer", [*words, *values]).actor_rollout_ref
    OmegaConf.resolve(config)
    has_adapters = bool(config.model.get("lora_rank"))
    reference = None
    if not has_adapters:
        reference = ActorRolloutRefWorker(config, role="ref")
        reference.init_model()
    actor = ActorRolloutRefWorker(config, role="actor")
    actor.init_model()
    # What ``init_model`` sets with an inference engine.
    actor.rollout = _Rollout(config.rollout.checkpoint_engine.update_weights_bucket_megabytes, on_gpu=on_gpu)
    actor.base_sync_done, actor.layered_summon = True, config.rollout.layered_summon
    actor.peft_merge = config.model.get("lora", {}).get("merge", False)

    def policy() -> None:
        data = batch(calculate_entropy=True, calculate_sum_pi_squared=False, compute_loss=False)
        actor.compute_log_prob(data)

    def of_reference() -> None:
        named = {"calculate_entropy": False, "compute_loss": False}
        if reference is None:
            actor.compute_log_prob(batch(**named, no_lora_adapter=True))
        else:
            reference.compute_ref_log_prob(batch(**named))

    def update() -> None:
        sequences = config.actor.ppo_mini_batch_size
        entropy = config.actor.calculate_entropy or config.actor.entropy_coeff != 0
        actor.update_actor(
            batch(
                calculate_entropy=entropy, distillation_use_topk=False, distillation_only=False,
                global_batch_size=sequences, mini_batch_size=sequences, epochs=1, seed=42,
                dataloader_kwargs={"shuffle": False}, compute_loss=True,
            )
        )  # fmt: skip

    def batch(**named: Any) -> Any:
        data = left_right_2_no_padding(tu.get_tensordict(tensor_dict=_rows(lengths), non_tensor_dict={}))
        tu.assign_non_tensor(data, temperature=1.0, pad_token_id=0, **named)
        return data

    for _ in range(NUM_ROUNDS):
        around("weight sync", lambda: asyncio.run(actor.update_weights(global_steps=0)))
        around("generation", lambda: None)
        around("log-probabilities", policy)
        around("reference model", of_reference)
        around("training step", update)


def _rows(lengths: list[int]) -> dict[str, Any]:
    """Returns whole sequences of random tokens, as the trainer has them after generation."""
    import torch

    longest = max(lengths)
    prompt = longest // 4
    shape, answers = (len(lengths), longest), (len(lengths), longest - prompt)
    tokens = torch.randint(512, shape)
    return {
        "input_ids": tokens,
        "prompts": tokens[:, :prompt].contiguous(),
        "responses": tokens[:, prompt:].contiguous(),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "position_ids": torch.arange(longest).expand(shape).contiguous(),
        "response_mask": torch.ones(answers, dtype=torch.long),
        "old_log_probs": torch.zeros(answers),
        "ref_log_prob": torch.zeros(answers),
        "advantages": torch.ones(answers),
    }


class _Socket:
    """Drops what the sender tells the engine."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Rollout:
    """An engine that is never there: it wakes up without memory, and takes each bucket at once."""

    sleep_level = 2

    def __init__(self, bucket_megabytes: int, *, on_gpu: bool) -> None:
        import verl

        path = Path(verl.__file__).parent / "workers" / "rollout" / "vllm_rollout" / "bucketed_weight_transfer.py"
        specification = importlib.util.spec_from_file_location("bucketed_weight_transfer", path)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        # Torch keeps what is shared with another process until that has closed it, and here is none.
        module.reduce_tensor = lambda tensor: tensor
        if not on_gpu:
            module.get_device_id = lambda: 0
        self._module, self._megabytes = module, bucket_megabytes

    async def resume(self, tags: list[str]) -> None:
        """Wakes nothing up."""

    async def update_weights(self, weights: Any, **_: Any) -> None:
        """Sends all weights by verl's own sender."""
        sender = self._module.BucketedWeightSender("ipc:///nowhere", bucket_size_mb=self._megabytes)
        sender._init_socket = lambda: setattr(sender, "socket", _Socket())
        await sender.async_send_weights(weights)
