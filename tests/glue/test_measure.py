"""What a Meter counts around the steps of a loop (measure.py)."""

import socket

import pytest

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import calls, measure

SENT = 10_000  # bytes


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        yield here, there


def exchange(connection):
    """Send SENT bytes, and one back, with which the kernel learns that they have arrived."""
    here, there = connection
    here.sendall(bytes(SENT))
    left = SENT
    while left:
        left -= len(there.recv(left))
    there.sendall(b"!")
    assert here.recv(1) == b"!"


def test_bytes_on_the_wire_are_counted(connection):
    """Both ends are sockets of this process: what one has sent, and the other has received."""
    before = measure.wire_bytes()
    exchange(connection)
    assert measure.wire_bytes() - before == pytest.approx(2 * SENT + 2, abs=2)  # the last byte may be under way


def test_a_meter_counts_what_its_steps_cost(connection, monkeypatch):
    made = iter([100, 112])
    monkeypatch.setattr(calls, "so_far", lambda: next(made))
    exchange(connection)  # before the first step: not counted
    meter = measure.Meter("tcp", warm_up=1)
    for step in meter.over(range(4)):
        if step:
            exchange(connection)
    exchange(connection)
    figures = meter.figures()
    assert figures.pop("wire_bytes_per_step") == pytest.approx(3 * 2 * SENT / 4, abs=4)
    assert figures == {"rpc_calls": 12, "rpc_calls_per_step": 3.0}
    assert (meter.steps, meter.timed_steps) == (4, 3) and meter.seconds > 0


def test_bytes_are_counted_only_where_all_of_them_go_over_tcp(monkeypatch):
    monkeypatch.setattr(measure, "wire_bytes", lambda: pytest.fail("counted"))
    meter = measure.Meter("uv")
    assert list(meter.over([7])) == [7] and meter.figures()["wire_bytes_per_step"] is None
