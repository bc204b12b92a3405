"""param_server's assignments: whatever is applied or lost, each batch of an epoch is applied exactly once."""

import hypothesis
import pytest
from hypothesis import strategies as st

from helpers import package_on_path

with package_on_path("param_server"):
    from assignments import Assignments

pytestmark = pytest.mark.quick


@hypothesis.settings(deadline=None)
@hypothesis.given(st.data())
def test_each_batch_is_applied_once_whoever_is_lost(data):
    batches = range(data.draw(st.integers(1, 40)))
    assignments = Assignments(range(1, 1 + data.draw(st.integers(1, 5))))
    applied, left = [], batches
    while left:
        assignments.deal(left)
        while busy := sorted(assignments.at_work()):
            trainer = data.draw(st.sampled_from(busy))
            if len(assignments.living) > 1 and data.draw(st.integers(0, 9)) == 0:
                had = len(assignments.dealt[trainer])
                assert assignments.lose(trainer) == had
            else:
                batch = assignments.dealt[trainer][0]
                assignments.strike(trainer)
                applied.append(batch)
            assert sorted(applied + assignments.left()) == list(batches)
        left = assignments.left()
    assert sorted(applied) == list(batches)


@hypothesis.given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 40))
def test_batches_are_dealt_evenly_and_in_turn(trainers, first, count):
    assignments = Assignments(range(trainers))
    batches = range(first, first + count)
    assignments.deal(batches)
    assert assignments.dealt == {trainer: list(batches[trainer::trainers]) for trainer in range(trainers)}


def test_a_batch_that_its_trainer_left_out_is_dealt_again():
    assignments = Assignments([1, 2])
    assignments.deal(range(6))
    assignments.strike(1)
    assignments.strike(1)
    assignments.strike(2)
    assert assignments.done == {1: 2, 2: 1}
    assignments.deal(assignments.left())
    assert assignments.dealt == {1: [3, 5], 2: [4]}
    assert not any(assignments.done.values())  # in `bounded`, trainer 1 is not ahead any more
