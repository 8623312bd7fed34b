"""What fine-grained activation offload transfers in a step: bytes by module, and why a module transferred none.

Megatron counts only in its manager's warm-up, and prints. `OffloadWatch` watches the groups themselves:
``OffloadTensorGroup`` of ``megatron/core/pipeline_parallel/fine_grained_activation_offload.py`` (0.16.1, 0.19.2)
receives a tuple for a tensor that was offloaded, and the tensor itself for one that stayed on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as upstream

from memlab.config import without_effect
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.meter.labels import keeping
from memlab.upstream.patching import patched


class OffloadWatch:
    """Counts one step's activation offload."""

    def __init__(self) -> None:
        self.transferred_bytes: dict[str, int] = {}
        self.misled = False
        """Whether a forward-only pass ran with offload on since the settings were applied."""
        self._largest_kept_elements: dict[str, int] = {}

    @contextmanager
    def watching(self, on_host: Callable[[torch.Tensor], object]) -> Iterator[None]:
        """Counts what the block offloads, from zero, and calls `on_host` with each host copy."""
        self.transferred_bytes.clear()
        self._largest_kept_elements.clear()
        push_tensor = upstream.OffloadTensorGroup.push_tensor
        record_offload_event = upstream.OffloadTensorGroup.record_offload_event

        def count_transferred(group: Any, tag: Any, tensor: Any) -> None:
            if isinstance(tensor, tuple):
                self.transferred_bytes[group._name] = self.transferred_bytes.get(group._name, 0) + tensor[1].nbytes
                on_host(tensor[1])
            push_tensor(group, tag, tensor)

        def count_kept(group: Any, stream: Any) -> None:
            kept = [tensor.numel() for tensor in group._tensors.values() if _could_be_offloaded(tensor)]
            self._largest_kept_elements[group._name] = max(self._largest_kept_elements.get(group._name, 0), *kept, 0)
            record_offload_event(group, stream)

        reload = upstream.ChunkOffloadHandler.reload

        def reload_as_activation(handler: Any, *args: Any, **kwargs: Any) -> Any:
            with keeping("activations"):
                return reload(handler, *args, **kwargs)

        replacements = {
            "ChunkOffloadHandler.reload": reload_as_activation,
            "OffloadTensorGroup.push_tensor": count_transferred,
            "OffloadTensorGroup.record_offload_event": count_kept,
            "print_offload_summary_table": lambda total_offload_bytes: None,
        }
        with patched({f"{upstream.__name__}.{name}": value for name, value in replacements.items()}):
            yield

    def without_effect(self, scenario: Scenario, settings: MemorySettings) -> dict[str, str]:
        """Returns the reason by ``offload_modules:name``, for each module that transferred nothing in this step.

        Some reasons follow from settings and architecture (`memlab.config.without_effect`); the others only from a
        step.
        """
        reasons = without_effect.of_settings(settings, scenario.architecture) | without_effect.on_this_rank(
            settings, scenario
        )
        reasons |= without_effect.of_full_recompute(settings, scenario)
        fraction, delta = settings.activation_offload_fraction, settings.delta_offload_bytes_across_pp_ranks
        if settings.offload_modules and delta and scenario.layout.pipeline_stage == 0:
            reasons["delta_offload_bytes_across_pp_ranks"] = (
                "only the stages after the first leave more bytes on the device, and this rank is in the first stage"
            )
        for name in settings.offload_modules or ():
            key = f"offload_modules:{name}"
            if self.transferred_bytes.get(name) or key in reasons:
                continue
            largest = self._largest_kept_elements.get(name)
            if largest is None and self.misled:
                reasons[key] = (
                    "Megatron's offload manager took a forward-only pass for its warm-up, or for this step's passes: "
                    "suspend offload in forward-only passes, and apply the settings again"
                )
            elif largest is None and (fraction < 1 or delta):
                reasons[key] = (
                    "Megatron keeps the last group of each name on the device, and with activation_offload_fraction "
                    f"{fraction:g} and delta_offload_bytes_across_pp_ranks {delta} it also keeps all other groups there"
                )
            elif largest is None:
                reasons[key] = (
                    "Megatron keeps the last group of each name on the device, and this rank's passes make no other"
                )
            else:
                reasons[key] = (
                    f"the largest tensor saved there has {largest} elements, under min_offloaded_tensor_size "
                    f"{settings.min_offloaded_tensor_size}"
                )
        return reasons


def _could_be_offloaded(tensor: Any) -> bool:
    # Parameters are marked to stay on the device: by one attribute in 0.16, by another in 0.19.
    marked = not getattr(tensor, "offloading_activation", True) or getattr(tensor, "_do_not_offload", False)
    return isinstance(tensor, torch.Tensor) and not marked
