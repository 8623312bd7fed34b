"""A pickle read as plain data: whatever would import, build or call something is refused."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# All that a damaged file has been seen to raise; pickle's documentation gives no closed list.
_DAMAGED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)


class _PlainData(pickle.Unpickler):
    """Builds dicts, lists, tuples, sets, strings and numbers. Everything else goes through `find_class`."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, and only plain data is read")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to an object outside the file, {pid!r}")


def load_plain_data(path: Path | str) -> Any:
    """Reads a pickle of dicts, lists, strings and numbers.

    Raises:
        ValueError: If the file is missing, damaged, or holds anything but plain data.
    """
    try:
        with Path(path).open("rb") as file:
            return _PlainData(file).load()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a memory snapshot's file") from error
    except _DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path} is no whole pickle of plain data ({reason}): give a file that "
            "torch.cuda.memory._dump_snapshot wrote"
        ) from error


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Spares a block that builds millions of dicts the walks through all of them: plain data has no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
