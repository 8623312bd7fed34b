"""One step of a rank's stages of a pipeline: torch's schedule, and then the update, as NeMo Automodel runs them.

``_forward_backward_step`` in ``recipes/llm/train_ft.py`` (36044ad3) gives the schedule a batch with the rows of all
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch

from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.attention import inputs_of
from memlab.engines.fsdp2.pipelined_model import PipelinedModel
from memlab.engines.fsdp2.training_step import batches_of, update_after_backward
from memlab.engines.protocol import ALL_MICROBATCHES, Microbatches
from memlab.meter.labels import Labels


def train_step(
    live: PipelinedModel,
    scenario: Scenario,
    labels: Labels,
    load_for_update: Callable[[], None] = lambda: None,
    microbatches: Microbatches = ALL_MICROBATCHES,
    update: Callable[[], None] | None = None,
) -> float | None:
    """Takes a training step, as `memlab.engines.protocol.Engine.train_step` documents it."""
    is_divided = scenario.layout.tensor_model_parallel_size > 1

    def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        whole = logits.float().full_tensor() if is_divided else logits  # type: ignore[attr-defined]
        return live.inner.loss_function(logits=whole, labels=tokens, vocab_size=live.inner.config.vocab_size)

    losses: list[torch.Tensor] = []
    schedule = live.schedule(scenario, loss_of, labels, microbatches)
    batches, runs = batches_of(scenario), scenario.state.schedule_runs
    has_first, has_last = (any(getattr(stage, name) for stage in live.stages) for name in ("is_first", "is_last"))
    with microbatches.counted():
        for _ in range(runs):
            labels.enter_phase("forward")
            tokens = torch.cat([*islice(batches, scenario.num_microbatches // runs)]).cuda()
            inputs = inputs_of(live.attention, scenario)
            if "position_ids" in inputs:  # the schedule gives each micro-batch its rows
                inputs["position_ids"] = inputs["position_ids"].repeat(len(tokens), 1)
            of_run: list[torch.Tensor] = []
            schedule.step(
                *((tokens,) if has_first else ()),
                target=tokens.clone() if has_last else None,
                losses=of_run if has_last else None,
                return_outputs=scenario.state.return_outputs,
                **inputs,
            )
            losses += [loss.detach() for loss in of_run]
            del tokens, of_run
    torch.cuda.synchronize()
    update_after_backward(live, labels, load_for_update, update)
    return _mean_over_copies(losses, scenario)


def _mean_over_copies(losses: list[torch.Tensor], scenario: Scenario) -> float | None:
    """Returns the mean loss of the ranks that have the last stage; None on the others."""
    total = sum(loss.item() for loss in losses) / max(1, len(losses))
    num_copies = scenario.layout.data_parallel_size
    summed = torch.tensor(total / scenario.layout.tensor_model_parallel_size, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(summed)
    mean = summed.item() / num_copies
    return mean if losses else None
