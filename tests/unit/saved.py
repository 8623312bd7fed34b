"""What autograd saves for backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """Yields a list of the tensors that are saved in the block, in their order; they live as long as the list."""
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def storage_bytes(tensors: Iterable[torch.Tensor], apart_from: Iterable[torch.Tensor] = ()) -> dict[int, int]:
    """Returns the bytes of each storage of some tensors, apart from the storages of others."""
    others = {each.untyped_storage()._cdata for each in apart_from}
    storages = [each.untyped_storage() for each in tensors]
    return {each._cdata: each.nbytes() for each in storages if each._cdata not in others}
