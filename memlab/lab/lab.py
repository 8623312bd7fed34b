"""A Lab: one live model whose memory settings change between steps, and the records of the steps that it took."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memlab.backends import Backend, find_backend
from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.architectures import Architecture
from memlab.config.layout import Layout
from memlab.config.option import EngineName
from memlab.config.routing import Routing
from memlab.config.scenario import Dtype, Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import is_whole_number, shortened
from memlab.config.versions import Versions
from memlab.engines.protocol import Held, check_held
from memlab.fitting.does_it_fit import Fit
from memlab.lab.fit_with_steps import judge_with_steps
from memlab.lab.lab_part import OF_ONE_PROCESS
from memlab.lab.one_process import OneProcess
from memlab.lab.probes import Probes
from memlab.lab.progress import Progress
from memlab.lab.request import PassRequest, StepRequest
from memlab.lab.residency import Residency
from memlab.lab.session import NamedBackend, OnProgress, Session
from memlab.record.device_bytes import DeviceBytes
from memlab.record.state_change import StateChange
from memlab.record.step_record import StepRecord

if TYPE_CHECKING:
    from memlab.ranks.ranks import Ranks

__all__ = ["OF_ONE_PROCESS", "Lab", "Progress"]


class Lab(Residency, Probes):
    """One live Megatron model: on one rank, or with `ranks` on all ranks of a job.

    All work on the model runs on one thread of the lab's own, so that cells, widgets and headless runs behave the same.
    While a step runs, a method that would use the model raises ValueError; `stop` and `close` end the step. On a closed
    lab, every method except these two raises ValueError. Settings, scenario and records can always be read.
    Megatron keeps its process groups per process, so opening a lab closes the one that is open. Until then, or until
    `close`, a lab stays open, even if no variable refers to it any more.

    Args:
        architecture: A known name (`memlab.ARCHITECTURES`), or the path of a Hugging Face ``config.json``. Or a whole
            `Scenario`, of which the arguments from `num_layers` to `versions` that are given replace fields.
        num_layers: How many layers to build; None builds all.
        seq_length: Tokens in a sequence; None takes the architecture's default.
        micro_batch_size: Sequences in one forward pass; None is 1.
        num_microbatches: Forward and backward passes before one optimizer step; None is 1.
        packed_sequences: How many sequences share the one row of a micro-batch; None gives each a row of its own.
        seed: Seed of the weights and the data; None is 1234.
        dtype: Type of the parameters and the activations, ``bf16`` or ``fp32``; None is ``bf16``.
        engine: What trains: ``megatron``, or ``fsdp2``, which is torch's `fully_shard` over transformers' own model;
            None is ``megatron``.
        layout: How the job is spread over ranks, each of which opens the same lab under ``torchrun``; None is one rank.
        routing: Which experts the tokens go to on the simulated backend: a `memlab.config.routing.Routing`, or a text
            such as ``"skewed:2"``; None is ``"balanced"``.
        replay: Lets a simulated step repeat the events of layers, of micro-batches, of the optimizer or of a whole step
            that was taken, where they are known to be the same. The record is the same, up to the order of frees
            between two allocations, and takes less time. False runs everything.
        expert_buffers: Gives experts DDP buffers of their own, as they have when they are spread over ranks.
        state: Precision and place of gradients and optimizer state, and how loss, attention and matrices are computed;
            None is plain Megatron in bf16.
        allocator: Options of torch's allocator, on which predicted reserved bytes depend. None means torch's defaults,
            or on a GPU the options that the process was started with.
        versions: The libraries of the machines where the job runs; None means the newest that were measured, or on a
            GPU the installed ones.
        backend: ``auto``, a name of `memlab.backends.BACKENDS`, or a backend.
        ranks: Engines that run the ranks of the layout (`memlab.Ranks`). Every method then acts on all ranks, and a
            step's record is a `JobRecord`. If a rank fails, the step ends on all of them, and the next call builds the
            job again, with the weights of the seed. None builds the model in this process: one rank, or this rank of
            the job under ``torchrun``.

    Raises:
        ValueError: If a value breaks its rule.
        RankFailed: If a rank failed while the job was built.
    """

    _open: Lab | None = None
    _opening = threading.RLock()
    """Held while a lab is opened: a second thread that opens one waits, and then closes the first one's lab."""

    def __init__(
        self,
        architecture: str | Path | Architecture | Scenario,
        *,
        num_layers: int | None = None,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        num_microbatches: int | None = None,
        packed_sequences: int | None = None,
        seed: int | None = None,
        dtype: Dtype | None = None,
        engine: EngineName | None = None,
        layout: Layout | None = None,
        routing: Routing | str | None = None,
        expert_buffers: bool | None = None,
        state: TrainingState | None = None,
        allocator: AllocatorSettings | None = None,
        versions: Versions | None = None,
        backend: str | Backend = "auto",
        ranks: Ranks | None = None,
        replay: bool = True,
    ) -> None:
        if Lab._open is not None:  # its thread must not wait for `_opening`
            Lab._open._session.worker.refuse_on_own_thread()
        values: dict[str, Any] = {
            "num_layers": num_layers,
            "seq_length": seq_length,
            "micro_batch_size": micro_batch_size,
            "num_microbatches": num_microbatches,
            "packed_sequences": packed_sequences,
            "seed": seed,
            "dtype": dtype,
            "engine": engine,
            "layout": layout,
            "routing": routing,
            "expert_buffers": expert_buffers,
            "state": state,
            "allocator": allocator,
            "versions": versions,
        }
        scenario = Scenario.of(architecture, **{name: value for name, value in values.items() if value is not None})
        has_allocator = allocator is not None or isinstance(architecture, Scenario)
        self._opened = scenario
        self._session: Session
        if ranks is not None:
            from memlab.lab.many_ranks import ManyRanks  # with ipyparallel, which most labs do not need

            name = backend if isinstance(backend, str) else backend.name
            self._session = ManyRanks(scenario, ranks, name, has_allocator=has_allocator)
        else:
            self._session = _session_here(scenario, find_backend(backend), replay=replay, has_allocator=has_allocator)
        self._worker = self._session.worker
        with Lab._opening:
            try:
                self._session.require_free()
                _close_open_lab()
            except BaseException:
                self._worker.end()
                raise
            Lab._open = self
            try:
                self._session.build()
            except BaseException:
                self.close()  # a build that Ctrl-C interrupted runs to its end first
                raise

    @property
    def backend(self) -> NamedBackend:
        """Where the model runs: its `name`, and the `reason` why it was chosen."""
        return self._session.backend

    @property
    def scenario(self) -> Scenario:
        """What a step runs; `set_workload` and `set_state` change it."""
        return self._session.scenario

    @property
    def scenario_as_opened(self) -> Scenario:
        """The current scenario, but with packed sequences its rows are those with which the lab was opened.

        Other rows are derived from these, so that packed sequences keep their length.
        """
        # Without packing, rows of the first workload say nothing, and may break a rule of another training state.
        if self.scenario.packed_sequences is None:
            return self.scenario
        opened = self._opened
        return replace(self.scenario, seq_length=opened.seq_length, packed_sequences=opened.packed_sequences)

    @property
    def settings(self) -> MemorySettings:
        """The current settings; `apply`, `step`, `submit` and `forward_only` change them."""
        return self._session.settings

    @property
    def records(self) -> list[StepRecord]:
        """The records of all steps so far. Records may be removed from this list."""
        return self._session.records

    @property
    def state_changes(self) -> list[StateChange]:
        """The changes of the training state so far."""
        return self._session.state_changes

    @property
    def busy(self) -> bool:
        """Whether a step that `submit` or `step` started is running."""
        return self._worker.busy

    @property
    def closed(self) -> bool:
        """Whether the model has been freed."""
        return self._worker.closed

    def apply(self, settings: MemorySettings) -> None:
        """Changes the memory settings of the live model, in place; Megatron's offload manager starts over.

        Groups that are offloaded between steps leave the device at the end of the next step, and return at the start of
        the step after it.

        Raises:
            ValueError: If a rule is broken; the model is then as it was.
        """
        self._session.apply(settings)

    def start_over(self) -> bool:
        """Makes a simulated lab as it was when it was opened, with plain settings.

        The next step is then that of a new process: the allocator is in the state that it had after the model was
        built, and the optimizer has no state yet. The workload, the training state, `device_memory_bytes`,
        `pinned_host_memory` and the records stay. The steps that follow are numbered from the beginning again.

        Returns:
            Whether that was possible. It is not possible on another backend, with a CPU optimizer, after a change of
            the training state that rebuilt something, within the block of a `tap` or `residency_fault`, and where
            steps leave what memlab does not free, as in FP8. In this last case, the lab has plain settings afterwards,
            and Adam's state and the graphs that layers retained are freed; in the others, the model is as it was.

        Raises:
            ValueError: If the lab is busy or closed, or has ranks in other processes.
        """
        return self._one_process("start_over").start_over()

    def set_workload(
        self,
        *,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        num_microbatches: int | None = None,
    ) -> None:
        """Changes what the next step trains on; the model stays as it is, and Megatron's offload manager starts over.

        A steady step then allocates what it would in a lab that was opened with this workload, apart from the rotary
        angles of earlier sequence lengths, which Megatron keeps, and from unsplit remainders: torch's FSDP2 allocates
        Adam's moments in the first update, and they keep the blocks that were free then.

        Args:
            seq_length: Tokens in a sequence, or in a row of packed sequences, which keep their length; None keeps
                the current number.
            micro_batch_size: Sequences in a pass; None keeps the current number.
            num_microbatches: Passes before an optimizer step; None keeps the current number.

        Raises:
            ValueError: If a value is not a positive number.
        """
        self._session.set_workload(self._with_workload(seq_length, micro_batch_size, num_microbatches))

    def set_state(self, state: TrainingState, settings: MemorySettings | None = None) -> StateChange:
        """Changes the training state: rebuilds the optimizer or the model if the state needs other tensors.

        The new weights are again those of the seed, the records stay, and the settings apply to the new model. Every
        byte of the replaced part is freed before the new part is built. The rows of `TrainingState` say what
        each option rebuilds.

        Args:
            settings: Applied with it; None keeps the current settings.

        Returns:
            What was rebuilt, and how long it took.

        Raises:
            ValueError: If the state breaks a rule, on this backend or with the settings, or within the block of a `tap`
                or `residency_fault`; the lab is then as it was.
            torch.OutOfMemoryError: If the state does not fit. The former state has been built again.
            RuntimeError: If that did not fit either; the lab is then closed.
        """
        return self._session.set_state(state, settings)

    def check_state(self, state: TrainingState, settings: MemorySettings | None = None) -> None:
        """Checks a training state that `set_state` or `submit` would be given; changes nothing.

        Args:
            settings: The settings with it; None are the current ones.

        Raises:
            ValueError: If the state breaks a rule, on this backend or with the settings, or the lab is closed.
        """
        self._worker.require_open()
        self._session.check(StepRequest(settings=settings, state=state))

    def step(
        self,
        settings: MemorySettings | None = None,
        *,
        state: TrainingState | None = None,
        allocator: AllocatorSettings | None = None,
        warm_up: bool = True,
        on_progress: OnProgress | None = None,
    ) -> StepRecord:
        """Takes a training step and measures it. Ctrl-C ends the step between two layers.

        Args:
            settings: As `StepRequest` explains, with the next three.
            state: The training state.
            allocator: Options of torch's allocator.
            warm_up: Whether a step is taken first that is not recorded, if something has changed.
            on_progress: Called on the lab's thread at each phase and layer.

        Returns:
            The record, also appended to `records`. A step that runs out of memory or is stopped also ends in a record.

        Raises:
            ValueError: If the settings break a rule; nothing has run then.
        """
        request = StepRequest(settings=settings, state=state, allocator=allocator, warm_up=warm_up)
        return self.take(request, on_progress)

    def take(self, request: StepRequest | PassRequest, on_progress: OnProgress | None = None) -> StepRecord:
        """Takes the step or the pass of a request, and waits for it, as `step` and `forward_only` do.

        Raises:
            ValueError: If the request is none, or breaks a rule.
        """
        if not isinstance(request, (StepRequest, PassRequest)):
            raise ValueError(
                f"request is {shortened(request)}, must be StepRequest(...) or PassRequest(...): name its fields, or "
                "call step with settings"
            )
        return self._session.take(request, on_progress)

    def submit(
        self,
        request: StepRequest | MemorySettings | None = None,
        on_progress: OnProgress | None = None,
        *,
        state: TrainingState | None = None,
    ) -> Future[StepRecord]:
        """Starts a training step and returns at once.

        Args:
            request: What the step runs under, or its settings alone.
            on_progress: As for `step`.
            state: The training state, beside settings alone.

        Returns:
            The future record.

        Raises:
            ValueError: If the request breaks a rule; nothing has run then.
        """
        if isinstance(request, PassRequest):
            raise ValueError("request is a PassRequest, and submit takes only training steps: give it to take")
        if isinstance(request, StepRequest):
            if state is not None:
                raise ValueError("state is given beside a StepRequest, which has its own: put it into the request")
            asked = request
        else:
            asked = StepRequest(settings=request, state=state)
        return self._session.submit(asked, on_progress)

    def stop(self) -> bool:
        """Requests that the running step ends between two phases or layers; its record says ``interrupted``.

        The ranks of a job end a step together, before the optimizer, and a forward-only pass at its end.

        Returns:
            Whether a step was running.
        """
        return self._session.stop()

    def forward_only(
        self,
        settings: MemorySettings | None = None,
        *,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        num_microbatches: int | None = None,
        suspend_offload: bool = True,
        warm_up: bool = False,
    ) -> StepRecord:
        """Takes a pass without gradients, backward and optimizer, as reinforcement learning does for log-probabilities.

        Optimizer state is what earlier steps have allocated: before the first training step there are no moments. The
        pass may take other batches than a training step, as verl's ``log_prob_max_token_len_per_gpu`` gives it a token
        budget of its own. Training goes on with its own workload. Megatron keeps the rotary angles of both sequence
        lengths.

        Args:
            settings: Applied first; None keeps the current settings.
            seq_length: Tokens in a sequence of this pass; None takes the value of the training step.
            micro_batch_size: Sequences in each forward of this pass; None takes the value of the training step.
            num_microbatches: Number of forwards in this pass; None takes the value of the training step.
            suspend_offload: Keep Megatron's activation offload out of the pass, as NeMo-RL #2279 does. If it is False,
                the pass replaces the offload manager's warm-up, or uses up the groups of the next training step;
                `apply` then makes the manager start over.
            warm_up: Take the same pass once before, without a record. A model's first pass compiles kernels, and
                allocates what later passes find, such as the rotary angles and cuBLAS's workspaces.

        Returns:
            The record, also appended to `records`; with the same workload it has the same loss as a training step.

        Raises:
            ValueError: If the settings or the workload break a rule.
        """
        scenario = self._with_workload(seq_length, micro_batch_size, num_microbatches)
        return self.take(
            PassRequest(scenario=scenario, settings=settings, suspend_offload=suspend_offload, warm_up=warm_up)
        )

    def _with_workload(
        self, seq_length: int | None, micro_batch_size: int | None, num_microbatches: int | None
    ) -> Scenario:
        given: dict[str, Any] = {
            "micro_batch_size": micro_batch_size,
            "num_microbatches": num_microbatches,
        }
        scenario = self.scenario
        if seq_length is not None:
            scenario = self.scenario_as_opened.with_tokens_of_a_row(seq_length)
        return replace(scenario, **{name: value for name, value in given.items() if value is not None})

    @property
    def device_memory_bytes(self) -> int | None:
        """The memory of a pretended device: a step that needs more runs out of memory. None sets no limit.

        Raises:
            ValueError: When it is set to something other than a positive number of bytes or None.
        """
        return self._session.device_memory_bytes

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        if num_bytes is not None and not is_whole_number(num_bytes):
            raise ValueError(
                f"device_memory_bytes is {num_bytes!r}, must be a whole number of at least 1, or None: give the "
                "device's size in bytes, or None for an unlimited one"
            )
        self._session.device_memory_bytes = num_bytes

    def fit(self, record: StepRecord, gpu_memory: str | int, *, seconds: float = 600.0) -> Fit:
        """Compares a step or a forward-only pass with a GPU's memory.

        If a training step does not fit, `fit` takes a step under each setting with which the step may fit. The steps
        and passes that it takes are in `records` afterwards, and the settings are again what they were.

        A simulated lab starts over before each step (`start_over`), so the verdict is that on a new process, as of
        ``memlab predict``. On a GPU, and where a simulated lab cannot start over, `fit` takes further steps of the
        process, which has reserved memory for earlier ones: of a simulated lab, the verdict then says so.

        Args:
            record: The record of a finished step under the lab's current scenario, or of a forward-only pass, which may
                have another workload.
            gpu_memory: The memory of the whole GPU, in bytes or as text such as ``"80GiB"``.
            seconds: How long `fit` begins steps under other settings; `Fit.not_tried` names those that were left.

        Raises:
            ValueError: If `gpu_memory` is not a size of memory, if `seconds` is no number of seconds, if the step did
                not finish or has another scenario, or if `stop` ends a step that `fit` takes.
        """
        own, given = self.scenario, record.scenario
        if record.forward_only:
            own = self._with_workload(given.seq_length, given.micro_batch_size, given.num_microbatches)
        return judge_with_steps(self._session, record, gpu_memory, own, seconds)

    def each(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of the lab on every rank at the same time.

        Args:
            method: One of `OF_ONE_PROCESS`.

        Returns:
            The answers, in the order of the ranks; for a lab without `ranks`, a list with one answer.

        Raises:
            ValueError: If `method` is another method, or a rank refuses the arguments.
        """
        if method not in OF_ONE_PROCESS:
            raise ValueError(f"method is {method!r}, must be one of {', '.join(OF_ONE_PROCESS)}: call others directly")
        if isinstance(self._session, OneProcess):
            return [getattr(self, method)(*args, **kwargs)]
        from memlab.lab.many_ranks import ManyRanks

        assert isinstance(self._session, ManyRanks), "there are no other sessions"
        return self._session.each(method, *args, **kwargs)

    def close(self) -> None:
        """Frees model, optimizer, process group and thread. Records stay readable. A second call does nothing."""
        self._worker.refuse_on_own_thread()
        if not self.closed:
            self._session.require_free()  # a release that is refused would leave the model allocated for good
        self.stop()
        try:
            self._session.close()
        finally:
            self._leave()

    def drop(self) -> dict[str, int]:
        """Closes the lab the careless way: drops its names only, and finds what kept how much of the model alive.

        Returns:
            Device bytes by holder; an empty dict if dropping the names was enough. All of it is free afterwards.
        """
        session = self._one_process("drop")
        left = session.run_exclusive(session.model.drop)
        self._worker.end()
        self._leave()
        return left

    def release_recipe(self, held: Held = "nothing", *, clears: bool = True) -> dict[str, DeviceBytes]:
        """Closes the lab as NeMo Automodel #2634 releases a trainer between two phases, and measures after each line.

        Args:
            held: What a reference that the trainer does not know keeps until the end: ``"model"``, as a variable of
                the caller may, ``"optimizer"``, as a learning rate scheduler does, or ``"nothing"``.
            clears: Whether the optimizers are cleared; if False, only references are dropped, as ``del trainer`` does.

        Returns:
            The device's bytes before, and after each line of upstream's function. All of it is free afterwards.

        Raises:
            ValueError: If `held` is none of these.
        """
        check_held(held)
        session = self._one_process("release_recipe")
        found = session.run_exclusive(lambda: session.model.release_recipe(held, clears=clears))
        self._worker.end()
        self._leave()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._session.num_steps} steps"
        return f"Lab({self.scenario}, {self.backend.name}, {self.settings}, {state})"

    def _leave(self) -> None:
        Lab._open = None if Lab._open is self else Lab._open


def _session_here(scenario: Scenario, backend: Backend, *, replay: bool, has_allocator: bool) -> OneProcess:
    """Makes the session of a model in this process.

    Raises:
        ValueError: If the backend cannot build the scenario.
    """
    if not backend.kind.is_prediction and scenario.routing != Routing():
        raise ValueError(
            f"routing is {scenario.routing}, and on the {backend.name} backend the router decides: "
            "leave it out, or choose backend 'simulated'"
        )
    if not has_allocator:
        scenario = replace(scenario, allocator=backend.allocator())
    versions = backend.versions(scenario.versions)
    if versions != scenario.versions:
        scenario = replace(scenario, versions=versions)
    backend.check(scenario)
    return OneProcess(scenario, backend, replays=replay)


def _close_open_lab() -> None:
    lab = Lab._open
    if lab is not None and not lab.closed:
        warnings.warn(
            f"closing the open lab ({lab.scenario}): Megatron keeps its process groups per process", stacklevel=3
        )
        lab.close()
