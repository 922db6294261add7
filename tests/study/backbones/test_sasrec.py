"""SASRec: its blocks equal torch's encoder layers, and its dropout has the right distribution."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manymax import ArgumentError
from manymax.study.backbones.sasrec import Dropout, SASRec, TransformerLayer
from manymax.study.data.batches import Batch


def as_torch(block: TransformerLayer, dim: int, hidden: int) -> nn.TransformerEncoderLayer:
    """torch's layer with the weights of a block."""
    layer = nn.TransformerEncoderLayer(dim, block.attention_heads, hidden, activation="gelu", batch_first=True)
    first, _, _, last = block.feed_forward
    for ours, theirs in (
        (block.project, (layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias)),
        (block.merge, layer.self_attn.out_proj),
        (first, layer.linear1),
        (last, layer.linear2),
        (block.attention_norm, layer.norm1),
        (block.feed_forward_norm, layer.norm2),
    ):
        weight, bias = theirs if isinstance(theirs, tuple) else (theirs.weight, theirs.bias)
        with torch.no_grad():
            weight.copy_(ours.weight)
            bias.copy_(ours.bias)
    return layer


@pytest.mark.parametrize("heads", [1, 4])
def test_a_block_is_torchs_encoder_layer(heads: int, seed: int) -> None:
    block = TransformerLayer(8, heads, 20, 0.5).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    layer, x = as_torch(block, 8, 20).eval(), torch.randn(3, 6, 8)
    later = nn.Transformer.generate_square_subsequent_mask(6)
    torch.testing.assert_close(block(x), layer(x, src_mask=later, is_causal=True), rtol=1e-4, atol=1e-5)


def test_a_history_from_end_to_end(seed: int) -> None:
    """Embeddings plus positions through the layers of torch, read at the last item."""
    backbone = SASRec(30, 8, layers=2, attention_heads=2, hidden=16, max_length=7).eval()
    history = torch.tensor([[4, 9, 2, -100], [5, 5, 1, 8]])
    for row, length in ((0, 3), (1, 4)):
        x = backbone.items.weight[history[row, :length]] + backbone.positions.weight[:length]
        x = x.unsqueeze(0)
        for block in backbone.blocks.children():
            later = nn.Transformer.generate_square_subsequent_mask(length)
            x = as_torch(block, 8, 16).eval()(x, src_mask=later, is_causal=True)  # type: ignore[arg-type]
        query = backbone.queries(Batch(torch.arange(2), history), backbone.vectors())[row]
        torch.testing.assert_close(query, x[0, -1], rtol=1e-4, atol=1e-5)


def test_order_matters_and_an_empty_history_has_a_query(seed: int) -> None:
    backbone = SASRec(30, 8).eval()
    histories = torch.tensor([[3, 4, 5], [4, 3, 5], [-100, -100, -100]])
    queries = backbone.queries(Batch(torch.arange(3), histories), backbone.vectors())
    assert not torch.allclose(queries[0], queries[1])
    assert queries[2].isfinite().all()
    with torch.no_grad():
        backbone.items.weight[0] += 1  # padding must not read the vector of item 0
    assert torch.equal(queries[2], backbone.queries(Batch(torch.arange(3), histories), backbone.vectors())[2])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_has_the_law_of_torchs(p: float, seed: int) -> None:
    n = 400_003  # not a multiple of the entries per random word
    x = torch.ones(n, dtype=torch.float64, requires_grad=True)
    y = Dropout(p).train()(x)
    kept = y != 0
    share, error = kept.double().mean(), (p * (1 - p) / n) ** 0.5
    assert abs(share - (1 - p)) < 4 * error + 2**-16
    assert torch.allclose(y[kept], torch.tensor(1 / (1 - p), dtype=torch.float64), rtol=1e-3)
    neighbours = (kept[1:] & kept[:-1]).double().mean()  # independent, also within one word
    assert abs(neighbours - (1 - p) ** 2) < 8 * error + 2**-15
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_dropout_follows_the_global_seed_and_is_off_in_evaluation() -> None:
    layer, x = Dropout(0.5).train(), torch.ones(3, 50)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert layer.eval()(x) is x
    assert Dropout(0.0).train()(x) is x


def test_dropout_is_applied_in_all_its_places(seed: int) -> None:
    """With nearly everything dropped, attention and feed-forward give 0: a block is then two norms of its input."""
    block, x = TransformerLayer(8, 2, 20, 0.99999).train(), torch.randn(3, 6, 8)
    assert torch.equal(block.attention(x), block.merge.bias.expand(3, 6, 8))
    assert torch.equal(block.feed_forward(x), block.feed_forward[-1].bias.expand(3, 6, 8))
    norm = nn.functional.layer_norm
    torch.testing.assert_close(block(x), norm(norm(x, (8,)), (8,)))
    backbone = SASRec(30, 8, layers=0, dropout=0.99999).train()
    assert not backbone.queries(Batch(torch.arange(1), torch.tensor([[1, 2]])), backbone.vectors()).any()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"attention_heads": 3}, "`attention_heads` must divide `dim`; got 3 and 8"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\); got 1.0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        SASRec(30, 8, **settings)


def test_a_batch_without_fitting_histories_is_refused() -> None:
    backbone = SASRec(30, 8, max_length=4)
    with pytest.raises(ArgumentError, match=r"`batch.history` must be \(B, T\) with T <= 4; got no history"):
        backbone.queries(Batch(torch.arange(2)), backbone.vectors())
    with pytest.raises(ArgumentError, match=r"got shape \(2, 5\)"):
        backbone.queries(Batch(torch.arange(2), torch.zeros(2, 5, dtype=torch.long)), backbone.vectors())
