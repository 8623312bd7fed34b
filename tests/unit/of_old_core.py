"""A mark for tests of what memlab builds, or compares with what was measured, with megatron-core 0.16 only."""

import pytest
from megatron.core.package_info import MINOR

IS_NEW_CORE = MINOR >= 19
OLD_CORE = pytest.mark.skipif(
    IS_NEW_CORE, reason="memlab builds latent attention and multi-token prediction with megatron-core 0.16 only"
)
MEASURED_WITH_OLD_CORE = pytest.mark.skipif(IS_NEW_CORE, reason="was measured with megatron-core 0.16.1")
