"""A job for test_ps_gradients.py: main.py in mode `remote`, with another server class in rank 0.

python tests/param_server/recording_job.py RecordingServer --dataset synthetic --no_dropout --world_size 4
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "param_server"))
import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F

import main
import mnist_data
import remote_server
from digits_net import Net
from glue import launch
from remote_trainer import run_training_loop
from rpc_names import trainers, worker_name


class RecordingServer(remote_server.ParameterServer):
    """Keeps the weights of every version, and every gradient with the version that it was computed on."""

    def __init__(self, args):
        super().__init__(args)
        self.versions, self.applied = [self.flat(gradients=False)], []

    def flat(self, gradients):
        params = self.model.parameters()
        return torch.cat([(p.grad if gradients else p.detach()).reshape(-1).clone() for p in params])

    def _verify_gradients(self, trainer):
        super()._verify_gradients(trainer)
        self.applied.append((trainer, self.snapshot_of[trainer][0], self.flat(gradients=True)))

    def apply_gradients(self, trainer):
        super().apply_gradients(trainer)  # one at a time: DistributedOptimizer holds a lock of its own here
        self.versions.append(self.flat(gradients=False))

    def check(self):
        """Recompute each gradient in this one thread, from the recorded weights and the trainer's known batches."""
        images, labels = mnist_data.load_digits(self.args, train=True)
        everybody = trainers(self.args)
        shards = {t: mnist_data.Shard(images, labels, self.args, n, len(everybody)) for n, t in enumerate(everybody)}
        batches = {t: shard.batches(epoch=0) for t, shard in shards.items()}
        net, worst = Net(dropout=False), 0.0
        for trainer, version, gradient in self.applied:
            data, target = next(batches[trainer])
            torch.nn.utils.vector_to_parameters(self.versions[version], net.parameters())
            expected = torch.autograd.grad(F.nll_loss(net(data), target), list(net.parameters()))
            worst = max(worst, (gradient - torch.cat([g.reshape(-1) for g in expected])).abs().max().item())
        late = sum(version < at for at, (_, version, _) in enumerate(self.applied))
        print(f"checked {len(self.applied)} gradients, {late} late, worst difference {worst:.1e}")


class TutorialServer(remote_server.ParameterServer):
    """The published forward: on the very weights that other trainers' steps change."""

    def forward(self, trainer, inp):
        self.snapshot_of[trainer] = (self.scoreboard.updates, len(inp), 0)
        return self.model(inp)


def run_worker(rank, args, job):
    if rank == 0:
        remote_server.ParameterServer = globals()[args.server]
    rpc.init_rpc(worker_name(rank, args), rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    if rank == 0:
        server = remote_server.get_parameter_server(args)
    else:
        run_training_loop(rank, args, job.device)
    job.wait_for_all()
    if rank == 0 and args.server == "RecordingServer":
        server.check()
    rpc.shutdown()


if __name__ == "__main__":
    arguments = main.parse_args(sys.argv[2:])
    arguments.server = sys.argv[1]
    launch.launch(run_worker, arguments, worker_name)
