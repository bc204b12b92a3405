"""What a server of ddp_rpc sees of a run."""

import collections

import torch

from helpers import load_oracle
from patches import main_with
from programs import run_script

oracle = load_oracle("ddp_rpc")
trainer = oracle.trainer


def tells_of_lookups(program, time, hogwild):
    """A server prints a line for each lookup, the first trainer its parameters, and each rank its process groups.

    The updates of the second trainer come late, so that an evaluation that does not wait for them would see more than
    one table.
    """
    from torch.distributed.nn import RemoteModule

    look_up, set_learning_rate = hogwild.EmbeddingShard.look_up, hogwild.Trainer.set_learning_rate
    run_worker = program.run_worker

    def noted(self, ids_I, offsets_B, with_gradient):
        sums_BD = look_up(self, ids_I, offsets_B, with_gradient)
        graph = "without a graph" if sums_BD.grad_fn is None else f"with a graph, sparse {self.sparse}"
        # Each update counts up the version. The line break is in the text, because RPC threads print at the same time.
        print(f"{len(offsets_B)} bags {graph}, table {self.weight._version}\n", end="", flush=True)
        return sums_BD

    def set_and_print(self, lr):
        set_learning_rate(self, lr)
        if self.rank == 0:
            print("parameters", [tuple(parameter.shape) for parameter in self.model.parameters()], flush=True)
            self.model.remote_emb_module = RemoteModule("server1/cpu", hogwild.nn.EmbeddingBag, (30, 5))
            try:
                list(self.model.parameters())
            except ValueError as error:
                print("with a RemoteModule:", error, flush=True)
            del self.model.remote_emb_module
        else:
            step = self.opt.step
            self.opt.step = lambda context_id: (time.sleep(0.2), step(context_id))

    def run_and_print(rank, *arguments):
        run_worker(rank, *arguments)
        print("process groups", program.dist.is_initialized(), flush=True)

    hogwild.EmbeddingShard.look_up, hogwild.Trainer.set_learning_rate = noted, set_and_print
    program.run_worker = run_and_print


def test_an_evaluation_sees_one_table_and_builds_no_graph_and_parameters_are_those_that_are_here(tmp_path):
    """A trainer's torch.no_grad() has no effect on a server. The run has three evaluations, with epochs between.

    With the RemoteModule of the published code, parameters() raises an error. And hogwild steps the table once for each
    trainer: in the tutorial's mode, two trainers do not compute the same as one process on the joined batch.
    """
    file = tmp_path / "end.pt"
    program = main_with("ddp_rpc", tmp_path, tells_of_lookups)
    done = run_script(program, *oracle.FLAGS, "--sparse", "--checkpoint", file)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    state = torch.load(file, weights_only=True)["state"]
    found, joined = (state["table"], state["fc"]), oracle.one_process(2)
    assert oracle.largest_difference(found, joined) > 1e-3
    moved, moved_joined = (float((table - oracle.start_of_table()).norm()) for table in (found[0], joined[0]))
    # The ratio is about 2, because the table gets two updates with the full learning rate instead of one.
    assert moved > 1.5 * moved_joined
    assert lines.count("parameters [(8, 12), (8,)]") == 2  # fc's weight and bias, before each epoch
    assert sum(line.startswith("with a RemoteModule: ") and "not supported" in line for line in lines) == 2
    assert lines.count("process groups False") == 4  # when the work is done
    lookups = [line.rpartition(", table ") for line in lines if ", table " in line]
    kinds = collections.Counter(kind for kind, _, _ in lookups)
    evaluated = f"{trainer.HELDOUT_BAGS} bags without a graph"
    assert kinds == {"6 bags with a graph, sparse True": 2 * 15 * 2, evaluated: 3 * trainer.HELDOUT_BATCHES}
    assert len({version for kind, _, version in lookups if kind == evaluated}) == 3
