"""What memlab does not step, because earlier events of the same model have shown what it does."""

import memlab.engines.megatron  # noqa: F401  # imports megatron-core first, without its warnings
