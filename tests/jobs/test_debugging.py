"""What docs/RUNNING.md says of debugging a rank, with commands for pdb that come from a pipe."""

import shlex
import sys

from helpers import ROOT
from jobs import free_port
from patches import main_with
from programs import Program


def typing(*lines):
    """Return the words that start a command with these lines on its standard input."""
    return ["sh", "-c", f"printf '%s\\n' {shlex.join(lines)} | exec \"$@\"", "sh", sys.executable]


def has_a_breakpoint(step):
    play = step.Observer.run_episode

    def run_episode(self, agent_rref, episode):
        breakpoint()
        return play(self, agent_rref, episode)

    step.Observer.run_episode = run_episode


def test_pdb_starts_a_rank_and_stops_in_a_served_function(tmp_path):
    """Python's pdb starts rank 0. Rank 1 stops on an RPC thread, while rank 0 waits for the episode."""
    stops = main_with("rl_rpc", tmp_path, has_a_breakpoint)
    flags = ["--world_size", 2, "--max_episodes", 1, "--eval_episodes", 0, "--master_port", free_port(), "--rank"]
    with (
        Program("rl_rpc/main.py", *flags, 0, by=[*typing("c"), "-m", "pdb"]) as agent,
        Program(stops, *flags, 1, by=typing("p 'episode', episode", "c")) as observer,
    ):
        assert (observer.wait(), agent.wait()) == (0, 0), agent.text() + observer.text()
        assert "run_episode()" in observer.output() and "(Pdb) ('episode', 1)" in observer.output()
        assert agent.output().startswith(f"> {ROOT}/rl_rpc/main.py(1)<module>()"), agent.output()
