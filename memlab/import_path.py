"""Where a child process finds this memlab."""

from __future__ import annotations

import os
from pathlib import Path


def variables_that_import_memlab() -> dict[str, str]:
    """Returns environment variables with which a child process imports this memlab, whether it is installed or not."""
    root = str(Path(__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
