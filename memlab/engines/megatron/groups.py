"""Parameters, gradients and optimizer state of a Megatron model, as they are transferred between device and host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memlab.engines.megatron import cpu_optimizer
from memlab.engines.megatron.build import LiveModel
from memlab.engines.megatron.data_parallel_overlap import gather_now
from memlab.engines.megatron.fp8_caches import tensors_of_parameter


class MegatronGroups:
    """Implements `memlab.engines.protocol.Groups`."""

    def __init__(self, live: LiveModel) -> None:
        self._live = live

    def parameters(self) -> list[torch.Tensor]:
        """Returns DDP's buffers of parameters, those of experts included, and the frozen parameters."""
        frozen = (parameter for parameter in self._live.parameters() if not parameter.requires_grad)
        tensors = [tensor for parameter in frozen for tensor in tensors_of_parameter(parameter)]
        for buffer in self._buffers():
            # Without the distributed optimizer DDP leaves the parameters where they are, and where it gathers in the
            # gradients' buffer.
            reuses = buffer.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
            if buffer.param_data is None or reuses:
                tensors += [tensor for parameter in buffer.params for tensor in tensors_of_parameter(parameter)]
            if buffer.param_data is not None and not (reuses and buffer.param_dtype == torch.uint8):
                tensors.append(buffer.param_data)
        return tensors

    def gradients(self) -> list[torch.Tensor]:
        """Returns DDP's buffers of gradients, and the fp32 copies of bf16 gradients."""
        tensors = [buffer.grad_data for buffer in self._buffers()]
        tensors += [copy for _, copy in self._copied_gradients()]
        in_buffers = self._storages_of_buffers()
        for optimizer in self._optimizers():
            copies = cpu_optimizer.gradients(optimizer)
            tensors += [copy for copy in copies if copy.untyped_storage()._cdata not in in_buffers]
        return tensors

    def optimizer_state(self) -> list[torch.Tensor]:
        """Returns the rank's main parameters, their moments and scales, and what CPU optimizers keep."""
        tensors: list[torch.Tensor] = []
        with torch._C.DisableTorchFunction():
            for optimizer, main_parameter in self._main_parameters():
                # A parameter that requires no gradient is what its `data` would be a view of.
                tensors.append(main_parameter.data if main_parameter.requires_grad else main_parameter)
                for parameter in (main_parameter, *getattr(main_parameter, "experts", ())):
                    tensors.extend(tensors_in(optimizer.state.get(parameter)))
                    tensors.extend(tensors_in(getattr(optimizer, "_scales", {}).get(parameter)))
            for optimizer in self._optimizers():
                tensors.extend(cpu_optimizer.state_tensors(optimizer))
        return tensors

    def drop_copied_gradients(self) -> int:
        """Frees the fp32 copies of gradients; returns their bytes."""
        num_bytes = 0
        for owner, copy in self._copied_gradients():
            num_bytes += copy.untyped_storage().nbytes()
            owner.grad = None
        return num_bytes

    def gather(self) -> None:
        """Gathers parameters that DDP would gather in the next forward."""
        gather_now(self._live)

    def _copied_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns main parameters with their gradients where Megatron has copied bf16 gradients to fp32."""
        with torch._C.DisableTorchFunction():
            gradients = [(parameter, parameter.grad) for _, parameter in self._main_parameters()]
            in_buffers = self._storages_of_buffers()
            return [
                (owner, copy)
                for owner, copy in gradients
                if copy is not None and copy.untyped_storage()._cdata not in in_buffers
            ]

    def _storages_of_buffers(self) -> set[int]:
        return {buffer.grad_data.untyped_storage()._cdata for buffer in self._buffers()}

    def _optimizers(self) -> list[Any]:
        return [part.optimizer for part in self._live.optimizers] + self._live.discarded_optimizers

    def _buffers(self) -> Iterator[Any]:
        yield from (buffer for _, buffer in self._live.buffers())

    def _main_parameters(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for part in self._live.optimizers:
            for group in part.optimizer.param_groups:
                yield from ((part.optimizer, main_parameter) for main_parameter in group["params"])


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that own memory in a parameter's state; an FP8 state consists of several."""
    if type(state) is torch.Tensor:
        yield state
    else:
        parts = state if isinstance(state, dict) else getattr(state, "__dict__", {})
        for part in parts.values():
            yield from tensors_in(part)
