"""The recipes of Megatron-Bridge that memlab knows: what each sets, of the keys that memlab reads.

``benchmarks/bridge_recipes.py`` follows the functions of ``megatron/bridge/recipes/`` and writes these values. Where a
job's megatron-bridge is there, memlab reads its own functions instead (``memlab/jobs/bridge_package.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VERSION = "0.6.2"
WRITTEN: dict[str, dict[str, Any] | str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
RECIPES: dict[str, dict[str, Any]] = {
    name: values for name, one in WRITTEN.items() if isinstance(values := WRITTEN.get(str(one), one), dict)
}
"""By the name of a recipe's function, or of an alias."""
