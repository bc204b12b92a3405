"""The same training as in tutorial.py, in one process: `diff single.py tutorial.py` shows what RPC
adds. There is one trainer, with all images, as in `tutorial.py --world_size 2`. Both print the same
losses.

    python single.py
    python single.py --dataset synthetic        # random patterns instead of MNIST: no download

PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework" without RPC.
"Difference 7" is number 7 in docs/differences/param_server.md.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets, transforms

# --------- MNIST network to train, from pytorch/examples -----


def get_device(number, num_gpus):
    """Return GPU `number`, counted from 0. If there are fewer, return the last one, or the CPU."""
    count = min(num_gpus, torch.accelerator.device_count())
    if count == 0:
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, min(number, count - 1))


class Net(nn.Module):
    def __init__(self, num_gpus=0):
        super().__init__()
        print(f"Using {num_gpus} GPUs to train")
        self.num_gpus = num_gpus
        device = get_device(0, num_gpus)
        print(f"Putting first 2 convs on {device}")
        self.conv1 = nn.Conv2d(1, 32, 3, 1).to(device)
        self.conv2 = nn.Conv2d(32, 64, 3, 1).to(device)
        # With two GPUs, the linear layers are on the other one.
        device = get_device(1, num_gpus)
        print(f"Putting rest of layers on {device}")
        self.dropout1 = nn.Dropout2d(0.25).to(device)
        self.dropout2 = nn.Dropout(0.5).to(device)  # x has no channels there (difference 8)
        self.fc1 = nn.Linear(9216, 128).to(device)
        self.fc2 = nn.Linear(128, 10).to(device)

    def forward(self, x):  # (B, 1, 28, 28)
        x = self.conv1(x)  # (B, 32, 26, 26)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.max_pool2d(x, 2)  # (B, 64, 12, 12)

        x = self.dropout1(x)
        x = torch.flatten(x, 1)  # (B, 9216)
        # The linear layers may be on another device than the convolutions.
        next_device = next(self.fc1.parameters()).device
        x = x.to(next_device)

        x = self.fc1(x)  # (B, 128)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)  # (B, 10)
        output = F.log_softmax(x, dim=1)
        return output


def run_training_loop(num_gpus, train_loader, test_loader):
    net = Net(num_gpus=num_gpus)
    device = get_device(0, num_gpus)
    opt = optim.SGD(net.parameters(), lr=0.03)
    for i, (data, target) in enumerate(train_loader):
        opt.zero_grad()
        model_output = net(data.to(device))
        target = target.to(model_output.device)
        loss = F.nll_loss(model_output, target)
        if i % 5 == 0:
            print(f"Training batch {i} loss {loss.item()}", flush=True)
        loss.backward()
        opt.step()

    print("Training complete!")
    print("Getting accuracy....")
    get_accuracy(test_loader, net)


def get_accuracy(test_loader, model):
    model.eval()
    correct_sum = 0
    # Answers are compared on the first GPU, if the network uses one.
    device = get_device(0, model.num_gpus)
    with torch.no_grad():
        for data, target in test_loader:
            out = model(data.to(device))
            pred = out.argmax(dim=1, keepdim=True)
            pred, target = pred.to(device), target.to(device)
            correct = pred.eq(target.view_as(pred)).sum().item()
            correct_sum += correct

    print(f"Accuracy {correct_sum / len(test_loader.dataset)}")


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


def run_worker(args):
    train_set = load_digits(args, train=True)
    order = torch.Generator().manual_seed(args.seed + 1)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=order)
    test_loader = DataLoader(load_digits(args, train=False), batch_size=32, shuffle=True)
    run_training_loop(args.num_gpus, train_loader, test_loader)


# --------- Launcher --------------------


def parse_args():
    parser = argparse.ArgumentParser(description="The same training without RPC")
    parser.add_argument("--num_gpus", type=int, default=0, choices=(0, 1, 2), help="at most (0)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], default="mnist")
    parser.add_argument("--data_dir", default="data", help="folder for MNIST (data)")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    torch.manual_seed(args.seed)
    run_worker(args)
