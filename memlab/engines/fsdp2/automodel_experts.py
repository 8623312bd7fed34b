"""NeMo Automodel's own class of Qwen3-MoE, in the place of transformers': its layers, router and grouped experts.

``components/models/qwen3_moe/{model,layers}.py``, ``models/gpt_oss/rope_utils.py``, ``attention/utils.py``,
``moe/{layers,experts}.py`` and ``moe/megatron/token_dispatcher.py`` of 36044ad3 and of the release 0.7.0, with
``experts: torch_mm`` or ``gmm``, one product of all experts of a rank. Their dispatcher ``torch`` (here ``allgather``)
gathers the tokens of all ranks that share the experts and adds up what each rank makes of them, in fp32; ``deepep``
and ``hybridep`` (here ``flex``) are copies of Megatron's dispatcher, which runs itself here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.automodel_attention import Attention, Rotations
from memlab.engines.fsdp2.automodel_norm import Norm
from memlab.engines.megatron.routing_draws import RoutingDraws

_LOSS_OF_BALANCE = 0.001
"""``router_aux_loss_coef``, where a config.json has none."""


def change_experts(module: Any, scenario: Scenario) -> None:
    """Gives transformers' model the parts of Automodel's class; a rank gets its own experts only.

    Args:
        module: transformers' Qwen3-MoE for causal language modeling, before anything is sharded.
        scenario: Whose `model_classes` are Automodel's.
    """
    model, is_released = module.model, scenario.state.model_classes == "automodel_0.7.0"
    model.rotary_emb = Rotations(model.rotary_emb)
    model.norm = Norm(model.norm, is_released=is_released)
    dispatcher = _flex_dispatcher(scenario) if scenario.state.moe_token_dispatcher_type == "flex" else None
    for layer in model.layers:
        layer.__class__ = type(type(layer).__name__, (_Layer, type(layer)), {"__module__": type(layer).__module__})
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, Norm(getattr(layer, name), is_released=is_released))
        layer.self_attn = Attention(layer.self_attn, scenario)
        layer.mlp = _Mixture(layer.mlp, scenario, dispatcher)


def experts_of(layer: Any) -> Any:
    """Returns the module with the experts of a layer."""
    return layer.mlp.experts


class _Layer:
    """A layer that holds the output of attention until it ends; a base beside transformers' own class."""

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, **options: Any) -> Any:
        """Maps [batch, tokens, width] to the same shape."""
        attended = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, options)
        hidden_states = hidden_states + attended
        output = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + output


class _Mixture(torch.nn.Module):
    """Router and experts (``MoE``)."""

    def __init__(self, of_transformers: Any, scenario: Scenario, dispatcher: Any) -> None:
        super().__init__()
        self.gate = _Gate(of_transformers.gate)
        kind = _GatheringExperts if dispatcher is None else _SendingExperts
        self.experts = kind(of_transformers.experts, scenario, dispatcher)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps [batch, tokens, width] to the same shape."""
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        is_token = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        weights, chosen = self.gate(tokens, is_token)
        output: torch.Tensor = self.experts(tokens, is_token, weights, chosen)
        return output.view(hidden_states.shape)


class _Gate(torch.nn.Module):
    """The router (``Gate``), which scores in fp32 and adds the loss of load balance to the graph."""

    def __init__(self, of_transformers: Any) -> None:
        super().__init__()
        self.weight, self.topk = of_transformers.weight, of_transformers.top_k
        self.normalizes = of_transformers.norm_topk_prob

    def forward(self, tokens: torch.Tensor, is_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights in the tokens' type, and experts int64; both [tokens, experts per token]."""
        logits = torch.nn.functional.linear(tokens, self.weight.to(tokens.dtype))
        scores = every = logits.softmax(dim=-1, dtype=torch.float32)
        chosen = torch.topk(scores, k=self.topk, dim=-1)[1]
        weights = scores.gather(1, chosen)
        if self.normalizes and self.topk > 1:
            total, of_all = weights.sum(-1, keepdim=True) + 1e-20, every.sum(-1, keepdim=True) + 1e-20
            weights, every = weights / total, every / of_all
        weights = weights * 1.0  # ``route_scale``
        rows = self._rows_of_experts(chosen, is_token)
        loss = self._loss(every.float(), rows.float(), is_token)
        weights = _Balanced.apply(weights, _LOSS_OF_BALANCE * loss)
        return weights.type_as(tokens), chosen

    def _rows_of_experts(self, chosen: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        chooses = chosen.new_zeros((len(chosen), len(self.weight)))
        ones = is_token.to(chooses.dtype).unsqueeze(-1).expand(-1, chosen.shape[1])
        chooses.scatter_(dim=1, index=chosen, src=ones)
        return chooses.sum(dim=0)

    def _loss(self, scores: torch.Tensor, rows: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        number = is_token.sum()
        of_experts = (scores * is_token.unsqueeze(-1)).sum(dim=0)
        number = torch.clamp(number, min=1)
        shares = rows * len(self.weight) / (self.topk * number)
        return torch.sum(shares * (of_experts / number))


class _Balanced(torch.autograd.Function):
    """``MoEAuxLossAutoScaler``: returns the weights, and gives the loss a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss.float())
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


class _Experts(torch.nn.Module):
    """The experts of a rank, with the matrices of all in one tensor each.

    Args:
        of_transformers: transformers' experts, with all of them.
        scenario: Says which of them the rank has.
        dispatcher: Sends tokens to the ranks of their experts.
    """

    def __init__(self, of_transformers: Any, scenario: Scenario, dispatcher: Any) -> None:
        super().__init__()
        self.num_experts = len(of_transformers.gate_up_proj)
        self.ranks = scenario.layout.expert_model_parallel_size
        self.num_own, self.routing = self.num_experts // self.ranks, scenario.routing
        self.first = scenario.layout.rank % self.ranks * self.num_own
        own = slice(self.first, self.first + self.num_own)
        up, down = of_transformers.gate_up_proj, of_transformers.down_proj
        self.gate_and_up_projs = torch.nn.Parameter(up.detach()[own].transpose(1, 2).contiguous())
        self.down_projs = torch.nn.Parameter(down.detach()[own].transpose(1, 2).contiguous())
        self.dispatcher = dispatcher
        self.group: Any = None
        """Of the ranks that share the experts, if there are several."""

    def matrices(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns both matrices of the rank's experts in a type."""
        both: Any = self.gate_and_up_projs, self.down_projs
        return [(each.to_local() if self.ranks > 1 else each).to(dtype) for each in both]

    def multiplied(
        self, rows: torch.Tensor, matrices: list[torch.Tensor], counts: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Maps rows [rows, width], grouped by expert, to the same shape."""
        ends = counts.cumsum(dim=0).to(torch.int32)
        inner = torch._grouped_mm(rows, matrices[0], offs=ends)
        inner = weighted_bias_swiglu_impl(inner, None, probabilities)
        return torch._grouped_mm(inner, matrices[1], offs=ends)


class _GatheringExperts(_Experts):
    """``GroupedExperts`` with ``torch_mm``: each rank has the tokens of all, and multiplies those of its experts."""

    def forward(
        self, tokens: torch.Tensor, is_token: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Maps [tokens, width] to the same shape."""
        dtype, number = tokens.dtype, len(tokens)
        matrices = self.matrices(dtype)
        if self.ranks > 1:
            tokens, weights = (_Gathered.apply(each, self.group) for each in (tokens, weights.float()))
            chosen, is_token = (_gathered(each, self.group) for each in (chosen, is_token))
        output = self._multiplied(tokens, is_token, weights, chosen, matrices, number)
        if self.ranks > 1:
            output.add_(tokens.sum(dtype=torch.float32) * 0.0)
            output = _Summed.apply(output, self.group)
            output = output.narrow(0, self.group.rank() * number, number).contiguous()
        return output.to(dtype)

    def _multiplied(
        self,
        tokens: torch.Tensor,
        is_token: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        matrices: list[torch.Tensor],
        number: int,
    ) -> torch.Tensor:
        places, probabilities, counts = self._by_expert(is_token, weights, chosen, number)
        output = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        rows = tokens[places]
        of_experts = self.multiplied(rows, matrices, counts, probabilities.unsqueeze(-1))
        indices = places.unsqueeze(1).expand_as(of_experts)
        output.scatter_add_(0, indices, of_experts.float())
        return output

    def _by_expert(
        self, is_token: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the token of each row, its weight, and how many rows each expert has."""
        count, topk = chosen.shape
        chosen = chosen.masked_fill(~is_token.unsqueeze(-1), -1)
        experts, of_choices = chosen.view(-1), weights.float().view(-1)
        places = torch.arange(count, device=chosen.device).unsqueeze(1).expand(-1, topk).reshape(-1)
        is_own = (experts >= self.first) & (experts < self.first + self.num_own)
        num_rows = self._num_rows(is_own, number, topk)
        own, places, of_rows = (
            _selected(each, is_own, num_rows) for each in (experts - self.first, places, of_choices)
        )
        order = own.argsort(stable=True)
        own = own[order]
        counts = torch.zeros(self.num_own, dtype=torch.int64, device=own.device)
        counts.scatter_add_(0, own, torch.ones_like(own))
        return places[order], of_rows[order], counts

    def _num_rows(self, is_own: torch.Tensor, number: int, topk: int) -> int:
        """Returns how many choices are the rank's: of tensors without values, as the scenario's routing has it."""
        if not is_own.is_meta:
            return int(is_own.sum())
        own = range(self.first, self.first + self.num_own)
        ranks = range(self.group.size() if self.ranks > 1 else 1)
        rows = [self.routing.tokens_per_expert(number, self.num_experts, topk, rank) for rank in ranks]
        return sum(each[expert] for each in rows for expert in own)


class _SendingExperts(_Experts):
    """``GroupedExpertsDeepEP``: tokens go to the ranks of their experts and back."""

    def forward(
        self, tokens: torch.Tensor, is_token: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Maps [tokens, width] to the same shape."""
        dispatcher = self.dispatcher
        chosen = chosen.masked_fill(~is_token.unsqueeze(-1), -1)
        rows, counts, probabilities = self._sent(tokens, weights, chosen)
        matrices = self.matrices(rows.dtype)
        output = self.multiplied(rows, matrices, counts.to(device=rows.device), probabilities.unsqueeze(-1))
        back = dispatcher.combine_preprocess(output)
        back = dispatcher.token_combine(back, async_finish=False, allocate_on_comm_stream=False)
        result: torch.Tensor = back.view(tokens.shape)
        return result

    def _sent(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> tuple[Any, ...]:
        manager = self.dispatcher._comm_manager
        if hasattr(manager, "token_indices"):
            manager.token_probs, manager.token_indices = weights.float(), chosen
        else:
            manager.routing_map, of_all = _Multihot.apply(chosen, weights, self.num_experts)
            manager.token_probs = of_all.float()
        sent, of_rows = self.dispatcher.token_dispatch(tokens, async_finish=False, allocate_on_comm_stream=False)
        result: tuple[Any, ...] = self.dispatcher.dispatch_postprocess(sent, of_rows)
        return result


def spread_experts(layers: list[Any], scenario: Scenario, device: str) -> Any:
    """Makes the parameters of each rank's experts parts of those of all (``ExpertParallel`` in moe/parallelizer.py).

    Args:
        layers: With experts.
        scenario: Says how many ranks share the experts.
        device: Of the mesh.

    Returns:
        The mesh of the ranks that have the same experts.
    """
    ranks = scenario.layout.expert_model_parallel_size
    sizes = scenario.ranks_of_shards // ranks, ranks
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("ep_shard", "ep"))
    for layer in layers:
        experts = experts_of(layer)
        experts.group = mesh["ep"].get_group()
        for name, own in list(experts.named_parameters()):
            part = DTensor.from_local(own.detach(), mesh["ep"], [Shard(0)], run_check=False)
            setattr(experts, name, torch.nn.Parameter(part))
        if experts.dispatcher is not None and not hasattr(experts.dispatcher, "_comm_manager"):
            _build(experts.dispatcher, experts.group, experts.first, experts.num_own)
    return mesh["ep_shard"]


def _flex_dispatcher(scenario: Scenario) -> Any:
    """Returns Megatron's dispatcher before it knows its ranks; Automodel's layers share what it keeps of a pass."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    model, state = scenario.architecture, scenario.state
    dispatcher = MoEFlexTokenDispatcher.__new__(MoEFlexTokenDispatcher)
    # Not initialized: what Automodel does not have keeps the default of the installed version.
    dispatcher.config = TransformerConfig.__new__(TransformerConfig)
    vars(dispatcher.config).update(
        num_moe_experts=model.num_moe_experts,
        moe_router_topk=model.moe_router_topk,
        moe_router_dtype="fp32",
        moe_permute_fusion=True,
        moe_flex_dispatcher_backend=state.moe_flex_dispatcher_backend,
        moe_deepep_num_sms=state.moe_deepep_num_sms,
        moe_hybridep_num_sms=state.moe_deepep_num_sms,
        moe_flex_dispatcher_num_sms=state.moe_deepep_num_sms,  # megatron-core 0.19's name of both
        memlab_routing=RoutingDraws(scenario.routing),
    )
    return dispatcher


def _build(dispatcher: Any, group: Any, first: int, num_own: int) -> None:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=group, expt_tp=alone, tp_ep=group)
    config = dispatcher.config
    type(dispatcher).__init__(dispatcher, num_own, [*range(first, first + num_own)], config, groups)
    manager = dispatcher._comm_manager
    # Megatron has this kernel behind a switch, Automodel always.
    manager._indices_to_multihot = lambda chosen, weights: _Multihot.apply(chosen, weights, num_own)


class _Multihot(torch.autograd.Function):
    """``IndicesToMultihot``, one kernel: a map and weights of all experts, and each expert's place for backward."""

    @staticmethod
    def forward(
        ctx: Any, chosen: torch.Tensor, weights: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = (len(chosen), num_experts)
        is_chosen, of_experts = chosen.new_empty(size, dtype=torch.bool), weights.new_empty(size)
        ctx.save_for_backward(chosen.new_empty(size, dtype=torch.int32))
        ctx.size = chosen.shape
        ctx.mark_non_differentiable(is_chosen)
        return is_chosen, of_experts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, grads[1].contiguous().new_empty(ctx.size), None


def _gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor, group=group)
    return torch.cat(parts, dim=0)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks (``_AllGatherConcatVarlenFn``), whose gradients are added up in all rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.number = group, len(tensor)
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad.narrow(0, ctx.group.rank() * ctx.number, ctx.number).contiguous(), None


class _Summed(torch.autograd.Function):
    """A copy, added up over all ranks, as its gradient is (``torch.distributed.nn.functional.all_reduce``)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        summed = tensor.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Summed.apply(grads[0], ctx.group), None


class _Selected(torch.autograd.Function):
    """The elements of a vector at the places of a mask, whose number fake tensors do not know."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.number = number
        if values.is_meta:
            _places = mask.new_empty((number, 1), dtype=torch.int64)
            return values.new_empty(number)
        return values[mask]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        result = grads[0].new_zeros(mask.shape)
        if not mask.is_meta:
            result[mask] = grads[0]
        return result, None, None


def _selected(values: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    result: torch.Tensor = _Selected.apply(values, mask, number)
    return result
