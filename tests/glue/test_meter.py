"""What a Meter counts in the steps of a training loop (meter.py)."""

import socket

import pytest

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import meter as meters
    from glue import trace

SENT = 10_000  # bytes


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        yield sender, receiver


def exchange(connection):
    """Send SENT bytes, and one byte back.  Its packet acknowledges the others, so that the kernel counts them."""
    sender, receiver = connection
    sender.sendall(bytes(SENT))
    left = SENT
    while left:
        left -= len(receiver.recv(left))
    receiver.sendall(b"!")
    assert sender.recv(1) == b"!"


def test_bytes_on_the_wire_are_counted(connection):
    """Both ends are sockets of this process, so each byte counts twice: as sent and as received."""
    before = meters.wire_bytes()
    exchange(connection)
    assert meters.wire_bytes() - before == pytest.approx(2 * SENT + 2, abs=2)  # the last byte may be on its way


def test_a_meter_counts_what_its_steps_cost(connection, monkeypatch):
    calls = 100
    monkeypatch.setattr(trace, "calls_so_far", lambda: calls)
    monkeypatch.setattr(trace, "is_recording", lambda: True)
    meter = meters.Meter("tcp", warm_up=1)
    for step in range(4):
        with meter.step():
            if step:
                exchange(connection)
                calls += 4
        exchange(connection)  # between two steps: not counted
        calls += 50
    figures = meter.figures()
    assert figures.pop("wire_bytes_per_step") == pytest.approx(3 * 2 * SENT / 4, abs=4)
    assert figures == {"rpc_calls": 12, "rpc_calls_per_step": 3.0}
    assert (meter.steps, meter.timed_steps) == (4, 3) and meter.seconds > 0


def test_what_is_not_counted_is_none():
    """Bytes are counted only if all of them go over TCP, and RPCs only if they are recorded."""
    meter = meters.Meter("uv")
    with meter.step():
        pass
    assert meter.figures() == {"rpc_calls": None, "rpc_calls_per_step": None, "wire_bytes_per_step": None}


def test_a_step_that_fails_is_none():
    meter = meters.Meter("uv")
    with pytest.raises(RuntimeError, match="no"), meter.step():
        raise RuntimeError("no")
    assert meter.steps == 0
