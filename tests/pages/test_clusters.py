"""docs/CLUSTERS.md: each package gets the arguments that it needs from the scripts and the manifest."""

import json
import shlex
import subprocess
import sys

import pytest
import yaml

from helpers import ROOT, package_on_path
from pages import Page

pytestmark = pytest.mark.quick
PAGE = Page("docs/CLUSTERS.md")
SCRIPTS, (MANIFEST,) = PAGE.blocks("bash"), PAGE.blocks("yaml")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}
COMMANDS = ("python", "torchrun", "srun", "mpirun", "scontrol")
QUARTET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHED = {  # what sbatch gives to a script that asks for three nodes; and what srun and mpirun give to its third task
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
}
# It records its words and variables. That of srun or mpirun starts one task, as far as this goes by a shell: `sh -c`.
STAND_IN = """
import json, os, sys
words = sys.argv[2:]
with open(sys.argv[1], "a") as log:
    print(json.dumps((words, dict(os.environ))), file=log)
if words[0] == "scontrol":
    print("node1", "node2", "node3", sep="\\n")
if "sh" in words:
    os.execvp("sh", words[words.index("sh") :])
"""


def run_with_stand_ins(script, folder):
    """Run a script with stand-ins for the launchers; return the words and the variables of QUARTET of each call."""
    log = folder / "log"
    for name in COMMANDS:
        program = shlex.join([sys.executable, "-c", STAND_IN, str(log), name])
        (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')  # the path in a "#!" line contains no spaces
        (folder / name).chmod(0o755)
    environment = LAUNCHED | {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return [(words, {name: environ[name] for name in QUARTET if name in environ}) for words, environ in calls]


def parse(words, monkeypatch, environ):
    """Return the arguments that the main.py in this command parses from the words after it, in this environment."""
    (at,) = [number for number, word in enumerate(words) if word.endswith("main.py")]
    package, script = words[at].split("/")
    assert (ROOT / package / script).is_file()
    for name in QUARTET:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with package_on_path(package):
        import main

        return main.parse_args(words[at + 1 :])


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_every_command_that_a_script_leads_to_parses(number, tmp_path, monkeypatch):
    calls = run_with_stand_ins(SCRIPTS[number], tmp_path)
    launched = any(words[0] in ("srun", "mpirun") for words, _ in calls)
    jobs = [(words, environ) for words, environ in calls if "sh" not in words and words[0] != "scontrol"]
    assert jobs
    for rank, (words, environ) in enumerate(jobs):
        if "torchrun" in words:
            check_torchrun(words[words.index("torchrun") + 1 :])
            args = parse(words, monkeypatch, TORCHRUN)
            assert args.launcher == "torchrun"
        elif launched:
            args = parse(words, monkeypatch, environ)
            assert (args.rank, args.world_size, args.master_addr) == (2, 3, "node1")
            assert args.master_port in (19711, 29500)
        else:
            args = parse(words, monkeypatch, {})
            assert (args.rank, args.master_addr) == (rank, "10.0.0.1")
            assert args.given == ({} if rank else {"world_size": len(jobs)})  # the others get it from rank 0


def check_torchrun(words):
    """Assert that torchrun's own parser accepts these words, and that the script's variables have values."""
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    assert args.training_script.endswith("main.py")
    if args.nnodes != "1:1":
        host, port = args.rdzv_endpoint.split(":")
        assert host in ("10.0.0.1", "node1") and 1024 < int(port) < 65536 and args.rdzv_backend == "c10d"


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
            environ = dict(zip(QUARTET, map(str, (rank, size, address, port)), strict=True))
            args = parse(container["command"], monkeypatch, environ)
            assert (args.rank, args.world_size, args.master_addr, args.master_port) == (rank, size, address, port)
            rank += 1
