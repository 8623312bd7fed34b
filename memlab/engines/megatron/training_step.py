"""One step of a live model, training or forward alone, through Megatron's own schedule, with its phases named."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from memlab.config.scenario import Scenario
from memlab.config.training_state import COMPARE_WITH_TEACHER, TrainingState
from memlab.engines.attention.packed_sequences import chunks_of_rank
from memlab.engines.megatron import data_parallel_overlap
from memlab.engines.megatron.activation_offload import manager as offload_manager
from memlab.engines.megatron.adapters import without_adapters
from memlab.engines.megatron.build import LiveModel, seed_megatron
from memlab.engines.megatron.causal_mask import causal_mask, masks_of_data_loader
from memlab.engines.megatron.frozen_stages import alone, has_joined_stages, joined, joined_shapes, split_input
from memlab.engines.megatron.graph_capture import captured
from memlab.engines.megatron.losses import Teacher, largest_of_swift
from memlab.engines.megatron.megatron_versions import zero_auxiliary_losses
from memlab.engines.megatron.packed_rows import packed_sequence_params, shifted
from memlab.engines.protocol import ALL_MICROBATCHES, Microbatches
from memlab.meter.labels import Labels
from memlab.upstream.patching import patched


def update_parameters(live: LiveModel) -> None:
    """Runs the optimizer."""
    succeeded, _, _ = live.optimizer.step()
    assert succeeded, "bf16 and fp32 training scale no loss, so no step is skipped"


def train_step(
    live: LiveModel,
    labels: Labels,
    load_for_update: Callable[[], None] = lambda: None,
    microbatches: Microbatches = ALL_MICROBATCHES,
    update: Callable[[], None] | None = None,
) -> float | None:
    """Takes a training step, as `memlab.engines.protocol.Engine.train_step` documents it."""
    for chunk in live.chunks:
        chunk.zero_grad_buffer()
    with torch._C.DisableTorchFunction():  # it drops references: a function mode would see each look at a gradient
        live.optimizer.zero_grad()
    data_parallel_overlap.fill_buffers(live)
    batches = [_batches(live.scenario) for _ in live.chunks]  # they hold the last mask until the step ends
    with _phases(live, labels, microbatches.before_forward):
        teachers: deque[Teacher | None] = deque()
        if live.scenario.state.loss == "jsd":
            labels.enter_phase("forward")
            teachers = _logits_of_all_microbatches(live)
        with captured(live):
            loss = _run_schedule(live, microbatches, batches, teachers)
        load_for_update()
        labels.enter_phase("optimizer")
        if update is None:
            update_parameters(live)
        else:
            update()
        zero_auxiliary_losses()
    data_parallel_overlap.start_gathering(live)
    return loss


def forward_only_step(
    live: LiveModel, labels: Labels, microbatches: Microbatches = ALL_MICROBATCHES, *, suspend_offload: bool
) -> float | None:
    """Takes a step of forward passes alone, as `memlab.engines.protocol.Engine.forward_only_step` documents it."""
    without_offload = offload_manager.suspended(live) if suspend_offload else nullcontext()
    _set_training(live, False)
    batches = [_batches(live.scenario) for _ in live.chunks]
    try:
        phases = _phases(live, labels, microbatches.before_forward)
        with phases, torch.no_grad(), without_offload, data_parallel_overlap.gathered(live):
            loss = _run_schedule(live, microbatches, batches, deque(), forward_only=True)
            zero_auxiliary_losses()
    finally:
        _set_training(live, True)
    return loss


def _set_training(live: LiveModel, mode: bool) -> None:
    for chunk in live.chunks:
        chunk.train(mode)


class _Batch(NamedTuple):
    tokens: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    """Those that are made with the mask."""


def _logits_of_all_microbatches(live: LiveModel) -> deque[Teacher | None]:
    """Runs the teacher with all micro-batches, as ms-swift's GKD does before the first is trained.

    Each micro-batch frees its logits, or the largest of them, which a server may send too
    (``_compute_teacher_logits_local`` and ``forward_step`` in swift/megatron/trainers/gkd_trainer.py, 3602360).
    """
    scenario, k = live.scenario, live.scenario.state.gkd_logits_topk
    if scenario.state.reference_model == "none":
        assert k is not None, "the training state has checked it"
        return deque(_sent(scenario, k) for _ in range(scenario.num_microbatches))
    for model in live.reference:
        model.config.memlab_routing.begin_step()
    batches = _batches(scenario)

    def of_one() -> Teacher | None:
        logits: torch.Tensor | None = _forward_step(live, None, batches, live.chunk)[0]
        return logits if k is None or logits is None else largest_of_swift(logits, k)

    return deque(of_one() for _ in range(scenario.num_microbatches))


def _sent(scenario: Scenario, k: int) -> Teacher:
    """Returns what a server sends of a micro-batch: log-probabilities in fp32, and places.

    See ``assemble_teacher_output`` in swift/rlhf_trainers/gkd_helpers.py (ms-swift 3602360).
    """
    tokens = scenario.seq_length // scenario.layout.context_parallel_size
    places = torch.arange(k, device="cuda").repeat(scenario.micro_batch_size, tokens, 1)
    return torch.zeros(places.shape, dtype=torch.float32, device="cuda"), places


def _run_schedule(
    live: LiveModel,
    microbatches: Microbatches,
    batches: list[Iterator[_Batch]],
    teachers: deque[Teacher | None],
    *,
    forward_only: bool = False,
) -> float | None:
    scenario = live.scenario
    for config in (live.config, *(model.config for model in live.reference)):
        config.memlab_routing.begin_step()
    state = scenario.state
    if state.hidden_dropout or state.attention_dropout or state.moe_router_force_load_balancing:
        seed_megatron(scenario.seed)  # each step draws the same, whatever its settings
    with microbatches.counted():
        losses = live.forward_backward(
            forward_step_func=partial(_forward_step, live, teachers),
            data_iterator=batches,
            model=live.chunks,
            num_microbatches=scenario.num_microbatches,
            seq_length=scenario.seq_length,
            micro_batch_size=scenario.micro_batch_size,
            forward_only=forward_only,
            adjust_tensor_shapes_fn=None if forward_only else joined_shapes(scenario),
        )
    if forward_only and state.loss == "topk_logits":
        _share_largest(live, losses)
        return None
    return _over_the_copies(sum(losses) / len(losses)) if losses else None


def _share_largest(live: LiveModel, of_micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Puts together what all micro-batches found, and sends it from the last pipeline stage to the others.

    See ``get_topk_logits`` in nemo_rl/models/policy/workers/megatron_policy_worker.py (NeMo-RL 7ea279ab), which copies
    it to the host then.
    """
    if of_micro_batches:
        found = [torch.cat(parts) for parts in zip(*of_micro_batches, strict=True)]
    else:
        scenario, lengths = live.scenario, live.scenario.sequence_lengths
        rows, tokens = (len(lengths), max(lengths)) if lengths else (scenario.micro_batch_size, scenario.seq_length)
        shape = (scenario.num_microbatches * rows, tokens, scenario.state.topk_logits_k)
        found = [torch.empty(shape, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.int64)]
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        for each in found:
            torch.distributed.broadcast(each, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)


def _over_the_copies(loss: float) -> float:
    """Returns the mean over the ranks that have tokens of their own, as Megatron's training loop reports it.

    They are the copies of the model and the parts of a sequence: the ranks that reduce gradients together.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1:
        return loss
    total = torch.tensor(loss, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(total, group=group)
    return total.item() / group.size()


def _forward_step(
    live: LiveModel, teachers: deque[Teacher | None] | None, batches: Iterator[_Batch], model: Any
) -> tuple[torch.Tensor | None, Any]:
    """Runs a micro-batch, with the logits of its teacher if these are there already; None runs the teacher alone."""
    batch, mask, positions = next(batches)
    scenario = live.scenario
    tokens, lengths, state = batch.cuda(), scenario.sequence_lengths, scenario.state
    del batch
    if state.create_attention_mask_in_dataloader and (model.module.pre_process or model.module.post_process):
        mask = masks_of_data_loader(scenario.micro_batch_size, scenario.seq_length)
    if lengths is None:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if positions is None:
            positions = torch.arange(inputs.shape[1], device="cuda").expand_as(inputs)
    else:
        inputs, positions, labels = shifted(tokens, lengths)
    packed = {"packed_seq_params": packed_sequence_params(scenario)}
    own_inputs, own_positions, own_labels = (chunks_of_this_rank(part, lengths) for part in (inputs, positions, labels))
    ranks = parallel_state.get_context_parallel_world_size()
    lengths_of_rank = None if lengths is None else tuple(length // ranks for length in lengths)
    given, teacher = (own_inputs, own_positions, mask), None
    if teachers is None:
        frozen = _frozen(live)
        return alone(live, frozen, partial(_of_reference, live, frozen, *given, **packed)), None
    compares = state.loss in COMPARE_WITH_TEACHER
    is_own_loss = state.loss == "cross_entropy" or (compares and not torch.is_grad_enabled())
    if is_own_loss and state.num_labels is None:
        named = {"labels": own_labels, **packed}
        return _with_own_loss(live, model, *given, **named)
    if compares:
        # Model Optimizer runs it in each micro-batch (``_forward`` in modelopt/torch/distill/plugins/megatron.py).
        with _as_the_output_layer_makes_them(_frozen(live), own_labels, state) as given_labels:
            teacher = (
                teachers.popleft() if teachers else _of_reference_here(live, model, *given, **given_labels, **packed)
            )

    def mean_loss(logits: torch.Tensor) -> _Reduced:
        compute = partial(live.loss, logits, own_labels, state, lengths_of_rank, teacher)
        return _reduced(state, _beside_cross_entropy(compute, model, logits, own_labels, state))

    def largest(logits: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        found = live.largest(logits, state, lengths_of_rank)
        return logits.new_zeros(()), found

    # Without labels the model returns the logits.
    with _as_the_output_layer_makes_them(model.module, own_labels, state) as given_labels:
        logits = model(*given, **given_labels, **packed)
    is_teacher = state.loss == "topk_logits" and not torch.is_grad_enabled()
    if teacher is not None and not model.module.post_process:
        assert isinstance(teacher, torch.Tensor), "hidden states"
        return joined(live, teacher, logits), mean_loss
    logits = live.fp32_output(logits) if state.fp32_output and model.module.post_process else logits
    return logits, largest if is_teacher else mean_loss


@contextmanager
def _as_the_output_layer_makes_them(
    module: Any, labels: torch.Tensor, state: TrainingState
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the labels with which the model returns its logits as [tokens, sequences, vocabulary] in the block.

    Model Optimizer takes them there by a hook, and the model computes its loss or zeros (``_forward`` and
    ``_compute_student_lm_loss`` in modelopt/torch/distill/plugins/megatron.py, a2fbac7b). Without labels the model
    puts sequences first, which copies the logits of several sequences: all other losses take these.
    """
    if state.loss != "logits_kl":
        yield {}
        return
    name = "megatron.core.models.common.language_module.language_module.LanguageModule.compute_language_model_loss"
    with patched({name: lambda labels, logits: logits}, on=module):
        yield {"labels": labels}


def _beside_cross_entropy(
    compute: Callable[[], torch.Tensor], model: Any, logits: torch.Tensor, labels: torch.Tensor, state: TrainingState
) -> torch.Tensor:
    """Returns each token's loss, with the model's own cross entropy in training states that add it.

    Model Optimizer's students compute it in their forward, before the other; ms-swift's GKD after it
    (``_compute_student_lm_loss`` in modelopt/torch/distill/plugins/megatron.py, a2fbac7b; ``loss_func`` in
    swift/megatron/trainers/gkd_trainer.py, 3602360).
    """
    if not (state.lm_loss_beside and torch.is_grad_enabled()):
        return compute()
    if state.loss == "logits_kl":
        of_labels: torch.Tensor = model.module.compute_language_model_loss(labels, logits)
        return of_labels + compute().transpose(0, 1)
    loss = compute()
    of_labels = model.module.compute_language_model_loss(labels, logits.transpose(0, 1).contiguous())
    return loss + of_labels


def _with_own_loss(live: LiveModel, model: Any, *given: Any, **named: Any) -> tuple[torch.Tensor, Any]:
    """Runs a model that computes its loss itself, after a reference model in training states that have one."""
    state = live.scenario.state
    if state.reference_model == "none" or not torch.is_grad_enabled():
        return model(*given, **named), partial(_reduced, state)
    of_reference = _of_reference_here(live, model, *given, **named)
    # ms-swift hands both to the schedule as one tensor (``forward_step`` in its trainers/dpo_trainer.py).
    return joined(live, of_reference, model(*given, **named)), partial(_reduced_second_half, state)


def _frozen(live: LiveModel) -> Any:
    return live.reference[0] if live.reference else live.chunk.module


def _of_reference_here(live: LiveModel, model: Any, *given: Any, **named: Any) -> torch.Tensor:
    """Runs the frozen model where the trained one is about to run, on the input of its own stage."""
    frozen, own = _frozen(live), None
    if has_joined_stages(live.scenario) and not model.module.pre_process:
        of_frozen, own = split_input(live, model.module)
        frozen.set_input_tensor(of_frozen)
    output = _of_reference(live, frozen, *given, **named)
    if own is not None:
        model.module.set_input_tensor(own)
    return output


@torch.no_grad()
def _of_reference(live: LiveModel, frozen: Any, *given: Any, **named: Any) -> torch.Tensor:
    """Returns each token's loss, or without labels the logits, of the frozen model or the model without adapters.

    A stage that is not the last one returns hidden states.
    """
    output: torch.Tensor
    if live.reference:
        output = frozen(*given, **named)
        return output
    with without_adapters(live.modules()), live.config.memlab_routing.unnoted():
        output = frozen(*given, **named)
    return output


def _reduced_second_half(state: TrainingState, per_token: torch.Tensor) -> _Reduced:
    # What DPO computes of both halves has one number for each sequence.
    return _reduced(state, per_token[per_token.shape[0] // 2 :])


_Reduced = tuple[torch.Tensor, float] | tuple[torch.Tensor, torch.Tensor, float]
"""What Megatron's schedule takes: a loss and its mean over the tokens, with the number of tokens between them if it
divides by that of all micro-batches."""


def _reduced(state: TrainingState, per_token: torch.Tensor) -> _Reduced:
    if state.calculate_per_token_loss:
        loss = per_token.float().sum()
        return loss, torch.tensor(per_token.numel(), dtype=torch.int, device="cuda"), loss.item() / per_token.numel()
    loss = per_token.float().mean()
    # Megatron multiplies the whole sequence's loss by the ranks that share it, and divides by them where it reduces
    # gradients (`forward_step_calc_loss` in schedules.py, `gradient_scaling_factor` in distributed_data_parallel.py).
    ranks = parallel_state.get_context_parallel_world_size()
    return loss / ranks if ranks > 1 else loss, loss.item()


def _batches(scenario: Scenario) -> Iterator[_Batch]:
    """Yields random tokens int64 [micro_batch_size, seq_length + 1] on the host, the same in every step.

    A packed row has one token more for each of its sequences. Each copy of the model has its own tokens; the ranks of
    one copy have the same. The mask of a micro-batch is held until that of the next has been made, as by
    ``make_processed_microbatch_iterator`` in nemo_rl/models/megatron/data.py (NeMo-RL 7ea279ab).
    """
    mask = positions = None
    generator = torch.Generator().manual_seed(scenario.seed + parallel_state.get_data_parallel_rank())
    shape = (scenario.micro_batch_size, scenario.seq_length + (scenario.packed_sequences or 1))
    for _ in range(scenario.num_microbatches):
        if scenario.state.create_attention_mask:
            mask, positions = causal_mask(scenario.micro_batch_size, scenario.seq_length)
        # Not held here: this generator lives until the step ends.
        yield _Batch(torch.randint(scenario.architecture.vocab_size, shape, generator=generator), mask, positions)


def chunks_of_this_rank(batch: torch.Tensor, lengths: tuple[int, ...] | None = None) -> torch.Tensor:
    """Returns this rank's part of a batch [sequences, tokens] under context parallelism, all of it without.

    Args:
        batch: Rows of one sequence each, or one row of packed sequences.
        lengths: Of the packed sequences, of each of which the rank has its part.
    """
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if lengths is None or ranks == 1:
        return chunks_of_rank(batch, ranks, rank, 1)
    return torch.cat([chunks_of_rank(sequence, ranks, rank, 1) for sequence in batch.split(lengths, 1)], 1)


@contextmanager
def _phases(live: LiveModel, labels: Labels, before_forward: Callable[[], None]) -> Iterator[None]:
    # Megatron's schedules start these timers around each micro-batch, whatever the pipeline layout
    # (megatron/core/pipeline_parallel/schedules.py).
    names = {"forward-compute": "forward", "backward-compute": "backward"}

    def timers(name: str, **_: Any) -> _PhaseTimer:
        return _PhaseTimer(labels, names.get(name), before_forward)

    fork_rng = random._fork_rng

    @contextmanager
    def fork_rng_to_recompute() -> Iterator[None]:
        # Both of Megatron's checkpoints recompute inside this, and nothing else uses it (tensor_parallel/random.py).
        with labels.recompute(), fork_rng():
            yield

    labels.passes_in_flight = 0
    on_config = {"megatron.core.transformer.transformer_config.TransformerConfig.timers": timers}
    on_random = {"megatron.core.tensor_parallel.random._fork_rng": fork_rng_to_recompute}
    with patched(on_config, on=live.config), patched(on_random | _labels_in_engine_checkpoints(labels)):
        yield


_ENGINE = "transformer_engine.pytorch.distributed"


def _labels_in_engine_checkpoints(labels: Labels) -> dict[str, Any]:
    """Returns the replacement that labels what Transformer Engine's checkpoint recomputes: Megatron's under FP8."""
    if _ENGINE not in sys.modules:
        return {}

    # A subclass: TE reads and writes attributes of the class by its name (distributed.py, 2.12.0).
    class LabelledPass(sys.modules[_ENGINE].activation_recompute_forward):  # type: ignore[misc]
        def __enter__(self) -> Any:
            self.label: AbstractContextManager[None] = labels.recompute() if self.recompute_phase else nullcontext()
            self.label.__enter__()
            return super().__enter__()

        def __exit__(self, *error: object) -> Any:
            super().__exit__(*error)
            self.label.__exit__(None, None, None)

    return {f"{_ENGINE}.activation_recompute_forward": LabelledPass}


class _PhaseTimer:
    def __init__(self, labels: Labels, phase: str | None, before_forward: Callable[[], None]) -> None:
        self._labels = labels
        self._before_forward = before_forward
        self._phase = phase

    def start(self, barrier: bool = False) -> None:
        if self._phase == "forward":
            self._before_forward()
        if self._phase is not None:
            self._labels.enter_phase(self._phase)
            if self._phase == "forward":
                self._labels.passes_in_flight += 1

    def stop(self, barrier: bool = False) -> None:
        if self._phase == "backward":
            self._labels.passes_in_flight -= 1
