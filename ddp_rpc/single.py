"""The same training as in tutorial.py, in one process: `diff single.py tutorial.py` shows what RPC
and DDP add. There is one trainer, as in `tutorial.py --world_size 3`. Both print the same losses.

    python single.py

PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework" without RPC
and DDP. "Difference 7" is number 7 in docs/differences/ddp_rpc.md.
"""

import argparse
import random

import torch
import torch.optim as optim

NUM_EMBEDDINGS = 100
EMBEDDING_DIM = 16

# Random targets, as in the text, cannot be learned. Here each index has a weight for each class,
# and the target of a bag of indices is the class with the largest sum (difference 8).
TEACHER = torch.randn(NUM_EMBEDDINGS, 8, generator=torch.Generator().manual_seed(0))


def get_device(number, num_gpus):
    """Return GPU `number`, counted from 0. If there are fewer, return the last one, or else the
    CPU. GPU means CUDA here, because DDP uses Gloo, which supports no other."""
    count = min(num_gpus, torch.cuda.device_count())
    return torch.device("cuda", min(number, count - 1)) if count else torch.device("cpu")


class HybridModel(torch.nn.Module):
    """A linear layer on top of an embedding table, which is on the CPU."""

    def __init__(self, emb, device):
        super().__init__()
        self.emb = emb
        self.fc = torch.nn.Linear(EMBEDDING_DIM, 8).to(device)
        self.device = device

    def forward(self, indices, offsets):
        """Return the logits (B, 8) of B bags, given all their indices and the offset of each
        bag."""
        emb_lookup = self.emb(indices, offsets)  # (B, 16), on the CPU
        return self.fc(emb_lookup.to(self.device))


def _run_trainer(emb, num_gpus):
    """Train."""
    device = get_device(0, num_gpus)
    if num_gpus:
        print(f"Trainer 0 uses {device}", flush=True)
    model = HybridModel(emb, device)

    opt = optim.SGD(model.parameters(), lr=0.5)  # difference 11

    criterion = torch.nn.CrossEntropyLoss()

    def get_next_batch():
        for _ in range(10):
            num_indices = random.randint(20, 50)
            indices = torch.LongTensor(num_indices).random_(0, NUM_EMBEDDINGS)

            # cut them into bags of 1 to 10
            offsets = []
            start = 0
            while start < num_indices:
                offsets.append(start)
                start += random.randint(1, 10)

            offsets_tensor = torch.LongTensor(offsets)
            votes = torch.nn.functional.embedding_bag(indices, TEACHER, offsets_tensor, mode="sum")
            target = votes.argmax(dim=1).to(device)
            yield indices, offsets_tensor, target

    for epoch in range(100):
        total_loss, correct, bags = 0.0, 0, 0
        for indices, offsets, target in get_next_batch():
            output = model(indices, offsets)
            loss = criterion(output, target)

            opt.zero_grad()
            loss.backward()

            opt.step()
            total_loss += loss.item() * len(target)
            correct += (output.argmax(dim=1) == target).sum().item()
            bags += len(target)
        # Each batch is new, and its answers are counted before the model learns from it. So what
        # the model has memorized does not raise this accuracy.
        result = f"loss {total_loss / bags:.3f}, accuracy {correct / bags:.3f} (guessing: 0.125)"
        print(f"Training done for epoch {epoch}: {result}", flush=True)


def run_worker(args):
    torch.set_num_threads(1)  # such small operations are slower with more threads
    torch.manual_seed(args.seed + 2)  # as the ps of `tutorial.py --world_size 3`, which is rank 2

    emb = torch.nn.EmbeddingBag(NUM_EMBEDDINGS, EMBEDDING_DIM, mode="sum")

    torch.manual_seed(args.seed)  # as trainer0, which is rank 0
    random.seed(args.seed)
    _run_trainer(emb, args.num_gpus)


def parse_args():
    parser = argparse.ArgumentParser(description="An embedding and a linear layer")
    parser.add_argument("--num_gpus", type=int, default=0, help="GPUs, at most 1 (0)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    args = parser.parse_args()
    if args.num_gpus < 0:
        parser.error("--num_gpus must be 0 or more")
    return args


if __name__ == "__main__":
    run_worker(parse_args())
