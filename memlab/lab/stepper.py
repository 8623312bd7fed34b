"""Everything that touches the live model: the stepper builds it, applies settings, takes steps and measures them.

It knows nothing of threads or of earlier records; a `Worker` calls it on one thread.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memlab.allocator.rules import rounded_bytes
from memlab.backends import Backend
from memlab.backends.cuda import own_device
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.model_restrictions import (
    checkpoints_moe_layers,
    without_backward,
    without_optimizer_on_device,
)
from memlab.config.rebuilds import Rebuilt
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.environment import hardware, versions
from memlab.lab.garbage import Garbage
from memlab.lab.progress import StepStopped
from memlab.meter import collectives
from memlab.meter.labels import Labels, labelled_by, require_free
from memlab.meter.protocol import Meter
from memlab.model import apply_settings, cpu_optimizer, data_parallel_overlap
from memlab.model.activation_offload.transfer_watch import OffloadWatch
from memlab.model.as_built import AsBuilt
from memlab.model.attention_environment import attention_backend_chosen, change_attention_backend
from memlab.model.build import LiveModel, build, build_model, build_optimizer, release_optimizer
from memlab.model.change_state import check_configs, set_in_place
from memlab.model.recover_failed_step import forget_discarded_outputs, recover, release_tensors
from memlab.model.residency.audit import require_resident
from memlab.model.residency.host_buffer import registered_bytes
from memlab.model.residency.residency import groups_on_host
from memlab.model.residency.transfers import Transfers
from memlab.model.retention import megatron_globals
from memlab.model.retention.activation_tap import Tap
from memlab.model.retention.recipe_release import Held, objects_held, release_recipe
from memlab.model.retention.remedies import CheckpointRemedy
from memlab.model.retention.retained_leaves import Retained, find_retained
from memlab.model.silence_warnings import silence_megatron
from memlab.model.training_step import forward_only_step, train_step
from memlab.record.device_bytes import DeviceBytes
from memlab.record.out_of_memory import OutOfMemory
from memlab.record.state_change import StateChange
from memlab.record.step_record import Status, StepRecord
from memlab.record.timeline import Timeline
from memlab.record.transfer import GROUPS
from memlab.replay.no_replay import NoReplay
from memlab.replay.passes import NotReplayableError
from memlab.replay.plan import Circumstances, Plan
from memlab.replay.steps import replay_of


class ModelLost(RuntimeError):  # noqa: N818  # what happened, not a kind of error
    """A rebuild failed, and so did the attempt to build the former model again."""


class Stepper:
    """One live model, its current settings and its meter."""

    def __init__(self, scenario: Scenario, backend: Backend, *, replays: bool = False) -> None:
        self.scenario = scenario
        self.settings = MemorySettings()
        """The current settings: the next step runs under them."""
        self.num_steps = 0
        self.labels = Labels()
        self.meter: Meter = backend.meter(self.labels)
        self.meter.use_allocator(scenario.allocator)
        self.garbage = Garbage(self.meter)
        self.backend = backend
        # Read on the thread that opens the lab, where torch.cuda is torch's own on every backend.
        self._hardware = hardware(own_device() if backend.kind.on_gpu else None)
        self._offload_watch = OffloadWatch()
        self._remedy = CheckpointRemedy()
        self.sent_bytes = Counter[str]()
        """What the rank sent in the last step or pass, also one that ended early, by kind of collective."""
        self._taps: dict[Tap, bool] = {}
        """Whether each is guarded."""
        self._bookkeeping_seconds = 0.0
        self._replays = replays
        self.replay = NoReplay()
        """What repeats parts of the model's steps."""
        self._as_built: AsBuilt | None = None
        self._is_as_built = False
        """Whether the model has taken no step since `start_over`."""
        self._has_discarded_outputs = False
        """Whether modules may keep checkpoints of a forward-only pass, after which no backward has used them up."""
        self._pinned_host_memory = True
        self.live: LiveModel
        self.transfers: Transfers

    @contextmanager
    def job_context(self) -> Iterator[None]:
        """Every other method must run inside this context."""
        silence_megatron()
        with ExitStack() as stack:
            stack.enter_context(labelled_by(self.labels, whole_process=self._is_on_gpu))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(attention_backend_chosen(self.scenario.state.attention_backend))
            stack.enter_context(self.backend.active())
            stack.enter_context(self.meter.watching())
            yield

    @property
    def _is_on_gpu(self) -> bool:
        return self.backend.kind.on_gpu

    def require_free(self) -> None:
        """Checks that `job_context` can be entered now; a running job of this lab is none of the others.

        Raises:
            ValueError: If a block is watched, and it or this lab is on a GPU.
        """
        require_free(self.labels, whole_process=self._is_on_gpu)

    def build(self) -> None:
        """Builds the model."""
        try:
            live = build(self.scenario, self.backend.provider_for(self.scenario), self.backend.join)
            self._adopt(live, self.settings)
            # Megatron keeps parameters of its CPU optimizer where `AsBuilt` does not look.
            if self.backend.kind.is_prediction and not self.scenario.state.optimizer_cpu_offload:
                self._as_built = AsBuilt(live, self.meter.remember())
        except BaseException as error:
            release_tensors(error)
            raise

    def _adopt(self, live: LiveModel, settings: MemorySettings) -> None:
        self.live = live
        self._as_built = None
        self._is_as_built = False
        data_parallel_overlap.connect(live)
        self.labels.attach(live.working_modules())
        self._make_transfers()
        with self.labels.category("workspace"):
            self.backend.fill_workspaces(self.scenario.architecture.routes)
        self.apply(settings)
        self.replay = replay_of(live, self.labels, self.meter, is_wanted=self._replays)

    def start_over(self) -> bool:
        """Implements `Lab.start_over`."""
        meter = self.meter
        if self._as_built is None or self.is_tapped or self.transfers.has_fault:
            return False
        limit_bytes, meter.device_memory_bytes = meter.device_memory_bytes, None  # a step may have exceeded it
        try:
            self.transfers.load()
            self.transfers.end_step(MemorySettings())
            self.replay.free_state()
            self.apply(MemorySettings())
            self._as_built.restore()
            if not self.garbage.collect_until(partial(self._restored, self._as_built)):
                return False
        finally:
            if limit_bytes is not None:
                meter.device_memory_bytes = limit_bytes
        self.replay.start_over()
        self.num_steps = 0
        self._is_as_built = True
        return True

    def _restored(self, as_built: AsBuilt) -> bool:
        """Returns whether the meter is as it was when the model was built: not if something else is allocated now."""
        torch.cuda.empty_cache()
        self.meter.free_cached_pinned_memory()
        return as_built.restore_memory()

    def change_state(self, state: TrainingState, allocator: AllocatorSettings, settings: MemorySettings) -> StateChange:
        """Changes the training state and the settings, and rebuilds what reads the state only when it is built.

        Other options of a simulated allocator rebuild the model: a process has the same options from its start.

        Raises:
            ValueError: If Megatron refuses the state, or a tap or a fault is on; the model is then as it was.
            torch.OutOfMemoryError: If the model of this state does not fit; the former one has been built again, with
                its settings.
            ModelLost: If the former one could not be built again either.
        """
        former, scenario = self.scenario, replace(self.scenario, state=state, allocator=allocator)
        check_configs(scenario, settings)
        rebuilt = self.backend.kind.rebuilt_by(former, state, allocator)
        if rebuilt != "nothing" and (self.is_tapped or self.transfers.has_fault):
            raise ValueError(
                f"a tap or a residency fault is on, and the change to '{state}' rebuilds the {rebuilt}: leave the "
                "with block of the tap or fault first"
            )
        started = time.perf_counter()
        self._rebuild(rebuilt, scenario, settings)
        torch.cuda.synchronize()
        return StateChange(
            before=former.state,
            after=state,
            rebuilt=rebuilt,
            seconds=time.perf_counter() - started,
            device_bytes=self.meter.live_bytes(),
            allocator=allocator if allocator != former.allocator else None,
        )

    def _enter(self, scenario: Scenario) -> None:
        self.replay.forget(self.scenario, self.settings)
        self.scenario = scenario
        change_attention_backend(scenario.state.attention_backend)

    def _rebuild(self, rebuilt: Rebuilt, scenario: Scenario, settings: MemorySettings) -> None:
        former, former_settings = self.scenario, self.settings
        rebuild = {
            "nothing": self._set_in_place,
            "optimizer": self._rebuild_optimizer,
            "model": self._rebuild_model,
        }[rebuilt]
        if rebuilt == "optimizer":
            self.transfers.load()  # an out-of-memory here leaves everything as it was
        try:
            rebuild(scenario, settings)
        except BaseException as error:
            release_tensors(error)
            try:
                rebuild(former, former_settings)
            except BaseException as second:  # noqa: BLE001  # whatever it is, there is no model any more
                release_tensors(second)
                self.release()
                raise ModelLost(
                    f"the training state '{scenario.state}' cannot be built ({_in_one_line(error)}), and the former "
                    f"one, '{former.state}', cannot be built again ({_in_one_line(second)}): this lab is closed, open "
                    "another with Lab(...)"
                ) from None
            if isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(
                    f"the training state '{scenario.state}' cannot be built ({_in_one_line(error)}): the lab has its "
                    f"former state, '{former.state}', again; take fewer layers, or choose another state"
                ) from None
            error.add_note(f"the lab has its former training state, '{former.state}', again")
            raise

    def _set_in_place(self, scenario: Scenario, settings: MemorySettings) -> None:
        self._enter(scenario)
        set_in_place(self.live, scenario)
        self.apply(settings)

    def _rebuild_optimizer(self, scenario: Scenario, settings: MemorySettings) -> None:
        self._enter(scenario)
        self._as_built = None
        set_in_place(self.live, scenario)
        release_optimizer(self.live)
        self._make_transfers()
        self.release_garbage()
        self.meter.free_cached_pinned_memory()
        build_optimizer(self.live)
        self.apply(settings)

    def _rebuild_model(self, scenario: Scenario, settings: MemorySettings) -> None:
        self._drop_model()
        if scenario.allocator != self.scenario.allocator:
            self.meter.use_allocator(scenario.allocator)
        self._enter(scenario)
        self._adopt(build_model(scenario, self.backend.provider_for(scenario), MemorySettings()), settings)

    def _drop_model(self) -> None:
        """Frees the model; another one can be built in the same process group."""
        vars(self).pop("transfers", None)  # they keep main parameters, and with these the gradient buffer
        if hasattr(self, "live"):
            megatron_globals.release(self.live, leave=False)
            del self.live
            self._drop_replay()
        else:  # its build has failed
            megatron_globals.forget_model()
        self.labels.release()
        self.release_garbage()
        self.meter.free_cached_pinned_memory()

    def _make_transfers(self) -> None:
        """Drops earlier host copies."""
        self.transfers = Transfers(self.live, self.meter)
        self.transfers.residency.pinned = self._pinned_host_memory

    @property
    def pinned_host_memory(self) -> bool:
        """Implements `Lab.pinned_host_memory`; a rebuilt model keeps it."""
        return self._pinned_host_memory

    @pinned_host_memory.setter
    def pinned_host_memory(self, pinned: bool) -> None:
        self._pinned_host_memory = self.transfers.residency.pinned = pinned

    def apply(self, settings: MemorySettings) -> None:
        """Makes these the current settings; Megatron's offload manager starts over."""
        if self._has_discarded_outputs:  # only the next checkpoint of the same module would replace them
            for module in self.live.modules():
                forget_discarded_outputs(module)
            self._has_discarded_outputs = False
        apply_settings.apply(self.live, settings)
        self.replay.forget_passes(self.scenario, self.settings, settings)
        self.settings = settings
        self._offload_watch.misled = False

    def tap(self, layer: int, *, guarded: bool, every: bool) -> Tap:
        """Taps a layer's output, until `untap`.

        While any tap is unguarded, ``release_storage`` empties what every tap keeps.
        """
        tap = Tap(self.live, layer, every=every)
        self._taps[tap] = guarded
        self._remedy.spares_shared = all(self._taps.values())
        return tap

    def untap(self, tap: Tap) -> None:
        """Ends a tap."""
        tap.take_off()
        del self._taps[tap]
        self._remedy.spares_shared = all(self._taps.values())

    @property
    def is_tapped(self) -> bool:
        """Whether a tap is on."""
        return bool(self._taps)

    def release_garbage(self, *, is_collected: bool = False) -> None:
        """Frees what the previous settings left in reference cycles and in the allocator's cache.

        Args:
            is_collected: Whether there is nothing in cycles, as it is known from `is_collected` before the settings.
        """
        if not is_collected:
            self.garbage.collect()
        torch.cuda.empty_cache()

    @property
    def is_collected(self) -> bool:
        """Whether the last collection of garbage was after all steps that were not repeated, so that there is none."""
        return (self.replay.is_unchanged or self._is_as_built) and self.garbage.is_collected

    def set_workload(self, scenario: Scenario) -> None:
        """Uses another sequence length, micro-batch size or number of micro-batches from the next step on.

        Megatron's offload manager has learned its groups for the passes of a step, and has host buffers of their
        shapes. It starts over, and its buffers are freed.
        """
        if scenario == self.scenario:
            return
        self.replay.forget_passes(self.scenario, self.settings)
        self.scenario = self.live.scenario = scenario
        self.apply(self.settings)
        self.meter.free_cached_pinned_memory()

    @contextmanager
    def workload_of_a_pass(self, scenario: Scenario) -> Iterator[None]:
        """Uses another workload for the block. Megatron's offload manager goes on with the groups that it knows."""
        of_training = self.scenario
        self.scenario = self.live.scenario = scenario
        try:
            yield
        finally:
            self.scenario = self.live.scenario = of_training

    def drop(self) -> dict[str, int]:
        """Drops every name of the model, as a notebook does with ``del``, and finds what still holds it.

        Returns:
            Device bytes by holder: what was freed when the holder let go, in this order. Nothing is allocated then.
        """
        self._drop_own_names()
        del self.live
        gc.collect()
        return self._left_by_holder()

    def release_recipe(self, held: Held, *, clears: bool) -> dict[str, DeviceBytes]:
        """Implements `Lab.release_recipe`."""
        self._drop_own_names()
        kept = objects_held(self.live, held)
        found = {"before": self.meter.device_bytes()}
        for line in release_recipe(self.live, clears=clears):
            found[line] = self.meter.device_bytes()
        del self.live
        kept.clear()
        gc.collect()
        self._left_by_holder()
        return found

    def _drop_own_names(self) -> None:
        del self.transfers
        self._drop_replay()
        self.labels.release()

    def _left_by_holder(self) -> dict[str, int]:
        left: dict[str, int] = {}
        for holder, let_go in megatron_globals.process_wide_holders():
            before = self.meter.live_bytes()
            let_go()
            gc.collect()
            left[holder] = before - self.meter.live_bytes()
        megatron_globals.forget()
        self.meter.free_cached_pinned_memory()
        self.meter.close()
        return {holder: num_bytes for holder, num_bytes in left.items() if num_bytes}

    def release(self) -> None:
        """Frees the model, or what is left where its build has failed."""
        try:
            if hasattr(self, "live"):
                megatron_globals.release(self.live)
            else:
                megatron_globals.forget()
        finally:
            for name in ("live", "transfers"):
                vars(self).pop(name, None)
            self._drop_replay()
            self.labels.release()
            self.meter.free_cached_pinned_memory()
            self.meter.close()

    def retained(self) -> list[Retained]:
        """Implements `Lab.retained`."""
        return find_retained(self.live, self.replay.kept_in_graphs())

    def _drop_replay(self) -> None:
        """Drops what keeps tensors of the model to replay parts of its steps, or to start over."""
        self.replay.release()
        self.replay, self._as_built = NoReplay(), None

    def step(
        self,
        on_move: Callable[[], None] | None = None,
        *,
        forward_only: bool = False,
        suspend_offload: bool = True,
    ) -> StepRecord:
        """Takes one metered step under the current settings.

        Args:
            on_move: Called at each phase and module; raises `StepStopped` to end the step.
            forward_only: Without gradients, backward and optimizer.
            suspend_offload: In a forward-only step, keep Megatron's activation offload out of it.

        Returns:
            The record of a step that finished, ran out of memory or was stopped. The model is usable after each.
        """
        labels, meter = self.labels, self.meter
        circumstances = Circumstances(
            scenario=self.scenario,
            settings=self.settings,
            forward_only=forward_only,
            is_tapped=self.is_tapped,
            has_fault=self.transfers.has_fault,
        )
        plan = self.replay.plan(circumstances)
        if (repeated := self._repeated(plan, on_move)) is not None:
            return repeated
        self._is_as_built = False
        on_host, sent_before = self.transfers.residency.on_host, collectives.sent_bytes.copy()
        torch.cuda.synchronize()
        meter.start(self._categories())
        self._bookkeeping_seconds = 0.0
        started = time.perf_counter()
        measured: dict[str, Any] = {}
        labels.on_move = on_move
        try:
            with self._offload_watch.watching(on_host=self.meter.track_host_tensor):
                measured |= self._phases(plan, forward_only=forward_only, suspend_offload=suspend_offload)
        except (torch.OutOfMemoryError, StepStopped) as error:
            measured |= self._ended_early(error, forward_only=forward_only)
            measured |= self._offload_seen(forward_only=forward_only)
            self._recover(error)
        except NotReplayableError as error:
            self._recover(error)
            # The step begins again, with each group where it was.
            self.transfers.put_on_host(on_host)
            self.replay.stop()
            return self.step(on_move, forward_only=forward_only, suspend_offload=suspend_offload)
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            labels.on_move = None
        torch.cuda.synchronize()
        measured["step_seconds"] = time.perf_counter() - started - self._bookkeeping_seconds
        self.num_steps += 1
        self.sent_bytes = collectives.sent_since(sent_before)
        record = self._record(measured | {"forward_only": forward_only})
        if record.status == "ok":
            self.replay.step_taken(plan, measured, forward_only=forward_only)
        return record

    def _repeated(self, plan: Plan, on_move: Callable[[], None] | None) -> StepRecord | None:
        """Returns the record of a step that only repeats the last one; None if it has to be taken."""
        started = time.perf_counter()
        repeated = self.replay.repeat_step(plan)
        if repeated is None:
            return None
        timeline, measured = repeated
        self.labels.on_move = on_move
        try:
            self.labels.enter_phase("idle")
        finally:
            self.labels.on_move = None
        self.num_steps += 1
        measured = measured | {"step_seconds": time.perf_counter() - started, "forward_only": False}
        return self._record(measured, timeline)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Runs the block, a training step without a record; the model is usable again if it raises."""
        self._is_as_built = False
        try:
            with self.replay.parts(Plan()):
                yield
        except BaseException as error:
            self._recover(error)
            raise

    def checkpoint_input_remedy(self) -> AbstractContextManager[None]:
        """Returns a context for a step: the remedy of the current settings for checkpoints' inputs, where needed."""
        is_needed = checkpoints_moe_layers(self.settings, self.scenario.architecture)
        return self._remedy.during_step(self.settings.checkpoint_input_remedy if is_needed else None)

    def _recover(self, error: BaseException) -> None:
        self.labels.on_move = None
        recover(self.live, self.settings, error)
        self.replay.forget(self.scenario, self.settings)
        self.replay.abandon()
        self._offload_watch.misled = False

    def _phases(self, plan: Plan, *, forward_only: bool, suspend_offload: bool) -> dict[str, Any]:
        away = groups_on_host(self.settings)
        needed = [group for group in GROUPS if group == "parameters" or not (forward_only and group in away)]
        freed: dict[str, int] = {}
        offload_seconds = 0.0
        if self.settings.offload_optimizer_except_update:
            needed = [group for group in needed if group != "optimizer state"]
            with self.labels.phase_of("offload"):  # where a step before this setting, or `Lab.load`, left it
                freed, offload_seconds = self.transfers.offload(["optimizer state"])
        with self.labels.phase_of("load"):
            load_seconds = self.transfers.load(needed)
        with self._off_the_clock():
            require_resident(self.live, needed)

        def load_for_update() -> None:
            nonlocal load_seconds
            if self.settings.offload_optimizer_except_update:
                self.labels.enter_phase("load")
                load_seconds += self.transfers.load(["optimizer state"])

        if forward_only:  # it frees the graphs that layers retain, and what replaces them has no role
            self.replay.forget_passes(self.scenario, self.settings)
        with self.labels.phase_of("forward"), self.checkpoint_input_remedy(), self.replay.parts(plan) as parts:
            if forward_only:
                self._has_discarded_outputs = self.settings.recompute_granularity == "selective"
                self._offload_watch.misled |= not suspend_offload
                loss = forward_only_step(self.live, self.labels, suspend_offload=suspend_offload)
            else:
                loss = train_step(self.live, self.labels, load_for_update, parts.microbatches, parts.update)
        adds_to_groups = bool(freed) or forward_only or parts.leaves_new
        with self._off_the_clock():  # the groups get their category before they leave the device
            self.meter.categorise(self._categories() if adds_to_groups else self.transfers.workspaces())
        with self.labels.phase_of("offload"):
            freed_at_end, end_seconds = self.transfers.end_step(self.settings)
        return {
            "loss": None if self.backend.kind.is_prediction else loss,
            "load_seconds": load_seconds,
            "offload_seconds": offload_seconds + end_seconds,
            "offloaded_bytes_by_group": freed | freed_at_end,
            **self._offload_seen(forward_only=forward_only),
        }

    def _categories(self) -> dict[str, list[torch.Tensor]]:
        """Returns what may lack its category: nothing, if all that is allocated has been asked for before."""
        return self.transfers.categories() if self.replay.has_new else {}

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Subtracts the block's duration from the step's: the block inspects the model and is no part of the step."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._bookkeeping_seconds += time.perf_counter() - started

    def _offload_seen(self, *, forward_only: bool) -> dict[str, Any]:
        if forward_only:
            without_effect = without_backward(self.settings)
        else:
            of_offload = self._offload_watch.without_effect(self.scenario, self.settings)
            without_effect = of_offload | self._remedy.without_effect()
        without_effect |= without_optimizer_on_device(self.settings, self.scenario.state)
        return {
            "offloaded_bytes_by_module": dict(self._offload_watch.transferred_bytes),
            "without_effect": without_effect | self.scenario.without_effect(),
        }

    def _allocator_without_effect(self) -> dict[str, str]:
        return self.scenario.allocator.without_effect(
            has_allocator=self.backend.kind.has_allocator, has_limit=self.meter.device_memory_bytes is not None
        )

    @staticmethod
    def _ended_early(error: Exception, *, forward_only: bool) -> dict[str, Any]:
        status: Status = "interrupted"
        message = f"stopped in {error}: run the step again"
        if isinstance(error, torch.OutOfMemoryError):
            status = "out_of_memory"
            remedy = "shorten" if forward_only else "recompute or offload more, or shorten"
            message = f"{error}: {remedy} the sequence"
        return {"status": status, "message": message}

    def _record(self, measured: dict[str, Any], timeline: Timeline | None = None) -> StepRecord:
        if timeline is None:
            self.meter.categorise(self._categories())
            self.replay.categorise_retained()
            timeline = self.meter.finish()
        residual_bytes = self.meter.uncategorised_bytes()
        if measured.get("status") == "out_of_memory" and self.meter.out_of_memory is not None:
            measured["out_of_memory"] = OutOfMemory.at(
                self.meter.out_of_memory, timeline, passes_in_flight=self.labels.passes_in_flight
            )
        # Not in what a repeated step takes over: the limit may be another one.
        measured["without_effect"] = measured["without_effect"] | self._allocator_without_effect()
        return StepRecord.from_timeline(
            timeline,
            scenario=self.scenario,
            settings=self.settings,
            backend=self.backend.name,
            versions=versions(),
            hardware=dict(self._hardware),
            step_index=self.num_steps - 1,
            residual_bytes=residual_bytes,
            host_reserved_bytes=self._host_reserved_bytes(),
            kept_gather_bytes=self.meter.kept_gather_bytes,
            uncollected_bytes=self._uncollected_bytes(timeline),
            tokens_per_second=self._tokens_per_second(measured),
            **measured,
        )

    def _uncollected_bytes(self, timeline: Timeline) -> int:
        """Returns what `StepRecord.uncollected_bytes` documents: of the copies, what is on the device at the peak."""
        if not self.backend.kind.is_prediction:
            return 0
        copies = cpu_optimizer.uncollected_copies(self.live.discarded_optimizers)
        num_bytes = sum(rounded_bytes(copy.untyped_storage().nbytes()) for copy in copies)
        return num_bytes and min(num_bytes, timeline.breakdown(timeline.peak_index()).get("optimizer state", 0))

    def _tokens_per_second(self, measured: dict[str, Any]) -> float:
        if "loss" not in measured or self.backend.kind.is_prediction:
            return 0.0
        return self.scenario.tokens_per_step / float(measured["step_seconds"])

    def _host_reserved_bytes(self) -> int | None:
        by_torch = self.meter.host_reserved_bytes()
        return None if by_torch is None else by_torch + registered_bytes()


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
