"""Tensor parallelism by DTensor, as NeMo Automodel plans it for Llama, Qwen and Phi-3.

``components/distributed/optimized_tp_plans.py`` of 36044ad3: matrices are divided by columns and then by rows, norms
are whole on each rank. Under sequence parallelism, a rank has a part of the sequence between them. The output layer
leaves each rank with the logits of its part of the vocabulary; the loss copies them to fp32, and then gathers those of
the whole vocabulary (``components/loss/masked_ce.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def divide(module: Any, mesh: Any, *, sequences: bool) -> None:
    """Divides the matrices of transformers' model over the ranks of a mesh, and between them the sequence if asked."""
    family = module.config.model_type
    if family == "phi3":
        parallelize_module(module, mesh, _plan_of_phi3())
        return
    layer = "model.layers.*"
    by_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    of_sequence: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if sequences else {}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **of_sequence),
        **{f"{layer}.{name}": ColwiseParallel() for name in by_columns},
        **{f"{layer}.{name}": RowwiseParallel(**of_sequence) for name in ("self_attn.o_proj", "mlp.down_proj")},
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1) if sequences else None, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequences:
        norm = _GatheringNorm(use_local_output=family.startswith("qwen"))
        plan |= {f"{layer}.{name}": norm for name in ("input_layernorm", "post_attention_layernorm")}
        plan["model.norm"] = SequenceParallel()
    parallelize_module(module, mesh, plan)


def _plan_of_phi3() -> dict[str, Any]:
    """Returns the plan of fused matrices: those of attention are divided by rows, and what they make is whole."""
    whole: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    layer, local = "model.layers.*", {"use_local_output": False}
    return {
        "model.embed_tokens": RowwiseParallel(**whole),
        f"{layer}.self_attn.qkv_proj": RowwiseParallel(**whole),
        f"{layer}.self_attn.o_proj": ColwiseParallel(**whole),
        f"{layer}.mlp.gate_up_proj": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), **local),
        f"{layer}.mlp.down_proj": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), **local),
    }


class _GatheringNorm(SequenceParallel):
    """A norm of a rank's part of the sequence, whose output all ranks gather."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        gathered = outputs.redistribute(device_mesh=mesh, placements=[Replicate()])
        return SequenceParallel._prepare_output_fn(use_local_output, module, gathered, mesh)


def clip(parameters: Iterable[Any], max_norm: float) -> None:
    """Clips gradients, some of which are divided over more ranks than others, which torch's own function refuses."""
    by_mesh = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.device_mesh].append(parameter)
    squares = []
    for mesh, group in by_mesh.items():
        square = get_total_norm([each.grad.to_local() for each in group], foreach=True) ** 2
        for dimension, placement in enumerate(group[0].placements):
            if not placement.is_replicate():
                torch.distributed.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    norm = torch.stack(squares).sum().sqrt()
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, norm, foreach=True)
