"""Attention of all engines: what kernels of cuDNN, flash-attn and Transformer Engine compute and save for backward."""
