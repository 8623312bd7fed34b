"""`memlab.watch` on small training loops: its bytes against torch's own counts, and what can happen in a block."""

from __future__ import annotations

import gc
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.record.timeline import Timeline
from memlab.vocabulary import CATEGORIES, PHASES
from memlab.watching.framework_buffers import rank_maps
from tests.unit.builders import record_of, training_step

WIDTH, NUM_BLOCKS, BATCH = 64, 4, 256
MARKS = ("forward", "backward", "optimizer", "idle")
PYTHON_NUMBER_BYTES = 8  # a Python number in an operation becomes a tensor that lives inside that one operation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A residual network whose blocks are checkpointed if asked for."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def trained(reentrant: bool | None = None) -> tuple[Model, torch.optim.Adam]:
    torch.manual_seed(0)
    model = Model(reentrant)
    return model, torch.optim.Adam(model.parameters())


def last_of(timeline: Timeline, phase: str) -> int:
    return [event for event in range(len(timeline)) if timeline.phase[event] == PHASES.index(phase)][-1]


def bytes_of(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def live_storages() -> dict[int, int]:
    gc.collect()
    # Other tests leave wrappers, such as a `DTensor`, whose storages have no memory, and ranks of a `DeviceMesh`.
    plain = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    found = (each.untyped_storage() for each in plain if each.device.type == "cpu")
    ranks = {each.untyped_storage()._cdata for each in rank_maps()}
    return {storage._cdata: storage.nbytes() for storage in found if storage._cdata not in ranks}


def bytes_by_torch(recorded: profile, name: str) -> int:
    """Returns what torch's profiler saw allocated, less what it saw freed, up to a mark."""
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    (mark,) = (event.start_ns() for event in events if event.name() == name)
    sizes = (event.nbytes() for event in events if event.name() == "[memory]" and event.start_ns() < mark)
    return sum(size for size in sizes if abs(size) > PYTHON_NUMBER_BYTES)


def test_the_bytes_after_each_phase_are_those_of_torch_and_of_all_live_tensors(x: torch.Tensor) -> None:
    model, optimizer = trained()
    held = torch.ones(1000)
    opening = live_storages()
    truth = {}
    with (
        memlab.watch(model, optimizer) as run,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded,
    ):
        loss = model(x).square().mean()
        truth["forward"] = live_storages()
        with record_function("after forward"):
            loss.backward()
        with record_function("after backward"):
            truth["backward"] = live_storages()
        optimizer.step()
        with record_function("after optimizer"):
            truth["optimizer"] = live_storages()
        optimizer.zero_grad(set_to_none=True)
        with record_function("after idle"):
            truth["idle"] = live_storages()
    timeline = run.timeline
    assert timeline is not None
    assert run.static_bytes == sum(opening.values())
    assert (
        run.peak_by_category["unlabelled"] == sum(opening.values()) - bytes_of(model.parameters()) >= bytes_of([held])
    )
    large = timeline.delta_bytes[timeline.num_opening_events :]
    large = large * (abs(large) > PYTHON_NUMBER_BYTES)
    for phase in MARKS:
        last = last_of(timeline, phase)
        seen = timeline.bytes_at(last)
        of_step = int(large[: last + 1 - timeline.num_opening_events].sum())
        assert of_step == bytes_by_torch(recorded, f"after {phase}") > 0, phase
        if phase != "forward":  # what autograd has saved, Python does not know
            assert 0 <= seen - sum(truth[phase].values()) <= PYTHON_NUMBER_BYTES, phase  # backward's own first gradient
    assert held is not None


def test_each_category_has_the_bytes_that_the_tensors_have(x: torch.Tensor) -> None:
    model, optimizer = trained()
    saved: dict[int, int] = {}
    known = {each.untyped_storage()._cdata for each in (*model.parameters(), x)}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with memlab.watch(model, optimizer) as run:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(x).square().mean()
        loss.backward()
        gradient_bytes = bytes_of(parameter.grad for parameter in model.parameters())
        optimizer.step()
        state_bytes = bytes_of(each for state in optimizer.state.values() for each in state.values())
        optimizer.zero_grad()
    timeline = run.timeline
    assert timeline is not None
    after = {phase: timeline.breakdown(last_of(timeline, phase)) for phase in MARKS}
    parameter_bytes = bytes_of(model.parameters())
    assert {parts["parameters"] for parts in after.values()} == {parameter_bytes}
    assert after["forward"]["activations"] == sum(saved.values()) + loss.nbytes + 4, "and backward's own first gradient"
    assert after["backward"]["gradients"] == after["optimizer"]["gradients"] == gradient_bytes == parameter_bytes
    assert "gradients" not in after["idle"], "zero_grad has freed them"
    assert after["optimizer"]["optimizer state"] == state_bytes == 2 * parameter_bytes + 4 * 4 * NUM_BLOCKS
    assert "optimizer state" not in after["backward"], "Adam allocates it in the first step"
    assert after["idle"]["activations"] == loss.nbytes == run.residual_bytes
    assert set(run.peak_by_module) >= {f"layers.{number}" for number in range(NUM_BLOCKS)}
    with memlab.watch(model) as again:  # an optimizer that was not passed is seen when it steps
        model(x).sum().backward()
        optimizer.step()
    assert again.timeline is not None
    assert again.timeline.breakdown(again.timeline.first_step_event)["optimizer state"] == state_bytes


class Basis:
    """What an optimizer such as GaLore's keeps for a parameter: an object that has tensors."""

    def __init__(self, model: nn.Module, parameter: nn.Parameter) -> None:
        self.model, self.parameter, self.itself = model, parameter, self
        self.values, self.gradient = parameter.data, parameter.grad
        self.vectors = {"left": [torch.ones(WIDTH, 4)]}
        self.trainer = SimpleNamespace(batch=torch.ones(7, WIDTH))


class WithObjects(torch.optim.SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        for parameter in model.parameters():
            self.state[parameter]["basis"] = Basis(model, parameter)


def test_tensors_of_objects_in_the_state_are_optimizer_state(x: torch.Tensor) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.table = torch.ones(3, WIDTH)
    model(x).sum().backward()
    optimizer = WithObjects(model)
    with memlab.watch(model, optimizer) as run:
        optimizer.step()
    assert run.timeline is not None
    for event in (run.timeline.first_step_event, len(run.timeline) - 1):
        parts = run.timeline.breakdown(event)
        assert parts["parameters"] == parts["gradients"] == bytes_of(model.parameters())
        assert parts["optimizer state"] == 2 * 4 * WIDTH * 4, "no other tensor that an object refers to is state"


def test_gradients_that_no_optimizer_sees_are_gradients(x: torch.Tensor) -> None:
    model, _ = trained()
    with memlab.watch(model) as run:
        model(x).sum().backward()
        model.zero_grad()
    assert run.timeline is not None
    parts = run.timeline.breakdown(last_of(run.timeline, "backward"))
    assert parts["gradients"] == bytes_of(model.parameters())
    assert run.residual_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_lowers_the_activation_peak_and_recomputes(reentrant: bool, x: torch.Tensor) -> None:
    def step(model: Model, optimizer: torch.optim.Optimizer) -> Any:
        inputs = x.clone().requires_grad_()
        with memlab.watch(model, optimizer) as run:
            model(inputs).square().mean().backward()
        return run

    plain, checkpointed = step(*trained()), step(*trained(reentrant))
    activation_bytes = 4 * WIDTH * BATCH * 4  # tanh's output, the one tensor that a block saves beside its input
    assert plain.recomputed_bytes == 0
    assert checkpointed.recomputed_bytes >= NUM_BLOCKS * activation_bytes
    assert plain.activation_peak_bytes - checkpointed.activation_peak_bytes >= (NUM_BLOCKS - 1) * activation_bytes // 2
    assert plain.peak_phase == checkpointed.peak_phase == "backward"


def test_micro_batches_autocast_and_a_closure_have_their_phases(x: torch.Tensor) -> None:
    model, _ = trained()
    optimizer = torch.optim.SGD(model.parameters())

    def closure() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    with memlab.watch(model, optimizer) as run:
        closure()
        closure()
        optimizer.step(closure)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert run.timeline is not None
    phases = [PHASES[code] for code in run.timeline.phase[run.timeline.num_opening_events :]]
    changes = [phase for before, phase in zip(["", *phases], phases, strict=False) if phase != before]
    assert [phase for phase in changes if phase != "idle"] == [
        *["forward", "backward"] * 3,
        "optimizer",
        "forward",
        "backward",
    ]
    assert run.peak_by_category["gradients"] == bytes_of(model.parameters())


def test_an_optimizer_step_that_raises_ends_its_phase(x: torch.Tensor) -> None:
    model, _ = trained()
    rounds = iter(range(10))

    class Diverging(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if next(rounds) in (0, 1):
                raise FloatingPointError("the gradients are not finite")

    optimizer = Diverging(model.parameters())
    blocks = []
    with memlab.watch(model, optimizer) as run:
        for number in range(3):
            loss = model(x).sum()
            with suppress(FloatingPointError):
                optimizer.step()
            if number == 1:
                with suppress(FloatingPointError):  # a second step without a forward before it
                    optimizer.step()
            loss.backward()
            blocks.append(torch.empty(123, 1024 + number))
    assert run.timeline is not None
    for block in blocks:
        [phase] = run.timeline.phase[run.timeline.delta_bytes == bytes_of([block])]
        assert PHASES[phase] == "idle"


def test_an_optimizer_step_that_raises_inside_another_one_ends_its_own_phase_only(x: torch.Tensor) -> None:
    class Diverging(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise FloatingPointError("the gradients are not finite")

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            with suppress(FloatingPointError):
                inner.step()
            blocks.append(torch.empty(123, 1024))

    model, _ = trained()
    inner, outer = Diverging(model.parameters()), Outer(model.parameters())
    blocks: list[torch.Tensor] = []
    with memlab.watch(model, outer) as run:
        outer.step()
        blocks.append(torch.empty(123, 1025))
    assert run.timeline is not None
    phases = [run.timeline.phase[run.timeline.delta_bytes == bytes_of([block])].item() for block in blocks]
    assert [PHASES[phase] for phase in phases] == ["optimizer", "idle"]


def test_an_error_is_raised_and_leaves_a_record_and_no_hook(x: torch.Tensor) -> None:
    model, optimizer = trained()
    stops: list[Callable[[], None]] = [lambda: 1 / 0, lambda: (_ for _ in ()).throw(KeyboardInterrupt("stop"))]
    for stop in stops:
        handle = model.layers[2].register_forward_hook(lambda *_: stop())  # noqa: B023  # removed in this round
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)), memlab.watch(model, optimizer) as run:
            model(x)
        handle.remove()
        assert run.status == "interrupted"
        assert run.message.startswith(("ZeroDivisionError", "KeyboardInterrupt"))
        assert run.peak_by_module["layers.1"] > 0, "what was seen until the error"
        assert run.message in repr(run)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"  # type: ignore[attr-defined]
    with memlab.watch(model, optimizer) as run:
        model(x).sum().backward()
    assert run.status == "ok"


def test_refusals_are_one_line() -> None:
    model, optimizer = trained()
    split = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((split,), r"the model is on cpu, meta, must be on one device: move it"),
        ((nn.Linear(1, 1, device="meta"),), r"the model is on meta, must be on cpu or cuda: move it"),
        ((optimizer, model), r"watch got a Adam, must be a torch.nn.Module: pass the model first"),
        ((model, model), r"watch got a Model, must be a torch.optim.Optimizer: pass the model, then its"),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words), memlab.watch(*arguments):
            pass
    with memlab.watch(model) as run:
        with (
            pytest.raises(ValueError, match=r"^watch meters one block at a time, and another block.*first$"),
            memlab.watch(model),
        ):
            pass
        with pytest.raises(ValueError, match=r"^the watched block 'Model' has not ended"):
            memlab.show(run)
    with memlab.watch(nn.ReLU()) as run, torch.no_grad():
        assert torch.ones(256, 1024).relu().sum() > 0
    assert run.peak_allocated_bytes - run.static_bytes > 2**20, "a model without parameters"


def test_sparse_gradients_and_lazy_modules_are_counted() -> None:
    model = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.LazyLinear(4))
    tokens = torch.tensor([[1, 2, 3]])
    with memlab.watch(model) as run:
        model(tokens).sum().backward()
        gradient = model[0].weight.grad
    assert run.timeline is not None
    sizes = run.timeline.breakdown(len(run.timeline) - 1)
    assert gradient is not None
    assert gradient.is_sparse
    parts = bytes_of([gradient._indices(), gradient._values()])
    assert sizes["gradients"] == parts + bytes_of([model[1].weight.grad, model[1].bias.grad])
    assert sizes["parameters"] == bytes_of(model.parameters())


def test_runs_are_shown_compared_and_saved(x: torch.Tensor, tmp_path: Path) -> None:
    model, optimizer = trained()
    runs = []
    for name in ("first", "second"):
        with memlab.watch(model, optimizer, name=name) as run:
            model(x).sum().backward()
            optimizer.step()
        runs.append(run)
    first, second = runs
    assert f"{first.peak_allocated_bytes:,}" in repr(first)
    view = memlab.show(first)
    assert view.figure is not None
    assert view.figure.layout.title.text.startswith("<b>first: memory allocated on the device</b>")
    assert str(view) == repr(first)
    table = str(memlab.compare(first, second))
    assert "second" in table
    assert f"second peaks in {second.peak_phase}" in table
    with memlab.watch(model) as empty:
        pass
    assert empty.peak_allocated_bytes == empty.static_bytes
    assert "Model peaks in no phase" in str(memlab.compare(first, empty))
    with pytest.raises(ValueError, match=r"^compare got 1 watched blocks and 1 steps of labs"):
        memlab.compare(first, record_of(training_step()))
    saved = Timeline.from_snapshot(first.save_snapshot(tmp_path / "step.pickle"))
    assert saved.breakdown(saved.peak_index()) == first.peak_by_category


def test_the_cell_magic_keeps_the_run_also_if_the_cell_raises(x: torch.Tensor, capsys: Any) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "memlab")
    model, optimizer = trained()
    shell.user_ns |= {"model": model, "optimizer": optimizer, "x": x}
    shell.run_cell_magic("memlab", "model optimizer as run", "loss = model(x).sum()\nloss.backward()\noptimizer.step()")
    kept = shell.user_ns["run"].timeline
    assert kept.breakdown(len(kept) - 1)["gradients"] == bytes_of(model.parameters())
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("memlab", "model as second", "def scaled(by: int): ...\ny = model(x)\n1 / 0")
    assert shell.user_ns["scaled"].__annotations__ == {"by": int}, "the cell has no __future__ import"
    assert shell.user_ns["second"].status == "interrupted"
    for line, rule in (
        ("", "a model"),
        ("as run", "a model"),
        ("model as", "the run in one word after 'as'"),
        ("model as 1st", "the run in one word after 'as'"),
        ("model as a b", "the run in one word after 'as'"),
        ("model(", "a model and its optimizers, and model( is not an expression"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"%%memlab got '{line}', must name {rule}: write %%memlab")):
            shell.run_cell_magic("memlab", line, "pass")
    assert "device, the step's peak" in capsys.readouterr().out
    for cell, line, words in (
        ("y = (1 +\n", "y = (1 +", "SyntaxError"),
        ("\nif x:\npass\n", "pass", "IndentationError"),
        ("\n \nx\n1 / 0\n", "1 / 0", "ZeroDivisionError"),
    ):
        done = shell.run_cell(f"%%memlab model\n{cell}")
        shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert isinstance(done.error_in_exec, (ValueError, ZeroDivisionError)) and words in shown
        number = 2 + cell.splitlines().index(line)
        assert re.search(rf"(, line |>:|\]:){number}\b", shown) and line in shown, shown
        assert ("magic.py" in shown) == (words == "ZeroDivisionError"), (
            "a cell that is no Python is shown without frames"
        )


def test_a_program_without_megatron_can_be_watched() -> None:
    code = """
import sys
sys.modules["megatron"] = sys.modules["transformer_engine"] = None  # an import of either raises ImportError
import torch, memlab
model = torch.nn.Linear(8, 8)
with memlab.watch(model) as run:
    model(torch.ones(2, 8)).sum().backward()
print(run.timeline.breakdown(len(run.timeline) - 1)["gradients"], "megatron.core" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{4 * (64 + 8)} False\n", done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: it and what it needs take 160 MB, too much for every run of CI",
)
def test_a_model_of_transformers_adds_up() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=32))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 100, (2, 32))
    opening = sum(live_storages().values())
    runs = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        with memlab.watch(model, optimizer) as run:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        runs.append(run)
        assert run.timeline is not None
        assert run.timeline.bytes_at(len(run.timeline) - 1) == sum(live_storages().values())
    plain, checkpointed = runs
    assert plain.static_bytes == opening
    weights = {each.untyped_storage()._cdata: each.nbytes for each in (*model.parameters(), *model.buffers())}
    assert plain.peak_by_category["parameters"] == sum(weights.values()), "lm_head shares the embedding's"
    assert 0 == plain.recomputed_bytes < checkpointed.recomputed_bytes
    assert checkpointed.activation_peak_bytes < plain.activation_peak_bytes
    assert any(name.startswith("transformer.h.1.mlp") for name in plain.peak_by_module)
    assert set(plain.peak_by_category) <= set(CATEGORIES)
