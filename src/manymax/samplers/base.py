"""The interface of all samplers: a call draws ids and gives their log-probabilities log q, or says why it cannot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manymax.errors import ArgumentError, ManymaxError
from manymax.ops.arguments import checked
from manymax.samplers.checks import (
    batch_shape,
    check_class_bias,
    check_class_vectors,
    check_ids,
    check_positive_integer,
    check_row_ids,
    check_support,
)
from manymax.settings import Setting


@dataclass(frozen=True)
class Draw:
    """The result of one call of a sampler.

    ids: (N, k), or (k,) when all rows share the draws.
    log_q: in the shape of `ids`, the log-probability of each id in ONE draw from the proposal over all classes, not in
        k draws; None where the sampler does not know it.
    log_q_target: in the shape of the target, the same for the positives.
    note: what the log-probabilities are, or why they are missing.
    source_row: in the shape of `ids`; given where a draw can be a positive of the very row that uses it. Draw j was
        taken from the positives of row source_row[j], and that row must not count it as a draw: see `copies`.
    owner: (N,), given where one query has several rows: the query of each row. `source_row` then holds the query from
        which a draw was taken, and no row of that query counts it.

    Example:
        >>> draw = Draw(torch.tensor([4, 1, 4]), log_q=None, log_q_target=None, note="an example")
        >>> draw.shared, draw.hits(torch.tensor([4, 0])).tolist()
        (True, [[True, False, True], [False, False, False]])
    """

    ids: Tensor
    log_q: Tensor | None
    log_q_target: Tensor | None
    note: str
    source_row: Tensor | None = None
    owner: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether all rows share the draws."""
        return self.ids.dim() == 1

    def hits(self, target: Tensor) -> Tensor:
        """Which draws are the positive itself: (N, k) for a target (N,), (N, P, k) for a target (N, P)."""
        ids = self.ids if self.shared or target.dim() == 1 else self.ids.unsqueeze(-2)
        return ids == target.unsqueeze(-1)

    def copies(self, batch: int) -> Tensor | None:
        """Which draws were taken from the positives of the row itself, (N, k); None where that cannot happen.

        Unlike hits, which are draws that happen to equal the positive, these are no draws from q: they must be left
        out whatever is done with hits.
        """
        return None if self.source_row is None else self.source_row == self.owners(batch).unsqueeze(-1)

    def owners(self, batch: int) -> Tensor:
        """The owner of each row, (N,) for N = `batch` rows, whose draws `source_row` marks: its query, or itself."""
        return torch.arange(batch, device=self.ids.device) if self.owner is None else self.owner


@dataclass(frozen=True)
class Request:
    """The checked arguments of one call of a sampler, as `Sampler.forward` describes them."""

    num_negatives: int | None
    batch: tuple[int, ...] | None
    target: Tensor | None
    input: Tensor | None
    linear_weight: Tensor | None
    linear_bias: Tensor | None
    scores: Callable[[Tensor], Tensor] | None
    shared: bool
    generator: torch.Generator | None
    device: torch.device
    dtype: torch.dtype
    owner: Tensor | None = None
    batch_rows: Tensor | None = None

    @property
    def count(self) -> int:
        """`num_negatives`; raises if it is None, for samplers that have no number of their own."""
        if self.num_negatives is None:
            raise ArgumentError(
                "`num_negatives` must be an integer >= 1; got None, which only in_batch and mixed accept."
            )
        return self.num_negatives

    @property
    def rows(self) -> tuple[int, ...]:
        """The batch shape; raises if it is unknown, for samplers that draw per row."""
        if self.batch is None:
            raise ArgumentError(
                "`batch` must be known to draw per row; got none of `batch`, `target` and `input`. "
                "Pass one of them, or shared=True."
            )
        return self.batch

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the ids: (k,) if shared, else (*batch, k)."""
        return (self.count,) if self.shared else (*self.rows, self.count)


class ExactBuffers(nn.Module):
    """A module whose buffers keep their dtype when the model that contains it is cast, as by `model.half()`."""

    # Probabilities rounded to half precision would not be those of the distribution that is drawn from, and a float64
    # alias table would no longer be exact. Moves to another device go through.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactBuffers:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


class Sampler(ExactBuffers):
    """Base class of all samplers: a distribution q over `num_classes` classes, from which negatives are drawn.

    `note` says what `log_q` is, or why there is none. Everything that a sampler learns is in its buffers, so that it is
    saved and moved with the model.

    A sampler of your own defines `draw` and `log_prob_of`. A head calls it with one row for each positive: rows of the
    batch without a positive (`ignore_index`) are left out, and one with several comes several times. A sampler that
    knows something about each row of the batch, such as the history of its user, finds the entry of each row of a call
    by `request.batch_rows`: `self.history[request.batch_rows]`.

    `takes_batch_rows` says whether heads may call it with `batch_rows`. It is False for a class that defines `forward`
    itself and does not say otherwise, because such a `forward` may have been written before there was this argument.
    """

    note: str
    in_words: ClassVar[str] = "one of manymax.samplers"
    takes_batch_rows: ClassVar[bool] = True
    __call__: Callable[..., Draw]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__ and "takes_batch_rows" not in cls.__dict__:
            cls.takes_batch_rows = False

    @checked
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = check_positive_integer("num_classes", num_classes)

    @abstractmethod
    def draw(self, request: Request) -> Draw:
        """Draw for one call whose arguments have been checked."""

    @abstractmethod
    def log_prob_of(self, ids: Tensor, input: Tensor | None, shared: bool) -> Tensor:
        """log q of ids that have been checked to be in range."""

    @torch.no_grad()
    @checked
    def forward(
        self,
        num_negatives: int | None,
        *,
        batch: int | Sequence[int] | None = None,
        target: Tensor | None = None,
        owner: Tensor | None = None,
        batch_rows: Tensor | None = None,
        input: Tensor | None = None,
        linear_weight: Tensor | None = None,
        linear_bias: Tensor | None = None,
        scores: Callable[[Tensor], Tensor] | None = None,
        shared: bool = False,
        generator: torch.Generator | None = None,
    ) -> Draw:
        """Draw negatives.

        Args:
            num_negatives: k >= 1, draws per row; None for all that the sampler can offer (in_batch and mixed).
            batch: the number of rows N (or a shape); only needed where neither `target` nor `input` shows it and draws
                are per row.
            target: (N,) or (N, P) ids of the positives.
            owner: (N,) the query of each row, where one query has several rows: its positives are no negatives of its
                other rows (used by in_batch).
            batch_rows: (N,) which row of the head's batch each row is, where a head calls: rows without a positive are
                left out, and one with several positives comes several times. A batch (B, T, ...) is flattened, so that
                position t of sequence b is row b T + t; for a sampler of your own that keeps something about each row.
            input: (N, d) queries, for samplers whose q depends on the model.
            linear_weight: (C, d) class vectors, for the same samplers.
            linear_bias: (C,) class biases, for the same samplers.
            scores: instead of the three above, a function from ids, (M,) or (N, M), to their scores (N, M).
            shared: k draws for all rows together instead of k draws per row.
            generator: the source of randomness, on the device of the draws; by default torch's global one.

        Returns:
            a `Draw` on the device of `input` or `target`, without gradients; `log_q` is float32, or float64 if
            `input` is.
        """
        request = Request(
            num_negatives=None if num_negatives is None else check_positive_integer("num_negatives", num_negatives),
            batch=batch_shape(batch, target, input),
            target=None if target is None else check_ids("target", target, self.num_classes),
            input=input,
            linear_weight=check_class_vectors(linear_weight, input, self.num_classes),
            linear_bias=check_class_bias(linear_bias, self.num_classes),
            scores=scores,
            shared=shared,
            generator=generator,
            device=self._device(target, input, generator),
            dtype=torch.get_default_dtype() if input is None else torch.promote_types(input.dtype, torch.float32),
            owner=check_row_ids("owner", owner, target),
            batch_rows=check_row_ids("batch_rows", batch_rows, target),
        )
        if request.batch is not None and 0 in request.batch and not isinstance(self, FixedSampler):
            raise ArgumentError("`target` and `input` must have at least one row: the draws depend on them; got none.")
        draw = self.draw(request)
        check_support(draw.log_q_target)
        return draw

    @torch.no_grad()
    @checked
    def log_q(
        self, ids: Tensor, *, input: Tensor | None = None, shared: bool = False, dtype: torch.dtype | None = None
    ) -> Tensor:
        """log q of any ids.

        Args:
            ids: int64, of any shape where q is the same for every query. Otherwise (N, k), or (k,) to ask for the same
                ids in every row.
            input: (N, d) queries, where q depends on them.
            shared: whether to ask for the distribution of shared draws, where that is another one (the mean of q over
                the queries).
            dtype: of the result; torch's default dtype if None.

        Returns:
            log q in the shape of `ids`; (N, k) for `ids` (k,) where q depends on the query and is not shared.
        """
        ids = check_ids("ids", ids, self.num_classes)
        return self.log_prob_of(ids, input, shared).to(dtype or torch.get_default_dtype())

    @checked
    def log_probs(
        self, *, input: Tensor | None = None, shared: bool = False, dtype: torch.dtype | None = None
    ) -> Tensor:
        """log q of all classes, (C,), or (N, C) where q depends on the query; meant for small C, as in tests."""
        classes = torch.arange(self.num_classes, device=self._device(None, input, None))
        return self.log_q(classes, input=input, shared=shared, dtype=dtype)

    @checked
    def refresh(self, linear_weight: Tensor, generator: torch.Generator | None = None) -> None:
        """Adapt q to the class vectors (C, d) of the model; does nothing where q does not depend on them."""

    def extra_repr(self) -> str:
        """What the printed module shows."""
        return f"num_classes={self.num_classes}"

    def _device(self, target: Tensor | None, input: Tensor | None, generator: torch.Generator | None) -> torch.device:
        """Where to draw: the device of the arguments, else of the sampler's buffers, else of the generator."""
        own = next((buffer.device for buffer in self.buffers()), None)
        given = [tensor.device for tensor in (input, target) if tensor is not None]
        if own is not None and given and own != given[0]:
            raise ArgumentError(
                f"the sampler is on {own}, but `input` or `target` is on {given[0]}: move the sampler with `.to`."
            )
        fallback = torch.device("cpu") if generator is None else generator.device
        return next(iter(given), own or fallback)


class FixedSampler(Sampler):
    """A sampler whose q is the same for every query: uniform, log-uniform, popularity."""

    note = "log q of one draw, exact"
    in_words = "a sampler whose q is the same for every query"

    @abstractmethod
    def draw_ids(self, shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Independent draws from q, int64 of the given shape."""

    def draw(self, request: Request) -> Draw:
        """Independent draws, with log q of them and of the target."""
        ids = self.draw_ids(request.shape, request.device, request.generator)
        target = request.target
        return Draw(
            ids,
            log_q=self.log_prob_of(ids).to(request.dtype),
            log_q_target=None if target is None else self.log_prob_of(target).to(request.dtype),
            note=self.note,
        )

    @abstractmethod
    def log_prob_of(self, ids: Tensor, input: Tensor | None = None, shared: bool = False) -> Tensor:
        """log q of ids that have been checked to be in range; `input` and `shared` do not matter."""


@dataclass(frozen=True)
class SamplerEntry:
    """One row of `SAMPLERS`: what other code needs to know about a sampler, so that none is named elsewhere.

    name, aliases, title: how it is looked up and shown.
    module: its class.
    make: `make(num_classes, counts, **options)` builds one from what every data set has.
    law: q(c) as a formula.
    citation: where it was published.
    knows_log_q: whether draws come with log q.
    exact_log_q: whether log q is the distribution of each single draw, and `log_probs` gives all of it.
    needs_counts: whether `make` needs the counts of the classes.
    needs_target, needs_scores: whether a call needs the target, or scores from `input` and `linear_weight`.
    limited_by_batch: whether it cannot draw more negatives than the batch has positives in other rows.
    settings: the options of `make`.
    examples: options worth testing, small enough for a handful of classes.
    """

    name: str
    title: str
    module: type[Sampler]
    make: Callable[..., Sampler]
    law: str
    citation: str
    aliases: tuple[str, ...] = ()
    knows_log_q: bool = True
    exact_log_q: bool = True
    needs_counts: bool = False
    needs_target: bool = False
    needs_scores: bool = False
    limited_by_batch: bool = False
    settings: tuple[Setting, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ({},)


def unknown_log_q(sampler: Sampler) -> ManymaxError:
    """The error to raise when a sampler is asked for a log q that it does not know."""
    return ManymaxError(f"{type(sampler).__name__} has no log q for arbitrary ids: {sampler.note}.")
