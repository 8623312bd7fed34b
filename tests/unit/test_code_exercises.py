"""Code that a reader writes: every wrong answer gets a sentence that helps, and every right one in any style passes."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from textwrap import indent
from typing import Any

import numpy as np
import pytest
import torch

from memlab import Lab
from memlab.analysis.diagnosis import diagnose
from memlab.config.settings import MemorySettings
from memlab.exercises.checks import CHECKED, check
from memlab.exercises.curves import unseen_curves
from memlab.record.transfer import GROUPS
from tests.unit.builders import record_of, training_step

ALL = "model.buffers + model.expert_parallel_buffers"
RELEASE = f"""
for buffer in {ALL}:
    storage = buffer.grad_data.storage()
    if storage.size() > 0:
        buffer.grad_data_size = storage.size()
        storage.resize_(0)
"""
LOAD = f"""
for buffer in {ALL}:
    storage = buffer.grad_data.storage()
    if storage.size() == 0:
        storage.resize_(buffer.grad_data_size)
        buffer.grad_data.zero_()
"""
OTHER_MOVES = {
    "bytes, and the size of the tensor in place of a stored one": (
        f"for b in [*{ALL}]: b.grad_data.untyped_storage().resize_(0)",
        (
            f"for b in [*{ALL}]:\n"
            "    if not b.grad_data.untyped_storage().nbytes():\n"
            "        b.grad_data.untyped_storage().resize_(b.grad_data.numel() * b.grad_data.element_size())\n"
            "        b.grad_data.zero_()"
        ),
    ),
    "the reviewer's condition": (
        RELEASE.replace("grad_data_size", "size_of_mine"),
        (
            f"for b in {ALL}:\n"
            "    if hasattr(b, 'size_of_mine') and b.grad_data.storage().size() == 0:\n"
            "        b.grad_data.storage().resize_(b.size_of_mine)\n"
            "        b.grad_data.fill_(0)"
        ),
    ),
    "sizes in a dictionary, and data": (
        (
            f"for b in {ALL}:\n"
            "    s = b.grad_data.data.untyped_storage()\n"
            "    if s.size(): sizes[id(b)] = s.size()\n"
            "    s.resize_(0)"
        ),
        (
            f"for b in {ALL}:\n"
            "    s = b.grad_data.data.untyped_storage()\n"
            "    if s.size() != sizes.get(id(b), s.size()):\n"
            "        s.resize_(sizes[id(b)]); b.grad_data.data.zero_()"
        ),
    ),
    "sizes on the model": (
        (
            f"if not hasattr(model, 'sizes'): model.sizes = [b.grad_data.storage().size() for b in {ALL}]\n"
            f"for b in {ALL}: b.grad_data.storage().resize_(0)"
        ),
        (
            "if hasattr(model, 'sizes'):\n"
            f"    for b, size in zip({ALL}, model.sizes):\n"
            "        b.grad_data.storage().resize_(size); b.grad_data.zero_()"
        ),
    ),
    "a load that zeroes what is on the device, as the merged one does": (
        RELEASE,
        f"for b in {ALL}:\n    b.grad_data.storage().resize_(b.grad_data.numel()); b.grad_data.zero_()",
    ),
    "two loops": (
        RELEASE.replace(ALL, "model.buffers") + RELEASE.replace(ALL, "model.expert_parallel_buffers"),
        LOAD.replace(ALL, "model.expert_parallel_buffers") + LOAD.replace(ALL, "model.buffers"),
    ),
    "the length of the tensor": (RELEASE, LOAD.replace("buffer.grad_data_size", "len(buffer.grad_data)")),
    "the first size of the tensor": (RELEASE, LOAD.replace("buffer.grad_data_size", "buffer.grad_data.size(0)")),
    "the bytes of its numbers": (
        RELEASE,
        LOAD.replace("storage()", "untyped_storage()").replace(
            "buffer.grad_data_size", "buffer.grad_data.numel() * buffer.grad_data.itemsize"
        ),
    ),
    "the elements of the tensor": (RELEASE, LOAD.replace("buffer.grad_data_size", "buffer.grad_data.nelement()")),
    "the numbers of the buffer": (
        f"for b in {ALL}:\n    b.grad_data.storage().resize_(0)",
        (
            f"for b in {ALL}:\n"
            "    if len(b.grad_data.storage()) < b.numel:\n"
            "        b.grad_data.storage().resize_(b.numel)\n"
            "        b.grad_data.zero_()"
        ),
    ),
}
ZEROED = (
    "torch.zero_(buffer.grad_data)",
    "torch.Tensor.zero_(buffer.grad_data)",
    "buffer.grad_data.copy_(torch.zeros_like(buffer.grad_data))",
    "torch.Tensor.copy_(buffer.grad_data, torch.zeros_like(buffer.grad_data))",
    "buffer.grad_data[:] = 0",
    "buffer.grad_data[...] = 0.0",
    "buffer.grad_data.detach().zero_()",
    "buffer.grad_data.view(-1)[:] = 0",
    "buffer.grad_data.storage().fill_(0)",
    "buffer.grad_data.untyped_storage().fill_(0)",
)
OTHER_MOVES |= {
    f"zeroed by {how}": (RELEASE, "import torch" + LOAD.replace("buffer.grad_data.zero_()", how)) for how in ZEROED
}
WRONG_MOVES = {
    "nothing": ("pass", "pass", "Hint: your release frees no byte: empty the storage of each grad_data with resize_(0)."),
    "half of each storage": (
        RELEASE.replace("resize_(0)", "resize_(storage.size() // 2)"), LOAD, "leaves bytes in every storage: resize_(0) empties",
    ),
    "the experts forgotten in the load": (RELEASE, LOAD.replace(ALL, "model.buffers"), "Megatron keeps buffers in two lists"),
    "all but the experts forgotten in the load": (
        RELEASE, LOAD.replace(ALL, "model.expert_parallel_buffers"), "Megatron keeps buffers in two lists",
    ),
    "as many buffers in each list": (
        *(
            move.replace(ALL, "sum(zip(model.buffers, model.expert_parallel_buffers), ())") for move in (RELEASE, LOAD)
        ),
        "leaves out the last buffer of",
    ),
    "arithmetic": (
        RELEASE, LOAD.replace(".zero_()", " *= 0"), "mul_, which needs a real tensor: grad_data.zero_() fills it with zeros",
    ),
    "copied ones": (
        RELEASE, "import torch" + LOAD.replace(".zero_()", ".copy_(torch.ones(1))"), "that are not 0, must be 0",
    ),
    "zeros of the host": (
        RELEASE, "import torch" + LOAD.replace(".zero_()", ".copy_(torch.zeros(buffer.numel))"), "or make the zeros on the device",
    ),
    "copied zeros before there is memory": (
        RELEASE,
        "import torch" + LOAD.replace("storage.resize_(", "buffer.grad_data.copy_(torch.zeros(1)); storage.resize_("),
        "call resize_ with the stored size first, and zero_() after it",
    ),
    "the experts forgotten": (RELEASE.replace(ALL, "model.buffers"), LOAD, "held by expert_parallel_buffers.grad_data"),
    "only the first buffer of each list": (
        RELEASE.replace(ALL, "[model.buffers[0], model.expert_parallel_buffers[0]]"), LOAD, "a list can have several buffers",
    ),
    "only the first buffer of each list loaded": (
        RELEASE,
        LOAD.replace(ALL, "[model.buffers[0], model.expert_parallel_buffers[0]]"),
        "a list can have several buffers",
    ),
    "only the experts": (RELEASE.replace(ALL, "model.expert_parallel_buffers"), LOAD, "held by buffers.grad_data"),
    "the experts not loaded": (RELEASE, LOAD.replace(ALL, "model.buffers"), "after load, the audit finds: gradients"),
    "the inverted condition, the size taken from the tensor": (
        RELEASE,
        LOAD.replace("== 0", "> 0").replace("buffer.grad_data_size", "buffer.grad_data.numel()"),
        "where a storage is empty, its size() is 0, and a load calls resize_",
    ),
    "a size that a second release overwrites with 0": (
        f"for b in {ALL}:\n    b.mine = b.grad_data.storage().size()\n    b.grad_data.storage().resize_(0)",
        f"for b in {ALL}:\n    if getattr(b, 'mine', 0): b.grad_data.storage().resize_(b.mine); b.grad_data.zero_()",
        "a second release must not store 0",
    ),
    "the inverted condition": (RELEASE, LOAD.replace("== 0", "> 0"), "load, before anything was released: your"),
    "the same with a guard": (RELEASE, LOAD.replace("== 0", "> 0 and buffer.grad_data_size"), "was not brought back"),
    "the size not stored": (RELEASE.replace("buffer.grad_data_size = storage.size()", "pass"), LOAD, "has 0 bytes"),
    "the size stored too late": (
        RELEASE.replace("        buffer.grad_data_size = storage.size()\n        storage.resize_(0)",
                        "        storage.resize_(0)\n        buffer.grad_data_size = storage.size()"),
        LOAD,
        "whose storage has 0 bytes",
    ),
    "a second release stores 0": (
        f"for b in {ALL}:\n    b.grad_data_size = b.grad_data.storage().size(); b.grad_data.storage().resize_(0)",
        LOAD,
        "load: your code zeroes",
    ),
    "bytes taken for elements": (RELEASE, LOAD.replace(".storage()", ".untyped_storage()"), "takes bytes"),
    "numbers in place of bytes, without a condition": (
        RELEASE,
        f"for b in {ALL}:\n    b.grad_data.untyped_storage().resize_(b.grad_data.numel())\n    b.grad_data.zero_()",
        "resize_ of untyped_storage() takes bytes, which are numel() * element_size()",
    ),
    "bytes in place of numbers, without a condition": (
        RELEASE,
        f"for b in {ALL}:\n    b.grad_data.storage().resize_(b.grad_data.numel() * 4)\n    b.grad_data.zero_()",
        "resize_ of storage() takes numbers, which are numel()",
    ),
    "elements taken for bytes": (RELEASE.replace(".storage()", ".untyped_storage()"), LOAD, "of storage() takes numbers"),
    "not zeroed": (RELEASE, LOAD.replace("        buffer.grad_data.zero_()\n", ""), "gives the gradients memory and does not zero it"),
    "filled with ones": (RELEASE, LOAD.replace("zero_()", "fill_(1)"), "fills the gradients with 1, must be 0"),
    "a part zeroed": (RELEASE, LOAD.replace(".zero_()", "[:9] = 0"), "must set all of them"),
    "set to a tensor": (
        RELEASE, "import torch" + LOAD.replace(".zero_()", "[:] = torch.zeros(9)"), "must set all of them to one number",
    ),
    "set to ones": (RELEASE, LOAD.replace(".zero_()", "[:] = 1"), "fills the gradients with 1, must be 0"),
    "an empty storage filled": (
        RELEASE, "for b in model.buffers: b.grad_data.storage().fill_(0)", "after load, the audit finds",
    ),
    "bytes filled with ones": (
        RELEASE, LOAD.replace("zero_()", "untyped_storage().fill_(1)"), "fills the gradients with 1, must be 0",
    ),
    "a method that the stand-in lacks": (
        f"for b in {ALL}: b.mine = b.grad_data.clone()", LOAD, "torch's clone, which needs a real tensor: grad_data.zero_() fills",
    ),
    "a function that needs a tensor": (
        RELEASE, "import torch" + LOAD.replace("buffer.grad_data.zero_()", "torch.ones_like(buffer.grad_data)"),
        "your code calls torch's ones_like, which needs a real tensor: grad_data.zero_() fills it with zeros",
    ),
    "zeros that go nowhere": (
        RELEASE, "import torch" + LOAD.replace("buffer.grad_data.zero_()", "torch.zeros_like(buffer.grad_data)"),
        "gives the gradients memory and does not zero it",
    ),
    "a load without a condition": (
        RELEASE,
        f"for b in {ALL}:\n    b.grad_data.storage().resize_(b.grad_data_size)\n    b.grad_data.zero_()",
        "Hint: the gradients are on the device: call resize_ only on a storage that is empty, whose size() is 0",
    ),
    "an attribute that is not there": (RELEASE, LOAD.replace("grad_data_size", "size"), "no attribute 'size'"),
    "only an if that a guard skips": (
        RELEASE,
        LOAD.replace("== 0", "== 0 and hasattr(buffer, 'size_of_mine')"),
        "was not brought back",
    ),
    "half of it": (RELEASE, LOAD.replace("buffer.grad_data_size", "buffer.grad_data_size // 2"), "must have as many"),
    "too much": (RELEASE, LOAD.replace("buffer.grad_data_size", "2 * buffer.grad_data_size"), "on the device where"),
    "set to None": (f"for b in {ALL}: b.grad_data = None", LOAD, "release: your code puts something in the place of grad_data"),
    "set as data": (
        RELEASE, f"import torch\nfor b in {ALL}: b.grad_data.data = torch.zeros(b.numel)", "in the place of grad_data, must leave it",
    ),
    "deleted": (f"for b in {ALL}: del b.grad_data", LOAD, "release: your code puts something in the place of grad_data"),
    "another tensor": (
        RELEASE, f"import torch\nfor b in {ALL}: b.grad_data = torch.zeros(b.numel)", "before anything was released: your code puts",
    ),
    "a name of the wrong function": (RELEASE, f"for b in {ALL}: storage.resize_(1)", "NameError: name 'storage' is not defined"),
    "a name that does not exist": ("for b in model.all_buffers: pass", LOAD, "model has the lists buffers and expert_"),
    "zeroed before it has memory": (
        RELEASE,
        LOAD.replace("storage.resize_(", "buffer.grad_data.zero_(); storage.resize_("),
        "Hint: call resize_ with the stored size first, and zero_() after it; a second release must not store 0.",
    ),
    "only zeroed": (
        RELEASE, f"for b in {ALL}: b.grad_data.zero_()", "call resize_ with the stored size first, and zero_() after it",
    ),
    "a load that works once": (
        RELEASE,
        "model.calls = getattr(model, 'calls', 0) + 1\nif model.calls < 4:\n    " + LOAD.strip().replace("\n", "\n    "),
        "was not brought back to its size. Hint: compare with the first one.",
    ),
    "load and release swapped": (LOAD, RELEASE, "if it is the release, exchange the names of the two functions"),
}  # fmt: skip


def function(body: str, argument: str, names: dict[str, Any] | None = None) -> Callable[..., object]:
    names = {} if names is None else names
    exec(f"def mine({argument}):\n{indent(body.strip(), '    ')}", names)  # noqa: S102  # the test's own answer
    return names["mine"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("qwen3-moe-tiny", num_layers=1, seq_length=16, expert_buffers=True) as lab:
        lab.step(warm_up=False)
        yield lab


@pytest.mark.parametrize(("release", "load"), [(RELEASE, LOAD), *OTHER_MOVES.values()], ids=["as merged", *OTHER_MOVES])
def test_a_release_and_a_load_that_keep_every_byte_pass(release: str, load: str, lab: Lab) -> None:
    names: dict[str, Any] = {"sizes": {}}
    assert check((function(release, "model", names), function(load, "model", names))).moves_gradients_of(lab)
    assert lab.audit_residency().complaints == ()


@pytest.mark.parametrize(("release", "load", "line"), WRONG_MOVES.values(), ids=WRONG_MOVES)
def test_a_wrong_release_or_load_is_named_by_the_audit_and_crashes_nothing(
    release: str, load: str, line: str, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not check((function(release, "model"), function(load, "model"))).moves_gradients_of(lab)
    printed = capsys.readouterr().out
    assert printed.startswith("not yet: ") and printed.count("\n") == 1
    assert line in printed
    about_sizes = "the audit finds" in printed or "whose storage has" in printed
    is_unset = "' object has no attribute" in printed and "here: " not in printed
    assert not is_unset or "what your release has set by then" in printed
    assert about_sizes or is_unset or "Hint: " not in printed, "the error says itself what to do"
    assert lab.audit_residency().complaints == (), "the gradients are there again"


def test_code_of_ones_own_stands_alone_and_the_next_step_runs(lab: Lab) -> None:
    with lab.own_gradient_moves(function(RELEASE, "model"), function(LOAD, "model")):
        lab.offload("gradients")
        with pytest.raises(ValueError, match="second fault, must be the only one"), lab.residency_fault("pinned_again"):
            pass
    assert lab.step(warm_up=False).status == "ok"


def test_a_step_without_gradients_names_the_block_that_has_lost_them(lab: Lab) -> None:
    with lab.own_gradient_moves(function(RELEASE, "model"), lambda model: None):
        lab.offload("gradients")
        with pytest.raises(ValueError, match=r"it did not run: first end the with block .* residency_fault"):
            lab.step(MemorySettings(offload_gradients=True), warm_up=False)


class NoModel:
    """Moves of a lab, without a model: what the sync is told does not depend on it."""

    def load(self, *groups: str) -> None:
        assert set(groups) <= set(GROUPS)

    offload = load

    def hand_over(self) -> None:
        pass


SYNC = """
load_seconds = offload_seconds = 0.0
if trainer.is_offload_param:
    started = trainer.time()
    trainer.load(load_grad=False)
    trainer.synchronize()
    load_seconds = trainer.time() - started
trainer.hand_over()
if trainer.is_offload_param:
    started = trainer.time()
    trainer.offload()
    trainer.synchronize()
    offload_seconds = trainer.time() - started
trainer.broadcast()
return load_seconds, offload_seconds
"""
OTHER_SYNCS = {
    "a helper": """
def timed(move):
    if not trainer.is_offload_param:
        return 0.0
    trainer.synchronize()
    t = trainer.time(); move(); trainer.synchronize()
    return trainer.time() - t
first = timed(lambda: trainer.load(False))
trainer.hand_over()
second = timed(trainer.offload)
trainer.broadcast()
return [first, second]
""",
    "two branches, numpy": """
import numpy as np
if not trainer.is_offload_param:
    trainer.hand_over(); trainer.broadcast()
    return np.zeros(2)
a = trainer.time(); trainer.load(load_grad=False); trainer.synchronize(); b = trainer.time()
trainer.hand_over()
c = trainer.time(); trainer.offload(); trainer.synchronize(); d = trainer.time()
trainer.broadcast()
return np.array([b - a, d - c])
""",
    "a tensor, and numbers that are not floats": """
import torch
if not trainer.is_offload_param:
    trainer.hand_over(); trainer.broadcast()
    return 0, 0
a = trainer.time(); trainer.load(load_grad=False); trainer.synchronize(); b = trainer.time()
trainer.hand_over()
c = trainer.time(); trainer.offload(); trainer.synchronize(); d = trainer.time()
trainer.broadcast()
return torch.tensor([b - a, d - c])
""",
}
OTHER_SYNCS["timed although there is nothing, and thrown away"] = SYNC.replace(
    "return load_seconds, offload_seconds",
    "return (load_seconds, offload_seconds) if trainer.is_offload_param else (0.0, 0.0)",
)
OTHER_SYNCS["asks for the switch once"] = "is_away = trainer.is_offload_param\n" + SYNC.strip().replace(
    "if trainer.is_offload_param", "if is_away"
)
OTHER_SYNCS["waits before each timer too"] = SYNC.replace("    started =", "    trainer.synchronize(); started =")
CONDITION = "started = trainer.time()\nif trainer.is_offload_param:"
TIMED_OUTSIDE = SYNC.replace("if trainer.is_offload_param:\n    started = trainer.time()", CONDITION, 1).replace(
    "    load_seconds = trainer.time()", "load_seconds = trainer.time()"
)
OFFLOAD = SYNC[SYNC.rindex("if trainer.is_offload_param") : SYNC.index("trainer.broadcast()")]
OFFLOAD_TIMED_OUTSIDE = OFFLOAD.replace(
    "if trainer.is_offload_param:\n    started = trainer.time()", CONDITION
).replace("    offload_seconds = trainer.time()", "offload_seconds = trainer.time()")
READ_OFF = """
if trainer.is_offload_param: trainer.load(load_grad=False)
trainer.hand_over()
if trainer.is_offload_param: trainer.offload()
trainer.broadcast()
return (0.101, 0.151) if trainer.is_offload_param else (0.0, 0.0)
"""
WRONG_SYNCS = {
    "nothing": ("return 0.0, 0.0", "your sync never calls load"),
    "as merged: the gradients": (SYNC.replace("load_grad=False", ""), "4 bytes per parameter that it does not read"),
    "as merged: no wait": (SYNC.replace("    trainer.synchronize()\n", "", 1), "the load took 0.001 s by your timer"),
    "no wait after the offload": ("SYNC.offload", "the offload took 0.001 s by your timer, and its copy 0.151 s: wait"),
    "as merged: timed without the condition": (
        TIMED_OUTSIDE, "without param_offload: the load took 1e-06 s although there was none, must be exactly 0.0"
    ),
    "timed and waited for without the condition": (
        TIMED_OUTSIDE.replace("    trainer.synchronize()\nload_seconds", "trainer.synchronize()\nload_seconds"),
        "without param_offload: the load took 1e-06 s although there was none, must be exactly 0.0",
    ),
    "the offload timed without the condition": (
        SYNC.replace(OFFLOAD, OFFLOAD_TIMED_OUTSIDE), "the offload took 1e-06 s although there was none",
    ),
    "swapped": (
        SYNC.replace("load_seconds, offload_seconds\n", "offload_seconds, load_seconds\n"),
        "returns its two numbers in the wrong order, must be the load's and then the offload's",
    ),
    "the seconds of the check's line": (READ_OFF, "over a slower link, with param_offload: the load took 0.101 s"),
    "the load timed from after its call": (
        SYNC.replace("    started = trainer.time()\n    trainer.load(load_grad=False)\n", "    trainer.load(load_grad=False)\n    started = trainer.time()\n"),
        "the load took 0.1 s by your timer, and its copy 0.101 s: start the timer before the call",
    ),
    "the offload timed from after its call": (
        SYNC.replace("    started = trainer.time()\n    trainer.offload()\n", "    trainer.offload()\n    started = trainer.time()\n"),
        "the offload took 0.15 s by your timer, and its copy 0.151 s: start the timer before the call",
    ),
    "the notebook's clock": (
        "from time import time\n" + SYNC.replace("trainer.time()", "time()").strip(), "no other clock sees these copies"
    ),
    "one of two clocks": (
        "from time import time\n" + SYNC.replace("= trainer.time()", "= time()").strip(), "no other clock sees these copies"
    ),
    "one timer around everything": (
        SYNC.replace("    load_seconds = trainer.time() - started\n", "").replace("    started = trainer.time()\n    trainer.offload", "    trainer.offload"),
        "read trainer.time() at both ends of both timers, 4 times",
    ),
    "no condition": (SYNC.replace("if trainer.is_offload_param:", "if True:"), "loads weights that are on the device"),
    "sets the switch, and then has no condition": (
        "trainer.is_offload_param = True\n" + SYNC.replace("if trainer.is_offload_param:", "if True:").strip(),
        "with param_offload: your sync changes is_offload_param, a switch of the job: only read it",
    ),
    "sets the switch only where it is false": (
        "if not trainer.is_offload_param: trainer.is_offload_param = True\n" + SYNC.strip(),
        "without param_offload: your sync changes is_offload_param",
    ),
    "changes the switch after the load, and back after the offload": (
        "away = trainer.is_offload_param\n" + SYNC.replace("if trainer.is_offload_param", "if away")
        .replace("trainer.hand_over()", "trainer.is_offload_param = False\ntrainer.hand_over()")
        .replace("trainer.broadcast()", "trainer.is_offload_param = away\ntrainer.broadcast()").strip(),
        "your sync changes is_offload_param",
    ),
    "no load": (SYNC.replace("    trainer.load(load_grad=False)\n", ""), "hand_over comes while the weights are on the"),
    "no hand over": (SYNC.replace("trainer.hand_over()\n", ""), "your sync never calls hand_over"),
    "no offload": (SYNC.replace("    trainer.offload()\n", ""), "the weights stay on the device during the broadcast"),
    "no broadcast": (SYNC.replace("trainer.broadcast()\n", ""), "your sync never calls broadcast"),
    "as merged: offload after the broadcast": (
        SYNC.replace("trainer.broadcast()\n", "").replace("trainer.hand_over()\n", "trainer.hand_over()\ntrainer.broadcast()\n"),
        "does not read them there: offload them right after hand_over",
    ),
    "the hand over after the offload": (
        SYNC.replace("trainer.hand_over()\n", "").replace("trainer.broadcast()", "trainer.hand_over()\ntrainer.broadcast()"),
        "offload comes before hand_over, which reads the weights on the device: hand over first",
    ),
    "broadcast first": ("trainer.broadcast()\n" + SYNC.strip(), "broadcast comes before hand_over"),
    "the hand over in the timer": (
        SYNC.replace("    trainer.synchronize()\n    load_seconds", "    trainer.hand_over()\n    load_seconds").replace("\ntrainer.hand_over()\n", "\nif not trainer.is_offload_param: trainer.hand_over()\n"),
        "the timer contains something else",
    ),
    "milliseconds": (SYNC.replace("return load_seconds", "return 1e3 * load_seconds"), "return seconds, not milliseconds"),
    "one number": (SYNC.replace("return load_seconds, offload_seconds", "return load_seconds"), "must return two numbers"),
    "nothing returned": (SYNC.replace("return load_seconds, offload_seconds", ""), "returns None, must return two numbers"),
    "numbers as texts": (
        SYNC.replace("return load_seconds, offload_seconds", "return str(load_seconds), str(offload_seconds)"),
        "must return two numbers",
    ),
    "a text": (SYNC.replace("return load_seconds, offload_seconds", "return 'fast', 'fast'"), "must return two numbers"),
    "two hand overs": (SYNC.replace("trainer.hand_over()\n", "trainer.hand_over()\ntrainer.hand_over()\n"), "hand_over twice"),
    "not a number": (SYNC.replace("return load_seconds,", "return float('nan'),"), "the load took nan s"),
    "torch's own wait": (
        "raise AssertionError('Torch not compiled with CUDA enabled')", "enabled, in line 2 of your cell. Hint: wait with trainer.synchronize()",
    ),
    "a name that does not exist": ("trainer.reload()", "AttributeError: 'Trainer' object has no attribute 'reload'"),
    "an error of its own": ("trainer.time()\nraise ValueError('x')", "with param_offload: ValueError: x, in line 3 of your cell"),
    "an error of Python's": ("float(f'{trainer.time()} s')", "string to float: '1000.000001 s', in line 2 of your cell"),
}  # fmt: skip


@pytest.mark.parametrize("body", [SYNC, *OTHER_SYNCS.values()], ids=["plain", *OTHER_SYNCS])
def test_a_sync_in_order_with_true_durations_passes(body: str) -> None:
    assert check(function(body, "trainer")).syncs_weights_of(NoModel())


@pytest.mark.parametrize(("body", "line"), WRONG_SYNCS.values(), ids=WRONG_SYNCS)
def test_a_wrong_sync_is_told_what_to_change(body: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if body == "SYNC.offload":
        body = SYNC.replace("    trainer.offload()\n    trainer.synchronize()\n", "    trainer.offload()\n")
    assert not check(function(body, "trainer")).syncs_weights_of(NoModel())
    printed = capsys.readouterr().out
    assert printed.startswith(("not yet: with", "not yet: over a slower link, with")) and printed.count("\n") == 1
    assert line in printed


def test_a_sync_moves_the_weights_of_a_live_model(lab: Lab) -> None:
    assert check(function(SYNC, "trainer")).syncs_weights_of(lab)
    lab.load(*GROUPS)
    assert lab.audit_residency().complaints == ()


KIND_OF = """
starts = [step.static_bytes for step in steps]
rise = starts[-1] - starts[0]
if rise >= 0.01 * starts[0]:
    return "leak" if starts[-1] - starts[-2] >= 0.05 * rise else "growth"
return "retention" if min(step.residual_bytes for step in steps) else "spike"
"""
OTHER_KINDS = {
    "numpy": """
import numpy as np
start = np.array([step.static_bytes for step in steps]); left = np.array([step.residual_bytes for step in steps])
rises = np.diff(start) / (start[-1] - start[0]) if start[-1] > 1.01 * start[0] else np.zeros(1)
if rises[-1] > 0.05: return "LEAK"
if rises.any(): return "growth by phase"
return "retention" if (left > 0).all() else "spike"
""",
    "the last step": """
first, before, last = (steps[at].static_bytes for at in (0, -2, -1))
if last < 1.01 * first: return "retention" if all(s.residual_bytes for s in steps) else "spike"
if 20 * (last - before) > last - first: return "leak"
if last > 1.01 * first: return "growth"
return "retention" if all(s.residual_bytes for s in steps) else "spike"
""",
}  # fmt: skip


def wrong_kind(old: str, new: str, said: str) -> tuple[str, str]:
    return KIND_OF.replace(old, new), f"your function says {said}, which is wrong"


WRONG_KINDS = {
    "always a spike": ("return 'spike'", "which is wrong"),
    "always a leak": ("return 'leak'", "which is wrong"),
    "peaks alone": (
        "p = [s.peak_allocated_bytes for s in steps]; return 'leak' if p[-1] > p[0] else 'spike'",
        "which is wrong",
    ),
    "any rise is a leak": (
        (
            "s = [x.static_bytes for x in steps]\nif s[-1] > s[0]: return 'leak'\n"
            "return 'retention' if steps[-1].residual_bytes else 'spike'"
        ),
        "which is wrong",
    ),
    "a limit for each step": wrong_kind("0.05 * rise", "0.01 * starts[-2]", "growth"),
    "two rises are a leak": (
        (
            "s = [x.static_bytes for x in steps]\nrises = sum(b > 1.01 * a for a, b in zip(s, s[1:]))\n"
            "if rises >= 2: return 'leak'\n" + KIND_OF.strip()
        ),
        "your function says leak, which is wrong",
    ),
    "a residual of any step": wrong_kind("min(", "any(", "retention"),
    "the last step's residual": wrong_kind(
        "min(step.residual_bytes for step in steps)", "steps[-1].residual_bytes", "retention"
    ),
    "the first step's residual": wrong_kind(
        "min(step.residual_bytes for step in steps)", "steps[0].residual_bytes", "retention"
    ),
    "first and last": wrong_kind("starts[-2]", "starts[0]", "leak"),
    "no leak that falls in between": wrong_kind(
        "0.05 * rise", "0.05 * rise and all(b >= a for a, b in zip(starts, starts[1:]))", "growth"
    ),
    "four rises": wrong_kind("0.05 * rise", "0.05 * rise and len(set(starts)) > 4", "growth"),
    "the rise before the last step": wrong_kind("rise = starts[-1]", "rise = starts[-2]", "spike"),
    "a leak whose first rise is not the largest": wrong_kind(
        "0.05 * rise", "0.05 * rise and starts[1] - starts[0] < rise / 2", "growth"
    ),
    "the lowest start": (
        KIND_OF.replace("rise = starts[-1] - starts[0]", "rise = starts[-1] - min(starts)"),
        "which is wrong",
    ),
    "1 % of the highest start": (KIND_OF.replace("0.01 * starts[0]", "0.01 * max(starts)"), "which is wrong"),
    "1.2 %": wrong_kind("0.01", "0.012", "spike"),
    "0.94 %": wrong_kind("0.01", "0.0094", "leak"),
    "4 % of the rise": wrong_kind("0.05 * rise", "0.04 * rise", "leak"),
    "6 % of the rise": wrong_kind("0.05 * rise", "0.06 * rise", "growth"),
    "the first eight steps": ("steps = steps[:8]\n" + KIND_OF.strip(), "your function says spike, which is wrong"),
    "the last eight steps": ("steps = steps[-8:]\n" + KIND_OF.strip(), "your function says spike, which is wrong"),
    "the residuals after the first": wrong_kind("for step in steps)", "for step in steps[1:])", "retention"),
    "the residuals before the last": wrong_kind("in steps) else", "in steps[:-1]) else", "retention"),
    "any rise at the end": wrong_kind("0.05 * rise", "1", "leak"),
    "a rise at the end measured by the start": wrong_kind("0.05 * rise", "0.001 * starts[0]", "leak"),
    "the highest start": wrong_kind("rise = starts[-1]", "rise = max(starts)", "growth"),
    "1 % of the rise": wrong_kind("0.05 * rise", "0.01 * rise", "leak"),
    "the last two rises": wrong_kind("starts[-2]", "starts[-3]", "leak"),
    "a change at the end": wrong_kind("starts[-1] - starts[-2]", "abs(starts[-1] - starts[-2])", "leak"),
    "residuals above 1 % of the start": wrong_kind(
        "min(step.residual_bytes for step in steps)", "min(s.residual_bytes for s in steps) > 0.01 * starts[0]", "spike"
    ),
    "a rise or a fall": wrong_kind("rise >= 0.01", "abs(rise) >= 0.01", "leak"),
    "the range of the starts": wrong_kind(
        "rise = starts[-1] - starts[0]", "rise = max(starts) - min(starts)", "growth"
    ),
    "2 %": wrong_kind("0.01", "0.02", "spike"),
    "0.5 %": wrong_kind("0.01", "0.005", "leak"),
    "the second half of the run": wrong_kind(
        "starts[-2] >= 0.05 * rise", "starts[len(starts) // 2] >= 0.01 * starts[0]", "leak"
    ),
    "the residual first": (
        "if steps[-1].residual_bytes: return 'retention'\n" + KIND_OF.strip(),
        "your function says retention, which is wrong",
    ),
    "a retention before growth": wrong_kind("if rise", "if not steps[0].residual_bytes and rise", "retention"),
    "no growth": (KIND_OF.replace('"growth"', '"leak"'), "Hint: it is growth: its rise counts, and"),
    "no retention": wrong_kind('"retention"', '"spike"', "spike"),
    "a residual of most steps": wrong_kind(
        "min(step.residual_bytes for step in steps)",
        "sorted(s.residual_bytes for s in steps)[len(steps) // 2]",
        "retention",
    ),
    "equal residuals": wrong_kind(
        "min(step.residual_bytes for step in steps)",
        "len({s.residual_bytes for s in steps}) == 1 and steps[0].residual_bytes",
        "spike",
    ),
    "half of the mean rise": (
        KIND_OF.replace("0.05 * rise", "0.5 * rise / (len(starts) - 1)"),
        "GiB. Hint: it is a leak: its rise counts",
    ),
    "what only a record has": ("steps[0].loss\n" + KIND_OF, "Hint: a step of this run has only static_bytes"),
    "nothing for a run without a spike": (
        KIND_OF.replace(
            '"spike"', '"spike" if max(s.peak_allocated_bytes / s.static_bytes for s in steps) > 1.25 else None'
        ),
        "your function gives None, must be one of",
    ),
    "steady": (KIND_OF.replace('"spike"', '"steady"'), "also where diagnose would call the run steady"),
    "another word": (KIND_OF.replace('"leak"', '"memory leak"'), "must be one of leak, retention, growth and spike"),
    "nothing": ("pass", "your function gives None, must be one of"),
    "a number": ("return 3", "your function gives 3, must be one of"),
    "an error": ("return steps['start']", "your function ends in TypeError"),
}
STEP = record_of(training_step())
RUNS = {
    "A": [replace(STEP, static_bytes=2**20 * (5 + step), peak_allocated_bytes=2**24) for step in range(6)],
    "B": [replace(STEP, static_bytes=2**20 * start, peak_allocated_bytes=2**24) for start in (3, 9, 9, 9, 9, 9)],
}


@pytest.mark.parametrize("body", [KIND_OF, *OTHER_KINDS.values()], ids=["plain", *OTHER_KINDS])
def test_a_right_rule_classifies_runs_that_its_writer_has_not_seen(body: str) -> None:
    assert check(function(body, "steps")).classifies(RUNS)


@pytest.mark.parametrize(("body", "line"), WRONG_KINDS.values(), ids=WRONG_KINDS)
def test_a_wrong_rule_is_shown_a_run_that_refutes_it(body: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(function(body, "steps")).classifies(RUNS)
    printed = capsys.readouterr().out
    assert printed.startswith("not yet: for ") and printed.count("\n") == 1
    assert line in printed


def test_the_unseen_runs_are_what_they_say() -> None:
    for kind, steps in unseen_curves():
        records = [
            replace(
                STEP,
                static_bytes=each.static_bytes,
                peak_allocated_bytes=each.peak_allocated_bytes,
                activation_peak_bytes=each.peak_allocated_bytes - each.static_bytes,
                residual_bytes=each.residual_bytes,
            )
            for each in steps
        ]
        shown = diagnose(records)[0].kind.partition(" ")[0]
        assert ("spike" if shown == "steady" else shown) == kind


@pytest.mark.parametrize(
    "answer",
    [
        [2, 5],
        (2.0, 5),
        np.array([2, 5]),
        [np.int64(2), np.float32(5)],
        torch.tensor([2, 5]),
        [torch.tensor(2.0), torch.tensor(5)],
        np.array([[2], [5]]),
        torch.tensor([[2.0], [5.0]]),
        [np.array([2]), torch.tensor([5])],
        [Decimal(2), Fraction(5)],
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_numbers_of_a_formula_may_be_arrays_and_tensors(answer: Any) -> None:
    assert check(answer).is_exactly([2, 5])
    assert check(answer).is_about([2.01, 5], "tokens", "count them")


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ([2, 4], "the formula gives 4 tokens for case 2, too small. Hint: count them."),
        ([2, 5.2], "the formula gives 5.2 tokens for case 2, too large. Hint: count them."),
        ([float("inf"), 5], "the formula gives inf tokens for case 1, must be finite. Hint: count them."),
        (2, "the formula gives 1 result, must give 2, one per case. Hint: replace only the 0 in the marked line."),
    ],
)
def test_a_value_that_is_off_is_named(answer: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(answer).is_about([2, 5], "tokens", "count them")
    assert capsys.readouterr().out == f"not yet: {line}\n"


@pytest.mark.parametrize("copied", [[2, 5], (2.0, 5), np.array([2, 5])], ids=["a list", "a tuple", "numpy"])
def test_values_that_no_formula_gives_exactly_are_a_copy(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(copied).is_about([2, 5], "tokens", "count them", measured=True)
    assert "these are the numbers with which the check compares, must be a formula" in capsys.readouterr().out
    assert check([2.001, 5]).is_about([2, 5], "tokens", "count them", measured=True)


def test_one_function_where_two_belong_together_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(function(RELEASE, "model")).moves_gradients_of(None)
    assert capsys.readouterr().out.endswith("must get two. Hint: write check((release, load)).\n")


def test_functions_that_were_checked_already_are_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    for answer in ((CHECKED, CHECKED), CHECKED):
        assert not check(answer).moves_gradients_of(None)  # type: ignore[call-overload]
        assert "checked already, must get a function. Hint: leave the lines with def as " in capsys.readouterr().out


def test_the_line_of_an_error_is_quoted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a notebook, where Python knows the source of a cell; the deepest of the reader's own lines is quoted."""
    lines = ["def seconds_of(answer):", "    return float(answer)", "", "def sync(trainer):", "    seconds_of('fast')"]
    monkeypatch.setitem(linecache.cache, "cell", (0, None, [f"{line}\n" for line in lines], "cell"))
    names: dict[str, Any] = {}
    exec(compile("\n".join(lines), "cell", "exec"), names)  # noqa: S102  # the test's own answer
    assert not check(names["sync"]).syncs_weights_of(NoModel())
    assert capsys.readouterr().out.endswith("to float: 'fast', in line 2 of your cell (return float(answer))\n")


def test_a_list_of_buffers_that_is_taken_for_a_buffer_gets_a_hint(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    body = "for buffer in [model.buffers, model.expert_parallel_buffers]: buffer.grad_data.storage().resize_(0)"
    assert not check((function(body, "model"), function(LOAD, "model"))).moves_gradients_of(lab)
    assert (
        "'list' object has no attribute 'grad_data', in line 2 of your cell. Hint: buffers and expert"
        in capsys.readouterr().out
    )


def test_an_error_in_a_release_gets_a_hint_about_a_release(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    body = f"{RELEASE.strip()}\nfor buffer in {ALL}: buffer.grad_data.zero_()"
    assert not check((function(body, "model"), function(LOAD, "model"))).moves_gradients_of(lab)
    assert "writes nothing" in capsys.readouterr().out


def test_a_release_that_leaves_its_work_to_the_lab_gets_a_hint(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    release = function("lab.offload('gradients')", "model", {"lab": lab})
    assert not check((release, function(LOAD, "model"))).moves_gradients_of(lab)
    assert "Hint: use no method of the lab here" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["leak by phase", " leak", "spike "])
def test_a_kind_that_the_text_does_not_name_is_refused(answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check(lambda _: answer).classifies({})
    assert f"your function gives {answer!r}, must be one of leak, " in capsys.readouterr().out
