"""The parts of a simulated model's steps that are replayed, by what its earlier steps have shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.engine import MegatronEngine
from memlab.engines.protocol import Engine
from memlab.engines.retained_leaves import Retained
from memlab.meter.labels import Labels
from memlab.meter.protocol import Meter
from memlab.meter.repeater import Repeater
from memlab.record.timeline import Timeline
from memlab.replay.layers import LayerReplay
from memlab.replay.microbatches import MicrobatchReplay
from memlab.replay.no_replay import NoReplay, StepParts
from memlab.replay.plan import Circumstances, Plan, plan_step
from memlab.replay.units import MOST_UNOPENED
from memlab.replay.update import EndReplay


class StepReplay(NoReplay):
    """Replays parts of the steps of one simulated model."""

    def __init__(self, live: LiveModel, labels: Labels, meter: Repeater) -> None:
        self.is_on = True
        self._live, self._labels, self._meter = live, labels, meter
        self._layers = LayerReplay(live, labels, meter)
        self._end = EndReplay(live, labels, meter)
        self._repeatable: dict[str, Any] | None = None
        """What was measured of the last step, if nothing but memory may differ in the next one."""
        self._follows_full_recompute = False
        """Whether MoE layers may still keep the graphs of a step with full recompute."""

    @property
    def num_replayed(self) -> int:  # type: ignore[override]
        return self._layers.num_replayed if self.is_on else 0

    @property
    def has_new(self) -> bool:  # type: ignore[override]
        return not self.is_on or self._meter.storages.has_new

    @property
    def is_unchanged(self) -> bool:  # type: ignore[override]
        return self._repeatable is not None

    def plan(self, step: Circumstances) -> Plan:
        has_limit, follows = self._meter.memory.limit_bytes is not None, self._follows_full_recompute
        looks = self._meter.log.looks
        plan = plan_step(step, has_limit=has_limit, is_looked_at=looks, follows_full_recompute=follows)
        return plan if self.is_on else Plan()

    def repeat_step(self, plan: Plan) -> tuple[Timeline, dict[str, Any]] | None:
        timeline = self._meter.repeat_step() if plan.whole_step and self._repeatable is not None else None
        if timeline is None:
            return None
        scenario = self._live.scenario
        self._labels.num_repeated += 2 * scenario.num_layers_of_stage * scenario.num_microbatches
        assert self._repeatable is not None, "it was measured"
        return timeline, self._repeatable

    @contextmanager
    def parts(self, plan: Plan) -> Iterator[StepParts]:
        self._repeatable = None
        if not self.is_on and not self._layers.retention.has_orphans:
            self._layers.forget()
            yield StepParts()
            return
        given: dict[str, Any] = {}
        if plan.update:
            given |= {"update": self._end.update, "leaves_new": self._end.leaves_new()}
        if plan.microbatches and self._meter.may_repeat:  # not if a group has been offloaded before the passes
            step, scenario = self._layers.step, self._live.scenario
            given["microbatches"] = MicrobatchReplay(self._meter, self._labels, scenario, step)
        finalizing = self._end.finalizing() if plan.gradients else nullcontext()
        with self._layers.during_step(plan), finalizing:
            yield StepParts(**given)

    def step_taken(self, plan: Plan, measured: dict[str, Any], *, forward_only: bool) -> None:
        self._follows_full_recompute &= forward_only
        self._repeatable = measured if plan.whole_step else None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on

    def stop(self, *, starts_over: bool) -> None:
        self.is_on = starts_over and self._layers.presumptions.give_up()

    def forget_passes(
        self, scenario: Scenario, settings: MemorySettings, following: MemorySettings | None = None
    ) -> None:
        recomputes_all_of_moe = scenario.architecture.keeps_graph and settings.recompute_granularity == "full"
        self._follows_full_recompute |= recomputes_all_of_moe and not _keeps_groups(settings, following)
        self._repeatable = None
        if following is None:
            self._layers.forget()
        else:
            self._layers.apply(following)

    def forget(self, scenario: Scenario, settings: MemorySettings) -> None:
        self.forget_passes(scenario, settings)
        self._end.forget()

    def abandon(self) -> None:
        self._layers.abandon()

    def free_state(self) -> None:
        self._end.free_state()
        self._layers.start_over()

    def start_over(self) -> None:
        self.is_on, self._follows_full_recompute = True, False

    def categorise_retained(self) -> None:
        self._layers.retention.categorise()

    def kept_in_graphs(self) -> tuple[dict[int, list[Retained]], set[int]]:
        return self._layers.dispatchers.kept_in_graphs()

    def release(self) -> None:
        self._layers.release()
        self._end.release()
        del self._live


def replay_of(engine: Engine, labels: Labels, meter: Meter, *, is_wanted: bool) -> NoReplay:
    """Returns what replays the steps of an engine's model: of a simulated one of Megatron, if it is wanted."""
    if not is_wanted or meter.repeater is None or not isinstance(engine, MegatronEngine):
        return NoReplay()
    return StepReplay(engine.live, labels, meter.repeater)


def _keeps_groups(former: MemorySettings, settings: MemorySettings | None) -> bool:
    """Whether each unit of replay covers whole checkpoints of a former uniform full recompute, or has the same ones."""
    if settings is None or former.recompute_method != "uniform":
        return False
    size = (settings.recompute_num_layers or 1) if settings.recompute_method == "uniform" else 1
    former_size = former.recompute_num_layers or 1
    return size == former_size or (size % former_size == 0 and size <= MOST_UNOPENED)
