"""One step of a sharded model, training or forward alone, as a loop over transformers' own model and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.attention import inputs_of
from memlab.engines.fsdp2.context_parallel import own_part, sharded_by_torch
from memlab.engines.fsdp2.losses import loss_of_largest, loss_of_logprobs
from memlab.engines.fsdp2.sharded_model import ShardedModel
from memlab.engines.fsdp2.ulysses import part_of_row
from memlab.engines.fsdp2.vision import COMPUTED_BY_MODEL, ImagesPlaced, inputs_with_images
from memlab.engines.protocol import ALL_MICROBATCHES, Microbatches
from memlab.meter.labels import Labels, on_host

_MAX_NORM = 1.0
"""NeMo Automodel's ``max_grad_norm``."""


def train_step(
    live: ShardedModel,
    scenario: Scenario,
    labels: Labels,
    load_for_update: Callable[[], None] = lambda: None,
    microbatches: Microbatches = ALL_MICROBATCHES,
    update: Callable[[], None] | None = None,
) -> float:
    """Takes a training step, as `memlab.engines.protocol.Engine.train_step` documents it."""
    losses = []
    with microbatches.counted():
        for number, tokens in enumerate(batches_of(scenario), start=1):
            if scenario.state.defer_fsdp_grad_sync:
                live.set_gradient_sync(number == scenario.num_microbatches)
            microbatches.before_forward()
            labels.enter_phase("forward")
            labels.passes_in_flight += 1
            with _own_part(live, scenario, tokens) as own:
                output, loss = _forward(live, scenario, own)
                labels.enter_phase("backward")
                # The output has the logits, and refers to them until backward has ended, as in Automodel 36044ad3.
                torch.autograd.backward(loss / scenario.num_microbatches)
            labels.passes_in_flight -= 1
            losses.append(loss.detach())
            del output, loss
    update_after_backward(live, labels, load_for_update, update)
    return _over_the_ranks(losses)


def update_after_backward(
    live: ShardedModel, labels: Labels, load_for_update: Callable[[], None], update: Callable[[], None] | None
) -> None:
    """Ends a step: loads what the update needs, updates the parameters, and drops the gradients.

    Args:
        live: Whose gradients are complete.
        load_for_update: Brings to the device what the update needs.
        update: In place of `update_parameters`.
    """
    load_for_update()
    labels.enter_phase("optimizer")
    if update is None:
        update_parameters(live)
    else:
        update()
    assert live.optimizer is not None
    live.optimizer.zero_grad()  # here, so that no gradient is there between two steps, as with NeMo Automodel


def update_parameters(live: ShardedModel) -> None:
    """Clips the gradients, and runs the optimizer."""
    assert live.optimizer is not None
    with on_host() if live.is_on_host else nullcontext():
        live.clip(_MAX_NORM)
        live.optimizer.step()


def forward_only_step(
    live: ShardedModel, scenario: Scenario, labels: Labels, microbatches: Microbatches = ALL_MICROBATCHES
) -> float:
    """Takes a step of forward passes alone, as `memlab.engines.protocol.Engine.forward_only_step` documents it."""
    live.module.eval()
    losses = []
    try:
        with microbatches.counted(), torch.no_grad():
            for tokens in batches_of(scenario):
                microbatches.before_forward()
                labels.enter_phase("forward")
                with _own_part(live, scenario, tokens) as own:
                    losses.append(_forward(live, scenario, own)[1])
    finally:
        live.module.train()
    return _over_the_ranks(losses)


def _own_part(live: ShardedModel, scenario: Scenario, tokens: torch.Tensor) -> AbstractContextManager[dict[str, Any]]:
    """Returns the context of a pass, which yields tokens and labels, of ranks that share sequences the rank's own."""
    if scenario.vision_tower is not None:
        images = inputs_with_images(scenario, tokens)
        return nullcontext(images | {"labels": tokens.cuda()})
    tokens = tokens.cuda()
    follows = scenario.state.loss_of_transformers.startswith("logprobs")
    labels = torch.roll(tokens, shifts=-1, dims=1) if follows else tokens
    inputs, mesh = {"input_ids": tokens, "labels": labels}, live.context_parallel
    if mesh is None:
        return nullcontext(inputs)
    if scenario.state.cp_comm_type == "a2a":
        return nullcontext(part_of_row(inputs, scenario.sequence_lengths, mesh))
    return (
        sharded_by_torch(live.module, inputs, mesh) if live.attention == "sdpa" else nullcontext(own_part(inputs, mesh))
    )


def _forward(live: ShardedModel, scenario: Scenario, own: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """Returns the output with the logits, unless the loop has released it before backward, and the loss."""
    inputs, kind = inputs_of(live.attention, scenario) | own, scenario.state.loss_of_transformers
    divided = scenario.layout.tensor_model_parallel_size > 1
    if scenario.vision_tower is not None:
        tokens = inputs.pop("labels")
        computed = {name: (inputs.pop(name), own.pop(name))[0] for name in COMPUTED_BY_MODEL if name in own}
        with ImagesPlaced():
            output = live.module(**inputs, **{name: computed.pop(name) for name in [*computed]})
        loss = live.module.loss_function(logits=output.logits, labels=tokens, vocab_size=output.logits.shape[-1])
        return None if kind == "masked_cross_entropy" else output, loss
    if kind == "cross_entropy" and not divided:
        output = live.module(**inputs)
        return output, output.loss
    tokens = inputs.pop("labels")
    output = live.module(**inputs)
    if kind.startswith("logprobs"):
        return None, loss_of_logprobs(output.logits, tokens, by_row=kind == "logprobs_by_row")
    if kind == "topk_logits":
        return None, loss_of_largest(output.logits.to_local() if divided else output.logits)
    logits = output.logits.float().full_tensor() if divided else output.logits
    loss = live.module.loss_function(logits=logits, labels=tokens, vocab_size=live.inner.config.vocab_size)
    return None if kind == "masked_cross_entropy" else output, loss


def batches_of(scenario: Scenario) -> Iterator[torch.Tensor]:
    """Yields random tokens int64 [micro_batch_size, seq_length] on the host, the same in every step."""
    layout = scenario.layout
    sharing = layout.tensor_model_parallel_size * layout.context_parallel_size
    generator = torch.Generator().manual_seed(scenario.seed + layout.rank % layout.ranks_of_a_stage // sharing)
    shape = (scenario.micro_batch_size, scenario.seq_length)
    for _ in range(scenario.num_microbatches):
        yield torch.randint(scenario.architecture.vocab_size, shape, generator=generator)


def _over_the_ranks(losses: list[torch.Tensor]) -> float:
    total = sum(loss.item() for loss in losses) / len(losses)
    num_ranks = torch.distributed.get_world_size()
    if num_ranks == 1:
        return total
    summed = torch.tensor(total, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(summed)
    return summed.item() / num_ranks
