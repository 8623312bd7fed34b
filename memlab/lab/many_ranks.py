"""A live model on many ranks, from the notebook's side: the session of a job."""

# ruff: noqa: D102 - `memlab.lab.session.Session` documents what both sessions have

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from memlab.config.backend_kind import KINDS
from memlab.config.model_restrictions import check_on_model
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.lab.progress import Progress
from memlab.lab.request import PassRequest, StepRequest, check_kind
from memlab.lab.session import OnProgress
from memlab.lab.state_changes import ModelLost
from memlab.lab.worker import Worker
from memlab.ranks.group import RankFailed, RankGroup
from memlab.ranks.ranks import Ranks
from memlab.record.job_record import JobRecord
from memlab.record.state_change import StateChange
from memlab.record.step_record import StepRecord
from memlab.record.transfer import Action, Transfer

_SERVED = "memlab.lab.rank:Rank"
_STOP_SECONDS = 20.0
"""After Ctrl-C, how long the ranks may take to end their step or pass together."""


@dataclass(frozen=True, slots=True)
class JobBackend:
    """The backend of the ranks; this process may have another one, such as none with a GPU."""

    name: str
    reason: str


class ManyRanks:
    """The labs of all ranks. If one fails, all processes end, and the next call builds the job again.

    Args:
        scenario: What a step runs; its layout's `rank` is ignored.
        ranks: Engines, at least as many as the layout has ranks.
        has_allocator: Whether the scenario has the allocator's options; if not, they are those of the ranks' processes.
    """

    def __init__(self, scenario: Scenario, ranks: Ranks, backend: str, *, has_allocator: bool) -> None:
        if backend in KINDS and KINDS[backend].is_prediction:
            raise ValueError(
                "backend is 'simulated', which predicts any rank in this process: leave ranks out, or choose another "
                "backend"
            )
        if scenario.layout.world_size > len(ranks):
            raise ValueError(
                f"the layout ({scenario.layout}) has {scenario.layout.world_size} ranks, and there are {len(ranks)} "
                f"engines: choose a smaller layout, or Ranks.start({scenario.layout.world_size})"
            )
        self.scenario = scenario
        self.settings = MemorySettings()
        self.records: list[StepRecord] = []
        self.state_changes: list[StateChange] = []
        self.num_steps = 0
        """Steps taken up to the last record, including warm-up steps, since the job was built or built again."""
        # Packed sequences stay as long as in the first workload. Without packing, its rows say nothing, and may break a
        # rule of another training state.
        packed = scenario.packed_sequences
        self._as_opened: dict[str, Any] = {} if packed is None else scenario.workload | {"packed_sequences": packed}
        self._attributes: dict[str, Any] = {}
        """What has been set on every rank's lab."""
        self._ranks = ranks
        self._has_allocator = has_allocator
        self._wanted_backend = backend
        self.backend = JobBackend(backend, "requested")
        self._group: RankGroup | None = None
        self._stop = threading.Event()
        """Set from a request to stop until the ranks have been told while they were in a step."""
        self.worker = Worker(nullcontext, lambda: f"{self.scenario}, {self.settings}")

    def require_free(self) -> None:
        """Does nothing: the models are in other processes."""

    def build(self) -> None:
        building = self.worker.submit(self._build)
        try:
            building.result()
        except KeyboardInterrupt:
            self._end_group()  # its models would stay until the next lab
            wait([building])
            self._end_group()
            raise

    def _build(self) -> None:
        self._ranks.refresh()
        self._group = group = RankGroup(self._ranks, self.scenario.layout.world_size, _SERVED)
        try:
            self._open_labs(group)
        except BaseException:
            self._group = None  # the processes stay for the next lab, and the next call opens all labs again
            raise

    def _open_labs(self, group: RankGroup) -> None:
        size = len(group)
        on_this_machine = self._ranks.is_on_this_machine
        host = "127.0.0.1" if on_this_machine else self._ranks.engines[0].host
        (port,) = group.call("serve_store", [(host,)])
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        if on_this_machine:
            # gloo would look the host's name up, which a laptop may not have.
            interfaces = ["lo0" if sys.platform == "darwin" else "lo"] * size
        else:
            interfaces = group.call("interface_to", [(self._other_host(rank),) for rank in range(size)])
        arguments = [
            (
                meeting | {"RANK": str(rank)} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
                self._wanted_backend,
                replace(self.scenario, **self._as_opened).on_rank(rank),
                self._has_allocator,
            )
            for rank, interface in enumerate(interfaces)
        ]
        opened = group.call("open", arguments)
        self.backend = JobBackend(opened[0]["name"], opened[0]["reason"])
        own = opened[0]["scenario"]
        self.scenario = replace(self.scenario, allocator=own.allocator, versions=own.versions)
        self._has_allocator = True
        for name, value in self._attributes.items():
            group.call("set", [(name, value)] * size)
        group.call("call", [("set_workload", (), self.scenario.workload)] * size)
        if self.settings != MemorySettings():
            group.call("call", [("apply", (self.settings,), {})] * size)

    def _other_host(self, rank: int) -> str:
        own, *others = [self._ranks.engines[rank].host, *(one.host for one in self._ranks.engines)]
        return next((host for host in others if host != own), own)

    def apply(self, settings: MemorySettings) -> None:
        check_kind("settings", settings, MemorySettings)
        self.check(StepRequest(settings=settings))

        def apply() -> None:
            self._on_all("call", "apply", (settings,), {})
            self.settings = settings

        self.worker.run_exclusive(apply)

    def set_workload(self, scenario: Scenario) -> None:
        def set_workload() -> None:
            self._on_all("call", "set_workload", (), scenario.workload)
            self.scenario = scenario

        self.worker.run_exclusive(set_workload)

    def set_state(self, state: TrainingState, settings: MemorySettings | None) -> StateChange:
        """Returns the longest time of all ranks, and the bytes of the fullest."""
        check_kind("state", state, TrainingState)
        request = StepRequest(settings=self.settings if settings is None else settings, state=state)
        self.check(request)
        return self.worker.run_exclusive(lambda: self._change_state(request))

    def _change_state(self, request: StepRequest) -> StateChange:
        try:
            changes: list[StateChange] = self._on_all("call", "set_state", (request.state, request.settings), {})
        except ModelLost:
            self._end_group()
            self.worker.end()
            raise
        change = replace(
            changes[0],
            seconds=max(one.seconds for one in changes),
            device_bytes=max(one.device_bytes for one in changes),
        )
        assert request.settings is not None, "the callers say which"
        self.scenario, self.settings = request.scenario_after(self.scenario), request.settings
        self.state_changes.append(change)
        return change

    def submit(self, request: StepRequest | PassRequest, on_progress: OnProgress | None = None) -> Future[StepRecord]:
        self.check(request)
        asked = replace(request, settings=self._settings_of(request))

        def take() -> StepRecord:
            if isinstance(asked, StepRequest) and asked.state not in (None, self.scenario.state):
                self._change_state(asked)
            return self._take(asked, on_progress)

        return self.worker.start(take, before=self._stop.clear)

    def take(self, request: StepRequest | PassRequest, on_progress: OnProgress | None = None) -> StepRecord:
        """Takes a step or a pass.

        Ctrl-C, or a request to terminate this process, ends a step where the ranks can end it together. A pass has no
        such place: it runs to its end. Whichever takes too long for that ends with the processes.
        """
        running = self.submit(request, on_progress)
        try:
            return running.result()
        except (KeyboardInterrupt, SystemExit):
            self.stop()
            try:
                running.result(timeout=_STOP_SECONDS)
            except TimeoutError:
                self._end_group()
                wait([running])
            raise

    def _take(self, request: StepRequest | PassRequest, on_progress: OnProgress | None) -> JobRecord:
        assert request.settings is not None, "`submit` says which"
        former, self.settings = self.settings, request.settings
        failed: list[Exception] = []

        def report(progress: Progress) -> None:
            # The labs of the ranks forget a request that reaches them before their step begins, as it now has.
            if self._stop.is_set() and self._tell_to_stop():
                self._stop.clear()
            if on_progress is None or failed:
                return
            try:
                on_progress(progress)
            except Exception as error:  # noqa: BLE001  # raised below: a callback of this process ends no rank's process
                failed.append(error)
                self._stop.set()

        try:
            records = self._on_all("take", request, on_progress=report)
        except Exception as error:
            errors = list(error.errors.values()) if isinstance(error, RankFailed) else [error]
            records = [each.record for each in errors if hasattr(each, "record")]
            if not records:
                if not isinstance(error, RankFailed):
                    self.settings = former  # all ranks have refused them
                raise
        record = JobRecord.of(records)
        self.num_steps = record.step_index + 1
        if failed:
            raise failed[0]
        self.records.append(record)
        return record

    def each(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every rank's lab, and returns the answers in the order of the ranks."""
        return self.worker.run_exclusive(lambda: self._on_all("call", method, args, kwargs))

    def _set(self, name: str, value: Any) -> None:
        """Sets an attribute of every rank's lab, also of those that replace it."""

        def set_on_all() -> None:
            self._on_all("set", name, value)
            self._attributes[name] = value

        self.worker.run_exclusive(set_on_all)

    def transfer(self, action: Action, groups: tuple[str, ...]) -> Transfer:
        """Returns the sum over the ranks, and the longest time."""
        method = {"offload": "offload", "load": "load", "hand over": "hand_over"}[action]
        args = () if action == "hand over" else groups
        ranks: list[Transfer] = self.each(method, *args)
        totals = Counter[str]()
        for one in ranks:
            totals.update(one.transferred_bytes)
        return Transfer(
            action=action,
            transferred_bytes=dict(totals),
            seconds=max(one.seconds for one in ranks),
            device_bytes=sum(one.device_bytes for one in ranks),
            host_bytes=sum(one.host_bytes for one in ranks),
            peak_host_bytes=sum(one.peak_host_bytes for one in ranks),
        )

    @property
    def device_memory_bytes(self) -> int | None:
        return self._attributes.get("device_memory_bytes")

    @device_memory_bytes.setter
    def device_memory_bytes(self, num_bytes: int | None) -> None:
        self._set("device_memory_bytes", num_bytes)

    @property
    def pinned_host_memory(self) -> bool:
        return all(self.worker.run_exclusive(lambda: self._on_all("get", "pinned_host_memory")))

    @pinned_host_memory.setter
    def pinned_host_memory(self, pinned: bool) -> None:
        self._set("pinned_host_memory", pinned)

    def stop(self) -> bool:
        self._stop.set()
        self._tell_to_stop()
        return self.worker.busy

    def _tell_to_stop(self) -> bool:
        """Passes a request to stop on, and returns whether there are ranks that hear it."""
        group = self._group
        if group is None or not group.alive:
            return False
        group.notify("stop")
        return True

    def check(self, request: StepRequest | PassRequest) -> None:
        """Refuses what one of the ranks could not take."""
        scenario, own = self.scenario, self.scenario.allocator
        if isinstance(request, PassRequest):
            request.check_workload_of(scenario)
        elif request.allocator not in (None, own):
            raise ValueError(
                f"allocator is '{request.allocator}', and the ranks' processes were started with '{own}', which must "
                "be the same: leave it out, or start them with other options in PYTORCH_CUDA_ALLOC_CONF"
            )
        else:
            scenario = request.scenario_after(scenario)
        for rank in scenario.ranks_of_every_kind:
            check_on_model(self._settings_of(request), scenario.on_rank(rank))

    def _settings_of(self, request: StepRequest | PassRequest) -> MemorySettings:
        return self.settings if request.settings is None else request.settings

    def close(self) -> None:
        """Frees the models; the processes stay for the next lab, unless they fail to close."""
        self.worker.finish(self._close_labs)

    def _close_labs(self) -> None:
        group, self._group = self._group, None
        if group is not None and group.alive and not self._ranks.closed:
            try:
                group.call("close", [()] * len(group))
            except RankFailed as failure:
                warnings.warn(f"closing the lab: {failure}", stacklevel=4)

    def _on_all(self, method: str, *args: Any, on_progress: Callable[[Any], None] | None = None) -> list[Any]:
        group = self._group
        if group is None or not group.alive or self._ranks.closed:
            if on_progress is not None:
                on_progress(Progress(phase="starting the ranks", module="", done=0, total=0))
            self._build()
            group = self._group
        assert group is not None
        return group.call(method, [args] * len(group), on_progress)

    def _end_group(self) -> None:
        group = self._group
        if group is not None:
            group.end()
