"""How a Meter (report.py) times the steps of a training loop, and how bench/bytes_per_step.py counts their bytes."""

import socket

import pytest

from helpers import load_bench, package_on_path

with package_on_path("rl_rpc"):
    from glue import report
bytes_per_step = load_bench("bytes_per_step")

SENT = 10_000  # bytes


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        yield sender, receiver


def exchange(connection):
    """Send SENT bytes, and one byte back. Its packet acknowledges the others, so that the kernel counts them."""
    sender, receiver = connection
    sender.sendall(bytes(SENT))
    left = SENT
    while left:
        left -= len(receiver.recv(left))
    receiver.sendall(b"!")
    assert sender.recv(1) == b"!"


def test_a_meter_times_its_steps_and_their_bytes_can_be_counted(connection, monkeypatch):
    """Both ends are sockets of this process, so each byte counts twice: as sent and as received."""
    monkeypatch.setattr(report.Meter, "step", report.Meter.step)  # restores it after the test
    counted = bytes_per_step.count_steps(report.Meter)
    meter = report.Meter(warm_up=1)
    for _ in range(4):
        with meter.step():
            exchange(connection)
        exchange(connection)  # between two steps: not counted
    assert counted == pytest.approx([2 * SENT] * 4, abs=4)
    assert (meter.steps, meter.timed_steps) == (4, 3) and meter.seconds > 0


def test_a_step_that_fails_is_none():
    meter = report.Meter()
    with pytest.raises(RuntimeError, match="no"), meter.step():
        raise RuntimeError("no")
    assert meter.steps == 0


def test_the_figures_of_staleness():
    """Three gradients were computed from the newest weights, and one from weights that lacked two updates."""
    assert report.staleness_figures({0: 3, 2: 1}) == {"staleness_mean": 0.5, "staleness_max": 2}
    assert report.staleness_figures({}) == {"staleness_mean": 0.0, "staleness_max": 0}
