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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from memlab.config.families import FAMILIES


def divide(module: Any, mesh: Any, *, sequences: bool) -> None:
    """Divides the matrices of transformers' model over the ranks of a mesh, and between them the sequence if asked."""
    trained = {name: each.requires_grad for name, each in module.named_parameters()}
    plan = _plan(module, sequences=sequences)
    ends = {"model.embed_tokens": module.model.embed_tokens, "lm_head": module.lm_head}
    for name, end in ends.items():  # a stage of a pipeline may have none
        if end is None or isinstance(end, torch.nn.Identity):
            del plan[name]
    parallelize_module(module, mesh, plan)
    for name, each in module.named_parameters():  # torch's styles make all parameters trainable
        each.requires_grad_(trained[name])


def _plan(module: Any, *, sequences: bool) -> dict[str, Any]:
    family = module.config.model_type
    if FAMILIES[family].fused_linears:
        return _plan_of_phi3()
    layer = "model.layers.*"
    by_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    of_sequence: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if sequences else {}
    plan: dict[str, Any] = {
        "model.embed_tokens": _Rows(input_layouts=Replicate(), **of_sequence),
        **{f"{layer}.{name}": _Columns() for name in by_columns},
        **{f"{layer}.{name}": _Rows(**of_sequence) for name in ("self_attn.o_proj", "mlp.down_proj")},
        "lm_head": _Columns(
            input_layouts=Shard(1) if sequences else None, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequences:
        norm = _GatheringNorm(use_local_output=FAMILIES[family].returns_whole_norms)
        plan |= {f"{layer}.{name}": norm for name in ("input_layernorm", "post_attention_layernorm")}
        plan["model.norm"] = SequenceParallel()
    return plan


def _plan_of_phi3() -> dict[str, Any]:
    """Returns the plan of fused matrices: those of attention are divided by rows, and what they make is whole."""
    whole: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    layer, local = "model.layers.*", {"use_local_output": False}
    return {
        "model.embed_tokens": _Rows(**whole),
        f"{layer}.self_attn.qkv_proj": _Rows(**whole),
        f"{layer}.self_attn.o_proj": _Columns(**whole),
        f"{layer}.mlp.gate_up_proj": _Columns(input_layouts=Replicate(), output_layouts=Shard(-1), **local),
        f"{layer}.mlp.down_proj": _Rows(input_layouts=Shard(-1), output_layouts=Replicate()),
        "lm_head": _Columns(output_layouts=Shard(-1), **local),
    }


class _Columns(ColwiseParallel):
    """A linear divided by columns, with the matrices of its adapter if it has one: the first by rank of the adapter.

    ``ColwiseParallelLora`` in ``components/distributed/parallel_styles.py``: what the first matrix makes is gathered.
    """

    def _partition_linear_fn(self, name: str, module: Any, device_mesh: Any) -> None:
        _distribute(module, device_mesh, {"weight": Shard(0), "bias": Shard(0)})
        if hasattr(module, "lora_A"):
            module.lora_A.register_forward_hook(_gathered)


class _Rows(RowwiseParallel):
    """A linear divided by rows, with both matrices of its adapter if it has one (``RowwiseParallelLora``)."""

    def _partition_linear_fn(self, name: str, module: Any, device_mesh: Any) -> None:
        _distribute(module, device_mesh, {"weight": Shard(1), "bias": Replicate()})


def _distribute(module: Any, mesh: Any, placements: dict[str, Any]) -> None:
    """Distributes the own parameters of a module; torch asks for each module inside of it too."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter, mesh, [placements[name]])))


def _gathered(module: Any, inputs: Any, output: Any) -> Any:
    return output.redistribute(device_mesh=output.device_mesh, placements=[Replicate()])


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
