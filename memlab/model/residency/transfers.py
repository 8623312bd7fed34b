"""A live model's parameters, gradients and optimizer state on the move: each move timed, noted and open to an audit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch

from memlab.config.settings import MemorySettings
from memlab.meter.protocol import Meter
from memlab.model.build import LiveModel
from memlab.model.residency.faults import FAULTS, repair
from memlab.model.residency.residency import Residency, groups_on_host
from memlab.model.residency.walk import audit_residency
from memlab.model.retention import holders
from memlab.record.residency_audit import RequestedPlacement, ResidencyAudit
from memlab.record.transfer import GROUPS, Action, Transfer


class Moves:
    """What moves the groups of one live model, and what was asked for."""

    def __init__(self, live: LiveModel, meter: Meter) -> None:
        self.residency = Residency(live)
        self._live = live
        self._meter = meter
        self._asked = RequestedPlacement()
        self._host_bytes = (0, 0)
        """On the host around the last move (the more of before and after), and at its peak."""

    def categories(self) -> dict[str, list[torch.Tensor]]:
        """Returns what the model keeps from step to step: workspaces, and the groups with their host copies."""
        return {"workspace": list(holders.workspace(self._live)), **self.residency.tensors()}

    def load(self, groups: Collection[str] = GROUPS) -> float:
        """Brings up what a step needs; returns the seconds that it took, 0.0 where nothing was away."""
        self._asked.move("load", groups)
        _, seconds = self._timed(lambda: self.residency.load(groups))
        return seconds

    def end_step(self, settings: MemorySettings) -> tuple[dict[str, int], float]:
        """Sends down what the settings keep on the host between steps, and forgets the host copies of all else.

        Returns:
            Device bytes that each group gave back, and the seconds that it took.
        """
        away = groups_on_host(settings)

        def send_down() -> dict[str, int]:
            self._asked.end_step(away)
            self.residency.forget([group for group in GROUPS if group not in away])
            return self.residency.offload(away)

        return self._timed(send_down)

    def move(self, action: Action, groups: tuple[str, ...]) -> Transfer:
        """Moves groups between two steps, or hands the parameters over.

        Raises:
            ValueError: If the parameters are to be handed over while they are on the host.
        """
        moves = {
            "load": lambda: self.residency.load(groups),
            "offload": lambda: self.residency.offload(groups),
            "hand over": self.residency.hand_over,
        }
        transferred_bytes, seconds = self._timed(moves[action])
        self._asked.move(action, groups)
        self._meter.categorise(self.categories())
        return Transfer(
            action=action,
            transferred_bytes=transferred_bytes,
            seconds=seconds,
            device_bytes=self._meter.live_bytes("device"),
            host_bytes=self._meter.live_bytes("host"),
            peak_host_bytes=self._meter.peak_host_bytes,
        )

    def audit(self) -> ResidencyAudit:
        """Holds where every byte of the three groups is against what was asked for."""
        return audit_residency(self._live, self._meter, self._asked, self.residency.tensors(), self._host_bytes)

    def set_fault(self, name: str | None) -> None:
        """Brings everything up and puts it right; from then on groups move with a fault of `FAULTS`, or without.

        Raises:
            ValueError: If another fault is on, or the model does not have what the fault is about.
        """
        if name is not None and type(self.residency) is not Residency:
            raise ValueError(
                f"{name} cannot join a fault that is on already, must be the only one: leave its block first"
            )
        self.residency.load()
        repair(self._live)
        pinned = self.residency.pinned
        self.residency = Residency(self._live) if name is None else FAULTS[name](self._live)
        self.residency.pinned = pinned
        self._asked, self._host_bytes = RequestedPlacement(), (0, 0)

    def _timed(self, move: Callable[[], dict[str, int]]) -> tuple[dict[str, int], float]:
        before = self._meter.live_bytes("host")
        self._meter.reset_peak()
        started = time.perf_counter()
        moved = move()
        seconds = time.perf_counter() - started if moved else 0.0
        self._host_bytes = (max(before, self._meter.live_bytes("host")), self._meter.peak_host_bytes)
        return moved, seconds
