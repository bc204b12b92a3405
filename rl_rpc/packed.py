"""Mode `packed`: a reward travels with the next state, so there is one RPC for each environment step instead of two.

Read step.py first. Here is what differs, in the order of an episode.
"""

import step


class Observer(step.Observer):  # in an observer, on an RPC thread
    def run_episode(self, agent_rref, episode):
        """Play one episode; return its last reward, which no state follows."""
        state = self.reset(episode)
        reward = None
        done = False
        while not done:
            action = agent_rref.rpc_sync().select_action(self.id, state, reward)  # the only RPC of the step
            state, reward, done = self.step(action)
        return reward


class Agent(step.Agent):  # in the agent
    def select_action(self, ob_id, state, reward):
        """Store the reward of the last action (None before the first) and the state; return an action for it."""
        if reward is not None:
            self.report_reward(ob_id, reward)
        return super().select_action(ob_id, state)

    def run_episode(self):
        """Let all observers play one episode."""
        answers = super().run_episode()
        for ob_id, last_reward in answers.items():
            self.trajectories[ob_id].rewards.append(last_reward)
