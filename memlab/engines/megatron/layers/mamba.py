"""Megatron's layer of Mamba 2 with the kernels of `scan` in the place of mamba_ssm's, which need a GPU.

``MambaMixer`` is megatron-core's own (``megatron/core/ssm/mamba_mixer.py``, 0.16.1), apart from what it calls in
training (``_ssm_training``) and its norm.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.config.parts.mamba import CHUNK
from memlab.engines.megatron.layers.mamba_of_megatron import mamba_mixer
from memlab.engines.megatron.layers.scan import GroupedNorm, Sizes, SplitConvScan


class GroupNorm(torch.nn.Module):
    """RMSNorm of each group of channels; takes what ``RMSNorm`` of mamba_ssm takes (``layernorm_gated.py``)."""

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.epsilon, self.groups = eps, hidden_size // group_size
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype).fill_(1.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalises [tokens, batch, channels]."""
        return GroupedNorm.apply(inputs, self.weight, self.epsilon, self.groups)


class TorchMambaMixer(mamba_mixer.MambaMixer):
    """Megatron's mixer of Mamba 2, with the kernels in torch."""

    def _ssm_training(self, projected: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        """Maps [tokens, batch, columns] to [tokens, batch, channels], as its own method does in the same order."""
        projected = projected.transpose(0, 1).contiguous()
        decay = -torch.exp(self.cp.get_A_log().float())
        sizes = Sizes(self.cp.nheads_local_tpcp, self.headdim, self.cp.ngroups_local_tpcp, self.d_state, CHUNK)
        output = SplitConvScan.apply(
            projected,
            self.cp.get_conv1d_weight().squeeze(1),
            self.cp.get_conv1d_bias(),
            self.cp.get_dt_bias().float(),
            decay,
            self.cp.get_D(),
            sizes,
        )
        output = self.cp.post_conv_ssm(output.transpose(0, 1).contiguous(), packed_seq_params)
        return self.norm(output)
