"""One rank of plain Megatron-Core: Megatron's own layers, DDP, schedule and optimizer, and what they hold on the GPU.

On a GPU nothing of memlab is imported: what is measured here is compared with memlab's predictions. Without a GPU, for
a rehearsal, memlab's stand-ins for CUDA and Transformer Engine run the same code at tiny sizes, and all bytes are 0.

Written against megatron-core 0.16.1. The order of calls is that of ``pretrain`` in ``megatron/training/training.py``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variant_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface
from megatron.core.tensor_parallel import layers as linears
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_layer, moe_utils
from megatron.core.transformer.moe import router as moe_router
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from benchmarks.megatron_jobs import EMBEDDINGS, HYBRIDS, LAYERS, MODELS, NEMOTRON_MINI, Job
from benchmarks.megatron_passes import Forward, Head, forward_of, frozen

NUM_STEPS = 4
"""The first allocates Adam's moments and teaches Megatron its offload groups. The last is compared."""
SEED = 1234
COLLECTIVES_SECONDS = 60
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.uint8}
_OPTIONS_OF_MODEL = {
    "fp8_format": "fp8",
    "fp8_param_gather": "fp8_param",
    **{name: name for name in ("fp8_recipe", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")},
    **{name: name for name in ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")},
    **{name: name for name in ("hidden_dropout", "attention_dropout", "attention_backend")},
    **{name: name for name in ("cp_comm_type", "transformer_impl")},
    **{name: name for name in ("moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_permute_fusion")},
    **{name: name for name in ("moe_router_fusion", "moe_router_force_load_balancing", "moe_router_dtype")},
    **{name: name for name in ("moe_token_dispatcher_type", "moe_token_drop_policy", "moe_expert_capacity_factor")},
    "moe_pad_expert_input_to_capacity": "moe_pad_expert_input_to_capacity",
    "tp_comm_overlap": "tp_comm_overlap",
    **{f"tp_comm_overlap_{name}": f"tp_comm_overlap_{name}" for name in ("ag", "rs", "rs_dgrad")},
    **{f"tp_comm_overlap_disable_{name}": f"tp_comm_overlap_disable_{name}" for name in ("qkv", "fc1")},
    **{f"tp_comm_bulk_{name}": f"tp_comm_bulk_{name}" for name in ("dgrad", "wgrad")},
}
"""Options of the training state that are fields of ``TransformerConfig``, and their names there."""
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("broadcast", "barrier", "send", "recv", "_end_coalescing"),
    # Names that torch 2.13 has as well.
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
"""Methods of torch's ``ProcessGroup``. What is called between the two ends of coalescing begins at its end."""


def run_rank(rank: int, world_size: int, path: str, numbered: list[tuple[int, Job]], log: Path) -> None:
    """Takes jobs of one layout, one after the other, and leaves what was measured in the store.

    Args:
        rank: The rank of this process, and its GPU.
        world_size: How many ranks the jobs have.
        path: The file of the store.
        numbered: The jobs with their numbers, which are part of the store's keys.
        log: The file that gets the output of this process.
    """
    with log.open("a") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    store = torch.distributed.FileStore(path, -1)
    number = numbered[0][0]
    uses = FirstUses()
    try:
        with on_device(rank), uses.noted():
            outside = {"CUDA's context": outside_torch_bytes()}
            join(torch.distributed.PrefixStore(f"group-{number}", store), rank, world_size, numbered[0][1])
            outside["process groups"] = outside_torch_bytes()
            for number, job in numbered:
                row = {"rank": rank, "outside_torch_bytes": outside, **take_job(job), "first_uses": uses.rows}
                uses.rows = None
                store.set(f"row-{number}-{rank}", json.dumps(row))
                if store.get(f"continue-{number}") != b"yes":
                    break
            torch.distributed.destroy_process_group()
    except BaseException as error:
        store.set(f"failed-{number}-{rank}", f"{type(error).__name__}: {error}"[:600])
        raise  # multiprocessing prints it


@contextmanager
def on_device(rank: int) -> Iterator[None]:
    """Makes a GPU the current device; without one, the CPU stands in for it."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        torch.ones(1, device="cuda")  # makes CUDA's context
        with patch.multiple(linears, create=True, **APEX), patch.dict(sys.modules, SOFTMAX_OF_APEX):
            yield
        return
    cpu = importlib.import_module("memlab.backends.cpu")
    layers = importlib.import_module("memlab.engines.megatron.layers.torch_layers")
    specs = {"TESpecProvider": layers.TorchProvider, "TENorm": layers.TorchProvider().layer_norm(rms_norm=True)}
    with ExitStack() as replaced:
        replaced.enter_context(patch.object(multi_latent_attention, "TELinear", layers.TorchLinear))
        replaced.enter_context(patch.multiple(moe_layer, create=True, HAVE_TE=True, TELinear=layers.TorchLinear))
        for name, value in specs.items():
            replaced.enter_context(patch.object(gpt_layer_specs, name, value, create=True))
            replaced.enter_context(patch.object(variant_specs, name, value, create=True))
        replaced.enter_context(cpu.cuda_replaced_on_ranks())
        yield


def add_product(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Adds a weight's gradient to its buffer as Apex' extension does, by Transformer Engine's product.

    Megatron's output layer calls it under ``gradient_accumulation_fusion``. Neither product allocates anything.
    """
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    gemm(inputs, grad, out_dtype=main_grad.dtype, accumulate=True, layout="NT", out=main_grad, grad=True)


APEX = {
    "_grad_accum_fusion_available": True,
    "fused_weight_gradient_mlp_cuda": SimpleNamespace(
        wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product
    ),
}
"""Stands in for an Apex that is not installed, in ``megatron/core/tensor_parallel/layers.py``."""


def softmax(scores: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the probabilities as Apex' kernel does, by Transformer Engine's copy of it."""
    kernels = importlib.import_module("transformer_engine_torch")
    return kernels.scaled_upper_triang_masked_softmax_forward(scores, float(scale))


def softmax_backward(grad: torch.Tensor, probabilities: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the scores, in the place of that of the probabilities."""
    kernels = importlib.import_module("transformer_engine_torch")
    return kernels.scaled_upper_triang_masked_softmax_backward(grad, probabilities, float(scale))


SOFTMAX_OF_APEX: dict[str, Any] = {
    "scaled_upper_triang_masked_softmax_cuda": SimpleNamespace(forward=softmax, backward=softmax_backward),
    "scaled_masked_softmax_cuda": SimpleNamespace(get_batch_per_block=lambda *_: 4),  # of more than 128 keys
}
"""Stands in for Apex' kernels, which ``megatron/core/fusions/fused_softmax.py`` imports."""


def join(store: Any, rank: int, world_size: int, job: Job) -> None:
    """Joins the other ranks, and makes Megatron's groups of a job's layout."""
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVES_SECONDS),
    )
    parallel_state.initialize_model_parallel(**job.sizes, create_gloo_process_groups=False)


def take_job(job: Job) -> dict[str, Any]:
    """Builds a job's model, takes its steps, and frees it."""
    before = allocated_bytes()
    config = transformer_config(job)
    chunks, optimizer, reference = build(job, config)
    forward = forward_of(job.state, reference, chunks)
    row = {
        "before_build_bytes": before,
        "built_bytes": allocated_bytes(),
        "outside_torch_built_bytes": outside_torch_bytes(),
        "expert_rank": parallel_state.get_expert_model_parallel_rank(),
        "steps": [],
    }
    with noting_routes(chunks) as routes:
        for _ in range(NUM_STEPS):
            routes.clear()
            row["steps"].append(take_step(job, chunks, optimizer, forward))
        row["tokens_per_expert"] = routes
    del forward
    release(chunks, optimizer, reference)
    config.finalize_model_grads_func = config.grad_scale_func = config.no_sync_func = None
    del config
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {**row, "left_bytes": allocated_bytes(), "environment": environment()}


def transformer_config(job: Job) -> TransformerConfig:
    """Returns Megatron's config of a model, its layout and its settings."""
    sizes = job.sizes
    interleaved = "virtual_pipeline_model_parallel_size" in sizes
    settings = {name: [*value] if isinstance(value, tuple) else value for name, value in job.settings.items()}
    values = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bias_dropout_fusion": True,
        **MODELS[job.model],
        **sizes,
        "num_layers": job.num_layers,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": True,
        "masked_softmax_fusion": torch.cuda.is_available(),  # Megatron-LM's default, which only its own layers read
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "sequence_parallel": sizes.get("tensor_model_parallel_size", 1) > 1 and "SP0" not in job.layout,
        # As in megatron/training/arguments.py: stages that are interleaved send and receive without batches.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "fine_grained_activation_offloading": "offload_modules" in settings,
        "finalize_model_grads_func": finalize_model_grads,
        **settings,
        **job.config,
        **{_OPTIONS_OF_MODEL[name]: value for name, value in job.state.items() if name in _OPTIONS_OF_MODEL},
    }
    is_gated = values["gated_linear_unit"]
    values["activation_func"] = torch.nn.functional.silu if is_gated else torch.nn.functional.gelu
    if job.model in (*HYBRIDS, NEMOTRON_MINI):  # Megatron-Core has no fused squared ReLU
        values |= {"activation_func": squared_relu, "bias_activation_fusion": False}
    if "glu_linear_offset" in values:
        # The object that the config compares with: memlab's stand-ins replace compiled functions.
        values["activation_func"] = importlib.import_module(TransformerConfig.__module__).quick_gelu
    if "attention_backend" in values:
        values["attention_backend"] = AttnBackend[values["attention_backend"]]
    if "moe_layer_freq" in values:
        values["moe_layer_freq"] = [*values["moe_layer_freq"]][: job.num_layers]
    return (MLATransformerConfig if "multi_latent_attention" in values else TransformerConfig)(**values)


def build(job: Job, config: TransformerConfig) -> tuple[list[Any], Any, list[GPTModel]]:
    """Builds the chunks of this rank's pipeline stage, each in DDP, their optimizer and the reference model."""
    seed = SEED + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    options = {name: value for name, value in job.state.items() if name not in _OPTIONS_OF_MODEL}
    adapters = {name: options.pop(name) for name in list(options) if name.startswith("lora_")}
    state = {name: _DTYPES.get(value, value) for name, value in options.items()}
    reduces_in_bf16 = state.pop("grad_reduce_in_bf16", False)
    for name in ("num_labels", *(name for name in _OF_TEACHER if name != "reference_model")):
        state.pop(name, None)
    is_frozen, has_reference = state.pop("freeze_moe_router", False), state.pop("reference_model", None) == "copy"
    ddp = {"grad_reduce_in_fp32": not reduces_in_bf16, "use_distributed_optimizer": True}
    ddp["fp8_param_gather"] = bool(config.fp8_param)
    adam = {"optimizer": "adam", "lr": 0.0, "weight_decay": 0.0, "bf16": True, "params_dtype": torch.bfloat16}
    adam["use_distributed_optimizer"] = True
    # Frameworks give the recipe to both configs: the optimizer keeps other main parameters with it.
    adam["fp8_recipe"] = config.fp8_recipe if config.fp8 else None
    for of_config, kind in ((ddp, DistributedDataParallelConfig), (adam, OptimizerConfig)):
        of_config.update({field.name: state[field.name] for field in fields(kind) if field.name in state})
    unknown = state.keys() - ddp.keys() - adam.keys()
    if unknown:
        raise ValueError(f"state has {', '.join(unknown)}, must be fields of Megatron's configs: correct the job")
    num_chunks = config.virtual_pipeline_model_parallel_size
    chunks: list[Any] = []
    for number in range(num_chunks or 1):
        model = gpt_model(job, config, number)
        for layer in model.decoder.layers if is_frozen else ():
            layer.mlp.router.weight.requires_grad = False
        if adapters:
            add = add_adapters_of_ms_swift if adapters.get("lora_library") == "mcore_bridge" else add_adapters
            add(model, adapters)
        model = Float16Module(config, model.cuda())
        chunks.append(
            DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), model, disable_bucketing=number > 0)
        )
    # ms-swift builds it here (``prepare_model`` in swift/megatron/trainers/rlhf_mixin.py, 3602360).
    reference = [frozen_model(job, config, chunks[0])] if has_reference else []
    optimizer = get_megatron_optimizer(OptimizerConfig(**adam), chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    if ddp.get("overlap_grad_reduce"):
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks, optimizer, reference


def frozen_model(job: Job, config: TransformerConfig, chunk: Any) -> GPTModel:
    """Builds a model that is never trained: a copy of the chunk, or a teacher with weights of its own."""
    if "loss" not in job.state:
        return frozen(gpt_model(job, config), chunk)
    state = {name: value for name, value in job.state.items() if name not in _OF_TEACHER}
    name = job.state.get("teacher_model")
    teacher = replace(job, state=state, **({} if name is None else {"model": name, "num_layers": LAYERS[name]}))
    return frozen(gpt_model(teacher, transformer_config(teacher)), None)


_OF_TEACHER = (
    *("loss", "fp32_output", "reference_model", "teacher_model", "gkd_logits_topk", "logit_kl_topk"),
    "lm_loss_beside",
)


def mamba_model(job: Job, config: TransformerConfig) -> Any:
    """Builds a model of several kinds of layers, of which one is Mamba; its kernels need a GPU."""
    models = "megatron.core.models.mamba"
    spec = importlib.import_module(f"{models}.mamba_layer_specs").mamba_stack_spec
    return importlib.import_module(models).MambaModel(
        config=config,
        mamba_stack_spec=spec,
        hybrid_override_pattern=HYBRIDS[job.model][: job.num_layers],
        **EMBEDDINGS[job.model] | {"vocab_size": job.vocab_size},
        max_sequence_length=job.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def gpt_model(job: Job, config: TransformerConfig, number: int = 0) -> GPTModel:
    """Builds a chunk of this rank's pipeline stage, with the head that a job has in place of the output layer."""
    if job.model in HYBRIDS:
        return mamba_model(job, config)
    place = {"vp_stage": number if config.virtual_pipeline_model_parallel_size else None}
    num_labels = job.state.get("num_labels")
    of_engine = config.transformer_impl == "transformer_engine"
    if config.experimental_attention_variant is None:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=of_engine, normalization=config.normalization, **place
        )
    else:
        spec = variant_specs.get_transformer_block_with_experimental_attention_variant_spec(config, **place)
    if job.model == "minimax-m2":
        take_norms_of_all_heads(spec)
    if job.model == "olmoe-1b-7b":
        take_attention_of_olmoe(spec)
    embeddings = {"position_embedding_type": "rope", **EMBEDDINGS[job.model], "vocab_size": job.vocab_size}
    if num_labels:
        embeddings["share_embeddings_and_output_weights"] = False
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        **embeddings,
        max_sequence_length=job.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
        mtp_block_spec=mtp_spec(config, spec, place),
        **place,
    )
    if num_labels and model.post_process:
        model.output_layer = Head(num_labels, config)
    return model


def take_norms_of_all_heads(spec: Any) -> None:
    """Replaces the norms of queries and keys by Megatron-Bridge's, over all heads together.

    Of its package, 0.6.2, only ``models/minimax_m2/minimax_m2_provider.py`` needs to be there.
    """
    provider = importlib.import_module("megatron.bridge.models.minimax_m2.minimax_m2_provider")
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = provider.FullDimQNorm, provider.FullDimKNorm


def take_attention_of_olmoe(spec: Any) -> None:
    """Replaces the attention by Megatron-Bridge's, of which only ``models/olmoe/olmoe_provider.py`` has to be there."""
    unread = SimpleNamespace(GPTModelProvider=object, default_layer_spec=None)
    sys.modules.setdefault("megatron.bridge.models.gpt_provider", unread)  # type: ignore[arg-type]
    provider = importlib.import_module("megatron.bridge.models.olmoe.olmoe_provider")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.module = provider.OLMoESelfAttention


def mtp_spec(config: TransformerConfig, spec: Any, place: dict[str, Any]) -> Any:
    """Returns the layers of multi-token prediction on this rank, or None."""
    if not config.mtp_num_layers:
        return None
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, **place)


def add_adapters(model: GPTModel, options: dict[str, Any]) -> None:
    """Freezes a model chunk, and adds Megatron-Bridge's own adapters to it.

    Of its package, 0.6.2, only the folder ``peft`` and what that imports need to be there. A rehearsal lets its code
    take memlab's stand-ins for the classes of Transformer Engine.
    """
    # Megatron-Core 0.16.1 has no such block, which peft/recompute.py looks for.
    blocks = SimpleNamespace(HybridStack=type("HybridStack", (), {}))
    sys.modules.setdefault("megatron.core.models.hybrid.hybrid_block", blocks)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        stand_in_for_transformer_engine()
        layers = importlib.import_module("memlab.engines.megatron.layers.torch_layers")
        utils = importlib.import_module("megatron.bridge.peft.utils")
        utils.HAVE_TE, utils.TELayerNormColumnParallelLinear = True, layers.TorchNormLinear
        utils.TELinear = layers.TorchLinear
        utils.version = lambda _: "2.16.1"
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        utils.TECL = (layers.TorchNormLinear, layers.TorchColumnLinear, layers.TorchGroupedLinear)
        utils.TERL = (layers.TorchRowLinear, layers.TorchGroupedRowLinear)
        matcher = importlib.import_module("megatron.bridge.peft.module_matcher")
        matcher.HAVE_TE_COL_LINEAR = matcher.HAVE_TE_LN_COL_LINEAR = matcher.HAVE_TE_ROW_LINEAR = True
        matcher.TEColumnParallelLinear, matcher.TERowParallelLinear = layers.TorchColumnLinear, layers.TorchRowLinear
        matcher.TELayerNormColumnParallelLinear = layers.TorchNormLinear
        for module in model.modules():
            if isinstance(module, (utils.TELinear, *utils.TECL, *utils.TERL)):
                weights = [weight for weight in module.parameters() if weight.dim() > 1]
                module.out_features, module.in_features = weights[0].shape
                module.config = model.config
    module, kind = (
        ("canonical_lora", "CanonicalLoRA")
        if "linear_q" in options.get("lora_target_modules", ())
        else ("lora", "LoRA")
    )
    add = getattr(importlib.import_module(f"megatron.bridge.peft.{module}"), kind)
    values = {name.removeprefix("lora_"): value for name, value in options.items()}
    add(**{"dim" if name == "rank" else name: value for name, value in values.items()})([model], training=True)


def stand_in_for_transformer_engine() -> None:
    """Lets packages import Transformer Engine in a rehearsal."""
    engine = SimpleNamespace(ops=SimpleNamespace(Sequential=object))
    sys.modules.setdefault("transformer_engine.pytorch", engine)  # type: ignore[arg-type]
    sys.modules.setdefault("transformer_engine", SimpleNamespace(pytorch=engine))  # type: ignore[arg-type]


def add_adapters_of_ms_swift(model: GPTModel, options: dict[str, Any]) -> None:
    """Freezes a model chunk, and adds the adapters of mcore-bridge to it, which ms-swift trains.

    Of its package, 1.6.5, the folder ``tuners`` needs to be there, and what that imports of peft and transformers. A
    rehearsal lets its code take memlab's stand-ins for the classes of Transformer Engine.
    """
    if not torch.cuda.is_available():
        stand_in_for_transformer_engine()
    lora = importlib.import_module("mcore_bridge.tuners.lora")
    if not torch.cuda.is_available():
        layers = importlib.import_module("memlab.engines.megatron.layers.torch_layers")
        lora.TELinear, lora.TEGroupedLinear = layers.TorchLinear, layers.TorchGroupedLinear
        lora.TEColumnParallelLinear, lora.TERowParallelLinear = layers.TorchColumnLinear, layers.TorchRowLinear
        lora.TELayerNormColumnParallelLinear = layers.TorchNormLinear
        lora.TEColumnParallelGroupedLinear = layers.TorchGroupedLinear
        lora.TERowParallelGroupedLinear = layers.TorchGroupedRowLinear
        lora._is_replicated_base = lambda base: type(base) is layers.TorchLinear
        lora.is_expert_layer = lambda base: hasattr(base, "num_gemms")
    for parameter in model.parameters():
        parameter.requires_grad = False
    targets = options.get("lora_target_modules", ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    for name, linear in [one for one in model.named_modules() if one[0].rpartition(".")[2] in targets]:
        owner, _, own = name.rpartition(".")
        if hasattr(linear, "num_gemms"):
            linear.is_expert = True  # as ``_set_linear_is_expert`` of mcore-bridge does (model/register.py)
        if not torch.cuda.is_available():
            linear.out_features, linear.in_features = next(each for each in linear.parameters() if each.dim() > 1).shape
            linear.config = model.config
        values = {
            "r": options["lora_rank"],
            "lora_alpha": options["lora_rank"],
            "lora_dropout": options["lora_dropout"],
        }
        setattr(model.get_submodule(owner), own, lora.LoraParallelLinear(linear, "default", **values))
    # ``enable_input_require_grads`` of transformers, which ms-swift calls.
    if hasattr(model, "embedding"):
        model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(True))


def take_step(job: Job, chunks: list[Any], optimizer: Any, forward: Forward) -> dict[str, Any]:
    """Takes one training step, and returns what it held: bytes of torch's allocator, and what lies outside it."""
    synchronize()
    started = time.perf_counter()
    row: dict[str, Any] = {"start_bytes": allocated_bytes()}
    reset_peak()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    begin = getattr(forward, "begin_step", iter)
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[begin(batches(job)) for _ in chunks],
        model=chunks,
        num_microbatches=job.num_microbatches,
        seq_length=job.seq_length,
        micro_batch_size=job.micro_batch_size,
        forward_only=False,
    )
    synchronize()
    row["forward_backward_peak_bytes"] = peak_bytes()
    succeeded, _, _ = optimizer.step()
    assert succeeded, "bf16 training scales no loss, so no step is skipped"
    moe_utils.clear_aux_losses_tracker()
    synchronize()
    row["seconds"] = time.perf_counter() - started
    row["peak_bytes"], row["peak_reserved_bytes"] = peak_bytes(), peak_reserved_bytes()
    row["end_bytes"], row["outside_torch_bytes"] = allocated_bytes(), outside_torch_bytes()
    row["loss"] = sum(float(each["loss"]) for each in losses) / len(losses) if losses else None
    return row


def batches(job: Job) -> Iterator[dict[str, torch.Tensor]]:
    """Yields a step's micro-batches on the host: the same random tokens in each, and on every rank."""
    shape, generator = (job.micro_batch_size, job.seq_length + 1), torch.Generator().manual_seed(SEED)
    tokens = torch.randint(job.vocab_size, shape, generator=generator)
    for _ in range(job.num_microbatches):
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.arange(job.seq_length).repeat(job.micro_batch_size, 1),
        }


@contextmanager
def noting_routes(chunks: list[Any]) -> Iterator[dict[int, list[list[int]]]]:
    """Yields, by number of a layer, the different lists of tokens that its experts on this rank got.

    All micro-batches have the same tokens and weights, and recompute repeats a forward: one list per layer is expected.
    Megatron itself takes the numbers to the host, so noting them allocates nothing on the device.
    """
    names = {
        id(layer.mlp.experts): layer.layer_number
        for layer in layers_of(chunks)
        if getattr(layer, "is_moe_layer", False)
    }
    of_all = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TEGroupedMLP)]
    last = max((layer.layer_number for layer in layers_of(chunks)), default=0)
    # Those of multi-token prediction follow the model's own.
    names |= {
        id(each): last + 1 + number for number, each in enumerate([each for each in of_all if id(each) not in names])
    }
    routes: dict[int, list[list[int]]] = {}
    forward = TEGroupedMLP.forward

    def noting(experts: Any, hidden: Any, tokens_per_expert: Any, *others: Any) -> Any:
        counts, number = tokens_per_expert.tolist(), names.get(id(experts))
        if number is not None and counts not in routes.setdefault(number, []):  # not of a reference model
            routes[number].append(counts)
        return forward(experts, hidden, tokens_per_expert, *others)

    with ExitStack() as replaced:
        if chunks[0].config.moe_expert_capacity_factor is None:
            replaced.enter_context(patch.object(TEGroupedMLP, "forward", noting))
        else:
            replaced.enter_context(noting_before_dropping(routes))
        yield routes


@contextmanager
def noting_before_dropping(routes: dict[int, list[list[int]]]) -> Iterator[None]:
    """Notes by layer, without expert parallel ranks, how many tokens chose each expert before some are dropped.

    This sums a map of the router on the device, where a layer has not made its larger tensors yet.
    """
    of_layer = [0]
    route, drop = moe_router.TopKRouter.routing, moe_router.apply_router_token_dropping

    def routing(router: Any, *args: Any, **named: Any) -> Any:
        of_layer[0] = router.layer_number
        return route(router, *args, **named)

    def dropping(probs: Any, routing_map: torch.Tensor, **named: Any) -> Any:
        counts, lists = routing_map.sum(dim=0).tolist(), routes.setdefault(of_layer[0], [])
        if counts not in lists:
            lists.append(counts)
        return drop(probs, routing_map, **named)

    with (
        patch.object(moe_router.TopKRouter, "routing", routing),
        patch.object(moe_router, "apply_router_token_dropping", dropping),
    ):
        yield


class FirstUses:
    """Notes what collectives take outside torch, until it is told to stop.

    NCCL makes a communicator when its group is first used, and connects its channels when a collective first needs
    them. Both have ended when the call returns, or that which ends its coalescing.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] | None = []
        """Each group's first collective of a kind, and what has taken bytes, in their order; None when it is over."""
        self._seen: set[tuple[str, str]] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes collectives of all groups and threads in the block."""
        kind = torch.distributed.ProcessGroup
        with ExitStack() as replaced:
            for name in _COLLECTIVES:
                if hasattr(kind, name):
                    replaced.enter_context(patch.object(kind, name, self._noting(getattr(kind, name), name)))
            yield

    def _noting(self, original: Any, name: str) -> Any:
        def call(group: Any, *arguments: Any, **named: Any) -> Any:
            if self.rows is None:
                return original(group, *arguments, **named)
            before = outside_torch_bytes()
            result = original(group, *arguments, **named)
            taken = outside_torch_bytes() - before
            if taken or (group.group_name, name) not in self._seen:
                self._seen.add((group.group_name, name))
                ranks = torch.distributed.get_process_group_ranks(group)
                self.rows.append({"group": group.group_desc, "ranks": ranks, "collective": name, "bytes": taken})
            return result

        return call


def layers_of(chunks: list[Any]) -> list[Any]:
    """Returns the transformer layers of all chunks; each GPTModel is in a Float16Module, which is in a DDP."""
    return [layer for chunk in chunks for layer in chunk.module.module.decoder.layers]


def release(chunks: list[Any], optimizer: Any, reference: list[GPTModel]) -> None:
    """Frees a model, its optimizer and its reference model. To drop their names is not enough.

    DDP's hooks and the parameters' autograd nodes refer to each other in C++, a dispatcher keeps the graph of its last
    probabilities, and megatron-core and Transformer Engine have caches of their own.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.optimizer.state.clear()
        part.optimizer.param_groups.clear()
        vars(part).clear()
    vars(optimizer).clear()
    modules = [module for model in (*chunks, *reference) for module in model.modules()]
    for module in modules:
        if isinstance(getattr(module, "token_dispatcher", None), MoETokenDispatcher):
            vars(module.token_dispatcher).clear()
    for module in modules:
        vars(module).clear()
    chunks.clear()
    reference.clear()
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # megatron-core 0.18 and later
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    MTPLossLoggingHelper.tracker.clear()
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    parallel_state.get_global_memory_buffer().buffer.clear()
    FineGrainedActivationOffloadingInterface.reset_instance()
    for name in ("FLASH", "FUSED", "UNFUSED"):  # Megatron sets them, and refuses a model with another backend
        os.environ.pop(f"NVTE_{name}_ATTN", None)
    if torch.cuda.is_available():
        gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
        gemm.get_cublas_workspace.cache_clear()
        attention = importlib.import_module(
            "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
        )
        attention._attention_backends["backend_selection_requires_update"] = True
        importlib.import_module("transformer_engine.pytorch.module.base")._dummy_wgrads.clear()
        torch._C._cuda_clearCublasWorkspaces()


def environment() -> dict[str, str]:
    """Returns the names of the GPU and of the versions."""
    if not torch.cuda.is_available():
        return {"gpu": "none", "torch": torch.__version__}
    engine, core = (importlib.import_module(name) for name in ("transformer_engine", "megatron.core"))
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "transformer-engine": str(engine.__version__),
        "megatron-core": core.__version__,
        "allocator": torch.cuda.get_allocator_backend(),
    }


def synchronize() -> None:
    """Waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated_bytes() -> int:
    """Returns what torch's allocator has handed out."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak_bytes() -> int:
    """Returns the most that torch's allocator had handed out since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def peak_reserved_bytes() -> int:
    """Returns the most that torch's allocator had reserved since `reset_peak`."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    """Starts the peaks of this process over."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def outside_torch_bytes() -> int:
    """Returns what the GPU has in use that torch's allocator has not reserved; nothing else may run there."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
