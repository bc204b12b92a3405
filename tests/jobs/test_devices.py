"""Which rank uses which device, and hosts whose GPU or driver does not work.

These tests need no GPU. A stand-in for the driver (stub_driver.c) reports one GPU, records which processes call it,
and then fails.
"""

import re
import shutil
import subprocess

import pytest
import torch

from helpers import ROOT, package_on_path
from jobs import JOBS
from programs import run_main, start_main

with package_on_path("rl_rpc"):
    from glue import host

# ----------------------------------------------------------------------------------------- which rank uses which device


def ranks_at(*places):
    return [{"host": host, "pid": 1, "gpus": gpus} for host, gpus in places]


@pytest.mark.parametrize(
    "places, devices",
    [
        ([("a", 0)] * 2, ["cpu", "cpu"]),
        ([("a", 2)] * 3, ["cuda:0", "cuda:1", "cuda:0"]),  # more ranks than GPUs: they share
        ([("a", 2), ("a", 2), ("b", 2), ("b", 2)], ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ([("a", 2), ("b", 2), ("a", 2), ("b", 2)], ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),  # Slurm, cyclic
        ([("a", 1)] * 2, ["cuda:0", "cuda:0"]),  # each rank sees only one GPU (Slurm, pods, MIG)
        ([("a", 2), ("a", 0), ("a", 2)], ["cuda:0", "cpu", "cuda:1"]),  # a rank that does not compute takes no GPU
        ([("a", 4), ("b", 0), ("b", 1)], ["cuda:0", "cpu", "cuda:0"]),
    ],
)
def test_the_ranks_of_a_host_take_its_gpus_in_turn(places, devices):
    assert host.devices_of(ranks_at(*places)) == devices


@pytest.mark.parametrize(
    "package, flags, ranks",
    [
        ("rl_rpc", ["--world_size", "3"], [0]),
        ("rnn_rpc", ["--world_size", "3"], [0, 1, 2]),
        ("ddp_rpc", ["--world_size", "5", "--num_servers", "2"], [0, 1, 3, 4]),
        ("ddp_rpc", ["--table_device", "cpu"], [0, 1]),
        ("param_server", ["--mode", "remote"], [0]),
        ("param_server", ["--mode", "replica"], [0, 1, 2]),
    ],
)
def test_only_ranks_that_compute_use_a_gpu(package, flags, ranks, monkeypatch):
    with package_on_path(package):
        import main
        from glue import host

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        args = main.parse_args([*flags, "--device", "cuda"])
        assert [host.start_cuda(args.device, rank in args.device_ranks) for rank in range(args.world_size)] == [
            2 * (rank in ranks) for rank in range(args.world_size)
        ]
        args = main.parse_args(flags)
        assert not any(host.start_cuda(args.device, rank in args.device_ranks) for rank in range(args.world_size))


def test_a_rank_that_does_not_compute_needs_no_gpu_on_its_host(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with package_on_path("rl_rpc"):
        import main

        assert main.parse_args(["--device", "cuda", "--rank", "1"]).device == "cuda"
        with pytest.raises(SystemExit):
            main.parse_args(["--device", "cuda", "--rank", "0"])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_auto_says_what_it_chose(monkeypatch, capsys):
    """It prints one line, with the reason if it chose the CPU, and no line if --device names a device."""
    with package_on_path("rl_rpc"):
        import main

        def said(*flags):
            main.parse_args([*flags])
            return capsys.readouterr().out.splitlines()

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert said("--device", "auto") == ["--device auto: cuda"]
        assert said("--device", "cuda") == said("--device", "cpu") == said() == []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        (line,) = said("--device", "auto")
        assert re.fullmatch(r"--device auto: cpu \(.+\)", line)


def test_num_gpus_says_which_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with package_on_path("param_server"):
        import main

        chosen = [main.parse_args(["--num_gpus", number]).device for number in "01"]
        assert chosen == ["cpu", "cuda"]
        with pytest.raises(SystemExit):
            main.parse_args(["--num_gpus", "2"])
    assert "--num_gpus 2: torch sees 1 CUDA GPU here" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- how tensors cross the wire


@pytest.mark.parametrize("lacking", [TypeError("unexpected keyword argument"), RuntimeError("unknown transport")])
def test_a_torch_without_these_transports_uses_its_own(lacking, monkeypatch):
    made = []

    def options(**keywords):
        if "_channels" in keywords:
            raise lacking
        made.append(keywords)

    monkeypatch.setattr(host.rpc, "TensorPipeRpcBackendOptions", options)
    host.tensorpipe_options("shm", rpc_timeout=5)
    assert made == [{"rpc_timeout": 5}]


@pytest.mark.parametrize("transport, channels", [("uv", ["cma", "mpt_uv", "basic"]), ("tcp", ["basic"])])
def test_no_channel_for_cuda_is_made(transport, channels, monkeypatch):
    """All channels for the CPU are named, in torch's own order."""
    made = []
    monkeypatch.setattr(host.rpc, "TensorPipeRpcBackendOptions", lambda **keywords: made.append(keywords))
    host.tensorpipe_options(transport)
    assert made[-1]["_channels"] == channels


# ------------------------------------------------------------------------------------- hosts whose driver does not work


@pytest.fixture(scope="module")
def stub_driver(tmp_path_factory):
    """Return a function of (what cuInit returns, the driver's version); it returns an environment with that driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "tests" / "harness" / "stub_driver.c"
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / name, source], check=True, timeout=60)

    def environment(init, version=13020):
        (folder / "calls").write_text("")
        return {
            "LD_LIBRARY_PATH": str(folder),
            "STUB_LOG": str(folder / "calls"),
            "STUB_INIT": str(init),
            "STUB_VERSION": str(version),
            "TP_VERBOSE_LOGGING": "5",  # TensorPipe logs which channels it makes
        }

    environment.calls = folder / "calls"
    return environment


TENSORPIPE = re.compile(r"^V\d{4} .*\n", re.MULTILINE)


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@pytest.mark.slow
@pytest.mark.parametrize("package", ["rl_rpc", "ddp_rpc"])
@pytest.mark.draw(1)
def test_a_run_on_the_cpu_leaves_the_driver_alone(package, stub_driver):
    """Ranks ask the driver for the number of GPUs, as torch does; the starting process and the fork server do not.

    No message mentions a driver that does not work.
    """
    flags = [*JOBS[package]["size"], *JOBS[package]["short"], "--transport", "uv"]
    run = start_main(package, *flags, env=stub_driver(init=999), cold=True)
    done = run.result()
    assert done.returncode == 0 and TENSORPIPE.sub("", done.stderr) == "", (done.stdout, done.stderr)
    calls = [line.split(maxsplit=2) for line in stub_driver.calls.read_text().splitlines()]
    ranks = {process for process, _, function in calls if function == "cuInit"}
    assert len(ranks) == int(JOBS[package]["size"][1])
    assert {process for process, _, _ in calls} == ranks
    assert not ranks & ({str(run.pid)} | {parent for _, parent, _ in calls})
    asked = {"cuInit", "cuDriverGetVersion", "cuGetExportTable", "nvmlInit", "nvmlDeviceGetCount_v2"}
    assert {function for _, _, function in calls} <= asked
    assert "registering channel cma" in done.stderr and "CUDA" not in done.stderr  # messages of TensorPipe


FAILURES = {  # how the driver fails: (result of cuInit, version), and torch's message
    "too old": ((0, 11000), "driver on your system is too old (found version 11000)"),
    "broken": ((999, 13020), "CUDA unknown error"),
    "of another version than its library": ((803, 13020), "unsupported display driver / cuda driver combination"),
    "broken, which shows late": ((0, 13020), "Error 500: named symbol not found"),
}


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.draw(1)
def test_a_driver_that_does_not_work_is_reported_in_one_line(failure, stub_driver):
    (init, version), words = FAILURES[failure]
    done = run_main("rl_rpc", "--device", "cuda", env=stub_driver(init, version), cold=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "--device cuda: torch sees no CUDA GPU here" in line and words in line


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_check_tells_how_the_driver_fails(stub_driver):
    (init, version), words = FAILURES["broken, which shows late"]
    done = run_main("rl_rpc", "--check", env=stub_driver(init, version), cold=True)
    assert done.returncode == 0, done.stderr
    # The stub's environment asks TensorPipe for its messages.
    assert not [line for line in done.stderr.splitlines() if " tensorpipe/" not in line]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("GPUs ")]
    assert line.startswith("GPUs         0 (") and words in line and line.endswith("--device cpu: ranks on cpu")
    assert "\ntorch        " in done.stdout  # the lines after it are printed too
