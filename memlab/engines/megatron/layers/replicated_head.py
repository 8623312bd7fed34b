"""A head of a few outputs in place of the output layer: that of a critic, a reward model or a classifier.

As ``LinearForLastLayer`` of Megatron-Bridge (models/common/heads.py, 067f987d), which verl takes for its critics
(verl/models/mcore/bridge.py, 1dda039b). slime's has a bias too (slime/backends/megatron_utils/model_provider.py,
624b824a); mcore-bridge's, for ms-swift's ``seq_cls``, gathers its outputs before they are copied to fp32 (1.6.5).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedHead(torch.nn.Linear):
    """Maps hidden states to outputs in fp32; each tensor parallel rank has the whole weight, in the model's type."""

    def __init__(self, num_labels: int, config: TransformerConfig) -> None:
        on_device: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        super().__init__(config.hidden_size, num_labels, bias=False, **on_device)
        torch.nn.init.normal_(self.weight, std=config.init_method_std)
        self.gathers = config.sequence_parallel
        if self.gathers:  # Megatron then sums the weight's gradient over the ranks
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]  # what Megatron calls an output layer with
        self, hidden_states: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Returns the outputs [tokens, sequences, outputs] of the whole sequence, and no bias."""
        outputs = super().forward(hidden_states).float()
        if self.gathers:
            outputs = gather_from_sequence_parallel_region(outputs, tensor_parallel_output_grad=False)
        return outputs, None
