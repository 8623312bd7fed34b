"""The two sides of an offload audit, from live steps: what modules save for backward, and where it is at the peak.

What is expected is counted in a step **without** offload, in the regions that Megatron names by
``FineGrainedActivationOffloadingInterface`` and enters whether they are offloaded or not. What is offloaded is followed
from the copy to the host to the copy back (``ChunkOffloadHandler``). Both classes are in
``megatron/core/pipeline_parallel/fine_grained_activation_offload.py`` (0.16.1 and 0.19.2).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as upstream

from memlab.config.scenario import Scenario
from memlab.engines.megatron.activation_offload.storage_holders import find_holders
from memlab.engines.megatron.build import LiveModel
from memlab.record.offload_audit import (
    ModuleAccount,
    OffloadAudit,
    StillResident,
    device_event_index,
    device_event_number,
    peak_of,
    roughness_bytes,
    same_moment,
)
from memlab.record.step_record import StepRecord
from memlab.upstream.patching import patched

State = Literal["away", "still resident", "back", "copied twice", "not due"]


@dataclass(slots=True)
class _Saved:
    num_elements: int
    num_bytes: int


class SavedInRegions:
    """What the offload modules save for backward in a step without offload, without parameters."""

    def __init__(self) -> None:
        self._passes: list[tuple[int, dict[str, list[dict[Any, _Saved]]]]] = []
        """Of each forward pass of a model chunk: the chunk's number, and the regions that it entered, by name."""

    @classmethod
    @contextmanager
    def of_block(cls, chunks: Sequence[torch.nn.Module]) -> Iterator[SavedInRegions]:
        """Counts in the block, of the rank's model chunks in the model's order."""
        counted = cls()
        interface = upstream.FineGrainedActivationOffloadingInterface
        enter, leave = interface.__enter__, interface.__exit__
        hooks: list[Any] = []

        def enter_region(region: Any) -> Any:
            saved: dict[Any, _Saved] = {}
            counted._passes[-1][1].setdefault(region.name, []).append(saved)
            hooks.append(torch.autograd.graph.saved_tensors_hooks(_counting(region.name, saved), lambda packed: packed))
            result = enter(region)
            hooks[-1].__enter__()
            return result

        def leave_region(region: Any, *exception: Any) -> None:
            hooks.pop().__exit__(*exception)
            leave(region, *exception)

        def begin_pass(number: int, *_: Any) -> None:
            counted._passes.append((number, {}))

        name = f"{upstream.__name__}.FineGrainedActivationOffloadingInterface"
        with patched({f"{name}.__enter__": enter_region, f"{name}.__exit__": leave_region}), ExitStack() as stack:
            for number, chunk in enumerate(chunks):
                stack.callback(chunk.register_forward_pre_hook(partial(begin_pass, number)).remove)
            yield counted

    def account(self, name: str, scenario: Scenario, min_offloaded_tensor_size: int) -> dict[str, int]:
        """Splits a module's saved bytes by Megatron's rules.

        Its manager keeps the last group of a pass on the device if the pass's backward follows at once: on the last
        stage every pass of the last chunk, on others the step's last pass (``PipelineOffloadManager``; observed with
        0.16.1 for 1F1B and interleaved stages).

        Example: one stage, one chunk of 4 layers, 2 micro-batches. Of the regions of each pass, the last stays. On the
        first of two stages only that of the second pass does.

        Returns:
            ``saved_bytes``, ``too_small_bytes`` and ``last_group_bytes`` of `ModuleAccount`.
        """
        saved = too_small = last_group = 0
        layout = scenario.layout
        is_last_stage = layout.pipeline_stage == layout.pipeline_model_parallel_size - 1
        last_chunk = layout.virtual_pipeline_model_parallel_size - 1
        for number, (chunk, entered) in enumerate(self._passes, 1):
            is_followed = chunk == last_chunk if is_last_stage else number == len(self._passes)
            regions = entered.get(name, [])
            for region in regions:
                stays = is_followed and region is regions[-1]
                for tensor in region.values():
                    saved += tensor.num_bytes
                    if tensor.num_elements < min_offloaded_tensor_size:
                        too_small += tensor.num_bytes
                    elif stays:
                        last_group += tensor.num_bytes
        return {"saved_bytes": saved, "too_small_bytes": too_small, "last_group_bytes": last_group}


def _counting(name: str, saved: dict[Any, _Saved]) -> Any:
    def count(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            # With expert_fc1 offloaded, the experts save their whole input instead of a view per expert: one tensor.
            key = tensor.untyped_storage()._cdata if name == "expert_fc1" else len(saved)
            whole = saved.setdefault(key, _Saved(0, 0))
            whole.num_elements += tensor.numel()
            whole.num_bytes += tensor.nbytes
        return tensor

    return count


# A hook replaces a saved leaf, but torch keeps the leaf's AccumulateGrad node, which owns the leaf. This concerns the
# detached inputs that CheckpointWithoutOutput saves (megatron/core/tensor_parallel/random.py).
_OWN_LEAF = "its own AccumulateGrad node: it was saved as a leaf that requires gradients"


@dataclass(slots=True, eq=False)
class _Offloaded:
    name: str
    shape: tuple[int, ...]
    num_bytes: int
    is_leaf: bool
    source: weakref.ref[Any]
    reloaded: weakref.ref[Any] | None = None


class OffloadTrace:
    """Follows each tensor that a step offloads, and reports at one moment where each of them is."""

    def __init__(self) -> None:
        self.still_resident: list[StillResident] = []
        self._offloaded: list[_Offloaded] = []
        self._states: list[State] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Follows what the block offloads."""
        handler, group = upstream.ChunkOffloadHandler, upstream.OffloadTensorGroup
        offload, reload, push_tensor = handler.offload, handler.reload, group.push_tensor
        on_host: dict[int, _Offloaded] = {}
        last: list[_Offloaded] = []

        def note_offload(chunk: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            state = offload(chunk, source, *args, **kwargs)
            is_leaf = source.is_leaf and source.requires_grad
            last[:] = [
                _Offloaded("", tuple(source.shape), source.nbytes, is_leaf, weakref.ref(source.untyped_storage()))
            ]
            on_host[id(state[1])] = last[0]
            return state

        def note_name(tensors: Any, tag: Any, tensor: Any) -> None:
            if isinstance(tensor, tuple):
                last[0].name = tensors._name
                self._offloaded.append(last[0])
            push_tensor(tensors, tag, tensor)

        def note_reload(chunk: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = reload(chunk, state, *args, **kwargs)
            on_host.pop(id(state[1])).reloaded = weakref.ref(tensor.untyped_storage())
            return tensor

        replacements = {
            "ChunkOffloadHandler.offload": note_offload,
            "ChunkOffloadHandler.reload": note_reload,
            "OffloadTensorGroup.push_tensor": note_name,
        }
        with patched({f"{upstream.__name__}.{name}": value for name, value in replacements.items()}):
            yield

    def look(self, live: LiveModel, modules: list[str]) -> None:
        """Records where every offloaded tensor is at this moment, in the middle of the traced step."""
        self._states = []
        seen: set[int] = set()
        for each in self._offloaded:
            twice = each.reloaded is None and id(each.source) in seen  # one storage, one weak reference
            seen.add(id(each.source))
            self._states.append("copied twice" if twice else _state(each))
        resident = [
            each for each, state in zip(self._offloaded, self._states, strict=True) if state == "still resident"
        ]
        storages = [each.source()._cdata for each in resident]  # type: ignore[union-attr]  # its storage is allocated
        holders = find_holders(live, modules, storages) if resident else {}
        self.still_resident = [
            StillResident(
                name=each.name,
                shape=each.shape,
                num_bytes=each.num_bytes,
                holders=holders[storage] or ((_OWN_LEAF,) if each.is_leaf else ()),
            )
            for each, storage in zip(resident, storages, strict=True)
        ]

    def module_account(self, name: str, expected: dict[str, int]) -> ModuleAccount:
        """Returns where a module's bytes were at the moment of `look`, once the step is over."""
        later: list[State] = ["not due"] * (len(self._offloaded) - len(self._states))
        places: dict[State, int] = {}
        for each, state in zip(self._offloaded, [*self._states, *later], strict=True):
            if each.name == name:
                places[state] = places.get(state, 0) + each.num_bytes
        return ModuleAccount(
            name=name,
            **expected,
            transferred_bytes=sum(places.values()),
            away_bytes=places.get("away", 0),
            still_resident_bytes=places.get("still resident", 0),
            back_bytes=places.get("back", 0),
            copied_twice_bytes=places.get("copied twice", 0),
            not_due_bytes=places.get("not due", 0),
        )


def audit_offload(
    live: LiveModel,
    modules: list[str],
    saved: SavedInRegions,
    plain: StepRecord,
    offloaded: StepRecord,
    repeat: Callable[[int, Callable[[], None]], StepRecord],
) -> OffloadAudit:
    """Compares the bytes that offload should free with those that it freed, at the peak of the step without offload.

    Args:
        modules: Module names by the code that `Labels` gives autograd nodes.
        saved: What the modules save under the settings of `plain`.
        plain: A steady step without offload.
        offloaded: The same steady step with offload.
        repeat: Repeats `offloaded`, and calls back after a number of device events.
    """
    assert plain.timeline is not None
    assert offloaded.timeline is not None
    settings, trace = offloaded.settings, OffloadTrace()
    plain_peak = peak_of(plain)
    moment = same_moment(plain.timeline, plain_peak, offloaded.timeline)
    with trace.tracing():
        number = device_event_number(offloaded.timeline, moment)
        again = repeat(number, lambda: trace.look(live, modules))
    bytes_then = offloaded.timeline.bytes_at(moment)
    assert again.timeline is not None
    bytes_again = again.timeline.bytes_at(device_event_index(again.timeline, number))
    # One unsplit remainder per layer and module is well under a thousandth.
    off_by = bytes_then // 1000 if roughness_bytes(again.timeline) else 0
    assert abs(bytes_again - bytes_then) <= off_by, "a steady step repeats itself"
    expected = {
        name: saved.account(name, live.scenario, settings.min_offloaded_tensor_size)
        for name in settings.offload_modules or ()
    }
    return OffloadAudit(
        plain=plain,
        offloaded=offloaded,
        modules=tuple(trace.module_account(name, of_module) for name, of_module in expected.items()),
        still_resident=tuple(trace.still_resident),
        plain_peak=plain.timeline.place(plain_peak),
        offloaded_peak=offloaded.timeline.place(peak_of(offloaded)),
        freed_bytes=plain.activation_peak_bytes - (bytes_then - offloaded.static_bytes),
    )


def _state(each: _Offloaded) -> State:
    if each.reloaded is not None:
        return "back" if _is_allocated(each.reloaded) else "not due"
    return "still resident" if _is_allocated(each.source) else "away"


def _is_allocated(storage: weakref.ref[Any]) -> bool:
    alive = storage()
    return alive is not None and alive.nbytes() > 0
