"""PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework" in one file.

It follows the text of 2020-11-28, for torch 1.5. A number such as [4] is a point of DIFFERENCES.md.
Rank 0 is the server and has the network. All other ranks are trainers, which train at the same
time. Each trainer sends images to the server, gets predictions, and computes the loss. The
backward pass through the network and the optimizer's step run on the server.

python tutorial.py                            # starts a server and two trainers on this machine
python tutorial.py --world_size 3 --rank 0    # only the server; ranks 1 and 2 in other terminals
python tutorial.py --dataset synthetic        # random patterns instead of MNIST: no download
"""

import argparse
import copy
import logging
import os
import sys
import warnings
from threading import Lock

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision import datasets, transforms

warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of Gloo
# DistributedOptimizer logs that it uses our class SGD unchanged. That is what we want.
logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)


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


# torch's default transport, shared memory, keeps a core busy for every rank, so all ranks are
# slow if cores are few. TCP ("uv") does not. _transports is private to torch [22].
rpc_options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])

param_server = None
global_lock = Lock()  # on the server: held while the network is made, cloned or changed


class ParameterServer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Net()
        self.layers = copy.deepcopy(self.model).to("meta")  # on "meta" weights use no memory

    def forward(self, inp):
        """Return log-probabilities (B, 10) of images (B, 1, 28, 28). Trainers call it at any time.

        Another trainer may change the weights before this trainer's backward pass. So [1]:
        1. Each call computes with clones. Autograd passes through clone() back to the weights.
        2. Cloning and steps take the same lock, so that all clones are of the same version.
        3. Each call has layers of its own, because functional_call puts the clones into them.
        """
        with global_lock:
            weights = {name: param.clone() for name, param in self.model.named_parameters()}
        layers = copy.deepcopy(self.layers)
        return functional_call(layers, weights, (inp,))

    def get_dist_gradients(self, cid):
        """Return {name: gradient} of a context. It needs no lock: only one trainer calls this."""
        grads = dist_autograd.get_gradients(cid)
        params = self.model.named_parameters()
        return {name: grads[param] for name, param in params if param in grads}

    def get_param_rrefs(self):
        """Return an RRef to each parameter. All trainers call this. It only reads: no lock."""
        return [rpc.RRef(param) for param in self.model.parameters()]


def get_parameter_server():
    """Return the one ParameterServer. All trainers call this. The first call makes it."""
    global param_server
    with global_lock:
        if not param_server:
            param_server = ParameterServer()
        return param_server


class SGD(optim.SGD):
    """SGD that takes the lock. (DistributedOptimizer replaces optim.SGD by another class [9].)"""

    def step(self):
        """Runs on the server, for each trainer. A lock of torch prevents two steps at once."""
        with global_lock:  # our lock prevents cloning during a step
            super().step()
        self.zero_grad()  # remove the gradients that torch has put from the context into .grad


def run_parameter_server(rank, args):
    torch.manual_seed(args.seed)  # for weights and dropout (the masks depend on the order of calls)
    test_loader = DataLoader(load_digits(args, train=False), batch_size=32)
    print("PS master initializing RPC")
    name = "parameter_server"
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=rpc_options)
    print("RPC initialized! Running parameter server...")
    rpc.shutdown()  # waits for all ranks; until then RPC threads serve the trainers
    print("RPC shutdown on parameter server.")
    print("Getting accuracy....")
    get_accuracy(test_loader, param_server.model)


class TrainerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server)

    def get_global_param_rrefs(self):
        return self.param_server_rref.rpc_sync().get_param_rrefs()

    def forward(self, x):
        return self.param_server_rref.rpc_sync().forward(x)


def run_training_loop(rank, train_loader):
    net = TrainerNet()
    param_rrefs = net.get_global_param_rrefs()
    opt = DistributedOptimizer(SGD, param_rrefs, lr=0.03)
    for i, (data, target) in enumerate(train_loader):
        with dist_autograd.context() as cid:  # keeps gradients of its own: no zero_grad needed
            loss = F.nll_loss(net(data), target)
            if i % 20 == 0:
                print(f"Rank {rank} training batch {i} loss {loss.item()}", flush=True)
            dist_autograd.backward(cid, [loss])
            if i == 0:  # only once, because this check sends all gradients [4]
                gradients = net.param_server_rref.rpc_sync().get_dist_gradients(cid)
                assert len(gradients) == len(param_rrefs)
            opt.step(cid)
    print("Training complete!")


def get_accuracy(test_loader, model):
    """Runs on the server [2], because TrainerNet.eval() would not reach the server's network."""
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
    parser = argparse.ArgumentParser(description="Parameter-Server RPC based training")
    parser.add_argument("--world_size", type=int, default=3, help="ranks: server and trainers (3)")
    parser.add_argument("--rank", type=int, help="start only this rank; 0 is the server")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port on it (29500)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], default="mnist")
    parser.add_argument("--data_dir", default="data", help="folder for MNIST (data)")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the server and at least one trainer")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be from 0 to {args.world_size - 1}")
    return args


def run_worker(rank, args):
    """Run one rank in this process: the server or a trainer. Sets torch's number of threads."""
    torch.set_num_threads(1)  # per operation, because ranks and RPC threads share the cores
    if rank == 0:
        run_parameter_server(rank, args)
        return
    print(f"Worker rank {rank} initializing RPC")
    name = f"trainer_{rank}"
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=rpc_options)
    print(f"Worker {rank} done initializing RPC")
    order = torch.Generator().manual_seed(args.seed + rank)
    train_set = load_digits(args, train=True)  # downloaded by the server before init_rpc [10]
    share = range(rank - 1, len(train_set), args.world_size - 1)  # this trainer's images [3]
    train_set = Subset(train_set, share)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=order)
    run_training_loop(rank, train_loader)
    rpc.shutdown()


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it. So RPC listens on the loopback
        # interface only [21]. The store, at --master_port, still listens on all interfaces.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # init_rpc uses Gloo for a moment
    # RPC sends functions and classes by name. Every rank finds them in this file, its main module.
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal

# If a rank dies, spawned ranks end, but ranks in terminals may wait forever. main.py names the lost
# rank, and ends the job or continues without it (--on_lost). This program needs a free port, and
# saves nothing. main.py finds a free port for spawned ranks, and has --checkpoint and --resume.
