"""Shows the RPCs of a program that uses torch.distributed.rpc, and says why it hangs.

cli.py         the commands, and what each does
record/        runs inside a recorded program: the calls, and once a second where each thread stands
command.py     the command that is recorded: its processes, its signals, its end
read.py        reads the calls that were recorded; draw.py draws them

evidence.py    what is known of processes that hang: threads, calls, locks, and what each thread waits for
recording.py   the evidence that a recording contains
dumps.py       takes py-spy's dumps of programs that run already, and finds their processes
stacks.py      the evidence that these dumps contain; memory.py adds the names that they lack
sources.py     what the lines of the program tell about a stack
waits.py       the table of all waits that are recognised
rules.py       who must go on before a thread can; graph.py: who cannot go on, the circle, the ends of the chains
words.py       the report
"""
