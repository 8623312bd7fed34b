"""The layer provider for fake tensors: `TorchProvider`'s layers, and the experts' weights of a layer as one parameter.

A layer of 128 experts has 256 weights, and Megatron runs some operations for each when it builds DDP and the optimizer
and in every step. Only the bytes of fake tensors matter, and one parameter has as many. The CPU optimizer takes whole
parameters, each with its own block of pinned memory: for it there are as many parameters as on a GPU
(``config.memlab_separate_experts``).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.model.layers.torch_layers import TorchProvider, device_empty, expert_part
from memlab.model.megatron_versions import grouped_experts


class FakeProvider(TorchProvider):
    """Megatron's layers for a GPT layer spec, for tensors without values."""

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        return grouped_experts(StackedGroupedLinear, StackedGroupedRowLinear)


class StackedGroupedLinear(torch.nn.Module):
    """`TorchGroupedLinear` with one weight [num_gemms, output_size, input_size], or with one for each expert."""

    way: ClassVar[Literal["column", "row"]] = "column"

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias, "both families train without biases"
        self.save_original_input = False
        rows, columns = expert_part(self.way, output_size, input_size, config)
        shapes: dict[str, tuple[int, ...]] = {"weight": (num_gemms, rows, columns)}
        if getattr(config, "memlab_separate_experts", False):
            shapes = {f"weight{index}": (rows, columns) for index in range(num_gemms)}
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(device_empty(*shape, config=config))
            weight.num_experts = num_gemms // len(shapes)  # type: ignore[attr-defined]  # `build._cut` reads it
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(name, weight)

    def forward(self, inputs: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        """Maps [rows, input_size] to [rows, output_size], `tokens_per_expert` rows for each expert in turn."""
        assert sum(tokens_per_expert) == len(inputs), f"{tokens_per_expert} rows for {len(inputs)}"
        return _StackedLinear.apply(inputs, *self.parameters(recurse=False)), None


class StackedGroupedRowLinear(StackedGroupedLinear):
    """The second linear of the experts."""

    way = "row"


class _StackedLinear(torch.autograd.Function):
    """Allocates and saves what `torch_functions.GroupedLinear` does."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, *weights)
        return inputs.new_empty((inputs.shape[0], weights[0].shape[-2]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        inputs, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        return grad.new_empty(inputs.shape), *(torch.empty_like(weight) for weight in weights)
