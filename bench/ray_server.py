"""Compare the images/s of param_server's asynchronous mode with those of a parameter server in Ray.

    python bench/ray_server.py --ray_python DIR/bin/python --data_dir data --repeats 3

Ray is not a dependency of this repository. Install it into an environment of its own
(`python -m venv DIR; DIR/bin/pip install ray`); torch is imported from the environment that runs this program.

In Ray, the classes `Server` and `Trainer` of this file are actors. Weights and gradients are sent through Ray's object
store. The server applies each gradient when the gradient arrives. There are two variants. Both use one thread per
actor. The variant "as a user would" has the plain network and torch's defaults. The variant "same settings" has
param_server's network (channels last) and malloc settings, one flat tensor for all weights, and one for all gradients.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from common import interleave, table, use_package

use_package("param_server")


def run_ray(args):
    """Train with Ray and print images/s. This function runs in the Python that has Ray."""
    import ray

    same = args.inside == "same settings"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    server = ray.remote(Server).remote(args.lr, same)
    trainers = [ray.remote(Trainer).remote(n, args, same) for n in range(args.trainers)]
    weights = ray.get(server.weights.remote())
    ray.get([trainer.compute.remote(weights) for trainer in trainers])  # returns when all have loaded their data
    started = time.perf_counter()
    under_way = {trainer.compute.remote(weights): trainer for trainer in trainers}
    left = {trainer: args.batches for trainer in trainers}
    while under_way:
        (done,), _ = ray.wait(list(under_way))
        trainer = under_way.pop(done)
        fresh = server.apply.remote(done)  # the server gets the gradient from the object store
        left[trainer] -= 1
        if left[trainer]:
            under_way[trainer.compute.remote(fresh)] = trainer
    ray.get(fresh)
    images = args.trainers * args.batches * args.batch_size
    print(json.dumps({"images_per_second": images / (time.perf_counter() - started)}))


def make_net(same):
    """Return the network of param_server if `same` is true, and otherwise the unchanged network of the tutorial."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from glue.host import keep_freed_memory
    from net import Net

    torch.set_num_threads(1)
    torch.manual_seed(1)
    if same:
        keep_freed_memory()
        return Net()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

        def forward(self, x):
            x = F.max_pool2d(self.conv2(F.relu(self.conv1(x))), 2)
            x = torch.flatten(self.dropout1(x), 1)
            return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)

    return Plain()


class Server:
    """A Ray actor, which holds the weights. It applies each gradient with SGD when the gradient arrives."""

    def __init__(self, lr, same):
        import torch

        self.same, self.net = same, make_net(same)
        self.params = list(self.net.parameters())
        if same:
            self.params = [torch.nn.Parameter(torch.nn.utils.parameters_to_vector(self.params).detach())]
        self.optimizer = torch.optim.SGD(self.params, lr=lr)

    def weights(self):
        if self.same:
            return self.params[0].detach().numpy()
        return {name: value.numpy() for name, value in self.net.state_dict().items()}

    def apply(self, gradients):
        import torch

        for param, gradient in zip(self.params, [gradients] if self.same else gradients, strict=True):
            param.grad = torch.from_numpy(gradient)  # no copy: read-only memory of the object store
        self.optimizer.step()
        return self.weights()


class Trainer:
    """A Ray actor, which holds a replica of the network and a share of the data."""

    def __init__(self, number, args, same):
        from data import Batches, load_digits

        self.same, self.net = same, make_net(same)
        batches = Batches(*load_digits(args.dataset, args.data_dir, 1, train=True), args.batch_size, seed=1)
        numbers = range(number, args.trainers * (args.batches + 1), args.trainers)
        self.batches = batches.of(0, [n % batches.per_epoch for n in numbers])

    def compute(self, weights):
        import torch
        import torch.nn.functional as F
        from torch.nn.utils import parameters_to_vector, vector_to_parameters

        if self.same:
            vector_to_parameters(torch.from_numpy(weights), self.net.parameters())
        else:
            self.net.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        _, data, target = next(self.batches)
        self.net.zero_grad()
        F.nll_loss(self.net(data), target).backward()
        gradients = [param.grad for param in self.net.parameters()]
        return parameters_to_vector(gradients).numpy() if self.same else [each.numpy() for each in gradients]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray_python", required=True, help="the Python that has Ray")
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], default="mnist")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=150, help="batches of each trainer")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inside", choices=["as a user would", "same settings"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.data_dir = os.path.abspath(args.data_dir)
    if args.inside:
        run_ray(args)
        return
    import param_server  # bench/param_server.py

    shared = [*sys.path, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]

    def ray(variant):
        command = [args.ray_python, __file__, *sys.argv[1:], "--inside", variant]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(shared)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    args.max_batches = args.batches
    variants = {"two processes on their own": param_server.two_processes(args)}
    for mode in ("replica", "overlap"):
        variants[mode] = param_server.distributed(args, mode, args.trainers)
    for variant in ("same settings", "as a user would"):
        variants[f"Ray, {variant}"] = lambda variant=variant: ray(variant)
    rows = interleave(variants, args.repeats)
    table(rows, "images_per_second", "Ray, same settings", f"images/s, {args.trainers} trainers")
    table(rows, "images_per_second", "two processes on their own", "the same runs, compared with another baseline")


if __name__ == "__main__":
    main()
