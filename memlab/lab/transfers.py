"""Transfers of a live model's parameters, gradients and optimizer state: each one is timed, recorded and audited."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch

from memlab.config.settings import MemorySettings
from memlab.config.validation import shortened
from memlab.engines.protocol import Engine
from memlab.engines.residency.own_gradient_moves import Move, OwnGradientMoves
from memlab.engines.residency.residency import Residency, groups_on_host
from memlab.lab.residency_audit import audit_residency
from memlab.meter.protocol import Meter
from memlab.record.residency_audit import RequestedPlacement, ResidencyAudit
from memlab.record.transfer import GROUPS, Action, Transfer


class Transfers:
    """Transfers the groups of one live model, and records where each was requested to be.

    Args:
        in_segments: See `Residency.in_segments`.
    """

    def __init__(self, engine: Engine, meter: Meter, *, in_segments: bool) -> None:
        self.residency = Residency(engine.groups())
        self.residency.in_segments = in_segments
        self.has_fault = False
        """Whether `set_fault` has put a fault on, or transfers have code of the reader's own."""
        self._engine, self._meter = engine, meter
        self._requested = RequestedPlacement()
        self._host_bytes = (0, 0)
        """Host bytes around the last transfer (the larger of before and after), and at its peak."""

    def categories(self) -> dict[str, list[torch.Tensor]]:
        """Returns what the model keeps from step to step: workspaces, and the groups with their host copies."""
        return self.workspaces() | self.residency.tensors()

    def workspaces(self) -> dict[str, list[torch.Tensor]]:
        """Returns the workspaces."""
        return {"workspace": list(self._engine.workspace())}

    def load(self, groups: Collection[str] = GROUPS) -> float:
        """Loads what a step needs; returns the seconds that it took, 0.0 if nothing was on the host."""
        self._requested.move("load", groups)
        _, seconds = self._timed(lambda: self.residency.load(groups))
        return seconds

    def offload(self, groups: Collection[str]) -> tuple[dict[str, int], float]:
        """Offloads what a step needs only later.

        Returns:
            Device bytes freed by each group, and the seconds that it took; empty and 0.0 if all were on the host.
        """
        self._requested.move("offload", groups)
        return self._timed(lambda: self.residency.offload(groups))

    def put_on_host(self, groups: Collection[str]) -> None:
        """Offloads these groups, and loads the others."""
        self.load([group for group in GROUPS if group not in groups])
        self.offload(groups)

    def end_step(self, settings: MemorySettings) -> tuple[dict[str, int], float]:
        """Offloads what the settings keep on the host between steps, and frees the host copies of all else.

        Returns:
            Device bytes freed by each group, and the seconds that it took.
        """
        away = groups_on_host(settings)

        def offload() -> dict[str, int]:
            self._requested.end_step(away)
            self.residency.forget([group for group in GROUPS if group not in away])
            return self.residency.offload(away)

        return self._timed(offload)

    def transfer(self, action: Action, groups: tuple[str, ...]) -> Transfer:
        """Transfers groups between two steps, or hands the parameters over.

        Raises:
            ValueError: If the parameters are to be handed over while they are on the host.
        """
        transfers = {
            "load": lambda: self.residency.load(groups),
            "offload": lambda: self.residency.offload(groups),
            "hand over": self.residency.hand_over,
        }
        transferred_bytes, seconds = self._timed(transfers[action])
        self._requested.move(action, groups)
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
        """Compares where every byte of the three groups is with where it was requested to be."""
        return audit_residency(self._engine, self._meter, self._requested, self.residency.tensors(), self._host_bytes)

    def set_fault(self, name: str | None) -> None:
        """Loads and repairs everything; later transfers have one of the engine's faults, or none.

        Raises:
            ValueError: If there is no such fault, another one is active, or the model has nothing that it concerns.
        """
        faults = self._engine.residency_faults
        if name is not None and name not in tuple(faults):  # a list has no hash
            choices = ", ".join(faults)
            raise ValueError(f"residency fault is {shortened(name)}, must be one of {choices}: choose one of them")
        self._replace(name, None if name is None else faults[name])

    def set_own_gradient_moves(self, release: Move, load: Move) -> None:
        """Loads and repairs everything; later transfers move the gradients by these two functions.

        Raises:
            ValueError: If a fault is active.
        """
        self._replace("code of your own", lambda: self._engine.own_gradient_moves(release, load))

    def _replace(self, what: str | None, residency: Callable[[], Residency] | None) -> None:
        if residency is not None and self.has_fault:
            raise ValueError(
                f"{what} is a second fault, must be the only one: leave the with block of the other fault first"
            )
        # A reader's code may fail again, and repair brings back what it has lost. All else is loaded, also if the model
        # lacks what a fault needs, so that the audit still agrees.
        has_own_code = isinstance(self.residency, OwnGradientMoves)
        self.load([group for group in GROUPS if group != "gradients" or not has_own_code])
        self._engine.repair()
        former = self.residency
        self.residency = Residency(self._engine.groups()) if residency is None else residency()
        self.residency.pinned, self.residency.in_segments = former.pinned, former.in_segments
        self.has_fault = residency is not None
        self._requested, self._host_bytes = RequestedPlacement(), (0, 0)

    def _timed(self, transfer: Callable[[], dict[str, int]]) -> tuple[dict[str, int], float]:
        before = self._meter.live_bytes("host")
        self._meter.reset_peak()
        started = time.perf_counter()
        transferred_bytes = transfer()
        seconds = time.perf_counter() - started if transferred_bytes else 0.0
        self._host_bytes = (max(before, self._meter.live_bytes("host")), self._meter.peak_host_bytes)
        return transferred_bytes, seconds
