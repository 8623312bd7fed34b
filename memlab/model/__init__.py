"""The live Megatron model: how it is built, toggled, stepped, moved off the device and given back."""

import warnings

# Importing megatron-core advises on optional packages (Apex, Transformer Engine): `memlab doctor` says what is missing.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
