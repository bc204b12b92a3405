"""Which launcher has started this process, and with which rank (flags.py)."""

import os

import pytest

from helpers import PACKAGES, assert_refused, package_on_path

with package_on_path("rl_rpc"):
    from glue.before_torch import starts_ranks

    from glue.flags import find_place

QUARTET = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
STEP = {"SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "4711"}
IN_SLURM = STEP | {"SLURM_STEP_NODELIST": "n1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}


def place(launcher, rank, world_size, address=None, port=None):
    """Return the flags that find_place() finds; the launcher may not say where the ranks meet."""
    meeting = {"master_addr": address, "master_port": port} if address else {}
    return {"launcher": launcher, "rank": rank, "world_size": world_size} | meeting


@pytest.mark.parametrize(
    "environ, found",
    [
        ({}, {}),
        ({"MASTER_ADDR": "10.0.0.1"}, {}),  # a variable that was left in a shell
        (QUARTET, place("the environment (RANK, WORLD_SIZE, ...)", 1, 3, "10.0.0.1", 29501)),
        (QUARTET | {"TORCHELASTIC_RUN_ID": "none"}, place("torchrun", 1, 3, "10.0.0.1", 29501)),
        (STEP | QUARTET, place("the environment (RANK, WORLD_SIZE, ...)", 1, 3, "10.0.0.1", 29501)),
        (STEP | {"SLURM_STEP_NODELIST": "node[07-09,12],x1"}, place("Slurm", 1, 3, "node07", 19713)),
        (STEP | {"SLURM_STEP_NODELIST": "gpu-a,gpu-b"}, place("Slurm", 1, 3, "gpu-a", 19713)),
        (STEP | {"SLURM_STEP_NODELIST": "r[1-2]n,x", "MASTER_PORT": "5"}, place("Slurm", 1, 3, "r1n", 5)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, {}),  # srun --pty bash
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "4711"}, {}),  # the batch script
        (OPEN_MPI, place("Open MPI", 2, 3)),
        (STEP | OPEN_MPI, place("Open MPI", 2, 3)),  # mpirun in an allocation starts its ranks through a step
        (OPEN_MPI | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}, place("Open MPI", 2, 3, "10.0.0.1", 7)),
    ],
)
def test_the_place_that_a_launcher_gives(environ, found):
    assert find_place(environ) == found


@pytest.mark.parametrize(
    "words, environ, all_ranks",
    [
        ([], {}, True),
        (["--checkpoint", "c.pt", "--batch-size=5", "--hidden_dim", "8"], {}, True),
        (["--rank", "0"], {}, False),
        (["--rank=1"], {}, False),
        (["--check"], {}, True),
        (["-h"], {}, False),
        (["--help"], {}, False),
        ([], QUARTET, False),
        ([], {"RANK": "1"}, False),  # will be refused
        ([], STEP, False),
        ([], STEP | {"SLURM_STEP_NUM_TASKS": "1"}, False),  # srun --pty bash: a wrong guess, which costs seconds only
        ([], OPEN_MPI, False),
    ],
)
def test_whether_a_command_starts_all_ranks_shows_before_torch_is_loaded(words, environ, all_ranks):
    assert starts_ranks(words, environ) == all_ranks


@pytest.mark.parametrize("package", PACKAGES)
def test_that_is_what_the_parser_decides(package, monkeypatch):
    """For each flag of the package, in both spellings, also if its name is the beginning of another flag's name."""
    parsers = []
    with package_on_path(package):
        import main
        from glue import flags

        def keep(*how, **and_how):
            parsers.append(plain(*how, **and_how))
            return parsers[0]

        plain = flags.argument_parser
        monkeypatch.setattr(flags, "argument_parser", keep)
        main.parse_args([])
        for name, action in parsers[0]._option_string_actions.items():
            if action.dest == "help":
                continue
            action.type = None  # only the flag's name matters, so that any value is accepted
            action.choices = None
            for spelled in (name, name.replace("_", "-")):
                word = spelled if action.nargs == 0 else f"{spelled}=1"
                args, unknown = parsers[0].parse_known_args([word])
                assert not unknown
                assert starts_ranks([word], {}) == (args.rank is None), word


@pytest.mark.parametrize(
    "missing, whole",
    [
        *((name, QUARTET) for name in QUARTET),
        ("RANK, MASTER_ADDR", QUARTET),
        ("WORLD_SIZE, MASTER_ADDR", QUARTET),
        *((name, IN_SLURM) for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")),
        ("OMPI_COMM_WORLD_SIZE", OPEN_MPI),
    ],
)
def test_a_missing_variable_is_named(missing, whole, capsys):
    # conftest.py restores the environment
    os.environ |= {name: value for name, value in whole.items() if name not in missing.split(", ")}
    assert_refused("rl_rpc", [], capsys, f"but not {missing} ")


@pytest.mark.parametrize(
    "name, value", [("RANK", "-1"), ("RANK", "a"), ("MASTER_PORT", "99999"), ("MASTER_PORT", "abc")]
)
def test_a_wrong_variable_is_refused_by_name(name, value, capsys):
    os.environ |= QUARTET | {name: value}
    assert_refused("rl_rpc", [], capsys, f"the environment sets {name}, but {value!r} is not")


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_a_wrong_variable_of_slurm_is_refused_by_its_own_name(name, capsys):
    os.environ |= IN_SLURM | {name: "x"}
    assert_refused("rl_rpc", [], capsys, f"the environment sets {name}, but 'x' is not")


def test_a_wrong_variable_without_a_launcher_is_ignored():
    assert find_place({"MASTER_PORT": "abc"}) == {}


def test_flags_come_first_and_the_choice_is_said(capsys):
    os.environ |= QUARTET
    with package_on_path("rl_rpc"):
        import main

        args = main.parse_args([])
        assert (args.rank, args.world_size, args.master_addr, args.master_port) == (1, 3, "10.0.0.1", 29501)
        assert capsys.readouterr().out.startswith("rank 1 of 3, started by the environment")
        args = main.parse_args(["--rank", "0", "--world_size", "2"])
        assert (args.rank, args.world_size, args.master_addr) == (0, 2, "localhost")
        assert capsys.readouterr().out == ""
