"""Every name of upstream's internals that memlab relies on exists, and no other is touched."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.package_info import MINOR

import memlab
from memlab.backends import cpu, cuda
from memlab.backends.fake_collectives import collectives_on_fake_tensors
from memlab.engines.megatron.layers import mamba_of_megatron  # noqa: F401 - modules that import Triton, also where it is not
from memlab.upstream import patching
from memlab.upstream.patching import in_this_version, patched
from memlab.upstream.private_names import INTERNALS, Internal, replaceable

pytestmark = pytest.mark.versions

ROOT = Path(memlab.__file__).parent
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
EACH_NAME = [
    pytest.param(row, name, id=f"{row.owner.rpartition('.')[2]}.{name}") for row in INTERNALS for name in row.names
]


def has(row: Internal, name: str) -> bool:
    try:
        owner = pkgutil.resolve_name(row.owner)
    except AttributeError:
        return False
    if row.is_builtin:
        return re.search(rf"\b{name}\(", inspect.getsource(owner)) is not None
    if row.on_instances and not hasattr(owner, name):
        classes = [each for each in getattr(owner, "__mro__", ()) if each.__module__.startswith(row.package)]
        if classes:
            return any(re.search(rf"self\.{name}\b", inspect.getsource(each)) for each in classes)
        return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    if isinstance(owner, dict):
        return name in owner
    if isinstance(owner, ModuleType) and getattr(owner, name, owner) is None and "extensions" not in row.owner:
        return reads(owner, name)  # what is in megatron.core.extensions is there for others
    submodules = {module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", ()))}
    return hasattr(owner, name) or name in submodules


def reads(module: ModuleType, name: str) -> bool:
    """Whether a module's code uses a name: one that it only sets to None has been left behind, its code is elsewhere."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    return any(isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in nodes)


@pytest.mark.parametrize(("row", "name"), EACH_NAME)
def test_every_name_exists_in_the_installed_versions(row: Internal, name: str) -> None:
    if row.package == "transformer_engine" and not HAS_TE:
        pytest.skip("needs Transformer Engine")
    if row.needs_cuda and torch.version.cuda is None:
        pytest.skip("needs a torch with CUDA")
    if not in_this_version(row):
        assert not has(row, name), f"since {row.since}, until {row.until}"
    elif row.absent_without_te and not HAS_TE:
        assert not has(row, name) or MINOR > 16, "the name exists without Transformer Engine too: a rename must fail"
    else:
        assert has(row, name), f"{row.where} relies on it: {row.why}"


def test_every_row_names_the_file_that_needs_it() -> None:
    rows = [row for row in INTERNALS if not row.owner.endswith("fused_bias_swiglu")]  # examples of what is searched for
    unused = [(row.where, name) for row in rows for name in row.names if not names_it(row, name)]
    assert not unused


def names_it(row: Internal, name: str) -> bool:
    return re.search(rf"\b{name}\b", (ROOT / row.where).read_text()) is not None


def private_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("memlab"):
            names |= {alias.name for alias in node.names} | set((node.module or "").split("."))
    return {name for name in names if re.fullmatch(r"_[a-zA-Z]\w*", name)}


def own_names(path: Path) -> set[str]:
    own: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            own.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return own


def test_no_private_name_of_upstream_is_touched_without_a_row() -> None:
    files = [path for path in ROOT.rglob("*.py") if "upstream" not in path.parts]
    own = set().union(*(own_names(path) for path in files)) | {"_getframe", "_exit", "_version", "_ArgumentGroup"}
    listed = {part for row in INTERNALS for name in (row.owner, *row.names) for part in re.split(r"[.:]", name)}
    touched = {name: path.name for path in files for name in private_names(path) - own - listed}
    assert touched == {}


def test_only_names_with_a_row_are_replaced() -> None:
    with pytest.raises(KeyError), patched({"torch.nn.Linear": None}):
        pass


def test_a_renamed_target_is_an_error_that_says_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("megatron.core.tensor_parallel.random._fork_rng")
    patching._place.cache_clear()
    try:
        with (
            pytest.raises(AttributeError, match=r"_fork_rng does not exist .*training_step.*checkpoints recompute"),
            patched({"megatron.core.tensor_parallel.random._fork_rng": None}),
        ):
            pass
    finally:
        patching._place.cache_clear()


def test_originals_are_back_after_an_error_and_inherited_ones_are_not_copied() -> None:
    def replaced() -> dict[str, bool]:
        return {name: name in vars(torch.UntypedStorage) for name in ("resize_", "_cdata")}

    before = replaced()
    config: Any = SimpleNamespace(timers=1)
    timers = "megatron.core.transformer.transformer_config.TransformerConfig.timers"
    resize = {"torch.UntypedStorage.resize_": None}
    with contextlib.suppress(ZeroDivisionError), patched(resize), patched({timers: 2}, on=config):
        assert (torch.UntypedStorage.resize_, config.timers) == (None, 2)
        assert 1 / 0
    assert config.timers == 1
    assert replaced() == before


def test_every_replaced_name_has_one_row() -> None:
    assert len(replaceable()) == sum(len(row.names) for row in INTERNALS if row.use == "replaced")


def test_functions_that_megatron_compiles_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with cpu.cuda_replaced():
        pass
    found = {f"{getattr(owner, '__name__', '')}.{name}" for owner, name, _ in cpu._compiled_functions(-1)}
    (swiglu,) = [row for row in INTERNALS if row.owner.endswith("fused_bias_swiglu")]
    assert {f"{swiglu.owner}.{name}" for name in swiglu.names} <= found
    # A rename of the attribute in torch would leave none.
    monkeypatch.setattr(cpu, "hasattr", lambda *_: False, raising=False)
    with pytest.raises(RuntimeError, match=r"0 functions compiled by torch .* must have at least"):
        cpu._compiled_functions(-2)


def test_a_module_that_megatron_loads_later_is_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with cpu.cuda_replaced():
        pass

    def function() -> str:
        return "eager"

    def compiled() -> str:
        return "compiled"

    compiled._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    later: Any = ModuleType("megatron.core.loaded_later")
    later.function = compiled
    monkeypatch.setitem(sys.modules, later.__name__, later)
    with cpu.cuda_replaced():
        assert later.function() == "eager"
    assert later.function() == "compiled"


def test_recompile_limits_hold_on_every_thread_of_a_job_and_not_after_it() -> None:
    from torch._dynamo import config

    def limits() -> tuple[int, int]:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: (config.recompile_limit, config.accumulated_recompile_limit)).result()

    before = limits()
    with cuda._many_recompiles():
        assert limits() == (512, 64 * 512)
    assert limits() == before


def test_collectives_on_fake_tensors_are_registered_only_for_a_job() -> None:
    def registered() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")

    before = registered()
    with collectives_on_fake_tensors():
        assert registered()
    assert registered() is before
