"""The machine code of the compiled allocator: numba makes it once, and later LLVM alone loads it.

numba has a cache too, but to read it takes all of numba: 0.35 s and 120 MB. LLVM takes 0.04 s. The code is kept beside
this file, or in the user's cache directory if that is read-only. Its name has a digest of the rules and of the versions
of numba and LLVM. It runs on every processor of the architecture, as a machine in a cloud changes its own.
"""

from __future__ import annotations

import os
from ctypes import PYFUNCTYPE, c_int32, c_int64
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm

from memlab.atomic_files import written_aside

_HERE = Path(__file__).parent
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111  # that of Path raises
_FOLDERS = (_HERE / "__pycache__", *([_CACHE / "memlab"] if _CACHE.is_absolute() else []))
"""A user without a home directory, as in some containers, has only the first."""
_SOURCES = ("kernels.py", "tables.py", "rules.py", "protocol.py", "machine_code.py")
_NUM_DIGEST_BYTES = 32
_engines: list[Any] = []
"""They own the code."""


@cache
def serve(*, compiles: bool) -> Any:
    """Returns `memlab.allocator.kernels._serve` for C: the addresses of its answer and of an error come first.

    Args:
        compiles: Whether it is compiled where no earlier process has kept it. That takes 10 s.

    Raises:
        LookupError: If nothing is kept, and `compiles` is False.
        Exception: Whatever numba or LLVM raises where it does not work.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name = _name()
    code = _kept(name)
    if code is None:
        if not compiles:
            raise LookupError("no machine code is kept")
        code = _compiled()
        _keep(name, code)
    symbol, _, content = code.partition(b"\n")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _engines.append(engine)
    return PYFUNCTYPE(c_int32, c_int64, c_int64, c_int64)(engine.get_function_address(symbol.decode()))


def is_to_be_made() -> bool:
    """Returns whether no process has kept the code, and one that compiles it could keep it."""
    if _kept(_name()) is not None:
        return False
    written = _keep(f"allocator.{os.getpid()}", b"")
    if written is not None:
        written.unlink(missing_ok=True)
    return written is not None


def _name() -> str:
    content = b"".join((_HERE / name).read_bytes() for name in _SOURCES)
    made_with = version("numba"), llvmlite.__version__, llvm.get_default_triple()
    return f"allocator.{sha256(content + repr(made_with).encode()).hexdigest()[:20]}.o"


def _compiled() -> bytes:
    """Returns the name of the function in the object file, a line break, and the object file."""
    from memlab.allocator.kernels import assembly

    symbol, text = assembly()
    content: bytes = _target_machine().emit_object(llvm.parse_assembly(text))
    return symbol.encode() + b"\n" + content


def _target_machine() -> Any:
    """Returns what numba compiles for (numba 0.68.1, ``JITCPUCodegen`` in numba/core/codegen.py), on any processor."""
    target = llvm.Target.from_default_triple()
    reloc = "static" if target.name.startswith("x86") else "default"
    return target.create_target_machine("generic", "", opt=3, reloc=reloc, codemodel="jitdefault")


def _kept(name: str) -> bytes | None:
    """Returns what an earlier process has kept; None if there is nothing, or it is damaged."""
    for folder in _FOLDERS:
        try:
            content = (folder / name).read_bytes()
        except OSError:
            continue
        digest, code = content[:_NUM_DIGEST_BYTES], content[_NUM_DIGEST_BYTES:]
        if sha256(code).digest() == digest:
            return code
    return None


def _keep(name: str, code: bytes) -> Path | None:
    """Writes a file into the first folder that takes it; returns its path, None if no folder does."""
    for folder in _FOLDERS:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with written_aside(folder / name) as path:
                path.write_bytes(sha256(code).digest() + code)
        except OSError:
            continue
        return folder / name
    return None
