"""Errors, stops and out-of-memories inside a step: nothing of them is left in the next step's memory."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from memlab.config.settings import MemorySettings
from memlab.engines.step_errors import release_tensors
from memlab.lab.lab import Lab
from memlab.lab.one_process import OneProcess
from tests.unit.inside import inside
from tests.unit.live import FULL, offload, recompute

PLAIN = MemorySettings()
SETTINGS = {
    "plain": PLAIN,
    "full recompute": FULL,
    "selective recompute": recompute("layernorm", "core_attn", "moe_act"),
    "activation offload": offload("core_attn", "attn_proj", "expert_fc1"),
    "groups on the host": MemorySettings(offload_parameters=True, offload_optimizer=True),
}
RARELY = ("plain", "full recompute", "groups on the host")
PLACES = ("forward", "last layer", "backward", "optimizer")


class ErrorInModelError(Exception):
    """Holds what exceptions of other people hold."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        super().__init__("of the model", tensor)
        self.tensor = tensor


@contextmanager
def broken(lab: Lab, place: str) -> Iterator[None]:
    """Within the block a step raises at a place, from within a call of a layer or of autograd."""
    live = inside(lab).model.engine.live

    def fail(*arguments: Any) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        raise RuntimeError("raised on purpose") from ErrorInModelError(*tensors[:1])

    def fail_in_backward(module: Any, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(fail)

    layers = live.chunk.module.decoder.layers
    take_step = live.optimizer.step
    if place == "optimizer":
        live.optimizer.step = fail
        undo = lambda: setattr(live.optimizer, "step", take_step)  # noqa: E731
    else:
        hooks: dict[str, tuple[int, Any]] = {
            "forward": (1, fail),
            "last layer": (-1, fail),
            "backward": (1, fail_in_backward),
        }
        number, hook = hooks[place]
        undo = layers[number].self_attention.register_forward_hook(hook).remove
    try:
        yield
    finally:
        undo()


def memory_of(record: Any) -> list[Any]:
    names = ("static_bytes", "peak_allocated_bytes", "residual_bytes", "host_bytes", "peak_by_category", "loss")
    return [(name, getattr(record, name)) for name in names]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] if each in RARELY else []) for each in SETTINGS]
)
def test_a_kept_exception_changes_no_byte_of_the_next_step(name: str, open_lab: Callable[..., Any]) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=3, seq_length=64)
    fresh = memory_of(lab.step(SETTINGS[name]))
    kept = []
    for place in PLACES:
        with broken(lab, place), pytest.raises(RuntimeError, match="raised on purpose") as caught:
            lab.step()
        kept.append(caught.value)
        assert memory_of(lab.step()) == fresh, place
    assert len(kept) == len(PLACES)


@pytest.mark.parametrize("place", ["last layer", "backward", "out of memory"])
def test_a_failed_step_keeps_nothing_if_the_next_one_discards_no_outputs(
    place: str, open_lab: Callable[..., Any]
) -> None:
    lab = open_lab("qwen3-moe-tiny", num_layers=3, seq_length=64)
    fresh = memory_of(lab.step(PLAIN))
    discarding = recompute("layernorm", "moe_act")
    if place == "out of memory":
        lab.device_memory_bytes = lab.step(discarding).peak_allocated_bytes - 1
        assert lab.step(discarding).status == "out_of_memory"
        lab.device_memory_bytes = None
    else:
        with broken(lab, place), pytest.raises(RuntimeError, match="raised on purpose"):
            lab.step(discarding)
    assert memory_of(lab.step(PLAIN)) == fresh


@pytest.mark.parametrize("place", [*PLACES, "stop", "out of memory"])
def test_a_step_without_a_warm_up_starts_with_no_byte_of_the_step_that_failed(
    place: str, open_lab: Callable[..., Any]
) -> None:
    lab = open_lab("phi-4-tiny", seq_length=64)
    fresh = lab.step()
    if place == "stop":
        lab.step(on_progress=lambda progress: progress.phase == "backward" and lab.stop())
    elif place == "out of memory":
        lab.device_memory_bytes = fresh.peak_allocated_bytes - 1
        assert lab.step(warm_up=False).status == "out_of_memory"
        lab.device_memory_bytes = None
    else:
        with broken(lab, place), pytest.raises(RuntimeError) as caught:
            lab.step()
        assert "raised on purpose" in str(caught.value)
    assert memory_of(lab.step(warm_up=False)) == memory_of(fresh)


def test_an_exception_of_a_step_holds_no_tensor_and_says_where_it_was_raised(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", seq_length=64)
    with broken(lab, "forward"), pytest.raises(RuntimeError) as caught:
        lab.step()
    error = caught.value
    reached: list[Any] = [error]
    for thing in reached:
        assert not isinstance(thing, (torch.Tensor, torch.nn.Module)), type(thing)
        reached += (
            [*vars(thing).values(), *thing.args, thing.__cause__, thing.__context__]
            if isinstance(thing, BaseException)
            else []
        )
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "_call_impl" not in frames and "forward" not in frames
    (note,) = error.__notes__
    assert "ErrorInModelError" in note and "in fail" in note and "_call_impl" in note
    assert str(error) == "raised on purpose"


def test_exceptions_that_others_refer_to_are_released_too() -> None:
    tensor = torch.ones(3)
    try:
        try:
            tensor.absent  # type: ignore[attr-defined]  # noqa: B018
        except AttributeError as error:
            raise ExceptionGroup("two", [error, ErrorInModelError(tensor)]) from KeyError(tensor)
    except ExceptionGroup as group:
        caught = group
    release_tensors(caught)
    del tensor
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.shape == (3,)]
    assert caught.exceptions[1].args == ("of the model", "<Tensor>")


@pytest.mark.parametrize("place", ["memlab.engines.megatron.build._fuse_adam", "memlab.lab.lab_model.Transfers"])
def test_a_failed_build_keeps_nothing_in_its_exception(
    place: str, open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(place, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            open_lab("phi-4-tiny")
    assert any("Stepper" in note or "build" in note for note in caught.value.__notes__)
    assert_no_model_is_left()


def test_a_build_that_ctrl_c_interrupts_leaves_no_model(
    open_lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_and_interrupt(session: OneProcess) -> None:
        session.worker.submit(session.model.build)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(OneProcess, "build", build_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_lab("phi-4-tiny")
    assert_no_model_is_left()


def assert_no_model_is_left() -> None:
    gc.collect()
    assert Lab._open is None
    assert not [thing for thing in gc.get_objects() if type(thing).__name__ == "GPTModel"]


def test_what_a_cell_sets_while_a_step_runs_is_kept(open_lab: Callable[..., Any]) -> None:
    lab = open_lab("phi-4-tiny", seq_length=32)
    logger = logging.getLogger("megatron.core")
    reached, go_on = threading.Event(), threading.Event()

    def wait(progress: Any) -> None:
        reached.set()
        assert go_on.wait(20)

    with warnings.catch_warnings():
        running = lab.submit(on_progress=wait)
        assert reached.wait(20)
        level = logger.level
        warnings.filterwarnings("error", message="of a cell")
        logger.setLevel(logging.DEBUG)
        go_on.set()
        assert running.result().status == "ok"
        try:
            assert logger.level == logging.DEBUG
            with pytest.raises(UserWarning, match="of a cell"):
                warnings.warn("of a cell", stacklevel=1)
        finally:
            logger.setLevel(level)


def test_megatron_s_advice_is_silent_in_a_step_and_a_user_s_own_filter_comes_first(
    open_lab: Callable[..., Any],
) -> None:
    lab = open_lab("phi-4-tiny", seq_length=32)

    def advise() -> None:
        warnings.warn_explicit(
            "use another optimizer", UserWarning, "optimizer.py", 1, module="megatron.core.optimizer"
        )

    def heard() -> int:
        with warnings.catch_warnings(record=True) as caught:
            inside(lab).worker.submit(advise).result()
            return len(caught)

    with warnings.catch_warnings():
        warnings.resetwarnings()  # as outside pytest
        assert heard() == 0
        warnings.simplefilter("always")
        assert heard() == 1
