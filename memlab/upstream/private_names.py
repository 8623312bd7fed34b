"""What memlab replaces, calls or reads of torch, megatron-core and Transformer Engine beyond their public interfaces.

One row per place upstream. `memlab.upstream.patching` replaces nothing that has no row here, and a test checks that
every name exists in the installed versions. Read in torch 2.11 and 2.13, megatron-core 0.16.1 and 0.19.2, and
Transformer Engine 2.12.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Internal:
    """Names of one module or class."""

    owner: str
    """``package.module`` or ``package.module:Class``; the module is the upstream file, if `source` is empty."""
    names: tuple[str, ...]
    use: Literal["replaced", "used"]
    """``replaced`` for a block by `patched`, or called, read or written (``used``)."""
    where: str
    """The file of memlab that does it."""
    why: str
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


_RANDOM = "megatron.core.tensor_parallel.random"
_OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_ENGINE = "transformer_engine.pytorch"

_TORCH = (
    Internal(
        owner="torch.cuda",
        names=(
            *("Stream", "Event", "current_stream", "default_stream", "stream", "synchronize", "current_device"),
            *("set_device", "empty_cache", "nvtx", "manual_seed", "get_rng_state", "set_rng_state"),
        ),
        use="replaced",
        where="backends/cuda_on_cpu.py",
        why="Megatron calls them in every step; a CPU and fake tensors have no device behind them.",
    ),
    Internal(
        owner="torch",
        names=("compile",),
        use="replaced",
        where="model/__init__.py",
        why="Its default compiler takes 1.4 s of CPU to import, and without a GPU nothing is compiled.",
    ),
    Internal(
        owner="torch",
        names=("get_rng_state",),
        use="replaced",
        where="backends/cpu.py",
        why="The state that checkpoints save is host memory, and the meter must see it.",
    ),
    Internal(
        owner="torch",
        names=("from_numpy",),
        use="replaced",
        where="backends/cpu.py",
        why="It makes host memory, and neither a function mode nor a dispatch mode sees it.",
    ),
    Internal(
        owner="torch:Tensor",
        names=("record_stream",),
        use="replaced",
        where="backends/cpu.py",
        why="Its C++ signature refuses a stream that is not CUDA's, before a function mode is called.",
        source="torch/csrc/autograd/python_variable_methods.cpp",
    ),
    Internal(
        owner="torch:Tensor",
        names=("_indices", "_values"),
        use="used",
        where="meter/observers.py",
        why="The memory of a sparse tensor; the public names refuse a gradient, which is not coalesced.",
        source="aten/src/ATen/native/native_functions.yaml",
    ),
    Internal(
        owner="torch:UntypedStorage",
        names=("resize_",),
        use="replaced",
        where="meter/observers.py",
        why="Megatron frees and refills storages in place with it, and no dispatch mode sees it.",
        source="torch/csrc/StorageMethods.cpp",
    ),
    Internal(
        owner="torch.autograd",
        names=("_engine_run_backward",),
        use="replaced",
        where="watching/phases.py",
        why="Each backward of a program begins and ends in it: no hook is called before the first node of a graph.",
    ),
    Internal(
        owner="torch.distributed",
        names=("all_gather_object", "batch_isend_irecv"),
        use="replaced",
        where="backends/simulated.py",
        why="The first needs the other ranks, the second looks up a backend for the device of fake tensors.",
    ),
    Internal(
        owner="torch._C._distributed_c10d",
        names=("FakeWork",),
        use="used",
        where="backends/gloo_collectives.py",
        why="A collective that has ended, for those who wait for it.",
        source="torch/csrc/distributed/c10d/init.cpp",
    ),
    Internal(
        owner="torch:UntypedStorage",
        names=("_cdata",),
        use="used",
        where="meter/storage_meter.py",
        why="The address of the C++ storage: the one identity that all tensors over a storage share.",
        source="torch/storage.py",
    ),
    Internal(
        owner="torch:Tensor",
        names=("_make_subclass",),
        use="used",
        where="model/layers/fp8_parameters.py",
        why="A parameter of a class of its own over a tensor that exists, as torch.nn.Parameter makes itself.",
        source="torch/csrc/autograd/python_variable.cpp",
    ),
    Internal(
        owner="torch.utils._python_dispatch",
        names=("TorchDispatchMode",),
        use="used",
        where="meter/observers.py",
        why="The results of every operation.",
    ),
    Internal(
        owner="torch.utils._python_dispatch:TorchDispatchMode",
        names=("_should_skip_dynamo",),
        use="used",
        where="meter/observers.py",
        why="Whether torch wraps the mode's method for its compiler, which nothing needs where nothing is compiled.",
    ),
    Internal(
        owner="torch._C",
        names=("DisableTorchFunction",),
        use="used",
        where="meter/storage_meter.py",
        why="In every step, every parameter is looked at several times; no function mode has to see that.",
        source="torch/csrc/utils/disable_torch_function.cpp",
    ),
    Internal(
        owner="torch._C",
        names=("_DisableTorchDispatch", "_len_torch_dispatch_stack"),
        use="used",
        where="backends/cuda_on_cpu.py",
        why="Makes views of storages that the meter knows already; no other dispatch mode has to see them.",
        source="torch/csrc/autograd/init.cpp",
    ),
    Internal(
        owner="torch.utils._python_dispatch",
        names=("_disable_current_modes",),
        use="used",
        where="meter/storage_meter.py",
        why="Real values, or an unmetered block, in the middle of a step.",
    ),
    Internal(
        owner="torch._ops:OpOverload",
        names=("_schema",),
        use="used",
        where="backends/meta_result_cache.py",
        why="Whether an operation returns new tensors, views or its input.",
        on_instances=True,
    ),
    Internal(
        owner="sys",
        names=("_current_frames",),
        use="used",
        where="ranks/rank_process.py",
        why="Where a rank is that does not move, for the message that names it.",
    ),
    Internal(
        owner="torch.utils._pytree",
        names=("tree_leaves",),
        use="used",
        where="model/residency/group_usage.py",
        why="The tensors among an operation's nested arguments.",
    ),
    Internal(
        owner="torch.utils._pytree",
        names=("tree_map_only",),
        use="used",
        where="backends/fake_collectives.py",
        why="Replaces the tensors among an operation's nested arguments.",
    ),
    Internal(
        owner="torch._C._autograd",
        names=("_get_sequence_nr",),
        use="used",
        where="meter/module_tracker.py",
        why="The sequence number that the next autograd node gets: it tells which module makes which nodes.",
        source="torch/csrc/autograd/init.cpp",
    ),
    Internal(
        owner="torch.autograd.graph:Node",
        names=("_sequence_nr", "metadata", "next_functions", "register_prehook"),
        use="used",
        where="meter/module_tracker.py",
        why="A node's sequence number, and the place where its module is written.",
    ),
    Internal(
        owner="torch._C:_functions",
        names=("AccumulateGrad",),
        use="used",
        where="meter/module_tracker.py",
        why="The node of a leaf: no module's forward makes it.",
        source="torch/csrc/autograd/functions/init.cpp",
    ),
    Internal(
        owner="torch.autograd:Variable",
        names=("_execution_engine",),
        use="used",
        where="backends/cuda_on_cpu.py",
        why="Backward without torch.autograd.backward, which leaves the function mode while it runs.",
    ),
    Internal(
        owner="torch:Tensor",
        names=("_use_count",),
        use="used",
        where="model/retention/remedies.py",
        why="The C++ owners of a tensor: release_storage empties nothing that has another owner.",
        source="tools/autograd/templates/python_variable_methods.cpp",
    ),
    Internal(
        owner="torch._C",
        names=("_storage_Use_Count",),
        use="used",
        where="model/retention/remedies.py",
        why="The tensors over a storage: release_storage empties nothing that another tensor uses.",
        source="torch/csrc/Module.cpp",
    ),
    Internal(
        owner="torch.ops:aten",
        names=(
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        use="used",
        where="model/layers/torch_functions.py",
        why="Attention that keeps the log-sum-exp instead of the scores, as Transformer Engine's kernels do.",
        source="aten/src/ATen/native/native_functions.yaml",
    ),
    Internal(
        owner="torch.library:Library",
        names=("_destroy",),
        use="used",
        where="backends/fake_collectives.py",
        why="Ends the registration of the collectives' meta kernels with the job.",
    ),
    Internal(
        owner="torch.ops:c10d",
        names=(
            *("allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_"),
            *("allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_"),
            *("reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "send", "recv_"),
        ),
        use="used",
        where="backends/fake_collectives.py",
        why="The fake process group has no kernel for meta tensors. The kernels are registered for each simulated job.",
        source="torch/csrc/distributed/c10d/Ops.cpp",
    ),
    Internal(
        owner="torch.testing._internal.distributed",
        names=("fake_pg",),
        use="used",
        where="model/process_group.py",
        why="Importing the module registers the `fake` process group, which allocates nothing.",
    ),
    Internal(
        owner="torch._dynamo.eval_frame",
        names=("_torchdynamo_orig_callable",),
        use="used",
        where="backends/cpu.py",
        why="The function under torch.compile: Megatron's fused functions run eagerly, as one kernel for the meter.",
        on_instances=True,
    ),
    Internal(
        owner="torch._dynamo.config:_config",
        names=("recompile_limit", "accumulated_recompile_limit"),
        use="used",
        where="backends/cuda.py",
        why="The defaults: torch 2.13 keeps assigned values per thread, and a lab compiles on its own and autograd's.",
    ),
    Internal(
        owner="torch.cuda.memory",
        names=("_record_memory_history", "_snapshot", "_set_memory_metadata"),
        use="used",
        where="meter/cuda/meter.py",
        why="The caching allocator's history, with the number of a stamp in each entry.",
    ),
    Internal(
        owner="torch._C",
        names=("_cuda_clearCublasWorkspaces",),
        use="used",
        where="model/retention/transformer_engine_caches.py",
        why="cuBLAS's workspaces belong to no tensor, and must be freed with a lab.",
        source="torch/csrc/cuda/Module.cpp",
        needs_cuda=True,
    ),
    Internal(
        owner="torch._C",
        names=("_host_emptyCache",),
        use="used",
        where="meter/cuda/meter.py",
        why="Cached pinned memory belongs to no tensor, and must be freed with a model.",
        source="torch/csrc/cuda/Module.cpp",
        needs_cuda=True,
    ),
)

_WITHOUT_TE = (
    Internal(
        owner=_RANDOM,
        names=("_get_cuda_rng_state", "_set_cuda_rng_state"),
        use="replaced",
        where="backends/cpu.py",
        why="They read and write a CUDA generator.",
    ),
    Internal(
        owner=_RANDOM,
        names=("FP8GlobalStateManager", "activation_recompute_forward", "fp8_autocast"),
        use="replaced",
        where="backends/cpu.py",
        why="CheckpointWithoutOutput calls TE whether FP8 is on or not.",
        absent_without_te=True,
    ),
    Internal(
        owner="megatron.core.transformer.transformer_config",
        names=("is_te_min_version",),
        use="replaced",
        where="backends/simulated.py",
        why="Megatron's config asks it before it accepts FP8.",
    ),
    Internal(
        owner="megatron.core.fp8_utils",
        names=(
            *("HAVE_TE_FP8_TENSOR_CLASS", "FP8_TENSOR_CLASS", "_modify_underlying_storage_impl"),
            "_quantize_param_shard_impl",
        ),
        use="replaced",
        where="backends/simulated.py",
        why="DDP and the distributed optimizer ask it what a parameter in FP8 is, and move and quantize it with it.",
    ),
    Internal(
        owner="megatron.core.transformer.moe.experts",
        names=("HAVE_TE",),
        use="replaced",
        where="backends/simulated.py",
        why="Under FP8 grouped experts assert it.",
    ),
    Internal(
        owner="megatron.core.transformer.moe.experts",
        names=("Fp8Padding", "Fp8Unpadding"),
        use="replaced",
        where="backends/simulated.py",
        why="Under FP8 experts' rows are padded by TE's modules.",
        absent_without_te=True,
    ),
    Internal(
        owner="megatron.core.extensions.transformer_engine",
        names=("te_checkpoint",),
        use="replaced",
        where="backends/simulated.py",
        why="Under FP8 Megatron checkpoints MLPs with it.",
    ),
    Internal(
        owner="megatron.core.transformer.transformer_block",
        names=("get_fp8_context",),
        use="replaced",
        where="backends/simulated.py",
        why="It opens TE's FP8 context, which asks a GPU which recipes it supports.",
    ),
    Internal(
        owner="megatron.core.transformer.transformer_block",
        names=("te_checkpoint",),
        use="replaced",
        where="backends/simulated.py",
        why="Under FP8 Megatron checkpoints layers with it.",
        until=(0, 18),
    ),
    Internal(
        owner="megatron.core.recompute",
        names=("get_fp8_context", "te_checkpoint"),
        use="replaced",
        where="backends/simulated.py",
        why="The checkpoints of layers have moved here from ``transformer_block.py``, with these two names.",
        since=(0, 18),
    ),
    Internal(
        owner="megatron.core.transformer.moe.moe_layer",
        names=("te_checkpoint",),
        use="replaced",
        where="backends/simulated.py",
        why="Under FP8 Megatron checkpoints MoE layers with it.",
        absent_without_te=True,
    ),
    Internal(
        owner=_RANDOM,
        names=("_get_share_storage",),
        use="replaced",
        where="backends/cpu.py",
        why="It compiles a CUDA extension that lets two tensors share one storage.",
        since=(0, 19),
    ),
    Internal(
        owner=_OFFLOAD + ":ChunkOffloadHandler",
        names=("_can_manage_tensor_for_offload",),
        use="replaced",
        where="backends/cpu.py",
        why="It requires a tensor on a CUDA device.",
        since=(0, 19),
    ),
    Internal(
        owner="megatron.core.extensions.transformer_engine",
        names=("cpu_offload",),
        use="replaced",
        where="backends/cpu.py",
        why="Fine-grained offload switches TE's own offload around a group, and refuses to run without it.",
    ),
    Internal(
        owner="megatron.core.models.common.embeddings.rope_utils",
        names=("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"),
        use="replaced",
        where="backends/cpu.py",
        why="TE's fused rotation in torch (`fused_rope`); Megatron refuses apply_rope_fusion where it is None.",
    ),
    Internal(
        owner=_MOE_UTILS,
        names=("HAVE_TE",),
        use="replaced",
        where="backends/cpu.py",
        why="Fused permutations need it to be true.",
    ),
    Internal(
        owner=_MOE_UTILS,
        names=(
            *("te_general_gemm", "fused_permute", "fused_permute_with_probs", "fused_unpermute"),
            *("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs"),
        ),
        use="replaced",
        where="backends/cpu.py",
        why="TE's fused permutations in torch (`torch_moe`); te_general_gemm as None selects torch.mm.",
        absent_without_te=True,
    ),
    Internal(
        owner="megatron.core.models.common.language_module.language_module",
        names=("te_parallel_cross_entropy",),
        use="replaced",
        where="backends/cpu.py",
        why="TE's fused cross entropy is Triton kernels, which need a GPU.",
    ),
    Internal(
        owner="megatron.core.fusions.fused_cross_entropy",
        names=("calculate_predicted_logits", "calculate_gradients"),
        use="replaced",
        where="backends/cpu.py",
        why="What torch.compile makes of them allocates copies of the logits that their code does not show.",
    ),
    Internal(
        owner="megatron.core.optimizer",
        names=("USING_PYTORCH_OPTIMIZER", "Adam"),
        use="replaced",
        where="backends/cpu.py",
        why="With TE they are its CUDA optimizer; without, torch's.",
    ),
    Internal(
        owner="megatron.core.optimizer.distrib_optimizer",
        names=("Adam",),
        use="replaced",
        where="backends/cpu.py",
        why="The distributed optimizer takes only this class, torch's AdamW and the hybrid optimizer.",
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
    Internal(
        owner="megatron.core.optimizer",
        names=("CPUAdam",),
        use="replaced",
        where="backends/cpu.py",
        why="The CPU optimizer's Adam: its state counts as host memory (`cpu_adam`).",
    ),
    Internal(
        owner="torch.optim.adam:Adam",
        names=("_init_group",),
        use="used",
        where="backends/cpu_adam.py",
        why="It allocates the state.",
    ),
    Internal(
        owner="megatron.core.optimizer",
        names=("HybridDeviceOptimizer",),
        use="replaced",
        where="model/cpu_optimizer.py",
        why="Called as before, and the optimizer noted that DistributedOptimizer discards.",
    ),
    Internal(
        owner="megatron.core.optimizer.cpu_offloading:HybridDeviceOptimizer",
        names=("gpu_params_map_cpu_copy", "param_to_fp32_param", "cpu_copy_map_grad", "sub_optimizers"),
        use="used",
        where="model/cpu_optimizer.py",
        why="What it keeps on host and device.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.optimizer.clip_grads",
        names=("multi_tensor_applier", "multi_tensor_scale_impl", "l2_norm_impl"),
        use="replaced",
        where="backends/cpu.py",
        why="With TE they are its CUDA kernels; these are Megatron's own without.",
    ),
    Internal(
        owner="megatron.core.optimizer.clip_grads",
        names=("multi_tensor_scale_tensor_impl",),
        use="replaced",
        where="backends/cpu.py",
        why="With TE it is a CUDA kernel; None selects multi_tensor_scale_impl.",
        absent_without_te=True,
        since=(0, 19),
    ),
    Internal(
        owner="megatron.core.optimizer.optimizer",
        names=("multi_tensor_applier", "multi_tensor_scale_impl"),
        use="replaced",
        where="backends/cpu.py",
        why="As in clip_grads.",
    ),
    Internal(
        owner="megatron.core.utils",
        names=("local_multi_tensor_applier", "local_multi_tensor_scale", "local_multi_tensor_l2_norm"),
        use="used",
        where="backends/cpu.py",
        why="What Megatron uses without TE and Apex.",
    ),
    Internal(
        owner="megatron.core.models.gpt.gpt_layer_specs",
        names=("TESpecProvider",),
        use="replaced",
        where="model/build.py",
        why="The spec is Transformer Engine's; only the classes in it are the provider's.",
        absent_without_te=True,
    ),
)

_MEGATRON = (
    Internal(
        owner=_RANDOM,
        names=("_fork_rng",),
        use="replaced",
        where="model/training_step.py",
        why="Both of Megatron's checkpoints recompute inside it, and nothing else uses it.",
    ),
    Internal(
        owner="megatron.core.tensor_parallel",
        names=("checkpoint",),
        use="replaced",
        where="model/layer_replay.py",
        why="The transformer block checkpoints layers with it; the layers are cells of the function that it is given.",
    ),
    Internal(
        owner=_RANDOM,
        names=("detach_variable",),
        use="replaced",
        where="model/retention/remedies.py",
        why="Pairs each checkpoint's saved inputs with the leaves made of them.",
    ),
    Internal(
        owner=_RANDOM + ":CheckpointFunction",
        names=("backward",),
        use="replaced",
        where="model/retention/remedies.py",
        why="The remedies act on a checkpoint's input when its backward ends.",
    ),
    Internal(
        owner=_RANDOM,
        names=("_unset_checkpointing",),
        use="used",
        where="model/recover_failed_step.py",
        why="A step that fails inside a checkpoint leaves it set.",
    ),
    Internal(
        owner=_RANDOM,
        names=("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"),
        use="used",
        where="model/retention/megatron_globals.py",
        why="They keep random states for the process.",
    ),
    Internal(
        owner="megatron.core.transformer.transformer_config:TransformerConfig",
        names=("timers",),
        use="replaced",
        where="model/training_step.py",
        why="The schedules start timers around each pass, which gives the phases.",
    ),
    Internal(
        owner=_RANDOM,
        names=("rng_states",),
        use="used",
        where="model/layer_replay.py",
        why="A checkpoint's node in autograd's graph keeps random states on the host until the graph is freed.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.pipeline_parallel.schedules",
        names=("range",),
        use="replaced",
        where="model/training_step.py",
        why="The loops over micro-batches count with it, and leave out those that are inserted into a prediction.",
        is_builtin=True,
    ),
    Internal(
        owner="megatron.core.transformer.transformer_config:TransformerConfig",
        names=("fine_grained_activation_offloading",),
        use="replaced",
        where="model/activation_offload/manager.py",
        why="Suspends offload in a forward-only step.",
    ),
    Internal(
        owner=_DISPATCHER + ":MoEAlltoAllTokenDispatcher",
        names=("preprocess",),
        use="replaced",
        where="backends/simulated_routing.py",
        why="It counts the tokens of each expert, which fake tensors cannot.",
    ),
    Internal(
        owner=_DISPATCHER,
        names=("gather_from_sequence_parallel_region",),
        use="replaced",
        where="backends/simulated_routing.py",
        why="It gathers those counts.",
    ),
    Internal(
        owner=_DISPATCHER,
        names=("maybe_move_tensor_to_cpu",),
        use="replaced",
        where="backends/cpu.py",
        why="It copies numbers of tokens only from a CUDA device, and an array would hold the memory of the tensor.",
    ),
    Internal(
        owner=_DISPATCHER + ":MoEAlltoAllTokenDispatcher",
        names=("cuda_dtoh_stream",),
        use="used",
        where="model/retention/megatron_globals.py",
        why="A stream that the class keeps for the process.",
    ),
    Internal(
        owner=_DISPATCHER + ":MoEAlltoAllTokenDispatcher",
        names=("dispatch_preprocess",),
        use="replaced",
        where="model/retention/remedies.py",
        why="It keeps the probabilities with their graph; the remedy detaches them.",
    ),
    Internal(
        owner=_DISPATCHER + ":MoEAlltoAllTokenDispatcher",
        names=("probs",),
        use="used",
        where="model/retention/remedies.py",
        why="The probabilities whose graph keeps a checkpoint's input allocated (verl #5251, Megatron-LM #3267).",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD + ":ChunkOffloadHandler",
        names=("offload", "reload"),
        use="replaced",
        where="model/activation_offload/audit.py",
        why="The copies to the host and back.",
    ),
    Internal(
        owner=_OFFLOAD + ":ChunkOffloadHandler",
        names=(
            *("on_group_start_forward", "on_group_commit_forward", "on_group_commit_backward"),
            *("on_group_start_backward", "tensor_push", "tensor_pop"),
        ),
        use="replaced",
        where="model/activation_offload/repeated_calls.py",
        why="What layers ask of the offload manager: replayed passes through layers ask the same.",
    ),
    Internal(
        owner=_OFFLOAD + ":ChunkOffloadHandler",
        names=("_offloaded_group_index",),
        use="used",
        where="model/activation_offload/repeated_calls.py",
        why="Which group of a chunk the next layer's pass begins with.",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD + ":ChunkOffloadHandler",
        names=("_groups_to_reload",),
        use="used",
        where="model/activation_offload/repeated_calls.py",
        why="Which host copies a backward pass brings back; a copy outside the pool is then freed.",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD + ":PipelineOffloadManager",
        names=(*("_is_warmup", "_cur_forward_chunk", "_cached_chunks_index_forward"),),
        use="used",
        where="model/activation_offload/repeated_calls.py",
        why="Which chunk and groups come next.",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD + ":PipelineOffloadManager",
        names=("d2h_stream", "h2d_stream", "pop_forward_chunk", "front_backward_chunk"),
        use="used",
        where="model/activation_offload/repeated_calls.py",
        why="The streams of the copies, and the chunk of the next pass.",
    ),
    Internal(
        owner=_OFFLOAD + ":OffloadTensorGroup",
        names=("offload",),
        use="used",
        where="model/activation_offload/repeated_calls.py",
        why="Whether the manager copies the group's tensors after its warm-up.",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD + ":GPUTensorPool",
        names=("_pools",),
        use="used",
        where="model/activation_offload/repeated_calls.py",
        why="How many host buffers are free: a pass makes new ones only if none is.",
        on_instances=True,
        until=(0, 19),
    ),
    Internal(
        owner=_OFFLOAD + ":OffloadTensorPool",
        names=("_pools",),
        use="used",
        where="model/activation_offload/repeated_calls.py",
        why="How many host buffers are free: a pass makes new ones only if none is.",
        on_instances=True,
        since=(0, 19),
    ),
    Internal(
        owner=_OFFLOAD + ":OffloadTensorGroup",
        names=("push_tensor", "record_offload_event"),
        use="replaced",
        where="model/activation_offload/transfer_watch.py",
        why="What a group receives: a tuple for an offloaded tensor, the tensor itself if it stays on the device.",
    ),
    Internal(
        owner=_OFFLOAD,
        names=("print_offload_summary_table",),
        use="replaced",
        where="model/activation_offload/transfer_watch.py",
        why="It prints after the manager's warm-up.",
    ),
    Internal(
        owner=_OFFLOAD + ":FineGrainedActivationOffloadingInterface",
        names=("__enter__", "__exit__"),
        use="replaced",
        where="model/activation_offload/audit.py",
        why="The regions that Megatron names; it enters them whether they are offloaded or not.",
    ),
    Internal(
        owner=_OFFLOAD + ":OffloadTensorGroup",
        names=("_name", "_tensors"),
        use="used",
        where="model/activation_offload/transfer_watch.py",
        why="A group's name and tensors; after a failed step they hold the step's activations.",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD + ":PipelineOffloadManager",
        names=("_cached_chunks_forward", "do_offload"),
        use="used",
        where="model/activation_offload/manager.py",
        why="The chunks of the current step, and whether offload is on.",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD + ":PipelineOffloadManager",
        names=(
            *("OFFLOAD_MGR", "get_instance", "reset_instance", "cpu_tensor_pool", "disable_offload", "enable_offload"),
        ),
        use="used",
        where="model/activation_offload/manager.py",
        why="The one manager of the process: started over with new settings, dropped with the model.",
    ),
    Internal(
        owner=_OFFLOAD + ":ChunkOffloadHandler",
        names=("offload_groups",),
        use="used",
        where="model/activation_offload/manager.py",
        why="The groups of a chunk.",
        on_instances=True,
    ),
    Internal(
        owner=_OFFLOAD,
        names=("offloading_activation",),
        use="used",
        where="model/activation_offload/transfer_watch.py",
        why="The attribute that keeps a parameter on the device.",
        on_instances=True,
        until=(0, 19),
    ),
    Internal(
        owner=_OFFLOAD,
        names=("_do_not_offload",),
        use="used",
        where="model/activation_offload/transfer_watch.py",
        why="The attribute that keeps a parameter on the device.",
        on_instances=True,
        since=(0, 19),
    ),
    Internal(
        owner="megatron.core.transformer.transformer_layer:TransformerLayer",
        names=(
            *("recompute_input_layernorm", "recompute_pre_mlp_layernorm", "recompute_mlp", "is_moe_layer"),
            *("offload_attn_norm", "offload_mlp_norm"),
        ),
        use="used",
        where="model/apply_settings.py",
        why="A layer copies its settings when it is built; a live model's are set here.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.transformer.transformer_layer:TransformerLayer",
        names=("offload_qkv_linear", "offload_core_attn", "offload_attn_proj"),
        use="used",
        where="model/apply_settings.py",
        why="0.19 copies three of attention's settings into the layer too.",
        on_instances=True,
        since=(0, 19),
    ),
    Internal(
        owner=_RANDOM + ":CheckpointWithoutOutput",
        names=("run_function", "rng_states", "outputs", "ctx"),
        use="used",
        where="model/recover_failed_step.py",
        why="From forward to backward they keep the inputs with the step's graph; after a failed step, for good.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.transformer.transformer_layer:TransformerLayer",
        names=("mlp_norm_manager",),
        use="used",
        where="model/megatron_versions.py",
        why="0.19 keeps the offload of a norm here, with the layer's graph, after a failed step.",
        on_instances=True,
        since=(0, 19),
    ),
    Internal(
        owner="megatron.core.transformer.attention:Attention",
        names=("checkpoint_core_attention", "offload_qkv_linear", "offload_core_attention", "offload_attn_proj"),
        use="used",
        where="model/apply_settings.py",
        why="A layer copies its settings here too when it is built.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.transformer.moe.moe_layer:MoELayer",
        names=("moe_layer_recompute",),
        use="used",
        where="model/apply_settings.py",
        why="A layer copies its settings here too when it is built.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.transformer.moe.experts:TEGroupedMLP",
        names=("activation_recompute", "offload_expert_fc1", "offload_moe_act"),
        use="used",
        where="model/apply_settings.py",
        why="A layer copies its settings here too when it is built.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.tensor_parallel.mappings",
        names=("_gather_along_first_dim", "_reduce_scatter_along_first_dim"),
        use="used",
        where="model/layers/tensor_parallel.py",
        why="Sequence parallelism's collectives, in forward and in backward.",
    ),
    Internal(
        owner="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        names=("_copy_model_grads_to_main_grads",),
        use="used",
        where="model/residency/injected_faults.py",
        why="The fault of verl #5105 copies each gradient there.",
    ),
    Internal(
        owner="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        names=(
            *("bucket_groups", "expert_parallel_bucket_groups", "use_forward_hook"),
            "remove_forward_pre_hook_handles",
        ),
        use="used",
        where="model/data_parallel_overlap.py",
        why="Whether parameters are gathered in forward, and which communication a failed step has started.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
        names=("param_gather_handle", "grad_reduce_handle", "per_param_grad_ready_counts"),
        use="used",
        where="model/data_parallel_overlap.py",
        why="What a failed step leaves of its communication.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.optimizer.optimizer:ChainedOptimizer",
        names=("_has_grad_norm_group_cache",),
        use="used",
        where="model/megatron_versions.py",
        why="What a first step has asked the ranks; a model that starts over asks again.",
        on_instances=True,
        since=(0, 19),
    ),
    Internal(
        owner="megatron.core.optimizer.optimizer:ChainedOptimizer",
        names=("chained_optimizers",),
        use="used",
        where="model/build.py",
        why="The optimizers of dense and of expert parameters.",
        on_instances=True,
    ),
    Internal(
        owner="megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding",
        names=("forward",),
        use="used",
        where="model/retention/megatron_globals.py",
        why="Its lru_cache keeps the angles of each sequence length on the device.",
    ),
    Internal(
        owner=_MOE_UTILS + ":MoEAuxLossAutoScaler",
        names=("main_loss_backward_scale",),
        use="used",
        where="model/retention/megatron_globals.py",
        why="A tensor that the class keeps for the process.",
    ),
    Internal(
        owner=_MOE_UTILS,
        names=("get_moe_layer_wise_logging_tracker",),
        use="used",
        where="model/megatron_versions.py",
        why="The auxiliary losses that MoE layers log, kept for the process (0.16; 0.19 has the next).",
    ),
    Internal(
        owner=_MOE_UTILS,
        names=("get_moe_metrics_tracker",),
        use="used",
        where="model/megatron_versions.py",
        why="The auxiliary losses that MoE layers log, kept for the process.",
        since=(0, 19),
    ),
    Internal(
        owner="megatron.core.fusions.fused_bias_swiglu",
        names=("bias_swiglu", "weighted_swiglu", "weighted_swiglu_back"),
        use="replaced",
        where="backends/cpu.py",
        why="Examples of what Megatron compiles: the search for compiled functions must find these.",
    ),
)

_TRANSFORMER_ENGINE = (
    Internal(
        owner=_ENGINE + ".optimizers",
        names=("FusedAdam",),
        use="replaced",
        where="backends/fused_adam.py",
        why="Megatron imports it to see its arguments, and fails without TE.",
    ),
    Internal(
        owner=_ENGINE + ".optimizers.fused_adam:FusedAdam",
        names=("_scales",),
        use="used",
        where="model/residency/residency.py",
        why="The scales of states that are not fp32 are on the device, outside the state.",
        on_instances=True,
    ),
    Internal(
        owner=_ENGINE + ".tensor.float8_tensor:Float8Tensor",
        names=("_quantizer",),
        use="used",
        where="model/residency/audit.py",
        why="It has the scale and the largest value of an FP8 state.",
        on_instances=True,
    ),
    Internal(
        owner=_ENGINE + ".optimizers.multi_tensor_apply:MultiTensorApply",
        names=("__call__",),
        use="replaced",
        where="model/residency/group_usage.py",
        why="Kernels over lists of tensors, of which torch's dispatcher sees nothing.",
    ),
    Internal(
        owner=_ENGINE + ".cpp_extensions.gemm",
        names=("get_cublas_workspace",),
        use="used",
        where="model/retention/transformer_engine_caches.py",
        why="An lru_cache keeps a workspace per device on the device.",
    ),
    Internal(
        owner=_ENGINE + ".distributed",
        names=("activation_recompute_forward",),
        use="replaced",
        where="model/training_step.py",
        why="Under FP8 layers are recomputed in it, and nothing else is.",
    ),
    Internal(
        owner=_ENGINE + ".module.base:TransformerEngineBaseModule",
        names=("_fp8_workspaces", "quantizers", "fp8_meta"),
        use="used",
        where="model/retention/fp8_caches.py",
        why="Weights in FP8, scales and maxima, which a module keeps on the device between steps.",
        on_instances=True,
    ),
    Internal(
        owner=_ENGINE + ".tensor.storage.float8_tensor_storage:Float8TensorStorage",
        names=("_transpose", "_scale_inv"),
        use="used",
        where="model/retention/fp8_caches.py",
        why="What a parameter in FP8 keeps outside DDP's buffer.",
        on_instances=True,
    ),
    Internal(
        owner=_ENGINE + ".tensor.storage.float8_blockwise_tensor_storage:Float8BlockwiseQTensorStorage",
        names=("_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"),
        use="used",
        where="model/retention/fp8_caches.py",
        why="What a parameter in FP8 keeps outside DDP's buffer.",
        on_instances=True,
    ),
    Internal(
        owner=_ENGINE + ".module.base",
        names=("_dummy_wgrads",),
        use="used",
        where="model/retention/transformer_engine_caches.py",
        why="A cache of tensors on the device.",
    ),
    Internal(
        owner=_ENGINE + ".attention.dot_product_attention.utils",
        names=("_cu_seqlens_cache",),
        use="used",
        where="model/retention/transformer_engine_caches.py",
        why="A cache of tensors on the device.",
    ),
    Internal(
        owner=_ENGINE + ".quantization:FP8GlobalStateManager",
        names=("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer", "reset"),
        use="used",
        where="model/retention/transformer_engine_caches.py",
        why="FP8 scales and maxima of all modules, which outlive a model.",
    ),
    Internal(
        owner=_ENGINE + ".attention.dot_product_attention.dot_product_attention",
        names=("_attention_backends",),
        use="used",
        where="model/attention_environment.py",
        why="The attention backend that TE chose and remembers: it must choose again when the variables change.",
    ),
    Internal(
        owner=_ENGINE + ".attention.dot_product_attention.utils:FlashAttentionUtils",
        names=("is_installed", "v3_is_installed"),
        use="used",
        where="model/attention_environment.py",
        why="Whether TE found a flash-attn that it supports.",
    ),
    Internal(
        owner=_ENGINE + ".attention.dot_product_attention.softmax",
        names=("_default_causal_mask",),
        use="used",
        where="model/retention/transformer_engine_caches.py",
        why="A cache of tensors on the device.",
    ),
    Internal(
        owner=_ENGINE + ".attention.dot_product_attention.context_parallel",
        names=("_cu_seqlens_info_with_cp_cache",),
        use="used",
        where="model/retention/transformer_engine_caches.py",
        why="A cache of tensors on the device.",
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
