"""A mark for tests of FSDP2 whose bytes were measured with a torch before 2.15, which changed them."""

import pytest
import torch

MEASURED_WITH_OLD_TORCH = pytest.mark.skipif(
    torch.__version__ >= torch.torch_version.TorchVersion("2.15"),
    reason="was measured with torch 2.11 or 2.13: from 2.15 on, FSDP2 keeps gradients in the type of their reduction, "
    "and frees a unit's last one before",
)
