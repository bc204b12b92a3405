"""docs/MIGRATING.md: its terms exist, its excerpts are lines of the programs, and the programs print what it shows.

Ray and Monarch are not required. Their programs are run if RAY_PYTHON and MONARCH_PYTHON name interpreters that have
them (and torch and torchvision), or if this interpreter has them. Otherwise these tests are skipped.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from helpers import ROOT, load_module, write_noise
from programs import run_script

TEXT = (ROOT / "docs" / "MIGRATING.md").read_text()
PROGRAMS = ROOT / "docs" / "migrating"
TUTORIAL_LOOP, RAY_LOOP, SPLIT = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
FORTY_OUTPUT, SERVER_OUTPUT = re.findall(r"^```text\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
# What the page says of Monarch's program, as changes to Ray's excerpt:
((MONARCH_TENSOR, MONARCH_CALL),) = re.findall(r"\(`(.+?)`\), and there the last line is\s+`(.+?)`", TEXT)
MONARCH_LOOP = "\n".join([*RAY_LOOP.splitlines()[:-1], MONARCH_CALL]).replace("torch.tensor(array)", MONARCH_TENSOR)
MODULES = {"rpc": "torch.distributed.rpc", "dist": "torch.distributed", "dist_autograd": "torch.distributed.autograd"}
LIBRARIES = {"ray": ("RAY_PYTHON", "ray"), "monarch": ("MONARCH_PYTHON", "monarch.actor")}

# ------------------------------------------------------------------------------------- tests that need only torch


def resolve(name):
    """Return the object with this dotted name, and import the modules in which it is."""
    first, *rest = name.split(".")
    path = MODULES.get(first, first)
    found = importlib.import_module(path)
    for part in rest:
        path += f".{part}"
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def test_every_name_of_torch_in_the_page_exists():
    names = set(re.findall(r"`@?((?:rpc|dist|dist_autograd|torch)\.[\w.]+)", TEXT)) - {"torch.distributed"}
    assert len(names) > 25 and {"rpc.rpc_sync", "dist.all_to_all_single"} <= names
    for name in names:
        assert resolve(name) is not None, name


def test_a_name_that_torch_lacks_is_noticed():
    with pytest.raises(AttributeError):
        resolve("rpc.rpc_later")


@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_the_programs_compile(program):
    compile(program.read_text(), program, "exec")
    assert program.name in TEXT


@pytest.mark.parametrize("library", LIBRARIES)
def test_network_and_data_are_those_of_the_tutorial(library):
    def definitions(path):
        nodes = ast.parse(path.read_text()).body
        return {node.name: node for node in nodes if getattr(node, "name", None) in ("Net", "load_digits")}

    tutorial = ROOT / "param_server" / "tutorial.py"
    theirs, ours = definitions(PROGRAMS / f"{library}_parameter_server.py"), definitions(tutorial)
    assert ast.dump(theirs["load_digits"]) == ast.dump(ours["load_digits"])
    page = {"torch": torch, "nn": torch.nn, "F": F}
    exec(compile(ast.Module([theirs["Net"]], []), "Net", "exec"), page)
    outputs = []
    for network in (page["Net"], load_module(tutorial).Net):
        torch.manual_seed(1)
        outputs.append(network()(torch.randn(4, 1, 28, 28)))  # the same weights, images and dropout
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "excerpt, path",
    [
        (TUTORIAL_LOOP, ROOT / "param_server" / "tutorial.py"),
        (RAY_LOOP, PROGRAMS / "ray_parameter_server.py"),
        (MONARCH_LOOP, PROGRAMS / "monarch_parameter_server.py"),
    ],
    ids=["tutorial", "ray", "monarch"],
)
def test_an_excerpt_has_the_programs_lines_in_their_order(excerpt, path):
    lines = iter(line.strip() for line in path.read_text().splitlines())
    for line in excerpt.splitlines():
        assert line.strip() in lines, line  # `in` continues after the line that was found last


def test_backward_in_two_calls_trains_like_one_backward():
    def call(method, *arguments):
        """Call `method` with copies, and return a copy of the result, as a call between processes does."""
        return pickle.loads(pickle.dumps(method(*pickle.loads(pickle.dumps(arguments)))))

    page = {"torch": torch, "F": F, "call": call}
    exec(SPLIT, page)
    whole = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LogSoftmax(dim=1))
    server = page["Server"](pickle.loads(pickle.dumps(whole)), lr=0.1)
    before = server.model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for number in range(3):
        images, target = torch.randn(5, 6), torch.randint(0, 4, (5,))
        page["train_step"](server, number, images, target)
        F.nll_loss(whole(images), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.allclose(server.model[0].weight, before)
    torch.testing.assert_close(server.model.state_dict(), whole.state_dict())
    assert server.kept == {}


# ----------------------------------------------------------------------------------------- what needs Ray or Monarch


@functools.cache
def has(python, module):
    done = subprocess.run([python, "-c", f"import torch, torchvision, {module}"], capture_output=True, text=True)
    return done.returncode == 0


def python_with(library):
    """Return an interpreter that has the library, or skip the test."""
    variable, module = LIBRARIES[library]
    for python in (os.environ.get(variable), sys.executable):
        if python and has(python, module):
            return python
    pytest.skip(f"{library} is not installed here, and {variable} names no Python that has it, torch and torchvision")


def run(library, program, *flags, folder):
    """Run a program in an empty folder, in the library's Python; return what it prints."""
    how = {"by": [python_with(library)], "env": {"PYTHONUNBUFFERED": "1"}, "cwd": folder}
    done = run_script(PROGRAMS / program, *flags, timeout=240, **how)  # PROGRAMS does not count before a whole path
    assert done.returncode == 0, done.stderr
    return done.stdout


def masked(text):
    """Replace what differs between runs: processes, threads and measured numbers."""
    text = re.sub(r"process \d+, thread \d+", "process P, thread T", text)
    return re.sub(r"\d+\.\d+|\d+(?= images/s)", "N", text).strip()


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_forty_lines_print_what_the_page_shows(library, tmp_path):
    out = run(library, f"{library}_forty_lines.py", folder=tmp_path)
    assert (
        re.sub(r"process \d+, thread \d+", "P", out).strip()
        == re.sub(r"process \d+, thread \d+", "P", FORTY_OUTPUT).strip()
    )
    main, *others = re.findall(r"process (\d+)", out)
    assert len(others) == 4 and main not in others
    assert others[-1] == others[-2]  # the Counter's own process


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_two_trainers_learn_and_print_what_the_page_shows(library, tmp_path):
    out = run(library, f"{library}_parameter_server.py", "--dataset", "synthetic", folder=tmp_path)
    assert masked(out) == masked(SERVER_OUTPUT)
    assert float(re.search(r"^Accuracy ([\d.]+)", out, re.MULTILINE)[1]) > 0.95


def losses_of_one_trainer(seed):
    """Return every twentieth loss of the same training in one process."""
    tutorial = load_module(ROOT / "param_server" / "tutorial.py")
    args = argparse.Namespace(dataset="synthetic", seed=seed)
    torch.manual_seed(seed)
    server = tutorial.Net()
    torch.manual_seed(seed + 1)
    net = tutorial.Net()  # as the trainer does before its first dropout, so that the random numbers are the same
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03)
    net.load_state_dict(server.state_dict())
    order = torch.Generator().manual_seed(seed + 1)
    train_loader = DataLoader(tutorial.load_digits(args, train=True), batch_size=32, shuffle=True, generator=order)
    losses = []
    for i, (data, target) in enumerate(train_loader):
        loss = F.nll_loss(net(data), target)
        losses += [loss.item()] if i % 20 == 0 else []
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_one_trainer_has_the_losses_of_one_process(library, tmp_path):
    flags = ("--dataset", "synthetic", "--world_size", 2, "--seed", 2)
    out = run(library, f"{library}_parameter_server.py", *flags, folder=tmp_path)
    (line,) = re.findall(r"^Rank 1 losses of every 20th batch: (.*)$", out, re.MULTILINE)
    expected = losses_of_one_trainer(seed=2)
    assert len(expected) == 7 and expected[-1] < 0.5
    assert [float(loss) for loss in line.split()] == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_images_are_read_from_a_folder(library, tmp_path):
    write_noise(tmp_path / "noise")
    out = run(library, f"{library}_parameter_server.py", "--data_dir", "noise", folder=tmp_path)
    assert re.search(r"^320 images in ", out, re.MULTILINE), out


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_the_page_says_of_the_library_is_so(library, tmp_path):
    checks = ROOT / "tests" / "pages" / f"terms_in_{library}.py"
    done = re.findall(r"^check_\w+$", run(library, checks, folder=tmp_path), re.MULTILINE)
    assert sorted(done) == sorted(re.findall(r"^def (check_\w+)", checks.read_text(), re.MULTILINE))
