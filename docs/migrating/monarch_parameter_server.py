"""The job of param_server/tutorial.py in Monarch, with the same network, data and batches.

Monarch has no autograd through an actor's methods. So a trainer computes with a copy of the
weights. For each batch it makes one call, which sends gradients to the server and returns the
new weights.

pip install torchmonarch torch torchvision
python monarch_parameter_server.py                        # as tutorial.py --world_size 3
python monarch_parameter_server.py --dataset synthetic    # random patterns: no download
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from monarch.actor import Actor, context, endpoint, this_host
from torch import nn, optim
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):  # (B, 1, 28, 28)
        x = F.relu(self.conv1(x))  # (B, 32, 26, 26)
        x = F.max_pool2d(self.conv2(x), 2)  # (B, 64, 12, 12)
        x = torch.flatten(self.dropout1(x), 1)  # (B, 9216)
        x = self.dropout2(F.relu(self.fc1(x)))  # (B, 128)
        return F.log_softmax(self.fc2(x), dim=1)  # (B, 10)


class ParameterServer(Actor):
    """Holds the weights. An actor runs one call at a time, so the server needs no lock."""

    def __init__(self, args):
        torch.set_num_threads(1)
        torch.manual_seed(args.seed)  # for the weights
        self.args = args
        self.model = Net()
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.03)

    @endpoint
    def get_weights(self):
        return self.weights()

    @endpoint
    def apply_gradients(self, gradients):
        """Make an optimizer step with a trainer's gradients (arrays); return the new weights."""
        for param, gradient in zip(self.model.parameters(), gradients, strict=True):
            param.grad = torch.from_numpy(gradient)
        self.optimizer.step()
        return self.weights()

    @endpoint
    def get_accuracy(self):
        test_loader = DataLoader(load_digits(self.args, train=False), batch_size=32)
        self.model.eval()
        correct_sum = 0
        with torch.no_grad():
            for data, target in test_loader:
                correct_sum += (self.model(data).argmax(dim=1) == target).sum().item()
        return correct_sum / len(test_loader.dataset)

    def weights(self):
        """Return a list of arrays, because Monarch pickles arrays faster than tensors."""
        return [param.detach().numpy() for param in self.model.parameters()]


class Trainer(Actor):
    def __init__(self, server, args):
        rank = context().actor_instance.rank.rank + 1  # Monarch counts from 0, tutorial.py from 1
        torch.set_num_threads(1)
        torch.manual_seed(args.seed + rank)  # for dropout
        self.server = server
        order = torch.Generator().manual_seed(args.seed + rank)
        train_set = load_digits(args, train=True)
        share = range(rank - 1, len(train_set), args.world_size - 1)  # this trainer's images
        train_set = Subset(train_set, share)
        self.train_loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=order)

    @endpoint
    def is_ready(self):
        return True

    @endpoint
    def run_training_loop(self):
        """Return the losses of every twentieth batch."""
        net = Net()
        losses = []
        weights = self.server.get_weights.call_one().get()
        for i, (data, target) in enumerate(self.train_loader):
            for param, array in zip(net.parameters(), weights, strict=True):
                param.data = torch.from_numpy(array)
            loss = F.nll_loss(net(data), target)
            if i % 20 == 0:
                losses.append(loss.item())
            net.zero_grad()
            loss.backward()
            gradients = [param.grad.numpy() for param in net.parameters()]
            weights = self.server.apply_gradients.call_one(gradients).get()
        return losses


def load_digits(args, train):
    """Return the training or the test set: pairs of an image (1, 28, 28), float32, and a label."""
    if args.dataset == "mnist":
        steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
        return datasets.MNIST(args.data_dir, train, transforms.Compose(steps), download=True)
    generator = torch.Generator().manual_seed(args.seed)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)  # one for each digit
    labels = torch.randint(0, 10, (5_000,), generator=generator)
    images = patterns[labels] / 2 + torch.randn(5_000, 1, 28, 28, generator=generator)
    part = slice(0, 4_000) if train else slice(4_000, 5_000)
    return TensorDataset(images[part], labels[part])


def parse_args():
    parser = argparse.ArgumentParser(description="Parameter server in Monarch")
    parser.add_argument("--world_size", type=int, default=3, help="the server and the trainers (3)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers (1)")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], default="mnist")
    parser.add_argument("--data_dir", default="data", help="folder for the files of MNIST (data)")
    args = parser.parse_args()
    args.data_dir = os.path.abspath(args.data_dir)  # an actor has another working directory
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the server and at least one trainer")
    return args


if __name__ == "__main__":
    args = parse_args()
    number = len(load_digits(args, train=True))  # also downloads MNIST, before the actors read it
    server_procs = this_host().spawn_procs(per_host={"servers": 1})
    server = server_procs.spawn("parameter_server", ParameterServer, args)
    trainer_procs = this_host().spawn_procs(per_host={"trainers": args.world_size - 1})
    trainers = trainer_procs.spawn("trainers", Trainer, server, args)  # one per process
    trainers.is_ready.call().get()  # call() calls all trainers
    started = time.perf_counter()
    all_losses = trainers.run_training_loop.call().get()
    seconds = time.perf_counter() - started
    for rank, losses in enumerate(all_losses.values(), start=1):
        print(f"Rank {rank} losses of every 20th batch:", *(f"{loss:.3f}" for loss in losses))
    print(f"{number} images in {seconds:.1f} s, {number / seconds:.0f} images/s")
    print(f"Accuracy {server.get_accuracy.call_one().get()} (guessing: 0.1)")
    trainer_procs.stop("done").get()
    server_procs.stop("done").get()
