"""param_server's assignments: whatever is applied or lost, each batch of an epoch is applied exactly once."""

import hypothesis
from hypothesis import strategies as st

from helpers import package_on_path

with package_on_path("param_server"):
    from assignments import Assignments


@hypothesis.settings(deadline=None)
@hypothesis.given(st.data())
def test_each_batch_is_applied_once_whoever_is_lost(data):
    batches = range(data.draw(st.integers(1, 40)))
    assignments = Assignments(range(1, 1 + data.draw(st.integers(1, 5))))
    assignments.begin(batches)
    applied = []
    while assignments.left():
        first = assignments.left()[0]
        count = data.draw(st.integers(1, 40))
        assignments.deal(count)
        while busy := sorted(assignments.at_work()):
            trainer = data.draw(st.sampled_from(busy))
            if len(assignments.living) > 1 and data.draw(st.integers(0, 9)) == 0:
                had = len(assignments.dealt[trainer])
                assert assignments.lose(trainer) == had
            else:
                batch = assignments.dealt[trainer][0]
                assignments.strike(trainer)
                assert batch >= first
                applied.append(batch)
            assert sorted(applied + assignments.left()) == list(batches)
    assert sorted(applied) == list(batches)


@hypothesis.given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 50))
def test_batches_are_dealt_evenly_and_in_turn(trainers, batches, count):
    assignments = Assignments(range(trainers))
    assignments.begin(range(batches))
    assignments.deal(count)
    dealt = range(batches)[:count]
    assert assignments.dealt == {trainer: list(dealt[trainer::trainers]) for trainer in range(trainers)}


def test_a_batch_that_its_trainer_left_out_is_dealt_again():
    assignments = Assignments([1, 2])
    assignments.begin(range(6))
    assignments.deal(4)
    assignments.strike(1)
    assignments.strike(1)
    assignments.strike(2)
    assert assignments.done == {1: 2, 2: 1}
    assignments.deal(3)
    assert assignments.dealt == {1: [3, 5], 2: [4]}
    assert not assignments.done  # in `bounded`, trainer 1 is not ahead any more
