"""What a run prints and writes: lines, a progress bar, curves, checkpoints, and the result. In the agent."""

import math
import statistics

from glue import checkpoint, report


class Progress:  # in the agent
    """The output of one run. Call start(), after_step() after each update, after_training(), and finish()."""

    def __init__(self, args, agent, resume_keys):
        """`resume_keys`: flags that must be equal in a run that continues from a checkpoint of this one."""
        self.args = args
        self.agent = agent
        self.learner = agent.learner
        self.report = report.Report("rl_rpc", args)
        self.settings = {key: vars(args)[key] for key in resume_keys}

    def start(self):
        """With --resume, load the checkpoint. Print when this run will end."""
        learner = self.learner
        if state := checkpoint.resume(self.args, "rl_rpc", self.settings):
            with checkpoint.going_on_from(self.args.checkpoint):
                learner.load_state_dict(state)
            average = f"{learner.running_reward:.2f}"
            self.report.say(f"Going on after episode {learner.episodes}, with an average reward of {average}.")
            if learner.solved or learner.episodes >= self.args.max_episodes:
                self.report.say(report.NOTHING_LEFT)
        goal = f"reward threshold of {learner.reward_threshold} is reached, or for {self.args.max_episodes} episodes"
        self.report.say(f"This will run until {goal}. Ctrl+C to exit.")
        self.steps_before = learner.env_steps
        self.bar = self.report.progress()

    def after_step(self, last_reward):
        """Record one update. After every --log_interval episodes, print a line and write the checkpoint."""
        learner = self.learner
        self.report.scalar("reward/last", last_reward, learner.episodes)
        self.report.scalar("reward/running", learner.running_reward, learner.episodes)
        average = f"{learner.running_reward:.2f}"
        self.bar.set_postfix_str(f"episode {learner.episodes}, average reward {average}", refresh=False)
        self.bar.update(learner.env_steps - self.steps_before - self.bar.n)
        if learner.episodes % self.args.log_interval == 0:
            self.report.say(f"Episode {learner.episodes}\tLast reward: {last_reward:.2f}\tAverage reward: {average}")
            self.save(self.args.checkpoint)

    def save(self, path):
        """Write a checkpoint to `path`, unless it is None. play.py can read it too."""
        if path:
            checkpoint.save(path, "rl_rpc", self.settings, self.learner.state_dict())

    def after_training(self):
        """Write the checkpoint and the policy, and print whether the environment is solved."""
        learner = self.learner
        self.bar.close()
        self.save(self.args.checkpoint)
        self.save(self.args.save)
        if learner.solved:
            self.report.say(f"Solved! Running reward is now {learner.running_reward}!")
        else:
            reached = f"{learner.running_reward:.2f} after {learner.episodes} episodes"
            self.report.say(f"Not solved: running reward is {reached}.")

    def finish(self, meter, rewards, lost):
        """Print the result, and write the summary and the picture, if the command line asks for them.

        `rewards`: those of the greedy policy, in --eval_episodes episodes.
        """
        learner = self.learner
        staleness = {}
        if hasattr(self.agent, "staleness"):  # a mode that learns from episodes of older weights
            staleness = report.staleness_figures(self.agent.staleness)
            mean = staleness["staleness_mean"]
            most = staleness["staleness_max"]
            self.report.say(f"Staleness: mean {mean:.2f}, max {most} updates.")
        if rewards:
            reached = f"mean reward {statistics.mean(rewards):.2f}, lowest {min(rewards):.2f}"
            self.report.say(f"Greedy policy over {len(rewards)} episodes: {reached}")
        steps = learner.env_steps - self.steps_before
        threshold = learner.reward_threshold
        self.report.close(
            plot={"reward of the lowest observer": {"reward/last": "one episode", "reward/running": "running average"}},
            xlabel="episode",
            floor=("solved", threshold) if math.isfinite(threshold) else None,
            episodes=learner.episodes,
            env_steps=learner.env_steps,
            env_steps_per_second=round(steps / max(meter.seconds, 1e-9), 1),
            solved=learner.solved,
            running_reward=learner.running_reward,
            eval_mean_reward=statistics.mean(rewards) if rewards else None,
            lost=sorted(lost),
            **staleness,
        )
