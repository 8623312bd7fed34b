"""Tensor parallelism by DTensor, as NeMo Automodel plans it for Llama and Qwen without sequence parallelism.

``components/distributed/optimized_tp_plans.py`` of 36044ad3: matrices are divided by columns and then by rows, norms
are whole on each rank. The output layer leaves each rank with the logits of its part of the vocabulary; the loss copies
them to fp32, and then gathers those of the whole vocabulary (``components/loss/masked_ce.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def divide(module: Any, mesh: Any) -> None:
    """Divides the matrices of transformers' model over the ranks of a mesh."""
    layer = "model.layers.*"
    by_columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    parallelize_module(
        module,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            **{f"{layer}.{name}": ColwiseParallel() for name in by_columns},
            **{f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )


def loss_of(module: Any, logits: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns transformers' loss of logits that are divided over the ranks."""
    whole = logits.float().full_tensor()
    return module.loss_function(logits=whole, labels=tokens, vocab_size=module.config.vocab_size)


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
