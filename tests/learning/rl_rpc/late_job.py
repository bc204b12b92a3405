"""For exercises.py: main.py with an agent that refuses rewards that are reported by an RPC.

python tests/learning/rl_rpc/late_job.py --mode late
"""

import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "rl_rpc"))
import main
import step
from glue import launch


def report_reward(self, ob_id, reward, published=step.Agent.report_reward):
    assert threading.current_thread() is threading.main_thread(), "an observer has reported a reward"
    published(self, ob_id, reward)


step.Agent.report_reward = report_reward

if __name__ == "__main__":
    launch.launch(main.run_worker, main.parse_args(), main.worker_name)
