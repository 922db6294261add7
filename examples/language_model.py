"""A small language model with a large vocabulary: cross entropy, the softmax head and the entmax head.

    python examples/language_model.py

The text is the source code of Python's standard library, which every Python brings along; a token is a word or a sign.
The model is a GPT of two layers whose output vectors are its word embeddings. It is trained anew with each loss, with
the same batches and for the same number of steps.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manymax

WORDS, WIDTH, LENGTH, BATCH = 32_768, 64, 64, 8
EPS = 1e-6  # of the eps-perplexity


def read_text(files: int = 500) -> tuple[list[str], Tensor]:
    """The vocabulary, and the text as numbers of words; word 0 stands for all that are rare."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
    texts = [
        path.read_text(encoding="utf-8", errors="ignore") for path in paths[:files] if "site-packages" not in path.parts
    ]
    tokens = re.findall(r"\w+|\n *|[^\w\s]", "\n".join(texts))
    words = ["?", *(word for word, _ in Counter(tokens).most_common(WORDS - 1))]
    numbers = {word: number for number, word in enumerate(words)}
    return words, torch.tensor([numbers.get(token, 0) for token in tokens])


class GPT(nn.Module):
    """Two transformer layers; the embedding of the words is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """The vector after each token, (B, T, d)."""
        length = tokens.shape[1]
        x = self.words(tokens) + self.places.weight[:length]
        return self.layers(x, mask=self.mask[:length, :length], is_causal=True)


def cross_entropy(hidden: Tensor, words: Tensor, tokens: Tensor) -> Tensor:
    """What most people write: the table of all scores, then torch's loss."""
    return F.cross_entropy((hidden[:, :-1] @ words.T).reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def softmax_head(hidden: Tensor, words: Tensor, tokens: Tensor) -> Tensor:
    """The same number without the table."""
    return manymax.linear_softmax_loss(hidden, words, tokens, shift=True)


def entmax_head(hidden: Tensor, words: Tensor, tokens: Tensor) -> Tensor:
    """Most words get the probability 0."""
    return manymax.linear_entmax_loss(hidden, words, tokens, shift=True)


LOSSES = {
    "cross entropy": (cross_entropy, manymax.softmax),
    "softmax head": (softmax_head, manymax.softmax),
    "entmax head": (entmax_head, manymax.entmax),
}


def train(name: str, text: Tensor, steps: int) -> tuple[GPT, float]:
    """The trained model, and the seconds that a step took."""
    torch.manual_seed(0)
    model, loss = GPT(), LOSSES[name][0]
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    random = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    for _ in range(steps):
        begin = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        tokens = text[begin + torch.arange(LENGTH)]
        optimizer.zero_grad()
        loss(model(tokens), model.words.weight, tokens).backward()
        optimizer.step()
    return model, (time.perf_counter() - start) / steps


@torch.no_grad()
def judge(model: GPT, name: str, text: Tensor) -> dict[str, float]:
    """What the model is worth on text that it has not seen."""
    tokens = text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)[:60]
    hidden, target = model(tokens)[:, :-1].reshape(-1, WIDTH), tokens[:, 1:].reshape(-1)
    _, best = manymax.linear_topk(hidden, model.words.weight, 1)
    stats = manymax.metrics.linear_probability_stats(LOSSES[name][1], hidden, model.words.weight, target)
    return {
        "accuracy": float((best[:, 0] == target).double().mean()),
        "perplexity": float(manymax.metrics.eps_perplexity(stats.target_prob, num_classes=WORDS, eps=EPS)),
        "support": float(stats.support_size.double().mean()),
    }


@torch.no_grad()
def sample(model: GPT, name: str, words: list[str], start: str = "\n    ", length: int = 24) -> str:
    """A sample of text, drawn word by word from the model's own probabilities."""
    random, tokens = torch.Generator().manual_seed(0), [words.index(start), words.index("def")]
    for _ in range(length):
        scores = model(torch.tensor([tokens]))[0, -1] @ model.words.weight.T
        tokens.append(int(torch.multinomial(LOSSES[name][1](scores), 1, generator=random)))
    return " ".join(words[token].replace("\n", "⏎") for token in tokens)


def peak_scores(name: str) -> float:
    """The MB of scores that a step holds at a time: the whole table with its gradient, or the buffer of a head."""
    rows = BATCH * (LENGTH - 1)
    if name == "cross entropy":
        return 3 * rows * WORDS * 4 / 2**20  # scores, their logarithms of probabilities, and the gradient
    return min(rows, manymax.heads.HeadOptions().rows(WORDS)) * WORDS * 4 / 2**20


def main() -> None:
    """Train with each loss and print what it costs and what it is worth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    words, text = read_text()
    train_part, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    print(f"{len(text):,} tokens, {len(words):,} words, {steps} steps of {BATCH} x {LENGTH} tokens\n")
    columns = "ms a step", "MB of scores", "accuracy", "eps-perplexity", "words of p > 0"
    print(f"{'loss':14}" + "".join(f"{column:>16}" for column in columns))
    samples = {}
    for name in LOSSES:
        model, seconds = train(name, train_part, steps)
        found = judge(model, name, held_out)
        print(
            f"{name:14}{1000 * seconds:16.0f}{peak_scores(name):16.0f}{found['accuracy']:16.1%}"
            f"{found['perplexity']:16.1f}{found['support']:16,.0f}"
        )
        samples[name] = sample(model, name, words)
    print(f"\nThe eps-perplexity has eps = {EPS:g}. Samples:")
    for name, line in samples.items():
        print(f"  {name:14} {line}")


if __name__ == "__main__":
    main()
