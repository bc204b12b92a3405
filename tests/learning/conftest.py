"""Fixtures for the tests of all packages."""

import runpy
import sys

import pytest


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Return a function that runs a program without RPC in this process, to its end, and returns what it prints."""

    def run(path, *flags):
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, flags)])
        runpy.run_path(str(path), run_name="__main__")
        output = capsys.readouterr()
        assert output.err == ""
        return output.out

    return run
