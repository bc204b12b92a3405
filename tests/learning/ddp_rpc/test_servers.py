"""What a server of ddp_rpc sees of a run: its lookups, and how old the gradients are that it gets."""

import collections

import torch

from helpers import load_oracle
from patches import main_with
from programs import run_script

oracle = load_oracle("ddp_rpc")
trainer = oracle.trainer


def lines_of(folder, mode, patch, *flags):
    done = run_script(main_with("ddp_rpc", folder, patch), "--mode", mode, "--epochs", 1, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


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
    lines = lines_of(tmp_path, "hogwild", tells_of_lookups, *oracle.FLAGS, "--sparse", "--checkpoint", file)
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


def holds_messages_back(collections, threading, torch, pipelined):
    """The server makes a gradient very stale. For each update, it prints how many others came since the lookup.

    Message n of a trainer brings the gradient of its batch n - 1, and asks for the sums of its batch n + 1. Batches
    count from 1. Trainer 0 looks up batch 4 with message 3, and message 5 brings the gradient. In between the server
    gets

    - from trainer 0: message 4, so one update
    - from each other trainer: messages 2 to 6, so five updates. Trainer 0 sends message 3 when it has ended batch 2. So
      the others had begun batch 2, for which they needed the answer to message 1, but not to message 2. Until message 5
      is answered trainer 0 does not begin batch 6. So the others do not end batch 6, but have sent message 6 before it.
    """
    shard = pipelined.EmbeddingShard
    exchange, forward, set_learning_rate = shard.exchange, shard.forward, shard.set_learning_rate
    sent, answered = collections.Counter(), collections.Counter()  # messages of each trainer
    changed, thread = threading.Condition(), threading.local()
    updates, seen = [], collections.defaultdict(collections.deque)  # how many there were at each trainer's lookups

    def exchange_when_allowed(self, trainer, *arguments):
        thread.trainer = trainer
        hold(trainer, sent[trainer])
        sent[trainer] += 1
        sums_BD = exchange(self, trainer, *arguments)
        with changed:
            answered[trainer] += 1
            changed.notify_all()
        return sums_BD

    def hold(trainer, number):
        """Make trainer 0 look up batch 4 early, and bring its gradient as late as the others let it."""
        with changed:
            if trainer != 0 and number == 2:
                assert changed.wait_for(lambda: answered[0] > 3, 60)
            if trainer == 0 and number == 5:
                others = sent.keys() - {0}
                assert changed.wait_for(lambda: all(answered[other] > 6 for other in others), 60)
                # The others cannot send message 7 now. If the bound is broken they do, and this message comes later.
                changed.wait_for(lambda: any(answered[other] > 7 for other in others), 2)

    def forward_and_note(self, *arguments):
        if torch.is_grad_enabled():  # not in an evaluation
            seen[thread.trainer].append(len(updates))
        return forward(self, *arguments)

    def set_and_count(self, lr):
        set_learning_rate(self, lr)
        self.optimizer.register_step_post_hook(count)  # called under the lock that protects the update

    def count(*_):
        updates.append(len(updates) - seen[thread.trainer].popleft())
        print(f"stale by {updates[-1]}\n", end="", flush=True)

    shard.exchange, shard.forward, shard.set_learning_rate = exchange_when_allowed, forward_and_note, set_and_count


def test_a_pipelined_gradient_is_as_stale_as_the_page_says_and_no_staler(tmp_path):
    """Three trainers. At most 1 + 5 (T - 1) updates (docs/results), here 11."""
    lines = lines_of(tmp_path, "pipelined", holds_messages_back, "--world_size", 5, "--batches", 10)
    stale = [int(line.split()[-1]) for line in lines if line.startswith("stale by ")]
    assert len(stale) == 3 * 10 and max(stale) == 11
