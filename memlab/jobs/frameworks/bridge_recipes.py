"""The recipes of Megatron-Bridge that memlab knows: what each sets, of the keys that memlab reads.

``benchmarks/bridge_recipes.py`` follows the functions of ``megatron/bridge/recipes/`` and writes these values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VERSION = "0.6.2"
RECIPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
