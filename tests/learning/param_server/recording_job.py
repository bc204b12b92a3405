"""A job for test_gradients.py: main.py in mode `remote`, with another server class in rank 0.

python tests/learning/param_server/recording_job.py RecordingServer --dataset synthetic --no_dropout --world_size 4
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "param_server"))
import torch
import torch.nn.functional as F

import main
import remote
from data import Batches, load_digits
from glue import launch
from net import Net
from ranks import worker_name


class RecordingServer(remote.ParameterServer):
    """Records the weights of every version, and every gradient with the version of its weights."""

    def __init__(self, args, coordinator):
        super().__init__(args, coordinator)
        self.args = args
        self.versions, self.applied = [self.flat(gradients=False)], []

    def flat(self, gradients):
        params = self.model.parameters()
        return torch.cat([(p.grad if gradients else p.detach()).reshape(-1).clone() for p in params])

    def verify_gradients(self, trainer):
        super().verify_gradients(trainer)
        batch = self.coordinator.epoch, self.coordinator.assignments.dealt[trainer][0]
        self.applied.append((batch, self.version_of[trainer], self.flat(gradients=True)))

    def apply_gradients(self, trainer):
        super().apply_gradients(trainer)  # no lock needed: torch's lock allows one step at a time
        self.versions.append(self.flat(gradients=False))

    def check(self):
        """Compute each gradient again in this thread, from the recorded weights and the trainer's batch."""
        args = self.args
        digits = load_digits(args.dataset, args.data_dir, args.seed, train=True)
        batches = Batches(*digits, args.batch_size, args.seed)
        net, worst = Net().eval(), 0.0
        for (epoch, number), version, gradient in self.applied:
            ((_, data, target),) = batches.of(epoch, [number])
            torch.nn.utils.vector_to_parameters(self.versions[version], net.parameters())
            expected = torch.autograd.grad(F.nll_loss(net(data), target), list(net.parameters()))
            worst = max(worst, (gradient - torch.cat([g.reshape(-1) for g in expected])).abs().max().item())
        late = sum(version < at for at, (_, version, _) in enumerate(self.applied))
        print(f"checked {len(self.applied)} gradients, {late} late, worst difference {worst:.1e}")


class TutorialServer(remote.ParameterServer):
    """The published forward pass: it uses the shared weights, which other trainers' steps change."""

    def forward(self, trainer, inp):
        self.version_of[trainer] = self.coordinator.updates
        return self.model(inp)


def run_worker(rank, args, job):
    if rank == 0:
        remote.ParameterServer = globals()[args.server]
    main.run_worker(rank, args, job)
    if rank == 0 and args.server == "RecordingServer":
        remote.param_server.check()


if __name__ == "__main__":
    arguments = main.parse_args(sys.argv[2:])
    arguments.server = sys.argv[1]
    launch.launch(run_worker, arguments, worker_name)
