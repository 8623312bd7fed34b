"""Changes of the training state of a live model, which rebuild what reads it only when it is built."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from memlab.config.allocator_settings import AllocatorSettings
from memlab.config.option import Rebuilt
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import TrainingState
from memlab.engines.step_errors import release_tensors
from memlab.lab.lab_model import LabModel
from memlab.record.state_change import StateChange


class ModelLost(RuntimeError):  # noqa: N818  # what happened, not a kind of error
    """A rebuild failed, and so did the attempt to build the former model again."""


class StateChanges:
    """Changes the training state of a lab's model."""

    def __init__(self, model: LabModel) -> None:
        self._model = model

    def change(self, state: TrainingState, allocator: AllocatorSettings, settings: MemorySettings) -> StateChange:
        """Changes the training state and the settings.

        Other options of a simulated allocator rebuild the model: a process has the same options from its start.

        Raises:
            ValueError: If Megatron refuses the state, or a tap or a fault is on; the model is then as it was.
            torch.OutOfMemoryError: If the model of this state does not fit; the former one has been built again, with
                its settings.
            ModelLost: If the former one could not be built again either.
        """
        model = self._model
        former, scenario = model.scenario, replace(model.scenario, state=state, allocator=allocator)
        model.engine.check(scenario, settings)
        rebuilt = model.backend.kind.rebuilt_by(former, state, allocator)
        if rebuilt != "nothing" and (model.is_tapped or model.transfers.has_fault):
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
            device_bytes=model.meter.live_bytes(),
            allocator=allocator if allocator != former.allocator else None,
        )

    def _rebuild(self, rebuilt: Rebuilt, scenario: Scenario, settings: MemorySettings) -> None:
        model = self._model
        former, former_settings = model.scenario, model.settings
        rebuild = {
            "nothing": self._set_in_place,
            "optimizer": self._rebuild_optimizer,
            "model": self._rebuild_model,
        }[rebuilt]
        if rebuilt == "optimizer":
            model.transfers.load()  # an out-of-memory here leaves everything as it was
        try:
            rebuild(scenario, settings)
        except BaseException as error:
            release_tensors(error)
            try:
                rebuild(former, former_settings)
            except BaseException as second:  # noqa: BLE001  # whatever it is, there is no model any more
                release_tensors(second)
                model.release()
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
        model = self._model
        model.replay.forget(model.scenario, model.settings)
        model.engine.set_state(scenario)
        model.apply(settings)

    def _rebuild_optimizer(self, scenario: Scenario, settings: MemorySettings) -> None:
        model = self._model
        model.replay.forget(model.scenario, model.settings)
        model.engine.set_state(scenario)
        model.engine.release_optimizer()
        model.make_transfers()
        model.release_garbage()
        model.meter.free_cached_pinned_memory()
        model.engine.build_optimizer()
        model.apply(settings)

    def _rebuild_model(self, scenario: Scenario, settings: MemorySettings) -> None:
        model = self._model
        model.free()
        if scenario.allocator != model.scenario.allocator:
            model.meter.use_allocator(scenario.allocator)
        model.engine.scenario = scenario
        model.engine.build()
        model.adopt(settings)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
