"""torch's FSDP2 over transformers' own model: the second engine.

Each method is documented in `memlab.engines.protocol.Engine`. What NeMo Automodel decides is decided as it does
(36044ad3, ``components/distributed/parallelizer.py``): each layer is sharded, and then the whole model; whole layers
are checkpointed, inside of what FSDP2 does for them.
"""

# ruff: noqa: D102

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines import transformer_engine_caches
from memlab.engines.fsdp2 import selective_checkpoint
from memlab.engines.fsdp2 import training_step as steps
from memlab.engines.fsdp2.attention import telling_sequences
from memlab.engines.fsdp2.automodel_classes import CHECKPOINTED
from memlab.engines.fsdp2.flat_model import FlatModel
from memlab.engines.fsdp2.groups import ShardedGroups, holdings
from memlab.engines.fsdp2.hugging_face import check_installed
from memlab.engines.fsdp2.sharded_model import ShardedModel
from memlab.engines.fsdp2.vision import trained_layers
from memlab.engines.protocol import ALL_MICROBATCHES, Held, HeldTensor, Microbatches, Place
from memlab.engines.residency.own_gradient_moves import Move
from memlab.engines.residency.residency import Residency
from memlab.engines.step_errors import release_tensors
from memlab.meter.labels import Labels
from memlab.record.offload_audit import OffloadAudit
from memlab.record.step_record import StepRecord

_NAMES = {
    "model.embed_tokens": "embedding",
    **dict.fromkeys(("model.norm", "model.final_layernorm"), "decoder.final_layernorm"),
    "lm_head": "output_layer",
}
"""What memlab calls transformers' modules outside the layers."""


class Fsdp2Engine:
    """One rank's sharded model."""

    spares_shared = True

    def __init__(self, scenario: Scenario, place: Place) -> None:
        self.scenario, self._place = scenario, place
        self._live: ShardedModel | None = None
        self._labels: Labels | None = None
        """Those of the running step."""

    @property
    def live(self) -> ShardedModel:
        """The model with its optimizer."""
        assert self._live is not None, "the model is built first"
        return self._live

    @contextmanager
    def active(self) -> Iterator[None]:
        check_installed()
        with self._place.sharding(), telling_sequences():
            yield

    def check(self, scenario: Scenario, settings: MemorySettings) -> None:
        check_installed()
        if (
            self._place.kind.on_gpu
            and scenario.layout.context_parallel_size > 1
            and scenario.state.cp_comm_type == "a2a"
        ):
            raise ValueError(
                "cp_comm_type is 'a2a' with engine 'fsdp2' on a GPU, where transformers calls flash-attn without an "
                "exchange of heads: choose p2p, or backend simulated"
            )

    def build(self) -> None:
        if not torch.distributed.is_initialized():
            self._place.join(self.scenario.layout)
        kind = FlatModel if self.scenario.state.fsdp_version == 1 else ShardedModel
        if self._has_stages:  # torch's pipelining takes a second to import
            from memlab.engines.fsdp2.pipelined_model import PipelinedModel

            kind = PipelinedModel
        self._live = kind(self.scenario, self._place.kind)

    def release_optimizer(self) -> None:
        self.live.optimizer = None

    def build_optimizer(self) -> None:
        self.live.build_optimizer(self.scenario.state)

    def remember(self) -> None:
        return None

    def free(self) -> None:
        self._live = None
        transformer_engine_caches.forget_fake_workspaces()
        gc.collect()  # modules and FSDP2's states refer to each other

    def release(self) -> None:
        self.free()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def drop(self) -> None:
        self._live = None

    def holders(self) -> Iterator[tuple[str, Callable[[], object]]]:
        return iter(())

    def release_recipe(self, held: Held, *, clears: bool) -> Iterator[str]:
        live = self.live
        kept: list[Any] = {"nothing": [], "model": [live.module], "optimizer": [live.optimizer]}[held]
        self._live = None
        if clears:
            assert live.optimizer is not None
            live.optimizer.zero_grad(set_to_none=True)
            yield "optimizer.zero_grad(set_to_none=True)"
            live.optimizer.state.clear()
            yield "optimizer.state.clear()"
        live.optimizer = None
        yield "recipe.optimizer = None"
        del live
        yield "recipe.model_parts = None"
        gc.collect()
        yield "gc.collect()"
        torch.cuda.empty_cache()
        yield "torch.cuda.empty_cache()"
        kept.clear()

    def apply(self, settings: MemorySettings) -> None:
        is_full, is_selective = settings.recompute_granularity == "full", settings.selective_ac
        of_block = settings.recompute_num_layers if settings.recompute_method == "block" else None
        spreads_experts = self.scenario.layout.expert_model_parallel_size > 1
        is_inside = is_selective or spreads_experts
        contexts = self._contexts
        if is_inside:
            contexts = self._selective_contexts if is_selective else self._contexts_of_routing
        has_tower = self.scenario.vision_tower is not None
        has_parts = self.scenario.state.model_classes != "transformers" or has_tower
        parts = CHECKPOINTED if has_parts and not spreads_experts else ()
        function = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        of_tower = trained_layers(self.live.inner) if has_tower else []
        repeats_biases = False
        for number, layer in enumerate([*self.layers, *of_tower]):
            is_one = is_full and (of_block is None or number < of_block)
            is_one = is_one and (number + 1) % (settings.checkpoint_every or 1) == 0
            layer.gradient_checkpointing = is_one and not (is_inside or parts)
            layer._gradient_checkpointing_func = function
            # NeMo Automodel checkpoints selectively, or parts, inside of what FSDP2 does for the layer.
            for module in (layer, *(getattr(layer, name) for name in parts if hasattr(layer, name))):
                module.__dict__.pop("forward", None)
                if is_one and (module is layer) == is_inside:
                    module.forward = partial(function, module.forward)
            repeats_biases = repeats_biases or (
                is_one and not is_selective and _has_biases(layer)
            )  # those keep products
        if self._place.kind.is_prediction and self._place.kind.has_allocator:
            of_model = _has_biases(self.live.module)
            transformer_engine_caches.hold_workspaces_of_biases(forward=of_model, backward=repeats_biases)

    def set_state(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.live.set_gathering(scenario.state)
        self.live.set_gradient_sync(is_last=True)

    def train_step(
        self,
        labels: Labels,
        load_for_update: Callable[[], None] = lambda: None,
        microbatches: Microbatches = ALL_MICROBATCHES,
        update: Callable[[], None] | None = None,
    ) -> float | None:
        self._labels = labels
        if self._has_stages:
            from memlab.engines.fsdp2 import pipelined_step

            live: Any = self.live
            return pipelined_step.train_step(live, self.scenario, labels, load_for_update, microbatches, update)
        return steps.train_step(self.live, self.scenario, labels, load_for_update, microbatches, update)

    def forward_only_step(
        self, labels: Labels, microbatches: Microbatches = ALL_MICROBATCHES, *, suspend_offload: bool
    ) -> float | None:
        if self._has_stages:
            raise ValueError(
                "engine is 'fsdp2' with pipeline stages, of which memlab takes no forward-only step: choose "
                "pipeline_model_parallel_size 1, or a training step"
            )
        return steps.forward_only_step(self.live, self.scenario, labels, microbatches)

    def during_step(
        self, on_host: Callable[[torch.Tensor], object] = lambda tensor: None
    ) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def offloaded_bytes(self) -> dict[str, int]:
        return {}

    def without_effect(self) -> dict[str, str]:
        return {}

    def recover(self, error: BaseException) -> None:
        release_tensors(error)
        self.live.reset()
        gc.collect()

    @property
    def layers(self) -> list[torch.nn.Module]:
        return self.live.layers

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for given, module in self.live.named_modules():
            name = given.replace("model.language_model", "model", 1)
            yield _NAMES.get(name) or name.replace("model.layers.", "decoder.layers.", 1), module

    def working_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        without = ("model", "model.layers", "resid_attn_dropout", "resid_mlp_dropout")
        yield from ((name, module) for name, module in self.named_modules() if not name.endswith(without))

    def groups(self) -> ShardedGroups:
        return ShardedGroups(self.live)

    def holdings(self) -> Iterator[HeldTensor]:
        return holdings(self.live)

    def written_by_a_step(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        yield from (("parameters", "a shard", each) for each in self.groups().parameters())

    def workspace(self) -> Iterator[torch.Tensor]:
        yield from self.live.workspace()
        yield from transformer_engine_caches.tensors()
        states = self.live.optimizer.state.values() if self.live.optimizer is not None else ()
        yield from (state["step"] for state in states if "step" in state)

    def uncollected_copies(self) -> Iterator[torch.Tensor]:
        return iter(())

    def saved_for_backward(self) -> Any:
        raise ValueError(_NO_OFFLOAD)

    def audit_offload(
        self,
        labels: Labels,
        saved: Any,
        plain: StepRecord,
        offloaded: StepRecord,
        repeat: Callable[[int, Callable[[], None]], StepRecord],
    ) -> OffloadAudit:
        raise ValueError(_NO_OFFLOAD)

    @property
    def residency_faults(self) -> Mapping[str, Callable[[], Residency]]:
        return {}

    def own_gradient_moves(self, release: Move, load: Move) -> Residency:
        raise ValueError(_NO_BUFFERS)

    def repair(self) -> None:
        """Does nothing: there are no faults to repair."""

    @property
    def _has_stages(self) -> bool:
        return self.scenario.layout.pipeline_model_parallel_size > 1

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns the contexts of a checkpoint's forward, and of its recomputation."""
        assert self._labels is not None
        return nullcontext(), self._labels.recompute()

    def _contexts_of_routing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        model = self.scenario.architecture
        assert model.num_moe_experts is not None, "a model with experts"
        return selective_checkpoint.contexts_of_routing(self._contexts()[1], (model.hidden_size, model.num_moe_experts))

    def _selective_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return selective_checkpoint.contexts(self._contexts()[1])


def _has_biases(module: torch.nn.Module) -> bool:
    """Whether torch multiplies with a matrix and adds a bias."""
    linears = (each for each in module.modules() if isinstance(each, torch.nn.Linear))
    return any(getattr(each, "bias", None) is not None for each in linears)


_NO_BUFFERS = "engine is 'fsdp2', which has no buffers of gradients as Megatron's DDP has: choose engine 'megatron'"
_NO_OFFLOAD = "engine is 'fsdp2', which offloads no activations, so there is nothing to audit: choose engine 'megatron'"
