"""The glue: starting and watching processes, flags and checkpoints.  Each file has one topic.  In reading order:

    before_torch   what must happen before torch is imported
    launch         start the ranks: all of them from one process, one by one, or by a launcher
    launchers      read this process's rank from torchrun, Slurm, Open MPI or an env:// environment
    job            the `job` that run_worker gets: how a rank joins the job, goes on without a lost rank, and leaves
    rendezvous     how a rank finds the supervisor, and on which network interface it listens
    supervisor     one connection per rank: who has joined, who waits, who is lost, when the job ends
    ending         how a job ends before its work is done, and the line that each rank prints then
    flags          the command-line flags that all four packages share
    report         what a run prints and writes: lines, progress bar, curves, summary, picture; the time of its steps
    checkpoint     write files completely or not at all; save and load checkpoints
    tensors        devices, threads, tensors on the wire, random seeds
    trace          --trace: record every RPC
    timeline       the file or picture that --trace writes: both sides of every RPC on one time axis
    check          --check: describe what a job would find on this machine

All four packages have identical copies: edit rl_rpc/glue, then run `python tests/tools/sync_glue.py`.
"""


class UserError(ValueError):
    """Something that the user must correct: a bad file, a port that is taken, training that diverges.

    Its text is one line for the user, printed without a traceback, and --max_restarts does not start the job again.
    Any other exception is a mistake in the code, and its traceback is printed.
    """
