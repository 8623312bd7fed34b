"""An option is one row: a field of a settings class, with what flags, panel, job files and rules need to know of it.

The field gives name, type and default, and its metadata the rest. Flags (`memlab.commands.shared.option_flags`), the
panel's controls, the checks of types and ranges, the keys of job files that are Megatron's own, Megatron's configs, and
what a change rebuilds are made from the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from memlab.config.validation import RuleError, check_number, check_whole_number, plain_whole_number, shortened

Rebuilt = Literal["nothing", "optimizer", "model"]
"""The part that a change of the training state builds again; a model is rebuilt with its optimizer."""
Kind = Literal["switch", "choice", "modules", "whole", "number", "name"]
EngineName = Literal["megatron", "fsdp2"]
"""The training engines: `memlab.engines.megatron` and `memlab.engines.fsdp2`."""
_KINDS: dict[Any, Kind] = {bool: "switch", int: "whole", float: "number", str: "name", tuple[str, ...]: "modules"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What memlab knows of an option."""

    name: str = ""
    kind: Kind = "switch"
    default: Any = None
    may_be_none: bool = False
    choices: tuple[str, ...] = ()
    """Of a choice, or of a list of modules."""
    help: str
    """What it does, without a capital and a full stop. Names of other options are between backquotes."""
    group: str = ""
    """The title of the panel's group of controls; empty where the panel has no control for it."""
    label: str = ""
    """What the panel calls it, if not by its name."""
    words: Mapping[str, Any] | None = None
    """What the panel calls each value, if not by itself."""
    shown_for_none: int | None = None
    """The number with which the panel shows None."""
    needs: str = ""
    """The option of the same class without which nothing reads this one."""
    needs_value: str = ""
    """The only value of `needs` under which something reads this one; empty if every value does that switches it on."""
    at_least: int = 1
    """The smallest whole number; other numbers are at least 0."""
    at_most: int | None = None
    """The largest number. Without it, the class has a rule of its own for a number that is not whole."""
    advice: str = "give another value"
    """What to do about a number that is refused."""
    rebuilds: Rebuilt | None = None
    """What a change on a live model rebuilds; None where no change rebuilds anything."""
    megatron: str = ""
    """Megatron's configs that have it, between spaces: ``model`` (TransformerConfig), ``ddp`` or ``optimizer``, or
    ``ddp.bucket_size`` where its name there is another one. Job files give it under the first."""
    since: tuple[int, int] | None = None
    """The first version of megatron-core that has it, if not every version that memlab supports."""
    engines: tuple[EngineName, ...] = ("megatron",)
    """The engines that have it."""

    @property
    def needed(self) -> str:
        """What has to be set so that something reads the option."""
        return f"{self.needs} {self.needs_value!r}" if self.needs_value else self.needs

    def described(self, written: Callable[[str], str], *, negated: bool = False) -> str:
        """Returns its help, with what it needs.

        Args:
            written: Writes the name of an option, as the reader knows it.
            negated: Whether the text is about switching the option off.
        """
        text = ("do not " if negated else "") + self.help
        if self.needs:
            text = f"with `{self.needs}`{' ' * bool(self.needs_value)}{self.needs_value}: {text}"
        newer = f"; needs megatron-core {self.since_words}" if self.since else ""
        newer += f"; needs `engine` {self.engines[0]}" if "megatron" not in self.engines else ""
        return re.sub(r"`(\w+)`", lambda found: written(found[1]), text + newer)

    def sentence(self, written: Callable[[str], str] = str) -> str:
        """Returns `described` as a sentence, without its full stop."""
        text = self.described(written)
        return text[0].upper() + text[1:]

    @property
    def config(self) -> str:
        """The config of Megatron under which job files give it; empty if none has it."""
        return self.megatron.partition(" ")[0].partition(".")[0]

    @property
    def since_words(self) -> str:
        """The first version of megatron-core that has it, as ``0.19``; empty if every version has it."""
        return ".".join(str(part) for part in self.since or ())

    def name_in(self, config: str) -> str | None:
        """Returns its name in one of Megatron's configs; None if that has no such option."""
        names = dict(place.partition(".")[::2] for place in self.megatron.split())
        return names[config] or self.name if config in names else None


def option(default: Any, help: str, **values: Any) -> Any:  # noqa: A002 - the row's own word
    """Returns the field of a dataclass that is an option.

    Args:
        default: Of the field; ``MISSING`` if a value has to be given.
        **values: Other fields of `Option`, apart from those that the field itself gives.
    """
    return field(default=default, metadata={"option": Option(help=help, **values)})


@cache
def options_of(cls: type) -> dict[str, Option]:
    """Returns the options of a dataclass by name, in its order.

    Those of a field that is None or an object with options of its own are named after both, such as ``lora_rank``. The
    first of them switches the object on: without it, nothing reads the others.
    """
    hints, found = get_type_hints(cls), {}
    for one in fields(cls):
        inner = next((kind for kind in get_args(hints[one.name]) if is_dataclass(kind)), None)
        if inner is not None and options_of(inner):  # type: ignore[arg-type]
            first, *others = (
                replace(each, name=f"{one.name}_{each.name}")
                for each in options_of(inner).values()  # type: ignore[arg-type]
            )
            found[first.name] = replace(first, default=None, may_be_none=True, shown_for_none=0)
            found |= {each.name: replace(each, needs=first.name) for each in others}
        if "option" in one.metadata:
            hint, given = hints[one.name], one.metadata["option"]
            may_be_none = NoneType in get_args(hint)
            plain = get_args(hint)[0] if may_be_none else hint
            kind = _KINDS.get(plain, "choice")
            choices = get_args(plain) if kind == "choice" else given.choices
            known = {"name": one.name, "default": one.default, "kind": kind, "choices": choices}
            found[one.name] = replace(given, may_be_none=may_be_none, **known)
    return found


@cache
def _own_names(cls: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(cls))


def check_options(settings: Any, prefix: str = "") -> None:
    """Checks the type, the choices and the range of each option of an object, and makes other whole numbers Python's.

    Those of numpy and of torch are such others.

    Args:
        prefix: How the names of its options begin, as users know them.

    Raises:
        RuleError: If one breaks its rule.
    """
    own = _own_names(type(settings))  # type: ignore[arg-type]  # a class is hashable
    for name, one in options_of(type(settings)).items():  # type: ignore[arg-type]  # a class is hashable
        if name not in own:
            continue  # of an object that has checked itself
        value = getattr(settings, name)
        if one.kind == "whole":
            object.__setattr__(settings, name, value := plain_whole_number(value))
        name = prefix + name  # noqa: PLW2901
        if value is None and one.may_be_none:
            continue
        if one.kind == "whole":
            check_whole_number(name, value, one.at_least, one.at_most, action=one.advice)
        elif one.kind == "number" and one.at_most is not None:
            check_number(name, value, None, one.at_most, action=one.advice)
        elif one.kind == "name" and not isinstance(value, str):
            _refuse(one, name, value, "a name")
        elif one.kind == "choice" and value not in one.choices:
            _refuse(one, name, value, f"one of {', '.join(one.choices)}")
        elif one.kind == "switch" and not isinstance(value, bool):
            _refuse(one, name, value, "True or False")


@cache
def _options_without(cls: type, engine: EngineName) -> list[tuple[str, Option]]:
    return [(name, one) for name, one in options_of(cls).items() if engine not in one.engines]


def check_engine(settings: Any, engine: EngineName) -> None:
    """Checks that an engine has each option of an object that differs from its default.

    Raises:
        RuleError: If it does not have one.
    """
    own = _own_names(type(settings))  # type: ignore[arg-type]  # a class is hashable
    for name, one in _options_without(type(settings), engine):  # type: ignore[arg-type]  # a class is hashable
        outer, _, inner = name.partition("_")
        value = getattr(settings, name) if name in own else getattr(getattr(settings, outer), inner, one.default)
        if value != one.default:
            raise RuleError(
                f"{name} is {shortened(value)}, but engine {engine!r} does not have this option: leave it out, or "
                f"choose engine {one.engines[0]!r}",
                *(name, "engine"),
            )


def _refuse(one: Option, name: str, value: object, rule: str) -> NoReturn:
    or_none = ", or None" if one.may_be_none else ""
    advice = "give one" if one.kind == "name" else "choose one of them"
    raise RuleError(f"{name} is {shortened(value)}, must be {rule}{or_none}: {advice}", name)


def unread(cls: type, values: Mapping[str, Any]) -> dict[str, str]:
    """Names the options of a class that nothing reads among such values, each with the reason."""
    reasons = {}
    for name, one in options_of(cls).items():
        value = values.get(one.needs)
        is_read = value == one.needs_value if one.needs_value else value not in (None, False, ())
        if one.needs and (not is_read or one.needs in reasons):
            reasons[name] = f"only {one.needed} reads it"
    return reasons


def checked_modules(one: Option, value: object) -> tuple[str, ...] | None:
    """Returns a list of modules in the order of its option's choices.

    Raises:
        RuleError: If it is no list of them, or empty where the default is another one.
    """
    name, choices = one.name, one.choices
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        remedy = (
            f"write [{shortened(value)}] for a single one"
            if isinstance(value, str) and value in choices
            else f"name some of {', '.join(choices)}"
        )
        raise RuleError(f"{name} is {shortened(value)}, must be a list of module names: {remedy}", name)
    given = list(value)
    if not given and one.default != ():
        raise RuleError(
            f"{name} is an empty list: name at least one of {', '.join(choices)}, or leave {name} out", name
        )
    unknown = [module for module in given if module not in choices]
    meant = re.findall(r"\w+", ",".join(f"{module}".lower().replace("-", "_") for module in given))
    if unknown and meant and {*meant} <= {*choices}:
        raise RuleError(
            f"{name} has {shortened(unknown)}, must be names as Megatron writes them, one by one: write "
            f"{shortened(meant)}",
            name,
        )
    if unknown:
        raise RuleError(
            f"{name} has {shortened(unknown)}, which memlab does not model: choose from {', '.join(choices)}",
            name,
        )
    return tuple(module for module in choices if module in given)
