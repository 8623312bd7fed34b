"""Which queries, keys and values Transformer Engine copies before it attends."""

from __future__ import annotations

import torch


def in_known_layout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tensors as they are where they lie side by side head by head (``sbh3d``), and else copies.

    So they are slices of linear_qkv's output in models without grouped queries, rotary embedding and norms of queries
    and keys. Contiguous tensors are not copied. After ``get_qkv_layout`` in
    ``transformer_engine/pytorch/attention/dot_product_attention/utils.py``, 2.12.0 and 2.16.1.
    """
    three = query, key, value
    if len({one.untyped_storage()._cdata for one in three}) == len({(one.shape, one.stride()) for one in three}) == 1:
        channels = query.shape[-1]
        if [one.storage_offset() for one in three] == [0, channels, 2 * channels]:
            return three
    return query.contiguous(), key.contiguous(), value.contiguous()
