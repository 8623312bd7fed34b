"""What a command prints as its result stands alone on stdout."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def result_alone_on_stdout() -> Iterator[None]:
    """Sends to stderr whatever is printed in the block, by Python or by C code, and drops third parties' warnings."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
            yield
    finally:
        sys.stdout.flush()  # of whoever kept the stream
        ctypes.CDLL(None).fflush(None)  # C keeps a buffer of its own, and would write it after the result
        os.dup2(stdout, 1)
        os.close(stdout)
