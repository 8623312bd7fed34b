"""Attention as one kernel computes it: what a GPU's kernel keeps on chip is made inside `one_kernel`, and freed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memlab.meter.labels import one_kernel


@one_kernel()
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropped: Dropped | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output [sequence, batch, heads, channels] and log-sum-exp [batch, heads, sequence].

    Args:
        query: Shape [sequence, batch, heads, channels].
        key: The same, of as many or fewer heads.
        dropped: The dropout of probabilities.
        causal: Whether a query sees only the keys up to its own place.
        window: How many keys before its own place a query sees; None is all.
        sinks: A further score of each head, which has no value; fp32 [1, heads, 1, 1].
    """
    if _is_written_out(query, dropped, window, sinks):
        query, key, value = _heads_first(query, key, value)
        probabilities, log_sums = _probabilities(query, key, scale, window, sinks)
        output = (probabilities if dropped is None else probabilities * dropped.factors(probabilities)) @ value.float()
        return output.to(query.dtype).permute(2, 0, 1, 3).contiguous(), log_sums
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(query, key, _padded(value, query)), 0.0, causal, scale=scale
    )
    return output[..., : value.shape[-1]].permute(2, 0, 1, 3).contiguous(), log_sum_exp.contiguous()


def _is_written_out(
    query: torch.Tensor, dropped: Dropped | None, window: int | None, sinks: torch.Tensor | None
) -> bool:
    """Whether probabilities are computed here: torch's own kernel has none of the three. Sizes do not depend on it."""
    return dropped is not None or (not query.is_meta and (window is not None or sinks is not None))


@one_kernel()
def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scale: float,
    dropped: Dropped | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of query, key and value, and of the sinks if there are any."""
    groups = query.shape[2] // key.shape[2]
    is_written_out = _is_written_out(query, dropped, window, sinks)
    grads_of_sinks = [] if sinks is None else [torch.empty_like(sinks)]
    of_heads = _heads_first(query, key, value if is_written_out else _padded(value, query))
    if is_written_out:
        grad_heads = grad.view(output.shape).permute(1, 2, 0, 3)
        written_out = _backward_written_out(grad_heads, *of_heads, scale, dropped, window, sinks)
        grad_query, *grads_of_groups = written_out[:3]
        grads_of_sinks = [*written_out[3:]]
    else:
        grad_query, *grads_of_groups = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _padded(grad.view(output.shape), query).permute(1, 2, 0, 3),
            *of_heads,
            _padded(output, query).permute(1, 2, 0, 3),
            log_sum_exp,
            0.0,
            causal,
            scale=scale,
        )
    grad_key, grad_value = (
        part.unflatten(1, (-1, groups)).float().sum(2).to(part.dtype).permute(2, 0, 1, 3).contiguous()
        for part in grads_of_groups
    )
    grad_value = grad_value[..., : value.shape[-1]].contiguous()
    return grad_query.permute(2, 0, 1, 3).contiguous(), grad_key, grad_value, *grads_of_sinks


def _backward_written_out(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    dropped: Dropped | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    probabilities, log_sums = _probabilities(query, key, scale, window, sinks)
    kept = probabilities if dropped is None else probabilities * dropped.factors(probabilities)
    grad_value = kept.transpose(2, 3) @ grad.float()
    of_scores = kept * (grad.float() @ value.float().transpose(2, 3))
    of_rows = of_scores.sum(-1, keepdim=True)
    of_scores -= probabilities * of_rows
    grads = of_scores @ key.float() * scale, of_scores.transpose(2, 3) @ query.float() * scale, grad_value
    of_sinks = [] if sinks is None else [-((sinks - log_sums.unsqueeze(-1)).exp() * of_rows).sum((0, 2), keepdim=True)]
    return *(part.to(query.dtype) for part in grads), *of_sinks


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, scale: float, window: int | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns causal probabilities [batch, heads, sequence, sequence] and their log-sum-exp, both in fp32."""
    scores = query.float() @ key.float().transpose(2, 3) * scale
    seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(-window)
    log_sum_exp = scores.masked_fill_(~seen, -torch.inf).logsumexp(-1)
    if sinks is not None:
        log_sum_exp = torch.logaddexp(log_sum_exp, sinks.squeeze(-1))
    return (scores - log_sum_exp.unsqueeze(-1)).exp(), log_sum_exp


def _heads_first(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = query.shape[2] // key.shape[2]
    return (
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3).repeat_interleave(groups, dim=1),
        value.permute(1, 2, 0, 3).repeat_interleave(groups, dim=1),
    )


def _padded(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with as many channels as the query, the further ones zero: torch's kernel needs it."""
    missing = query.shape[-1] - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


class Dropped(NamedTuple):
    """Dropout of probabilities of attention, on tensors with values."""

    share: float
    random_state: torch.Tensor

    @classmethod
    def of(cls, share: float, *random_state: torch.Tensor) -> Dropped | None:
        """Returns None without dropout, and for tensors without values, whose sizes do not depend on it."""
        return cls(share, *random_state) if share and not random_state[0].is_meta else None

    def factors(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns for each score 0, or what makes up for those that are 0."""
        generator = torch.Generator().manual_seed(int(self.random_state[0]))
        return (torch.rand(scores.shape, generator=generator, device=scores.device) >= self.share) / (1 - self.share)


def new_random_state(query: torch.Tensor) -> torch.Tensor:
    """Returns the state of the random numbers of one call of a kernel, int64 [2], drawn from the default generator."""
    return query.new_empty(2, dtype=torch.int64).random_()


@one_kernel()
def attend_each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    lengths: list[int],
    key_lengths: list[int] | None = None,
    **seen: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends each packed sequence by itself; returns output [tokens, heads, channels] and log-sum-exp [heads, tokens].

    Args:
        query: Shape [tokens, heads, channels].
        key: The same, of as many or fewer heads, and of other tokens if `key_lengths` says so.
        lengths: Of the sequences of queries.
        key_lengths: Of those of keys; None if they are the same.
        **seen: What a query sees, as `attend` takes it: ``causal``, ``window`` and ``sinks``.
    """
    queries = query.unsqueeze(1).split(lengths)
    keys, values = (tensor.unsqueeze(1).split(key_lengths or lengths) for tensor in (key, value))
    rows = [attend(*row, scale, **seen) for row in zip(queries, keys, values, strict=True)]
    outputs, log_sums = zip(*rows, strict=True)
    return torch.cat(outputs).squeeze(1), torch.cat(log_sums, dim=-1).squeeze(0)


@one_kernel()
def attend_each_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scale: float,
    lengths: list[int],
    key_lengths: list[int] | None = None,
    **seen: Any,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of query, key and value of `attend_each`, and of the sinks if there are any."""
    grads, queries, outputs = (
        tensor.unsqueeze(1).split(lengths) for tensor in (grad.view(output.shape), query, output)
    )
    keys, values = (tensor.unsqueeze(1).split(key_lengths or lengths) for tensor in (key, value))
    # Torch's kernel wants the log-sum-exp contiguous.
    log_sums = [part.contiguous() for part in log_sum_exp.unsqueeze(0).split(lengths, dim=-1)]
    rows = zip(grads, queries, keys, values, outputs, log_sums, strict=True)
    of_each = [attend_backward(one, q, k, v, out, log_sum, scale, **seen) for one, q, k, v, out, log_sum in rows]
    parts = [*zip(*of_each, strict=True)]
    of_sinks = [torch.stack(of_rows).sum(0) for of_rows in parts[3:]]
    return *(torch.cat(of_rows).squeeze(1) for of_rows in parts[:3]), *of_sinks
