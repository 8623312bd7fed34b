"""A frozen model beside a pipeline's stage: it has the same stage, and sends its hidden states to the next one too.

Three ways are upstream's. DPO's reference model joins its hidden states before the trained model's
(``forward_step`` in swift/megatron/trainers/dpo_trainer.py, ms-swift 3602360). Model Optimizer joins its teacher's
behind them, channel by channel (``_forward`` and ``get_tensor_shapes_adjust_fn_for_distillation`` in
modelopt/torch/distill/plugins/megatron.py, a2fbac7b). ms-swift's GKD sends its teacher's alone, before the schedule
begins (``forward_step_helper`` in swift/megatron/utils/utils.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from memlab.config.scenario import Scenario
from memlab.engines.megatron.build import LiveModel

_Shapes = list[tuple[int, ...]]


def has_joined_stages(scenario: Scenario) -> bool:
    """Whether the stages of a training step exchange hidden states of two models as one tensor."""
    state, stages = scenario.state, scenario.layout.pipeline_model_parallel_size
    return stages > 1 and state.reference_model != "none" and state.loss != "jsd"


def joined_shapes(scenario: Scenario) -> Callable[[_Shapes, _Shapes], tuple[_Shapes, _Shapes]] | None:
    """Returns what Megatron's schedule asks for the shapes that stages exchange; None where these are the model's."""
    if not has_joined_stages(scenario):
        return None
    beside = scenario.teacher.architecture.hidden_size

    def of_both(shapes: _Shapes) -> _Shapes:
        if scenario.state.loss == "logits_kl":
            return [(*others, width + beside) for *others, width in shapes]
        return [(2 * tokens, *others) for tokens, *others in shapes]

    return lambda received, sent: (of_both(received), of_both(sent))


def split_input(live: LiveModel, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the parts of the frozen and of the trained model in what the stage before has sent: views of it."""
    received: torch.Tensor = model.decoder.input_tensor
    if live.scenario.state.loss == "logits_kl":
        width = live.config.hidden_size
        return received[..., width:], received[..., :width]
    half = received.shape[0] // 2
    return received[:half].detach(), received[half:]


def joined(live: LiveModel, of_frozen: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Returns what a stage sends of both models."""
    return torch.cat([own, of_frozen], -1) if live.scenario.state.loss == "logits_kl" else torch.cat([of_frozen, own])


def alone(live: LiveModel, frozen: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Runs a stage of the frozen model, which receives its input and sends its output; returns that of the last one."""
    scenario, group = live.scenario, parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return run()
    layout, pipe = scenario.layout, P2PCommunicator(pp_group=group, config=frozen.config)
    tokens = scenario.seq_length // layout.context_parallel_size
    tokens //= layout.tensor_model_parallel_size if frozen.config.sequence_parallel else 1
    shapes = [(tokens, scenario.micro_batch_size, frozen.config.hidden_size)]
    received = pipe.recv_forward(shapes, frozen.pre_process)
    frozen.set_input_tensor(received[0])
    output = run()
    pipe.send_forward([output], frozen.post_process)
    return output if frozen.post_process else None
