"""What this process's rank sends in collectives: counted where they are called, and where passes are replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

sent_bytes = Counter[str]()
"""Bytes that the rank has sent so far, by kind of collective, such as ``all-to-all``."""


def sent_since(before: Counter[str]) -> Counter[str]:
    """Returns what the rank has sent since `sent_bytes` was copied."""
    return sent_bytes - before


def send_again(sent: Mapping[str, int], times: int = 1) -> None:
    """Counts what a pass has sent, for passes that repeat it."""
    for kind, num_bytes in sent.items():
        sent_bytes[kind] += times * num_bytes
