"""From a Scenario to a live Megatron model on one rank: GPTModel, DistributedDataParallel, distributed optimizer.

The same code serves every backend; a backend gives the layer provider. Written against megatron-core 0.16.1 and
0.19.2.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from memlab.config.layout import Layout
from memlab.config.parts.gdn import GatedDeltaNet
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.config.training_state import COMPARE_WITH_TEACHER
from memlab.engines.megatron import cpu_optimizer
from memlab.engines.megatron.adapters import add_adapters
from memlab.engines.megatron.layers.norm_of_all_heads import KeyNorm, QueryNorm, fused
from memlab.engines.megatron.layers.replicated_head import ReplicatedHead
from memlab.engines.megatron.layers.tensor_parallel import WHOLE
from memlab.engines.megatron.layers.torch_layers import TorchLinear
from memlab.engines.megatron.losses import Fp32Output, LargestLogits, LossFromLogits
from memlab.engines.megatron.megatron_config import (
    distributed_data_parallel_config,
    interleaved_chunks,
    optimizer_config,
    transformer_config,
)
from memlab.engines.megatron.megatron_versions import inner_layer, latent_linears_of
from memlab.upstream.patching import patched

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(.*)")


@dataclass(slots=True, eq=False)
class LiveModel:
    """Megatron's objects for a training step."""

    scenario: Scenario
    config: TransformerConfig
    chunks: list[Any]
    """DistributedDataParallel model chunks, in the model's order; several where pipeline stages are interleaved."""
    optimizer: Any
    """Megatron's (chained) distributed optimizer."""
    forward_backward: Callable[..., Any]
    """Megatron's schedule for this pipeline layout."""
    reference: list[GPTModel] = field(default_factory=list, repr=False)
    """The frozen copy of the model, or another model that is a teacher, in the training states that have one."""
    loss: LossFromLogits = field(default_factory=LossFromLogits, repr=False)
    """The loss of the training states in which the GPTModel does not compute it."""
    largest: LargestLogits = field(default_factory=LargestLogits, repr=False)
    """What a pass without gradients computes in its place, of a model that is a teacher."""
    fp32_output: Fp32Output = field(default_factory=Fp32Output, repr=False)
    """Copies the logits for it, in the training states that say so."""
    discarded_optimizers: list[Any] = field(default_factory=list)
    """CPU optimizers that Megatron has replaced, while they are still allocated (`cpu_optimizer`)."""
    num_eager_steps: int = 0
    """Of a job with a CUDA graph: those since the first update, and the steps that captured it."""
    graph_workspaces: list[torch.Tensor] = field(default_factory=list, repr=False)
    """cuBLAS's of a CUDA graph."""
    layer_graphs: Any = field(default=None, repr=False)
    """The graphs of its layers, a `LayerGraphs`, once they are captured."""
    _modules: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        models = (*self.chunks, *self.reference)
        self._modules = tuple(module for model in models for module in model.modules())

    @property
    def chunk(self) -> Any:
        """The one chunk of a rank whose stages are not interleaved; ``chunk.module`` is the GPTModel."""
        (chunk,) = self.chunks
        return chunk

    @property
    def optimizers(self) -> list[Any]:
        """Megatron's optimizers: one, or one of dense and one of expert parameters."""
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    @property
    def layers(self) -> list[Any]:
        """The transformer layers of all chunks."""
        return [layer for chunk in self.chunks for layer in chunk.module.decoder.layers]

    def drop_graphs(self) -> None:
        """Frees all CUDA graphs, so that the next steps are eager."""
        self.graph_workspaces.clear()
        if self.layer_graphs is not None:
            self.layer_graphs.drop()
        self.layer_graphs, self.num_eager_steps = None, -1

    def modules(self) -> tuple[Any, ...]:
        """Returns every module of every chunk and of a reference model, found once: 48 layers have 1,650 of them."""
        return self._modules

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yields every parameter of every chunk, and those of a reference model."""
        for model in (*self.chunks, *self.reference):
            yield from model.parameters()

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields the modules of every GPTModel by name; layers are numbered across chunks, as in `layers`."""
        first = 0
        for chunk in self.chunks:
            for name, module in chunk.module.named_modules():
                layer = _LAYER.match(name)
                yield (f"{layer[1]}{first + int(layer[2])}{layer[3]}" if layer else name), module
            first += len(chunk.module.decoder.layers)

    def working_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields `named_modules` without placeholders, which return their input: 4 of 18 modules of a Qwen3 layer.

        After them come a reference model, as a whole, the copy of the logits and the loss.
        """
        yield from ((name, module) for name, module in self.named_modules() if not isinstance(module, IdentityOp))
        yield from (("reference_model", model) for model in self.reference)
        yield "fp32_output", self.fp32_output
        yield "loss", self.loss
        yield "largest_logits", self.largest

    def buffers(self) -> Iterator[tuple[str, Any]]:
        """Yields DDP's buffers of parameters and gradients, each with the name of its attribute."""
        # Experts that are spread over ranks have their own buffers; verl #1766 forgot them.
        for name in ("buffers", "expert_parallel_buffers"):
            for chunk in self.chunks:
                for buffer in getattr(chunk, name):
                    yield name, buffer


def build_model(scenario: Scenario, provider: type, settings: MemorySettings) -> LiveModel:
    """Builds the model in the process group that this process has joined; its weights are those of the seed.

    Args:
        provider: A `BackendSpecProvider` class, in the place of Megatron's ``TESpecProvider``.
        settings: Recompute and offload settings to build with; `apply_settings.apply` changes them on the live model.

    Returns:
        The model, its optimizer and its schedule. `megatron_globals.release` frees them. Of a model that cannot be
        built nothing is left.
    """
    seed_megatron(scenario.seed)
    config = transformer_config(scenario, settings)
    ddp_config = distributed_data_parallel_config(scenario)
    chunks: list[Any] = []
    reference: list[GPTModel] = []
    try:
        for number in range(scenario.layout.virtual_pipeline_model_parallel_size):
            model = gpt_model(scenario, config, provider, number)
            _cast_to_bf16(model, config)
            config.memlab_routing.add_layers(layer for layer in _layers_of(model) if _routes(layer))
            if scenario.expert_buffers:
                _spread_experts(model)
            if config.moe_shared_expert_overlap:
                _exchange_nothing_in_shared_experts(model)
            if scenario.state.lora is not None:
                add_adapters(model, scenario, provider, number)
            if scenario.state.freeze_moe_router:
                _freeze_routers(model)
            state = scenario.state
            if not state.use_distributed_optimizer or state.trains_in_part or state.reuse_grad_buf_for_mxfp8_param_ag:
                # What is on the host moves with `get_model`, and with the distributed optimizer to DDP's buffers, which
                # take every trained parameter over, but not beside those in MXFP8.
                _move_from_host(model)
            # One bucket for each chunk but the first, as in Megatron-LM's `get_model` (megatron/training/training.py).
            is_whole = number > 0 or state.overlap_param_gather_with_optimizer_step
            chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=is_whole))
        if scenario.state.reference_model == "copy":
            reference.append(_frozen_model(chunks[0].module, scenario, config, provider, settings))
        live = LiveModel(scenario, config, chunks, None, get_forward_backward_func(), reference)
        build_optimizer(live)
    except BaseException:
        take_apart(chunks)
        take_apart(reference)
        raise
    return live


def build_optimizer(live: LiveModel) -> None:
    """Gives a model without an optimizer the one of its scenario."""
    config = optimizer_config(live.scenario)
    with cpu_optimizer.noting_first_optimizers() as first_optimizers:
        live.optimizer = get_megatron_optimizer(config, live.chunks, use_gloo_process_groups=False)
    if cpu_optimizer.stays_after_build(live.scenario.state):
        live.discarded_optimizers = first_optimizers
    elif first_optimizers:
        first_optimizers.clear()
        gc.collect()  # now, and not in the middle of some step
    _fuse_adam(live)
    _retain_main_gradients(live)


def take_apart(chunks: list[Any]) -> None:
    """Clears the modules of model chunks, and the list.

    DDP's hooks and the parameters' autograd nodes refer to each other in C++, where Python's garbage collector does not
    look: dropping the names would free nothing.
    """
    for module in [module for chunk in chunks for module in chunk.modules()]:
        vars(module).clear()
    chunks.clear()


def release_optimizer(live: LiveModel) -> None:
    """Clears the optimizer's objects and what it wrote on the parameters, so that its memory is freed."""
    live.discarded_optimizers.clear()
    if live.optimizer is None:  # its build has failed
        return
    for part in live.optimizers:
        part.optimizer.state.clear()
        part.optimizer.param_groups.clear()
        vars(part).clear()
    vars(live.optimizer).clear()
    live.optimizer = None
    for parameter in live.parameters():
        # optimizer/optimizer.py and optimizer/distrib_optimizer.py write these.
        for name in ("main_param", "main_param_sharded"):
            vars(parameter).pop(name, None)


def _frozen_model(
    model: GPTModel, scenario: Scenario, config: TransformerConfig, provider: type, settings: MemorySettings
) -> GPTModel:
    """Returns a model with the weights of another one, as ms-swift keeps it: outside DDP, and never in training mode.

    A teacher has weights of its own, so that a loss that compares with it has a gradient. See ``prepare_model`` in
    swift/megatron/trainers/rlhf_mixin.py and ``_load_teacher_model`` in rollout_mixin.py (ms-swift 3602360), and
    ``_convert_hook`` in models/distillation_provider.py (Megatron-Bridge 067f987d).
    """
    state, frozen = scenario.state, scenario
    if state.teacher_model is not None:
        frozen = scenario.teacher
        config = transformer_config(frozen, settings)
    copy = gpt_model(frozen, config, provider)
    _cast_to_bf16(copy, config)
    config.memlab_routing.add_layers(layer for layer in _layers_of(copy) if _routes(layer))
    copy.cuda().requires_grad_(False).eval()
    if state.loss not in COMPARE_WITH_TEACHER:
        with torch.no_grad():
            for own, other in zip(copy.parameters(), model.parameters(), strict=True):
                own.copy_(other)
    return copy


def _layers_of(model: GPTModel) -> list[Any]:
    """Returns the transformer layers of a chunk, those in layers of multi-token prediction last."""
    extra = model.mtp.layers if getattr(model, "mtp_process", False) else ()
    return [*model.decoder.layers, *(inner_layer(each) for each in extra)]


def _routes(layer: Any) -> bool:
    return getattr(layer, "is_moe_layer", False)  # a layer of Mamba does not have it


def _freeze_routers(model: GPTModel) -> None:
    # As ``freeze_moe_router`` of nemo_rl/models/megatron/setup.py does, in a hook before DDP.
    for layer in model.decoder.layers:
        if _routes(layer):
            layer.mlp.router.weight.requires_grad = False


def _cast_to_bf16(model: GPTModel, config: TransformerConfig) -> None:
    # As ``Float16Module`` does, in which frameworks wrap a model: the cosines and sines of latent attention, and what
    # Mamba makes in fp32, A and D.
    for module in model.modules() if config.bf16 else ():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.bfloat16())


def _spread_experts(model: GPTModel) -> None:
    # What Megatron's expert layers write on their weights under expert parallelism; DDP reads it to sort parameters
    # into `expert_parallel_buffers` (megatron/core/distributed/distributed_data_parallel.py).
    for layer in _layers_of(model):
        for weight in layer.mlp.experts.parameters() if _routes(layer) else ():
            weight.allreduce = False


def _move_from_host(model: GPTModel) -> None:
    # MoE layers make these weights on the host (moe/router.py and moe/shared_experts.py in megatron/core/transformer).
    for layer in _layers_of(model):
        if _routes(layer):
            layer.mlp.router.cuda()
            gate = getattr(layer.mlp.shared_experts, "gate_weight", None)
            if gate is not None:
                gate.data = gate.data.cuda()


def _exchange_nothing_in_shared_experts(model: GPTModel) -> None:
    # Megatron gathers and scatters around them itself (``SharedExpertMLP.__init__``): TE's linears have a mode for it.
    for layer in _layers_of(model):
        shared = getattr(layer.mlp, "shared_experts", None)
        for linear in () if shared is None else (shared.linear_fc1, shared.linear_fc2):
            if isinstance(linear, TorchLinear):
                linear.split = WHOLE


def _fuse_adam(live: LiveModel) -> None:
    # Without TE or Apex Megatron takes torch's AdamW; fused, it updates in one kernel without temporaries, like TE's.
    for part in live.optimizers:
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def _retain_main_gradients(live: LiveModel) -> None:
    # In fp32 the main parameters are views of the parameters, not leaves. Megatron sets their `.grad` itself, and torch
    # warns at each read before that, until it knows that a view's gradient is meant to be read.
    for part in live.optimizers:
        for group in part.optimizer.param_groups:
            for main_parameter in group["params"]:
                if not main_parameter.is_leaf:
                    main_parameter.retain_grad()


def gpt_model(scenario: Scenario, config: TransformerConfig, provider: type, chunk: int = 0) -> GPTModel:
    """Builds Megatron's model with the layers of a provider: one of the chunks of this rank's pipeline stage."""
    model = _model(scenario, config, provider, chunk)
    if model.post_process and scenario.state.num_labels is not None:
        model.output_layer = ReplicatedHead(scenario.state.num_labels, config)
    if model.pre_process and model.embedding.add_position_embedding:
        # Made on the host in fp32; Megatron-LM's `get_model` moves the model, and its `Float16Module` converts it.
        positions = model.embedding.position_embeddings
        moved = positions.weight.detach().to(device=torch.cuda.current_device(), dtype=config.params_dtype)
        positions.weight = torch.nn.Parameter(moved)
    return model


def _model(scenario: Scenario, config: TransformerConfig, provider: type, chunk: int) -> GPTModel:
    architecture = scenario.architecture
    # Stages have numbers of chunks only where they are interleaved.
    place: dict[str, Any] = {"vp_stage": chunk if config.virtual_pipeline_model_parallel_size else None}
    if architecture.hybrid_override_pattern is not None:
        # It imports modules of Megatron that no other model has.
        from memlab.engines.megatron.hybrid import hybrid_model

        return hybrid_model(scenario, config, provider, chunk, place)
    # The specs are Transformer Engine's own; only the classes in them are the provider's. Megatron's
    # `get_gpt_decoder_block_spec`, which makes both kinds of layers, cannot be imported without Transformer Engine.
    is_own = scenario.state.transformer_impl == "local"
    name = "LocalSpecProvider" if is_own else "TESpecProvider"
    spec_of = getattr(gpt_layer_specs, f"get_gpt_layer_{'local' if is_own else 'with_transformer_engine'}_spec")
    with patched({f"megatron.core.models.gpt.gpt_layer_specs.{name}": provider}):
        specs = {
            kind: spec_of(
                qk_layernorm=architecture.qk_layernorm,
                multi_latent_attention=architecture.multi_latent_attention,
                **{name: value for part in parts for name, value in part.megatron_spec.items()},
            )
            for kind, parts in architecture.parts_of_kinds.items()
        }
    for kind, parts in architecture.parts_of_kinds.items():
        if isinstance(parts[0], GatedDeltaNet):
            specs[kind].submodules.self_attention = get_gated_delta_net_module_spec(config, provider())
    for spec in specs.values() if architecture.norms_all_heads else ():
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
        if architecture.norms_all_heads_fused:
            norm = provider().layer_norm(rms_norm=True, for_qk=True)
            attention.q_layernorm, attention.k_layernorm = (fused(norm, of_queries=which) for which in (True, False))
    block = gpt_layer_specs.TransformerBlockSubmodules(
        layer_specs=[specs[architecture.kind_of_layer(layer)] for layer in scenario.chunks_of_rank[chunk]],
        layer_norm=provider().layer_norm(rms_norm=True),
    )
    extra = None
    if config.mtp_num_layers and parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place):
        of_last = specs[architecture.kind_of_layer(scenario.num_layers - 1)]
        layer = get_mtp_layer_spec_for_backend(of_last, provider())
        extra = MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)
    with patched({} if is_own else latent_linears_of(provider)):
        return GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.max_position_embeddings or scenario.seq_length,
            position_embedding_type=architecture.position_embedding_type,
            rotary_base=int(architecture.rotary_base),
            rotary_percent=architecture.rotary_percent,
            share_embeddings_and_output_weights=scenario.shares_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
            mtp_block_spec=extra,
            **place,
        )


def initialize_megatron(layout: Layout) -> None:
    """Makes Megatron's process groups of a joined one."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=interleaved_chunks(layout),
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        create_gloo_process_groups=False,
    )


def seed_megatron(seed: int) -> None:
    """Seeds torch's random states and Megatron's, so that a model that is built next has the weights of this seed.

    Each pipeline stage has its own (``_set_random_seed`` in megatron/training/initialize.py).
    """
    of_stage = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(of_stage)
    model_parallel_cuda_manual_seed(of_stage, force_reset_rng=True)
