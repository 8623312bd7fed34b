"""The recipe functions of a megatron-bridge that is installed or checked out, read as data and never executed.

Layout of the package: ``src/megatron/bridge/recipes`` and ``perf_recipes`` (0.6.2 and main of August 2026).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from memlab.config.architectures import published_architecture
from memlab.config.pipeline_layout import FIELD as PIPELINE_LAYOUT
from memlab.config.pipeline_layout import text_of_layout
from memlab.config.validation import shortened
from memlab.jobs.entries import UNKNOWN as UNKNOWN_TEXT
from memlab.jobs.entries import Entries, Line, NoJobError
from memlab.jobs.frameworks.bridge import BRIDGE
from memlab.jobs.frameworks.keys import ABSENT
from memlab.jobs.frameworks.megatron_keys import ARCHITECTURE
from memlab.jobs.frameworks.user_buffers import defaults_of_class
from memlab.jobs.python.follower import Follower
from memlab.jobs.python.package import Package
from memlab.jobs.python.values import UNKNOWN, Class, External, Function, NotFollowedError, Section, Unknown

_PACKAGE = Path("megatron/bridge")
_LIBRARY = "megatron.bridge.recipes"
BENCHMARKS = "megatron.bridge.perf_recipes"
"""Performance recipes, each for one type of GPU."""
_RANKS = re.compile(r"_([1-9][0-9]*)gpu_")
"""Recipes are named by the GPUs that they are for (``BENCHMARK_RECIPE_PATTERN`` in scripts/training/recipe_metadata.py,
main of August 2026)."""
_AUTO_BRIDGE = "megatron.bridge.models.conversion.auto_bridge"
_TRAINING = "megatron.bridge.training"
_PRECISIONS = f"{_TRAINING}.mixed_precision"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function that returns the configuration of a job."""

    module: str
    name: str


@dataclass(slots=True)
class BridgePackage:
    """One megatron-bridge on disk."""

    root: Path
    """The folder that holds ``megatron/bridge``."""
    _follower: Follower | None = field(default=None)

    def recipes_of(self, file: Path) -> list[Recipe]:
        """Returns the recipes that a file defines, in its order; none for files outside the recipes' folders."""
        try:
            parts = file.resolve().relative_to(self.root.resolve()).with_suffix("").parts
        except ValueError:
            return []
        module = ".".join(parts)
        if not _has_recipes(module):
            return []
        package = self._following().package
        names = [
            one.name
            for one in package.module(module).body
            if isinstance(one, ast.FunctionDef) and one.name.endswith("_config") and not one.name.startswith("_")
        ]
        return [Recipe(module, name) for name in names]

    def names(self) -> set[str]:
        """Returns the names of all recipes but performance recipes, those that stand for another recipe too."""
        package = self._following().package
        names = {name for module in self._libraries() for name in package.names_in(module)}
        return {name for name in names if name.endswith("_config") and not name.startswith("_")}

    def find(self, name: str) -> Recipe | None:
        """Returns the recipe of a name, as ``run_recipe.py`` finds it: a performance recipe first.

        See ``load_recipe`` in scripts/training/recipe_runner.py, main of August 2026.
        """
        follower = self._following()
        follower.forget()
        modules = [*self._families(BENCHMARKS), *self._libraries()] if _RANKS.search(name) else self._libraries()
        for module in modules:
            found = follower.global_of(module, name)
            if isinstance(found, Function) and _has_recipes(found.module) and isinstance(found.node, ast.FunctionDef):
                return Recipe(found.module, found.node.name)
        return None

    def _libraries(self) -> list[str]:
        families = [f"{family}.h100" for family in self._families(_LIBRARY)]
        return [_LIBRARY, *filter(self._following().package.has, families)]

    def _families(self, module: str) -> list[str]:
        folder = self.root.joinpath(*module.split("."))
        return [f"{module}.{file.parent.name}" for file in sorted(folder.glob("*/__init__.py"))]

    def file_of(self, recipe: Recipe) -> Path | None:
        """Returns the file that defines a recipe."""
        return self._following().package.file_of(recipe.module)

    def entries_of(self, recipe: Recipe) -> Entries:
        """Returns what a recipe sets, by key.

        Raises:
            NotFollowedError: If its function cannot be followed.
        """
        follower = self._following()
        made = follower.call_named(recipe.module, recipe.name)
        if not isinstance(made, Section):
            raise NotFollowedError(f"{recipe.name} of {recipe.module} returns no configuration that memlab can follow")
        entries = Entries()
        model = made.get("model")
        published = _PUBLISHED.get(model.of.rpartition(".")[2]) if isinstance(model, Section) else None
        if published is not None:
            entries.add("model.hf_model_id", published, None)
        kind = model.of.rpartition(".")[2] if isinstance(model, Section) and published is None else ""
        if kind.endswith("Provider") and kind not in (*_LAYERS_OF_CLASS, *_HYBRIDS):
            entries.add("model.class", kind, None)
        for key, value, line in _flat(made, ""):
            entries.add(key, value, _short(line, recipe))
        ranks = _RANKS.search(recipe.name)
        if ranks is not None:
            entries.add("world_size", int(ranks[1]), follower.global_of(recipe.module, recipe.name).node.lineno)
        return entries

    def _following(self) -> Follower:
        if self._follower is None:
            follower = Follower(Package(self.root), defaults=_defaults())
            follower.replaced |= {
                f"{_AUTO_BRIDGE}.from_hf_pretrained": _auto_bridge,
                f"{_AUTO_BRIDGE}.from_hf_config": lambda *_, **__: _auto_bridge(None, UNKNOWN),
                f"{_TRAINING}.flex_dispatcher_backend.apply_flex_dispatcher_backend": _take_dispatcher,
                "megatron.bridge.utils.cuda_graph.set_cuda_graph_modules": _take_graphs,
                "megatron.bridge.models._deprecation.warn_deprecated_model": lambda *_, **__: None,
                "typing.cast": lambda _, value: value,
                **{
                    f"AutoBridge.{name}": lambda bridge, *_, **__: _model(bridge, follower.defaults[_MODEL])
                    for name in ("get_model_config", "to_megatron_provider", "to_megatron_config")
                },
                f"{_PRECISIONS}.get_mixed_precision_config": lambda name: (
                    follower.call(follower.global_of(_PRECISIONS, name.replace("-", "_")), [], {}, Line(0, _PRECISIONS))
                    if isinstance(name, str)
                    else name
                ),
            }
            self._follower = follower
        return self._follower


def _has_recipes(module: str) -> bool:
    return module.startswith((f"{_LIBRARY}.", f"{BENCHMARKS}.")) and not module.startswith(f"{_LIBRARY}.utils.")


def package_around(path: Path) -> BridgePackage | None:
    """Returns the checkout that a file belongs to, else the package that Python would import; None without both."""
    for folder in path.resolve().parents:
        for root in (folder, folder / "src"):
            if (root / _PACKAGE / "recipes").is_dir():
                return _package(root)
    roots = (Path(entry or ".") for entry in sys.path)
    return next((_package(root) for root in roots if (root / _PACKAGE / "recipes").is_dir()), None)


@lru_cache(maxsize=4)
def _package(root: Path) -> BridgePackage:
    return BridgePackage(root)


_MODEL = "Model"
_PUBLISHED = {"OlMoEModelProvider": "allenai/OLMoE-1B-7B-0125"}
"""Classes of a single model, whose defaults are its sizes (``models/`` of main of August 2026)."""


_LAYERS_OF_CLASS: dict[str, dict[str, Any]] = {
    "GPTModelProvider": {
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation_func": "torch.nn.functional.gelu",
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": True,
    }
}
"""What layers consist of by the defaults of a class of models of any sizes (``models/gpt_provider.py``, 067f987d)."""


_HYBRIDS = ("HybridModelProvider", "MambaModelProvider")
"""Classes whose pattern of layers says what they consist of; those of other classes, such as Wan's, are unknown."""


def _auto_bridge(_cls: Any, name: Any, *_: Any, **__: Any) -> Section:
    return Section("AutoBridge", {"hf_model_id": name})


def _model(bridge: Section, defaults: dict[str, Any]) -> Section:
    """Returns the model that Megatron-Bridge makes of a ``config.json``; the sizes of a published one are known."""
    known = published_architecture(str(bridge.get("hf_model_id")))
    sizes = {} if known is None else {key.field: getattr(known, key.field) for key in ARCHITECTURE}
    return Section(_MODEL, dict(bridge.values), {}, defaults | sizes)


def _defaults() -> dict[str, dict[str, Any]]:
    """Returns what Megatron-Core's classes have where no recipe sets it, by memlab's table; the others are unknown."""
    found: dict[str, dict[str, Any]] = {}
    for section, cls in (
        ("model", "TransformerConfig"), ("ddp", "DistributedDataParallelConfig"), ("optimizer", "OptimizerConfig")
    ):  # fmt: skip
        start = f"{section}."
        found[cls] = {one.name.removeprefix(start): None for one in BRIDGE.missing if one.name.startswith(start)}
        found[cls] |= {
            key.name.removeprefix(start): key.conversion.write(key.default)
            for key in BRIDGE.keys
            if key.name.startswith(start) and key.default is not ABSENT
        }
    found["TransformerConfig"] |= {"use_te_rng_tracker": False, "cuda_graph_scope": None, "cuda_graph_impl": "none"}
    found[_MODEL] = found["TransformerConfig"]
    found["RNGConfig"] = {"te_rng_tracker": False}
    return found


def _take_dispatcher(model: Section, moe_flex_dispatcher_backend: Any = None) -> None:
    """As ``apply_flex_dispatcher_backend`` in training/flex_dispatcher_backend.py does on H100 and later."""
    if moe_flex_dispatcher_backend is not None and model.get("num_moe_experts"):
        line = Line(0, "flex_dispatcher_backend")
        model.set("moe_token_dispatcher_type", "flex", line)
        model.set("moe_flex_dispatcher_backend", moe_flex_dispatcher_backend, line)
        model.set("moe_shared_expert_overlap", value=False, line=line)


def _take_graphs(model: Section, modules: Any) -> None:
    """As src/megatron/bridge/utils/cuda_graph.py does with Megatron-Core from 0.18 on."""
    model.set("cuda_graph_modules", modules, Line(0, "cuda_graph"))


def _flat(section: Section, prefix: str, above: Line | None = None) -> Iterator[tuple[str, Any, Line | None]]:
    """Yields the keys of a configuration, each with a plain value and the line that sets it."""
    for name, value in section.all_set().items():
        yield from _entries(f"{prefix}{name}", value, section.lines.get(name, above))


def _entries(key: str, value: Any, line: Line | None) -> Iterator[tuple[str, Any, Line | None]]:
    match value:
        case Section():
            if not value.of:
                yield key, UNKNOWN_TEXT, line
            if key == "peft":
                yield "peft._target_", value.of or UNKNOWN_TEXT, line
            kind = (value.of or "").rpartition(".")[2]
            of_class = defaults_of_class(kind) | _LAYERS_OF_CLASS.get(kind, {})
            for name in of_class.keys() - value.all_set().keys():
                yield f"{key}.{name}", of_class[name], line
            yield from _flat(value, f"{key}.", line)
        case dict():
            for name, one in value.items():
                yield from _entries(f"{key}.{name}", one, line)
        case [list(), *_] if key.endswith(PIPELINE_LAYOUT):
            chunks = _plain(value)
            yield key, UNKNOWN_TEXT if any(UNKNOWN_TEXT in chunk for chunk in chunks) else text_of_layout(chunks), line
        case _:
            yield key, _plain(value), line


def _plain(value: Any) -> Any:
    match value:
        case Unknown():
            return UNKNOWN_TEXT
        case External():
            return value.name
        case Class():
            return value.node.name
        case Function(node=ast.FunctionDef(name=name)):
            return name
        case list() | tuple() | set():
            return [_plain(one) for one in value]
        case Section() | Function():
            return UNKNOWN_TEXT
    return value


def _short(line: Line | None, recipe: Recipe) -> int | None:
    """Returns a line with the name of its file, where that is not the recipe's own."""
    if line is None or line.file == recipe.module:
        return None if line is None else int(line)
    return Line(int(line), f"{line.file.rpartition('.')[2]}.py")


def recipes_in(file: Path) -> list[str]:
    """Returns the names of the recipes that a file of Megatron-Bridge defines; none of another file."""
    package = package_around(file)
    return [] if package is None else [one.name for one in package.recipes_of(file)]


def is_recipe_file(path: Path) -> bool:
    """Whether a file has recipes, or names one of them."""
    return ".py::" in path.name or (path.suffix == ".py" and bool(recipes_in(path)))


def read_recipe_file(path: Path) -> Entries:
    """Reads one recipe of a file of Megatron-Bridge, named ``FILE.py::RECIPE``.

    Raises:
        ValueError: If the file has no such recipe, or if it cannot be followed.
    """
    file, _, name = str(path).partition("::")
    package = package_around(Path(file))
    recipes = [] if package is None else package.recipes_of(Path(file))
    found = next((one for one in recipes if one.name == name), None)
    if package is None or found is None:
        raise NoJobError(
            f"{shortened(name or path)} is no recipe of {Path(file).name}: give FILE.py::RECIPE, with one of "
            f"{', '.join(one.name for one in recipes) or 'a file below megatron/bridge/recipes or perf_recipes'}"
        )
    try:
        entries = package.entries_of(found)
    except NotFollowedError as error:
        raise ValueError(
            f"{name} cannot be read without running it: {error}: give the run_config.yaml of its job"
        ) from error
    entries.recipe = str(file)
    entries.add("recipe", name, None)
    return entries
