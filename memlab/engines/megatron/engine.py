"""Megatron's model under its DDP, with the distributed optimizer or without: the first engine.

Each method is documented in `memlab.engines.protocol.Engine`.
"""

# ruff: noqa: D102

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from memlab.config.model_restrictions import checkpoints_moe_layers
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines import transformer_engine_caches
from memlab.engines.megatron import apply_settings, as_built, cpu_optimizer, data_parallel_overlap
from memlab.engines.megatron import build as building
from memlab.engines.megatron import holdings as walk
from memlab.engines.megatron import recover_failed_step as recovery
from memlab.engines.megatron import training_step as steps
from memlab.engines.megatron.activation_offload.audit import SavedInRegions, audit_offload
from memlab.engines.megatron.activation_offload.transfer_watch import OffloadWatch
from memlab.engines.megatron.attention_environment import attention_backend_chosen, change_attention_backend
from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.groups import MegatronGroups
from memlab.engines.megatron.megatron_config import (
    distributed_data_parallel_config,
    optimizer_config,
    state_fields,
    transformer_config,
)
from memlab.engines.megatron.megatron_versions import forget_auxiliary_losses
from memlab.engines.megatron.residency_faults import FAULTS, repair
from memlab.engines.megatron.retention import megatron_globals
from memlab.engines.megatron.retention.recipe_release import objects_held, release_recipe
from memlab.engines.megatron.retention.remedies import CheckpointRemedy
from memlab.engines.megatron.silence_warnings import silence_megatron
from memlab.engines.protocol import ALL_MICROBATCHES, Held, HeldTensor, Microbatches, Place
from memlab.engines.residency.own_gradient_moves import Move, OwnGradientMoves
from memlab.engines.residency.residency import Residency
from memlab.meter.labels import Labels
from memlab.record.offload_audit import OffloadAudit
from memlab.record.step_record import StepRecord


class MegatronEngine:
    """One rank's Megatron model."""

    def __init__(self, scenario: Scenario, place: Place) -> None:
        self._scenario, self._place = scenario, place
        self._live: LiveModel | None = None
        self._has_groups = False
        """Whether this process has joined the process groups."""
        self._settings = MemorySettings()
        self._watch, self._remedy = OffloadWatch(), CheckpointRemedy()
        self._has_discarded_outputs = False
        """Whether modules may keep checkpoints of a forward-only pass, after which no backward has used them up."""

    @property
    def live(self) -> LiveModel:
        """Megatron's objects, for what replays its steps."""
        assert self._live is not None, "the model is built first"
        return self._live

    @property
    def scenario(self) -> Scenario:
        return self._scenario

    @scenario.setter
    def scenario(self, scenario: Scenario) -> None:
        self._scenario = scenario
        if self._live is not None:
            self._live.scenario = scenario
            self._live.drop_graphs()  # their inputs have shapes of the former workload

    @property
    def spares_shared(self) -> bool:
        return self._remedy.spares_shared

    @spares_shared.setter
    def spares_shared(self, value: bool) -> None:
        self._remedy.spares_shared = value

    @contextmanager
    def active(self) -> Iterator[None]:
        silence_megatron()
        with attention_backend_chosen(self._scenario.state.attention_backend):
            yield

    def check(self, scenario: Scenario, settings: MemorySettings) -> None:
        try:
            transformer_config(scenario, settings)
            distributed_data_parallel_config(scenario)
            optimizer_config(scenario)
        except (AssertionError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"Megatron refuses the training state '{scenario.state}' ({reason}): choose another"
            ) from None

    def build(self) -> None:
        change_attention_backend(self._scenario.state.attention_backend)
        if not self._has_groups:
            self._place.join(self._scenario.layout)
            building.initialize_megatron(self._scenario.layout)
            self._has_groups = True
        provider = self._place.provider_for(self._scenario)
        self._live = building.build_model(self._scenario, provider, MemorySettings())
        data_parallel_overlap.connect(self._live)

    def release_optimizer(self) -> None:
        building.release_optimizer(self.live)

    def build_optimizer(self) -> None:
        building.build_optimizer(self.live)

    def remember(self) -> Callable[[], None] | None:
        # Megatron keeps parameters of its CPU optimizer elsewhere.
        return None if self._scenario.state.optimizer_cpu_offload else as_built.remember(self.live)

    def free(self) -> None:
        if self._live is None:
            megatron_globals.forget_model()
        else:
            live, self._live = self._live, None
            megatron_globals.release(live, leave=False)

    def release(self) -> None:
        self._has_groups = False
        if self._live is None:
            megatron_globals.forget()
        else:
            live, self._live = self._live, None
            megatron_globals.release(live)

    def drop(self) -> None:
        self._live = None

    def holders(self) -> Iterator[tuple[str, Callable[[], object]]]:
        return megatron_globals.process_wide_holders()

    def release_recipe(self, held: Held, *, clears: bool) -> Iterator[str]:
        kept = objects_held(self.live, held)
        yield from release_recipe(self.live, clears=clears)
        self._live = None
        kept.clear()

    def apply(self, settings: MemorySettings) -> None:
        if self._has_discarded_outputs:  # only the next checkpoint of the same module would replace them
            for module in self.live.modules():
                recovery.forget_discarded_outputs(module)
            self._has_discarded_outputs = False
        apply_settings.apply(self.live, settings)
        self._settings, self._watch.misled = settings, False

    def set_state(self, scenario: Scenario) -> None:
        if scenario.state.attention_backend != self._scenario.state.attention_backend:
            transformer_engine_caches.forget_causal_masks()
        change_attention_backend(scenario.state.attention_backend)
        reference = transformer_config(scenario, MemorySettings())
        for name in state_fields(scenario.state):
            setattr(self.live.config, name, getattr(reference, name))
        forget_auxiliary_losses()  # the new state may lack one of them
        self.scenario = scenario

    def train_step(
        self,
        labels: Labels,
        load_for_update: Callable[[], None] = lambda: None,
        microbatches: Microbatches = ALL_MICROBATCHES,
        update: Callable[[], None] | None = None,
    ) -> float | None:
        return steps.train_step(self.live, labels, load_for_update, microbatches, update)

    def forward_only_step(
        self, labels: Labels, microbatches: Microbatches = ALL_MICROBATCHES, *, suspend_offload: bool
    ) -> float | None:
        self._has_discarded_outputs = self._settings.recompute_granularity == "selective"
        self._watch.misled |= not suspend_offload
        return steps.forward_only_step(self.live, labels, microbatches, suspend_offload=suspend_offload)

    @contextmanager
    def during_step(self, on_host: Callable[[torch.Tensor], object] = lambda tensor: None) -> Iterator[None]:
        has_remedy = checkpoints_moe_layers(self._settings, self._scenario.architecture)
        remedy = self._settings.checkpoint_input_remedy if has_remedy else None
        with self._watch.watching(on_host), self._remedy.during_step(remedy):
            yield

    @property
    def offloaded_bytes(self) -> dict[str, int]:
        return dict(self._watch.transferred_bytes)

    def without_effect(self) -> dict[str, str]:
        return self._watch.without_effect(self._scenario, self._settings) | self._remedy.without_effect()

    def recover(self, error: BaseException) -> None:
        recovery.recover(self.live, self._settings, error)
        self._watch.misled = False

    @property
    def layers(self) -> list[torch.nn.Module]:
        return self.live.layers

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.live.named_modules()

    def working_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.live.working_modules()

    def groups(self) -> MegatronGroups:
        return MegatronGroups(self.live)

    def holdings(self) -> Iterator[HeldTensor]:
        return walk.holdings(self.live)

    def written_by_a_step(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        return walk.written_by_a_step(self.live)

    def workspace(self) -> Iterator[torch.Tensor]:
        return megatron_globals.workspace(self.live)

    def uncollected_copies(self) -> Iterator[torch.Tensor]:
        return cpu_optimizer.uncollected_copies(self.live.discarded_optimizers)

    def saved_for_backward(self) -> AbstractContextManager[SavedInRegions]:
        return SavedInRegions.of_block(self.live.chunks)

    def audit_offload(
        self,
        labels: Labels,
        saved: SavedInRegions,
        plain: StepRecord,
        offloaded: StepRecord,
        repeat: Callable[[int, Callable[[], None]], StepRecord],
    ) -> OffloadAudit:
        return audit_offload(self.live, labels.modules, saved, plain, offloaded, repeat)

    @property
    def residency_faults(self) -> Mapping[str, Callable[[], Residency]]:
        return {name: partial(fault, self.live) for name, fault in FAULTS.items()}

    def own_gradient_moves(self, release: Move, load: Move) -> Residency:
        return OwnGradientMoves(self.groups(), list(self.live.buffers()), release, load)

    def repair(self) -> None:
        repair(self.live)


atexit.register(megatron_globals.forget)
