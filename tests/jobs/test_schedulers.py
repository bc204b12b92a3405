"""The scripts of docs/CLUSTERS.md for Slurm and Open MPI, under a real Slurm of three nodes and a real mpirun."""

import os
import pathlib
import re
import signal
import subprocess
import sysconfig

import pytest

from jobs import JOBS
from own_machine import OwnMachine
from processes import command_of, environment_of, wait_until
from programs import ROOT, Program, kill
from two_hosts import why_not

pytestmark = pytest.mark.xdist_group("schedulers")
PAGE = (ROOT / "docs" / "CLUSTERS.md").read_text()
SCRIPTS = {name: script for name, script in re.findall(r"^## ([^\n]+)\n.*?^```bash\n(.*?)^```", PAGE, re.S | re.M)}
# Instead of ssh, with which mpirun starts a daemon on another host: it gives the daemon that host's name.
ON_HOST = '#!/bin/sh\nhost=$1\nshift\nexec unshare --uts sh -c "hostname $host && $*"\n'
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}


class Job(Program):
    """A script of the page with some more flags, started on a machine in a folder as the page asks for it."""

    def __init__(self, machine, section, flags, folder, *by):
        self.machine, self.folder = machine, folder
        (folder / "rl_rpc").symlink_to(ROOT / "rl_rpc")
        (folder / "on_host").write_text(ON_HOST)
        (folder / "on_host").chmod(0o755)
        assert SCRIPTS[section].count(" --mode rollout") == 1
        script = SCRIPTS[section].replace(" --mode rollout", " --mode rollout " + " ".join(flags))
        (folder / "script").write_text(script)
        path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
        environ = MPI | {"OMPI_MCA_plm_rsh_agent": folder / "on_host", "PATH": path, "PYTHONUNBUFFERED": 1}
        super().__init__(folder / "script", by=machine.on(*by, cwd=folder), env=environ)

    def text(self):
        return super().text() + "".join(path.read_text() for path in self.folder.glob("slurm-*.out"))

    def wait_until_it_trains(self):
        """Return the process of rank 1."""

        def trains():  # sbatch ends at once, and its job goes on
            assert self.poll() in (None, 0), self.text()
            return re.search(JOBS["rl_rpc"]["training"], self.text())

        wait_until(trains, 60, self.text)
        return self.pid_of("python rl_rpc/main.py", "RANK=1")

    def pid_of(self, command, *variables):
        """Return the process of this job whose command line begins so, and whose environment has these variables."""
        found = [pid for pid in self.members() if command_of(pid).startswith(command)]
        (pid,) = [pid for pid in found if set(variables) <= set(environment_of(pid))]
        return pid

    def slurm_id(self):
        assert self.wait() == 0, self.text()
        return re.fullmatch(r"Submitted batch job (\d+)\n", self.output()).group(1)

    def slurm_end(self, seconds=120):
        """Wait for the end of a job of Slurm; return its state and its exit status, as "STATUS:SIGNAL"."""
        number = self.slurm_id()

        def end():
            shown = self.machine.output_of("scontrol", "show", "job", number)
            state, status = (re.search(rf"\b{name}=(\S+)", shown).group(1) for name in ("JobState", "ExitCode"))
            return state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") and (state, status)

        return wait_until(end, seconds, self.text)

    def assert_the_others_name_rank_1(self):
        for other in ("rank 0 (agent)", "rank 2 (observer2)"):
            assert f"rl_rpc: {other}: lost rank 1 (observer1): its process has ended\n" in self.text(), self.text()


@pytest.fixture(scope="module")
def slurm():
    """Yield a machine with a Slurm. Afterwards, check that the names of this machine are what they were."""
    if reason := why_not("slurmctld", "slurmd", "srun", "munged"):
        pytest.skip(reason)
    names = pathlib.Path("/etc/hosts").read_text(), os.uname().nodename, os.listdir("/sys/class/net")
    with OwnMachine() as machine:
        machine.start_slurm()
        yield machine  # when it ends, it waits for the end of its daemons
    assert names == (pathlib.Path("/etc/hosts").read_text(), os.uname().nodename, os.listdir("/sys/class/net"))


@pytest.fixture(scope="module")
def mpi():
    if reason := why_not("mpirun"):
        pytest.skip(reason)
    with OwnMachine() as machine:
        yield machine


def test_slurm_a_job_trains_to_its_end(slurm, tmp_path):
    with Job(slurm, "Slurm", JOBS["rl_rpc"]["short"], tmp_path, "sbatch") as job:
        assert job.slurm_end() == ("COMPLETED", "0:0"), job.text()
        assert re.search(JOBS["rl_rpc"]["done"], job.text()), job.text()
        assert not job.left_over(), job.text()


def test_slurm_a_killed_rank_is_named_and_the_status_is_137(slurm, tmp_path):
    with Job(slurm, "Slurm", JOBS["rl_rpc"]["long"], tmp_path, "sbatch") as job:
        kill([job.wait_until_it_trains()])
        assert job.slurm_end() == ("FAILED", "137:0"), job.text()
        job.assert_the_others_name_rank_1()
        assert not job.left_over(), job.text()


def test_scancel_leaves_nothing_but_the_checkpoint(slurm, tmp_path):
    with Job(slurm, "Slurm", JOBS["rl_rpc"]["long"], tmp_path, "sbatch") as job:
        job.wait_until_it_trains()
        subprocess.run(slurm.on("scancel", job.slurm_id()), check=True)
        assert job.slurm_end() == ("CANCELLED", "0:15"), job.text()
        assert not job.left_over(), job.text()
        assert (tmp_path / "rl.pt").exists()


def test_mpirun_a_job_trains_to_its_end(mpi, tmp_path):
    with Job(mpi, "Open MPI", JOBS["rl_rpc"]["short"], tmp_path, "bash") as job:
        assert job.wait() == 0, job.text()
        assert re.search(JOBS["rl_rpc"]["done"], job.text()), job.text()
        assert not job.left_over(), job.text()


def test_mpirun_a_killed_rank_is_named_and_the_status_is_137(mpi, tmp_path):
    with Job(mpi, "Open MPI", JOBS["rl_rpc"]["long"], tmp_path, "bash") as job:
        kill([job.wait_until_it_trains()])
        assert job.wait() == 137, job.text()
        job.assert_the_others_name_rank_1()
        assert not job.left_over(), job.text()


def test_ctrl_c_to_mpirun_leaves_nothing(mpi, tmp_path):
    with Job(mpi, "Open MPI", JOBS["rl_rpc"]["long"], tmp_path, "bash") as job:
        job.wait_until_it_trains()
        os.kill(job.pid_of("mpirun"), signal.SIGINT)
        assert job.wait() == 1, job.text()
        assert not job.left_over(), job.text()
