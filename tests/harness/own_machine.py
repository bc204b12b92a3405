"""A machine of its own, for programs that need fixed ports and names, and a Slurm of three nodes on it.

The machine is a set of namespaces: it has its own network, hostname, /etc/hosts and process ids. This needs root. When
its first process ends, the kernel kills all others. The first process ends with the tests, whatever ends them.
"""

import os
import pathlib
import shutil
import subprocess
import tempfile

from processes import children_of, wait_until
from two_hosts import NAMESPACES

HOSTS = """127.0.0.1 localhost
10.78.0.1 node1
10.78.0.2 node2
10.78.0.3 node3
"""
FIRST_PROCESS = """
mount --bind "$0/hosts" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && hostname node1 && ip link set lo up || exit
ip link add net0 type veth peer name net1 && ip link set net1 up && ip link set net0 up || exit
for address in 10.78.0.1 10.78.0.2 10.78.0.3; do ip addr add $address/24 dev net0 || exit; done
echo ready && read _
"""
SLURM_CONF = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=0
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
NodeName=node[1-3] NodeHostname=node1 Port=[17001-17003] CPUs=4
PartitionName=all Nodes=ALL Default=YES
"""


class OwnMachine:
    """A context manager. The machine is node1, and it also has the addresses of node2 and node3."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.daemons = []

    def __enter__(self):
        (self.folder / "hosts").write_text(HOSTS)
        command = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "bash", "-c", FIRST_PROCESS, str(self.folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"
        (self.first,) = children_of(self.process.pid)
        return self

    def __exit__(self, *_):
        self.process.stdin.close()  # the first process waits for that
        for process in (self.process, *self.daemons):
            process.wait()
        shutil.rmtree(self.folder)

    def on(self, *command, cwd="/"):
        """Return the command that runs `command` on this machine in the folder `cwd`."""
        enter = ["nsenter", "--target", str(self.first), *NAMESPACES, "env", "--chdir", str(cwd)]
        return [*enter, f"SLURM_CONF={self.folder}/slurm.conf", f"TMPDIR={self.folder}", *command]

    def output_of(self, *command):
        return subprocess.run(self.on(*command), capture_output=True, text=True).stdout

    def start_slurm(self, seconds=60):
        """Start a Slurm with the nodes node1 to node3. Return when all of them are ready."""
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(folder=self.folder))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        self.folder.chmod(0o711)  # munged refuses a socket that others cannot reach
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
        subprocess.run(self.on("munged", *files, f"--socket={self.folder}/munge.socket"), check=True)
        self._start_daemon("slurmctld", "-D")
        for node in ("node1", "node2", "node3"):
            self._start_daemon("slurmd", "-D", "-N", node)
        wait_until(lambda: "3 idle" in self.output_of("sinfo", "--noheader", "--format=%D %t"), seconds, self.logs)

    def logs(self):
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))

    def _start_daemon(self, *command):
        with open(self.folder / "daemons", "a") as out:
            self.daemons.append(subprocess.Popen(self.on(*command), stdout=out, stderr=out))
