"""The live Megatron model: how it is built, toggled, stepped, moved off the device and given back."""

import warnings

# megatron-core's import advises on optional packages (Apex, Transformer Engine) that memlab reports in `memlab doctor`.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core  # noqa: F401
