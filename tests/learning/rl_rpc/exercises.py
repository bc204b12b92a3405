"""The checks of exercises 1 and 2 of docs/exercises/rl_rpc.md. The page has the commands that run them.

Before these exercises are solved the checks fail, so pytest does not collect this file by itself.
"""

import torch

from helpers import load_oracle
from patches import main_with
from programs import run_script

oracle = load_oracle("rl_rpc")


def dismisses_observer_1(os, time, step):
    """After the first episode. The observer that is deleted writes a file, which the agent waits for."""
    make, finish_episode = step.Observer.__init__, step.Agent.finish_episode

    def make_and_tell(self, *arguments):
        make(self, *arguments)
        path, close = f"{self.id} is closed", self.env.close

        def close_and_tell():
            close()
            open(path, "w").close()

        self.env.close = close_and_tell

    def finish_and_dismiss(self):
        before, lowest = self.learner.env_steps, finish_episode(self)
        learned_from = self.learner.env_steps - before
        if self.learner.episodes == 1:
            self.dismiss(1)
            deadline = time.monotonic() + 10
            while not os.path.exists("1 is closed") and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            print(len(self.trajectories[2].rewards), "steps,", learned_from, "in the update")
            print([name for name in os.listdir() if name.endswith("is closed")])
        return lowest

    step.Observer.__init__, step.Agent.finish_episode = make_and_tell, finish_and_dismiss


def test_last_reference(tmp_path):
    """A dismissed observer is deleted in its own process, and closes its environment. The agent goes on without it."""
    flags = ("--world_size", 3, "--max_episodes", 2, "--eval_episodes", 0)
    done = run_script(main_with("rl_rpc", tmp_path, dismisses_observer_1), *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    _, steps, closed, _ = done.stdout.splitlines()
    assert closed == "['1 is closed']", "is there another reference?"
    played, learned_from = (text.split()[0] for text in steps.split(", "))
    assert played == learned_from, "the agent has learned again from the old episode of the dismissed observer"


def refuses_reports(threading, step):
    report = step.Agent.report_reward

    def report_reward(self, ob_id, reward):
        assert threading.current_thread() is threading.main_thread(), "an observer has reported a reward"
        report(self, ob_id, reward)

    step.Agent.report_reward = report_reward


def test_late_rewards(tmp_path):
    """Mode `late` plays and learns as one process does, and no observer reports a reward during an episode."""
    file = tmp_path / "end.pt"
    flags = ("--max_episodes", oracle.EPISODES, "--seed", oracle.SEED, "--eval_episodes", 0, "--log_interval", 1)
    main = main_with("rl_rpc", tmp_path, refuses_reports)
    done = run_script(main, "--mode", "late", "--world_size", 3, *flags, "--checkpoint", file)
    assert (done.returncode, done.stderr) == (0, "")
    reference = oracle.single_process_reinforce(oracle.SEED, oracle.EPISODES, observers=2)
    lines, state = oracle.EPISODE_LINE.findall(done.stdout), torch.load(file, weights_only=True)["state"]
    oracle.assert_is_the_single_process_loop(lines, state, reference)
