"""What a run prints and writes: lines, a progress bar, curves, checkpoints, and the evaluation at the end.

Runs in rank 0. Called by run_agent in main.py.
"""

import math
import statistics

from glue import checkpoint, report
from play import play_greedily


class Progress:
    """The output of one run. Call start(), then after_episode() after each update, and tell_result() at the end."""

    def __init__(self, agent, args):
        self.agent = agent
        self.args = args
        self.result = report.Report("rl_rpc", args)
        # A run that continues from a checkpoint must have the same settings as the run that wrote it.
        self.settings = {"seed": args.seed, "env_id": args.env_id}

    def start(self):
        """With --resume, load the checkpoint. Print when this run will end."""
        agent = self.agent
        state = checkpoint.resume(self.args, "rl_rpc", self.settings)
        if state:
            agent.load_state_dict(state)
            average = f"{agent.running_reward:.2f}"
            self.result.say(f"Going on after episode {agent.episodes}, with an average reward of {average}.")
            if agent.solved or agent.episodes >= self.args.max_episodes:
                self.result.say(report.NOTHING_LEFT)
        goal = f"reward threshold of {agent.reward_threshold} is reached, or for {self.args.max_episodes} episodes"
        self.result.say(f"This will run until {goal}. Ctrl+C to exit.")
        self.steps_before = agent.env_steps
        self.bar = self.result.progress()

    def after_episode(self, last_reward):
        """Record one episode. After every --log_interval episodes, print a line and write the checkpoint."""
        agent = self.agent
        self.result.scalar("reward/last", last_reward, agent.episodes)
        self.result.scalar("reward/running", agent.running_reward, agent.episodes)
        average = f"{agent.running_reward:.2f}"
        self.bar.set_postfix_str(f"episode {agent.episodes}, average reward {average}", refresh=False)
        self.bar.update(agent.env_steps - self.steps_before - self.bar.n)
        if agent.episodes % self.args.log_interval == 0:
            self.result.say(f"Episode {agent.episodes}\tLast reward: {last_reward:.2f}\tAverage reward: {average}")
            self.save(self.args.checkpoint)

    def save(self, path):
        """Write a checkpoint to `path`, unless it is None. play.py can read it too."""
        if path:
            checkpoint.save(path, "rl_rpc", self.settings, self.agent.state_dict())

    def tell_result(self, meter, lost):
        """Write the checkpoint and the policy, print the result, evaluate the policy, and write the summary."""
        agent = self.agent
        self.bar.close()
        self.save(self.args.checkpoint)
        self.save(self.args.save)
        if agent.solved:
            self.result.say(f"Solved! Running reward is now {agent.running_reward}!")
        else:
            reached = f"{agent.running_reward:.2f} after {agent.episodes} episodes"
            self.result.say(f"Not solved: running reward is {reached}.")
        staleness = report.staleness_figures(agent.staleness)
        if self.args.mode == "async":
            mean = staleness["staleness_mean"]
            most = staleness["staleness_max"]
            self.result.say(f"Staleness: mean {mean:.2f}, max {most} updates.")
        eval_mean = self.evaluate()
        steps = agent.env_steps - self.steps_before
        threshold = agent.reward_threshold
        self.result.close(
            plot={"reward of the lowest observer": {"reward/last": "one episode", "reward/running": "running average"}},
            xlabel="episode",
            floor=("solved", threshold) if math.isfinite(threshold) else None,
            episodes=agent.episodes,
            env_steps=agent.env_steps,
            env_steps_per_second=round(steps / max(meter.seconds, 1e-9), 1),
            solved=agent.solved,
            running_reward=agent.running_reward,
            eval_mean_reward=eval_mean,
            lost=sorted(lost),
            **staleness,
        )

    def evaluate(self):
        """Let the greedy policy play --eval_episodes episodes; print and return the mean reward (None for 0)."""
        episodes = self.args.eval_episodes
        if not episodes:
            return None
        # Usually above the average in training, in which dropout removes 60 % of the hidden units.
        rewards = play_greedily(self.agent.policy, self.args.env_id, episodes, self.args.seed)
        mean = statistics.mean(rewards)
        reached = f"mean reward {mean:.2f}, lowest {min(rewards):.2f}"
        self.result.say(f"Greedy policy over {episodes} episodes: {reached}")
        return mean
