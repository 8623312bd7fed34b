"""A rank's stages of a pipeline, each sharded by itself, with torch's own stages and schedules.

NeMo Automodel (36044ad3 and 0.7.0, ``components/distributed/pipelining/functional.py``) copies the model for each stage
of the rank, drops what other stages have, shards the copy as a model of its own, and gives it to torch's
`PipelineStage`. One stage for each rank runs by `Schedule1F1B`, several by `ScheduleInterleaved1F1B`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.utils._python_dispatch import _disable_current_modes

from memlab.config.backend_kind import BackendKind
from memlab.config.scenario import Scenario
from memlab.config.training_state import TrainingState
from memlab.engines.fsdp2.sharded_model import DTYPES, ShardedModel
from memlab.engines.protocol import ALL_MICROBATCHES, Microbatches
from memlab.meter.labels import Labels, keeping, record_stream
from memlab.meter.stream_order import SENDING

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes logits [batch, sequence, vocabulary] and tokens int64 [batch, sequence]."""


class PipelinedModel(ShardedModel):
    """The stages of a rank, of a scenario with more than one."""

    def __init__(self, scenario: Scenario, place: BackendKind) -> None:
        self.stages: list[Any] = []
        """torch's, in the order of the model, once a step has begun."""
        self._schedule: Any = None
        self._built_for: Any = None
        super().__init__(scenario, place)

    @property
    def roots(self) -> list[Any]:
        """The part of the model that each stage of the rank has."""
        return list(self.module)

    @property
    def inner(self) -> Any:
        """Transformers' model, as far as the first stage of the rank has it."""
        return self.module[0]

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Yields the modules by their names in transformers' model, with the layers counted on the rank."""
        num_before = 0
        for number, root in enumerate(self.roots):
            for name, module in root.named_modules():
                words = name.split(".")
                if words[:2] == ["model", "layers"] and len(words) > 2:
                    words[2] = str(int(words[2]) + num_before)
                elif (number and words[-1] in ("", "model", "layers")) or isinstance(module, torch.nn.Identity):
                    continue
                yield ".".join(words), module
            num_before += len(root.model.layers)

    def build_optimizer(self, state: TrainingState) -> None:
        """Gives each stage an optimizer of its own, as NeMo Automodel does."""
        of_all, optimizers = self.parameters, []
        for root in self.roots:
            self.parameters = list(root.parameters())
            super().build_optimizer(state)
            optimizers.append(self.optimizer)
        self.parameters = of_all
        self.optimizer = _OptimizersOfStages(optimizers)  # type: ignore[assignment]

    def workspace(self) -> Iterator[torch.Tensor]:
        """Yields buffers, what stages receive into, and the logits that the last one keeps until the next step."""
        yield from super().workspace()
        for stage in self.stages:
            received = (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for each in (info for infos in received for info in infos):
                if (buffer := getattr(each, "buffer", None)) is not None:
                    yield buffer
            yield from stage.output_chunks

    def reset(self) -> None:
        """Ends what a step has left that did not reach its end, with the schedule, which the next step builds again."""
        self._schedule, self._built_for, self.stages = None, None, []
        super().reset()

    def schedule(self, scenario: Scenario, loss: Loss, labels: Labels, microbatches: Microbatches) -> Any:
        """Returns the schedule of a scenario's workload, with the buffers into which its stages receive.

        NeMo Automodel tells each stage the shapes that it receives, so that torch runs no pass to find them.
        """
        workload = tuple(scenario.workload.values()), scenario.state.schedule_runs
        if workload != self._built_for:
            self._schedule, self.stages = None, []
            self._schedule, self._built_for = self._build_schedule(scenario), workload
        self._schedule._loss_fn = loss
        for stage in self.stages:
            stage.labels, stage.microbatches = labels, microbatches
        return self._schedule

    def _divide(self, module: Any, scenario: Scenario) -> Any:
        """Returns the part of transformers' model that each stage of the rank has."""
        num_stages = len(scenario.chunks)
        layers, module.model.layers = list(module.model.layers), torch.nn.ModuleList()
        embedding, norm, output = module.model.embed_tokens, module.model.norm, module.lm_head
        module.model.embed_tokens, module.model.norm, module.lm_head = None, torch.nn.Identity(), torch.nn.Identity()
        parts = torch.nn.ModuleList()
        for number, own in zip(_numbers(scenario), scenario.chunks_of_rank, strict=True):
            part = deepcopy(module)
            part.model.layers = torch.nn.ModuleList(layers[layer] for layer in own)
            if number == 0:
                part.model.embed_tokens = embedding
            if number == num_stages - 1:
                part.model.norm, part.lm_head = norm, output
            part.forward = partial(_forward, part, "input_ids" if number == 0 else "inputs_embeds")
            parts.append(part)
        return parts

    def _build_schedule(self, scenario: Scenario) -> Any:
        group, width = self.pipeline_mesh.get_group(), scenario.architecture.hidden_size
        rows, dtype = (scenario.micro_batch_size, scenario.seq_length), DTYPES[scenario.dtype]
        # Torch 2.11 keeps these tensors, which have no memory on a GPU; in a prediction the meter takes one for what it
        # stands in for, so it must not see them.
        with _disable_current_modes():
            hidden = torch.empty((*rows, width), dtype=dtype, device="meta", requires_grad=True)
            logits = hidden.new_empty((*rows, scenario.architecture.vocab_size), requires_grad=True)
            tokens = torch.empty(rows, dtype=torch.int64, device="meta")
        num_stages, num_microbatches = len(scenario.chunks), scenario.num_microbatches // scenario.state.schedule_runs
        for root, number in zip(self.roots, _numbers(scenario), strict=True):
            received = tokens if number == 0 else hidden
            sent = logits if number == num_stages - 1 else hidden
            device = torch.device("cuda")
            self.stages.append(
                _Stage(root, number, num_stages, device, input_args=received, output_args=sent, group=group)
            )
        options: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
        if len(self.stages) == 1:
            schedule: Any = Schedule1F1B(self.stages[0], num_microbatches, **options)
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        else:
            schedule = ScheduleInterleaved1F1B(self.stages, num_microbatches, **options)
            schedule._stages_forward_initialized = schedule._stages_backward_initialized = True
        with keeping("workspace"):
            for stage in self.stages:
                stage.prepare(num_microbatches)
        return schedule


class _Stage(PipelineStage):
    """torch's stage, which labels what it computes."""

    labels: Labels
    microbatches: Microbatches = ALL_MICROBATCHES

    def prepare(self, num_microbatches: int) -> None:
        """Makes the buffers into which the stage receives; torch makes them in the first step, with the same shapes."""
        self.has_backward = True
        options = {}
        if "has_backward" in signature(self._prepare_forward_infra).parameters:  # since torch 2.12
            from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]

            self._inference_mode, options = InferenceMode.STATIC, {"has_backward": True}
        self._prepare_forward_infra(num_microbatches, (), None, **options)
        self._prepare_backward_infra(num_microbatches)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Returns what sends the hidden states of a micro-batch."""
        return _noted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Returns what sends the gradients of a micro-batch."""
        return _noted(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass of a micro-batch."""
        self.microbatches.before_forward()
        self.labels.enter_phase("forward")
        self.labels.passes_in_flight += 1
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Runs the backward pass of a micro-batch."""
        self.labels.enter_phase("backward")
        super().backward_one_chunk(*args, **kwargs)
        self.labels.passes_in_flight -= 1


def _noted(sends: list[Any]) -> list[Any]:
    """Reports what is sent, and returns it.

    NeMo Automodel makes each stage's mask once (``_build_or_reuse_pp_causal_mask`` in pipelining/hf_utils.py), so that
    no pass waits for the device, and on an H200 the memory of what was sent is free again only passes later: here when
    the schedule has ended. A loop without kept masks waits in each pass, in which transformers asks the device whether
    rows are packed.
    """
    for send in sends:
        record_stream(send.tensor, SENDING)
    return sends


class _OptimizersOfStages:
    """The optimizers of a rank's stages, each of which drops its gradients as soon as it has used them."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers
        self.state = _States(*(each.state for each in optimizers))
        """Moments of all stages, by parameter."""

    def step(self) -> None:
        """Updates the parameters of each stage."""
        for each in self._optimizers:
            each.step()
            each.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        for each in self._optimizers:
            each.zero_grad(set_to_none=set_to_none)


class _States(ChainMap[Any, dict[str, Any]]):
    def clear(self) -> None:
        for each in self.maps:
            each.clear()


def _numbers(scenario: Scenario) -> Iterator[int]:
    """Yields the numbers of the rank's stages in the order of the model."""
    layout = scenario.layout
    ranks = layout.pipeline_model_parallel_size
    yield from range(layout.pipeline_stage, ranks * layout.virtual_pipeline_model_parallel_size, ranks)


def _forward(module: Any, name: str, received: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Returns what a stage sends: hidden states [batch, sequence, width], of the last one logits."""
    return module.lm_head(module.model(**{name: received}, **inputs).last_hidden_state)
