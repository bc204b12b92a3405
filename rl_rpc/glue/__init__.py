"""The glue: starting and watching processes, flags and checkpoints.  One file is one topic.  In reading order:

    before_torch   what has to happen before torch is loaded
    launch         start the ranks: spawned here, one by one, or by a launcher
    launchers      which rank this is, where torchrun, Slurm, Open MPI or an env:// environment says so
    job            what run_worker uses of a job; how a rank joins it, goes on without a lost one, and leaves
    meeting        how ranks find each other, where they listen, and how a rank is refused that does not belong
    watch          heartbeats and signals: which rank is lost, and whether a user wants the job to stop
    ending         how a job ends before its work is done, and the line that each rank prints then
    flags          the command line that all four packages share
    report         what a run prints and writes: lines, progress, curves, summary, picture
    checkpoint     files that are whole or not there
    tensors        on which device, with how many threads, how they cross the wire, and from which random numbers
    meter          what steps cost: time, RPCs, bytes on the wire
    trace          for --trace, every RPC is recorded, and counted
    timeline       what --trace leaves: both sides of every RPC on one time line, as a file or a picture
    check          --check: explain this machine before the first run

The same bytes in all four packages: edit rl_rpc/glue, then run `python tests/tools/sync_glue.py`.
"""


class PermanentError(ValueError):
    """An error that would happen again after a restart: a bad file, for example, or training that diverges.

    Its text is one line for the user.  --max_restarts does not start the job again after it.
    """
