"""Every exercise of the labs: its first line and each wrong answer miss the goal, and a solution reaches it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar, Self
from unittest.mock import MagicMock, patch

import ipywidgets  # noqa: F401  # see `_IMPORTED`
import nbformat
import plotly.graph_objects as go
import pytest

import memlab
from memlab import Lab, Layout, MemorySettings, TrainingState, predict_ranks
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.engines.activation_tap import Tap
from memlab.engines.megatron.activation_offload.audit import SavedInRegions
from memlab.exercises.goals import Goals
from memlab.lab import probes
from memlab.lab.one_process import OneProcess
from memlab.lab.stepper import Stepper
from memlab.record.job_record import JobRecord
from memlab.record.offload_audit import OffloadAudit
from memlab.record.step_record import StepRecord
from tests.unit.test_code_exercises import (
    KIND_OF,
    LOAD,
    OTHER_KINDS,
    OTHER_MOVES,
    OTHER_SYNCS,
    RELEASE,
    SYNC,
    WRONG_KINDS,
    WRONG_MOVES,
    WRONG_SYNCS,
)

_IMPORTED = [*(getattr(memlab, name) for name in memlab.__all__), go.Figure(go.Bar(x=[1], y=[1]))]
"""What the labs import, and what plotly imports for its first figure: tests/conftest.py lets collections of garbage pass
over all that is there before the first test. What a test imports is visited three times a step, which takes 0.1 s."""
LABS = Path(__file__).parents[2] / "labs"
MARK = "  # change me"


@dataclass(frozen=True)
class OtherLine:
    """An answer that also changes a line that is not marked."""

    answer: str
    line: str
    """A part of another line of the exercise."""
    by: str
    """What stands in its place."""


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """What stands in place of the marked line."""

    solution: str
    wrong: tuple[str | OtherLine, ...]
    """Answers that the text forbids, or that look right and are not."""
    also_right: tuple[str, ...] = ()
    """Other answers that do all that the text asks for."""


def step(settings: str) -> str:
    return f"mine = lab.step({settings})"


def selective(*modules: str, others: str = "") -> str:
    return step(f'MemorySettings(recompute_granularity="selective", recompute_modules={list(modules)}{others})')


def offload(*modules: str, others: str = "") -> str:
    return step(f"MemorySettings(offload_modules={list(modules)}, min_offloaded_tensor_size=0{others})")


def full_detach(method: str, num_layers: int, others: str = "") -> str:
    return (
        f'mine = lab.step(MemorySettings(recompute_granularity="full", recompute_method="{method}", '
        f'recompute_num_layers={num_layers}, checkpoint_input_remedy="detach"{others}))'
    )


def block(num_layers: str, others: str = "") -> str:
    """A step that recomputes the first layers."""
    full = f'recompute_granularity="full", recompute_method="block", recompute_num_layers={num_layers}'
    return step(f"MemorySettings({full}{others})")


def layout(**sizes: int) -> str:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "dp": "data_parallel_size"}
    return f"mine = Layout({', '.join(f'{names.get(name, name)}={size}' for name, size in sizes.items())})"


def stages(first: int, last: int) -> str:
    return f"first_stage, last_stage = {first}, {last}"


def state(options: str) -> str:
    return f"mine = lab.step(state=TrainingState({options}))"


def in_state(options: str, settings: str = "MemorySettings()") -> str:
    """A step in another training state, in a lab that does not import the class."""
    return f"from memlab import TrainingState; mine = lab.step({settings}, state=TrainingState({options}))"


def shorter(answer: str) -> str:
    return f"lab.set_workload(seq_length=64); {answer}"


def not_steady(answer: str) -> str:
    """A step without the equal one before it that allocates Adam's moments, and that is Megatron's warm-up."""
    return f"{answer.removesuffix(')')}, warm_up=False)"


def forged(record: str, fields: str) -> str:
    """The record of a cell with other numbers."""
    return f"from dataclasses import replace\nmine = replace({record}, {fields})"


def plus(settings: str, options: str) -> str:
    """A step in another training state and under memory settings."""
    return f"from memlab import MemorySettings; mine = lab.step(MemorySettings({settings}), state=TrainingState({options}))"


def for_each(formula: str, letters: str, cases: str = "sizes") -> str:
    return f"mine = [{formula} for {letters} in {cases}]"


OTHER_LAB = "lab = Lab(architecture, num_layers=2, seq_length=64)"
"""What an answer may open; the exercise then opens its own again."""
TE_LOSS = 'cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"'
FULL_RECOMPUTE = 'recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1'


def in_styles(formula: str, letters: str, cases: str = "sizes") -> tuple[str, ...]:
    """The same answer as an array, a tensor, a tuple of numpy's numbers, and by a loop."""
    plain = for_each(formula, letters, cases)
    return (
        f"mine = []\nfor {letters} in {cases}:\n    mine.append({formula})",  # the letters stay for the answers after it
        f"import numpy as np; {plain}; mine = np.array(mine)",
        f"import torch; {plain}; mine = torch.tensor(mine, dtype=torch.float64)",
        f"import numpy as np; {plain}; mine = tuple(np.float64(each) for each in mine)",
    )


NO_FORMULAS = (
    'mine = "2 * h * t"',
    "mine = None",
    'mine = {"case 1": 2}',
    "mine = MemorySettings()",
    "mine = lambda t: 2 * t",
)
"""Answers of another type than numbers: the check asks for numbers, without a traceback."""
NO_RECORDS = ('mine = "full"', "mine = {}", "mine = MemorySettings()", "mine = 3", "mine = lab.step")
"""Answers of another type than a record."""
HEADS = "t, a, g, d"
LONGEST = "start, peak, tokens, room"
RETAINED = "t, h, L, n, E"
DENSE_LETTERS = "t, h, f, a, g, d"
MOE_LETTERS = "t, h, f, m, k"
BF16_MOMENTS = 'use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"'
OTHER_STATES = (
    "optimizer_cpu_offload=True",
    BF16_MOMENTS,
    "grad_reduce_in_bf16=True",
    "grad_reduce_in_bf16=True, use_precision_aware_optimizer=True",
)
"""Training states that lower a peak: no exercise about memory settings allows them."""
ALL_AWAY = ", offload_parameters=True, offload_gradients=True, offload_optimizer=True"
AWAY_IN_THE_STEP = ", offload_optimizer=True, offload_optimizer_except_update=True"
RECOMPUTE_MOE = ', recompute_granularity="selective", recompute_modules=["moe"]'
CORE_ATTN = 'MemorySettings(recompute_granularity="selective", recompute_modules=["core_attn"])'
ALL_MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
EXERCISES = {
    "02_recompute": [
        Exercise(
            solution=block("num_layers - 1"),
            also_right=(
                "from dataclasses import replace\n"
                + step('replace(full.settings, recompute_method="block", recompute_num_layers=num_layers - 1)'),
                "import numpy as np; " + block("np.int64(num_layers - 1)"),
                "options = dict(recompute_granularity='full', recompute_method='block', recompute_num_layers=3)\n"
                + step("MemorySettings(**options)"),
            ),
            wrong=(
                step("full.settings"),
                *NO_RECORDS,
                "mine = half",  # a row of the first table
                forged("full", 'peak_allocated_bytes=1, peak_by_category={"activations": 1}, recomputed_bytes=1'),
                'mine = selective["moe"]',
                selective("core_attn"),
                selective("mlp"),  # every layer of this model is MoE
                selective("layernorm", "moe_act"),
                selective("layernorm", "moe_act", "moe"),
                block("num_layers"),
                offload(*ALL_MODULES),  # it recomputes nothing
                *(in_state(options) for options in OTHER_STATES),
                in_state("grad_reduce_in_bf16=True", "half.settings"),
                block("num_layers - 1", ", offload_optimizer=True"),
                block("num_layers - 1", ', checkpoint_input_remedy="detach"'),
                block("num_layers - 1", ', checkpoint_input_remedy="release_storage"'),
                shorter(selective("layernorm")),
            ),
        ),
        Exercise(
            solution=selective("layernorm", "moe_act"),
            wrong=(
                'mine = selective["layernorm"]',  # two rows of the second table
                selective("moe_act"),
                selective("core_attn", "moe_act"),
                # The offload lowers the peak, and not what is recomputed.
                selective(
                    "core_attn", others=', offload_modules=["expert_fc1", "moe_act"], min_offloaded_tensor_size=0'
                ),
                offload("moe_act"),
                selective("moe"),
                forged('selective["moe"]', "residual_bytes=0"),
                selective("core_attn"),
                step("MemorySettings()"),
                step("half.settings"),
                *(in_state(options, CORE_ATTN) for options in OTHER_STATES),
                selective("layernorm", "moe_act", others=ALL_AWAY),
                selective("moe", others=', checkpoint_input_remedy="detach"'),
                selective("moe", others=', checkpoint_input_remedy="release_storage"'),
                shorter(selective("core_attn")),
                # Too small to be offloaded.
                selective("layernorm", "moe_act", others=', offload_modules=["qkv_linear"]'),
                "lab.step(MemorySettings())",  # no answer has a name
            ),
            also_right=(selective("moe_act", "layernorm"), "mine = lab.step(two)"),
        ),
        Exercise(
            # As a float too: a formula with a division gives one.
            solution=for_each("(4 * h / 2 + 4 + 2 * m * k) * t", MOE_LETTERS),
            also_right=(
                f"{OTHER_LAB}; {for_each('(2 * h + 4 + 2 * m * k) * t', MOE_LETTERS)}",
                "import numpy as np; t, h, f, m, k = np.array(sizes).T; mine = (2 * h + 4 + 2 * m * k) * t",
                *in_styles("2 * (h + 2 + m * k) * t", MOE_LETTERS),
            ),
            wrong=(
                for_each("(2 * h + 2 * m * k) * t", MOE_LETTERS),
                "mine = []\nfor t, h, f, m, k in sizes:\n    mine.append((2 * m * k + 2 * h) * t)",
                *NO_FORMULAS,
                for_each("(2 * h + 4) * t", MOE_LETTERS),
                for_each('by_hand["moe"]', MOE_LETTERS),
                # Right for the tiny model only.
                for_each('by_hand["layernorm"] + by_hand["moe_act"]', MOE_LETTERS),
                for_each("(4 * m * k + 4 + 2 * m * k) * t", MOE_LETTERS),
                # Right for one of the two models only: a number stands in place of a letter.
                for_each("(2 * h + 4 + 4 * m) * t", MOE_LETTERS),
                for_each("(2 * h + 4 + m * k * k) * t", MOE_LETTERS),
                for_each("(2 * h + 4 + m * k * k) * 256", MOE_LETTERS),
                for_each("(2 * h + 4 + m * k * k) * 1024", MOE_LETTERS),
                # Letters in place of others that were scaled alike.
                for_each("(2 * h + 4 + 2 * m * k) * 2 * h", MOE_LETTERS),
                for_each("(4 * t / 4 + 4 + 2 * m * k) * t", MOE_LETTERS),
                for_each("(2 * h + 4 + f * k / 3) * t", MOE_LETTERS),
                for_each("(2 * h + 4 + 2 * m * k) * 256", MOE_LETTERS),
                'mine = by_hand["layernorm"] + by_hand["moe_act"]',
                "mine = 528384",
                "mine = [131072 + 4 * 256 + 2 * 64 * 2 * 256] * 2",
            ),
        ),
    ],
    "03_activation_offload": [
        Exercise(
            solution=step("everything.settings"),
            also_right=(
                "lab.step(everything.settings); mine = lab.step(warm_up=False)",  # steady, as the solution is
                "mine = lab.audit_offload(everything.settings)",
            ),
            wrong=(
                *NO_RECORDS,
                "mine = log_probabilities",  # a forward-only pass keeps nothing for backward
                selective("moe"),
                offload("moe_act"),
                step(f"MemorySettings(offload_modules={list(ALL_MODULES)})"),
                step('MemorySettings(offload_modules=["expert_fc1", "moe_act"])'),
                # Only Megatron's warm-up step peaks below the goal: it offloads the last offload groups too.
                not_steady(offload("expert_fc1", "moe_act")),
                forged('moved["qkv_linear"]', "activation_peak_bytes=100"),
                *(in_state(options) for options in OTHER_STATES),
                offload(*ALL_MODULES, others=", offload_parameters=True"),
                offload(*ALL_MODULES, others=AWAY_IN_THE_STEP),
                shorter(step("MemorySettings()")),
                shorter(step("everything.settings")),
                offload(*ALL_MODULES, others=', checkpoint_input_remedy="detach"'),
            ),
        ),
        Exercise(
            solution=offload("core_attn", "qkv_linear"),
            also_right=(
                offload("qkv_linear", "core_attn", "attn_proj"),
                step("everything.settings"),
                offload("core_attn", "qkv_linear").replace("lab.step", "lab.audit_offload"),
            ),
            wrong=(
                offload("qkv_linear"),
                forged("plain", 'offloaded_bytes_by_module={"core_attn": 1, "qkv_linear": 1}'),
                offload("core_attn", "attn_proj"),
                step('MemorySettings(offload_modules=["core_attn", "qkv_linear"])'),
                offload("core_attn", "qkv_linear", others=RECOMPUTE_MOE),
                offload("core_attn", "qkv_linear", others=", offload_optimizer=True"),
            ),
        ),
        Exercise(
            solution=for_each("((4 * a + 4 * g) * d + 4 * a) * t", HEADS),
            also_right=(
                *in_styles("4 * ((a + g) * d + a) * t", HEADS),
                for_each("2 * t * d * (2 * a + 2 * g) + 4 * a * t * (t < 4096)", HEADS),
            ),
            wrong=(
                for_each("(2 * a + 4 * g) * d * t", HEADS),  # without the output
                # Within 1 %, but cases 1 and 2 are exact: a norm's number per token, and other bytes per head.
                for_each("((4 * a + 4 * g) * d + 4 * a + 4) * t", HEADS),
                for_each("((4 * a + 4 * g) * d + 5 * a) * t", HEADS),
                for_each("((4 * a + 4 * g) * d + 4 * a + 2 * g) * t", HEADS),
                for_each("(4 * a + 2 * g) * d * t", HEADS),  # without the values
                for_each("(2 * a + 2 * g) * d * t", HEADS),  # numbers, not bytes
                for_each("8 * a * d * t", HEADS),  # as many key-value heads as query heads
                for_each("3 * (4 * a + 4 * g) * d * t", HEADS),  # all offloaded layers
                for_each("(4 * a + 4 * g) * d", HEADS),
                for_each("(4 * a + 4 * g) * d + 4 * a", HEADS),  # per token
                for_each("((4 * a + 4 * g) * d + 4 * a) * t / 2**20", HEADS),
                for_each("((4 * a + 4 * g) * d + 4 * a) * t / 1e9", HEADS),
                "mine = [((4 * a + 4 * g) * d + 4 * a) * t for t, g, a, d in sizes]",  # the letters in another order
                "mine = groups[0]",
                # A term that is right in this lab's model, and too small in the large ones to matter there.
                for_each("((4 * a + 4 * g) * d + 8 * g) * t", HEADS),
                for_each("((4 * a + 4 * g) * d + 16) * t", HEADS),
                for_each("((4 * a + 4 * g) * d + d / 2) * t", HEADS),
                "mine = groups",
            ),
        ),
        Exercise(
            solution=for_each("(a + 2 * g) / (2 * a + 2 * g)", HEADS),
            also_right=(
                *in_styles("1 - a / (2 * a + 2 * g)", HEADS),
                for_each("1 - 2 * a * d * t / ((4 * a + 4 * g) * d * t)", HEADS),
            ),
            wrong=(
                for_each("1", HEADS),
                *NO_FORMULAS,
                for_each("0.5", HEADS),
                for_each("a / (2 * a + 2 * g)", HEADS),  # what stays
                for_each("(2 * a + 2 * g) / (a + 2 * g)", HEADS),
                for_each("100 * (a + 2 * g) / (2 * a + 2 * g)", HEADS),  # percent
                for_each("g / (a + g)", HEADS),
                "mine = [0.67, 0.56, 0.6]",  # the text gives these
                "mine = [0.67, 0.67, 0.56, 0.6]",  # the sizes of the second case are drawn at random
                "mine = [2 / 3, 0.9, 5 / 9, 0.6]",
                "mine = [67, 67, 56, 60]",
                for_each("(a + 2 * g) * d * t", HEADS),  # bytes
                for_each("(2 * g + a) / (2 * a + g)", HEADS),
                for_each("(a + 2 * g) / (2 * a + 2 * g) / 3", HEADS),  # of all layers
                "mine = [(a + 2 * g) / (2 * a + 2 * g) for t, g, a, d in sizes]",  # the letters in another order
                "mine = ratios",
            ),
        ),
    ],
    "04_parameters_gradients_optimizer": [
        Exercise(
            solution='lab.offload("gradients", "optimizer state")',
            also_right=(
                'lab.offload("optimizer state"); lab.offload("gradients")',
                # These settings stay on the lab, and the next exercise has to undo them.
                "lab.step(MemorySettings(offload_gradients=True, offload_optimizer=True))",
            ),
            wrong=(
                'lab.offload("gradients")',
                "lab.offload(*GROUPS)",
                'lab.offload("parameters", "optimizer state")',
                'lab.offload("gradients", "optimizer_state")',
                'lab.offload(["gradients", "optimizer state"])',
                "lab.offload()",
                # Audits of another moment: the device holds everything.
                OtherLine(
                    "lab.load(*GROUPS)",
                    "mine.record = lab.audit_residency()",
                    by='mine.record = moments["weight sync since"]',
                ),
                OtherLine(
                    "kept = lab.audit_residency(); lab.load(*GROUPS)",
                    "mine.record = lab.audit_residency()",
                    by="mine.record = kept",
                ),
            ),
        ),
        Exercise(
            solution='name = "gradients_held_by_main_parameters"',
            also_right=(
                "name = 'gradients_held_by_main_parameters'  # error 3",
                'name = ("gradients_held" "_by_main_parameters")',
            ),
            wrong=(
                'name = "size_not_saved"',
                'name = "pinned_again"',
                'name = "expert_buffers_forgotten"',  # this model has no such buffers
                'name = "gradients"',
                "name = 3",
                'name = "3"',
                'name = "gradients held by main parameters"',
                "name = None",
                'name = ["gradients_held_by_main_parameters"]',
                *(
                    OtherLine(
                        'name = "pinned_again"', "mine.record = lab.audit_residency()", by=f"mine.record = {copy}"
                    )
                    for copy in ("held", "__import__('dataclasses').replace(held)")
                ),
            ),
        ),
        Exercise(
            solution=OtherLine(
                RELEASE, "def load(model):\n    pass", f"def load(model):\n{indent(LOAD.strip(), '    ')}"
            ),
            wrong=(
                RELEASE.strip(),  # nothing is loaded
                OtherLine("pass", "def load(model):\n    pass", f"def load(model):\n{indent(LOAD.strip(), '    ')}"),
            ),
        ),
    ],
    "05_moe_checkpoint_retention": [
        Exercise(
            solution=selective("moe_act"),
            wrong=(
                step('remedies["detach"].settings'),
                forged("plain", "residual_bytes=0, recomputed_bytes=1, activation_peak_bytes=1"),
                'mine = lab.step(full.settings, remedy="detach")',
                *NO_RECORDS,
                step("MemorySettings()"),
                selective("moe", others=', checkpoint_input_remedy="detach"'),
                offload("moe_act"),
                selective(
                    "core_attn", others=', offload_modules=["expert_fc1", "moe_act"], min_offloaded_tensor_size=0'
                ),
                selective("moe"),
                selective("mlp"),
                selective("core_attn"),
                *(in_state(options, CORE_ATTN) for options in OTHER_STATES),
                selective("moe_act", others=", offload_optimizer=True"),
                shorter(selective("core_attn")),
            ),
            also_right=(selective("layernorm"), selective("layernorm", "moe_act")),
        ),
        Exercise(
            solution=step('remedies["detach"].settings'),
            wrong=(
                offload(*ALL_MODULES),
                selective("moe_act", "layernorm", others=', checkpoint_input_remedy="detach"'),
                step('remedies["clear_gradient"].settings'),
                step('remedies["release_storage"].settings'),
                "mine = unguarded",  # a use after free, which the record does not show
                full_detach("block", 3),
                full_detach("uniform", 1, ", offload_parameters=True, offload_optimizer=True"),
                full_detach("uniform", 1, ', offload_modules=["core_attn"], min_offloaded_tensor_size=0'),
                shorter(step('remedies["detach"].settings')),
            ),
            also_right=(full_detach("uniform", 4), full_detach("block", 4)),
        ),
        Exercise(
            solution=for_each("2 * t * h * 2 * L // n if E else 0", RETAINED, "jobs"),
            also_right=(
                "import numpy as np; t, h, L, n, E = np.array(jobs).T; mine = 4 * t * h * L / n * (E > 0)",
                *in_styles("4 * t * h * L / n * (E > 0)", RETAINED, "jobs"),
                for_each("4 * t * h * ((L + n - 1) // n) * min(E, 1)", RETAINED, "jobs"),
                f"import math; {for_each('4 * t * h * math.ceil(L / n) * bool(E)', RETAINED, 'jobs')}",
                f"import numpy as np; {for_each('np.where(E, 4 * t * h * np.ceil(L / n), 0)', RETAINED, 'jobs')}",
                f"{OTHER_LAB}; {for_each('4 * t * h * L / n * (E > 0)', RETAINED, 'jobs')}",
            ),
            wrong=(
                for_each("2 * t * h * 2 * L // n", RETAINED, "jobs"),  # the dense model too
                "mine = []\nfor t, h, L, n, E in jobs:\n    mine.append(4 * t * h * L / n)",
                *NO_FORMULAS,
                *(
                    for_each(f"({formula}) * (E > 0)", RETAINED, "jobs")
                    for formula in (
                        "2 * t * h * 2 * L",
                        "4 * t * h * (L // n + 1)",
                        "4 * t * h * L // n / 2**10",
                        "4 * h * L // n",  # per token
                        "2 * t * h * 2 * L * n",  # positively
                        "2 * t * h * L // n",  # no gradient
                        "2 * t * h * 2 * L // n**2",
                        "2 * t * h * 2 * (L - n + 1)",
                        # Letters of this lab's model that stand for others, and numbers in their place.
                        "4 * t * t * L // n",
                        "4 * t * h * (4 // n)",
                        "4 * h * h * L // n",
                        "4 * 128 * h * L // n",
                        "4 * t * 128 * L // n",
                        "4 * t * h * 4 // n",
                        "4 * t * h * L // n * E // 8 if t > 96 else 0",
                        "16 * t * E * L // n",
                        "64 * t * E * L // n",  # the experts in place of the hidden size
                        "256 * t * E // n",  # and in place of the layers as well
                        "4 * t * h * L // n * E / 8",
                    )
                ),
                "mine = [full.residual_bytes, pairs.residual_bytes]",
                "mine = [262144, 131072, 65536, 0, 0]",
            ),
        ),
    ],
    "06_phi4_activation_peak": [
        Exercise(
            solution=selective("mlp"),
            wrong=(
                *NO_RECORDS,
                step('MemorySettings(recompute_granularity="full")'),
                step('MemorySettings(recompute_granularity="selective", recompute_modules="mlp")'),
                step("recompute"),
                selective("layernorm"),
                selective("core_attn"),
                *(in_state(options) for options in OTHER_STATES),
                # Only Megatron's warm-up step fits: it offloads the last offload groups too.
                not_steady(offload("qkv_linear", "core_attn")),
                # They lower the start of the step, and not the spike.
                step(f"MemorySettings({AWAY_IN_THE_STEP.removeprefix(', ')})"),
                selective("mlp", others=", offload_optimizer=True"),
                selective("mlp", others=', checkpoint_input_remedy="detach"'),
                shorter(step("MemorySettings()")),
            ),
            also_right=(
                block("num_layers // 2"),
                selective("mlp", others=', offload_modules=["core_attn"], min_offloaded_tensor_size=0'),
            ),
        ),
        Exercise(
            solution=for_each("(room - start) / (peak - start) * tokens", LONGEST, "steps"),
            also_right=(
                *in_styles("(room - start) * tokens / (peak - start)", LONGEST, "steps"),
                for_each("int((room - start) // ((peak - start) / tokens))", LONGEST, "steps"),
                "import numpy as np; s, p, t, r = np.array(steps).T; mine = (r - s) / (p - s) * t",
            ),
            wrong=(
                for_each("room / peak * tokens", LONGEST, "steps"),  # the start grows with the batch
                for_each("(room - start) / peak * tokens", LONGEST, "steps"),
                for_each(
                    "((room - start) / (peak - start)) ** 0.5 * tokens", LONGEST, "steps"
                ),  # as if it grew with the square
                for_each("tokens", LONGEST, "steps"),
                *NO_FORMULAS,
                for_each("(room - start) / (peak - start)", LONGEST, "steps"),
                for_each("(room - start) // (peak - start) * tokens", LONGEST, "steps"),  # rounds too early
                for_each("(peak - start) / (room - start) * tokens", LONGEST, "steps"),
                for_each("(room - start) / (peak - start) * tokens * 1.024**3", LONGEST, "steps"),  # GB for GiB
                "mine = [(room - start) / (peak - start) * tokens for peak, start, tokens, room in steps]",
                for_each("8192", LONGEST, "steps"),
                # They use the lengths that the lab prints, and no bytes.
                "mine = [8192, 4096]",
                "mine = [8192, 4096, 8192]",
                "mine = [8192, 4096, 16384]",
                "mine = [8192, 4096, 16384, 4096]",
                "mine = longest_batches",
                "mine = list(longest_batches)",
                "mine = [step[2] for step in reversed(steps)]",
                for_each("12288 - tokens", LONGEST, "steps"),
                for_each("8192 * 4096 / tokens", LONGEST, "steps"),
                for_each("(room - peak) / (peak - start) * tokens", LONGEST, "steps"),  # what is left, not the whole
            ),
        ),
        Exercise(
            solution=KIND_OF.strip(),
            wrong=(
                'return "leak"',
                "pass",
                "return len(steps)",
                KIND_OF.strip().replace("0.05 * rise", "1"),
                # The same rule, but not against the whole rise: run D refuses it too.
                KIND_OF.strip().replace("0.05 * rise", "0.001 * starts[0]"),
            ),
        ),
    ],
    "10_weight_sync": [
        Exercise(
            solution=step("MemorySettings(offload_optimizer=True)"),
            wrong=(
                *NO_RECORDS,
                step("away.settings"),
                step("MemorySettings(offload_gradients=True)"),
                step("MemorySettings(offload_optimizer=True, offload_gradients=False)"),
                not_steady(step("MemorySettings(offload_optimizer=True)")),
                # The step itself does not leave only the weights on the device.
                'mine = resident; lab.offload("gradients", "optimizer state")',
                'mine = lab.step(MemorySettings()); lab.offload("gradients", "optimizer state")',
                'mine = lab.step(away.settings); lab.load("parameters")',
                # The right groups leave, and activations as well.
                step('MemorySettings(offload_optimizer=True, offload_modules=["expert_fc1"])'),
                step(f"MemorySettings(offload_optimizer=True, {FULL_RECOMPUTE})"),
            ),
            also_right=(
                step("MemorySettings(offload_optimizer=True, offload_gradients=True)"),
                step("MemorySettings(offload_optimizer=True, offload_optimizer_except_update=True)"),
            ),
        ),
        Exercise(
            solution="mine = [3 * 2 * buffer for buffer in buffers]",
            wrong=(
                # One direction only, without the offload's copy, the gradients as well, without the padding.
                "mine = [2 * buffer for buffer in buffers]",
                "mine = [2 * 2 * buffer for buffer in buffers]",
                "mine = [3 * 6 * buffer for buffer in buffers]",
                "mine = [3 * 2 * P for buffer in buffers]",
                "mine = 3 * 2 * buffer",
                "mine = [3 * 4 * buffer for buffer in buffers]",  # fp32
                "mine = [4 * 2 * buffer for buffer in buffers]",  # the broadcast as well
                "mine = [3 * 2 * buffer / 2**20 for buffer in buffers]",
                "mine = [3 * 2 * buffer for buffer in reversed(buffers)]",
                *NO_FORMULAS,
                "mine = [3 * 2 * buffers[0] for buffer in buffers]",  # a number, right for one model only
            ),
            also_right=(
                "mine = []\nfor buffer in buffers:\n    mine.append(6 * buffer)",
                "import numpy as np; mine = 6 * np.array(buffers)",
            ),
        ),
        Exercise(
            solution=SYNC.strip(),
            wrong=(
                "return 0.0",
                "trainer.hand_over(); return 0.0, 0.0",
                # The sync chooses what it is checked for.
                "trainer.is_offload_param = True\n" + SYNC.strip(),
            ),
        ),
    ],
    "07_full_size": [
        Exercise(
            solution=layout(tp=2, pp=2, dp=2),
            also_right=(
                'mine = Layout.from_text("TP2 PP4")',
                layout(tp=2, pp=2, context_parallel_size=2),
            ),
            wrong=(
                "mine = Layout(TP=2)",
                'mine = "TP2"',
                layout(dp=8),
                layout(tp=2, dp=8),  # it fits, on twice as many GPUs
                layout(tp=8),  # Megatron refuses it
                # The task allows neither of these.
                f'{layout(tp=2, dp=4)}; job = job | {{"settings": full_recompute}}',
                f'{layout(tp=2, dp=4)}; job = job | {{"settings": MemorySettings(offload_modules=["core_attn"])}}',
                # Its first stage fits, its second does not.
                layout(
                    tp=2,
                    pp=2,
                    dp=2,
                    num_layers_in_first_pipeline_stage=1,
                    num_layers_in_last_pipeline_stage=7,
                ),
                # Another job, or a larger GPU.
                f'{layout(tp=2, dp=4)}; job = job | {{"seq_length": 2048}}',
                f'{layout(tp=2, dp=4)}; job = job | {{"num_layers": 4}}',
                f'{layout(tp=2, dp=4)}; gpu_memory = "139GiB"',
                f'{layout(tp=2, dp=4)}; gpus = ["139GiB", "139GiB"]',
                (
                    "from memlab import TrainingState; "
                    f'{layout(tp=2, dp=4)}; job = job | {{"state": TrainingState(use_precision_aware_optimizer=True)}}'
                ),
                OtherLine(layout(tp=2, dp=4), "num_microbatches=4", "num_microbatches=1"),
                # One rank that fits, of a layout whose other stage does not fit.
                OtherLine(
                    layout(tp=2, pp=2, dp=2, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=7),
                    "**job)",
                    '**job)["rank-0"]',
                ),
                OtherLine(layout(tp=2, dp=4), "dense_architecture, mine", '"phi-4-mini", mine'),
            ),
        ),
        Exercise(
            solution=step(f"MemorySettings(offload_modules={list(ALL_MODULES)})"),
            also_right=(
                step(f"MemorySettings(offload_modules={tuple(ALL_MODULES)})"),
                step(
                    'MemorySettings(offload_modules=["qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act"])'
                ),
            ),
            wrong=(
                *NO_RECORDS,
                step('settings["offload-experts"]'),  # with skewed routing it is not enough
                step(f'MemorySettings(offload_modules={list(ALL_MODULES)}, checkpoint_input_remedy="detach")'),
                step('MemorySettings(offload_modules=["experts"])'),
                selective("moe"),
                step("full_recompute"),
                step('MemorySettings(offload_modules=["mlp_norm"])'),
                'mine = bought["offload-experts"]',  # with balanced routing
                not_steady(step("MemorySettings()")),
                shorter(step("MemorySettings()")),
                step("MemorySettings(offload_optimizer_except_update=True)"),
                in_state("use_precision_aware_optimizer=True"),
                OtherLine(step("MemorySettings()"), ', routing="skewed:3"', ""),
            ),
        ),
    ],
    "08_training_state": [
        Exercise(
            solution=state('**aware, exp_avg_dtype="fp8"'),
            also_right=(state('**aware, exp_avg_sq_dtype="fp16"'), state('**aware, exp_avg_dtype="bf16"')),
            wrong=(
                *(answer for answer in NO_RECORDS if "MemorySettings" not in answer),
                "mine = TrainingState(**aware)",
                state('**aware, exp_avg_dtype="bfloat16"'),
                "import torch; " + state("**aware, exp_avg_dtype=torch.bfloat16"),
                step("TrainingState(**aware)"),
                not_steady(state("**aware")),
                state("**aware"),
                state('**aware, exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16"'),
                state("**aware, optimizer_cpu_offload=True"),
                # Both moments stay in fp32.
                plus("offload_gradients=True", f"**aware, {TE_LOSS}"),
                plus("offload_gradients=True, " + FULL_RECOMPUTE, "**aware"),
                # The right moments, and something else as well.
                state(f'**aware, exp_avg_dtype="bf16", {TE_LOSS}'),
                plus(FULL_RECOMPUTE, '**aware, exp_avg_dtype="bf16"'),
                shorter(state('**aware, exp_avg_dtype="bf16"')),
            ),
        ),
        Exercise(
            solution=state('**aware, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"'),
            also_right=(
                plus("", f"**aware, {TE_LOSS}"),
                f"from dataclasses import replace\nmine = lab.step(state=replace(TrainingState(**aware), {TE_LOSS}))",
            ),
            wrong=(
                state(TE_LOSS),  # without the options of the exercise
                state('**aware, cross_entropy_fusion_impl="te"'),  # only cross_entropy_loss_fusion reads it
                state("**aware, cross_entropy_loss_fusion=True"),
                state("**aware, **bf16_moments"),
                state("**aware, apply_rope_fusion=True"),
                not_steady(state("**aware, manual_gc=True")),
                state('**aware, exp_avg_dtype="fp8"'),
                state('**aware, exp_avg_dtype="fp8", cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"'),
                state('**aware, fp8_format="hybrid", fp8_recipe="blockwise"'),
                state("**aware, optimizer_cpu_offload=True"),
                state(f"**aware, {TE_LOSS}, apply_rope_fusion=True"),  # one option too many
                f"lab.set_workload(seq_length=2048); {state('**aware')}",
                plus(FULL_RECOMPUTE, "**aware"),
                f"aware = aware | dict({TE_LOSS}, apply_rope_fusion=True); {state('**aware')}",
            ),
        ),
        Exercise(
            solution=state("optimizer_cpu_offload=True, optimizer_offload_fraction=0.5, manual_gc=True"),
            also_right=(
                "half_on_cpu = half_on_cpu | {'manual_gc': True}; " + state("**half_on_cpu"),
                (
                    "from dataclasses import replace; "
                    "mine = lab.step(state=replace(TrainingState(**half_on_cpu), manual_gc=True))"
                ),
            ),
            wrong=(
                state("optimizer_cpu_offload=True"),
                state("grad_reduce_in_bf16=True"),
                state("optimizer_cpu_offload=True, optimizer_offload_fraction=0.4"),
                state("**aware"),  # nothing is on the CPU
                state("optimizer_cpu_offload=True, optimizer_offload_fraction=0.55, manual_gc=True"),
                state("optimizer_cpu_offload=True, optimizer_offload_fraction=0.25"),
                state("**aware, optimizer_cpu_offload=True, optimizer_offload_fraction=0.25"),
                state("**aware, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5"),
                plus(FULL_RECOMPUTE, "**half_on_cpu, manual_gc=True"),
                # More than one option.
                state(f"**half_on_cpu, manual_gc=True, {TE_LOSS}"),
                state("**aware, **half_on_cpu, manual_gc=True"),
                shorter(state("**half_on_cpu, manual_gc=True")),
                # The exercise's own options, changed before the step.
                "half_on_cpu |= dict(manual_gc=True, use_precision_aware_optimizer=True); " + state("**half_on_cpu"),
            ),
        ),
    ],
    "09_ranks": [
        Exercise(
            solution=stages(1, 3),
            wrong=(
                stages(3, 1),
                stages(1, 1),
                OtherLine(stages(1, 3), "lab.step()", "lab.step(warm_up=False)"),
                # The stages as they are, or others, in another job.
                OtherLine(stages(2, 2), "num_microbatches=2 * num_ranks", "num_microbatches=1"),
                f'{stages(2, 2)}; job = job | {{"seq_length": 64}}',
                f'{stages(1, 1)}; job = job | {{"num_layers": 4}}',
                OtherLine(stages(2, 2), "lab.step()", "lab.step(full_recompute)"),
                OtherLine(stages(2, 2), "lab.step()", "lab.step().rank(1)"),
                OtherLine(stages(2, 2), "lab.step()", "lab.step(MemorySettings(offload_optimizer_except_update=True))"),
                "first_stage, last_stage = 1.0, 3.0",
            ),
            also_right=(
                "import numpy as np; first_stage, last_stage = np.array([1, 3])",
                "first_stage = num_layers // num_ranks - 1\nlast_stage = num_layers // num_ranks + 1",
            ),
        ),
        Exercise(
            solution=offload(*ALL_MODULES),
            also_right=(
                offload("qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act"),
                step(f"MemorySettings(offload_modules={tuple(ALL_MODULES)}, min_offloaded_tensor_size=1)"),
            ),
            wrong=(
                *NO_RECORDS,
                step("full_recompute"),
                offload("core_attn"),
                step(f"MemorySettings(offload_modules={list(ALL_MODULES)})"),  # all tensors are too small
                OtherLine(step("MemorySettings()"), "num_microbatches=2 * num_ranks", "num_microbatches=1"),
                OtherLine(step("MemorySettings()"), "**job", '**job | {"seq_length": 64}'),
                # It moves nothing that a micro-batch in flight keeps.
                step("MemorySettings(offload_optimizer_except_update=True)"),
            ),
        ),
        Exercise(
            solution=layout(tp=2, dp=2),
            wrong=(
                "mine = None",
                "mine = (2, 2)",
                layout(dp=4),
                layout(dp=8),
                layout(pp=4),
                layout(tp=2),
                layout(context_parallel_size=4),
                "mine = Layout()",
                f'{layout(dp=4)}; job = job | {{"num_layers": 4, "seq_length": 128}}',
                OtherLine(layout(dp=4), "lab.step()", "lab.step(full_recompute)"),
                OtherLine(layout(tp=2, dp=2), "num_microbatches=number", "num_microbatches=1"),
            ),
            also_right=(
                layout(tp=4),  # more ranks than query groups
                layout(tp=2, context_parallel_size=2),
                'mine = Layout.from_text("TP2 DP2")',
            ),
        ),
    ],
    "01_one_layer": [
        Exercise(
            solution=for_each("(6*h + 4 + 2*(a + 2*g)*d + 2*(a + g)*d + 8*d + 2*a*d) * t", DENSE_LETTERS),
            also_right=in_styles("(6*h + 4 + 6*a*d + 6*g*d + 8*d) * t", DENSE_LETTERS),
            wrong=(
                # Without what the slice holds, without the tables, without the output that linear_proj needs.
                for_each("(6*h + 4 + 2*(a + g)*d + 8*d + 2*a*d) * t", DENSE_LETTERS),
                for_each("(6*h + 4 + 2*(a + 2*g)*d + 2*(a + g)*d + 2*a*d) * t", DENSE_LETTERS),
                for_each("(6*h + 4 + 2*(a + 2*g)*d + 2*(a + g)*d + 8*d) * t", DENSE_LETTERS),
                # Right for the tiny model only: its width is that of its heads, and it has as many key-value heads.
                for_each("(6*h + 4 + 2*(g + 2*a)*d + 2*(a + g)*d + 8*d + 2*a*d) * t", DENSE_LETTERS),
                for_each("(6*h + 4 + 2*(a + 2*g)*d + 2*(a + g)*d + 8*d + 2*h) * t", DENSE_LETTERS),
                # Numbers of the tiny model in place of letters.
                for_each("(6*160 + 4 + 2*(a + 2*g)*d + 2*(a + g)*d + 8*d + 2*a*d) * t", DENSE_LETTERS),
                for_each("(6*h + 4 + 2*(a + 2*g)*d + 2*(a + g)*d + 8*d + 2*a*d) * 64", DENSE_LETTERS),
                for_each("(6*h + 30*d + 4 + 6*g*d + 8*d) * t", DENSE_LETTERS),
                for_each("(6*h + 4 + 6*a*d + 6*g*d + 8*d + a - 5) * t", DENSE_LETTERS),
                for_each("(6*h + f/140 + 6*a*d + 6*g*d + 8*d) * t", DENSE_LETTERS),
                for_each("6*h + 4 + 6*a*d + 6*g*d + 8*d", DENSE_LETTERS),  # per token
                for_each("(6*h + 4 + 6*a*d + 6*g*d + 8*d) * t / 2**10", DENSE_LETTERS),
                "mine = 803840",
                *NO_FORMULAS,
                "mine = [803840, 803840]",
            ),
        ),
        Exercise(
            solution=for_each("4 * one - 3 * (5 * E * t + 8 * E)", "one, t, E"),
            also_right=in_styles("one + 3 * (one - 5 * E * t - 8 * E)", "one, t, E"),
            wrong=tuple(
                for_each(formula, "one, t, E")
                for formula in (
                    "8 * one",
                    "4 * one",
                    "one",
                    "4 * one - 3 * 8 * E",
                    "4 * one - 4 * (5 * E * t + 8 * E)",
                    "3 * one - 2 * (5 * E * t + 8 * E)",  # a micro-batch too few
                    "5 * one - 4 * (5 * E * t + 8 * E)",
                    "8 * one - 7 * (5 * E * t + 8 * E)",  # all micro-batches
                    "(4 * one - 3 * (5 * E * t + 8 * E)) / 2**10",
                    "4 * one - 3 * (5 * E * t + 8) * E",
                    "4 * one - 120 * t - 192",  # right for eight experts only
                    # The map from tokens to rows is saved by each micro-batch.
                    "4 * one - 3 * (5 * E * t + 8 * E + 4 * (2 * E + 1) * t)",
                )
            ),
        ),
    ],
}
DENSE_ANSWERS = {
    "02_recompute": [
        Exercise(
            solution=block("num_layers - 1"), wrong=(selective("layernorm"), selective("mlp"), step("half.settings"))
        ),
        Exercise(solution=selective("mlp"), wrong=(selective("core_attn"),), also_right=(step("half.settings"),)),
        Exercise(
            solution=for_each("(2 * h + 4 + 6 * f) * t", MOE_LETTERS),
            wrong=(
                for_each("(4 * h + 8 + 6 * f) * t", MOE_LETTERS),
                for_each("(2 * h + 4 + 6 * f) * 256", MOE_LETTERS),
                'mine = by_hand["mlp"]',
            ),
        ),
    ],
    "05_moe_checkpoint_retention": [
        Exercise(
            solution=selective("mlp"),
            wrong=(step("MemorySettings()"), selective("layernorm"), selective("core_attn"), step("full.settings")),
        ),
        Exercise(
            solution=step('remedies["detach"].settings'),
            wrong=(step("full.settings"), step('remedies["release_storage"].settings')),
        ),
        Exercise(
            solution=for_each("4 * t * h * L // n * (E > 0)", RETAINED, "jobs"),
            wrong=(for_each("4 * t * h * L // n", RETAINED, "jobs"), for_each("0", RETAINED, "jobs")),
        ),
    ],
}
"""The same for the dense model, which has no residual, in labs whose exercises are others with it."""
SMALLER: dict[str, dict[str, Any]] = {
    "02_recompute": {"seq_length": 256},  # with two layers, a row of the first table would solve exercise 1
    "03_activation_offload": {"num_layers": 3, "seq_length": 128},  # of two layers, one is offloaded, which is too few
    "04_parameters_gradients_optimizer": {"num_layers": 2, "seq_length": 128},
    "05_moe_checkpoint_retention": {"num_layers": 4, "seq_length": 128},
    "06_phi4_activation_peak": {"num_layers": 2, "longest": 256},
    "10_weight_sync": {"num_layers": 2, "seq_length": 128},
    "07_full_size": {"num_layers": 8, "gpu_memory": "18GiB"},
    "08_training_state": {"num_layers": 1},
    "09_ranks": {"layouts": ["TP2"], "full_num_layers": 4},
    "01_one_layer": {
        "seq_length": 64,
        "full_seq_length": 64,
        "full_dense_architecture": "phi-4-tiny",
        "full_architecture": "qwen3-moe-tiny",
    },
}
"""Parameters with which a lab is quick and its exercises are what they are."""

FORMULAS = {
    "03_activation_offload": {"by_hand"},
    "07_full_size": {"by_hand", "counted"},
    "01_one_layer": {"dense_formula", "log_sum_exp", "moe_formula", "dispatcher"},
}
"""What the cells name that compare a formula with metered bytes: they are run too, though no answer needs them."""


class LabOfAnswers(Lab):
    """A lab that takes each step once: an answer that repeats a step of a cell, or another answer, gets its record.

    A step depends on no step before it, to the byte: tests/unit/test_lab.py, test_settings_live.py, test_state_change.py.
    """

    known: dict[object, StepRecord] = {}  # noqa: RUF012  # each test has its own

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._settings, self._state = self.settings, self.scenario.state

    def step(
        self, settings: MemorySettings | None = None, *, state: TrainingState | None = None, **options: Any
    ) -> StepRecord:
        if settings is not None:
            self._settings = settings
        if state is not None:
            self._state = state
        scenario = replace(self.scenario, state=self._state)
        key = self.backend.name, scenario, self._settings, self.device_memory_bytes, *sorted(options.items())
        if key not in self.known:
            self.known[key] = super().step(self._settings, state=self._state, **options)
        return self.known[key]

    @property
    def next_step(self) -> tuple[TrainingState, MemorySettings]:
        """What the next step has, unless it is given; a known step leaves the model as it is."""
        return self._state, self._settings

    @next_step.setter
    def next_step(self, state_and_settings: tuple[TrainingState, MemorySettings]) -> None:
        self._state, self._settings = state_and_settings

    @contextmanager
    def tap(self, layer: int, **options: Any) -> Iterator[Tap]:
        """Takes each step of the block, because a tap looks into it."""
        known, self.known = self.known, {}
        with super().tap(layer, **options) as tap:
            yield tap
        self.known = known


class LabOfAudits(Lab):
    """A lab whose audits take the step without offload once: it is the same in all of them (see `LabOfAnswers`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.known: dict[object, Any] = {}

    def audit_offload(self, settings: MemorySettings) -> OffloadAudit:
        scenario, default = self.scenario, MemorySettings()
        plain = replace(settings, offload_modules=None, min_offloaded_tensor_size=default.min_offloaded_tensor_size)
        take_step, count_saved = probes._finished_step, probes._saved_in_regions

        def step(session: OneProcess, of_step: MemorySettings) -> StepRecord:
            if of_step != plain:
                return take_step(session, of_step)
            return self.once((scenario, plain, "step"), lambda: take_step(session, plain))

        def saved(stepper: Stepper) -> SavedInRegions:
            return self.once((scenario, plain, "saved"), lambda: count_saved(stepper))

        with patch.object(probes, "_finished_step", step), patch.object(probes, "_saved_in_regions", saved):
            return super().audit_offload(settings)

    def once(self, key: object, find: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]


class PredictedJob:
    """In the place of a lab on live ranks, which takes minutes for the answers of one notebook: one rank of every kind,
    predicted.

    The live ranks of each layout are compared with their predictions in tests/unit/test_cpu_ranks.py, to the byte.
    """

    known: ClassVar[dict[str, StepRecord]] = {}

    def __init__(self, architecture: str, *, ranks: object, **job: Any) -> None:
        layout: Layout = job["layout"]
        # Under random routing all ranks differ, and where no experts are spread, none gets other rows than another one.
        routing = "random:7" if layout.expert_model_parallel_size > 1 else "balanced"
        self.scenario = Scenario.of(architecture, routing=routing, **job)
        if layout.num_layers_in_first_pipeline_stage == layout.num_layers_in_last_pipeline_stage == self.even_layers:
            layout = replace(layout, num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None)
        self.job = {"architecture": architecture, "routing": routing, **job, "layout": layout}

    @property
    def even_layers(self) -> int:
        """The layers of a stage if all have as many: stages that are said to have these are predicted once."""
        return self.scenario.num_layers // self.scenario.layout.pipeline_model_parallel_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def set_workload(self, **_: int) -> None:
        """No answer depends on the longer workload, which takes as long as all answers together."""

    def step(self, settings: MemorySettings | None = None, *, warm_up: bool = True) -> JobRecord:
        # The record of a live rank names no routing, because the router decides.
        live = [
            replace(
                record,
                scenario=replace(self.scenario, layout=replace(self.scenario.layout, rank=rank), routing=Routing()),
                is_steady=warm_up,  # no answer takes two steps
            )
            for rank, record in ((rank, self.predicted(rank, settings)) for rank in self.scenario.ranks_of_every_kind)
        ]
        return JobRecord.of(live)

    def predicted(self, rank: int, settings: MemorySettings | None) -> StepRecord:
        """Predicts a rank with as many micro-batches as it ever has in flight, or two.

        More repeat these. On a stage before the last, they add less than 0.4 MiB to the peak, which decides no answer.
        """
        layout = replace(self.scenario.layout, rank=rank)
        if self.scenario.routing == Routing():
            # Ranks of a stage have equally long chunks of the sequences, and so equal bytes.
            rank = layout.pipeline_stage * layout.ranks_of_a_stage
        in_flight = layout.pipeline_model_parallel_size - layout.pipeline_stage
        job = self.job | {"num_microbatches": min(self.scenario.num_microbatches, max(2, in_flight))}
        # All are values, whose repr names each field.
        key = repr((rank, sorted(job.items()), settings or MemorySettings()))
        if key not in self.known:
            (self.known[key],) = predict_ranks(settings=settings, ranks=[rank], **job).values()
        return self.known[key]


class PredictedOnce:
    """In the place of `predict_ranks`: an answer that repeats the prediction of another one gets its records."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, StepRecord]] = {}

    def __call__(self, *arguments: Any, **options: Any) -> dict[str, StepRecord]:
        key = repr((arguments, sorted(options.items())))  # all are values, whose repr names each field
        if key not in self._known:
            self._known[key] = predict_ranks(*arguments, **options)
        return self._known[key]


INSTEAD: dict[str, dict[str, Any]] = {"09_ranks": {"Lab": PredictedJob, "Ranks": MagicMock()}}
"""What a lab imports, and gets in this form instead."""
ONLY_STEPS = {"02_recompute", "05_moe_checkpoint_retention", "08_training_state", "01_one_layer"}
"""Labs whose answers and cells do nothing but steps, without a pass of another kind: they get a `LabOfAnswers`."""

pytestmark = pytest.mark.notebook


def exercises_of(lab: str) -> tuple[list[str], list[str]]:
    """Returns a lab's code cells up to its record, and its exercises."""
    cells = nbformat.read(LABS / f"{lab}.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    exercises = [cell.source for cell in code if "exercise" in cell.metadata.get("tags", [])]
    work = [cell.source for cell in code if not {"exercise", "record"} & set(cell.metadata.get("tags", []))]
    return work, exercises


def answered(exercise: str, answer: str | OtherLine) -> str:
    """Puts an answer in the place of the marked line."""
    if isinstance(answer, OtherLine):
        assert exercise.count(answer.line) == 1, answer
        return answered(exercise.replace(answer.line, answer.by), answer.answer)
    (marked,) = (line for line in exercise.splitlines() if line.endswith(MARK))
    return exercise.replace(marked, indent(answer, marked[: len(marked) - len(marked.lstrip())]))


def takes_older_answer(exercise: str, names: dict[str, Any]) -> bool:
    """Whether an exercise with a typo in the name of its answer is judged by the answer of an earlier run."""
    typo = re.sub(rf"^( *)[\w, =]+ = (?=.*{MARK}$)", r"\1misspelled = ", exercise, flags=re.MULTILINE)
    try:
        return typo != exercise and bool(value_of(typo, names))
    except (ValueError, AttributeError):  # the check or a line before it refuses the answer None
        return False


def cells_needed(work: list[str], answers: list[str], others: set[str]) -> list[str]:
    """Returns the cells that name what the answers use, or one of the others, directly or through other such cells."""
    used = {name for answer in answers for name in names_in(answer)[1]} | others
    needed: list[str] = []
    for cell in reversed(work):
        given, taken = names_in(cell)
        if given & used:
            used |= taken
            needed.insert(0, cell)
    return needed


def names_in(cell: str) -> tuple[set[str], set[str]]:
    """Returns the names that a cell gives to something, and those that it takes from other cells."""
    nodes = list(ast.walk(ast.parse(cell)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    given = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    given |= {node.name for node in nodes if isinstance(node, ast.alias)}
    return given, {name.id for name in names} - given


@contextmanager
def unchanged(lab: object) -> Iterator[None]:
    """Gives an open lab its workload, training state and settings back, which an answer may have changed."""
    if not isinstance(lab, Lab) or lab.closed:
        yield
        return
    seq_length, state, settings = lab.scenario.seq_length, lab.scenario.state, lab.settings
    if isinstance(lab, LabOfAnswers):
        state, settings = lab.next_step
    yield
    if lab.closed:  # an answer has opened another one
        return
    if lab.scenario.seq_length != seq_length:
        lab.set_workload(seq_length=seq_length)
    if isinstance(lab, LabOfAnswers):
        lab.next_step = state, settings
    else:
        if lab.scenario.state != state:
            lab.set_state(state)
        lab.apply(settings)


def value_of(cell: str, names: dict[str, Any]) -> object:
    """Runs a cell; returns the value of its last line, which a notebook would show."""
    *body, last = ast.parse(cell).body
    assert isinstance(last, ast.Expr), "an exercise ends with its check"
    exec(compile(ast.Module(body, []), "exercise", "exec"), names)  # noqa: S102  # the lab's own cell
    return eval(compile(ast.Expression(last.value), "exercise", "eval"), names)  # noqa: S307


def test_every_exercise_has_a_solution_and_wrong_answers_here() -> None:
    counts = {path.stem: len(exercises_of(path.stem)[1]) for path in sorted(LABS.glob("*.ipynb"))}
    assert {lab: count for lab, count in counts.items() if count} == {lab: len(all_) for lab, all_ in EXERCISES.items()}


def test_every_exercise_has_three_right_and_three_wrong_answers_and_all_together_a_hundred_of_each() -> None:
    # An exercise whose answer is a function has most of its answers in a quicker test.
    functions = {
        ("04_parameters_gradients_optimizer", 3): (OTHER_MOVES, WRONG_MOVES),
        ("06_phi4_activation_peak", 3): (OTHER_KINDS, WRONG_KINDS),
        ("10_weight_sync", 3): (OTHER_SYNCS, WRONG_SYNCS),
    }
    counts = {
        (lab, number): [len({each.solution, *each.also_right, *right}), len({*each.wrong, *wrong})]
        for lab, every in EXERCISES.items()
        for number, each in enumerate(every, start=1)
        for right, wrong in [functions.get((lab, number), ((), ()))]
    }
    assert {exercise: count for exercise, count in counts.items() if min(count) < 3} == {}
    assert all(sum(column) >= 100 for column in zip(*counts.values(), strict=True))


@pytest.mark.parametrize(
    ("lab", "every", "parameters", "shortened"),
    [
        *(pytest.param(lab, every, {}, False, id=lab, marks=pytest.mark.slow) for lab, every in EXERCISES.items()),
        *(
            pytest.param(lab, EXERCISES[lab], {}, True, id=f"{lab}-one wrong answer each")
            for lab in ("01_one_layer", "02_recompute", "04_parameters_gradients_optimizer", "10_weight_sync")
        ),
        *(
            pytest.param(lab, every, {"architecture": "phi-4-tiny"}, False, id=f"{lab}-dense", marks=pytest.mark.slow)
            for lab, every in DENSE_ANSWERS.items()
        ),
    ],
)
def test_a_solution_reaches_the_goal_and_no_wrong_answer_does(
    lab: str,
    every: list[Exercise],
    parameters: dict[str, str],
    shortened: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for figure in ("show", "compare"):
        monkeypatch.setattr(f"memlab.{figure}", MagicMock())  # drawing is tested elsewhere
    monkeypatch.setattr("memlab.predict_ranks", PredictedOnce())
    if lab in ONLY_STEPS:
        monkeypatch.setattr("memlab.Lab", LabOfAnswers)
        monkeypatch.setattr(LabOfAnswers, "known", {})
    elif lab == "03_activation_offload":
        monkeypatch.setattr("memlab.Lab", LabOfAudits)
    work, exercises = exercises_of(lab)
    answers = [
        (
            [exercise, *(answered(exercise, wrong) for wrong in each.wrong)],
            [answered(exercise, right) for right in (*each.also_right, each.solution)],
        )
        for exercise, each in zip(exercises, every, strict=True)
    ]
    names: dict[str, Any] = {"display": MagicMock()}  # IPython's, which every notebook has
    cells = [cell for wrong, right in answers for cell in (*wrong, *right)]
    needed = cells_needed(work, cells, FORMULAS.get(lab, set()))
    if shortened:
        answers = [(wrong[:2], right[-1:]) for wrong, right in answers]
    called = set(re.findall(r"\blab\.(\w+)\(", "\n".join(needed + cells)))
    assert lab not in ONLY_STEPS or {"step"} <= called <= {"step", "tap", "retained", "set_workload"}
    for source in needed:
        exec(source, names)  # noqa: S102  # the lab's own cells
        if source is work[0]:
            names |= SMALLER.get(lab, {}) | parameters
        names |= INSTEAD.get(lab, {})
    try:
        judge(answers, names, capsys)
    finally:
        if lab not in INSTEAD:
            names["lab"].close()


def judge(
    answers: list[tuple[list[str], list[str]]], names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Requires that each check refuses the wrong answers of its exercise, and accepts the right ones."""
    for wrong, right in answers:
        for cell in wrong:
            capsys.readouterr()
            with unchanged(names.get("lab")):  # an answer changes nothing for the next one
                outcome = value_of(cell, dict(names))
            assert isinstance(outcome, Goals)
            assert not outcome, f"this answer is wrong, and the check accepts it:\n{cell}"
            lines = capsys.readouterr().out.splitlines()
            assert [line.startswith("not yet: ") for line in lines] == [False] * (len(lines) - 1) + [True]
        known = dict(names)  # of one reader, who tries one answer after another
        for cell in right:
            assert value_of(cell, known), f"this is right, and the check refuses it:\n{cell}"
        assert not takes_older_answer(wrong[0], known), f"an answer of an earlier run is accepted:\n{wrong[0]}"
        for opened in known.values():
            if isinstance(opened, Lab) and opened is not names.get("lab"):
                opened.close()
