"""A mark for tests that compare with what was measured with megatron-core 0.16 only."""

import pytest
from megatron.core.package_info import MINOR

MEASURED_WITH_OLD_CORE = pytest.mark.skipif(MINOR >= 19, reason="was measured with megatron-core 0.16.1")
