"""Compares how memlab merges and resolves configurations with OmegaConf and with Hydra's overrides.

    python -m benchmarks.configurations_against_omegaconf --first 0 --count 2000

It needs omegaconf 2.3 and hydra-core 1.3. Each random configuration is a parent, often a child over it, and overrides
as NeMo-RL applies them (`nemo_rl/utils/config.py`). Each value is ``equal``, ``said`` (memlab does not know it),
``refused`` (OmegaConf raises an error for it) or ``wrong``. The exit code is 1 if any is wrong. Mappings that hold each
other, which OmegaConf unfolds without an end, are left out, and a mapping without keys is as good as none.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from memlab.jobs.arguments import read_overrides
from memlab.jobs.entries import UNKNOWN, parse_scalar
from memlab.jobs.interpolation import resolve
from memlab.jobs.yaml_tree import flat, read_yaml

_SCALARS = (
    "1", "8", "010", "32_768", "1e-5", "0.5", "yes", "off", "null", "~", "'4'", '"a b"', "0x1F", "1_0.5", ".5", "08",
    "1e5", "true", "bf16", "None", "[1, 2, x]", "[]", "-3", "+4", "1.", "0b11", "a,b", "1_000_000", "12e03", "Yes",
    "1__0", "0o17", "0",
)  # fmt: skip
_INTERPOLATIONS = (
    "${<group>.<name>}", "${.<name>}", "${..<name>}", "${<group>}", "${<group>.sub}", "${.sub.<name>}",
    "${oc.env:UNSETX,4}", "${oc.env:UNSETX,null}", "${oc.env:UNSETX,a b}", "${oc.env:UNSETY}",
    "${oc.select:<group>.<name>}", "${oc.select:<group>.nope,3}", "${oc.select:.nope,${<group>.<name>}}",
    "${oc.decode:'4'}", "${oc.decode:${oc.env:UNSETX,4}}", "${mul:${<group>.<name>},2}", "${add:1,${.<name>}}",
    "${max:${.<name>},4}", "${div:8,2}", "x${<group>.<name>}y", "${<group>.<name>}${.<name>}",
    "${<group>.${oc.select:nope,<name>}}", "${<group>.l[1]}", "${<group>.l.0}", "${their.own:1}",
)  # fmt: skip
_OVERRIDES = (
    "<group>.<name>=<value>", "+<group>.<name>=<value>", "++<group>.<name>=<value>", "~<group>.<name>",
    "<group>.sub=<value>", "~<group>.sub", "++<group>.sub.<name>=<value>", "~<group>",
)  # fmt: skip
_VALUES = (
    "1", "null", "true", "32_768", "1e-5", "[1,2]", "{n:1}", "{tp: 2, ep: 3}", "abc", "'a b'", '"4"', "${.n}",
    "${mega.n}", "0x1F", "3.0", "-1", ".5", "Null",
)  # fmt: skip
_NAMES, _GROUPS = ("tp", "ep", "opt", "len", "n"), ("policy", "trainer", "mega")


class _Maker:
    """Makes random configurations from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311  # nothing secret

    def filled(self, template: str) -> str:
        """Returns a template with a random text in each place."""
        for place, texts in (("<value>", _VALUES), ("<group>", _GROUPS), ("<name>", _NAMES)):
            while place in template:
                template = template.replace(place, self.rng.choice(texts), 1)
        return template

    def configuration(self) -> str:
        """Returns a file of a few mappings."""
        groups = self.rng.sample(_GROUPS, self.rng.randint(2, 3))
        return "".join(f"{group}:\n{self._mapping(1)}" for group in groups)

    def _mapping(self, depth: int) -> str:
        indent = "  " * (2 - depth)
        lines = [f"{indent}{name}: {self._value()}\n" for name in self.rng.sample(_NAMES, self.rng.randint(1, 4))]
        if self.rng.random() < 0.5:
            lines.append(f"{indent}l: [10, 20, 30]\n")
        if depth and self.rng.random() < 0.6:
            lines.append(f"{indent}sub:\n{self._mapping(depth - 1)}")
        return "".join(lines)

    def _value(self) -> str:
        if self.rng.random() < 0.65:
            return self.rng.choice(_SCALARS)
        return f'"{self.filled(self.rng.choice(_INTERPOLATIONS))}"'

    def overrides(self) -> list[str]:
        """Returns overrides as Hydra's command line has them."""
        return [self.filled(self.rng.choice(_OVERRIDES)) for _ in range(self.rng.randint(0, 3))]


def of_omegaconf(parent: str, child: str, overrides: list[str]) -> DictConfig:
    """Returns what OmegaConf and Hydra make of a configuration."""
    tree = OmegaConf.load(io.StringIO(parent))
    if child:
        tree = OmegaConf.merge(tree, OmegaConf.load(io.StringIO(child)))
    assert isinstance(tree, DictConfig)
    OmegaConf.set_struct(tree, True)
    parsed = OverridesParser.create().parse_overrides(overrides=overrides)
    ConfigLoaderImpl._apply_overrides_to_config(overrides=parsed, cfg=tree)
    return tree


def leaves(tree: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each value under its dotted key; the error for one that OmegaConf cannot resolve."""
    if prefix.count(".") > 2 * len(_GROUPS):
        raise RecursionError(prefix)  # mappings that hold each other
    for key in list(tree.keys()):
        name = f"{prefix}{key}"
        try:
            value = tree[key]
            if isinstance(value, DictConfig) and len(value):
                yield from leaves(value, f"{name}.")
                continue
            yield name, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except RecursionError:
            raise
        except Exception as error:  # noqa: BLE001  # OmegaConf's many kinds, each of which is the result here
            yield name, error


def of_memlab(parent: str, child: str, overrides: list[str]) -> dict[str, Any]:
    """Returns what memlab makes of it."""
    entries = flat(read_yaml(parent, "parent"), "parent")
    if child:
        entries.merge(flat(read_yaml(child, "child"), "child"))
    read_overrides([(word, 1) for word in overrides], entries)
    resolve(entries)
    return {key: entry.value for key, entry in entries.by_key.items()}


def verdict(found: Any, truth: Any) -> str:
    """Says whether memlab's value is OmegaConf's; memlab reads a text that is a number as the number."""
    values = found if isinstance(found, list) else [found]
    if any(isinstance(one, str) and UNKNOWN in one for one in values):
        return "said"
    if isinstance(truth, Exception):
        return "refused"
    if isinstance(found, list) and isinstance(truth, list) and len(found) == len(truth):
        return "equal" if all(verdict(*pair) == "equal" for pair in zip(found, truth, strict=True)) else "wrong"
    if isinstance(truth, str) and not isinstance(found, str):
        return "equal" if found == parse_scalar(truth) or str(found) == truth else "wrong"
    return "equal" if found == truth and isinstance(found, bool) == isinstance(truth, bool) else "wrong"


def compare(seed: int) -> Iterator[tuple[str, str]]:
    """Yields each key of a random configuration with a verdict."""
    maker = _Maker(seed)
    parent, overrides = maker.configuration(), maker.overrides()
    child = maker.configuration() if maker.rng.random() < 0.6 else ""
    try:
        truth = dict(leaves(of_omegaconf(parent, child, overrides)))
    except Exception:  # noqa: BLE001  # a configuration that they refuse as a whole, or that has no end
        return
    found = of_memlab(parent, child, overrides)
    absent: dict[str, Any] = {}
    failed = [key for key, value in truth.items() if isinstance(value, Exception)]
    for key in sorted({*truth, *found}):
        if any(key == one or key.startswith(f"{one}.") for one in failed):
            yield key, "refused"
        else:
            yield key, verdict(found.get(key, absent), truth.get(key, absent))


def main() -> int:
    """Compares, prints what is wrong, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    for name, function in {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "max": max,
    }.items():
        OmegaConf.register_new_resolver(name, function)
    counts = Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.count):
        for key, result in compare(seed):
            counts[result] += 1
            if result == "wrong":
                print(f"seed {seed}: {key}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
