"""docs/CLUSTERS.md: each package gets the arguments that it needs from the scripts and the manifest."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys

import pytest
import yaml

from helpers import ROOT, package_on_path

with package_on_path("rl_rpc"):
    from glue.flags import find_place

pytestmark = pytest.mark.quick
TEXT = (ROOT / "docs" / "CLUSTERS.md").read_text()
SCRIPTS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
(MANIFEST,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
LAUNCHERS = re.findall(r"^\| ([^|`]+) \| `([^`]+=[^`]+)` \| ([^|]+) \|$", TEXT, re.MULTILINE)
COMMANDS = ("python", "torchrun", "srun", "mpirun", "scontrol")
SLURM_JOB = {  # what sbatch gives to a script that asks for three nodes
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_CPUS_PER_TASK": "4",
}


def environment_of(row):
    return dict(word.split("=", 1) for word in shlex.split(row))


def run_with_stand_ins(script, folder):
    """Run a script with stand-ins for the launchers. Return the words of every call, with the values of variables."""
    log = folder / "log"
    for name in COMMANDS:
        stand_in = folder / name
        record = f"import json, sys; print(json.dumps(['{name}', *sys.argv[1:]]), file=open({str(log)!r}, 'a'))"
        answer = "; print('node1\\nnode2\\nnode3')" if name == "scontrol" else ""
        program = shlex.join([sys.executable, "-c", record + answer])
        stand_in.write_text(f'#!/bin/sh\nexec {program} "$@"\n')  # the path in a "#!" line cannot contain spaces
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    environment = SLURM_JOB | {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]


def parse(words, monkeypatch, environ):
    """Return the arguments that the main.py in this command parses from the words after it, in this environment."""
    (at,) = [number for number, word in enumerate(words) if word.endswith("main.py")]
    package, script = words[at].split("/")
    assert (ROOT / package / script).is_file()
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "RANK", "WORLD_SIZE", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with package_on_path(package):
        import main

        return main.parse_args(words[at + 1 :])


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_every_command_that_a_script_leads_to_parses(number, tmp_path, monkeypatch):
    script = SCRIPTS[number]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    jobs = [words for words in run_with_stand_ins(script, tmp_path) if words[0] != "scontrol"]
    assert jobs
    for rank, words in enumerate(jobs):
        args = None
        if "torchrun" in words:
            check_torchrun(words[words.index("torchrun") + 1 :])
            environ = environment_of(LAUNCHERS[0][1])
        elif words[0] == "srun":
            nodes = int(re.search(r"--nodes=(\d+)", script)[1]) * int(re.search(r"--ntasks-per-node=(\d+)", script)[1])
            environ = SLURM_JOB | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": str(nodes)}
            environ["SLURM_STEP_NODELIST"] = SLURM_JOB["SLURM_JOB_NODELIST"]
            args = parse(words, monkeypatch, environ)
            assert (args.rank, args.world_size, args.master_addr, args.master_port) == (2, 3, "node1", 19711)
        elif words[0] == "mpirun":
            hosts, size = words[words.index("--host") + 1].split(","), words[words.index("-np") + 1]
            environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": size}
            args = parse(words, monkeypatch, environ)
            assert (args.rank, args.world_size, args.master_addr) == (0, len(hosts), hosts[0])
        else:
            environ = {}
            args = parse(words, monkeypatch, environ)
            assert (args.rank, args.world_size, args.master_addr) == (rank, len(jobs), "10.0.0.1")
        args = args or parse(words, monkeypatch, environ)
        assert args.rank is not None


def check_torchrun(words):
    """Assert that torchrun's own parser accepts these words, and that the script's variables have values."""
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    assert args.training_script.endswith("main.py")
    if args.nnodes != "1:1":
        host, port = args.rdzv_endpoint.split(":")
        assert host in ("10.0.0.1", "node1") and 1024 < int(port) < 65536 and args.rdzv_backend == "c10d"


def test_the_table_of_launchers_is_what_the_code_does():
    assert len(LAUNCHERS) == 4
    for launcher, variables, meaning in LAUNCHERS:
        place = {"master_addr": "--master_addr, --master_port", "master_port": None} | find_place(
            environment_of(variables)
        )
        where = f"{place['master_addr']} port {place['master_port']}".removesuffix(" port None")
        assert place["launcher"] == launcher
        assert f"rank {place['rank']} of {place['world_size']}, at {where}" == meaning


@pytest.mark.parametrize("first", range(3))
def test_an_upper_row_of_the_table_comes_before_a_lower_one(first):
    both = environment_of(LAUNCHERS[first + 1][1]) | environment_of(LAUNCHERS[first][1])
    assert find_place(both)["launcher"] == LAUNCHERS[first][0]


def test_the_line_that_says_who_started_a_rank(monkeypatch, capsys):
    parse(["rl_rpc/main.py"], monkeypatch, environment_of(LAUNCHERS[3][1]))
    line = capsys.readouterr().out.strip()
    assert line and f"`{line}`" in TEXT


def test_the_manifest_gives_every_pod_its_rank(monkeypatch):
    """The test sets the variables that the operator sets in its pkg/controller.v1/pytorch/envvar.go."""
    manifest = yaml.safe_load(MANIFEST)
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"] and replicas["Master"]["replicas"] == 1
    size, rank = sum(each["replicas"] for each in replicas.values()), 0
    (master,) = replicas["Master"]["template"]["spec"]["containers"]
    (port,) = [port["containerPort"] for port in master["ports"] if port["name"] == "pytorchjob-port"]
    address = f"{manifest['metadata']['name']}-master-0"
    for role in replicas.values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        for _ in range(role["replicas"]):
            environ = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}
            args = parse(container["command"], monkeypatch, {name: str(value) for name, value in environ.items()})
            assert (args.rank, args.world_size, args.master_addr, args.master_port) == (rank, size, address, port)
            rank += 1
