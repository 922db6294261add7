"""SASRec: a causal transformer over the items of a user; the output at each position is the query for the next item."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from manymax.errors import ArgumentError
from manymax.settings import Setting
from manymax.study.backbones.base import LAYERS, Backbone, BackboneEntry, Settings, Vectors, draw_weights
from manymax.study.data.batches import Batch
from manymax.study.data.interactions import PADDING, Split


class Dropout(nn.Module):
    """Dropout: in training, each entry becomes 0 with probability p and is multiplied by 1 / (1 - p) otherwise.

    An entry takes 16 random bits, so p is rounded to a multiple of 2^-16. On a CPU, `nn.Dropout` takes ten times as
    long, which is half of the time of a small transformer.

    Args:
        p: in [0, 1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ArgumentError(f"`dropout` must be in [0, 1); got {p}.")
        self.dropped = min(round(p * 2**16), 2**16 - 1)  # how many of the 2^16 values of the bits mean 0; not all

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of the shape of x; random numbers come from torch's global generator."""
        if not self.training or self.dropped == 0:
            return x
        # One random int64 is four entries' worth of bits: fewer calls of the generator, which is the slow part.
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)  # uniform in -2^15 .. 2^15 - 1
        kept = (bits >= self.dropped - 2**15).to(x.dtype)
        return x * kept.mul_(2**16 / (2**16 - self.dropped))

    def extra_repr(self) -> str:
        return f"p={self.dropped / 2**16:g}"


class TransformerLayer(nn.Module):
    """x -> norm(x + attention(x)) -> norm(x + feed-forward(x)), with dropout after attention and feed-forward.

    Args:
        dim: d.
        attention_heads: number of heads; must divide d.
        hidden: width of the feed-forward part.
        dropout: probability of dropping an entry.
    """

    def __init__(self, dim: int, attention_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_heads = attention_heads
        self.project = nn.Linear(dim, 3 * dim)  # queries, keys and values of attention
        self.merge = nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), Dropout(dropout), nn.Linear(hidden, dim))
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention: every position attends to itself and to earlier positions.

        Padding needs no mask: it is at the end of a row, so that no real item attends to it.
        """
        batch, length, dim = x.shape
        projected = self.project(x).view(batch, length, 3, self.attention_heads, dim // self.attention_heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # (B, heads, T, d / heads) each
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype, device=x.device).triu(1)  # of later positions
        weights = (query @ key.transpose(2, 3) / math.sqrt(query.shape[3]) + mask).softmax(-1)  # (B, heads, T, T)
        return self.merge((self.dropout(weights) @ value).transpose(1, 2).reshape(batch, length, dim))


class SASRec(Backbone):
    """x_t = e_{item t} + r_t through causal transformer blocks; the output at position t is the query for item t + 1.

    e are the embeddings of the items, which are also the item vectors, and r those of the positions. For a user
    without a history the query is the output at position 0, with r_0 as its only input.

    Args:
        num_items: C.
        dim: d.
        layers: number of blocks.
        attention_heads, hidden, dropout: of each block; dropout is also applied to x.
        max_length: longest history, T.

    References: Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018. Unlike there, but as in torch's
    encoder layers, layer norms come after the residual sums and the feed-forward part has width `hidden` and GELU.
    """

    needs_history = True
    max_length: int

    def __init__(
        self,
        num_items: int,
        dim: int = 64,
        layers: int = 2,
        attention_heads: int = 2,
        hidden: int = 128,
        dropout: float = 0.5,
        max_length: int = 20,
    ) -> None:
        super().__init__()
        if dim % attention_heads:
            raise ArgumentError(f"`attention_heads` must divide `dim`; got {attention_heads} and {dim}.")
        self.max_length = max_length
        self.items = nn.Embedding(num_items, dim)
        self.positions = nn.Embedding(max_length, dim)
        self.blocks = nn.ModuleList(TransformerLayer(dim, attention_heads, hidden, dropout) for _ in range(layers))
        self.dropout = Dropout(dropout)

    def vectors(self) -> Vectors:
        """The embeddings of the items."""
        return Vectors(self.items.weight)

    def queries(self, batch: Batch, vectors: Vectors) -> Tensor:
        """(B, d) at the last item of each row; (N, d) at all items, if `batch.every_position`."""
        if batch.history is None or batch.history.shape[1] > self.max_length:
            got = "no history" if batch.history is None else f"shape {tuple(batch.history.shape)}"
            raise ArgumentError(f"`batch.history` must be (B, T) with T <= {self.max_length}; got {got}.")
        real = batch.history != PADDING  # (B, T)
        items = embedding(batch.history.clamp(min=0), self.items.weight) * real.unsqueeze(-1)
        out = self.dropout(items + self.positions.weight[: real.shape[1]])  # (B, T, d)
        for block in self.blocks:
            out = block(out)
        if batch.every_position:
            return out[real]
        last = (real.sum(1) - 1).clamp(min=0)  # position 0 for an empty history
        return out[torch.arange(len(last)), last]


def make(split: Split, settings: Settings, generator: torch.Generator) -> SASRec:
    """SASRec for the items of a split."""
    backbone = SASRec(
        split.num_items,
        settings.dim,
        settings.layers,
        settings.attention_heads,
        settings.hidden,
        settings.dropout,
        settings.max_length,
    )
    draw_weights(backbone, settings, generator)
    for block in backbone.blocks.children():
        assert isinstance(block, TransformerLayer)
        # As in torch's attention. With the small weights of `draw_weights` all attention scores would be almost equal,
        # and every position would attend to all others alike.
        nn.init.xavier_uniform_(block.project.weight, generator=generator)
    return backbone


ENTRY = BackboneEntry(
    name="sasrec",
    title="SASRec",
    make=make,
    citation="Kang and McAuley, ICDM 2018",
    settings=(
        LAYERS,
        Setting("attention_heads", int, 2, "Number of attention heads of a transformer block.", least=1),
        Setting("hidden", int, 128, "Width of the feed-forward part of a transformer block.", least=1),
        Setting("dropout", float, 0.5, "Share of activations that are dropped in training.", least=0, below=1),
        Setting("max_length", int, 20, "Largest number of items of a history; the latest ones are used.", least=1),
        Setting(
            "positions",
            str,
            "all",
            "Train on the latest max_length items, on all items in such windows, or one row per prefix.",
            choices=("all", "windows", "prefix"),
        ),
    ),
    pairs=False,
    needs_history=True,
)
