"""The same job as tutorial.py in one process, without RPC and without DDP.

    python single.py

It prints the same numbers as `python tutorial.py --world_size 3`, which has one trainer.
"Difference 8" is number 8 in DIFFERENCES.md.
Shapes: B bags in a batch, I indices in a batch, D numbers in a row of the table, C classes.
"""

import argparse

import torch

NUM_EMBEDDINGS = 100
EMBEDDING_DIM = 16
NUM_CLASSES = 8
EPOCHS = 10
BATCHES = 100  # in each epoch (difference 19)
BATCH_BAGS = 32
LEARNING_RATE = 0.5  # difference 11
# The tutorial's targets are random, so a model cannot learn them. In this file each index has a
# fixed weight for each class. The target of a bag is the class with the largest sum (difference 8).
TEACHER = torch.randn(NUM_EMBEDDINGS, NUM_CLASSES, generator=torch.Generator().manual_seed(0))


class HybridModel(torch.nn.Module):
    """A sparse part, nn.EmbeddingBag, which adds up the rows of each bag, and a dense nn.Linear."""

    def __init__(self, emb):
        super().__init__()
        self.emb = emb
        self.fc = torch.nn.Linear(EMBEDDING_DIM, NUM_CLASSES)

    def forward(self, indices, offsets):
        """Return the logits [B, C] of bags, given as indices [I] and each bag's offset [B]."""
        emb_lookup = self.emb(indices, offsets)  # [B, D]
        return self.fc(emb_lookup)


def get_next_batch(num_bags):
    """Return a batch of bags of 1 to 10 indices: indices [I], offsets [B], target [B]."""
    sizes = torch.randint(1, 11, (num_bags,))
    offsets = sizes.cumsum(dim=0) - sizes
    indices = torch.randint(NUM_EMBEDDINGS, (int(sizes.sum()),))
    votes = torch.nn.functional.embedding_bag(indices, TEACHER, offsets, mode="sum")  # [B, C]
    return indices, offsets, votes.argmax(dim=1)


def _run_trainer(emb, rank, seed):
    """Train; return fc as one vector."""
    torch.manual_seed(1000 * seed + rank + 1)  # as trainer 0 of tutorial.py (difference 10)
    model = HybridModel(emb)
    opt = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    criterion = torch.nn.CrossEntropyLoss()
    test_indices, test_offsets, test_target = get_next_batch(2000)  # not used for training
    for epoch in range(EPOCHS):
        for _ in range(BATCHES):
            indices, offsets, target = get_next_batch(BATCH_BAGS)
            opt.zero_grad()
            output = model(indices, offsets)
            loss = criterion(output, target)
            loss.backward()
            opt.step()
        with torch.no_grad():
            output = model(test_indices, test_offsets)
            loss = criterion(output, test_target)
            accuracy = (output.argmax(dim=1) == test_target).double().mean()
        result = f"held-out loss {loss:.3f}, accuracy {accuracy:.3f} (chance 0.125, teacher 1)"
        print(f"Training done for epoch {epoch}: {result}", flush=True)
    return torch.nn.utils.parameters_to_vector(model.fc.parameters()).detach()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    torch.manual_seed(args.seed)  # for the table (difference 10)
    emb = torch.nn.EmbeddingBag(NUM_EMBEDDINGS, EMBEDDING_DIM, mode="sum")
    _run_trainer(emb, 0, args.seed)
