"""One observer's episode, as the agent keeps it until it learns from it.

Runs in the agent only: what observers send or return ends up in here.
"""


class Trajectory:
    """What one observer saw, did and earned in the episode under way."""

    def __init__(self, noise):
        self.noise = noise
        self.states, self.actions, self.rewards = [], [], []

    def next_draw(self):
        """(uniform, mask_1H) for the step that comes next."""
        return self.noise.at(len(self.actions))


def discounted(rewards, gamma):
    """Return of every step of one episode: its reward plus gamma times the next step's return."""
    returns, g = [], 0.0
    for reward in reversed(rewards):
        g = reward + gamma * g
        returns.append(g)
    return returns[::-1]
