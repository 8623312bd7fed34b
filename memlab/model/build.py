"""From a Scenario to a live Megatron model on one rank: GPTModel, DistributedDataParallel, distributed optimizer.

The same code serves every backend; a backend gives the layer provider. Written against megatron-core 0.16.1 and
0.19.2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.layout import Layout
from memlab.scenario import Scenario
from memlab.settings import MemorySettings

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Weights stay as they are from step to step: a loss that differs between two settings is then a setting's fault. Adam
# still allocates and updates everything that it does at any other rate.
LEARNING_RATE = 0.0

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(.*)")


@dataclass(slots=True, eq=False)
class LiveModel:
    """What a training step needs, as Megatron made it."""

    scenario: Scenario
    config: TransformerConfig
    chunks: list[Any]
    """DistributedDataParallel model chunks, in the model's order; several where pipeline stages are interleaved."""
    optimizer: Any
    """Megatron's (chained) distributed optimizer."""
    forward_backward: Callable[..., Any]
    """Megatron's schedule for this pipeline layout."""

    @property
    def chunk(self) -> Any:
        """The one chunk of a rank whose stages are not interleaved; ``chunk.module`` is the GPTModel."""
        (chunk,) = self.chunks
        return chunk

    @property
    def layers(self) -> list[Any]:
        """The transformer layers of all chunks."""
        return [layer for chunk in self.chunks for layer in chunk.module.decoder.layers]

    def modules(self) -> Iterator[Any]:
        """Yields every module of every chunk."""
        for chunk in self.chunks:
            yield from chunk.modules()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yields every parameter of every chunk."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields the modules of every GPTModel by name; layers are numbered through, as `layers` are."""
        first = 0
        for chunk in self.chunks:
            for name, module in chunk.module.named_modules():
                layer = _LAYER.match(name)
                yield (f"{layer[1]}{first + int(layer[2])}{layer[3]}" if layer else name), module
            first += len(chunk.module.decoder.layers)

    def buffers(self) -> Iterator[tuple[str, Any]]:
        """Yields DDP's buffers of parameters and gradients, each with the name of the attribute that has it."""
        # Experts have buffers of their own where they are spread over ranks; forgetting them was verl #1766.
        for name in ("buffers", "expert_parallel_buffers"):
            for chunk in self.chunks:
                for buffer in getattr(chunk, name):
                    yield name, buffer


def build(
    scenario: Scenario, provider: type, distributed_backend: str, settings: MemorySettings | None = None
) -> LiveModel:
    """Builds the model on one rank, with its process group.

    Args:
        scenario: What to build.
        provider: A `BackendSpecProvider` class, in the place of Megatron's ``TESpecProvider``.
        distributed_backend: ``nccl``, or ``fake`` for a rank that is alone.
        settings: Recompute and offload settings to build with; a live model takes others by `toggles.apply`.

    Returns:
        The model, its optimizer and its schedule. `holders.release` gives them back.
    """
    join_process_group(distributed_backend, scenario.seed, scenario.layout)
    config = transformer_config(scenario, settings or MemorySettings())
    config.memlab_routing = scenario.routing
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = []
    for number in range(scenario.layout.virtual_pipeline_model_parallel_size):
        model = gpt_model(scenario, config, provider, number)
        if scenario.expert_buffers:
            _spread_experts(model)
        # One bucket for each chunk but the first, as Megatron-LM's `get_model` does (megatron/training/training.py).
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=number > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.0,
            bf16=scenario.dtype == "bf16",
            params_dtype=_DTYPES[scenario.dtype],
            use_distributed_optimizer=True,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    _fuse_adam(optimizer)
    return LiveModel(scenario, config, chunks, optimizer, get_forward_backward_func())


def _spread_experts(model: GPTModel) -> None:
    # What Megatron's expert layers write on their weights under expert parallelism; DDP reads it to sort parameters
    # into `expert_parallel_buffers` (megatron/core/distributed/distributed_data_parallel.py).
    for layer in model.decoder.layers:
        for weight in layer.mlp.experts.parameters():
            weight.allreduce = False


def _fuse_adam(optimizer: Any) -> None:
    # Without TE or Apex Megatron takes torch's AdamW; fused, it updates in one kernel without temporaries, like TE's.
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def gpt_model(scenario: Scenario, config: TransformerConfig, provider: type, chunk: int = 0) -> GPTModel:
    """Builds Megatron's GPTModel with the layers of a provider: one of the chunks of this rank's pipeline stage."""
    architecture = scenario.architecture
    # The spec is Transformer Engine's own; only the classes in it are the provider's.
    with patch.object(gpt_layer_specs, "TESpecProvider", provider, create=True):
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=architecture.num_moe_experts,
            moe_grouped_gemm=architecture.is_moe,
            qk_layernorm=architecture.qk_layernorm,
        )
    layout, stage = scenario.layout, parallel_state.get_pipeline_model_parallel_rank()
    num_layers = layout.layers_of_stage(stage, scenario.num_layers) // layout.virtual_pipeline_model_parallel_size
    # Stages have numbers of chunks only where they are interleaved.
    place: dict[str, Any] = {"vp_stage": chunk if config.virtual_pipeline_model_parallel_size else None}
    block = gpt_layer_specs.TransformerBlockSubmodules(
        layer_specs=[spec] * num_layers, layer_norm=provider().layer_norm(rms_norm=True)
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=architecture.vocab_size,
        max_sequence_length=scenario.seq_length,
        position_embedding_type="rope",
        rotary_base=int(architecture.rotary_base),
        rotary_percent=architecture.rotary_percent,
        share_embeddings_and_output_weights=architecture.share_embeddings_and_output_weights,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
        **place,
    )


def transformer_config(scenario: Scenario, settings: MemorySettings) -> TransformerConfig:
    """Returns Megatron's config; it checks the settings once more by Megatron's own rules."""
    architecture = scenario.architecture
    dtype = _DTYPES[scenario.dtype]
    moe: dict[str, Any] = {}
    if architecture.is_moe:
        moe = {
            "num_moe_experts": architecture.num_moe_experts,
            "moe_router_topk": architecture.moe_router_topk,
            "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
            "moe_aux_loss_coeff": architecture.moe_aux_loss_coeff,
            "moe_router_pre_softmax": architecture.moe_router_pre_softmax,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
        }
    return TransformerConfig(
        num_layers=scenario.num_layers,
        tensor_model_parallel_size=scenario.layout.tensor_model_parallel_size,
        context_parallel_size=scenario.layout.context_parallel_size,
        pipeline_model_parallel_size=scenario.layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=_interleaved(scenario.layout),
        # Two stages would exchange several tensors with each other in one batch (megatron/training/arguments.py).
        overlap_p2p_comm=_interleaved(scenario.layout) is not None,
        batch_p2p_comm=_interleaved(scenario.layout) is None,
        num_layers_in_first_pipeline_stage=scenario.layout.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=scenario.layout.num_layers_in_last_pipeline_stage,
        expert_model_parallel_size=scenario.layout.expert_model_parallel_size,
        expert_tensor_parallel_size=scenario.layout.expert_tensor_size,
        sequence_parallel=scenario.layout.sequence_parallel,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.layernorm_epsilon,
        qk_layernorm=architecture.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=scenario.dtype == "bf16",
        use_cpu_initialization=False,
        finalize_model_grads_func=finalize_model_grads,
        **moe,
        **settings_fields(settings),
    )


def settings_fields(settings: MemorySettings) -> dict[str, Any]:
    """Returns the settings as fields of Megatron's TransformerConfig."""
    return {
        "recompute_granularity": settings.recompute_granularity,
        "recompute_method": settings.recompute_method,
        "recompute_num_layers": settings.recompute_num_layers,
        "recompute_modules": None if settings.recompute_modules is None else list(settings.recompute_modules),
        "fine_grained_activation_offloading": settings.offload_modules is not None,
        "offload_modules": list(settings.offload_modules or ()),
        "min_offloaded_tensor_size": settings.min_offloaded_tensor_size,
    }


def join_process_group(distributed_backend: str, seed: int, layout: Layout) -> None:
    """Joins the job's process group, which is this rank alone without a layout, and seeds Megatron's random states.

    Raises:
        ValueError: If the layout has more ranks than were started.
    """
    if distributed_backend in ("fake", "simulated"):
        # Importing it registers the backend. On one rank every collective is the identity, and this one allocates
        # nothing for it, like NCCL; gloo would copy the whole gradient buffer.
        from torch.testing._internal.distributed import fake_pg  # noqa: F401
    if distributed_backend == "simulated":
        _join_alone("fake", layout)
        _initialize(seed, layout)
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != layout.world_size:
        raise ValueError(
            f"the layout ({layout}) has {layout.world_size} ranks, and {started} were started: start them with "
            f"torchrun --nproc-per-node {layout.world_size} -m memlab measure ..., or change the layout"
        )
    if started > 1 and distributed_backend == "fake":
        raise ValueError(f"the cpu backend steps one rank alone, and {started} were started: use backend 'cuda'")
    if started > 1:
        torch.distributed.init_process_group(distributed_backend)
    else:
        _join_alone(distributed_backend, layout)
    _initialize(seed, layout)


def _join_alone(distributed_backend: str, layout: Layout) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # missing from torch's stubs
    # torch marks each line of an error with the rank, once more for every group that was joined.
    with patch.object(sys, "excepthook", sys.excepthook):
        torch.distributed.init_process_group(
            distributed_backend, store=store, rank=layout.rank, world_size=layout.world_size
        )


def _interleaved(layout: Layout) -> int | None:
    """Returns the chunks of a pipeline stage as Megatron wants them: None where stages are not interleaved."""
    chunks = layout.virtual_pipeline_model_parallel_size
    return chunks if chunks > 1 else None


def _initialize(seed: int, layout: Layout) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=_interleaved(layout),
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
