"""Checkpoint inputs that outlive a step although nothing needs them, each found by what refers to it.

Megatron's MoE token dispatcher keeps the differentiable routing probabilities as an attribute
(``self.probs = probs``, ``megatron/core/transformer/moe/token_dispatcher.py``, 0.16.1 and 0.19.2). In a recomputed
forward their graph leads back to the checkpoint's detached input, whose AccumulateGrad node keeps the input and its
gradient until the layer's next forward (verl #5251, Megatron-LM #3267). The remedies are in
`memlab.engines.megatron.retention.remedies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Retained:
    """A leaf that a graph keeps allocated, as plain data."""

    holder: str
    """Module and attribute that refer to the graph, such as ``decoder.layers.0.mlp.token_dispatcher.probs``."""
    path: tuple[str, ...]
    """Autograd nodes from the holder's tensor to the leaf, the last of which is ``AccumulateGrad``, which owns it."""
    shape: tuple[int, ...]
    input_bytes: int
    gradient_bytes: int

    def __str__(self) -> str:
        size = f"{list(self.shape)}, {self.input_bytes} bytes and {self.gradient_bytes} of gradient"
        return f"{self.holder} -> {' -> '.join(self.path)} -> leaf {size}"


class Model(Protocol):
    """A model whose modules are looked at."""

    @property
    def layers(self) -> list[Any]:
        """Its transformer layers."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields its modules by name."""


def find_retained(
    model: Model, of_replayed: Mapping[int, Sequence[Retained]], seen: AbstractSet[int] = frozenset()
) -> list[Retained]:
    """Finds the leaves other than parameters that module attributes keep allocated through their graphs.

    Args:
        model: Between two steps.
        of_replayed: By number of a layer whose last pass was replayed and has made no graph: what an equal layer keeps,
            with holders named from the layer on.
        seen: Identities of the storages that `of_replayed` is about; graphs of other layers may keep them too.

    Returns:
        One entry per leaf with the shortest path to it, in the order of the modules.
    """
    numbers = {id(layer): number for number, layer in enumerate(model.layers)}
    found: list[Retained] = []
    seen = set(seen)
    for name, module in model.named_modules():
        replayed = of_replayed.get(numbers.get(id(module), -1), ())
        found += [replace(one, holder=f"{name}.{one.holder}") for one in replayed]
        found += retained_by([(name, module)], seen)
    return found


def retained_by(modules: Iterable[tuple[str, torch.nn.Module]], seen: set[int]) -> list[Retained]:
    """Finds what attributes of modules, or of their token dispatchers, keep through their graphs.

    Args:
        modules: With their names.
        seen: Identities of storages that were found before; those that are found now are added.
    """
    found: list[Retained] = []
    for name, owner, attribute in _differentiable_attributes(modules):
        holder = f"{name}.{attribute}".removeprefix(".")
        for path, leaf in _leaves(vars(owner)[attribute].grad_fn):
            key = leaf.untyped_storage()._cdata
            if isinstance(leaf, torch.nn.Parameter) or key in seen:
                continue
            seen.add(key)
            gradient = leaf.grad
            found.append(
                Retained(
                    holder=holder,
                    path=path,
                    shape=tuple(leaf.shape),
                    input_bytes=leaf.untyped_storage().nbytes(),
                    gradient_bytes=0 if gradient is None else gradient.untyped_storage().nbytes(),
                )
            )
    return found


def drop_graphs(model: Model) -> None:
    """Detaches every tensor that a module keeps with its graph: after a failed step nothing uses the graph."""
    for _, owner, attribute in list(_differentiable_attributes(model.named_modules())):
        vars(owner)[attribute] = vars(owner)[attribute].detach()


def _differentiable_attributes(
    modules: Iterable[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, Any, str]]:
    """Yields an owner's name, the owner, and the name of its attribute that is a tensor with a graph."""
    for name, module in modules:
        for owner_name, owner in owners_of_tensors(name, module):
            for attribute, value in vars(owner).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    yield owner_name, owner, attribute


def owners_of_tensors(name: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what keeps tensors as plain attributes, with names: a module, and its token dispatcher.

    The ``flex`` dispatcher has a manager, which keeps them (``token_dispatcher.py`` in megatron/core/transformer/moe,
    0.16.1 and 0.19.2).
    """
    owner: Any = module
    for attribute in ("token_dispatcher", "_comm_manager", ""):
        if owner is None:
            return
        yield name, owner
        owner = vars(owner).get(attribute)  # `getattr` of a module without it raises an error first
        name = f"{name}.{attribute}"


def _leaves(root: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Walks an autograd graph breadth first; yields each leaf with the names of the nodes on the path to it."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    seen = {root}
    while waiting:
        path, node = waiting.pop(0)
        name = type(node).__name__.removesuffix("Backward")
        if name == "AccumulateGrad":
            yield (*path, name), node.variable
            continue
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                waiting.append(((*path, name), next_node))
