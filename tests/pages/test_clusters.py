"""docs/CLUSTERS.md: each package gets the arguments that it needs from the commands and the manifest.

tests/jobs/test_schedulers.py runs the page's scripts for Slurm and Open MPI.
"""

import os
import shlex

import pytest
import yaml

from helpers import parse_args
from pages import Page

pytestmark = pytest.mark.quick
PAGE = Page("docs/CLUSTERS.md")
QUARTET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = dict(zip(QUARTET, ("1", "4", "node1", "1"), strict=True)) | {"TORCHELASTIC_RUN_ID": "none"}


def commands_in(script):
    return [shlex.split(line, comments=True) for line in script.replace("\\\n", "").splitlines()]


def parse(words, environ):
    """Return the arguments that the main.py in this command parses from the words after it, in this environment."""
    (at,) = [number for number, word in enumerate(words) if word.endswith("main.py")]
    os.environ |= environ
    return parse_args(words[at].removesuffix("/main.py"), *words[at + 1 :])


def test_the_commands_for_terminals_number_the_ranks():
    (script,) = PAGE.blocks("bash", "python ")
    commands = commands_in(script)
    for rank, words in enumerate(commands):
        args = parse(words, {})
        assert (args.rank, args.master_addr) == (rank, "10.0.0.1")
        assert args.given == ({} if rank else {"world_size": len(commands)})  # the others get it from rank 0


@pytest.mark.parametrize("script", PAGE.blocks("bash", "torchrun "))
def test_torchruns_own_parser_accepts_its_commands(script):
    from torch.distributed.run import get_args_parser  # it takes a second

    for words in commands_in(script):
        launcher = get_args_parser().parse_args(words[1:])
        assert launcher.training_script.endswith("main.py")
        if launcher.nnodes != "1:1":
            host, port = launcher.rdzv_endpoint.split(":")
            assert host == "10.0.0.1" and 1024 < int(port) < 65536 and launcher.rdzv_backend == "c10d"
        assert parse(words, TORCHRUN).launcher == "torchrun"


def test_the_manifest_gives_every_pod_its_rank():
    """The test sets the variables that the operator sets in its pkg/controller.v1/pytorch/envvar.go."""
    (text,) = PAGE.blocks("yaml")
    manifest = yaml.safe_load(text)
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
            args = parse(container["command"], environ)
            assert (args.rank, args.world_size, args.master_addr, args.master_port) == (rank, size, address, port)
            rank += 1
