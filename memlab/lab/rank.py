"""One rank of a job, in a process of its own: the object that `memlab.ranks.rank_process` makes and serves."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import psutil

from memlab.backends import find_backend
from memlab.config.scenario import Scenario
from memlab.lab.lab import Lab
from memlab.lab.request import PassRequest, StepRequest
from memlab.record.step_record import StepRecord

_KEPT_RECORDS = 8
"""The rank judges an out-of-memory by its latest steps; the notebook keeps all records."""


@dataclass(eq=False)
class StepEndedEarly(Exception):  # noqa: N818  # what happened
    """A step that ran out of memory on this rank. The other ranks wait for it, so the job has to end."""

    record: StepRecord

    def __str__(self) -> str:
        return str(self.record)


class Rank:
    """Holds the lab of one rank, and calls its methods; `report` sends what it is given to the notebook."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        self._report = report
        self._lab: Lab | None = None
        self._store: Any = None
        # As in memlab/__init__.py: this process is the rank's own.
        gc.collect()
        gc.freeze()

    def serve_store(self, host: str) -> int:
        """Starts the store at which the ranks meet, as ``torchrun``'s agent does; rank 0 is asked for it.

        Args:
            host: Where the ranks look for it. It listens there if that is this machine's own address, and else, as
                torchrun's does, on every network: a host may resolve its own name to another address than other hosts
                do.

        Returns:
            Its port.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing from torch's stubs

        listening = socket.create_server((host if host.startswith("127.") else "", 0))
        port = int(listening.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=5),
            master_listen_fd=listening.detach(),
        )
        return port

    def interface_to(self, host: str) -> str:
        """Returns the network interface by which this machine reaches another one; empty if the name is unknown here.

        By default gloo takes the interface of this machine's own name. Debian's /etc/hosts says that this is 127.0.1.1,
        where no other machine reaches it.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, 1))  # finds the route, and sends nothing
            except OSError:
                return ""
            own: str = probe.getsockname()[0]
        of_interfaces = psutil.net_if_addrs().items()
        return next((name for name, of_name in of_interfaces if own in {one.address for one in of_name}), "")

    def open(self, meeting: dict[str, str], backend: str, scenario: Scenario, has_allocator: bool) -> dict[str, Any]:
        """Opens the lab of this rank; all ranks are called together.

        Args:
            meeting: Environment variables ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK`` and ``WORLD_SIZE``.
            scenario: Of the lab, with this rank's layout.
            has_allocator: Whether the scenario has the allocator's options; if not, they are those of this process.

        Returns:
            The name of the backend, why it was chosen, and the scenario as it is.
        """
        os.environ.update(meeting)
        # The store is served already: no rank of torch's starts one (torch.distributed.rendezvous, 2.11 and 2.13).
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if not has_allocator:
            scenario = replace(scenario, allocator=find_backend(backend).allocator())
        self._lab = lab = Lab(scenario, backend=backend)
        return {"name": lab.backend.name, "reason": lab.backend.reason, "scenario": lab.scenario}

    def take(self, request: StepRequest | PassRequest) -> StepRecord:
        """Takes a step or a pass, and reports the progress of a step.

        Raises:
            StepEndedEarly: If it ran out of memory.
        """
        lab = self._require_lab()
        if isinstance(request, PassRequest):
            request = replace(request, scenario=request.scenario.on_rank(lab.scenario.layout.rank))
        record = lab.take(request, self._report)
        del lab.records[:-_KEPT_RECORDS]
        if record.status == "out_of_memory":
            raise StepEndedEarly(record)
        return record

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the lab."""
        return getattr(self._require_lab(), method)(*args, **kwargs)

    def set(self, name: str, value: Any) -> None:
        """Sets an attribute of the lab."""
        setattr(self._require_lab(), name, value)

    def get(self, name: str) -> Any:
        """Returns an attribute of the lab."""
        return getattr(self._require_lab(), name)

    def stop(self) -> None:
        """Requests that the running step ends."""
        if self._lab is not None:
            self._lab.stop()

    def close(self) -> None:
        """Closes the lab; the process stays for the next one."""
        if self._lab is not None:
            self._lab.close()
        self._lab = self._store = None

    def _require_lab(self) -> Lab:
        assert self._lab is not None, "the notebook opens the lab first"
        return self._lab
