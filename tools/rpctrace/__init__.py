"""Shows the RPCs of a program that uses torch.distributed.rpc, and says why it hangs.

cli.py         the commands, and what each does
record/        runs inside a recorded program: the calls, and once a second where each thread stands
command.py     the command that is recorded: its processes, its signals, its end
read.py        reads the calls that were recorded; draw.py draws them

evidence.py    what is known of processes that hang: threads, calls, locks, and what each thread waits for
recording.py   makes it of what is written about processes, in a recording or by stacks.py
waits.py       the table of all waits that are recognised
rules.py       who must go on before a thread can; graph.py: who cannot go on, the circle, the ends of the chains
words.py       the report

dumps.py       takes py-spy's dumps of programs that run already, and finds their processes
stacks.py      writes what a dump shows as a recorded process would write it
sources.py     what the lines of the program tell about a dump; store.py: the names that torch's store tells
"""
