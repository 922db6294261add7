"""Planted data follow the distribution that they come with."""

from __future__ import annotations

import torch

from manymax.study.data import planted
from manymax.study.data.planted import SIZES, PlantedLaw, parse_size, plant


def test_the_seed_decides() -> None:
    (one, law), (again, _), (other, _) = plant("tiny", 1), plant("tiny", 1), plant("tiny", 2)
    assert one.items.equal(again.items)
    assert one.times.equal(again.times)
    assert not one.items[:500].equal(other.items[:500])
    assert law.users.shape[0] == 200


def test_a_user_has_several_items_each_once_and_in_time_order() -> None:
    data, _ = plant("tiny")
    assert data.num_users == 200
    lengths = data.users.bincount()
    assert lengths.min() >= planted.SHORTEST
    assert lengths.float().mean().sub(20).abs() < 4 * lengths.float().std() / 200**0.5
    pairs = data.users * data.num_items + data.items
    assert pairs.unique().numel() == len(data)
    same_user = data.users[1:] == data.users[:-1]
    assert (data.times.diff()[same_user] > 0).all()
    assert data.times.min() >= 0


def test_items_are_drawn_one_after_another_from_the_law(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    law, users = planted._law(1, 6, rng), 20_000
    found = planted._draw(PlantedLaw(law.users.expand(users, -1), law.items, law.offsets), torch.full((users,), 2), rng)
    first, second = found.reshape(users, 2).T
    probs = law.probs(torch.tensor([0]))[0]
    assert_frequencies(first, probs)
    before = int(probs.argmax())  # the second item is drawn from the others: p_j / (1 - p_i)
    assert_frequencies(second[first == before], probs.index_fill(0, torch.tensor([before]), 0) / (1 - probs[before]))


def assert_frequencies(drawn: torch.Tensor, probs: torch.Tensor) -> None:
    share = drawn.bincount(minlength=len(probs)) / len(drawn)
    assert ((share - probs).abs() <= 4 * (probs * (1 - probs) / len(drawn)).sqrt() + 1e-9).all()


def test_popularity_is_zipf(seed: int) -> None:
    """E_u e^{<u, v> + b} = rank^-ZIPF, estimated with many users, within four standard errors."""
    rng = torch.Generator().manual_seed(seed)
    law = planted._law(1, 50, rng)
    law = PlantedLaw(
        law.users, law.items * 0.3, law.offsets + law.items.square().sum(-1) * (1 - 0.09) / 2
    )  # milder tails
    users = torch.randn(200_000, planted.PLANTED_DIM, generator=rng)
    weights = (users @ law.items.T + law.offsets).exp()
    ranks = (-law.offsets - law.items.square().sum(-1) / 2).div(planted.ZIPF).exp()
    assert ranks.round().sort().values.tolist() == list(range(1, 51))
    error = weights.std(0) / 200_000**0.5
    assert ((weights.mean(0) - ranks.pow(-planted.ZIPF)).abs() < 4 * error).all()


def test_users_differ_and_popular_items_exist() -> None:
    data, truth = plant("small")
    counts = data.items.bincount().sort(descending=True).values.float()
    assert counts[: len(counts) // 10].sum() > 0.3 * counts.sum(), "few items have much of the interactions"
    probs = truth.probs(torch.arange(1000))
    mean = probs.mean(0)
    information = (probs * (probs / mean).log()).sum(-1).mean()
    assert information > 0.5, "in nats: what the user tells of the item"


def test_blocks_change_nothing_but_the_noise(monkeypatch) -> None:
    truth = planted._law(30, 20, torch.Generator().manual_seed(0))
    monkeypatch.setattr(planted, "SCORES_AT_A_TIME", 64)
    lengths = torch.arange(30) % 5 + 1
    items = planted._draw(truth, lengths, torch.Generator().manual_seed(0))
    assert items.numel() == int(lengths.sum())
    users = torch.arange(30).repeat_interleave(lengths)
    assert (users * 20 + items).unique().numel() == items.numel()


def test_the_law_restricted_to_some_users_and_items() -> None:
    truth = planted._law(4, 5, torch.Generator().manual_seed(0))
    users, items = torch.tensor([3, 1]), torch.tensor([4, 0, 2])
    among = truth.among(users.numpy(), items.numpy()).probs(torch.arange(2))
    expected = truth.probs(users)[:, items]
    torch.testing.assert_close(among, expected / expected.sum(-1, keepdim=True))


def test_sizes_grow() -> None:
    sizes = [parse_size(name) for name in SIZES]
    assert sizes == sorted(sizes)
    assert all(size.items >= 2 * size.mean for size in sizes)
