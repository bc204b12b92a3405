"""The glue: what a real job needs around the story.  In reading order; one file is one topic:

    before_torch   what has to happen before torch is loaded
    launch         start the ranks: spawned here, one by one, or by a launcher
    launchers      which rank this is, where torchrun, Slurm, Open MPI or an env:// environment says so
    job            what run_worker uses of a job, and how a rank joins and leaves it
    living         who is lost, and how the others go on without it
    meeting        how ranks find each other, and refuse who does not belong
    watch          heartbeats and signals: who is lost, and who wants us to stop
    ending         how a job ends before its work is done, and the line that each rank prints then
    addresses      where processes listen: on one interface, and nowhere else
    placement      where tensors and threads are; how a tensor crosses the wire
    flags          the command line that all four packages share
    report         what a run tells: lines, progress, curves, summary, picture
    checkpoint     files that are whole or not there
    seeds          one seed for each stream of random numbers
    measure        what steps cost; runs beside each other in one table
    calls          every RPC is counted
    trace          for --trace, every RPC is recorded
    timeline       what --trace leaves: both sides of every RPC on one time line
    picture        a time line, drawn
    check          --check: explain this machine before the first run

The same bytes in all four packages: edit rl_rpc/glue, then run `python tests/tools/sync_glue.py`.
"""


class PermanentError(ValueError):
    """An error that would come again however often the job is started: a bad file, say, or training that diverges.

    Its text is one line for the user.  No restart is made after it (--max_restarts).
    """
