"""Shows the RPCs of a program that uses torch.distributed.rpc, and says why it hangs.

cli.py         the commands, and what each does

record/        runs inside a recorded program, and writes its calls
command.py     the command that is recorded: its signals, its end
read.py        reads the calls that were recorded; draw.py draws them

dumps.py       finds the processes of a program that runs, and takes py-spy's dumps of them
stacks.py      makes evidence of a dump (evidence.py): processes, with their names (names.py), and threads (threads.py)
waits.py       the table of all waits that are recognised
syntax.py      reads source: which locks stand around a line (facts.py), for which call it waits (sources.py)
rules.py       who must go on before a thread can; graph.py: who cannot go on, the circle, the ends of the chains
report.py      the report
"""
