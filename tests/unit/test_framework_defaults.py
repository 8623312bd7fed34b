"""The comparison of memlab's tables with the frameworks' own configurations, on what is installed here."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.framework_defaults import ADAPTERS, ddp, differences, optimizer_config, unexpected
from benchmarks.framework_sources import Sources
from memlab.jobs.frameworks.registry import FRAMEWORKS

VERL = "actor_rollout_ref.actor"
PREFIXES = {
    "bridge": ("ddp", "optimizer"),
    "verl": (f"{VERL}.megatron.override_ddp_config", f"{VERL}.optim.override_optimizer_config"),
}


@pytest.fixture(scope="module")
def of_megatron() -> tuple[dict[str, Any], dict[str, Any]]:
    if version("megatron-core") != "0.16.1":
        pytest.skip("the tables have the defaults of megatron-core 0.16.1")
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    sources = Sources([Path(spec.origin).parents[2]])
    return ddp(sources), optimizer_config(sources)


def _left(name: str, theirs: dict[str, Any]) -> list[tuple[str, str]]:
    found = [one for one in differences(FRAMEWORKS[name], theirs) if one[0] in theirs]
    return [one for one in unexpected(found, ADAPTERS[name].expected) if not one[1].endswith("and does not")]


@pytest.mark.parametrize("name", PREFIXES)
def test_megatron_core_has_no_key_and_no_default_that_a_framework_s_table_lacks(
    name: str, of_megatron: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    theirs = {
        f"{prefix}.{key}": v
        for prefix, keys in zip(PREFIXES[name], of_megatron, strict=True)
        for key, v in keys.items()
    }
    assert len(theirs) > 70 and not _left(name, theirs)
    drifted = theirs | {f"{PREFIXES[name][1]}.newest": 1, f"{PREFIXES[name][1]}.optimizer_cpu_offload": True}
    assert {key.rpartition(".")[2] for key, _ in _left(name, drifted)} == {"newest", "optimizer_cpu_offload"}
