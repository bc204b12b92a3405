"""Run torch's own tests of RPC, which are in its wheel, with and without rpctrace: the results must be the same.

    python tools/torch_rpc_tests.py                  # all (several minutes)
    python tools/torch_rpc_tests.py --every 40       # every 40th
    python tools/torch_rpc_tests.py --every 100 --spawn

The ranks are forked, which is faster than torch's own way, "spawn". The exit status is 1 if a result differs.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest

RPCTRACE = pathlib.Path(__file__).resolve().parent / "rpctrace"


def run(every, results, spawn):
    """Run the tests in this process, and write {name: what has become of it} into the file `results`."""
    found = {}

    class Result(unittest.TextTestResult):
        def startTest(self, test):
            found[test.id()] = "passed"
            super().startTest(test)

        def addSkip(self, test, reason):
            found[test.id()] = "skipped"
            super().addSkip(test, reason)

        def addFailure(self, test, error):
            found[test.id()] = "failed"
            super().addFailure(test, error)

        addError = addFailure

    classes = [one for one in globals().values() if isinstance(one, type) and issubclass(one, unittest.TestCase)]
    tests = [test for one in classes for test in unittest.defaultTestLoader.loadTestsFromTestCase(one)]
    if not spawn:
        for one in classes:
            one._spawn_processes = fork_processes
    unittest.TextTestRunner(resultclass=Result).run(unittest.TestSuite(tests[::every]))
    pathlib.Path(results).write_text(json.dumps(found))


def fork_processes(test):
    import torch

    test._start_processes(torch.multiprocessing.get_context("fork").Process)


def make_tests():
    """Return {name: class} of torch's tests on a CPU."""
    expecttest = types.ModuleType("expecttest")  # torch imports this package, and these tests use nothing of it
    expecttest.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", expecttest)
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    pipes = rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS
    found = rpc_utils.generate_tests("TensorPipe", TensorPipeRpcAgentTestFixture, pipes, __name__)
    faulty = rpc_utils.FAULTY_AGENT_TESTS
    return found | rpc_utils.generate_tests("Faulty", FaultyRpcAgentTestFixture, faulty, __name__)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="run only every so many of the tests")
    parser.add_argument("--spawn", action="store_true", help='start the ranks by "spawn"')
    parser.add_argument("--run", metavar="FILE", help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.run:
        run(args.every, args.run, args.spawn)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        outcomes = []
        for recorder in ([], [sys.executable, str(RPCTRACE), "--into", folder, "--"]):
            results = pathlib.Path(folder, f"{len(outcomes)}.json")
            command = [*recorder, sys.executable, __file__, *sys.argv[1:], "--run", str(results)]
            done = subprocess.run(command, capture_output=True, text=True)
            if not results.exists():
                sys.exit(done.stderr)
            outcomes.append(json.loads(results.read_text()))
            count = [sum(one == word for one in outcomes[-1].values()) for word in ("passed", "failed", "skipped")]
            print("with   " if recorder else "without", "rpctrace: {} passed, {} failed, {} skipped".format(*count))
        recorded = sum(len(path.read_bytes().splitlines()) for path in pathlib.Path(folder).rglob("*.jsonl"))
    print(f"lines recorded: {recorded:,}")
    without, recorded_too = outcomes
    different = {name: (one, recorded_too.get(name)) for name, one in without.items() if one != recorded_too.get(name)}
    for name, (one, other) in different.items():
        print(f"{name}: {one} without rpctrace, {other} with it")
    return bool(different or not recorded)


if "--run" in sys.argv or __name__ == "__mp_main__":  # the spawned ranks need the classes, too
    globals().update(make_tests())
if __name__ == "__main__":
    sys.exit(main())
