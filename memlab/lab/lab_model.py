"""The live model of a lab: how it is built, set, made as it was when it was built, and freed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from memlab.backends import Backend
from memlab.backends.simulated_version import imitating
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines.activation_tap import Tap
from memlab.engines.protocol import Engine, Held
from memlab.engines.retained_leaves import Retained, find_retained
from memlab.engines.step_errors import release_tensors
from memlab.lab.garbage import Garbage
from memlab.lab.transfers import Transfers
from memlab.meter.labels import Labels, labelled_by, require_free
from memlab.meter.protocol import Meter
from memlab.record.device_bytes import DeviceBytes
from memlab.replay.no_replay import NoReplay
from memlab.replay.steps import replay_of


class LabModel:
    """One live model, its current settings and its meter; `replays` lets a simulated step repeat what is known."""

    transfers: Transfers

    def __init__(self, engine: Engine, backend: Backend, *, replays: bool = False) -> None:
        self.engine = engine
        self.settings = MemorySettings()
        """The current settings: the next step runs under them."""
        self.num_steps = 0
        """Steps taken so far."""
        self.labels = Labels()
        self.meter: Meter = backend.meter(self.labels)
        self.meter.use_allocator(engine.scenario.allocator)
        self.garbage = Garbage(self.meter)
        self.backend = backend
        self.replay = NoReplay()
        """What repeats parts of the model's steps."""
        self._replays = replays
        self._taps: dict[Tap, bool] = {}
        """Whether each is guarded."""
        self._as_built: tuple[Callable[[], None], Callable[[], bool]] | None = None
        """Make the engine's objects and the meter's memory as they were when the model was built."""
        self.is_as_built = False
        """Whether the model has taken no step since `start_over`."""
        self._pinned_host_memory = True

    @property
    def scenario(self) -> Scenario:
        """What a step runs."""
        return self.engine.scenario

    @contextmanager
    def job_context(self) -> Iterator[None]:
        """Every other method must run inside this context."""
        with ExitStack() as stack:
            stack.enter_context(labelled_by(self.labels, whole_process=self._is_on_gpu))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.engine.active())
            stack.enter_context(imitating(self.scenario.versions))
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
            self.engine.build()
            self.adopt(self.settings)
            restore = self.engine.remember() if self.backend.kind.is_prediction else None
            if restore is not None:
                self._as_built = restore, self.meter.remember()
        except BaseException as error:
            release_tensors(error)
            raise

    def adopt(self, settings: MemorySettings) -> None:
        """Makes a model that the engine has just built the lab's, under these settings."""
        self.is_as_built = False
        self.labels.attach(self.engine.working_modules())
        self.make_transfers()
        with self.labels.category("workspace"):
            self.backend.fill_workspaces(self.scenario)
        self.labels.timed_kernels.clear()  # a job with this model is a process of its own
        self.apply(settings)
        self.replay = replay_of(self.engine, self.labels, self.meter, is_wanted=self._replays)

    def make_transfers(self) -> None:
        """Drops earlier host copies: the model, or its optimizer, is another one; it cannot start over."""
        self._as_built = None
        self.transfers = Transfers(self.engine, self.meter, in_segments=self.backend.kind.has_allocator)
        self.transfers.residency.pinned = self._pinned_host_memory

    @property
    def pinned_host_memory(self) -> bool:
        """As `Lab.pinned_host_memory`; a rebuilt model keeps it."""
        return self._pinned_host_memory

    @pinned_host_memory.setter
    def pinned_host_memory(self, pinned: bool) -> None:
        self._pinned_host_memory = self.transfers.residency.pinned = pinned

    def apply(self, settings: MemorySettings) -> None:
        """Makes these the current settings; Megatron's offload manager starts over."""
        self.engine.apply(settings)
        self.replay.forget_passes(self.scenario, self.settings, settings)
        self.settings = settings

    def set_workload(self, scenario: Scenario) -> None:
        """Uses another sequence length, micro-batch size or number of micro-batches from the next step on.

        Megatron's offload manager has learned its groups for the passes of a step, and has host buffers of their
        shapes. It starts over, and its buffers are freed.
        """
        if scenario == self.scenario:
            return
        self.replay.forget_passes(self.scenario, self.settings)
        self.engine.scenario = scenario
        self.apply(self.settings)
        self.meter.free_cached_pinned_memory()

    @contextmanager
    def workload_of_a_pass(self, scenario: Scenario) -> Iterator[None]:
        """Uses another workload for the block. Megatron's offload manager goes on with the groups that it knows."""
        of_training = self.scenario
        self.engine.scenario = scenario
        try:
            yield
        finally:
            self.engine.scenario = of_training

    def tap(self, layer: int, *, guarded: bool, every: bool) -> Tap:
        """Taps a layer's output, until `untap`.

        While any tap is unguarded, ``release_storage`` empties what every tap keeps.
        """
        tap = Tap(self.engine.layers, layer, every=every)
        self._taps[tap] = guarded
        self.engine.spares_shared = all(self._taps.values())
        return tap

    def untap(self, tap: Tap) -> None:
        """Ends a tap."""
        tap.take_off()
        del self._taps[tap]
        self.engine.spares_shared = all(self._taps.values())

    @property
    def is_tapped(self) -> bool:
        """Whether a tap is on."""
        return bool(self._taps)

    def categories(self) -> dict[str, list[torch.Tensor]]:
        """Returns what may lack its category: nothing, if all that is allocated has been asked for before."""
        return self.transfers.categories() if self.replay.has_new else {}

    def retained(self) -> list[Retained]:
        """Returns the leaves that modules keep through graphs."""
        return find_retained(self.engine, *self.replay.kept_in_graphs())

    def start_over(self) -> bool:
        """Makes a simulated model as it was when it was built; returns whether that was possible."""
        meter = self.meter
        if self._as_built is None or self.is_tapped or self.transfers.has_fault:
            return False
        restore, restore_memory = self._as_built
        limit_bytes, meter.device_memory_bytes = meter.device_memory_bytes, None  # a step may have exceeded it
        try:
            self.transfers.load()
            self.transfers.end_step(MemorySettings())
            self.replay.free_state()
            self.apply(MemorySettings())
            restore()
            if not self.garbage.collect_until(partial(self._restored, restore_memory)):
                self.replay.forget_passes(self.scenario, self.settings)
                return False
        finally:
            if limit_bytes is not None:
                meter.device_memory_bytes = limit_bytes
        self.replay.start_over()
        self.labels.timed_kernels.clear()
        self.num_steps = 0
        self.is_as_built = True
        return True

    def _restored(self, restore_memory: Callable[[], bool]) -> bool:
        """Returns whether the meter is as it was when the model was built: not if something else is allocated now."""
        torch.cuda.empty_cache()
        self.meter.free_cached_pinned_memory()
        return restore_memory()

    def release_garbage(self, *, is_collected: bool = False) -> None:
        """Frees what the previous settings left in reference cycles and in the allocator's cache.

        What building left in the cache stays for the first step, as in a job, which empties no cache: its optimizer
        state is put there, and a block that is not split is up to 1 MiB larger than what is asked for.

        Args:
            is_collected: Whether there is nothing in cycles, as it is known from `is_collected` before the settings.
        """
        if not is_collected:
            self.garbage.collect()
        if self.num_steps:
            torch.cuda.empty_cache()

    @property
    def is_collected(self) -> bool:
        """Whether the last collection of garbage was after all steps that were not repeated, so that there is none."""
        return (self.replay.is_unchanged or self.is_as_built) and self.garbage.is_collected

    def free(self) -> None:
        """Frees the model; another one can be built in the same process group."""
        vars(self).pop("transfers", None)  # they keep main parameters, and with these the gradient buffer
        self.engine.free()
        self._drop_replay()
        self.labels.release()
        self.garbage.collect()
        torch.cuda.empty_cache()
        self.meter.free_cached_pinned_memory()

    def drop(self) -> dict[str, int]:
        """Drops every name of the model, as a notebook does with ``del``, and finds what still holds it.

        Returns:
            Device bytes by holder: what was freed when the holder let go, in this order. Nothing is allocated then.
        """
        self._drop_own_names()
        self.engine.drop()
        gc.collect()
        return self._left_by_holder()

    def release_recipe(self, held: Held, *, clears: bool) -> dict[str, DeviceBytes]:
        """Drops the model by a recipe; returns the device's bytes before it, and after each of its lines."""
        self._drop_own_names()
        found = {"before": self.meter.device_bytes()}
        for line in self.engine.release_recipe(held, clears=clears):
            found[line] = self.meter.device_bytes()
        gc.collect()
        self._left_by_holder()
        return found

    def _drop_own_names(self) -> None:
        del self.transfers
        self._drop_replay()
        self.labels.release()

    def _left_by_holder(self) -> dict[str, int]:
        left: dict[str, int] = {}
        for holder, let_go in self.engine.holders():
            before = self.meter.live_bytes()
            let_go()
            gc.collect()
            left[holder] = before - self.meter.live_bytes()
        self.engine.release()
        self.meter.free_cached_pinned_memory()
        self.meter.close()
        return {holder: num_bytes for holder, num_bytes in left.items() if num_bytes}

    def release(self) -> None:
        """Frees the model, or what is left where its build has failed, and leaves the process group."""
        try:
            self.engine.release()
        finally:
            vars(self).pop("transfers", None)
            self._drop_replay()
            self.labels.release()
            self.meter.free_cached_pinned_memory()
            self.meter.close()

    def _drop_replay(self) -> None:
        """Drops what keeps tensors of the model to replay parts of its steps, or to start over."""
        self.replay.release()
        self.replay, self._as_built = NoReplay(), None
