"""Tests that megatron-core 0.16 alone can pass: what was measured with it, and models whose layers newer ones changed."""

import pytest
from megatron.core.package_info import MINOR

from memlab.config.architectures import Architecture
from memlab.engines.megatron import megatron_versions

MEASURED_WITH_OLD_CORE = pytest.mark.skipif(MINOR >= 19, reason="was measured with megatron-core 0.16.1")


def skip_if_newer_core_changed(model: Architecture) -> None:
    """Skips the test where the installed megatron-core builds the model in a way that memlab refuses."""
    if model.experimental_attention_variant is not None and not megatron_versions.HAS_FORMER_DELTA_NET:
        pytest.skip("memlab has gated delta net as megatron-core 0.16 and 0.17 compute it")
    if model.hybrid_override_pattern is not None and not megatron_versions.HAS_FORMER_HYBRID_MODELS:
        pytest.skip("memlab builds layers of Mamba with megatron-core 0.16")
