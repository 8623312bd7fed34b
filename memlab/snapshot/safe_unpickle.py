"""A pickle read as plain data: before anything is built, its opcodes are checked to build nothing else, and not much.

``pickle`` alone can be made to run code, to allocate gigabytes from ten bytes, or to hash a structure for ever. So the
stream is scanned first, by regular expressions that consume whole opcodes and stop at the first one that no pickle of
dicts, lists, texts and numbers contains:

- Only opcodes of protocols 2 to 5 that make such data pass. What imports, builds, calls or refers outside does not.
- Tuples hold whole numbers only (torch writes ``segment_pool_id: (0, 0)``). A tuple of tuples may serve as a dict key,
  and doubled 100 times it takes 2**100 steps to hash. Whole numbers have at most 9 bytes, for the same reason: keys
  that all have one hash would make a dict quadratic.
- An index into the memo is small for the file's size: ``LONG_BINPUT 2**29`` alone makes ``pickle`` allocate 4 GiB.
- Dicts and lists are few for the file's size: an empty dict is one byte in the file and 64 bytes in memory.

The opcodes are documented in Python's ``pickletools``.
"""

from __future__ import annotations

import gc
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

_ACTION = "give a file that torch.cuda.memory._dump_snapshot wrote"

# What pickle raises on a stream of allowed opcodes in a senseless order; its documentation gives no closed list.
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

_BYTES_PER_CONTAINER = 8
"""A file has at least so many bytes for each dict or list. Entries of torch's traces take 20 to 60."""
_BYTES_PER_MEMO_INDEX = 5
"""Above 255, writing an index takes five bytes, and each is one more than the last."""
_ALWAYS_ALLOWED = 4096
"""So many containers and memo indices are allowed in any file, however small."""


class _PlainData(pickle.Unpickler):
    """A second guard behind the scan: nothing is imported and nothing outside the file is referred to."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, and only plain data is read")

    def persistent_load(self, pid: Any) -> NoReturn:  # its repr may be endless
        raise pickle.UnpicklingError("it refers to an object outside the file, and only plain data is read")


def load_plain_data(path: Path | str) -> Any:
    """Reads a pickle of dicts, lists, texts and numbers.

    Time and memory are at most proportional to the file's size.

    Raises:
        ValueError: If the file is missing, damaged, or holds anything but plain data.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be waited for
            raise ValueError(f"{path} is not a file: {_ACTION}")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a memory snapshot's file") from error
    try:
        _check_opcodes(data)
        return _load(data)
    except _DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is not a whole pickle of plain data ({reason[:200]}): {_ACTION}") from error


def _load(data: bytes) -> Any:
    return _PlainData(BytesIO(data)).load()


def _check_opcodes(data: bytes) -> None:
    """Walks the stream from opcode to opcode.

    Raises:
        UnpicklingError: If an opcode is not allowed, or the stream ends too early.
    """
    most_containers = len(data) // _BYTES_PER_CONTAINER + _ALWAYS_ALLOWED
    # Bytes of numbers and texts are counted as well; in real files they are a few per cent.
    if data.count(b"}") + data.count(b"]") > most_containers:
        raise pickle.UnpicklingError(f"it has more than {most_containers} dicts and lists in {len(data)} bytes")
    run = _opcodes((len(data) // _BYTES_PER_MEMO_INDEX + _ALWAYS_ALLOWED).bit_length())
    at = 0
    while True:
        found = run.match(data, at)
        at = found.end() if found else at
        opcode = data[at : at + 1]
        if opcode == b".":
            return
        if opcode == b"X":  # BINUNICODE: texts of more than 255 bytes in protocol 4, every text before that
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif opcode == b"" or at >= len(data):
            raise pickle.UnpicklingError("it ends too early")
        else:
            raise pickle.UnpicklingError(f"it has opcode {opcode!r} at byte {at}, and only plain data is read")


@cache
def _opcodes(memo_bits: int) -> re.Pattern[bytes]:
    """Returns what matches a run of allowed opcodes, as long as possible and without going back.

    Args:
        memo_bits: How many bits an index into the memo may have.
    """
    # An index is 4 bytes, the lowest first: whole free bytes, one with its high bits zero, and zeros.
    free, bits = divmod(min(memo_bits, 32), 8)
    index = b"." * free + (b"[\\x00-\\x%02x]" % (2**bits - 1) if free < 4 else b"") + b"\\x00" * (3 - free)
    long = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(10))
    number = rb"(?:K.|J.{4}|M..|\x8a(?:" + long + rb"))"
    text = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(256))
    return re.compile(
        rb"(?:"
        rb"h.|j.{4}"  # BINGET, LONG_BINGET
        # BININT1, BININT, BININT2, LONG1. Right behind them TUPLE1, TUPLE2, TUPLE3 takes exactly these numbers.
        rb"|" + number + rb"(?:\x85|" + number + rb"(?:\x86|" + number + rb"\x87)?)?"
        rb"|\((?:" + number + rb"*+t)?"  # MARK, and a TUPLE of numbers
        rb"|[N\x88\x89)\]}aeus\x94]"  # None, booleans, empty tuple, list and dict, what fills them, MEMOIZE
        rb"|q.|r" + index + rb""  # BINPUT, LONG_BINPUT
        rb"|\x8c(?:" + text + rb")"  # SHORT_BINUNICODE
        rb"|G.{8}"  # BINFLOAT
        rb"|\x80[\x02-\x05]|\x95.{8}"  # PROTO, FRAME
        rb")*+",
        re.DOTALL,
    )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns the collector off for a block that builds millions of dicts, which have no cycles to collect.

    It would walk through all of them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
