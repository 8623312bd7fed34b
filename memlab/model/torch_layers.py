"""A layer provider without Transformer Engine, through megatron-core's own extension point.

It has the module tree that TE gives a GPT model (norm fused into the linear after it, grouped experts, fused
attention) on the functions of `torch_functions`, so that every recompute and offload module exists here where it
exists on a GPU. Constructors take what ``megatron/core/extensions/transformer_engine.py`` takes (0.16.1, 0.19.2).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.model.torch_functions import CausalAttention, GroupedLinear, Linear, NormLinear, RmsNorm
from memlab.model.upstream_versions import grouped_experts


class TorchProvider(BackendSpecProvider):
    """Megatron's choice of layers for a GPT layer spec, in torch alone."""

    def linear(self) -> type:
        return TorchLinear

    def column_parallel_linear(self) -> type:
        return TorchLinear

    def row_parallel_linear(self) -> type:
        return TorchLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TorchNormLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **_: Any) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return TorchAttention

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        return grouped_experts(TorchGroupedLinear)

    def activation_func(self) -> None:
        return None


class TorchNorm(torch.nn.Module):
    """RMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.epsilon = eps
        self.weight = torch.nn.Parameter(device_empty(hidden_size, config=config).fill_(1.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalises [..., hidden_size]."""
        # TE's norm takes a contiguous copy (transformer_engine/pytorch/ops/basic/rmsnorm.py): the query and key norms
        # then keep their own input, and not the whole of linear_qkv's output.
        result: torch.Tensor = RmsNorm.apply(inputs.contiguous(), self.weight, self.epsilon)
        return result


class TorchLinear(torch.nn.Module):
    """A linear without bias. Returns (output, None): Megatron adds biases itself."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        assert not bias, "both families train without biases"
        self.save_original_input = False
        self.weight = _weight(output_size, input_size, config=config, init_method=init_method)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Maps [..., input_size] to [..., output_size]."""
        return Linear.apply(inputs, self.weight), None


class TorchNormLinear(torch.nn.Module):
    """RMSNorm fused with the linear that follows it."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        assert not bias, "both families train without biases"
        self.epsilon = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(device_empty(input_size, config=config).fill_(1.0))
        self.weight = _weight(output_size, input_size, config=config, init_method=init_method)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Maps [..., input_size] to [..., output_size]."""
        return NormLinear.apply(inputs, self.layer_norm_weight, self.weight, self.epsilon), None


class TorchGroupedLinear(torch.nn.Module):
    """One linear without bias for each local expert, over rows grouped by expert."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias, "both families train without biases"
        self.num_gemms = num_gemms
        self.save_original_input = False
        for index in range(num_gemms):
            weight = _weight(output_size, input_size, config=config, init_method=init_method)
            # Experts that are spread over ranks are reduced in their own group, from their own gradient buffers.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)

    def forward(self, inputs: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        """Maps [rows, input_size] to [rows, output_size], `tokens_per_expert` rows for each expert in turn."""
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return GroupedLinear.apply(inputs, list(tokens_per_expert), self.save_original_input, *weights), None


class TorchAttention(torch.nn.Module):
    """Fused causal attention with grouped queries."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **_: Any
    ) -> torch.Tensor:
        """Attends from [sequence, batch, heads, channels]; returns [sequence, batch, heads * channels]."""
        result: torch.Tensor = CausalAttention.apply(query, key, value, self.softmax_scale)
        return result


def _weight(rows: int, columns: int, *, config: TransformerConfig, init_method: Any) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(device_empty(rows, columns, config=config))
    if config.perform_initialization:
        with get_cuda_rng_tracker().fork():
            init_method(weight)
    return weight


def device_empty(*shape: int, config: TransformerConfig) -> torch.Tensor:
    """Returns a tensor on the device, of the parameters' dtype."""
    return torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
