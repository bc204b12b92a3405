"""The job of tutorial.py in one process, without RPC. `python single.py --help` lists the flags."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)  # Dropout, not Dropout2d [8]
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):  # (B, 1, 28, 28)
        x = F.relu(self.conv1(x))  # (B, 32, 26, 26)
        x = F.max_pool2d(self.conv2(x), 2)  # (B, 64, 12, 12)
        x = torch.flatten(self.dropout1(x), 1)  # (B, 9216)
        x = self.dropout2(F.relu(self.fc1(x)))  # (B, 128)
        return F.log_softmax(self.fc2(x), dim=1)  # (B, 10)


def run_training_loop(net, train_loader):
    opt = optim.SGD(net.parameters(), lr=0.03)
    for i, (data, target) in enumerate(train_loader):
        loss = F.nll_loss(net(data), target)
        if i % 20 == 0:
            print(f"Training batch {i} loss {loss.item()}", flush=True)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("Training complete!")


def get_accuracy(test_loader, model):
    model.eval()
    correct_sum = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct_sum += (model(data).argmax(dim=1) == target).sum().item()
    print(f"Accuracy {correct_sum / len(test_loader.dataset)} (guessing: 0.1)")


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
    parser = argparse.ArgumentParser(description="The job of tutorial.py without RPC")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], default="mnist")
    parser.add_argument("--data_dir", default="data", help="folder for MNIST (data)")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    torch.manual_seed(args.seed)
    order = torch.Generator().manual_seed(args.seed + 1)
    train_set = load_digits(args, train=True)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=order)
    net = Net()
    run_training_loop(net, train_loader)
    get_accuracy(DataLoader(load_digits(args, train=False), batch_size=32), net)
