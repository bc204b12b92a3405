"""A parameter server. Rank 0 holds a network for MNIST, and all other ranks, the trainers, train it
at the same time. A trainer sends images and gets predictions. The network's forward and backward
pass and the optimizer's step run on the server.

    python tutorial.py                            # starts a server and three trainers here
    python tutorial.py --world_size 2 --rank 0    # only the server; --rank 1 in another terminal
    python tutorial.py --dataset synthetic        # random patterns instead of MNIST: no download

Why RPC? DDP is the tool for copies of a model on many GPUs. Here there are no copies. A model that
is too large for a trainer lives on another machine, and the trainers reach it by calls.

PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework" (text of
2020-11-28, code of 2025-08). "Difference 7" is number 7 in docs/differences/param_server.md.
"""

import argparse
import copy
import logging
import os
import sys
import threading
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision import datasets, transforms

warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself does this
# DistributedOptimizer logs that Python's GIL may slow down a class such as SGD below.
logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)

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


# --------- Parameter server --------------------


class ParameterServer(nn.Module):
    """Trainers call its methods. Such a call runs on one of the server's RPC threads. There are 16
    by default, so several calls may run at the same time."""

    def __init__(self, num_gpus=0):
        super().__init__()
        self.model = Net(num_gpus=num_gpus)
        self.input_device = get_device(0, num_gpus)
        # The network's structure without its weights (on "meta", a tensor has a shape and no
        # memory). forward() copies it for each call, and computes with clones of the weights.
        self.layers = copy.deepcopy(self.model).to("meta")

    def forward(self, inp, training):
        """Return log-probabilities (B, 10) of images (B, 1, 28, 28).

        Between this forward pass and its backward pass, another trainer's step may change the
        weights in place, and autograd would refuse to go backward (difference 1). So each call
        computes with clones. Gradients flow through clone() to the weights themselves.
        """
        inp = inp.to(self.input_device)
        with global_lock:  # no step comes in between, so all clones are of one version
            weights = {name: param.clone() for name, param in self.model.named_parameters()}
        # functional_call puts the clones into the module that it is given. Several calls may run at
        # the same time, so each of them needs a different module.
        layers = copy.deepcopy(self.layers).train(training)
        out = functional_call(layers, weights, (inp,))
        # RPC sends CPU tensors. To send tensors of a GPU, it needs device maps (difference 7).
        return out.to("cpu")

    def get_dist_gradients(self, cid):
        """Return {name: gradient}, to verify that distributed autograd has worked. This needs no
        lock, because the gradients are in the context `cid`, which belongs to the calling
        trainer."""
        grads = dist_autograd.get_gradients(cid)
        params = self.model.named_parameters()
        return {name: grads[param].to("cpu") for name, param in params if param in grads}

    def get_param_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer. This only reads, so it needs
        no lock."""
        param_rrefs = [rpc.RRef(param) for param in self.model.parameters()]
        return param_rrefs


# The one server of this process, and a lock. The lock is held while the server is made, and while
# the weights are cloned or changed.
param_server = None
global_lock = threading.Lock()


def get_parameter_server(num_gpus=0):
    """Return the server to all trainers. The call that comes first makes it."""
    global param_server
    with global_lock:
        if not param_server:
            param_server = ParameterServer(num_gpus=num_gpus)
        return param_server


class SGD(optim.SGD):
    """The optimizer. The server has one for each trainer. It has to be a subclass. If
    DistributedOptimizer got optim.SGD itself, it would use a version whose step takes no lock
    (difference 9)."""

    def step(self):
        # DistributedOptimizer already allows only one step at a time. global_lock also keeps
        # forward() from cloning during a step.
        with global_lock:
            super().step()
        # DistributedOptimizer has put the context's gradients into .grad. Drop them, because a
        # parameter that gets no gradient in the next step would be updated with this one again.
        self.zero_grad()


# TCP instead of shared memory, and no channels for GPUs: private to torch (docs/COSTS.md).
options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])


def run_parameter_server(rank, world_size):
    # The server needs no loop, because its RPC threads answer the trainers. rpc.shutdown() waits
    # until all ranks have called it, so the server ends when all trainers have finished.
    print("PS master initializing RPC")
    rpc.init_rpc(
        name="parameter_server",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=options,
    )
    print("RPC initialized! Running parameter server...")
    rpc.shutdown()
    print("RPC shutdown on parameter server.")


# --------- Trainers --------------------


class TrainerNet(nn.Module):
    """The network as a trainer sees it. It has no layers: forward() runs on the server."""

    def __init__(self, num_gpus=0):
        super().__init__()
        self.num_gpus = num_gpus
        # get_parameter_server runs on the server, and its result stays there. We get a reference
        # to it, an RRef. All trainers refer to the same object, as by a pointer over the network.
        name = "parameter_server"
        self.param_server_rref = rpc.remote(name, get_parameter_server, args=(num_gpus,))

    def get_global_param_rrefs(self):
        # rpc_sync() makes the method run in the process that owns the object, and waits for it.
        return self.param_server_rref.rpc_sync().get_param_rrefs()

    def forward(self, x):
        # eval() on the trainer cannot reach layers on the server, so the call says what it wants.
        return self.param_server_rref.rpc_sync().forward(x, self.training)


def run_training_loop(rank, num_gpus, train_loader, test_loader):
    net = TrainerNet(num_gpus=num_gpus)
    param_rrefs = net.get_global_param_rrefs()
    opt = DistributedOptimizer(SGD, param_rrefs, lr=0.03)
    for i, (data, target) in enumerate(train_loader):
        # The context records the calls inside it, so that backward() can go through them. In each
        # process, it keeps the gradients of this step under the id `cid`.
        with dist_autograd.context() as cid:
            model_output = net(data)
            target = target.to(model_output.device)
            loss = F.nll_loss(model_output, target)
            if i % 5 == 0:
                print(f"Rank {rank} training batch {i} loss {loss.item()}", flush=True)
            dist_autograd.backward(cid, [loss])
            # Check that the gradients are on the server. Only in the first step, because the
            # answer is as large as the network (difference 4).
            if i == 0:
                gradients = net.param_server_rref.rpc_sync().get_dist_gradients(cid)
                assert len(gradients) == len(param_rrefs)
            # Other trainers may have made steps since our forward pass. Then our gradient is stale,
            # because it belongs to older weights, and is applied to the new ones.
            opt.step(cid)

    print("Training complete!")
    print("Getting accuracy....")
    get_accuracy(test_loader, net)


def get_accuracy(test_loader, model):
    model.eval()
    correct_sum = 0
    # Answers are compared on the first GPU, if the network uses one.
    device = get_device(0, model.num_gpus)
    with torch.no_grad():  # in this process only. The server records a graph, which nobody uses
        for data, target in test_loader:
            out = model(data)
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


def run_worker(rank, args):
    print(f"Worker rank {rank} initializing RPC")
    rpc.init_rpc(
        name=f"trainer_{rank}",
        rank=rank,
        world_size=args.world_size,
        rpc_backend_options=options,
    )
    print(f"Worker {rank} done initializing RPC")
    # init_rpc has waited for all ranks, also for the server, which has downloaded MNIST by now. On
    # other hosts each trainer downloads it. If several trainers share such a host, put MNIST there
    # first.
    train_set = load_digits(args, train=True)
    # This trainer's part of the images, so that the trainers make one epoch together.
    train_set = Subset(train_set, range(rank - 1, len(train_set), args.world_size - 1))
    order = torch.Generator().manual_seed(args.seed + rank)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, generator=order)
    test_loader = DataLoader(load_digits(args, train=False), batch_size=32, shuffle=True)
    run_training_loop(rank, args.num_gpus, train_loader, test_loader)
    rpc.shutdown()  # waits for the server and the other trainers


# --------- Launcher --------------------


def run_rank(rank, args):
    if parent := mp.parent_process():  # a spawned rank ends when its parent ends
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    # torch uses all cores for an operation here: unlike in the other tutorials, convolutions are work
    # enough for several threads.
    torch.manual_seed(args.seed + rank)
    if rank == 0:
        load_digits(args, train=True)  # one rank downloads, before the others read (difference 10)
        run_parameter_server(0, args.world_size)
    else:
        run_worker(rank, args)


def parse_args():
    parser = argparse.ArgumentParser(description="Parameter-Server RPC based training")
    parser.add_argument("--world_size", type=int, default=4, help="ranks: server and trainers (4)")
    parser.add_argument("--rank", type=int, help="start only this rank; 0 is the server")
    parser.add_argument("--num_gpus", type=int, default=0, choices=(0, 1, 2), help="how many (0)")
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


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    if args.master_addr in ("localhost", "127.0.0.1"):
        # RPC and Gloo on loopback only; torch's store listens on all interfaces (docs/CLUSTERS.md).
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    if args.rank is None:
        mp.spawn(run_rank, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_rank(args.rank, args)  # one rank in this terminal
