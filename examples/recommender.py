"""A recommender in a training loop of your own: fit, evaluate, recommend, save and load.

    python examples/recommender.py

Matrix factorisation of made-up interactions with cosine scores. Exchange `LinearSoftmaxLoss` for any other head.
"""

import tempfile
from pathlib import Path

import torch

import manymax

torch.manual_seed(0)
USERS, ITEMS, DIM = 2_000, 3_000, 32

# Users and items of 50 tastes; a user mostly chooses items of their own. The last choice of each user is the test.
tastes, kinds = torch.randint(50, (USERS, 1)), torch.randint(50, (ITEMS,))
weights = (kinds == tastes) * 30.0 + 1 / (1 + torch.arange(ITEMS) / 50)
chosen = torch.multinomial(weights, 16)
train, test = chosen[:, :-1], chosen[:, -1]
users = torch.arange(USERS).repeat_interleave(train.shape[1])

vectors = torch.nn.Embedding(USERS, DIM)
head = manymax.LinearSoftmaxLoss(DIM, ITEMS, normalize=True, temperature=0.15)
optimizer = torch.optim.Adam([*vectors.parameters(), *head.parameters()], lr=0.03)

for epoch in range(8):
    total = 0.0
    for batch in torch.randperm(len(users)).split(2048):
        rows, target = manymax.group_pairs(users[batch], train.reshape(-1)[batch])  # one row of scores per user
        optimizer.zero_grad()
        loss = head(vectors(rows), target)
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(batch)
    # The items that a user has already are left out of the list.
    _, ranking = head.topk(vectors.weight, 20, exclude=train)
    found = (ranking == test.unsqueeze(1)).any(1).double().mean()
    print(f"epoch {epoch + 1}: loss {total / len(users):.3f}, test item among the first 20: {found:.1%}")

print("the first 5 for user 0:", ranking[0, :5].tolist())
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "model.pt"
    torch.save({"users": vectors.state_dict(), "items": head.state_dict()}, file)
    saved = torch.load(file, weights_only=True)  # never runs code of the file
again = manymax.LinearSoftmaxLoss(DIM, ITEMS, normalize=True, temperature=0.15)
again.load_state_dict(saved["items"])
print("the same after saving and loading:", torch.equal(again.topk(vectors.weight, 20, exclude=train)[1], ranking))
