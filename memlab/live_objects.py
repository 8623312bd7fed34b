"""The objects that Python's garbage collector knows, without a moment in which another thread sees them held.

``gc.get_objects`` and ``gc.get_referrers`` also return tuples that another thread is still building, for example in
``tuple(x for x in y)``. While a list refers to such a tuple, that thread cannot grow it: it gets ``SystemError: bad
argument to internal function`` (``_PyTuple_Resize`` in CPython 3.11 to 3.13, ``Objects/tupleobject.c``). The functions
here look at the list within one call of C, in which no other thread runs, and return no tuple.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial, reduce
from itertools import chain, compress, repeat, starmap
from operator import is_, or_
from typing import Any


def instances_of(classes: Collection[type]) -> list[Any]:
    """Returns the objects whose class is one of these; subclasses do not count.

    An object's ``__class__`` is not asked: that of a lazy module imports the module.

    Args:
        classes: Written in Python: an object of such a class refers to it (CPython 3.9 and later).
    """
    return _found(classes, list)


def references_to_instances_of(classes: Collection[type]) -> list[weakref.ref[Any]]:
    """Returns weak references to what `instances_of` returns, so that none lives longer because it was found."""
    return _found(classes, lambda found: list(map(weakref.ref, found)))


def _found(classes: Collection[type], collected: Callable[[Iterator[Any]], list[Any]]) -> list[Any]:
    # A collection in the middle could run a finalizer, and Python code lets other threads run.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return collected(_with_their_class(classes))
    finally:
        if was_enabled:
            gc.enable()


def count_objects() -> int:
    """Returns how many objects the garbage collector knows."""
    return sum(map(len, map(gc.get_objects, (None,))))


def with_subclasses(kind: type) -> set[type]:
    """Returns a class and all that inherit from it."""
    found: set[type] = set()
    waiting = [kind]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += type.__subclasses__(each)
    return found


def _with_their_class(classes: Collection[type]) -> Iterator[Any]:
    """Returns an iterator in C, which calls `gc.get_referrers` when it is asked for the first object.

    Each object comes once to be returned, and once for each class, to be asked whether it is its own. `itertools.tee`
    would not do: it keeps objects, is among them itself, and would leave them in a reference cycle. Nor would ``id``,
    which calls audit hooks: on Python 3.12 and later, filelock (4.3.1), which megatron-core imports, has one in Python,
    and there other threads run while the list is alive. A metaclass may have a hash in Python too.
    """
    objects = chain.from_iterable(starmap(gc.get_referrers, (tuple(classes),)))
    repeated = chain.from_iterable(map(repeat, objects, repeat(1 + len(classes))))
    are_of = (map(is_, map(type, repeated), repeat(each)) for each in classes)
    return compress(repeated, reduce(partial(map, or_), are_of))
