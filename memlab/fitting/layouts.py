"""Layouts of a job on a number of GPUs: which Megatron accepts, which cannot fit, and which fit with the least work.

The sequences of a step stay as many in every layout: num_microbatches x data_parallel_size is constant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from memlab.config.layout import Layout
from memlab.config.routing import Routing
from memlab.config.scenario import Scenario
from memlab.config.settings import MemorySettings
from memlab.fitting.candidates import added_offload, candidates
from memlab.fitting.does_it_fit import VERDICTS, Verdict, basis_of, verdict_margin
from memlab.fitting.interrupted import Interrupted
from memlab.fitting.least_peak import least_peak_bytes, least_peak_with
from memlab.fitting.outside_torch import outside_torch_of_every_stage
from memlab.fitting.peak_range import PeakRange
from memlab.fitting.prediction import Prediction, PredictionLostError
from memlab.fitting.recompute_cost import recomputed_operations
from memlab.units import format_bytes

SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
"""What is varied. Experts are not split by tensor parallelism unless a flag says so, as NeMo-RL and ms-swift do it."""
MOST_TENSOR_RANKS = 8
"""Tensor parallelism stays within a node of eight GPUs."""
_FULL = MemorySettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingLayout:
    """A layout, and the setting that recomputes the least of those with which it fits."""

    layout: Layout
    num_microbatches: int
    settings: MemorySettings
    verdict: Verdict
    rank: int
    """The worst of its ranks."""
    peak_allocated_bytes: int
    peak_range: PeakRange
    """Both ends of the highest peak."""
    margin_bytes: int
    """What is left for torch at that peak."""
    outside_torch_bytes: int
    """Estimated."""
    recomputed_share: float
    """Of the forward FLOPs of the layers."""
    transferred_bytes: int
    """To the host, and back again, in a step."""
    communicated_bytes: dict[str, int]
    """What the worst rank sends to others in a step, by kind of collective."""

    @property
    def cost(self) -> tuple[float, int, int, int, int]:
        """What comes first costs less: recompute, then ranks that exchange activations, then memory left."""
        layout = self.layout
        splits = layout.tensor_model_parallel_size * layout.context_parallel_size * layout.pipeline_model_parallel_size
        sure = VERDICTS.index(self.verdict)
        return self.recomputed_share, sure, splits, layout.expert_model_parallel_size, -self.margin_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutSearch:
    """What was found."""

    scenario: Scenario
    """With data parallelism alone."""
    base: MemorySettings
    gpu_memory_bytes: int
    fitting: tuple[FittingLayout, ...]
    """The cheapest first."""
    num_layouts: int
    """That Megatron accepts."""
    num_too_large: int
    """Whose parameters, gradients, optimizer state and logits alone do not fit: no step was predicted."""
    num_not_fitting: int
    """Predicted, and with no recompute that was tried does a step fit."""
    num_no_better: int
    """Not predicted: another layout with sizes that are no larger fits without recompute."""
    num_left: int = 0
    """Not tried, because the search was cut short."""

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        memory = f"{self.scenario.layout.world_size} GPUs of {format_bytes(self.gpu_memory_bytes)}"
        if not self.fitting:
            nothing = "nothing that was tried fits" if self.num_left else "no layout fits"
            return f"{nothing} {memory}: take more GPUs, another training state, or a smaller micro-batch"
        best = self.fitting[0]
        limit_bytes = best.peak_allocated_bytes + best.margin_bytes
        margin = verdict_margin(best.verdict, limit_bytes, best.peak_range)
        return (
            f"{best.layout} with '{best.settings}' {best.verdict} {memory}{margin}; based on {basis_of(self.scenario)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        values = {name: getattr(self, name) for name in ("verdict", *self.__slots__)}
        fitting = [
            asdict(one) | {"settings": one.settings.to_dict(), "peak_range": one.peak_range.to_dict()}
            for one in self.fitting
        ]
        return values | {"scenario": self.scenario.to_dict(), "base": self.base.to_dict(), "fitting": fitting}


class LayoutSearchInterrupted(Interrupted[LayoutSearch]):
    """The end of a search through layouts."""


def layouts_of(job: Scenario, given: dict[str, int]) -> list[Scenario]:
    """Lists the layouts that Megatron accepts, the one with the fewest ranks that exchange activations first.

    Args:
        job: With data parallelism alone.
        given: Sizes that are not varied, and whether sequences are split (``sequence_parallel``).
    """
    num_gpus = job.layout.world_size
    found: list[Scenario] = []
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    choices = [[given[name]] if name in given else sizes for name in SIZES]
    for tensor in choices[0]:
        for context in choices[1]:
            for pipeline in choices[2]:
                split = tensor * context * pipeline
                if num_gpus % split or (tensor > MOST_TENSOR_RANKS and SIZES[0] not in given):
                    continue
                for expert in choices[3]:
                    values: dict[str, Any] = {SIZES[0]: tensor, SIZES[1]: context, SIZES[2]: pipeline, SIZES[3]: expert}
                    if job.architecture.is_divided_by("expert_tensor_parallel_size"):
                        values["expert_tensor_parallel_size"] = given.get("expert_tensor_parallel_size", 1)
                    if "sequence_parallel" in given:
                        values["sequence_parallel"] = given["sequence_parallel"]
                    try:
                        layout = Layout(**values, data_parallel_size=num_gpus // split)
                        found.append(replace(job, layout=layout, num_microbatches=job.num_microbatches * split))
                    except ValueError:
                        continue  # one of Megatron's rules
    return sorted(found, key=_order)


def _order(job: Scenario) -> tuple[int, ...]:
    sizes = [getattr(job.layout, name) for name in SIZES]
    return sizes[0] * sizes[1] * sizes[2], sizes[3], *sizes


def deciding_ranks(job: Scenario) -> list[Scenario]:
    """Returns the job on one rank of each kind, without those of which another one certainly needs more.

    A pipeline stage between the first and the last has as many layers as the first, keeps the activations of fewer
    micro-batches, and has no embedding. It needs less than the first stage if the embedding's parameters and gradients
    are larger than what it holds in addition: what it receives from the next stage and sends to the one before. With
    adapters it may need more, since the first stage keeps nothing of its layers before the first adapter.
    """
    layout, model = job.layout, job.architecture
    last = layout.pipeline_model_parallel_size - 1
    embedding = model.vocab_size * model.hidden_size // layout.tensor_model_parallel_size * 4
    exchanged = 4 * 4 * job.tokens_of_rank * model.hidden_size
    are_alike = layout.virtual_pipeline_model_parallel_size == 1 and job.routing == Routing()
    are_even = len({layout.layers_of_stage(stage, job.num_layers) for stage in range(last + 1)}) == 1
    ranks = [replace(job, layout=replace(layout, rank=rank)) for rank in job.ranks_of_every_kind]
    if not (are_alike and are_even and embedding > exchanged) or job.state.lora is not None:
        return ranks
    return [rank for rank in ranks if rank.layout.pipeline_stage in (0, last)]


class Step(NamedTuple):
    """A step to predict: on a rank, under settings, judged by what its layout leaves to torch."""

    rank: Scenario
    settings: MemorySettings
    limit_bytes: int


Known = Callable[[Step], Prediction | None]
"""Returns a prediction that has already been made, or None."""


def search_layouts(
    job: Scenario,
    given: dict[str, int],
    base: MemorySettings,
    gpu_memory_bytes: int,
    predict: Callable[[Step], Prediction],
    *,
    is_allowed: Callable[[MemorySettings], bool] = lambda settings: True,
    on_layout: Callable[[Scenario, FittingLayout | None, int], object] = lambda job, found, num_left: None,
    look_ahead: Callable[[Callable[[Known], Iterator[Step]]], object] = lambda likely: None,
) -> LayoutSearch:
    """Finds for each layout the setting with the least recompute with which it fits.

    Args:
        job: With data parallelism alone; it says how many GPUs and how many sequences per step there are.
        given: Sizes that are not varied.
        base: What each setting does at least.
        is_allowed: Says which settings may be proposed; the base is always tried.
        on_layout: Called with each layout that was predicted, what was found, and how many may follow.
        look_ahead: Called once, before the first step, with a function that says at any moment which steps of the
            layouts that follow will probably be asked for, given what is known of them. Steps that are predicted ahead
            never change the result.

    Raises:
        LayoutSearchInterrupted: At Ctrl-C or `PredictionLostError`, with what was found until then.
    """
    every = layouts_of(job, given)
    limits = [gpu_memory_bytes - _outside_torch_bytes(one) for one in every]
    searches = [(one, limit) for one, limit in zip(every, limits, strict=True) if least_peak_bytes(one, base) <= limit]
    num_too_large = len(every) - len(searches)
    left, places = deque(_surest_first(searches, base)), {one.layout: place for place, one in enumerate(every)}
    fitting: list[FittingLayout] = []
    not_fitting: list[Scenario] = []

    def found() -> LayoutSearch:
        return LayoutSearch(
            scenario=job,
            base=base,
            gpu_memory_bytes=gpu_memory_bytes,
            fitting=tuple(sorted(fitting, key=lambda one: (one.cost, places[one.layout]))),
            num_layouts=len(every),
            num_too_large=num_too_large,
            num_not_fitting=len(not_fitting),
            num_no_better=len(searches) - len(left) - len(fitting) - len(not_fitting),
            num_left=len(left),
        )

    def might_be_better(one: Scenario) -> bool:
        return not any(_is_no_larger(other, one.layout, base) for other in fitting)

    def likely(known: Known) -> Iterator[Step]:
        following = [each for each in islice(left, 1, None) if might_be_better(each[0])]
        searched = (_least_recompute(one, base, limit, is_allowed) for one, limit in following)
        first_unknown = (_first_unknown(search, known) for search in searched)
        return (step for step in first_unknown if step is not None)

    look_ahead(likely)
    try:
        while left:
            one, limit_bytes = left[0]
            if might_be_better(one):
                fits = _answered(_least_recompute(one, base, limit_bytes, is_allowed), predict)
                if fits is None:
                    not_fitting.append(one)
                else:
                    # The first one was tried before those that are no larger.
                    fitting[:] = [each for each in fitting if not _is_no_larger(fits, each.layout, base)]
                    not_fitting[:] = [each for each in not_fitting if not _is_no_larger(fits, each.layout, base)]
                    fitting.append(fits)
                on_layout(one, fits, sum(might_be_better(each) for each, _ in islice(left, 1, None)))
            left.popleft()
    except (KeyboardInterrupt, PredictionLostError) as interrupt:
        raise LayoutSearchInterrupted(found()) from interrupt
    return found()


def _surest_first(searches: list[tuple[Scenario, int]], base: MemorySettings) -> list[tuple[Scenario, int]]:
    """Puts first a layout that is likely to fit and quick to predict, so that there is an answer soon.

    The result does not depend on it. Tensor and context parallelism divide the activations. The ranks of tensor
    parallelism need equally much, so fewer of them have to be predicted.
    """

    def chance(search: tuple[Scenario, int]) -> tuple[int, ...]:
        one, limit_bytes = search
        tensor, context, pipeline, _ = (getattr(one.layout, name) for name in SIZES)
        left_bytes = limit_bytes - least_peak_bytes(one, base)
        return min(tensor * context, MOST_TENSOR_RANKS), tensor, -context * pipeline, left_bytes

    first = max(searches, key=chance, default=None)
    return [*(each for each in searches if each is first), *(each for each in searches if each is not first)]


def _outside_torch_bytes(job: Scenario) -> int:
    return outside_torch_of_every_stage(job).total_bytes


def _is_no_larger(other: FittingLayout, layout: Layout, base: MemorySettings) -> bool:
    is_plain = other.settings == base and other.verdict == "fits"
    return is_plain and all(getattr(other.layout, name) <= getattr(layout, name) for name in SIZES)


_Search = Generator[Step, Prediction, FittingLayout | None]
"""Of one layout: yields each step that it needs, is sent its prediction, and returns what it found."""


def _answered(search: _Search, predict: Callable[[Step], Prediction]) -> FittingLayout | None:
    try:
        step = next(search)
        while True:
            step = search.send(predict(step))
    except StopIteration as end:
        found: FittingLayout | None = end.value
        return found


def _first_unknown(search: _Search, known: Known) -> Step | None:
    """Returns the first step of a search that has no prediction yet; None if it has come to its end."""
    try:
        step = next(search)
        while (prediction := known(step)) is not None:
            step = search.send(prediction)
    except StopIteration:
        return None
    return step


def _least_recompute(
    job: Scenario, base: MemorySettings, limit_bytes: int, is_allowed: Callable[[MemorySettings], bool]
) -> _Search:
    """Goes from the base to the most recompute, the least first, until all ranks fit.

    One rank that does not fit decides, so the rank that was the last one not to fit is asked first. What cannot fit by
    `least_peak_with` is left out. Where it says nothing, the most recompute is tried on a rank that does not fit for
    the first time: if that does not help, nothing does.
    """
    ranks = deciding_ranks(job)
    left = deque(one for one in _settings_to_try(base, tuple(ranks)) if one == base or is_allowed(one))
    most_recompute = left[-1]
    are_helped: set[int] = set()
    at_peak: Mapping[str, int] = {}
    while left:
        settings = left.popleft()
        predictions: list[Prediction] = []
        for rank in ranks:
            prediction = yield Step(rank, settings, limit_bytes)
            if prediction.fits:
                predictions.append(prediction)
                continue
            if settings == base and prediction.peak_range.is_exact:
                at_peak = prediction.requested_at_peak
                left = deque(one for one in left if least_peak_with(one, at_peak) <= limit_bytes)
            if left and not at_peak and rank.layout.rank not in are_helped:
                most = yield Step(rank, most_recompute, limit_bytes)
                if not most.fits:
                    return None
                are_helped.add(rank.layout.rank)
            ranks = [rank, *(other for other in ranks if other is not rank)]
            break
        else:
            worst = max(predictions, key=lambda one: (VERDICTS.index(one.verdict), one.peak_allocated_bytes, -one.rank))
            peak = max(one.peak_allocated_bytes for one in predictions)
            return FittingLayout(
                layout=job.layout,
                num_microbatches=job.num_microbatches,
                settings=settings,
                verdict=worst.verdict,
                rank=worst.rank,
                peak_allocated_bytes=peak,
                peak_range=max(predictions, key=lambda one: one.peak_allocated_bytes).peak_range,
                margin_bytes=limit_bytes - peak,
                outside_torch_bytes=_outside_torch_bytes(job),
                recomputed_share=recomputed_operations(settings, job) / recomputed_operations(_FULL, job),
                transferred_bytes=max(one.transferred_bytes for one in predictions),
                communicated_bytes=dict(worst.communicated_bytes),
            )
    return None


@lru_cache(maxsize=256)  # steps that are predicted ahead begin the search of a layout several times
def _settings_to_try(base: MemorySettings, ranks: tuple[Scenario, ...]) -> tuple[MemorySettings, ...]:
    return base, *_recomputes(base, ranks)


def _recomputes(base: MemorySettings, ranks: Sequence[Scenario]) -> Iterator[MemorySettings]:
    """Yields the base with one module recomputed, and with all layers, by the FLOPs that they recompute.

    Of all layers, about as many are in a checkpoint as there are checkpoints, which keeps the least.
    """
    every = candidates(base, ranks[0], depth=1)
    for rank in ranks[1:]:
        of_rank = set(candidates(base, rank, depth=1))
        every = [settings for settings in every if settings in of_rank]
    more = [settings for settings in every if settings != base and not added_offload(settings, base)]
    num_layers = min(rank.num_layers_of_chunk for rank in ranks)
    for settings in sorted(more, key=lambda settings: recomputed_operations(settings, ranks[0])):
        if settings.recompute_method == "uniform":
            counts = [count for count in range(1, num_layers + 1) if num_layers % count == 0]
            yield replace(settings, recompute_num_layers=min(counts, key=lambda count: count + num_layers // count))
        else:
            yield settings
