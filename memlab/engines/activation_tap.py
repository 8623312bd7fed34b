"""A tap on a layer's output: something besides a checkpoint that refers to the checkpoint's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Tapped:
    """Facts about the tensor that a tap keeps, as plain data: nothing here reads the tensor's memory."""

    layer: int
    shape: tuple[int, ...]
    tensor_bytes: int
    """The size of a tensor of that shape."""
    storage_bytes: int
    """The size of its storage now."""

    @property
    def is_dangling(self) -> bool:
        """Whether a read would go past the storage's end."""
        return self.storage_bytes < self.tensor_bytes

    def __str__(self) -> str:
        fate = "safe to read"
        if self.is_dangling:
            fate = "a read is a use after free: on a GPU an illegal memory access, reported later and somewhere else"
        return (
            f"output of decoder.layers.{self.layer}: shape {list(self.shape)} of {self.tensor_bytes} bytes, "
            f"{self.storage_bytes} bytes in its storage: {fate}"
        )


class Tap:
    """Keeps a layer's output after each forward without gradients: its storage is also the next checkpoint's input.

    Args:
        layer: Which one, counted from 0.
        every: Appends the output of every forward to a list, with or without gradients: a leak.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], layer: int, *, every: bool = False) -> None:
        self._layer = layer
        self._every = every
        self._kept: list[torch.Tensor] = []
        self._handle = layers[layer].register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        if self._every:
            self._kept.append(output[0])
        elif not torch.is_grad_enabled():
            self._kept = [output[0]]

    def look(self) -> Tapped | None:
        """Returns facts about the last output; None if nothing has been kept."""
        if not self._kept:
            return None
        tensor = self._kept[-1]
        return Tapped(
            layer=self._layer,
            shape=tuple(tensor.shape),
            tensor_bytes=tensor.nbytes,
            storage_bytes=tensor.untyped_storage().nbytes(),
        )

    def take_off(self) -> None:
        """Removes the hook and drops the output."""
        self._handle.remove()
        self._kept.clear()
