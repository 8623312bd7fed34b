"""Goals for the record of a step, and for a try that may be refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Self

from memlab.analysis.loss_tolerance import loss_tolerance
from memlab.config.layout import Layout
from memlab.config.scenario import Scenario
from memlab.config.settings import KEPT_ON_HOST, MemorySettings
from memlab.config.training_state import TrainingState
from memlab.config.validation import RuleError, shortened
from memlab.config.versions import Versions
from memlab.config.without_effect import of_state
from memlab.exercises.audits import ResidencyCheck
from memlab.exercises.goals import Goals, listed
from memlab.fitting.outside_torch import outside_torch_of
from memlab.record.job_record import JobRecord
from memlab.record.residency_audit import ResidencyAudit
from memlab.record.step_record import StepRecord
from memlab.record.transfer import GROUPS
from memlab.units import format_bytes, parse_bytes

_WITH_FIELDS = ("architecture", "layout", "state", "allocator")
"""Parts of a scenario whose own fields `Check.same_job_as` compares and names."""
_ALSO_OF_THE_SCENARIO = ("name", "num_layers", "default_seq_length")
"""Fields of an architecture for which a scenario has a name or a value of its own."""
_TRAINS_OTHER_WEIGHTS = ("lora", "num_labels", "freeze_moe_router", "moe_expert_capacity_factor", "mtp_num_layers")
"""Options of a training state that are another job: other weights are trained, or tokens miss their experts."""
_SETS_BACK = {"seq_length": "set_workload", "micro_batch_size": "set_workload", "num_microbatches": "set_workload"}
"""The method of an open `Lab` that changes a part of the workload, or gives it back its earlier value."""


class Check(Goals):
    """Goals for one record. Each returns the check, so that goals can be chained."""

    subject = "the record of a step"

    def __init__(self, record: StepRecord) -> None:
        super().__init__()
        self._record = record
        if record.status != "ok":
            self.goal(False, f"the step ended early ({record.message})", "change the settings so that the step ends")
        elif record.forward_only:
            self.goal(False, "the record is that of a forward-only pass, must be that of a training step")
        elif not record.is_steady:
            hint = (
                "take it again with lab.step(...) alone, which takes a warm-up step first: without warm_up=False, "
                "without a tap, and not right after a forward-only pass"
            )
            self.goal(False, "the step is not steady (no equal step came right before it), must be steady", hint)
        elif contradiction := _contradiction(record):
            self.goal(False, contradiction, "hand in the record as the step returned it")

    def peak_below(self, num_bytes: int, hint: str = "") -> Self:
        """Requires `peak_allocated_bytes` below a number of bytes.

        Args:
            hint: What to look at, in the words of the exercise; by default, the largest part of the peak. If a setting
                had no effect or works against the goal, the line says why instead.
        """
        now = self._record.peak_allocated_bytes
        hint = self._no_effect() or self._keeps_more(hint) or hint or self._largest()
        what = "the peak of the step"
        if isinstance(self._record, JobRecord):
            what = f"the highest peak, that of rank {self._record.worst_rank},"
        return self._below(what, now, num_bytes, hint)

    def activation_peak_below(self, num_bytes: int, hint: str = "") -> Self:
        """Requires `activation_peak_bytes` below a number of bytes; `hint` is as for `peak_below`."""
        hint = self._no_effect() or self._start_fell() or self._keeps_more(hint) or hint or self._largest()
        return self._below("the activation peak", self._record.activation_peak_bytes, num_bytes, hint)

    def fits(self, gpu_memory: str, hint: str = "") -> Self:
        """Requires `peak_allocated_bytes` below what a GPU of a size (``79GiB``) leaves for torch in this layout.

        Args:
            gpu_memory: Of the GPU, as `parse_bytes` reads it.
            hint: What to look at, in the words of the exercise; by default, that of `peak_below`.
        """
        scenario = self._record.scenario
        outside = outside_torch_of(scenario).total_bytes
        return self.peak_below(parse_bytes(gpu_memory) - outside, hint)

    def of_every_rank(self) -> Self:
        """Requires a record of every kind of rank of the job, because the worst of them decides."""
        record = self._record
        ranks = {each.scenario.layout.rank for each in (record.ranks if isinstance(record, JobRecord) else (record,))}
        missing = [str(rank) for rank in record.scenario.ranks_of_every_kind if rank not in ranks]
        if not missing:
            return self.goal(True, "there is a record of every kind of rank")
        what = f"the record of rank {listed(missing)} is missing, must be there: a job fits if its worst rank fits"
        return self.goal(False, what, "hand in the records of all ranks: change only the marked line")

    def runs_on(self, num_ranks: int) -> Self:
        """Requires a job of this many ranks, one per GPU."""
        world_size = self._record.scenario.layout.world_size
        if world_size == num_ranks:
            return self.goal(True, f"the job runs on {num_ranks} ranks")
        hint = (
            "each rank has a GPU of its own; the product of the tensor, context, pipeline and data parallel sizes is "
            "the number of ranks, and the parallel sizes of the experts use the same ranks"
        )
        return self.goal(False, f"the layout's number of ranks is {world_size}, must be {num_ranks}", hint)

    def same_job_as(self, other: StepRecord | Scenario, *but: str) -> Self:
        """Requires the job of another step: the same scenario in everything but the named parts.

        The rank is not compared if one of the records is that of a whole job, because a job's worst rank may be another
        one. If the number of micro-batches may change, the number of tokens per step may not. If the other is a record,
        both have the same backend: a prediction does not stand for a step that ran.

        Args:
            other: A record that the lab took before the exercise, or its scenario.
            *but: Parts that the exercise allows to change: fields of `Scenario`, such as ``layout`` or ``state``, or of
                its layout or its training state, such as ``exp_avg_dtype``.

        Raises:
            ValueError: If a scenario has no such part.
        """
        of_a_job = isinstance(self._record, JobRecord) or isinstance(other, JobRecord)
        scenario = other if isinstance(other, Scenario) else other.scenario
        mine, theirs = dict(_parts(self._record.scenario)), dict(_parts(scenario))
        if unknown := sorted(set(but) - {*mine, *_WITH_FIELDS}):
            raise ValueError(
                f"a scenario has no part {unknown[0]!r}, must be one of {', '.join(mine)}: name one of them"
            )
        may_differ = {*but, "rank"} if of_a_job else {*but}
        if "num_microbatches" not in but:
            may_differ.add("tokens_per_step")
        for name, (group, value) in mine.items():
            needed = theirs[name][1]
            if value != needed and not {name, group} & may_differ:
                hint = _keep(name, group, but, scenario)
                return self.goal(False, f"{name} is {_shown(value)}, must be {_shown(needed)}", hint)
        if isinstance(other, StepRecord) and self._record.backend != other.backend:
            what = f"the backend of the record is {self._record.backend!r}, must be {other.backend!r}"
            hint = "take the step with lab.step(...); if a prediction has closed the lab, run its cell again"
            return self.goal(False, what, hint)
        return self.goal(True, f"the job is the same{', except ' + listed(but) if but else ''}")

    def starts_below(self, num_bytes: int) -> Self:
        """Requires `static_bytes` below a number of bytes."""
        hint = "between steps the device holds parameters, gradients and optimizer state"
        return self._below("the start of the step", self._record.static_bytes, num_bytes, hint)

    def host_below(self, num_bytes: int, hint: str = "") -> Self:
        """Requires `host_bytes` below a number of bytes.

        Args:
            hint: What to look at, in the words of the exercise; by default, what the host holds.
        """
        hint = hint or "the host holds what is offloaded, and the state of parameters that the CPU updates"
        return self._below("the peak of the host", self._record.host_bytes, num_bytes, hint)

    def residual_is_zero(self, hint: str = "") -> Self:
        """Requires that nothing stays allocated after the step.

        Args:
            hint: What to look at, in the words of the exercise; by default, which checkpoints keep their inputs.
        """
        residual = self._record.residual_bytes
        if not residual:
            return self.goal(True, "the residual after the step is zero")
        hint = hint or (
            "an MoE layer whose router is recomputed keeps the checkpoint's input and its gradient: recompute a part "
            "without the router"
        )
        return self.goal(False, f"the residual after the step is {format_bytes(residual)}, must be zero", hint)

    def offloads_nothing(self) -> Self:
        """Requires that the step transferred no activation to the host, and left every tensor group on the device."""
        modules = ", ".join(self._record.offloaded_bytes_by_module)
        if modules:
            what = f"{modules} transferred activations to the host, must transfer none"
            return self.goal(False, what, "only recompute")
        if named := self._record.settings.offload_modules:
            what = f"the settings name {listed(named)} to offload, which had no effect, must name none"
            return self.goal(False, what, "only recompute")
        if self._leaving:
            return self._stays_on_device()
        return self.goal(True, "nothing was offloaded")

    def offloads_only_activations(self) -> Self:
        """Requires that parameters, gradients and optimizer state stay on the device, in the step and after it."""
        return self._stays_on_device()

    def leaves_on_device(self, *groups: str) -> Self:
        """Requires settings under which a step leaves these tensor groups on the device, and no other group.

        What ``lab.load`` and ``lab.offload`` did after the step does not count.
        """
        left = [group for group in GROUPS if group not in self._record.offloaded_bytes_by_group]
        if left == [group for group in GROUPS if group in groups]:
            return self.goal(True, f"the step itself leaves only {listed(groups)} on the device")
        what = f"the step itself leaves {listed(left) or 'none of the groups'} on the device"
        others = [group for group in left if group not in groups]
        gone = [group for group in groups if group not in left]
        hint = f"which setting offloads {listed(others)}?" if others else f"which setting offloaded {listed(gone)}?"
        return self.goal(False, f"{what}, must leave only {listed(groups)}", hint)

    def without_settings(self) -> Self:
        """Requires that no memory setting is set."""
        settings = f"{self._record.settings}"
        if settings == "none":
            return self.goal(True, "no memory setting is set")
        hint = "run lab.apply(MemorySettings()), because an open Lab keeps earlier settings, and leave new ones out"
        return self.goal(False, f"the memory settings are '{settings}', must be none", hint)

    def leaves_activations_alone(self) -> Self:
        """Requires settings that neither recompute nor offload activations."""
        settings = self._record.settings
        if settings.recompute_granularity is None and not settings.offload_modules:
            return self.goal(True, "no activation is recomputed or offloaded")
        what = f"the settings are '{settings}', must not recompute or offload activations"
        return self.goal(False, what, "choose only what is on the device between steps")

    def recomputes_less_than(self, num_bytes: int) -> Self:
        """Requires fewer recomputed bytes than a number; with 1, it requires that nothing is recomputed."""
        if num_bytes == 1:
            now = self._record.recomputed_bytes
            if not now:
                return self.goal(True, "backward recomputes nothing")
            what = f"backward recomputes {format_bytes(now)}, must recompute nothing"
            return self.goal(False, what, "leave recompute_granularity and recompute_modules out")
        hint = "recompute fewer modules or fewer layers"
        return self._below("what backward recomputes", self._record.recomputed_bytes, num_bytes, hint)

    def recomputes_more_than(self, num_bytes: int) -> Self:
        """Requires more recomputed bytes."""
        now = self._record.recomputed_bytes
        is_above = now > num_bytes
        what = (
            f"backward recomputes {format_bytes(now)}, {'' if is_above else 'must be '}above {format_bytes(num_bytes)}"
        )
        return self.goal(is_above, what, self._nothing_recomputed() or "set recompute_granularity")

    def recomputes_whole_layers(self) -> Self:
        """Requires ``recompute_granularity="full"`` on every layer."""
        settings, num_layers = self._record.settings, self._record.scenario.num_layers
        is_full = settings.recompute_granularity == "full"
        is_whole = is_full and (settings.recompute_method == "uniform" or settings.recompute_num_layers == num_layers)
        if is_whole:
            return self.goal(True, "every layer is recomputed as a whole")
        what = f"the settings are '{settings}', must recompute every layer as a whole"
        hint = "recompute_granularity is 'full', with the method 'uniform', or 'block' with all layers of the model"
        return self.goal(False, what, hint)

    def with_state(self, **options: object) -> Self:
        """Requires fields of `TrainingState`, each with the value that it must have."""
        state = self._record.scenario.state
        for name, needed in options.items():
            value = getattr(state, name)
            if value != needed:
                return self.goal(False, f"{name} is {value!r}, must be {needed!r}", f"write {name}={needed!r}")
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return self.goal(True, f"the training state has {given}")

    def adds_options_to(self, state: TrainingState, at_most: int) -> Self:
        """Requires a training state that differs from another one in at most so many options, and is no other job.

        Args:
            state: The training state that the exercise begins with.
            at_most: How many fields of `TrainingState` may have another value. A field that nothing reads without one
                of the others, such as ``cross_entropy_fusion_impl``, does not count.
        """
        mine = self._record.scenario.state
        added = [field.name for field in fields(state) if getattr(mine, field.name) != getattr(state, field.name)]
        if other := [name for name in added if name in _TRAINS_OTHER_WEIGHTS]:
            what = f"the job differs in {listed(other)}, must train the same weights with the same tokens"
            return self.goal(False, what, "add an option that only changes how a step is computed")
        idle = {other for name in added for other in _idle_in(mine, name, getattr(state, name))} - {*of_state(mine)}
        counted = [name for name in added if name not in idle]
        if len(counted) <= at_most:
            return self.goal(True, f"options that differ from those of the exercise: {listed(added) or 'none'}")
        named = f"{len(counted)} ({listed(counted)})"
        what = f"options that differ from those of the exercise: {named}, must be at most {at_most}"
        default = TrainingState()
        lost = [name for name in added if getattr(mine, name) == getattr(default, name)]
        hint = f"keep those of the exercise: {listed(lost)}" if lost else "leave out what the goals do not need"
        return self.goal(False, what, hint)

    def without_remedy(self) -> Self:
        """Requires that no remedy for the inputs of checkpoints is set."""
        remedy = self._record.settings.checkpoint_input_remedy
        if remedy is None:
            return self.goal(True, "checkpoint_input_remedy is not set")
        return self.goal(False, f"checkpoint_input_remedy is {remedy!r}, must be None", "leave the remedy out")

    def remedy_empties_no_storage(self) -> Self:
        """Requires a remedy for the inputs of checkpoints that empties no storage: something else may still read it."""
        remedy = self._record.settings.checkpoint_input_remedy
        if remedy is None:
            return self.goal(False, "checkpoint_input_remedy is None, must be a remedy", "compare the three remedies")
        if remedy != "release_storage":
            return self.goal(True, "a remedy is set, and it empties no storage")
        hint = "choose a remedy that drops a reference instead"
        what = "checkpoint_input_remedy is 'release_storage', which empties storages, must only drop references"
        return self.goal(False, what, hint)

    def moves(self, *modules: str) -> Self:
        """Requires that each of some offload modules transferred bytes to the host; if none is named, any module."""
        modules = modules or tuple(self._record.offloaded_bytes_by_module)
        if not modules:
            reason = self._nothing_moved() or "set offload_modules"
            return self.goal(False, "no activation was transferred to the host, must transfer some", reason)
        for module in modules:
            if not self._record.offloaded_bytes_by_module.get(module):
                reason = self._why_not_moved(module)
                same = [each for each in modules if self._why_not_moved(each) == reason]
                return self.goal(False, f"{listed(same)} transferred nothing to the host: {reason}")
        return self.goal(True, f"the saved tensors of {', '.join(modules)} were transferred to the host")

    def _why_not_moved(self, module: str) -> str:
        """Says why a module transferred nothing; empty if it transferred something."""
        if self._record.offloaded_bytes_by_module.get(module):
            return ""
        return self._record.without_effect.get(f"offload_modules:{module}", "not among offload_modules")

    def ranks_differ_by_less_than(self, num_bytes: int, hint: str = "") -> Self:
        """Requires that the highest and the lowest peak of a job's ranks are closer than a number of bytes.

        Args:
            hint: What to look at, in the words of the exercise; by default, the two ranks to compare. If a setting had
                no effect, the line says why instead.
        """
        if not isinstance(self._record, JobRecord):
            return self.goal(False, "the record is that of one rank, must be that of a job", "pass what lab.step gave")
        lowest = min(self._record.ranks, key=lambda record: record.peak_allocated_bytes).scenario.layout.rank
        worst = self._record.worst_rank
        of_ranks = f"compare rank({worst}).peak_by_category and rank({lowest}).peak_by_category of the record"
        hint = self._no_effect() or hint or of_ranks
        what = "the spread of the ranks' peaks"
        return self._below(what, self._record.spread_bytes, num_bytes, hint)

    def same_loss_as(self, other: StepRecord) -> Self:
        """Requires the loss of another step, to the last bit (or within `loss_tolerance`).

        The line says so where neither step computed a loss.
        """
        mine, theirs = self._record.loss, other.loss
        if other.status != "ok":
            return self.goal(False, f"the step to compare with ended early ({other.message})")
        if mine is None and theirs is None:
            return self.goal(True, f"nothing to compare, backend {self._record.backend!r} computes no loss")
        tolerance = loss_tolerance(self._record, other)
        if mine == theirs:
            return self.goal(True, "the loss is the same, to the last bit")
        if math.isclose(mine or 0.0, theirs or 0.0, rel_tol=tolerance):
            reason = (
                "megatron-core 0.19 sorts the experts of a router only where gradients are recorded, so in a "
                "checkpoint around the router, the softmax adds in another order"
            )
            return self.goal(True, f"the loss is the same within {tolerance:g} ({reason})")
        return self.goal(False, f"the loss is {mine!r}, must be {theirs!r}: a memory setting changes no number")

    def _below(self, what: str, now: int, goal: int, hint: str) -> Self:
        texts = format_bytes(now), format_bytes(goal)
        if len(set(texts)) == 1 and now != goal:  # they differ by less than the text shows
            texts = f"{now:,} bytes", f"{goal:,} bytes"
        if now < goal:
            return self.goal(True, f"{what} is {texts[0]}, below {texts[1]}")
        limit = f"must be below {texts[1]}" + ": it is as much" * (now == goal)
        return self.goal(False, f"{what} is {texts[0]}, {limit}", hint)

    @property
    def _leaving(self) -> list[str]:
        """The tensor groups that leave the device after the step, or already within it."""
        leaving = self._record.offloaded_bytes_by_group
        is_away = self._record.settings.offload_optimizer_except_update
        return [group for group in GROUPS if leaving.get(group) or (is_away and group == "optimizer state")]

    def _stays_on_device(self) -> Self:
        if not self._leaving:
            return self.goal(True, "parameters, gradients and optimizer state stay on the device")
        chosen = [name for name in KEPT_ON_HOST if getattr(self._record.settings, name)]
        what = f"{listed(self._leaving)} left the device, must stay there during the step and after it"
        why = ": offload_optimizer also sets offload_gradients" if set(KEPT_ON_HOST[1:3]) <= {*chosen} else ""
        return self.goal(False, what, f"leave {listed(chosen)} out{why}")

    def _no_effect(self) -> str:
        """Says why a setting had no effect; empty if none is set, or all had one."""
        return self._nothing_moved() or self._nothing_recomputed() or self._option_ignored()

    def _option_ignored(self) -> str:
        """Says why an option of the training state had no effect; empty if all had one."""
        options = {field.name for field in fields(TrainingState)}
        reasons = {name: why for name, why in self._record.without_effect.items() if name in options}
        return next((f"{name} had no effect: {why}" for name, why in reasons.items()), "")

    def _nothing_moved(self) -> str:
        """Says why no module transferred anything, if activation offload is on; empty if one did, or it is off."""
        modules = self._record.settings.offload_modules
        if not modules or self._record.offloaded_bytes_by_module:
            return ""
        reasons = [(each, self._record.without_effect.get(f"offload_modules:{each}", "")) for each in modules]
        # A limit can be lowered; a module that the model does not have can only be left out.
        small = [each for each in reasons if "min_offloaded_tensor_size" in each[1]]
        module, reason = (small or reasons)[0]
        return f"{module} transferred nothing to the host: {reason}" if reason else ""

    def _nothing_recomputed(self) -> str:
        """Says why backward recomputes nothing, if modules are recomputed that this model does not have."""
        if self._record.recomputed_bytes:
            return ""
        for module in self._record.settings.recompute_modules or ():
            if reason := self._record.without_effect.get(f"recompute_modules:{module}"):
                return f"recompute of {module} had no effect: {reason}"
        return ""

    def _keeps_more(self, hint: str) -> str:
        """Says that recompute of attention's core works against the goal, if it is recomputed as a single module.

        Args:
            hint: What else to do; empty if the exercise says nothing.
        """
        settings = self._record.settings
        if settings.recompute_granularity != "selective" or "core_attn" not in (settings.recompute_modules or ()):
            return ""
        why = "with fused attention, recompute of core_attn makes a layer keep more: leave it out"
        return f"{why}; {hint}" if hint else why

    def _start_fell(self) -> str:
        """Says why the activation peak rose, if parameters, gradients or optimizer state leave between steps."""
        if not self._record.offloaded_bytes_by_group:
            return ""
        return (
            "the activation peak counts from the start of the step; what leaves the device between steps lowers the "
            "start, but is back at the peak"
        )

    def _largest(self) -> str:
        categories = {
            name: size
            for name, size in self._record.peak_by_category.items()
            if name not in ("parameters", "gradients", "optimizer state", "workspace")
        }
        name, size = max(categories.items(), key=lambda item: item[1], default=("activations", 0))
        if size < self._record.peak_allocated_bytes / 100:
            return "at the peak, parameters, gradients, optimizer state and workspaces are more than 99 % of the memory"
        at = self._record.peak_phase
        phase = f" is in {'the ' * (at == 'optimizer')}{at};" if at else ":"
        return (
            f"the peak{phase} its largest part beside parameters, gradients, optimizer state and workspaces is "
            f"'{name}', {format_bytes(size)}"
        )


class Attempt:
    """A block in which the reader's answer is tried: ``with Attempt() as answer: answer.record = lab.step(...)``.

    An answer that the rules of Megatron or memlab refuse (a ValueError), or one of a wrong type or with a wrong name
    (a TypeError or an AttributeError), does not stop the notebook: ``check(answer)`` prints why.
    """

    def __init__(self) -> None:
        self.record: StepRecord | dict[str, StepRecord] | ResidencyAudit | None = None
        """The record, the records of ranks or the audit to check; the block sets it."""
        self.refusal = ""
        """Why the answer was refused; empty if it was not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, (TypeError, AttributeError)):
            self.refusal = f"{type(error).__name__}: {error}"
            if isinstance(error, AttributeError) and error.name == "data_parallel_size":  # a text is no layout
                self.refusal = f"layout is {shortened(error.obj)}, must be Layout(...)"
            option = re.search(r"Lab\.step\(\) got an unexpected keyword argument '(\w+)'", self.refusal)
            actions = _to_read_layout(error)
            actions += [action for part, action in _TO_PYTHON.items() if part in self.refusal]
            for options, otherwise in ((MemorySettings, _TO_SETTINGS), (TrainingState, _TO_STATE)):
                names = [field.name for field in fields(options)]
                name = re.search(rf"{options.__name__}\.__init__\(\) got an unexpected .* '(\w+)'", self.refusal)
                if name:
                    near = [each for each in names if name[1] in each] or get_close_matches(name[1], names, n=1)
                    written = " or ".join(f"{each}=..." for each in near[:3])
                    # Only Python knows whether the near name is among the other arguments already.
                    actions = actions or [f"write {written}, or leave {name[1]} out" if near else otherwise]
                for each in names:
                    # An option by its name, else the first whose name has that word.
                    if option and (option[1] == each or (f"_{option[1]}_" in f"_{each}_" and not actions)):
                        given = f"{options.__name__}({each}=...)"
                        actions = [f"write lab.step({'state=' * (options is TrainingState)}{given})"]
            if actions:
                self.refusal += f": {actions[0]}"
            elif place := _place_in_memlab(error):
                self.refusal += (
                    f" (raised in {place}, by no rule: if what you gave is of the right type, this is a fault of "
                    "memlab, so please report it)"
                )
        elif isinstance(error, ValueError):
            is_python_s = "values to unpack" in f"{error}"
            self.refusal = f"ValueError: {error}: {_TO_UNPACK}" if is_python_s else f"{error}"
        return bool(self.refusal)


def _to_read_layout(error: TypeError | AttributeError) -> list[str]:
    """Returns what to write if a layout's field was asked of a text that `Layout.from_text` reads; else nothing."""
    text = error.obj if isinstance(error, AttributeError) and error.name == "data_parallel_size" else None
    if not isinstance(text, str):
        return []
    try:
        Layout.from_text(text)
    except ValueError:
        return []
    return [f"write Layout.from_text({text!r})"]


_TO_LAYOUT = "name its fields, such as tensor_model_parallel_size=2, or write Layout.from_text('TP2 DP4')"
_TO_SETTINGS = "name its fields, such as recompute_granularity='full'"
_TO_STATE = "name its fields, such as grad_reduce_in_bf16=True"
_TO_UNPACK = "give as many values as there are names on the left of the '='"
_TO_PYTHON = {
    "cannot unpack non-iterable": _TO_UNPACK,
    "MemorySettings.__init__() takes 1 positional": _TO_SETTINGS,
    "Lab.step() takes from 1 to 2 positional": "name what follows the settings, such as state=TrainingState(...)",
    "for |: 'MemorySettings'": "write dataclasses.replace(settings, option=value)",
    "FrozenInstanceError: cannot assign": "write dataclasses.replace(settings, option=value), which gives new settings",
    "Residency.offload() got an unexpected keyword": "give the names of groups, such as lab.offload('gradients')",
    "got multiple values for keyword argument": "give it once, and leave it out of the other arguments",
    "Layout.__init__() got an unexpected keyword": _TO_LAYOUT,
    "Layout.__init__() takes 1 positional": _TO_LAYOUT,
    "must be Layout(...)": _TO_LAYOUT,
    "'fine_grained_activation_offloading'": "leave it out: offload_modules alone switches activation offload on",
    **{
        f"Lab.step() got an unexpected keyword argument '{part}'": f"leave {part} out, or call lab.{setter}({part}=...)"
        for part, setter in _SETS_BACK.items()
    },
}
"""What to do about an error of Python's, by a part of its text."""


def _place_in_memlab(error: BaseException) -> str:
    """Returns where memlab's own code failed; empty if the reader's lines did, or if it says that a name is wrong."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or at.tb_frame.f_code.co_name == "__getattr__":
        return ""
    module = str(at.tb_frame.f_globals.get("__name__"))
    return f"{module}, line {at.tb_lineno}" if module.startswith(f"{__name__.partition('.')[0]}.") else ""


class RefusedCheck(Goals):
    """The goals for an answer that was refused: one line says why, and none of the goals is checked."""

    def __init__(self, refusal: str) -> None:
        super().__init__()
        self.goal(False, f"this answer is refused: {refusal}")

    def __getattr__(self, goal: str) -> Callable[..., Self]:
        if not (hasattr(Check, goal) or hasattr(ResidencyCheck, goal)):
            raise AttributeError(f"a check has no goal {goal!r}")
        return lambda *_arguments, **_options: self


def _contradiction(record: StepRecord) -> str:
    """Says which field of a record contradicts its settings or its timeline; empty if none does."""
    named = record.settings.offload_modules or ()
    if unnamed := [name for name in record.offloaded_bytes_by_module if name not in named]:
        return f"the record says that {unnamed[0]} was offloaded, but its settings do not name {unnamed[0]}"
    if record.timeline is None:
        parts = sum(record.peak_by_category.values())
        return _differs("peak_allocated_bytes", record.peak_allocated_bytes, "the sum of its categories", parts)
    untraced = ("scenario", "settings", "backend", "versions", "step_index", "residual_bytes")
    traced = StepRecord.from_timeline(record.timeline, **{name: getattr(record, name) for name in untraced})
    of_timeline = {name: getattr(traced, name) for name in _TRACED}
    of_timeline["residual_bytes"] = sum(record.residual_by_module.values())
    differences = (_differs(name, getattr(record, name), "its timeline", of_timeline[name]) for name in of_timeline)
    return next(filter(None, differences), "")


_TRACED = ("static_bytes", "peak_allocated_bytes", "activation_peak_bytes", "host_bytes", "recomputed_bytes")
"""The numbers of a record that goals ask for, and that its timeline has too."""


def _differs(name: str, mine: int, source: str, theirs: int) -> str:
    return f"{name} of the record is {mine:,}, but {theirs:,} by {source}" if mine != theirs else ""


def _idle_in(state: TrainingState, name: str, value: object) -> set[str]:
    """Returns the other options of a state that do nothing, or are refused, if one has another value."""
    try:
        idle = {*of_state(replace(state, **{name: value}))}  # type: ignore[arg-type]  # the value of another state
    except RuleError as error:
        idle = {*error.fields[:1]}
    return idle - {name}


def _parts(scenario: Scenario) -> Iterator[tuple[str, tuple[str, object]]]:
    """Yields the comparable parts of a scenario: the name of each, the part that it belongs to, and its value."""
    for field in fields(scenario):
        value = getattr(scenario, field.name)
        if field.name == "architecture":
            yield field.name, (field.name, value.name)
        if field.name in _WITH_FIELDS:
            names = [own.name for own in fields(value) if own.name not in _ALSO_OF_THE_SCENARIO]
            yield from ((name, (field.name, getattr(value, name))) for name in names)
        else:
            yield field.name, (field.name, value)
    yield "tokens_per_step", ("", scenario.tokens_per_step)


def _shown(value: object) -> str:
    if isinstance(value, Versions):
        return value.words("megatron")  # which runs all of them
    return repr(value) if value is None or isinstance(value, (str, bool, int, float)) else f"{value}"


def _keep(name: str, group: str, but: Sequence[str], needed: Scenario) -> str:
    """Says what to do about a part of the job that an answer changed, but must not change."""
    in_words = {"state": "the training state", "layout": "the layout"}
    only = f"change only {listed([in_words.get(part, part) for part in but]) or 'the memory settings'}"
    if group == "state":
        options = ", ".join(f"{option}={value!r}" for option, value in needed.state.changed().items())
        back = f"set_state(TrainingState({options}))"
    elif name in _SETS_BACK:
        back = f"{_SETS_BACK[name]}({name}={getattr(needed, name)!r})"
    else:
        return only
    return f"{only}; an open Lab keeps an earlier change until lab.{back} changes it back"
