"""Which layers have something, as Megatron's frequencies say it: a number, a list, or an expression of lists.

These are ``moe_layer_freq``, of layers with experts, and ``window_attn_skip_freq``, of layers with a window.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from memlab.config.validation import MOST_LAYERS

_LONGEST = 4 * MOST_LAYERS
"""Characters of an expression; a list of all layers has two for each."""


def layer_pattern(value: Any) -> int | tuple[int, ...]:
    """Reads a frequency or a pattern of layers.

    The syntax is that of ``moe_freq_type`` (megatron/training/arguments.py, core 0.16.1): digits, lists, parentheses,
    ``+`` and ``*``, such as ``([0]*1+[1]*47)``. Nothing is executed.

    Args:
        value: As the job's file has it; None, Megatron's default, is 1.

    Returns:
        N if every N-th layer has it, counted from the first, or for each layer 1 if it has it and 0 if not.

    Raises:
        ValueError: If it is none of them; the text says what it must be.
    """
    found = _evaluated(_tree(value)) if isinstance(value, str) and "[" in value else _number(value)
    if isinstance(found, list):
        if not set(found) <= {0, 1}:
            raise ValueError("must be 1 for a layer that has it, such as experts, and 0 for another one")
        return tuple(found)
    if found < 1:
        raise ValueError("must be at least 1, or a list with one number per layer")
    return found


def _number(value: Any) -> int | list[int]:
    if value is None:
        return 1
    if isinstance(value, list) and all(type(part) is int for part in value):
        return value
    if type(value) is int or (isinstance(value, str) and re.fullmatch(r"\d{1,5}", value.strip(), re.ASCII)):
        return int(value)
    raise ValueError("must be a whole number, or a list with one number per layer, such as [1]*48")


def _tree(text: str) -> ast.expr:
    refused = ValueError("must be a list expression of numbers, + and *, such as ([0]*1+[1]*47)")
    if len(text) > _LONGEST or re.search(r"[^,\d\[\]()+*]", text, re.ASCII):
        raise refused
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refused from error


def _evaluated(tree: ast.expr) -> Any:
    """Returns the list or the number of an expression."""
    refused = ValueError(f"must be a list of at most {MOST_LAYERS:,} numbers, made of lists, + and *, such as [1]*48")
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=parts):
            found = [_evaluated(part) for part in parts]
            if all(isinstance(part, int) for part in found):
                return found
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluated(left), _evaluated(right)
            size = len(first) + len(second) if isinstance(first, list) and isinstance(second, list) else 0
            if type(first) is type(second) and size <= MOST_LAYERS:
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            number, repeated = sorted((_evaluated(left), _evaluated(right)), key=lambda part: isinstance(part, list))
            if isinstance(repeated, int) or (isinstance(number, int) and len(repeated) * number <= MOST_LAYERS):
                return number * repeated
    raise refused
