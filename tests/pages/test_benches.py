"""bench/calls.py: what one call costs, and what torch sends for it."""

import json
import re

import pytest

from programs import run_script

TORCH_FORMS = ["function by name", "RRef as argument", "RRef proxy"]
WINDOWS = ["rpc_async, 1 in flight", "rpc_async, 8 in flight", "rpc_async, 64 in flight"]
PAYLOADS = ["nothing", "array of 4 floats", "tensor of 1 KB", "tensor of 1 MB"]


@pytest.mark.slow
@pytest.mark.draw(1, "benches")
def test_a_call_through_an_rref_costs_twice_the_messages(tmp_path):
    """A call by name sends a request and an answer. With an RRef the owner also confirms it, and gets an answer.

    The first call through a proxy makes one more call, which asks for the type of the object.
    """
    out = tmp_path / "messages.json"
    done = run_script("bench/calls.py", "--messages", "--json", out)
    assert done.returncode == 0, done.stderr
    counted = json.loads(out.read_text())["messages"]
    assert counted == {
        "torch RPC, function by name": {"first": 2, "each": 2},
        "torch RPC, RRef as argument": {"first": 4, "each": 4},
        "torch RPC, RRef proxy": {"first": 8, "each": 4},
    }
    assert re.search(r"^torch RPC, RRef proxy +4, the first call 8$", done.stdout, re.M)


@pytest.mark.slow
@pytest.mark.draw(1, "benches")
def test_every_way_to_call_has_its_row(tmp_path):
    out = tmp_path / "calls.json"
    flags = ["--rounds", 1, "--calls", 10, "--monarch_python", tmp_path / "none", "--markdown", "--json", out]
    done = run_script("bench/calls.py", *flags)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(out.read_text())
    assert numbers["not installed"]["Monarch actor"] == f"{tmp_path / 'none'}: No such file or directory"
    ways = ["multiprocessing Pipe", "gloo send and recv", "gRPC", "Ray actor", "Monarch actor"]
    ways += [f"torch RPC, {form}, {way}" for form in TORCH_FORMS + WINDOWS for way in ("shm", "uv")]
    assert sorted([*numbers["rounds"], *numbers["not installed"]]) == sorted(ways)
    for way, (figures,) in numbers["rounds"].items():
        assert list(figures) == PAYLOADS
        for figure in figures.values():
            assert 0 < figure["p50_ms"] <= figure["p95_ms"] and figure["calls_per_second"] > 0
        row = rf"^{re.escape(way)} +[\d.]+ \(.*\) +[\d.]+ \(.*\) +[\d,]+ \(.*\)$"
        assert len(re.findall(row, done.stdout, re.M)) == len(PAYLOADS)
        assert re.search(rf"^\| {re.escape(way)} \|( [\d.]+ \([\d.]+\) \|){{4}} [\d,]+ \|", done.stdout, re.M)
    for way, why in numbers["not installed"].items():
        row = rf"^{way} +not installed \({re.escape(why)}\)$"
        assert len(re.findall(row, done.stdout, re.M)) == len(PAYLOADS)
