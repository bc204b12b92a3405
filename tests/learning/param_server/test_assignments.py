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
        end = assignments.left()[0] + data.draw(st.integers(1, 40))
        assignments.deal(end, data.draw(st.none() | st.integers(1, 40)))
        while busy := [trainer for trainer, dealt in assignments.dealt.items() if dealt]:
            trainer = data.draw(st.sampled_from(busy))
            if len(assignments.living) > 1 and data.draw(st.integers(0, 9)) == 0:
                had = len(assignments.dealt[trainer])
                assert assignments.lose(trainer) == had
            else:
                new = assignments.apply(trainer, data.draw(st.integers(1, 3)))
                assert all(batch < end for batch in new)
                applied += new
            assert sorted(applied + assignments.left()) == list(batches)
    assert sorted(applied) == list(batches)


@hypothesis.given(st.integers(1, 5), st.integers(1, 40), st.none() | st.integers(1, 40))
def test_batches_are_dealt_evenly_and_in_turn(trainers, batches, count):
    assignments = Assignments(range(trainers))
    assignments.begin(range(batches))
    assignments.deal(30, count)
    dealt = range(batches)[:30][:count]
    assert assignments.dealt == {trainer: list(dealt[trainer::trainers]) for trainer in range(trainers)}


def test_a_batch_that_its_trainer_left_out_is_dealt_again():
    assignments = Assignments([1, 2])
    assignments.begin(range(6))
    assignments.deal(4, None)
    assignments.apply(1, 2)
    assignments.apply(2, 1)
    assignments.deal(6, None)
    assert assignments.dealt == {1: [3, 5], 2: [4]}
