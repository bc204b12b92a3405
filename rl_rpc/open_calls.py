"""Commanding: how an observer's episode begins and is waited for, in every mode, and what happens if it is lost.

Runs in the agent (rank 0), on its main thread, but for drop(). How an episode is played, agent.py says for each mode.

ob_id = an observer's rank, an int.
"""

import queue

from reinforce import Trajectory
from observer import noise_seed
from policy import EpisodeNoise


class Commander:
    """What Agent does in every mode: an observer's episode is begun, and ends, fails, or is lost with the observer."""

    def __init__(self, ob_rrefs, learner, lose):
        """ob_rrefs: {ob_id: RRef to its Observer}; `lose`: see Agent."""
        self.ob_rrefs, self.learner, self.lose = ob_rrefs, learner, lose
        # By observer, and each entry is touched by that observer's calls only. Filled here and never resized while
        # they run, but for one that is lost: that, not the interpreter's lock, is what makes the methods safe that
        # observers call without a lock.
        self.trajectories = dict.fromkeys(ob_rrefs)
        self.under_way = set()  # whose episode has begun and not ended; changed by the main thread only
        self.ended = queue.SimpleQueue()  # what it waits for: (ob_id, its episode's future); (ob_id, None): it is lost

    @property
    def episode(self):
        """The number of the episode under way, or of the next one: the first is 1."""
        return self.learner.episodes + 1

    def command(self, start, file=lambda trajectory, answer: None):
        """Play an episode: `start(observer)` on every observer, then `file(trajectory, answer)` as each one ends."""
        for ob_id in self.ob_rrefs:
            self.begin(ob_id, start)
        while self.under_way:
            self.wait_for_one(file)

    def begin(self, ob_id, start):
        """Begin an observer's episode; return at once."""
        noise = EpisodeNoise(noise_seed(self.learner.seed, ob_id, self.episode), self.learner.policy)
        self.trajectories[ob_id] = Trajectory(noise)
        self.under_way.add(ob_id)
        # timeout=0: an episode may take any time. (--rpc_timeout still bounds each select_action.)
        future = start(self.ob_rrefs[ob_id].rpc_async(timeout=0))
        future.add_done_callback(lambda future: self.ended.put((ob_id, future)))

    def wait_for_one(self, file):
        """Wait until one more observer's episode has ended, or an observer is lost.

        They are taken in the order in which they end: when one fails, others may be waiting for it, or play for hours,
        and its error must be heard now. In which order calls arrive meanwhile changes nothing: each is filed under its
        own ob_id.
        """
        ob_id, future = self.ended.get()
        if future is None:
            self.forget(ob_id)
        elif ob_id in self.under_way:  # else it was dropped, and has ended its episode all the same
            try:
                answer = future.wait()
            except Exception as error:
                if self.lose is None:
                    raise
                self.lose(ob_id, error)  # its episode stays under way until drop() is called
            else:
                file(self.trajectories[ob_id], answer)
                self.under_way.remove(ob_id)

    def drop(self, ob_id):
        """Go on without an observer that is lost; return what becomes of its work. Called on a thread of the job's."""
        text = "its episode is thrown away" if ob_id in self.under_way else ""
        self.ended.put((ob_id, None))  # the main thread does the rest: it alone knows what it is waiting for
        return text

    def forget(self, ob_id):
        """Let nobody wait for a lost observer any more. Should it wake up, its next call of ours ends in a KeyError."""
        self.under_way.discard(ob_id)
        self.ob_rrefs.pop(ob_id, None)
        self.trajectories.pop(ob_id, None)

    def finish(self):
        """Return when nobody plays any more; what is still played is not learned from. Only `async` leaves anything."""
        while self.under_way:
            self.wait_for_one(lambda trajectory, answer: None)
