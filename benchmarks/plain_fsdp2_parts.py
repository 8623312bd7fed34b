"""What `benchmarks.plain_fsdp2` steps, as NeMo Automodel, torchtitan and verl make it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def of_version_1(job: Any, model: Any, dtype: Any, reduced: Any, kind: str) -> Any:
    """Wraps a model as verl does with its strategy ``fsdp``."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    if model.config.tie_word_embeddings:  # what FSDP1 materializes module by module is not tied any more
        model.to_empty(device=kind)
        model.tie_weights()
    layer = type(model.model.layers[0])

    def is_unit(module: Any) -> bool:
        """Whether it is a layer, or a matrix of an adapter, beside which a unit has no frozen parameters."""
        weight = getattr(module, "weight", None)
        is_adapter = job.lora_rank is not None and weight is not None and weight.requires_grad
        return isinstance(module, layer) or (is_adapter and not list(module.children()))

    strategy = ShardingStrategy.SHARD_GRAD_OP if job.reshard_after_forward == "none" else ShardingStrategy.FULL_SHARD
    shape: tuple[int, ...] = (job.num_ranks,)
    if job.dp_replicate_size > 1:
        shape = (job.dp_replicate_size, job.num_ranks // job.dp_replicate_size)
        strategy = ShardingStrategy.HYBRID_SHARD
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=init_device_mesh(kind, shape),
        auto_wrap_policy=CustomPolicy(is_unit),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=reduced, buffer_dtype=torch.float32),
        sharding_strategy=strategy,
        device_id=torch.cuda.current_device() if kind == "cuda" else torch.device("cpu"),
        param_init_fn=lambda module: module.to_empty(device=kind, recurse=False),
        forward_prefetch=bool(job.fsdp2_forward_prefetch_depth),
        use_orig_params=job.use_orig_params,
    )
    for parameter in wrapped.parameters():
        parameter.detach().normal_(0, 0.02)
    inner = wrapped.module
    inner.model.rotary_emb = type(inner.model.rotary_emb)(inner.config).to(kind)
    wrapped.config, wrapped.loss_function = inner.config, inner.loss_function
    return wrapped


def checkpoint_selectively(forward: Any) -> Any:
    """Checkpoints a layer as NeMo Automodel and torchtitan do selectively: every second product of matrices is kept."""
    import torch
    from torch._functorch.partitioners import get_default_op_list
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = {each.default for each in get_default_op_list().compute_intensive_ops} | {
        aten.topk.default,
        aten.max.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(context: Any, function: Any, *_: Any, **__: Any) -> Any:
            if function in (aten.mm.default, aten.linear.default, aten._grouped_mm.default):
                counts[context.is_recompute] += 1
                is_kept = counts[context.is_recompute] % 2 == 1
            else:
                is_kept = function in kept
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return lambda *inputs, **names: checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **names)


def varlen_of_torch(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attends as transformers has flash-attn 2 attend, with torch's own copy of its kernels."""
    import torch

    if (group := options.pop("context_parallel_group", None)) is not None:
        from benchmarks.plain_fsdp2_ulysses import attend_over_ranks

        return attend_over_ranks(varlen_of_torch, group, module, query, key, value, **options)
    positions, window, batch = options.get("position_ids"), options.get("sliding_window"), len(query)
    tensors = [each.transpose(1, 2) for each in (query, key, value)]
    ends, longest = None, query.shape[2]
    if positions is not None and batch == 1 and bool((positions.diff() < 0).any()):
        starts = (positions[0] == 0).nonzero().view(-1).to(torch.int32)
        ends = torch.cat((starts, starts.new_tensor([longest])))
        longest = int(ends.diff().max())
        tensors = [each.reshape(-1, *each.shape[-2:]) for each in tensors]
    window = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    sizes = (longest, longest, 0.0, True, False)
    if not query.is_cuda:  # a rehearsal
        mean = tensors[2].repeat_interleave(query.shape[1] // key.shape[1], -2) + tensors[0]
        return mean.view(batch, -1, *mean.shape[-2:]), None
    output = torch.ops.aten._flash_attention_forward(*tensors, ends, ends, *sizes, scale=options["scaling"], **window)[
        0
    ]
    return output.view(batch, -1, *output.shape[-2:]), None


def divide(model: Any, mesh: Any, *, sequences: bool) -> None:
    """Divides the matrices over tensor parallel ranks as NeMo Automodel's plans of Llama and Phi-3 say."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    class Gathered(SequenceParallel):
        """A norm of a part of the sequence whose output is gathered."""

        @staticmethod
        def _prepare_output_fn(use_local_output: bool, module: Any, outputs: DTensor, mesh: Any) -> Any:
            outputs = outputs.redistribute(device_mesh=mesh, placements=[Replicate()])
            return SequenceParallel._prepare_output_fn(use_local_output, module, outputs, mesh)

    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if model.config.model_type == "phi3":
        whole: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Replicate()}
        plan = {"model.embed_tokens": RowwiseParallel(**whole)}
        plan["model.layers.*.self_attn.qkv_proj"] = RowwiseParallel(**whole)
        plan["model.layers.*.self_attn.o_proj"] = ColwiseParallel(**whole)
        plan["model.layers.*.mlp.gate_up_proj"] = ColwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
        )
        plan["model.layers.*.mlp.down_proj"] = RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, plan)
        return
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if sequences:
        part: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
        plan |= {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **part),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            plan[f"model.layers.*.{name}"] = Gathered(use_local_output=model.config.model_type.startswith("qwen"))
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.*.{name}"] = RowwiseParallel(**part)
    parallelize_module(model, mesh, plan)


def adapt(model: Any, rank: int, *, by_peft: bool) -> None:
    """Freezes a model, and puts adapters beside the linears of its layers; PEFT, beside experts and routers too."""
    import torch

    if by_peft:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), model)
        return

    class Adapted(torch.nn.Module):
        def __init__(self, base_layer: Any) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.lora_A = torch.nn.Linear(base_layer.in_features, rank, bias=False, dtype=torch.float32)
            self.lora_B = torch.nn.Linear(rank, base_layer.out_features, bias=False, dtype=torch.float32)

        def forward(self, rows: Any) -> Any:
            return self.base_layer(rows) + self.lora_B(self.lora_A(rows.to(self.lora_A.weight.dtype))) * 2.0

    model.requires_grad_(False)
    for module in [each for layer in model.model.layers for each in layer.modules()]:
        for name, linear in list(module.named_children()):
            if name.endswith("_proj") and isinstance(linear, torch.nn.Linear):
                setattr(module, name, Adapted(linear))


@contextmanager
def sharded_sequences(job: Any, model: Any, inputs: dict[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """Shards a batch over context parallel ranks, for the block; yields the rank's part.

    As NeMo Automodel does, or with Ulysses as verl does.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if job.context_parallel_size == 1:
        yield inputs
        return
    if job.cp_comm_type == "a2a":
        from benchmarks.plain_fsdp2_ulysses import part_of_row

        yield part_of_row(job, inputs, device)
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    def without_mask(module: Any, args: Any, names: dict[str, Any]) -> Any:
        return args, names | {"attention_mask": None, "is_causal": True}

    own = {name: tensor.clone() for name, tensor in inputs.items()}
    own["position_ids"] = torch.arange(job.seq_length, device=device).unsqueeze(0)
    hooks = [
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True, prepend=True)
        for layer in model.model.layers
    ]
    set_rotate_method("allgather")
    ranks = job.context_parallel_size
    mesh = init_device_mesh(device, (job.num_ranks // ranks, ranks), mesh_dim_names=("dp", "cp"))["cp"]
    buffers = list(own.values())
    sharded = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers[:2]))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), sharded:
        yield own
    for hook in hooks:
        hook.remove()
