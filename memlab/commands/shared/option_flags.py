"""One flag for each option of a settings class, from its row."""

from __future__ import annotations

import argparse
import re
from typing import Any

from memlab.config.option import Option, options_of


def add_option_flags(group: argparse._ArgumentGroup, cls: type) -> None:
    """Declares the flags of a class's options. Those that a user leaves out are None: the class has the defaults."""
    for one in options_of(cls).values():
        is_negated = one.kind == "switch" and one.default is True
        flag = f"--no-{_flag(one.name)[2:]}" if is_negated else _flag(one.name)
        text = one.described(_flag, negated=is_negated)
        group.add_argument(flag, dest=one.name, default=None, help=text, **_reads(one))


def _reads(one: Option) -> dict[str, Any]:
    if one.kind == "switch":
        if one.may_be_none:
            return {"action": argparse.BooleanOptionalAction}
        return {"action": "store_false" if one.default else "store_true"}
    if one.kind == "choice":
        return {"metavar": "{" + ",".join(one.choices) + "}"}
    if one.kind == "name":
        return {"metavar": "NAME"}
    if one.kind == "modules":
        return {"type": _names, "metavar": "A,B"}
    return {"type": whole_number, "metavar": "N"} if one.kind == "whole" else {"type": _number, "metavar": "F"}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


def whole_number(text: str) -> int:
    """Reads a flag's number. `int` would also take ``1_000``, spaces and the digits of every script."""
    if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _number(text: str) -> float:
    """Reads a flag's share. `float` would also take ``nan``, ``1_0`` and the digits of every script."""
    if not re.fullmatch(r"[+-]?[0-9]{0,30}[.]?[0-9]{1,30}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.5")
    return float(text)
