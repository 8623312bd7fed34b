"""The calls that passes through layers make to Megatron's offload manager, so that replayed passes make them too.

The manager counts groups. By these counts it decides what it copies to the host, and which copies it brings back before
the backward pass of which layer. So a replayed pass makes the calls of the recorded one, with tensors that the meter
does not see; what is allocated and freed is in the recording. Read in
``megatron/core/pipeline_parallel/fine_grained_activation_offload.py`` (0.16.1, 0.19.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as upstream

from memlab.meter.allocations import StorageAllocation
from memlab.meter.repeater import Repeater
from memlab.upstream.patching import patched

_CALLS = ("on_group_start_forward", "on_group_commit_forward", "on_group_commit_backward", "on_group_start_backward")
Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
_Tag = tuple[int, int]
_FAKE = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Calls:
    """What a pass has asked of the manager."""

    made: tuple[tuple[Any, ...], ...]
    """The calls in order: method and arguments. Saved tensors are numbered in the order in which the forward pass, and
    then the recompute of its backward pass, saved them."""
    copies: tuple[tuple[int, tuple[Any, ...]], ...]
    """For each tensor that was copied to the host or back: the role of the copy in the pass's recording, -1 if the pass
    did not allocate it; and its shape and dtype."""

    @property
    def allocated(self) -> tuple[bool, ...]:
        """For each copy, whether the pass allocated memory for it. If not, it uses a buffer of the offload manager."""
        return tuple(role >= 0 for role, _ in self.copies)


@dataclass(slots=True)
class Saved:
    """What a forward pass has saved with the manager, for its backward."""

    chunk: Any = None
    tags: list[_Tag] = field(default_factory=list)

    def reloaded(self, meter: Repeater) -> list[StorageAllocation | None]:
        """Returns the allocations of saved tensors that are on the device, by number."""
        return [
            meter.storages.allocation_of(each) if isinstance(each, torch.Tensor) else None for each in self._tensors()
        ]

    def host_copies(self, meter: Repeater) -> list[StorageAllocation | None]:
        """Returns the allocations of host copies that the backward of this pass may bring back, the next first.

        They are those of layers before it. It frees the copies of groups that have no pool: those of experts.
        """
        groups = [] if self.chunk is None else self.chunk._groups_to_reload
        at_most = 2 * len({group._name for group in groups})
        states = [state for group in groups[: -at_most - 1 : -1] for state in group._tensors.values()]
        return [meter.storages.allocation_of(state[1]) for state in states if isinstance(state, tuple) and not state[2]]

    def _tensors(self) -> list[Any]:
        return [self.chunk.offload_groups[tag[0] - 1]._tensors.get(tag) for tag in self.tags]


class RepeatedCalls:
    """Notes the calls of a step's stepped passes, and makes those of its replayed ones."""

    def __init__(self, meter: Repeater) -> None:
        self._meter = meter
        self._made: list[tuple[Any, ...]] = []
        self._copies: list[tuple[StorageAllocation | None, tuple[Any, ...]]] = []
        self._pushed: list[StorageAllocation | None] = []
        """What stepped passes have saved with the manager to be copied."""
        self._repeated: list[torch.Tensor] | None = None
        """The copies that a replayed pass makes, while it does."""
        self._stand_ins: dict[tuple[Spec, bool], torch.Tensor] = {}
        """What replayed passes save, by shape, strides and dtype, and whether it stays on the device."""
        self._num_passes = 1
        self.is_noting = False
        """Whether the step offloads activations."""

    @contextmanager
    def noting(self, num_passes: int) -> Iterator[None]:
        """Notes the calls of the block, which takes one step that offloads activations.

        Args:
            num_passes: How many passes through layers tell the manager of their groups, for each micro-batch: forward
                passes, and those that a checkpoint's backward steps again.
        """
        self._num_passes, self.is_noting = num_passes, True
        handler = upstream.ChunkOffloadHandler
        methods: dict[str, Callable[..., Any]] = {name: self._noted(name, getattr(handler, name)) for name in _CALLS}
        methods |= {"tensor_push": self._noted_push(handler.tensor_push)}
        methods |= {"tensor_pop": self._noted_pop(handler.tensor_pop)}
        methods |= {"offload": self._noted_copy(handler.offload, _offload_stand_in)}
        methods |= {"reload": self._noted_copy(handler.reload, _reload_stand_in)}
        prefix = f"{upstream.__name__}.ChunkOffloadHandler"
        try:
            with patched({f"{prefix}.{name}": method for name, method in methods.items()}):
                yield
        finally:
            self.is_noting = False
            self._made.clear()
            self._copies.clear()
            self._pushed.clear()
            self._stand_ins.clear()

    def _noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        has_tensors = name == "on_group_commit_forward"  # those that it shall release: the last argument

        def call(chunk: Any, *args: Any) -> None:
            if self._repeated is None:
                self._made.append((name, chunk, *(args[:-1] if has_tensors else args)))
            method(chunk, *args)

        return call

    def _noted_push(self, tensor_push: Callable[..., Any]) -> Callable[..., Any]:
        def push(chunk: Any, tensor: torch.Tensor) -> Any:
            tag = tensor_push(chunk, tensor)
            if self._repeated is None and isinstance(tag, tuple):
                stays = not getattr(tensor, "offloading_activation", True) or getattr(tensor, "_do_not_offload", False)
                self._made.append(("tensor_push", chunk, tag, spec_of(tensor), stays))
                self._pushed.append(None if stays else self._meter.storages.allocation_of(tensor))
            return tag

        return push

    def _noted_pop(self, tensor_pop: Callable[..., Any]) -> Callable[..., Any]:
        def pop(chunk: Any, tag: Any) -> Any:
            if self._repeated is None and isinstance(tag, tuple):
                self._made.append(("tensor_pop", chunk, tag))
            return tensor_pop(chunk, tag)

        return pop

    def _noted_copy(self, copy: Callable[..., Any], repeat: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*args: Any, **kwargs: Any) -> Any:
            result = (copy if self._repeated is None else repeat)(*args, **kwargs)
            tensor = result[1] if isinstance(result, tuple) else result
            if self._repeated is None:
                self._copies.append((self._meter.storages.allocation_of(tensor), (tensor.shape, tensor.dtype)))
            else:
                self._repeated.append(tensor)
            return result

        return copied

    def position(self) -> tuple[int, int, int]:
        """Returns how many calls and copies stepped passes have made so far, and how many tensors they have saved."""
        return len(self._made), len(self._copies), len(self._pushed)

    def copied_since(self, position: tuple[int, int, int]) -> set[int]:
        """Returns the identities of the copies that a stepped pass has made: they are not the layer's own."""
        return {id(allocation) for allocation, _ in self._copies[position[1] :]}

    def has_saved(self, allocation: StorageAllocation | None, position: tuple[int, int, int]) -> bool:
        """Whether a stepped pass has saved a storage with the manager, to be copied."""
        return any(each is allocation for each in self._pushed[position[2] :])

    def forward_since(self, position: tuple[int, int, int], roles: Mapping[int, int]) -> tuple[Calls, Saved]:
        """Returns the calls of a stepped forward pass, and what it has saved.

        Args:
            position: `position` before it.
            roles: The roles of what it has allocated, by the identity of the allocations.
        """
        saved, made = Saved(), []
        for name, chunk, *given in self._made[position[0] :]:
            saved.chunk = chunk
            if name == "tensor_push":
                saved.tags.append(given.pop(0))
            made.append((name, *given))
        return Calls(tuple(made), self._copies_since(position, roles)), saved

    def backward_since(self, position: tuple[int, int, int], roles: Mapping[int, int], saved: Saved) -> Calls | None:
        """Returns the calls of a stepped backward pass; None if it has used what another forward pass has saved.

        The backward pass of a checkpoint first makes the calls of a forward pass.
        """
        numbers, made = {tag: number for number, tag in enumerate(saved.tags)}, []
        for name, chunk, *given in self._made[position[0] :]:
            if chunk is not saved.chunk:
                return None
            if name == "tensor_pop":
                if given[0] not in numbers:
                    return None
                made.append((name, numbers[given[0]]))
                continue
            if name == "tensor_push":
                numbers[given.pop(0)] = len(numbers)
            made.append((name, *given))
        return Calls(tuple(made), self._copies_since(position, roles))

    def _copies_since(
        self, position: tuple[int, int, int], roles: Mapping[int, int]
    ) -> tuple[tuple[int, tuple[Any, ...]], ...]:
        copies = self._copies[position[1] :]
        return tuple((roles.get(id(allocation), -1), like) for allocation, like in copies)

    def next_groups(self) -> tuple[Any, ...]:
        """Returns what decides about the copies of the next layer's pass, and about those of its backward."""
        if not self.is_noting:
            return ()
        manager = upstream.PipelineOffloadManager.get_instance()
        streams = manager.d2h_stream.number, manager.h2d_stream.number
        if manager._is_warmup:  # everything is copied
            return streams
        chunk, groups, first = self._next_chunk(manager)
        last = first + len(groups) // self._num_passes
        later = {group._name for group in groups[last:]}
        return *streams, *(
            (group._name, group.offload, group._name in later or manager.front_backward_chunk(group._name) is not chunk)
            for group in groups[first:last]
        )

    def _next_chunk(self, manager: Any) -> tuple[Any, list[Any], int]:
        chunk, place = manager._cur_forward_chunk, manager._cached_chunks_index_forward
        if chunk is None or chunk._offloaded_group_index >= len(chunk.offload_groups):
            chunk = manager._cached_chunks_forward[place] if place < len(manager._cached_chunks_forward) else None
        return chunk, *(([], 0) if chunk is None else (chunk.offload_groups, chunk._offloaded_group_index))

    def has_buffers_of(self, calls: Calls) -> bool:
        """Whether a forward pass would take as many host buffers of the manager, and make as many, as these calls."""
        taken, made = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
        for role, like in calls.copies:
            taken[like] += 1
            made[like] += role >= 0
        pools = upstream.PipelineOffloadManager.get_instance().cpu_tensor_pool._pools
        free = {like: len(pools[like]["free"]) if like in pools else 0 for like in taken}
        return all(min(free[like], count) == count - made[like] for like, count in taken.items())

    def repeat_forward(self, calls: Calls) -> tuple[Saved, list[torch.Tensor]]:
        """Makes the calls of a forward pass, and returns what they have saved, and the host buffers in order."""
        manager, saved = upstream.PipelineOffloadManager.get_instance(), Saved()
        with self._repeating(manager) as copies:
            for name, *given in calls.made:
                if name == "on_group_start_forward":
                    saved.chunk = manager.pop_forward_chunk(name=given[0])
                    saved.chunk.on_group_start_forward(*given)
                elif name == "tensor_push":
                    saved.tags.append(saved.chunk.tensor_push(self._stand_in(*given)))
                else:
                    saved.chunk.on_group_commit_forward(*given, [])
        return saved, copies

    def repeat_backward(self, calls: Calls, saved: Saved) -> list[torch.Tensor]:
        """Makes the calls of a backward pass, and returns what they have copied to the host and back, in order."""
        chunk, tags = saved.chunk, saved.tags.copy()
        manager = upstream.PipelineOffloadManager.get_instance()
        with self._repeating(manager) as copies:
            for name, *given in calls.made:
                if name == "tensor_pop":
                    chunk.tensor_pop(tags[given[0]])
                elif name == "tensor_push":
                    tags.append(chunk.tensor_push(self._stand_in(*given)))
                elif name == "on_group_commit_forward":
                    chunk.on_group_commit_forward(*given, [])
                else:
                    if name == "on_group_start_forward":
                        recomputed = manager.pop_forward_chunk(name=given[0])
                        assert recomputed is chunk, "passes of micro-batches that offload do not overlap"
                    getattr(chunk, name)(*given)
        return copies

    def _stand_in(self, spec: Spec, stays: bool) -> torch.Tensor:
        tensor: Any = self._stand_ins.get((spec, stays))
        if tensor is None:
            shape, stride, dtype = spec
            tensor = self._stand_ins[spec, stays] = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if stays:
                tensor.offloading_activation, tensor._do_not_offload = False, True
        result: torch.Tensor = tensor
        return result

    @contextmanager
    def _repeating(self, manager: Any) -> Iterator[list[torch.Tensor]]:
        """Makes the copies of the block without values, and without a look of any mode at them.

        A function mode sees each look at a tensor, and to serve a call that names the host takes longer than the copy.
        """
        copies: list[torch.Tensor] = []
        pool = manager.cpu_tensor_pool
        former = pool.device, pool.pin_memory
        self._repeated, pool.device, pool.pin_memory = copies, _FAKE, False
        try:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                yield copies
        finally:
            self._repeated = None
            pool.device, pool.pin_memory = former


def _offload_stand_in(chunk: Any, source: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True) -> Any:
    """Takes the place of ``ChunkOffloadHandler.offload`` in a replayed pass: its host buffer has no values."""
    if use_cpu_pool:
        copy = chunk.cpu_tensor_pool.allocate(source.shape, dtype=source.dtype)
    else:
        copy = torch.empty(source.shape, dtype=source.dtype, device=_FAKE)
    copy.untyped_storage().memlab_on_host = True  # a stepped pass may take it from the pool
    return source.device, copy, use_cpu_pool


def _reload_stand_in(chunk: Any, state: Any, non_blocking: bool | None = None) -> torch.Tensor:
    """Takes the place of ``ChunkOffloadHandler.reload`` in a replayed pass."""
    _, copy, use_cpu_pool = state
    tensor = torch.empty(copy.shape, dtype=copy.dtype, device=_FAKE)
    if use_cpu_pool:
        chunk.cpu_tensor_pool.free(copy)
    return tensor


def spec_of(tensor: torch.Tensor) -> Spec:
    """Returns what a stand-in of a tensor has in common with it."""
    return tensor.shape, tensor.stride(), tensor.dtype
