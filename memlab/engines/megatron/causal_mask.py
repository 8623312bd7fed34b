"""The causal masks that some frameworks give Megatron's model with rows that are not packed.

The attention is causal anyway: of a causal type Megatron passes the mask on, and neither the fused nor the flash
attention of Transformer Engine reads it (``attention/dot_product_attention/backends.py``, main of August 2026). So it
changes bytes, and no result. A checkpoint of a layer or of its attention keeps it until its backward.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from memlab.engines.attention.packed_sequences import chunks_of_rank


def causal_mask(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes one mask for all rows of a micro-batch, and their positions, on the device.

    The mask has 1 byte for each pair of tokens; while it is made, two tensors in fp32 have 4 bytes each
    (``get_ltor_masks_and_position_ids`` in megatron/training/utils.py, 0.16.1 and main of August 2026).

    Returns:
        The mask, bool [1, 1, length, length], and the positions, int64 [rows, length] with the bytes of one row.
    """
    mask = torch.tril(torch.ones((1, length, length), device="cuda")).view(1, 1, length, length)
    loss_mask = torch.ones((rows, length), device="cuda")
    positions = torch.arange(length, device="cuda").unsqueeze(0).expand(rows, length)
    mask = mask < 0.5
    del loss_mask  # nobody reads it
    return mask, positions


def masks_of_data_loader(rows: int, length: int) -> torch.Tensor:
    """Makes a mask for each row of a micro-batch on the device, and takes this rank's part under context parallelism.

    ``get_batch_on_this_tp_rank`` in megatron/training/utils.py and ``get_batch_on_this_cp_rank`` in
    megatron/core/utils.py (0.16.1 and main of August 2026).

    Returns:
        Bool [rows, 1, tokens of the rank, length] that masks nothing, since attention is causal anyway.
    """
    masks = torch.zeros((rows, 1, length, length), dtype=torch.bool, device="cuda")
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    return chunks_of_rank(masks, ranks, rank, 2)
