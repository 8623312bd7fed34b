"""The layer provider for fake tensors: `TorchProvider`'s layers, with one operation for all experts of a layer.

Each expert has its own weights, as on a GPU. Their gradients, main parameters and moments are then hundreds of blocks
of 3 to 12 MiB, of which the allocator cuts several from a segment of 20 MiB, and leaves the rest of the segment unused.
With one tensor for all experts, Qwen3-30B-A3B with 4 layers would reserve 1 GiB less than it does on an H200.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.engines.megatron.layers.torch_layers import TorchGroupedLinear, TorchProvider
from memlab.engines.megatron.layers.weight_gradients import empty_weight_gradient
from memlab.engines.megatron.megatron_versions import grouped_experts
from memlab.meter.labels import multiplies


class FakeProvider(TorchProvider):
    """Megatron's layers for a GPT layer spec, for tensors without values."""

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        return grouped_experts(FakeGroupedLinear, FakeGroupedRowLinear)


class FakeGroupedLinear(TorchGroupedLinear):
    """`TorchGroupedLinear` without its matrix products."""

    def forward(
        self, inputs: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Maps [rows, input_size] to [rows, output_size], `tokens_per_expert` rows for each expert in turn."""
        assert sum(tokens_per_expert) == len(inputs), f"{tokens_per_expert} rows for {len(inputs)}"
        parameters: list[torch.Tensor] = [*self.parameters(recurse=False)]  # weights, then biases
        if self.has_bias and self.skip_bias_add:
            return _GroupedLinear.apply(inputs, *parameters[: self.num_gemms]), parameters[self.num_gemms :]
        return _GroupedLinear.apply(inputs, *parameters), None


class FakeGroupedRowLinear(FakeGroupedLinear):
    """The second linear of the experts."""

    way = "row"


class _GroupedLinear(torch.autograd.Function):
    """Allocates and saves what `torch_functions.GroupedLinear` does."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs if weights[0].requires_grad else None, *weights)
        ctx.shape, ctx.parameters = inputs.shape, weights
        output = inputs.new_empty((inputs.shape[0], weights[0].shape[0]))
        multiplies("grouped linear")
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        with torch._C.DisableTorchFunction():  # they are where the weights are
            grad_inputs = grad.new_empty(ctx.shape)
            if inputs is None:
                return grad_inputs, *[None] * len(weights)
            return grad_inputs, *map(_empty_gradient, ctx.parameters)


def _empty_gradient(parameter: torch.Tensor) -> torch.Tensor:
    return empty_weight_gradient(parameter) if parameter.dim() > 1 else parameter.new_empty(parameter.shape)
