"""The place that a launcher gives to a process by environment variables. test_lifecycle_faults.py starts such ranks."""

import pytest

from helpers import assert_refused, package_on_path

with package_on_path("rl_rpc"):
    import main

pytestmark = pytest.mark.quick
QUARTET = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}


def launch(monkeypatch, **environ):
    """Set the variables of a launcher."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_a_launcher_gives_the_place_but_flags_come_first(monkeypatch):
    launch(monkeypatch, **QUARTET)
    args = main.parse_args([])
    assert (args.rank, args.world_size, args.master_addr, args.master_port) == (1, 3, "10.0.0.1", 29501)
    args = main.parse_args(["--rank", "0", "--world_size", "2"])
    assert (args.rank, args.world_size, args.master_addr) == (0, 2, "localhost")


@pytest.mark.parametrize("missing", QUARTET)
def test_a_missing_variable_is_named(missing, monkeypatch, capsys):
    launch(monkeypatch, **{name: value for name, value in QUARTET.items() if name != missing})
    assert_refused("rl_rpc", [], capsys, f"but not {missing} ")


@pytest.mark.parametrize(
    "name, value", [("RANK", "-1"), ("RANK", "a"), ("MASTER_PORT", "99999"), ("MASTER_PORT", "abc")]
)
def test_a_wrong_variable_is_refused_by_name(name, value, monkeypatch, capsys):
    launch(monkeypatch, **QUARTET | {name: value})
    assert_refused("rl_rpc", [], capsys, f"--{name.lower()}: {value!r} is not")


def test_variables_that_were_left_in_a_shell_are_ignored(monkeypatch):
    launch(monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="abc")
    assert main.parse_args([]).rank is None


def test_under_torchrun_it_is_refused_in_one_line(monkeypatch, capsys):
    launch(monkeypatch, **QUARTET | {"RANK": "0"}, TORCHELASTIC_RUN_ID="x")
    why = "--on_lost continue: torchrun ends all ranks when one is lost"
    assert_refused("rl_rpc", ["--on_lost", "continue"], capsys, why)
