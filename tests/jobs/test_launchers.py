"""The place that a launcher gives to a process by environment variables. test_lifecycle_faults.py starts such ranks."""

import os

import pytest

from helpers import assert_refused, parse_args

pytestmark = pytest.mark.quick
QUARTET = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}


def test_a_launcher_gives_the_place_but_flags_come_first():
    os.environ |= QUARTET
    args = parse_args("rl_rpc")
    assert (args.rank, args.world_size, args.master_addr, args.master_port) == (1, 3, "10.0.0.1", 29501)
    args = parse_args("rl_rpc", "--rank", 0, "--world_size", 2)
    assert (args.rank, args.world_size, args.master_addr) == (0, 2, "localhost")


@pytest.mark.parametrize("missing", QUARTET)
def test_a_missing_variable_is_named(missing, capsys):
    os.environ |= QUARTET
    del os.environ[missing]
    assert_refused("rl_rpc", [], capsys, f"but not {missing} ")


@pytest.mark.parametrize("name, value", [("RANK", "-1"), ("MASTER_PORT", "abc")])
def test_a_wrong_variable_is_refused_by_name(name, value, capsys):
    os.environ |= QUARTET | {name: value}
    assert_refused("rl_rpc", [], capsys, f"--{name.lower()}: {value!r} is not")


def test_variables_that_were_left_in_a_shell_are_ignored():
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "abc"}
    assert parse_args("rl_rpc").rank is None


def test_under_torchrun_it_is_refused_in_one_line(capsys):
    os.environ |= QUARTET | {"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    why = "--on_lost continue: torchrun ends all ranks when one is lost"
    assert_refused("rl_rpc", ["--on_lost", "continue"], capsys, why)
