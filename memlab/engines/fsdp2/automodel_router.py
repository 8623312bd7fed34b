"""The routers of NeMo Automodel's own classes of models with experts.

``Gate`` and ``FakeBalancedGate`` in ``components/moe/layers.py`` of 36044ad3 and of the release 0.7.0.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.config.families import FAMILIES
from memlab.config.scenario import Scenario

_LOSS_OF_BALANCE = 0.001
"""``router_aux_loss_coef``, where a config.json has none."""


def router_of(of_transformers: Any, scenario: Scenario) -> torch.nn.Module:
    """Returns the router of a layer, whose weight is that of transformers'."""
    model = scenario.architecture
    if scenario.state.fake_balanced_gate:
        assert model.num_moe_experts is not None, "a model with experts"
        return _Turns(model.num_moe_experts, model.moe_router_topk)
    if model.add_bias_linear:
        return _GateWithBias(of_transformers, scenario)
    return (_Gate if model.moe_router_score_function == "softmax" else _GroupedGate)(of_transformers, scenario)


class _Turns(torch.nn.Module):
    """Chooses experts in turn, with equal weights and without a parameter (``FakeBalancedGate``)."""

    def __init__(self, num_experts: int, topk: int) -> None:
        super().__init__()
        self.num_experts, self.topk = num_experts, topk

    def forward(self, tokens: torch.Tensor, is_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights in the tokens' type, and experts int64; both [tokens, experts per token]."""
        number = len(tokens)
        weights = torch.ones(number, self.topk, device=tokens.device) / self.topk
        places = torch.arange(number * self.topk, device=tokens.device).view(-1, self.topk)
        # It adds the number of experts that it leaves out, which is 0.
        chosen = places % self.num_experts + 0
        return weights.type_as(tokens), chosen


class _Router(torch.nn.Module):
    """What learned routers have in common."""

    def __init__(self, of_transformers: Any, scenario: Scenario) -> None:
        super().__init__()
        model = scenario.architecture
        # transformers has that of DeepSeek-V3 in fp32, whatever the type of the others.
        is_exact = scenario.state.fp32_sharded_params or scenario.dtype == "fp32"
        dtype = torch.float if is_exact else torch.bfloat16
        self.weight = torch.nn.Parameter(of_transformers.weight.detach().to(dtype))
        self.topk = model.moe_router_topk
        self.normalizes = not model.moe_router_pre_softmax
        self.is_released = scenario.state.model_classes == "automodel_0.7.0"

    def rows_of_experts(self, chosen: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        """Returns how many tokens have chosen each expert, int64 [experts]."""
        chooses = chosen.new_zeros((len(chosen), len(self.weight)))
        ones = is_token.to(chooses.dtype).unsqueeze(-1).expand(-1, chosen.shape[1])
        chooses.scatter_(dim=1, index=chosen, src=ones)
        return chooses.sum(dim=0)


class _Gate(_Router):
    """Scores in fp32, and adds the loss of load balance to the graph."""

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
        rows = self.rows_of_experts(chosen, is_token)
        loss = self._loss(every.float(), rows.float(), is_token)
        weights = _Balanced.apply(weights, _LOSS_OF_BALANCE * loss)
        return weights.type_as(tokens), chosen

    def _loss(self, scores: torch.Tensor, rows: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
        number = is_token.sum()
        of_experts = (scores * is_token.unsqueeze(-1)).sum(dim=0)
        number = torch.clamp(number, min=1)
        shares = rows * len(self.weight) / (self.topk * number)
        return torch.sum(shares * (of_experts / number))


class _GateWithBias(_Gate):
    """That of gpt-oss: the softmax is over the chosen experts alone."""

    def __init__(self, of_transformers: Any, scenario: Scenario) -> None:
        super().__init__(of_transformers, scenario)
        self.bias = of_transformers.bias

    def forward(self, tokens: torch.Tensor, is_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_Gate.forward`."""
        logits = torch.nn.functional.linear(tokens, self.weight.to(tokens.dtype), self.bias.to(tokens.dtype))
        values, chosen = torch.topk(logits, k=self.topk, dim=-1)
        weights = values.softmax(dim=1, dtype=torch.float32)
        every = logits.softmax(dim=-1, dtype=torch.float32)
        weights = weights * 1.0  # ``route_scale``
        loss = self._loss(every.float(), self.rows_of_experts(chosen, is_token).float(), is_token)
        weights = _Balanced.apply(weights, _LOSS_OF_BALANCE * loss)
        return weights.type_as(tokens), chosen


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


class _GroupedGate(_Router):
    """Chooses among the best groups of experts by sigmoids with a bias of each expert.

    That of DeepSeek-V3 multiplies in fp32, those of GLM in the tokens' type.

    The biases (``e_score_correction_bias``) and their main copy in fp32 are not trained: Automodel moves them after a
    step by how many tokens chose each expert. memlab lets them be, so that every step routes alike.
    """

    def __init__(self, of_transformers: Any, scenario: Scenario) -> None:
        super().__init__(of_transformers, scenario)
        model = scenario.architecture
        self.groups, self.of_groups = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
        self.factor = model.moe_router_topk_scaling_factor or 1.0
        self.is_exact = not FAMILIES[model.family].weighs_after
        self.bias: torch.Tensor
        for name in ("bias", "main_bias"):
            self.register_buffer(name, torch.zeros(len(self.weight)), persistent=False)

    def forward(self, tokens: torch.Tensor, is_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights and experts int64, both [tokens, experts per token]; the release's weights are in fp32."""
        dtype = torch.float32 if self.is_exact else tokens.dtype
        exact = tokens.to(dtype)
        own = torch.nn.functional.linear(exact, self.weight.to(dtype)).sigmoid()
        scores = own + self.bias
        if self.groups > 1:
            scores = scores.view(len(tokens), self.groups, -1)
            best = scores.topk(2, dim=-1)[0].sum(dim=-1).topk(self.of_groups, dim=-1)[1]
            mask = torch.zeros_like(scores[..., 0]).scatter_(1, best, True)
            scores = (scores * mask.unsqueeze(-1)).flatten(1)
        chosen = torch.topk(scores, self.topk, dim=-1)[1]
        weights = own.gather(1, chosen)
        if self.normalizes and self.topk > 1:
            total, of_all = weights.sum(-1, keepdim=True) + 1e-20, own.sum(-1, keepdim=True) + 1e-20
            weights, own = weights / total, own / of_all
        weights = weights * self.factor
        if self.is_exact and not self.is_released:
            weights, own = weights.to(tokens.dtype), own.to(tokens.dtype)
        self.rows_of_experts(chosen, is_token)
        return weights, chosen
