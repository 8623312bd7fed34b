"""What memlab replaces, calls or reads of torch, megatron-core and Transformer Engine beyond their public interfaces.

One row per place upstream. `memlab.upstream.patching` replaces nothing that has no row here, and a test checks that
every name exists in the installed versions. That test has passed with torch 2.11, 2.13, 2.14 and 2.15 and
megatron-core 0.16.1, 0.18.2 and 0.19.2; Transformer Engine's names are in 2.12.0 and 2.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Internal:
    """Names of one module or class."""

    owner: str
    """``package.module`` or ``package.module:Class``; the module is the upstream file, if `source` is empty."""
    names: tuple[str, ...]
    use: Literal["replaced", "used"]
    """``replaced`` for a block by `patched`, or called, read or written (``used``)."""
    why: str
    where: str = ""
    """The file of memlab that does it."""
    source: str = ""
    """The upstream file, for a name that C++ defines."""
    absent_without_te: bool = False
    """Whether the owner imports the name from Transformer Engine, so that it may be missing without TE."""
    since: tuple[int, int] = (0, 0)
    """The first version of megatron-core that has the names, such as (0, 19)."""
    until: tuple[int, int] = (99, 0)
    """The first version of megatron-core that has them no more."""
    is_builtin: bool = False
    """Whether the names are Python's own, which only the owner's source code shows."""
    on_instances: bool = False
    """Whether the names are attributes of instances, which only the owner's source code shows."""
    needs_cuda: bool = False
    """Whether only a torch with CUDA has the names."""

    @property
    def package(self) -> str:
        """``torch``, ``megatron`` or ``transformer_engine``."""
        return self.owner.partition(".")[0]


def _in(where: str, *rows: Internal) -> Iterator[Internal]:
    yield from (replace(row, where=where) for row in rows)


def _replaced(owner: str, names: str, why: str, **more: Any) -> Internal:
    return Internal(owner=owner, names=tuple(names.split()), use="replaced", why=why, **more)


def _used(owner: str, names: str, why: str, **more: Any) -> Internal:
    return Internal(owner=owner, names=tuple(names.split()), use="used", why=why, **more)


_RANDOM = "megatron.core.tensor_parallel.random"
_OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_ENGINE = "transformer_engine.pytorch"

_TORCH = (
    *_in(
        "backends/cuda_on_cpu.py",
        _replaced(
            "torch.cuda",
            "Stream Event current_stream default_stream stream synchronize current_device set_device "
            "empty_cache CUDAGraph graph nvtx manual_seed get_rng_state set_rng_state",
            "Megatron calls them in every step; a CPU and fake tensors have no device behind them.",
        ),
        _used(
            "torch._C",
            "_DisableTorchDispatch _len_torch_dispatch_stack",
            "Makes views of storages that the meter knows already; no other dispatch mode has to see them.",
            source="torch/csrc/autograd/init.cpp",
        ),
        _used(
            "torch.autograd:Variable",
            "_execution_engine",
            "Backward without torch.autograd.backward, which leaves the function mode while it runs.",
        ),
    ),
    *_in(
        "replay/recorder.py",
        _used(
            "torch.autograd:Variable",
            "_execution_engine",
            "Its queue_callback says when a whole backward pass has ended, that of the parameters' gradients too.",
        ),
    ),
    *_in(
        "engines/megatron/__init__.py",
        _replaced(
            "torch",
            "compile",
            "Its default compiler takes 1.4 s of CPU to import, and without a GPU nothing is compiled.",
        ),
    ),
    *_in(
        "backends/cpu.py",
        _replaced(
            "torch", "get_rng_state", "The state that checkpoints save is host memory, and the meter must see it."
        ),
        _replaced(
            "torch", "from_numpy", "It makes host memory, and neither a function mode nor a dispatch mode sees it."
        ),
        _replaced(
            "torch:Tensor",
            "record_stream",
            "Its C++ signature refuses a stream that is not CUDA's, before a function mode is called.",
            source="torch/csrc/autograd/python_variable_methods.cpp",
        ),
        _used(
            "torch._dynamo.eval_frame",
            "_torchdynamo_orig_callable",
            "The function under torch.compile: Megatron's fused functions run eagerly, as one kernel for the meter.",
            on_instances=True,
        ),
    ),
    *_in(
        "meter/observers.py",
        _used(
            "torch:Tensor",
            "_indices _values",
            "The memory of a sparse tensor; the public names refuse a gradient, which is not coalesced.",
            source="aten/src/ATen/native/native_functions.yaml",
        ),
        _replaced(
            "torch:UntypedStorage",
            "resize_",
            "Megatron frees and refills storages in place with it, and no dispatch mode sees it.",
            source="torch/csrc/StorageMethods.cpp",
        ),
        _used("torch.utils._python_dispatch", "TorchDispatchMode", "The results of every operation."),
        _used(
            "torch.utils._python_dispatch:TorchDispatchMode",
            "_should_skip_dynamo",
            "Whether torch wraps the mode's method for its compiler, which nothing needs where nothing is compiled.",
        ),
        _used(
            "torch.utils._python_dispatch",
            "_disable_current_modes",
            "Real values, or an unmetered block, in the middle of a step.",
        ),
    ),
    *_in(
        "watching/phases.py",
        _replaced(
            "torch.autograd",
            "_engine_run_backward",
            "Each backward of a program begins and ends in it: no hook is called before the first node of a graph.",
        ),
        _replaced(
            "torch.nn:Module",
            "_call_impl",
            "Each forward of a module. A hook would be part of the module: copied, saved and compiled with it.",
        ),
        _replaced(
            "torch.serialization",
            "_save _legacy_save",
            "torch.save in its two formats; a program may have imported torch.save itself before the block.",
        ),
        _replaced(
            "torch.distributed.checkpoint.state_dict_saver",
            "_save_state_dict",
            "What torch.distributed.checkpoint's save does, whoever has imported that.",
        ),
        _replaced(
            "torch.distributed.checkpoint.staging:DefaultStager",
            "stage",
            "async_save copies the state here, and then returns; a thread of its own writes the copy.",
        ),
        _replaced(
            "torch.distributed.checkpoint.staging:BlockingAsyncStager",
            "stage",
            "The same, for a storage writer that is its own stager.",
        ),
    ),
    *_in(
        "meter/observe_program.py",
        _used(
            "torch.utils._python_dispatch",
            "_get_current_dispatch_mode _pop_mode _push_mode",
            "A block may end on another thread, or inside a mode of the program's that is still on.",
        ),
        _used(
            "torch._C",
            "_len_torch_dispatch_stack",
            "Whether the program has a dispatch mode of its own.",
            source="torch/csrc/autograd/init.cpp",
        ),
    ),
    *_in(
        "watching/framework_buffers.py",
        _used("torch.nn.parallel:DistributedDataParallel", "reducer", "It has DDP's buckets.", on_instances=True),
        _used(
            "torch._C._distributed_c10d:Reducer",
            "_get_zeros_like_grad_buckets",
            "It passes each bucket to torch.zeros_like, where a dispatch mode sees it; nothing else shows them.",
            source="torch/csrc/distributed/c10d/init.cpp",
        ),
    ),
    *_in(
        "backends/simulated.py",
        *(
            _replaced(
                f"megatron.core.fusions.{function}",
                "backward",
                "Autograd sums the gradient of the bias over all tokens, and the GPU's sum allocates memory for that.",
            )
            for function in ("fused_bias_gelu:GeLUFunction", "fused_bias_swiglu:BiasSwiGLUFunction")
        ),
        _replaced(
            "torch.distributed",
            "all_gather_object batch_isend_irecv all_gather reduce_scatter",
            "The first needs the other ranks, the second looks up a backend for the device of fake tensors, and of the "
            "last two NCCL makes a copy.",
        ),
    ),
    *_in(
        "backends/fully_sharded.py",
        _replaced(
            "torch.distributed._functional_collectives",
            "_maybe_wrap_tensor",
            "It makes a second tensor of a collective's output where tensors are fake.",
        ),
        _replaced(
            "torch.distributed.fsdp._fully_shard._fully_shard",
            "_get_device_from_mesh",
            "A mesh has no device type for fake tensors.",
        ),
        _replaced(
            "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
            "to_sharded_dtensor",
            "It gets a gradient that a copy to the host left where it was, because device and host are the same RAM.",
        ),
        _replaced(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
            "_validate_no_meta_params _validate_cpu_offload_params",
            "They refuse tensors without values, on the device and on the host.",
        ),
        _replaced(
            "torch.distributed.fsdp._common_utils:_FSDPDeviceHandle",
            "from_device",
            "FSDP1 finds no module of torch for the device of fake tensors.",
        ),
        _replaced(
            "torch.optim.adam",
            "_device_dtype_check_for_fused",
            "It refuses fake tensors, which stand for a CUDA device's.",
        ),
        _replaced(
            "torch.nn.utils.clip_grad",
            "_device_has_foreach_support",
            "It says that fake tensors have none, which stand for a CUDA device's.",
        ),
        _replaced(
            "torch.distributed.tensor._sharding_prop:ShardingPropagator",
            "_propagate_tensor_meta_non_cached",
            "It runs each operation once on torch's own fake tensors, which take no memory and the meter must not see.",
        ),
    ),
    *_in(
        "engines/fsdp2/selective_checkpoint.py",
        _used(
            "torch.utils.checkpoint",
            "_CachingTorchDispatchMode _CachedTorchDispatchMode",
            "A selective checkpoint's modes: what is one operation on a GPU is several on a CPU and on fake tensors.",
        ),
        _used(
            "torch.utils._python_dispatch",
            "_get_current_dispatch_mode _pop_mode_temporarily",
            "Whether such a mode is the innermost one, and operations that it does not see.",
        ),
        _used(
            "torch._functorch.partitioners",
            "get_default_op_list",
            "The operations whose results NeMo Automodel and torchtitan keep.",
        ),
        _used(
            "torch.ops:aten",
            "_grouped_mm _scaled_dot_product_cudnn_attention",
            "Operations of which a selective checkpoint keeps the results, or every second one.",
            source="aten/src/ATen/native/native_functions.yaml",
        ),
    ),
    *_in(
        "engines/fsdp2/context_parallel.py",
        _used(
            "torch.distributed.tensor.experimental._context_parallel._attention",
            "_templated_ring_attention _templated_ring_attention_backward",
            "Its loop over the ranks that share a sequence, with kernels for a CPU and for fake tensors.",
        ),
    ),
    *_in(
        "engines/fsdp2/tensor_parallel.py",
        _used(
            "torch.distributed.tensor.parallel:SequenceParallel",
            "_prepare_output_fn",
            "NeMo Automodel's norm of a part of the sequence gathers its output there.",
        ),
    ),
    *_in(
        "engines/fsdp2/flat_model.py",
        _used(
            "torch.distributed.fsdp._common_utils",
            "HandleTrainingState TrainingState",
            "A unit of FSDP1 between steps, after a step that did not reach its end.",
        ),
        _used(
            "torch.distributed.fsdp._init_utils",
            "SHARDING_STRATEGY_MAP",
            "What a unit does with gathered parameters, which changes between steps.",
        ),
        _used(
            "torch.distributed.fsdp._flat_param:FlatParamHandle",
            "_use_sharded_views _use_sharded_flat_param",
            "A flat parameter in another storage, and after a step that did not reach its end.",
        ),
        _used(
            "torch.distributed.fsdp._runtime_utils",
            "_handle _sync_gradients _post_backward_callback_queued _ran_pre_backward_hook _needs_pre_backward_unshard "
            "_prefetched _post_forward_index _training_state",
            "A unit's flat parameter, whether it reduces gradients, and what the end of a step sets.",
            on_instances=True,
        ),
        _used(
            "torch.distributed.fsdp:FullyShardedDataParallel",
            "_zero_scalar",
            "What its clipping keeps on the device.",
            on_instances=True,
        ),
        _used(
            "torch.distributed.fsdp._flat_param:FlatParamHandle",
            "_use_orig_params _sharding_strategy",
            "How a unit has its parameters.",
            on_instances=True,
        ),
        _used(
            "torch.distributed.fsdp:ShardingStrategy",
            "_HYBRID_SHARD_ZERO2",
            "What verl takes for groups of ranks that keep gathered parameters.",
        ),
    ),
    *_in(
        "engines/fsdp2/attention.py",
        _used(
            "torch.ops:aten",
            "_scaled_dot_product_attention_math",
            "The attention that torch chooses on a GPU in fp32 with grouped queries; not on fake tensors.",
            source="aten/src/ATen/native/native_functions.yaml",
        ),
    ),
    *_in(
        "engines/fsdp2/sharded_model.py",
        _used(
            "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule",
            "_get_fsdp_state",
            "FSDP2's objects for the parameters, which alone know the padded shards.",
        ),
        _used(
            "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState",
            "_fsdp_param_group",
            "The parameters that are gathered together; torch 2.13 has several groups, as ``_fsdp_param_groups``.",
            on_instances=True,  # up to torch 2.12, a property since
        ),
        _used(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
            "post_forward_mesh_info",
            "The ranks over which a layer is spread after its forward, which no function takes as a number later.",
            on_instances=True,
        ),
        _used(
            "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
            "_sharded_param_data _unsharded_param device",
            "The shard with its padding, and the gathered parameter, whose gradient a step that failed leaves.",
            on_instances=True,
        ),
    ),
    *_in(
        "backends/gloo_collectives.py",
        _used(
            "torch._C._distributed_c10d",
            "FakeWork",
            "A collective that has ended, for those who wait for it.",
            source="torch/csrc/distributed/c10d/init.cpp",
        ),
    ),
    *_in(
        "meter/storages.py",
        _used(
            "torch:UntypedStorage",
            "_cdata",
            "The address of the C++ storage: the one identity that all tensors over a storage share.",
            source="torch/storage.py",
        ),
        _used(
            "torch._C",
            "DisableTorchFunction",
            "In every step, every parameter is looked at several times; no function mode has to see that.",
            source="torch/csrc/utils/disable_torch_function.cpp",
        ),
    ),
    *_in(
        "engines/megatron/layers/fp8_parameters.py",
        _used(
            "torch:Tensor",
            "_make_subclass",
            "A parameter of a class of its own over a tensor that exists, as torch.nn.Parameter makes itself.",
            source="torch/csrc/autograd/python_variable.cpp",
        ),
    ),
    *_in(
        "backends/meta_result_cache.py",
        _used(
            "torch._ops:OpOverload",
            "_schema",
            "Whether an operation returns new tensors, views or its input.",
            on_instances=True,
        ),
    ),
    *_in(
        "ranks/rank_process.py",
        _used("sys", "_current_frames", "Where a rank is that does not move, for the message that names it."),
    ),
    *_in(
        "engines/residency/group_usage.py",
        _used("torch.utils._pytree", "tree_leaves", "The tensors among an operation's nested arguments."),
    ),
    *_in(
        "backends/fake_collectives.py",
        _used("torch.utils._pytree", "tree_map_only", "Replaces the tensors among an operation's nested arguments."),
        _used(
            "torch.library:Library", "_destroy", "Ends the registration of the collectives' meta kernels with the job."
        ),
        _used(
            "torch.ops:c10d",
            "allreduce_ allreduce_coalesced_ broadcast_ allgather_ _allgather_base_ "
            "allgather_into_tensor_coalesced_ reduce_scatter_ _reduce_scatter_base_ "
            "reduce_scatter_tensor_coalesced_ alltoall_ alltoall_base_ send recv_",
            "The fake process group has no kernel for meta tensors. The kernels are registered for each simulated job.",
            source="torch/csrc/distributed/c10d/Ops.cpp",
        ),
    ),
    *_in(
        "meter/module_tracker.py",
        _used(
            "torch._C._autograd",
            "_get_sequence_nr",
            "The sequence number that the next autograd node gets: it tells which module makes which nodes.",
            source="torch/csrc/autograd/init.cpp",
        ),
        _used(
            "torch.autograd.graph:Node",
            "_sequence_nr metadata next_functions register_prehook",
            "A node's sequence number, and the place where its module is written.",
        ),
        _used(
            "torch._C:_functions",
            "AccumulateGrad",
            "The node of a leaf: no module's forward makes it.",
            source="torch/csrc/autograd/functions/init.cpp",
        ),
    ),
    *_in(
        "engines/megatron/retention/remedies.py",
        _used(
            "torch:Tensor",
            "_use_count",
            "The C++ owners of a tensor: release_storage empties nothing that has another owner.",
            source="tools/autograd/templates/python_variable_methods.cpp",
        ),
        _used(
            "torch._C",
            "_storage_Use_Count",
            "The tensors over a storage: release_storage empties nothing that another tensor uses.",
            source="torch/csrc/Module.cpp",
        ),
    ),
    *_in(
        "engines/megatron/layers/torch_functions.py",
        _used(
            "torch.ops:aten",
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
            "Attention that keeps the log-sum-exp instead of the scores, as Transformer Engine's kernels do.",
            source="aten/src/ATen/native/native_functions.yaml",
        ),
    ),
    *_in(
        "engines/process_group.py",
        _used(
            "torch.testing._internal.distributed",
            "fake_pg",
            "Importing the module registers the `fake` process group, which allocates nothing.",
        ),
    ),
    *_in(
        "upstream/compiler_on_demand.py",
        _used(
            "torch._dynamo",
            "disable graph_break trace_rules",
            "A stand-in answers for them until something is compiled; any other name imports the compiler.",
        ),
    ),
    *_in(
        "backends/cuda.py",
        _used(
            "torch._dynamo.config:_config",
            "recompile_limit accumulated_recompile_limit",
            "The defaults: torch 2.13 keeps assigned values per thread, and a lab compiles on its own and autograd's.",
        ),
    ),
    *_in(
        "meter/cuda/meter.py",
        _used(
            "torch.cuda.memory",
            "_record_memory_history _snapshot _set_memory_metadata",
            "The caching allocator's history, with the number of a stamp in each entry.",
        ),
        _used(
            "torch._C",
            "_host_emptyCache",
            "Cached pinned memory belongs to no tensor, and must be freed with a model.",
            source="torch/csrc/cuda/Module.cpp",
            needs_cuda=True,
        ),
    ),
    *_in(
        "engines/megatron/retention/transformer_engine_caches.py",
        _used(
            "torch._C",
            "_cuda_clearCublasWorkspaces",
            "cuBLAS's workspaces belong to no tensor, and must be freed with a lab.",
            source="torch/csrc/cuda/Module.cpp",
            needs_cuda=True,
        ),
    ),
    *(
        Internal(
            owner=f"torch.distributed.fsdp._fully_shard.{module}",
            names=("_get_device_handle",),
            use="replaced",
            where="backends/fully_sharded.py",
            why="Streams and events of fake tensors are those of CUDA, so that the allocator has their pools.",
        )
        for module in ("_fsdp_collectives", "_fsdp_param_group", "_fsdp_state")
    ),
    *_in(
        "backends/fully_sharded.py",
        _replaced(
            "torch.distributed.fsdp._runtime_utils",
            "_catch_all_reshard",
            "It compares addresses, of which fake tensors have none.",
        ),
        _used(
            "torch.distributed.fsdp._runtime_utils",
            "_reshard _should_free_in_backward",
            "What it does with a unit that is still gathered.",
        ),
        _replaced(
            "torch.distributed.fsdp._flat_param:FlatParamHandle",
            "_get_unflat_views_aligned _get_unflat_views_unaligned",
            "Their backward runs on the stream that makes them.",
        ),
        _used(
            "torch.distributed.fsdp._flat_param:FlatParameter",
            "_local_shard",
            "A unit's own part, in whose place the gathered parameters may still be.",
            on_instances=True,
        ),
        _used(
            "torch.distributed.fsdp._flat_param:FlatParamHandle",
            "_skipped_use_sharded_views",
            "Whether a unit has still to be resharded.",
            on_instances=True,
        ),
    ),
)

_WITHOUT_TE = (
    *_in(
        "backends/cpu.py",
        _replaced(_RANDOM, "_get_cuda_rng_state _set_cuda_rng_state", "They read and write a CUDA generator."),
        _replaced(
            _RANDOM,
            "FP8GlobalStateManager activation_recompute_forward fp8_autocast",
            "CheckpointWithoutOutput calls TE whether FP8 is on or not.",
            absent_without_te=True,
        ),
        _replaced(
            _RANDOM,
            "_get_share_storage",
            "It compiles a CUDA extension that lets two tensors share one storage.",
            since=(0, 17),
        ),
        _replaced(
            _OFFLOAD + ":ChunkOffloadHandler",
            "_can_manage_tensor_for_offload",
            "It requires a tensor on a CUDA device.",
            since=(0, 19),
        ),
        _replaced(
            "megatron.core.extensions.transformer_engine",
            "cpu_offload",
            "Fine-grained offload switches TE's own offload around a group, and refuses to run without it.",
        ),
        _replaced(
            "megatron.core.tensor_parallel.layers",
            "HAVE_TE _grad_accum_fusion_available",
            "The output layer refuses gradient_accumulation_fusion without Apex, and takes TE's unused gradients.",
        ),
        _replaced(
            "megatron.core.tensor_parallel.layers:ColumnParallelLinear",
            "_forward_impl",
            "Gradients of a tied embedding are added in place, as autograd adds them without a meter.",
        ),
        _replaced(
            "megatron.core.tensor_parallel.layers",
            "fused_weight_gradient_mlp_cuda get_dummy_wgrad",
            "Apex' product into the gradients' buffer, and TE's unused gradient, in torch (`weight_gradients`).",
            absent_without_te=True,
        ),
        _replaced(
            "megatron.core.models.common.embeddings.rope_utils",
            "fused_apply_rotary_pos_emb fused_apply_rotary_pos_emb_thd",
            "TE's fused rotation in torch (`fused_rope`); Megatron refuses apply_rope_fusion where it is None.",
        ),
        _replaced(
            "megatron.core.transformer.multi_latent_attention",
            "fused_apply_mla_rope_for_q fused_apply_mla_rope_for_kv",
            "Kernels in Triton, which needs a GPU (`latent_rope`).",
        ),
        *(
            _replaced(
                module, "quick_gelu", "Compiled, it keeps its input for backward and nothing else (`quick_gelu`)."
            )
            for module in ("megatron.core.transformer.transformer_config", "megatron.core.transformer.moe.experts")
        ),
        _replaced(_MOE_UTILS, "HAVE_TE", "Fused permutations need it to be true."),
        _replaced(
            _MOE_UTILS,
            "te_general_gemm fused_permute fused_permute_with_probs fused_unpermute "
            "fused_sort_chunks_by_index fused_sort_chunks_by_index_with_probs fused_topk_with_score_function "
            "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss",
            "TE's fused permutations and router in torch (`torch_moe`, `fused_router`); te_general_gemm as None "
            "selects torch.mm.",
            absent_without_te=True,
        ),
        _replaced(
            "megatron.core.models.common.language_module.language_module",
            "te_parallel_cross_entropy",
            "TE's fused cross entropy is Triton kernels, which need a GPU.",
        ),
        _replaced(
            "megatron.core.fusions.fused_cross_entropy",
            "calculate_predicted_logits calculate_gradients",
            "What torch.compile makes of them allocates copies of the logits that their code does not show.",
        ),
        _replaced(
            "megatron.core.optimizer",
            "USING_PYTORCH_OPTIMIZER Adam",
            "With TE they are its CUDA optimizer; without, torch's.",
        ),
        _replaced(
            "megatron.core.optimizer.distrib_optimizer",
            "Adam",
            "The distributed optimizer takes only this class, torch's AdamW and the hybrid optimizer.",
        ),
        _replaced(
            "megatron.core.optimizer",
            "CPUAdam",
            "The CPU optimizer's Adam: its state counts as host memory (`cpu_adam`).",
        ),
        _replaced(
            "megatron.core.optimizer.clip_grads",
            "multi_tensor_applier multi_tensor_scale_impl l2_norm_impl",
            "With TE they are its CUDA kernels; these are Megatron's own without.",
        ),
        _replaced(
            "megatron.core.optimizer.clip_grads",
            "multi_tensor_scale_tensor_impl",
            "With TE it is a CUDA kernel; None selects multi_tensor_scale_impl.",
            absent_without_te=True,
            since=(0, 17),
        ),
        _replaced(
            "megatron.core.optimizer.optimizer", "multi_tensor_applier multi_tensor_scale_impl", "As in clip_grads."
        ),
        _used(
            "megatron.core.utils",
            "local_multi_tensor_applier local_multi_tensor_scale local_multi_tensor_l2_norm",
            "What Megatron uses without TE and Apex.",
        ),
    ),
    *_in(
        "backends/simulated.py",
        _replaced(
            "megatron.core.transformer.transformer_config",
            "is_te_min_version",
            "Megatron's config asks it before it accepts FP8.",
        ),
        *(
            _replaced(
                f"megatron.core.transformer.{module}",
                "is_te_min_version",
                "Under FP8 its linears save their inputs as they are from some version on.",
            )
            for module in ("multi_latent_attention", "moe.shared_experts")
        ),
        _replaced(
            "megatron.core.transformer.multi_token_prediction",
            "get_fp8_context",
            "It opens TE's FP8 context, which asks a GPU which recipes it supports.",
        ),
        _replaced(
            "megatron.core.fp8_utils",
            "HAVE_TE_FP8_TENSOR_CLASS FP8_TENSOR_CLASS _modify_underlying_storage_impl _quantize_param_shard_impl",
            "DDP and the distributed optimizer ask it what a parameter in FP8 is, and move and quantize it with it.",
        ),
        _replaced(
            "megatron.core.distributed.param_and_grad_buffer",
            "is_mxfp8tensor",
            "DDP asks it which parameters are gathered in the gradients' buffer.",
        ),
        _replaced("megatron.core.transformer.moe.experts", "HAVE_TE", "Under FP8 grouped experts assert it."),
        _replaced(
            "megatron.core.transformer.moe.experts",
            "Fp8Padding Fp8Unpadding",
            "Under FP8 experts' rows are padded by TE's modules.",
            absent_without_te=True,
        ),
        _replaced(
            "megatron.core.extensions.transformer_engine",
            "te_checkpoint",
            "Under FP8 Megatron checkpoints MLPs with it.",
        ),
        _replaced(
            "megatron.core.transformer.transformer_block",
            "get_fp8_context",
            "It opens TE's FP8 context, which asks a GPU which recipes it supports.",
        ),
        _replaced(
            "megatron.core.transformer.transformer_block",
            "te_checkpoint",
            "Under FP8 Megatron checkpoints layers with it.",
            until=(0, 18),
        ),
        _replaced(
            "megatron.core.recompute",
            "get_fp8_context te_checkpoint",
            "The checkpoints of layers have moved here from ``transformer_block.py``, with these two names.",
            since=(0, 18),
        ),
        _replaced(
            "megatron.core.transformer.moe.moe_layer",
            "te_checkpoint",
            "Under FP8 Megatron checkpoints MoE layers with it.",
            absent_without_te=True,
        ),
    ),
    *_in(
        "engines/megatron/build.py",
        _replaced(
            "megatron.core.models.gpt.gpt_layer_specs",
            "TESpecProvider",
            "The spec is Transformer Engine's; only the classes in it are the provider's.",
            absent_without_te=True,
        ),
        _replaced(
            "megatron.core.models.gpt.gpt_layer_specs",
            "LocalSpecProvider",
            "The spec of Megatron's own layers; the norm and the attention in it are the provider's.",
        ),
    ),
    *_in("backends/cpu_adam.py", _used("torch.optim.adam:Adam", "_init_group", "It allocates the state.")),
    *_in(
        "engines/megatron/cpu_optimizer.py",
        _replaced(
            "megatron.core.optimizer",
            "HybridDeviceOptimizer",
            "Called as before, and the optimizer noted that DistributedOptimizer discards.",
        ),
        _used(
            "megatron.core.optimizer.cpu_offloading:HybridDeviceOptimizer",
            "gpu_params_map_cpu_copy param_to_fp32_param cpu_copy_map_grad sub_optimizers",
            "What it keeps on host and device.",
            on_instances=True,
        ),
    ),
    *(
        Internal(
            owner=owner,
            names=("is_te_min_version",),
            use="replaced",
            where="backends/cpu.py",
            why="It fails without TE; what TE's Adam stores depends on its version.",
        )
        for owner in ("megatron.core.optimizer", "megatron.core.optimizer.optimizer_config")
    ),
)

_MEGATRON = (
    *_in(
        "engines/megatron/training_step.py",
        _replaced(
            _RANDOM, "_fork_rng", "Both of Megatron's checkpoints recompute inside it, and nothing else uses it."
        ),
        _replaced(
            "megatron.core.transformer.transformer_config:TransformerConfig",
            "timers",
            "The schedules start timers around each pass, which gives the phases.",
        ),
    ),
    *_in(
        "replay/layers.py",
        _replaced(
            "megatron.core.tensor_parallel",
            "checkpoint",
            "The transformer block checkpoints layers with it; the layers are cells of the function that it is given.",
        ),
    ),
    *_in(
        "engines/megatron/retention/remedies.py",
        _replaced(_RANDOM, "detach_variable", "Pairs each checkpoint's saved inputs with the leaves made of them."),
        _replaced(
            _RANDOM + ":CheckpointFunction",
            "backward",
            "The remedies act on a checkpoint's input when its backward ends.",
        ),
        _replaced(
            _DISPATCHER + ":MoEAlltoAllTokenDispatcher",
            "dispatch_preprocess",
            "It keeps the probabilities with their graph; the remedy detaches them.",
        ),
        _used(
            _DISPATCHER + ":MoEAlltoAllTokenDispatcher",
            "probs",
            "The probabilities whose graph keeps a checkpoint's input allocated (verl #5251, Megatron-LM #3267).",
            on_instances=True,
        ),
        _used(
            _DISPATCHER + ":MoEAllGatherTokenDispatcher",
            "local_probs",
            "The same probabilities, of this rank's experts.",
            on_instances=True,
        ),
    ),
    *_in(
        "engines/megatron/recover_failed_step.py",
        _used(_RANDOM, "_unset_checkpointing", "A step that fails inside a checkpoint leaves it set."),
        _used(
            _RANDOM + ":CheckpointWithoutOutput",
            "run_function rng_states outputs ctx",
            "From forward to backward they keep the inputs with the step's graph; after a failed step, for good.",
            on_instances=True,
        ),
    ),
    *_in(
        "engines/megatron/retention/megatron_globals.py",
        _used(
            _RANDOM,
            "_CUDA_RNG_STATE_TRACKER _CUDA_RNG_STATE_TRACKER_INITIALIZED",
            "They keep random states for the process.",
        ),
        _used(
            _DISPATCHER + ":MoEAlltoAllTokenDispatcher",
            "cuda_dtoh_stream",
            "A stream that the class keeps for the process.",
        ),
        _used(
            "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding",
            "forward",
            "Its lru_cache keeps the angles of each sequence length on the device.",
        ),
        _used(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding",
            "forward",
            "The same; each layer of latent attention has such a module of its own.",
        ),
        _used(
            _MOE_UTILS + ":MoEAuxLossAutoScaler",
            "main_loss_backward_scale",
            "A tensor that the class keeps for the process.",
        ),
        _used(
            "megatron.core.transformer.multi_token_prediction:MTPLossAutoScaler",
            "main_loss_backward_scale",
            "The same, of the losses of multi-token prediction.",
        ),
        _used(
            "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper",
            "tracker",
            "The losses that layers of multi-token prediction log, kept for the process.",
        ),
    ),
    *_in(
        "replay/communication.py",
        _replaced(
            _BUCKETS,
            "start_param_sync start_grad_sync",
            "Begin the collectives within passes; what they send depends on where buckets end, and not on the layer.",
        ),
        _used(_BUCKETS, "register_grad_ready", "Begins to reduce gradients where a replayed pass gives the last ones."),
        _used(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
            "remove_forward_pre_hook_handles param_to_bucket_group force_all_reduce",
            "DDP's hooks before modules, and the bucket of a parameter, for passes that are replayed.",
            on_instances=True,
        ),
        _used("torch.nn:Module", "_forward_pre_hooks", "Calls the hook of DDP alone.", on_instances=True),
    ),
    *_in(
        "replay/dispatchers.py",
        _used(
            _RANDOM,
            "rng_states",
            "A checkpoint's node in autograd's graph keeps random states on the host until the graph is freed.",
            on_instances=True,
        ),
        _used(
            _DISPATCHER + ":MoEFlexTokenDispatcher",
            "_comm_manager",
            "It keeps tensors of a pass until the layer's next pass, beside those that the dispatcher itself keeps.",
            on_instances=True,
        ),
    ),
    *_in(
        "replay/microbatches.py",
        _replaced(
            "megatron.core.pipeline_parallel.schedules",
            "range",
            "The loops over micro-batches count with it, and leave out those that are inserted into a prediction.",
            is_builtin=True,
        ),
    ),
    *_in(
        "engines/megatron/activation_offload/manager.py",
        _replaced(
            "megatron.core.transformer.transformer_config:TransformerConfig",
            "fine_grained_activation_offloading",
            "Suspends offload in a forward-only step.",
        ),
        _used(
            _OFFLOAD + ":PipelineOffloadManager",
            "_cached_chunks_forward do_offload",
            "The chunks of the current step, and whether offload is on.",
            on_instances=True,
        ),
        _used(
            _OFFLOAD + ":PipelineOffloadManager",
            "OFFLOAD_MGR get_instance reset_instance cpu_tensor_pool disable_offload enable_offload",
            "The one manager of the process: started over with new settings, dropped with the model.",
        ),
        _used(_OFFLOAD + ":ChunkOffloadHandler", "offload_groups", "The groups of a chunk.", on_instances=True),
    ),
    *_in(
        "backends/simulated_routing.py",
        _replaced(
            _DISPATCHER + ":MoEAlltoAllTokenDispatcher",
            "preprocess",
            "It counts the tokens of each expert, which fake tensors cannot.",
        ),
        _replaced(_DISPATCHER, "gather_from_sequence_parallel_region", "It gathers those counts."),
        _used(
            _DISPATCHER + ":MoEAllGatherTokenDispatcher",
            "local_expert_indices tp_ep_group",
            "Which experts are a rank's own, and which ranks gather each other's tokens.",
            on_instances=True,
        ),
    ),
    *_in(
        "backends/cpu.py",
        _replaced(
            _DISPATCHER,
            "maybe_move_tensor_to_cpu",
            "It copies numbers of tokens only from a CUDA device, and an array would hold the memory of the tensor.",
        ),
        _replaced(
            _DISPATCHER,
            "permute",
            "Not fused, it selects by a mask, of which fake tensors do not know how many elements it selects.",
        ),
        _replaced(
            _DISPATCHER + ":MoEAllGatherTokenDispatcher",
            "dispatch_postprocess",
            "It counts the tokens of each expert and selects their probabilities by a mask, and keeps these with their "
            "graph, which a remedy detaches.",
        ),
        _replaced(
            "megatron.core.fusions.fused_bias_swiglu",
            "bias_swiglu weighted_swiglu weighted_swiglu_back",
            "Examples of what Megatron compiles: the search for compiled functions must find these.",
        ),
    ),
    *_in(
        "engines/megatron/activation_offload/audit.py",
        _replaced(_OFFLOAD + ":ChunkOffloadHandler", "offload reload", "The copies to the host and back."),
        _replaced(
            _OFFLOAD + ":FineGrainedActivationOffloadingInterface",
            "__enter__ __exit__",
            "The regions that Megatron names; it enters them whether they are offloaded or not.",
        ),
    ),
    *_in(
        "replay/offload_calls.py",
        _replaced(
            _OFFLOAD + ":ChunkOffloadHandler",
            "on_group_start_forward on_group_commit_forward on_group_commit_backward on_group_start_backward "
            "tensor_push tensor_pop",
            "What layers ask of the offload manager: replayed passes through layers ask the same.",
        ),
        _used(
            _OFFLOAD + ":ChunkOffloadHandler",
            "_offloaded_group_index",
            "Which group of a chunk the next layer's pass begins with.",
            on_instances=True,
        ),
        _used(
            _OFFLOAD + ":ChunkOffloadHandler",
            "_groups_to_reload",
            "Which host copies a backward pass brings back; a copy outside the pool is then freed.",
            on_instances=True,
        ),
        _used(
            _OFFLOAD + ":PipelineOffloadManager",
            "_is_warmup _cur_forward_chunk _cached_chunks_index_forward",
            "Which chunk and groups come next.",
            on_instances=True,
        ),
        _used(
            _OFFLOAD + ":PipelineOffloadManager",
            "d2h_stream h2d_stream pop_forward_chunk front_backward_chunk",
            "The streams of the copies, and the chunk of the next pass.",
        ),
        _used(
            _OFFLOAD + ":OffloadTensorGroup",
            "offload",
            "Whether the manager copies the group's tensors after its warm-up.",
            on_instances=True,
        ),
        _used(
            _OFFLOAD + ":GPUTensorPool",
            "_pools",
            "How many host buffers are free: a pass makes new ones only if none is.",
            on_instances=True,
            until=(0, 19),
        ),
        _used(
            _OFFLOAD + ":OffloadTensorPool",
            "_pools",
            "How many host buffers are free: a pass makes new ones only if none is.",
            on_instances=True,
            since=(0, 19),
        ),
    ),
    *_in(
        "engines/megatron/activation_offload/transfer_watch.py",
        _replaced(
            _OFFLOAD + ":OffloadTensorGroup",
            "push_tensor record_offload_event",
            "What a group receives: a tuple for an offloaded tensor, the tensor itself if it stays on the device.",
        ),
        _replaced(_OFFLOAD, "print_offload_summary_table", "It prints after the manager's warm-up."),
        _used(
            _OFFLOAD + ":OffloadTensorGroup",
            "_name _tensors",
            "A group's name and tensors; after a failed step they hold the step's activations.",
            on_instances=True,
        ),
        _used(
            _OFFLOAD,
            "offloading_activation",
            "The attribute that keeps a parameter on the device.",
            on_instances=True,
            until=(0, 19),
        ),
        _used(
            _OFFLOAD,
            "_do_not_offload",
            "The attribute that keeps a parameter on the device.",
            on_instances=True,
            since=(0, 19),
        ),
    ),
    *_in(
        "engines/megatron/layer_graphs.py",
        _used(
            "megatron.core.transformer.cuda_graphs",
            "_layer_is_graphable _set_capture_start _set_capture_end",
            "Say which layers have graphs of Transformer Engine, and let these run as they are captured.",
        ),
        _used(
            "megatron.core.transformer.module:GraphableMegatronModule",
            "_get_te_cuda_graph_replay_args",
            "What a replay of any module is called with.",
        ),
        _used(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
            "_make_forward_pre_hook",
            "A replayed layer gathers its parameters by a hook that Megatron's training calls.",
        ),
    ),
    *_in(
        "engines/megatron/graph_capture.py",
        _replaced(
            "megatron.core.transformer.transformer_layer:TransformerLayer",
            "_get_te_cuda_graph_replay_args",
            "It asks for Transformer Engine, which a prediction has not.",
        ),
    ),
    *_in(
        "engines/megatron/apply_settings.py",
        _used(
            "megatron.core.transformer.transformer_layer:TransformerLayer",
            "recompute_input_layernorm recompute_pre_mlp_layernorm recompute_mlp is_moe_layer "
            "offload_attn_norm offload_mlp_norm",
            "A layer copies its settings when it is built; a live model's are set here.",
            on_instances=True,
        ),
        _used(
            "megatron.core.transformer.transformer_layer:TransformerLayer",
            "offload_qkv_linear offload_core_attn offload_attn_proj",
            "0.19 copies three of attention's settings into the layer too.",
            on_instances=True,
            since=(0, 19),
        ),
        _used(
            "megatron.core.transformer.attention:Attention",
            "checkpoint_core_attention offload_qkv_linear offload_core_attention offload_attn_proj",
            "A layer copies its settings here too when it is built.",
            on_instances=True,
        ),
        _used(
            "megatron.core.transformer.moe.moe_layer:MoELayer",
            "moe_layer_recompute",
            "A layer copies its settings here too when it is built.",
            on_instances=True,
        ),
        _used(
            "megatron.core.transformer.moe.experts:TEGroupedMLP",
            "activation_recompute offload_expert_fc1 offload_moe_act",
            "A layer copies its settings here too when it is built.",
            on_instances=True,
        ),
    ),
    *_in(
        "engines/megatron/megatron_versions.py",
        _replaced(
            "megatron.core.transformer.multi_latent_attention",
            "TELinear",
            "Latent attention asks by class whether a linear is whole on each tensor parallel rank.",
        ),
        _replaced(
            "megatron.core.transformer.mla_qk_norm_config",
            "get_backend",
            "Latent attention takes norms and linears with norms from Transformer Engine's own provider.",
            since=(0, 19),
        ),
        _used(
            "megatron.core.transformer.transformer_layer:TransformerLayer",
            "mlp_norm_manager",
            "0.19 keeps the offload of a norm here, with the layer's graph, after a failed step.",
            on_instances=True,
            since=(0, 19),
        ),
        _used(
            "megatron.core.optimizer.optimizer:ChainedOptimizer",
            "_has_grad_norm_group_cache",
            "What a first step has asked the ranks; a model that starts over asks again.",
            on_instances=True,
            since=(0, 19),
        ),
        _used(
            _MOE_UTILS,
            "get_moe_layer_wise_logging_tracker",
            "The auxiliary losses that MoE layers log, kept for the process (0.18 has the next).",
        ),
        _used(
            _MOE_UTILS,
            "get_moe_metrics_tracker",
            "The auxiliary losses that MoE layers log, kept for the process.",
            since=(0, 18),
        ),
    ),
    *_in(
        "engines/megatron/layers/tensor_parallel.py",
        _used(
            "megatron.core.tensor_parallel.mappings",
            "_gather_along_first_dim _reduce_scatter_along_first_dim",
            "Sequence parallelism's collectives, in forward and in backward.",
        ),
    ),
    *_in(
        "engines/megatron/residency_faults.py",
        _used(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
            "_copy_model_grads_to_main_grads",
            "The fault of verl #5105 copies each gradient there.",
        ),
    ),
    *_in(
        "engines/megatron/data_parallel_overlap.py",
        _used(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
            "bucket_groups expert_parallel_bucket_groups use_forward_hook remove_forward_pre_hook_handles",
            "Whether parameters are gathered in forward, and which communication a failed step has started.",
            on_instances=True,
        ),
        _used(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
            "_copy_main_params_to_param_buffer",
            "Megatron-LM's training loop calls it before forward where parameters are gathered in gradients' buffers.",
        ),
        _used(
            _BUCKETS,
            "param_gather_handle grad_reduce_handle per_param_grad_ready_counts",
            "What a failed step leaves of its communication.",
            on_instances=True,
        ),
    ),
    *_in(
        "engines/megatron/build.py",
        _used(
            "megatron.core.optimizer.optimizer:ChainedOptimizer",
            "chained_optimizers",
            "The optimizers of dense and of expert parameters.",
            on_instances=True,
        ),
    ),
)

_TRANSFORMER_ENGINE = (
    *_in(
        "backends/fused_adam.py",
        _replaced(
            _ENGINE + ".optimizers", "FusedAdam", "Megatron imports it to see its arguments, and fails without TE."
        ),
    ),
    *_in(
        "engines/megatron/groups.py",
        _used(
            _ENGINE + ".optimizers.fused_adam:FusedAdam",
            "_scales",
            "The scales of states that are not fp32 are on the device, outside the state.",
            on_instances=True,
        ),
    ),
    *_in(
        "engines/megatron/holdings.py",
        _used(
            _ENGINE + ".tensor.float8_tensor:Float8Tensor",
            "_quantizer",
            "It has the scale and the largest value of an FP8 state.",
            on_instances=True,
        ),
    ),
    *_in(
        "engines/residency/group_usage.py",
        _replaced(
            _ENGINE + ".optimizers.multi_tensor_apply:MultiTensorApply",
            "__call__",
            "Kernels over lists of tensors, of which torch's dispatcher sees nothing.",
        ),
    ),
    *_in(
        "engines/megatron/retention/transformer_engine_caches.py",
        _used(
            _ENGINE + ".cpp_extensions.gemm",
            "get_cublas_workspace",
            "An lru_cache keeps a workspace per device on the device.",
        ),
        _used(_ENGINE + ".module.base", "_dummy_wgrads", "A cache of tensors on the device."),
        _used(
            _ENGINE + ".attention.dot_product_attention.utils", "_cu_seqlens_cache", "A cache of tensors on the device."
        ),
        _used(
            _ENGINE + ".quantization",
            "global_amax_buffer global_amax_history_buffer global_scale_buffer reset",
            "FP8 scales and maxima of all modules, which outlive a model.",
            on_instances=True,  # of FP8GlobalStateManager or, since 2.15, of its quantization_state
        ),
        _used(
            _ENGINE + ".attention.dot_product_attention.softmax",
            "_default_causal_mask",
            "A cache of tensors on the device.",
        ),
        _used(
            _ENGINE + ".attention.dot_product_attention.context_parallel",
            "_cu_seqlens_info_with_cp_cache",
            "A cache of tensors on the device.",
        ),
    ),
    *_in(
        "engines/megatron/training_step.py",
        _replaced(
            _ENGINE + ".distributed",
            "activation_recompute_forward",
            "Under FP8 layers are recomputed in it, and nothing else is.",
        ),
    ),
    *_in(
        "engines/megatron/retention/fp8_caches.py",
        _used(
            _ENGINE + ".module.base:TransformerEngineBaseModule",
            "_fp8_workspaces quantizers fp8_meta",
            "Weights in FP8, scales and maxima, which a module keeps on the device between steps.",
            on_instances=True,
        ),
        _used(
            _ENGINE + ".tensor.storage.float8_tensor_storage:Float8TensorStorage",
            "_transpose _scale_inv",
            "What a parameter in FP8 keeps outside DDP's buffer.",
            on_instances=True,
        ),
        _used(
            _ENGINE + ".tensor.storage.float8_blockwise_tensor_storage:Float8BlockwiseQTensorStorage",
            "_rowwise_scale_inv _columnwise_data _columnwise_scale_inv",
            "What a parameter in FP8 keeps outside DDP's buffer.",
            on_instances=True,
        ),
        _used(
            _ENGINE + ".tensor.storage.mxfp8_tensor_storage:MXFP8TensorStorage",
            "_rowwise_data",
            "A parameter in MXFP8 is outside DDP's buffer as a whole.",
            on_instances=True,
        ),
    ),
    *_in(
        "engines/megatron/attention_environment.py",
        _used(
            _ENGINE + ".attention.dot_product_attention.dot_product_attention",
            "_attention_backends",
            "The attention backend that TE chose and remembers: it must choose again when the variables change.",
        ),
        _used(
            _ENGINE + ".attention.dot_product_attention.utils:FlashAttentionUtils",
            "is_installed v3_is_installed",
            "Whether TE found a flash-attn that it supports.",
        ),
    ),
)

INTERNALS = (*_TORCH, *_WITHOUT_TE, *_MEGATRON, *_TRANSFORMER_ENGINE)


@cache
def replaceable() -> dict[str, tuple[Internal, str]]:
    """Returns the row and the attribute of each name that is replaced, by its dotted name."""
    return {
        f"{row.owner.replace(':', '.')}.{name}": (row, name)
        for row in INTERNALS
        for name in row.names
        if row.use == "replaced"
    }
