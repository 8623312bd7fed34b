"""A layer provider without Transformer Engine, through megatron-core's own extension point.

It has the module tree that TE gives a GPT model (norm fused into the linear after it, grouped experts, fused
attention) on the functions of `torch_functions`, so that every recompute and offload module exists here where it
exists on a GPU. Constructors take what ``megatron/core/extensions/transformer_engine.py`` takes (0.16.1, 0.19.2).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from memlab.engines.attention.all_to_all_attention import AllToAllAttention
from memlab.engines.attention.context_parallel import RingAttention
from memlab.engines.attention.flash_attention import flash_attention, packed_flash_attention
from memlab.engines.attention.fused_attention import CausalAttention, PackedAttention
from memlab.engines.attention.packed_context_parallel import PackedRingAttention
from memlab.engines.attention.unfused_attention import unfused_attention
from memlab.engines.megatron.layers.tensor_parallel import split_of
from memlab.engines.megatron.layers.torch_functions import (
    GroupedLinear,
    Linear,
    Norm,
    NormLinear,
    Returned,
)
from memlab.engines.megatron.layers.weight_gradients import set_fusion
from memlab.engines.megatron.megatron_versions import grouped_experts


class TorchProvider(BackendSpecProvider):
    """Megatron's layers for a GPT layer spec, in torch without Transformer Engine."""

    def linear(self) -> type:
        return TorchLinear

    def column_parallel_linear(self) -> type:
        return TorchColumnLinear

    def row_parallel_linear(self) -> type:
        return TorchRowLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TorchNormLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **_: Any) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return TorchAttention

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        return grouped_experts(TorchGroupedLinear, TorchGroupedRowLinear)

    def activation_func(self) -> None:
        return None


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm, as the config says."""

    function: ClassVar[type[Norm]] = Norm

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.epsilon = eps
        self.weight, self.bias = _of_norm(hidden_size, config=config)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalises [..., hidden_size]."""
        # TE's norm takes a contiguous copy (transformer_engine/pytorch/ops/basic/rmsnorm.py): the query and key norms
        # then save their own input instead of linear_qkv's whole output.
        return self.function.apply(inputs.contiguous(), self.weight, self.bias, self.epsilon)


class TorchLinear(torch.nn.Module):
    """A linear. Returns its output and its bias, which Megatron adds itself."""

    way: ClassVar[Literal["column", "row"] | None] = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        parallel_mode: str | None = None,
        tp_comm_buffer_name: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.save_original_input = False
        self.split = split_of(self.way, config, tp_comm_buffer_name)
        ranks = config.tensor_model_parallel_size
        rows, columns = _part(self.way, output_size, input_size, ranks)
        self.weight = _weight(rows, columns, config=config, init_method=init_method, way=self.way)
        self.bias = _bias(rows, config=config, way=self.way) if bias else None
        if parallel_mode == "duplicated":  # as of a norm's weight
            self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps [..., input_size] to [..., output_size]."""
        # TE's modules take a contiguous copy of what they save (`prepare_forward`, module/base.py).
        return Linear.apply(inputs.contiguous(), self.weight, self.split), self.bias


class TorchColumnLinear(TorchLinear):
    """Each rank makes a part of the output's features."""

    way = "column"


class TorchRowLinear(TorchLinear):
    """Each rank takes a part of the input's features."""

    way = "row"


class TorchNormLinear(torch.nn.Module):
    """A norm fused with the linear that follows it.

    Of queries, keys and values the linear adds the bias; that of an MLP is left to Megatron, and returned.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool = False,
        tp_comm_buffer_name: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.split = split_of("column", config, tp_comm_buffer_name, has_norm=True)
        self.layer_norm_weight, self.layer_norm_bias = _of_norm(input_size, config=config)
        rows = output_size // config.tensor_model_parallel_size
        self.weight = _weight(rows, input_size, config=config, init_method=init_method, way="column")
        self.bias = _bias(rows, config=config, way="column") if bias else None
        self.skip_bias_add = skip_bias_add
        self.return_layernorm_output = self.return_layernorm_output_gathered = False

    def forward(self, inputs: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
        """Maps [..., input_size] to [..., output_size]; returns what it normalised too where an adapter reads it."""
        returned: Returned = "gathered" if self.return_layernorm_output_gathered else "own"
        returned = returned if self.return_layernorm_output else None
        inputs = inputs.contiguous()  # as above: the latent vector of keys and values is a slice
        added, left = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        weights = self.layer_norm_weight, self.layer_norm_bias, self.weight, added
        # TE overlaps this gather in passes with gradients only, not in the first one of a checkpoint.
        split = self.split if torch.is_grad_enabled() else self.split.without_gathers()
        return NormLinear.apply(inputs, *weights, self.epsilon, split, returned), left


class TorchGroupedLinear(torch.nn.Module):
    """One linear for each local expert, over rows grouped by expert. Biases of the second linear are returned.

    Where experts are split over ranks too, Megatron's dispatcher gathers and scatters their rows.
    """

    way: ClassVar[Literal["column", "row"]] = "column"

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.num_gemms = num_gemms
        self.save_original_input = False
        rows, columns = expert_part(self.way, output_size, input_size, config)
        is_spread = config.expert_model_parallel_size > 1
        random_state = get_expert_parallel_rng_tracker_name() if is_spread else _MODEL_PARALLEL
        # Once for all experts: to save and restore a random state takes longer than to make a fake weight.
        with _drawing_from(random_state, config):
            for index in range(num_gemms):
                weight = _new_weight(rows, columns, config=config, init_method=init_method, way=self.way)
                # Experts that are spread over ranks are reduced in their own group, from their own gradient buffers.
                weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                self.register_parameter(f"weight{index}", weight)
        for index in range(num_gemms if bias else 0):
            vector = _bias(rows, config=config, way=self.way)
            vector.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"bias{index}", vector)
        self.has_bias = bias

    def forward(
        self, inputs: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Maps [rows, input_size] to [rows, output_size], `tokens_per_expert` rows for each expert in turn."""
        weights, biases = self.of_each("weight"), self.of_each("bias") if self.has_bias else []
        added = [] if self.skip_bias_add else biases
        output = GroupedLinear.apply(inputs, list(tokens_per_expert), self.save_original_input, *weights, *added)
        return output, biases if self.skip_bias_add and biases else None

    def of_each(self, name: str) -> list[torch.Tensor]:
        """Returns the ``weight`` or the ``bias`` of each expert."""
        return [getattr(self, f"{name}{index}") for index in range(self.num_gemms)]


class TorchGroupedRowLinear(TorchGroupedLinear):
    """The second linear of the experts."""

    way = "row"


class TorchAttention(torch.nn.Module):
    """Causal attention with grouped queries, by the config's ``attention_backend``; ``auto`` is cuDNN's, fused."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__()
        if softmax_scale is None:
            assert config.kv_channels is not None
            softmax_scale = config.kv_channels**-0.5
        self.softmax_scale = softmax_scale
        ring = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self.context_parallel_group = ring
        self.config = config
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if has_window else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(device_empty(heads, config=config).zero_())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attends from [sequence, batch, heads, channels]; returns [sequence, batch, heads * channels].

        Packed sequences have no batch dimension.
        """
        # A change of the training state changes the config.
        group, is_flash = self.context_parallel_group, self.config.attention_backend is AttnBackend.flash
        if packed_seq_params is not None:
            own, size = value.shape[-1], query.shape[-1]
            if own != size and self.config.memlab_pads_packed_values:
                padded = torch.nn.functional.pad(value, (0, size - own))
                output = self(query, key, padded, attention_mask, packed_seq_params)
                return output.view(len(output), -1, size)[..., :own]
            ends = packed_seq_params.cu_seqlens_q if group is None else packed_seq_params.cu_seqlens_q_padded
            if is_flash:
                return packed_flash_attention(query, key, value, self.softmax_scale, ends, group)
            if group is not None:
                return PackedRingAttention.apply(query, key, value, self.softmax_scale, ends, group)
            return PackedAttention.apply(query, key, value, self.softmax_scale, ends, self.window, self._sinks())
        drop = self.config.attention_dropout if self.training else 0.0
        if is_flash:
            heads_go = self.config.cp_comm_type == "a2a"
            return flash_attention(query, key, value, self.softmax_scale, drop, group, exchanges_heads=heads_go)
        if group is not None and self.config.cp_comm_type == "a2a":
            return AllToAllAttention.apply(query, key, value, self.softmax_scale, group, self.window, self._sinks())
        if group is not None:
            return RingAttention.apply(query, key, value, self.softmax_scale, group)
        if self.config.attention_backend is AttnBackend.unfused:
            overwrites = self.config.memlab_versions.overwrites_gradients_of_scores
            return unfused_attention(query, key, value, self.softmax_scale, drop, overwrites_gradients=overwrites)
        return CausalAttention.apply(query, key, value, self.softmax_scale, drop, self.window, self._sinks())

    def _sinks(self) -> torch.Tensor | None:
        """Returns the sinks as cuDNN takes them (``DotProductAttention.forward``, TE 2.16.1)."""
        return None if self.softmax_offset is None else self.softmax_offset.reshape(1, -1, 1, 1).to(torch.float32)


def _part(way: str | None, rows: int, columns: int, ranks: int) -> tuple[int, int]:
    return rows // (ranks if way == "column" else 1), columns // (ranks if way == "row" else 1)


def expert_part(way: str, rows: int, columns: int, config: TransformerConfig) -> tuple[int, int]:
    """Returns the shape of this rank's part of an expert's weight."""
    return _part(way, rows, columns, config.expert_tensor_parallel_size)


def _of_norm(size: int, *, config: TransformerConfig) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    weight = _vector(size, 1.0, config=config, is_summed=True)
    has_bias = config.normalization == "LayerNorm"
    return weight, _vector(size, 0.0, config=config, is_summed=True) if has_bias else None


def _bias(size: int, *, config: TransformerConfig, way: str | None) -> torch.nn.Parameter:
    bias = _vector(size, 0.0, config=config, is_summed=way == "row")
    if way == "column":
        set_tensor_model_parallel_attributes(bias, is_parallel=True, dim=0, stride=1)
    return bias


def _vector(size: int, value: float, *, config: TransformerConfig, is_summed: bool) -> torch.nn.Parameter:
    vector = torch.nn.Parameter(device_empty(size, config=config).fill_(value))
    # Each rank has a part of the sequence: Megatron sums these gradients (distributed/finalize_model_grads.py).
    vector.sequence_parallel = config.sequence_parallel and is_summed  # type: ignore[attr-defined]
    return vector


_MODEL_PARALLEL = "model-parallel-rng"
"""Megatron's default random state of weights; ranks that have other experts draw them from another state."""


def _weight(
    rows: int, columns: int, *, config: TransformerConfig, init_method: Any, way: str | None
) -> torch.nn.Parameter:
    with _drawing_from(_MODEL_PARALLEL, config):
        return _new_weight(rows, columns, config=config, init_method=init_method, way=way)


def _drawing_from(random_state: str, config: TransformerConfig) -> AbstractContextManager[None]:
    return get_cuda_rng_tracker().fork(random_state) if config.perform_initialization else nullcontext()


def _new_weight(
    rows: int, columns: int, *, config: TransformerConfig, init_method: Any, way: str | None
) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(device_empty(rows, columns, config=config))
    set_fusion(weight, config)
    if way is not None:
        # Megatron leaves the gradients of all others but the first rank's out of the norm, as copies of them.
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=1 if way == "row" else 0, stride=1)
    if config.perform_initialization and not weight.is_meta:  # a fake weight has no values
        init_method(weight)
    return weight


def device_empty(*shape: int, config: TransformerConfig) -> torch.Tensor:
    """Returns a tensor on the device, of the parameters' dtype."""
    return torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
