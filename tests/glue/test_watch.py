"""Heartbeats (watch.py) of one rank at a time, with a simulated clock and store.  These tests start no processes."""

import json
import types

import pytest

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import ending, watch
    from glue.ending import STORE_HOLDER, End


class Over(BaseException):
    """Raised instead of ending the process, with what the Watch reported last."""


class World:
    """The store, the clock and the job of the one rank that is tested; the other ranks' heartbeats are simulated."""

    def __init__(self, monkeypatch, rank, world_size, torchrun=False, stops=None, until=60.0):
        """`stops`: {rank: the time of its last heartbeat}; `until`: the time at which the test ends."""
        self.now, self.until, self.stops = 0.0, until, stops or {}
        self.beats_every = dict.fromkeys(range(world_size), watch.BEAT_SECONDS)
        self.values, self.read_keys, self.events = {}, [], {}
        self.lost, self.seen = {}, []
        monkeypatch.setattr(watch, "time", types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(watch.signal, "setitimer", lambda *_: None)
        self.watch = watch.Watch(rank, world_size, self, torchrun)
        self.watch.beater = types.SimpleNamespace(start=lambda: None)
        self.watch.fast = types.SimpleNamespace(wait=self.wait)
        self.fast_at = float("inf")
        self.watch.start_beating(self)

    def run(self):
        """Run the heartbeats; return what the Watch reported last, and at which time."""
        with pytest.raises(Over) as over:
            self.watch._beat()
        return over.value.args[0], self.now

    # the clock

    def sleep(self, seconds):
        self.now += seconds
        for moment in [moment for moment in self.events if moment <= self.now]:
            self.events.pop(moment)()
        if self.now >= self.until:
            raise Over("nothing")

    def wait(self, seconds):
        self.sleep(min(seconds, max(0.0, self.fast_at - self.now)))
        return self.now >= self.fast_at

    # the store

    def compare_set(self, key, expected, wanted):
        if self.values.get(key, b"").decode() == expected:
            self.set(key, wanted)
        return self.values[key]

    def set(self, key, value):
        self.values[key] = value.encode()

    def multi_get(self, keys):
        assert all(key in self.values for key in keys), "the real store would wait"
        self.read_keys += keys
        return [self.value(key) for key in keys]

    def value(self, key):
        rank = key.removeprefix("beat/")
        if rank == key or self.values[key] != b"-" or int(rank) in self.absent:
            return self.values[key]
        rank = int(rank)
        return str(min(self.now, self.stops.get(rank, self.now)) // self.beats_every[rank]).encode()

    absent = ()

    # the job

    def drop(self, rank, why):
        raise Over(("lost", rank, why))

    def end(self, end, mine=True):
        raise Over((end, mine))

    def take_losses(self, losses):
        self.lost |= losses


WORKERS = (1, 2, 999)


@pytest.mark.parametrize("rank", WORKERS)
def test_a_beat_of_a_large_group_costs_a_rank_three_keys(rank, monkeypatch):
    world = World(monkeypatch, rank, 1000, until=10.0)
    assert world.run() == ("nothing", 10.0)
    assert world.read_keys == ["beat/0", "losses", "end"] * 10


@pytest.mark.parametrize("rank, silent", [(0, 1), (0, 2), (0, 3), (1, 0), (3, 0)])
@pytest.mark.parametrize("stops", [5.0, 5.5, 5.9])
def test_a_rank_that_is_silent_for_8_seconds_is_lost(rank, silent, stops, monkeypatch):
    word, when = World(monkeypatch, rank, 4, stops={silent: stops}).run()
    assert word == ("lost", silent, "silent for 9 s (killed, stopped, or unreachable)")
    assert 8 < when - stops <= 10


def test_whoever_is_silent_somebody_watches(monkeypatch):
    watched_by = {rank: World(monkeypatch, rank, 5).watch.watched for rank in range(5)}
    assert watched_by.pop(0) == {1, 2, 3, 4}
    assert watched_by == {rank: {0} for rank in (1, 2, 3, 4)}


def test_ranks_that_are_absent_or_left_or_lost_are_not_missed(monkeypatch):
    world = World(monkeypatch, 0, 4, stops={3: 0.0})
    world.absent, world.values["beat/2"] = {1}, b"left"
    world.values["losses"] = json.dumps({"workers": [1, 4], "lost": {"3": "KeyError"}}).encode()
    assert world.run() == ("nothing", 60.0)
    assert world.lost == {3: "KeyError"}


def test_a_rank_that_was_stopped_itself_blames_no_other_rank(monkeypatch):
    """After Ctrl-Z and fg, the other ranks also need some time until their next heartbeat."""
    world = World(monkeypatch, 0, 2, stops={1: 5.0})

    def stand_still():
        world.now += 100.0

    world.events = {10.0: stand_still, 112.0: world.stops.clear}
    world.until = 150.0
    assert world.run()[0] == "nothing"


def test_the_end_that_another_rank_found_is_reported(monkeypatch):
    world, end = World(monkeypatch, 2, 4), End("lost", 1, "killed by SIGKILL")
    world.events = {3.0: lambda: ending.claim(world, end)}
    assert world.run() == ((end, False), 3.0)


def test_a_store_that_is_gone_ends_the_job(monkeypatch):
    world = World(monkeypatch, 1, 3)

    def broken(keys):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(world, "multi_get", broken)
    assert world.run()[0] == (End("lost", STORE_HOLDER, "the connection to it broke"), True)


def test_a_rank_that_has_left_watches_on_and_beats_no_more(monkeypatch):
    world = World(monkeypatch, 0, 3, stops={2: 20.0})
    world.watch.say_left()
    assert world.run()[0][:2] == ("lost", 2)
    assert world.values["beat/0"] == b"left"


@pytest.mark.parametrize("rank, silent", [(5, 6), (5, 0), (0, 6)])
def test_torchruns_sigterm_makes_the_ranks_of_its_host_find_out_soon(rank, silent, monkeypatch):
    """Ranks 4 to 7 are on the second host.  Those of the first get no signal, so they beat only once a second."""
    monkeypatch.setenv("LOCAL_RANK", str(rank % 4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    world = World(monkeypatch, rank, 8, torchrun=True, stops={silent: 9.5})
    world.fast_at = 10.2

    def beat_fast():
        for other in range(4, 8):
            world.beats_every[other] = watch.FAST_BEAT_SECONDS

    world.events = {10.2: beat_fast}
    word, when = world.run()
    assert word[:2] == ("lost", silent)
    assert when - 9.5 > watch.FAST_LOST_AFTER_SECONDS and when - 10.2 < watch.FAST_LOST_AFTER_SECONDS + 0.4


def test_fast_heartbeats_do_not_blame_living_ranks(monkeypatch):
    """Here the user has ended torchrun itself, so no rank is lost."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    world = World(monkeypatch, 5, 8, torchrun=True, until=20.0)
    world.fast_at = 10.2
    assert world.run()[0] == "nothing"
    assert set(world.read_keys) == {*(f"beat/{rank}" for rank in (0, 4, 6, 7)), "losses", "end"}
