"""What NeMo Automodel's own classes of Llama, Qwen2 and Qwen3 compute otherwise than those of transformers.

``components/models/{llama,qwen2,qwen3}/model.py`` and ``llama/rope_utils.py`` of 36044ad3 and of the release 0.7.0.
Cosines and sines of all positions stay from step to step. The norms of Llama and Qwen2 keep no copies of their
inputs in fp32 (``Float32RMSNorm`` in ``models/common/utils.py``); those of Qwen3 are transformers'. The release rotates
queries and keys in fp32.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch

from memlab.config.families import FAMILIES
from memlab.config.scenario import Scenario
from memlab.engines.fsdp2.automodel_experts import change_experts
from memlab.engines.fsdp2.automodel_norm import Norm
from memlab.meter.labels import keeping

CHECKPOINTED = (
    *("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    *("attn", "layer_norm1", "layer_norm2", "norm1", "norm2"),  # of a tower
)
"""The parts of a layer that have a checkpoint each (``apply_submodule_checkpointing``), where the whole layer has one
of a class of transformers without a tower (``_should_use_hf_native_gradient_checkpointing`` in
``distributed/parallelizer.py``)."""
_NORMS_OF_LAYER = ("input_layernorm", "post_attention_layernorm")


def change_classes(module: Any, scenario: Scenario) -> None:
    """Gives transformers' model what the classes of `scenario` have of their own.

    Args:
        module: transformers' model for causal language modeling, before FSDP2 shards it.
        scenario: Of a family of which Automodel has a class.
    """
    kind, model = scenario.state.model_classes, module.model
    if kind == "transformers":
        return
    if scenario.architecture.routes:
        change_experts(module, scenario)
        return
    is_released = kind == "automodel_0.7.0"
    has_own_norms = not FAMILIES[scenario.architecture.family].norms_of_transformers
    dtype = torch.float32 if is_released else model.embed_tokens.weight.dtype
    model.rotary_emb = _Rotations(model.rotary_emb, dtype, _positions_of_a_token(scenario))
    for layer in model.layers:
        if is_released:
            attention = layer.self_attn
            attention.__class__ = type(
                type(attention).__name__, (_ReleasedAttention, type(attention)), {"__module__": attention.__module__}
            )
        if has_own_norms:
            for name in _NORMS_OF_LAYER:
                setattr(layer, name, Norm(getattr(layer, name), is_released=is_released))
    if has_own_norms:
        model.norm = Norm(model.norm, is_released=is_released)


def _positions_of_a_token(scenario: Scenario) -> Fraction:
    """Returns how many positions a rank needs for each of its tokens: up to the end of its last chunk of a sequence."""
    layout = scenario.layout
    ranks = layout.context_parallel_size
    rank = layout.rank // layout.tensor_model_parallel_size % ranks
    return Fraction(2 * ranks - rank, 2) if ranks > 1 else Fraction(1)


class _Rotations(torch.nn.Module):
    """Cosines and sines of all positions, of which each pass gathers its own.

    The first forward makes them, and one with longer rows makes more; they stay for shorter ones (``_ensure_cache``).

    Args:
        of_transformers: transformers' module, which makes them in each pass.
        dtype: Of the cosines and sines.
        of_a_token: How many positions are needed for each token of a row.
    """

    def __init__(self, of_transformers: Any, dtype: torch.dtype, of_a_token: Fraction) -> None:
        super().__init__()
        self.dtype, self.of_a_token, self.scaling = dtype, of_a_token, of_transformers.attention_scaling
        self.cosines: torch.Tensor | None
        self.sines: torch.Tensor
        self.inv_freq: torch.Tensor
        for name, buffer in {"inv_freq": of_transformers.inv_freq, "cosines": None, "sines": None}.items():
            self.register_buffer(name, buffer, persistent=False)

    @torch.no_grad()
    def forward(self, _: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines [batch, tokens, channels] of positions [batch, tokens]."""
        needed = int(position_ids.shape[-1] * self.of_a_token)
        if self.cosines is None or len(self.cosines) < needed:
            angles = torch.outer(torch.arange(needed, device=position_ids.device).float(), self.inv_freq.float())
            whole = torch.cat((angles, angles), dim=-1)
            with keeping("workspace"):
                self.cosines = (whole.cos() * self.scaling).to(self.dtype)
                self.sines = (whole.sin() * self.scaling).to(self.dtype)
        return self.cosines[position_ids], self.sines[position_ids]


class _ReleasedAttention:
    """The attention of the release, which rotates queries and keys in fp32; a base beside transformers' own class."""

    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        """Maps [batch, tokens, width] to the same shape."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (each(hidden_states).view(shape) for each in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        query, key = _rotated(query, key, *position_embeddings)
        options.setdefault("sliding_window", getattr(self, "sliding_window", None))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **options)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def _rotated(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtypes = query.dtype, key.dtype
    query, key, cosines, sines = query.float(), key.float(), cosines.unsqueeze(1), sines.unsqueeze(1)
    query = (query * cosines) + (_half_rotated(query) * sines)
    key = (key * cosines) + (_half_rotated(key) * sines)
    return query.to(dtypes[0]), key.to(dtypes[1])


def _half_rotated(heads: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
