"""The latent attention of NeMo Automodel's own class of DeepSeek-V3, around Transformer Engine's kernel.

``components/models/deepseek_v3/{layers,rope_utils}.py`` and ``common/rope_triton.py`` of 36044ad3 and of the release
0.7.0; GLM-4.7-Flash has the same (``glm4_moe_lite``).
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.automodel_attention import attend_as_te
from memlab.engines.fsdp2.automodel_norm import Norm
from memlab.meter.labels import one_kernel


class ComplexRotations(torch.nn.Module):
    """Rotations of a pass's positions as complex numbers."""

    def __init__(self, of_transformers: Any) -> None:
        super().__init__()
        self.register_buffer("inv_freq", of_transformers.inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Returns complex numbers [batch, tokens, pairs] of positions [1, tokens]."""
        positions = position_ids.expand(len(hidden_states), -1)
        angles = torch.einsum("bt,d->btd", positions.to(torch.float32), self.inv_freq)
        return torch.polar(torch.ones_like(angles), angles)


class LatentAttention(torch.nn.Module):
    """Queries, keys and values from narrow latent vectors; only some channels of a head are rotated."""

    def __init__(self, of_transformers: Any, scenario: Scenario) -> None:
        super().__init__()
        model = scenario.architecture
        self.is_released = scenario.state.model_classes == "automodel_0.7.0"
        self.heads, self.scale = model.num_attention_heads, of_transformers.scaling
        self.of_query = [model.qk_head_dim, model.qk_pos_emb_head_dim]
        self.of_latent = [model.kv_lora_rank, model.qk_pos_emb_head_dim]
        self.of_values = [model.qk_head_dim, model.v_head_dim]
        self.q_proj: torch.nn.Module | None = of_transformers.q_proj
        if model.q_lora_rank is not None:
            self.q_a_proj, self.q_b_proj = of_transformers.q_a_proj, of_transformers.q_b_proj
            self.q_a_layernorm = Norm(of_transformers.q_a_layernorm, is_released=self.is_released)
        self.kv_a_proj_with_mqa, self.kv_b_proj = of_transformers.kv_a_proj_with_mqa, of_transformers.kv_b_proj
        self.kv_a_layernorm = Norm(of_transformers.kv_a_layernorm, is_released=self.is_released)
        self.o_proj = of_transformers.o_proj

    def forward(self, inputs: torch.Tensor, rotations: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Maps [batch, tokens, width] to the same shape; rotations are [batch, tokens, pairs]."""
        shape = (*inputs.shape[:2], self.heads, -1)
        latent = self.q_proj(inputs) if self.q_proj is not None else self._through_latent(inputs)
        # Automodel refers to these parts, and so to the whole tensors, until attention has ended.
        plain, turned = latent.view(shape).split(self.of_query, dim=-1)
        latent, place = self.kv_a_proj_with_mqa(inputs).split(self.of_latent, dim=-1)
        latent = self.kv_a_layernorm(latent)
        rotate = _ReleasedRotation.apply if self.is_released else _rotated
        turned, place = rotate(turned, rotations), rotate(place.unsqueeze(2), rotations)
        query = torch.cat([plain, turned], dim=-1)
        latent = self.kv_b_proj(latent)
        key, value = latent.view(shape).split(self.of_values, dim=-1)
        of_keys = key
        key = torch.cat([of_keys, place.expand(-1, -1, self.heads, -1)], dim=-1)
        output = attend_as_te(query, key, value, self.scale, options.get("packed_lengths"))
        return self.o_proj(output.flatten(2))

    def _through_latent(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs)))


def _rotated(heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations.unsqueeze(2)).flatten(3).to(heads.dtype)


class _ReleasedRotation(torch.autograd.Function):
    """``_FusedRope`` of the release: one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rotations)
        with one_kernel():
            return _rotated(heads, rotations)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rotations,) = ctx.saved_tensors
        with one_kernel():
            return _rotated(grads[0], rotations.conj()), None
