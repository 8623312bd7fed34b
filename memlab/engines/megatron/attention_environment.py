"""The variables by which Transformer Engine chooses an attention backend, set for a block and then restored.

Megatron sets them when it builds a model and asserts that they agree with ``config.attention_backend``
(``models/common/language_module/language_module.py``, 0.16.1 and 0.19.2), but never restores them, so that a second
model of the process could not have another backend. Transformer Engine reads them at a forward, and remembers its
choice (``attention/dot_product_attention/dot_product_attention.py``, 2.12.0).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from memlab.config.training_state import AttentionBackend

_VARIABLES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
_users_values: dict[str, str | None] = {}
"""What the variables were before the block that is running now, such as a step of the lab that is open."""
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


@contextmanager
def attention_backend_chosen(backend: AttentionBackend) -> Iterator[None]:
    """Lets Megatron and Transformer Engine use a backend, on every thread of the process, for the block."""
    assert not _users_values, "a job runs inside another"
    _users_values.update({name: os.environ.get(name) for name in _VARIABLES.values()})
    _set(dict(_values(backend)))
    try:
        yield
    finally:
        _set(_users_values)
        _users_values.clear()


def change_attention_backend(backend: AttentionBackend) -> None:
    """Chooses another backend for the rest of the block of `attention_backend_chosen`."""
    assert _users_values, "a job chooses a backend for its block first"
    _set(dict(_values(backend)))


def check_environment(backend: AttentionBackend) -> None:
    """Checks that the user's variables agree with a backend, as Megatron does when it builds a model.

    Raises:
        ValueError: If one does not.
    """
    for name, value in _values(backend):
        found = _users_values[name] if _users_values else os.environ.get(name)
        if found not in (None, value):
            raise ValueError(
                f"{name} is {found!r} in the environment, must be {value} or unset with attention_backend "
                f"{backend!r}: unset it, or choose another attention_backend"
            )


def check_flash_attention_is_installed() -> None:
    """Checks that Transformer Engine, which is loaded, has found flash-attn.

    Raises:
        ValueError: If it has not.
    """
    found = sys.modules[f"{_ATTENTION}.utils"].FlashAttentionUtils
    if not (found.is_installed or found.v3_is_installed):
        raise ValueError(
            "attention_backend is 'flash', and Transformer Engine finds no flash-attn that it supports: install "
            "flash-attn 2.1.1 to 2.8.3 or flash-attn-3, choose another attention_backend, or predict it "
            "(memlab predict)"
        )


def _values(backend: AttentionBackend) -> Iterator[tuple[str, str]]:
    return ((variable, "1" if backend in ("auto", name) else "0") for name, variable in _VARIABLES.items())


def _set(values: dict[str, str | None]) -> None:
    # An unset variable counts as 1 (`get_attention_backend`).
    is_changed = any(os.environ.get(name, "1") != (value or "1") for name, value in values.items())
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    attention = sys.modules.get(f"{_ATTENTION}.dot_product_attention")
    if is_changed and attention is not None:
        attention._attention_backends["backend_selection_requires_update"] = True
