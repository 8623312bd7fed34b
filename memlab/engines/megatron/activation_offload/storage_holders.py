"""What keeps a storage allocated at this moment: autograd nodes, local variables, module attributes, caches.

Called in the middle of a step. No saved tensor is unpacked: what an offload hook put in its place stays on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch

from memlab.engines.megatron.build import LiveModel
from memlab.engines.retained_leaves import owners_of_tensors
from memlab.engines.transformer_engine_caches import caches, tensors_in
from memlab.live_objects import instances_of, with_subclasses
from memlab.meter.module_tracker import module_of


def find_holders(live: LiveModel, modules: list[str], storages: Collection[int]) -> dict[int, tuple[str, ...]]:
    """Finds what refers to storages.

    Args:
        modules: Module names by the code that `Labels` gives autograd nodes.
        storages: Addresses, as ``UntypedStorage._cdata``.

    Returns:
        Holders in words by storage, each once; empty if none was found.
    """
    found: dict[int, dict[str, None]] = {storage: {} for storage in storages}
    kept = ((name, tensor) for name, container, _ in caches() for tensor in tensors_in(container))
    for holder, tensor in (*_autograd_nodes(modules), *_module_attributes(live), *kept, *_local_variables()):
        names = found.get(tensor.untyped_storage()._cdata)
        if names is not None:
            names[holder] = None
    return {storage: tuple(names) for storage, names in found.items()}


def _autograd_nodes(modules: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    # Every node that backward has yet to run is reached from a tensor in Python: the output that backward starts from.
    waiting = [_node_of(tensor) for tensor in instances_of(with_subclasses(torch.Tensor))]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(next_node for next_node, _ in node.next_functions)
        for tensor in _saved_tensors(node):
            yield f"{type(node).__name__} of {modules[module_of(node)] or 'no module'}", tensor


def _node_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # one of several views that a function gave, whose base changed in place: it has no backward
        return None


def _saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
            data = [part.data for part in (saved if isinstance(saved, (tuple, list)) else (saved,))]
        except RuntimeError:  # backward has run this node, and its tensors are freed
            continue
        yield from (value for value in data if isinstance(value, torch.Tensor))


def _module_attributes(live: LiveModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in live.named_modules():
        for owner_name, owner in owners_of_tensors(name, module):
            for attribute, value in vars(owner).items():
                if isinstance(value, torch.Tensor):
                    yield f"attribute {owner_name}.{attribute}", value


def _local_variables() -> Iterator[tuple[str, torch.Tensor]]:
    frame = sys._getframe()
    while frame is not None:
        function = frame.f_code.co_qualname
        if not frame.f_globals.get("__name__", "").startswith("memlab."):
            for name, value in frame.f_locals.items():
                for part in value if isinstance(value, (tuple, list)) else (value,):
                    if issubclass(type(part), torch.Tensor):
                        yield f"local variable {name} of {function}", part
        frame = frame.f_back  # type: ignore[assignment]
