"""`--check`: explain this machine before the first run.  (The same file in all four packages.)

Runs instead of the scenario: alone (`main.py --check`), or in every rank (`--rank R --check` in each terminal), where
the ranks meet, measure the round trip to each other, and say which pair cannot talk.
"""


def explain(args, package):
    raise NotImplementedError


def meet(job, worker_name):
    raise NotImplementedError
