"""param_server's asynchronous mode beside a parameter server that a Ray user would write: images/s, interleaved.

python bench/ray.py --ray_python /tmp/ray-venv/bin/python --data_dir data --repeats 3

Ray is not a dependency: it has a virtual environment of its own (`python -m venv DIR; DIR/bin/pip install ray`), which
borrows torch from the environment that runs this.  Ray's side, `Server` and `Trainer` below: actors, weights and
gradients through the object store, the server applies each gradient as it comes.  "as a user would": the plain network,
torch's defaults, one thread per actor.  "same settings": our network (channels last), malloc settings, and all weights
and all gradients as one flat tensor each.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from common import interleave, table, use_package

HERE = str(pathlib.Path(__file__).resolve().parent)
use_package("param_server")


def run_ray(args):
    """Train with Ray, print images/s.  In Ray's own Python."""
    sys.path.remove(HERE)  # in which this file has the name of Ray's own module
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
    ray.get([trainer.compute.remote(weights) for trainer in trainers])  # all have loaded their data
    started = time.perf_counter()
    under_way = {trainer.compute.remote(weights): trainer for trainer in trainers}
    left = {trainer: args.batches for trainer in trainers}
    while under_way:
        (done,), _ = ray.wait(list(under_way))
        trainer = under_way.pop(done)
        fresh = server.apply.remote(done)  # the gradient goes from object store to server, and never through here
        left[trainer] -= 1
        if left[trainer]:
            under_way[trainer.compute.remote(fresh)] = trainer
    ray.get(fresh)
    images = args.trainers * args.batches * args.batch_size
    print(json.dumps({"images_per_second": images / (time.perf_counter() - started)}))


def make_net(same):
    """Return the network: ours, or the tutorial's as it stands there."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from digits_net import Net
    from glue.tensors import keep_freed_memory

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
    """The weights, and an SGD that applies each gradient when it comes."""

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
            param.grad = torch.from_numpy(gradient)  # read-only, in the object store: no copy
        self.optimizer.step()
        return self.weights()


class Trainer:
    """A replica with a share of the data."""

    def __init__(self, number, args, same):
        from mnist_data import Batches, load_digits

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
        number, data, target = next(self.batches)
        self.net.zero_grad()
        key = [(1, "dropout", 0, number)] if self.same else []  # without a key our network drops nothing
        F.nll_loss(self.net(data, *key), target).backward()
        gradients = [param.grad for param in self.net.parameters()]
        return parameters_to_vector(gradients).numpy() if self.same else [each.numpy() for each in gradients]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray_python", required=True, help="of the environment that Ray is installed in")
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], default="mnist")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=150, help="per trainer")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--inside", choices=["as a user would", "same settings"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.data_dir = os.path.abspath(args.data_dir)
    if args.inside:
        run_ray(args)
        return
    import param_server  # the bench of this name

    shared = [*sys.path, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]

    def ray(variant):
        command = [args.ray_python, __file__, *sys.argv[1:], "--inside", variant]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(shared)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    args.max_batches = args.batches
    variants = {"two processes on their own": param_server.two_processes(args)}
    for mode in ("async", "async, --overlap"):
        variants[mode] = param_server.distributed(args, mode, args.trainers)
    for variant in ("same settings", "as a user would"):
        variants[f"Ray, {variant}"] = lambda variant=variant: ray(variant)
    rows = interleave(variants, args.repeats)
    table(rows, "images_per_second", "Ray, same settings", f"images/s, {args.trainers} trainers")
    table(rows, "images_per_second", "two processes on their own", "the same, to two processes")


if __name__ == "__main__":
    main()
