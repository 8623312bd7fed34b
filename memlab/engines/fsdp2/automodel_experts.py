"""NeMo Automodel's own classes of models with experts, in the place of transformers': their layers and experts.

``components/models/{qwen3_moe,deepseek_v3,glm4_moe}/model.py``, ``moe/{layers,experts}.py`` and
``moe/megatron/token_dispatcher.py`` of 36044ad3 and of the release 0.7.0, with ``experts: torch_mm`` or ``gmm``, one
product of all experts of a rank. Their dispatcher ``torch`` (here ``allgather``)
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

from memlab.config.families import FAMILIES
from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.automodel_attention import Attention, Rotations
from memlab.engines.fsdp2.automodel_bias import multiplied_with_bias
from memlab.engines.fsdp2.automodel_latent import ComplexRotations, LatentAttention
from memlab.engines.fsdp2.automodel_norm import Norm
from memlab.engines.fsdp2.automodel_router import router_of
from memlab.engines.routing_draws import RoutingDraws


def change_experts(module: Any, scenario: Scenario) -> None:
    """Gives transformers' model the parts of Automodel's class; a rank gets its own experts only.

    Args:
        module: transformers' model for causal language modeling, before anything is sharded.
        scenario: Whose `model_classes` are Automodel's.
    """
    model, is_released = module.model, scenario.state.model_classes == "automodel_0.7.0"
    is_latent = scenario.architecture.multi_latent_attention
    model.rotary_emb = (ComplexRotations if is_latent else Rotations)(model.rotary_emb)
    model.norm = Norm(model.norm, is_released=is_released)
    dispatcher = _flex_dispatcher(scenario) if scenario.state.moe_token_dispatcher_type == "flex" else None
    for layer in model.layers:
        layer.__class__ = type(type(layer).__name__, (_Layer, type(layer)), {"__module__": type(layer).__module__})
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, Norm(getattr(layer, name), is_released=is_released))
        layer.self_attn = (LatentAttention if is_latent else Attention)(layer.self_attn, scenario)
        if hasattr(layer.mlp, "experts"):
            layer.mlp = _Mixture(layer.mlp, scenario, dispatcher)


def experts_of(layer: Any) -> Any:
    """Returns the module with the experts of a layer; None of a dense one."""
    return getattr(layer.mlp, "experts", None)


class _Layer:
    """A layer that holds the output of attention until it ends; a base beside transformers' own class."""

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, **options: Any) -> Any:
        """Maps [batch, tokens, width] to the same shape."""
        attended = self.self_attn(self.input_layernorm(hidden_states), position_embeddings, options)
        hidden_states = hidden_states + attended
        output = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + output


class _Mixture(torch.nn.Module):
    """Router, experts, and experts that all tokens pass through (``MoE``)."""

    def __init__(self, of_transformers: Any, scenario: Scenario, dispatcher: Any) -> None:
        super().__init__()
        is_named_gate = hasattr(of_transformers, "gate")
        self.gate = router_of(of_transformers.gate if is_named_gate else of_transformers.router, scenario)
        kind = _GatheringExperts if dispatcher is None else _SendingExperts
        self.experts = kind(of_transformers.experts, scenario, dispatcher)
        self.shared_experts = getattr(of_transformers, "shared_experts", None)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps [batch, tokens, width] to the same shape."""
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        is_token = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        weights, chosen = self.gate(tokens, is_token)
        of_all = None if self.shared_experts is None else self.shared_experts(tokens)
        output: torch.Tensor = self.experts(tokens, is_token, weights, chosen)
        if of_all is not None:
            output = output + of_all
        return output.view(hidden_states.shape)


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
        up, down = of_transformers.gate_up_proj.detach()[own], of_transformers.down_proj.detach()[own]
        self.has_bias = hasattr(of_transformers, "down_proj_bias")
        if not self.has_bias:  # transformers has the others as they are multiplied
            up, down = (each.transpose(1, 2).contiguous() for each in (up, down))
        self.gate_and_up_projs, self.down_projs = torch.nn.Parameter(up), torch.nn.Parameter(down)
        if self.has_bias:
            self.gate_up_proj_bias, self.down_proj_bias = (
                torch.nn.Parameter(each.detach()[own].contiguous())
                for each in (of_transformers.gate_up_proj_bias, of_transformers.down_proj_bias)
            )
        self.dispatcher = dispatcher
        self.weighs_after = FAMILIES[scenario.architecture.family].weighs_after
        """Whether weights of the router multiply what the experts return."""
        self.group: Any = None
        """Of the ranks that share the experts, if there are several."""

    def matrices(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns both matrices of the rank's experts in a type, and their biases if they have any."""
        all_of_them: Any = (self.gate_and_up_projs, self.down_projs)
        if self.has_bias:
            all_of_them += (self.gate_up_proj_bias, self.down_proj_bias)
        return [(each.to_local() if self.ranks > 1 else each).to(dtype) for each in all_of_them]

    def multiplied(
        self, rows: torch.Tensor, matrices: list[torch.Tensor], counts: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Maps rows [rows, width], grouped by expert, to the same shape."""
        ends = counts.cumsum(dim=0).to(torch.int32)
        if self.weighs_after:
            probabilities = torch.ones_like(probabilities)
        if self.has_bias:
            return multiplied_with_bias(rows, matrices, counts, ends, probabilities)
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
        if self.weighs_after:
            output = output.sum(dim=1)
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
        places, choices, probabilities, counts = self._by_expert(is_token, weights, chosen, number)
        shape = (len(tokens), chosen.shape[1], tokens.shape[1]) if self.weighs_after else tokens.shape
        output = torch.zeros(shape, dtype=torch.float32, device=tokens.device)
        rows = tokens[places]
        of_experts = self.multiplied(rows, matrices, counts, probabilities.unsqueeze(-1))
        if self.weighs_after:
            of_experts = of_experts.float() * probabilities.unsqueeze(-1).float()
            indices = choices.unsqueeze(1).expand_as(of_experts)
            output.view(-1, tokens.shape[1]).scatter_add_(0, indices, of_experts.float())
            return output
        indices = places.unsqueeze(1).expand_as(of_experts)
        output.scatter_add_(0, indices, of_experts.float())
        return output

    def _by_expert(
        self, is_token: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the token of each row, its choice among those of all tokens, its weight, and each expert's rows."""
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
        own, places, of_rows = own[order], places[order], of_rows[order]
        counts = torch.zeros(self.num_own, dtype=torch.int64, device=own.device)
        counts.scatter_add_(0, own, torch.ones_like(own))
        choices = _selected(torch.arange(len(is_own), device=own.device), is_own, num_rows)[order]
        return places, choices, of_rows, counts

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
        if self.weighs_after:
            output = (output.float() * probabilities.unsqueeze(-1).float()).to(rows.dtype)
        back = dispatcher.combine_preprocess(output)
        back = dispatcher.token_combine(back, async_finish=False, allocate_on_comm_stream=False)
        return back.view(tokens.shape)

    def _sent(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> tuple[Any, ...]:
        manager = self.dispatcher._comm_manager
        if hasattr(manager, "token_indices"):
            manager.token_probs, manager.token_indices = weights.float(), chosen
        else:
            manager.routing_map, of_all = _Multihot.apply(chosen, weights, self.num_experts)
            manager.token_probs = of_all.float()
        sent, of_rows = self.dispatcher.token_dispatch(tokens, async_finish=False, allocate_on_comm_stream=False)
        return self.dispatcher.dispatch_postprocess(sent, of_rows)


def spread_experts(layers: list[Any], scenario: Scenario, device: str) -> Any:
    """Makes the parameters of each rank's experts parts of those of all (``ExpertParallel`` in moe/parallelizer.py).

    Args:
        layers: All, some of which may be dense.
        scenario: Says how many ranks share the experts.

    Returns:
        The mesh of the ranks that have the same experts.
    """
    ranks = scenario.layout.expert_model_parallel_size
    sizes = scenario.ranks_of_shards // ranks, ranks
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("ep_shard", "ep"))
    for experts in filter(None, map(experts_of, layers)):
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
    return _Selected.apply(values, mask, number)
