"""The objects that the garbage collector knows: which are found, and that no other thread sees them held."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memlab.live_objects import count_objects, instances_of, with_subclasses

pytestmark = pytest.mark.versions


class _Lazy(types.ModuleType):
    """A module as `transformers` has them: to ask for its class would import it."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("the object was asked for its class")


class _Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: list[int] = []


def test_the_instances_of_a_class_are_found_and_no_others() -> None:
    lazy = _Lazy("lazy")
    held = [torch.ones(3), torch.nn.Parameter(torch.ones(3)), torch.ones(3).as_subclass(_Own), _Slotted()]
    kinds = with_subclasses(torch.Tensor)
    assert {torch.Tensor, torch.nn.Parameter, _Own} <= kinds
    gc.collect()
    found = {id(each) for each in instances_of(kinds)}
    assert found == {id(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}
    assert found >= {id(each) for each in held[:3]}
    assert instances_of([_Slotted]) == held[3:]
    assert abs(count_objects() - len(gc.get_objects())) < 100
    assert lazy.__name__ == "lazy"


class _Own(torch.Tensor):
    pass


def test_no_audit_hook_is_called_while_objects_are_held() -> None:
    """A hook in Python lets other threads run: a step of a lab in one of them has a higher peak then."""
    code = (
        "import sys\n"
        "from memlab.live_objects import instances_of, references_to_instances_of\n"
        "class Own: pass\n"
        "class Other(Own): pass\n"
        "held, seen = [Own(), Other()], []\n"
        "sys.addaudithook(lambda event, arguments: seen.append(event))\n"
        "found = references_to_instances_of([Own, Other]), instances_of([Own, Other])\n"
        "print(*map(len, found), *dict.fromkeys(seen))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 2 gc.get_referrers\n"


@pytest.mark.parametrize("look", [lambda: instances_of([_Slotted]), count_objects])
def test_a_tuple_that_is_being_built_is_not_held_where_another_thread_could_see_it(look: Any) -> None:
    """CPython may run another thread between two calls of C, which is where a profiler is called too."""
    first: list[int] = [1]
    counts = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        [unfinished] = [each for each in gc.get_referrers(first) if type(each) is tuple]
        counts.add(sys.getrefcount(unfinished))

    def items() -> Iterator[Any]:
        yield first
        sys.setprofile(note)
        try:
            len([])  # what the count is without a look
            [before] = counts
            look()
        finally:
            sys.setprofile(None)
        assert counts == {before}
        yield first

    assert tuple(items()) == (first, first)
