"""rpctrace says why a program hangs: the circle, or the end of the chain, down to the lines. And it claims no circle
where there is none.

Each program in hangs/ hangs. Its docstring begins with the verdict, the number of ranks, and words of the report. The
lines that the report must name end in "# here".
"""

import os
import re
import signal
import sys
import time

import pytest

from helpers import ROOT
from programs import Program, run_script

HERE = ROOT / "tests" / "tools"
START = [sys.executable, HERE / "start_ranks.py"]
HANGS = sorted(path.stem for path in (HERE / "hangs").glob("*.py"))
sys.path.insert(0, str(ROOT / "tools" / "rpctrace"))
import why  # noqa: E402

sys.path.pop(0)


def expected(name):
    """Return (the verdict, the number of ranks, words of the report, the lines that it must name)."""
    text = (HERE / "hangs" / f"{name}.py").read_text()
    verdict, ranks, words = re.match(r'"""(\w+), (\d) ranks: (.*?)(?:\.\s|\.""")', text, re.DOTALL).groups()
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    return verdict, int(ranks), words, lines


def check(name, report):
    verdict, _, words, lines = expected(name)
    title = {"circle": "CIRCLE", "end": "END OF A CHAIN"}
    _, found, rest = report.partition(title[verdict])
    assert found and rest, report
    assert {int(number) for number in re.findall(rf"{name}\.py:(\d+), in ", rest)} >= set(lines), report
    assert verdict == "circle" or words in rest, report
    assert re.search(r"See docs/\w+\.md#\S+$", rest, re.MULTILINE), report


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.quick] if name == "two_locks" else []) for name in HANGS]
)
def test_a_program_that_hangs_is_explained_and_ended(name, tmp_path):
    program = ["--", *START, HERE / "hangs" / f"{name}.py", expected(name)[1]]
    done = run_script("tools/rpctrace", tmp_path / "t.json", "--stalled", 3, "--end", *program)
    assert done.returncode == 3, done.stderr
    check(name, done.stderr)


def wait_until_stuck(folder, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        said = why.Run(folder).verdict()
        if said["verdict"] != "nothing" and min(step["seconds"] for step in said["steps"]) > 2:
            return
        time.sleep(0.2)
    raise AssertionError("it does not hang")


@pytest.mark.parametrize(("name", "by"), [("two_locks", "python"), ("served_loop", "sh")])
def test_ctrl_c_explains_and_a_second_one_ends_everything(name, by, tmp_path):
    path, ranks = HERE / "hangs" / f"{name}.py", expected(name)[1]
    command, env = [*START, path, ranks], {}
    if by == "sh":
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29871}
        command = ["sh", "-c", "".join(f"RANK={rank} {sys.executable} {path} & " for rank in range(ranks)) + "wait"]
    folder = tmp_path / "calls"
    with Program("tools/rpctrace", "--into", folder, "--", *command, env=env) as program:
        wait_until_stuck(folder)
        program.send_signal(signal.SIGQUIT)  # Ctrl-\ explains, too, and ends nothing
        assert program.wait_for_text("The command goes on"), program.text()
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait_for_text(r"(?s)the command still runs.*See docs/", 10), program.text()
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(5) == 130 and not program.left_over(0), program.text()
        check(name, program.errors().partition("the command still runs")[2])
    done = run_script("tools/rpctrace", "why", folder)
    check(name, done.stdout)


@pytest.mark.parametrize("cases", [0, 1])
def test_no_circle_is_claimed_where_everything_goes_on(cases, tmp_path):
    program = ["--", *START, HERE / "not_hanging.py", 2]
    with Program("tools/rpctrace", "--into", tmp_path, "--stalled", 2, *program, env={"CASES": cases}) as running:
        while running.poll() is None:
            said = why.Run(tmp_path).verdict()
            assert said["verdict"] != "circle", running.output() + said["report"]
            time.sleep(0.2)
        assert running.wait() == 0 and "all done" in running.output(), running.text()
        assert "CIRCLE" not in running.errors(), running.text()
