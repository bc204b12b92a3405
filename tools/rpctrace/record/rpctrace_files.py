"""The files into which a process writes its lines."""

import contextlib
import mmap
import os
import sys
import threading

SIZE, FILES = 4 << 20, 10  # bytes of a file, and how many a process keeps: at least its last 100,000 bars
KEPT = []  # all mapped files, because closing one closes its descriptor, whatever that is by now
allocate = getattr(os, "posix_fallocate", lambda file, _, size: os.ftruncate(file, size))  # macOS has only the second


class Files:
    """The files of one process. A line is copied into memory that is mapped to the last one."""

    def __init__(self, base, first_lines):
        """`first_lines` returns the lines with which each file begins: who it is, and what is open."""
        self.base, self.first_lines = base, first_lines
        self.file, self.at, self.count, self.failed = b"", 0, 0, False
        self.maps = []  # of the files that are there
        KEPT.append(self.maps)
        self.lock = threading.RLock()  # a signal handler may make a call, while its thread is in write()

    def write(self, line):
        if self.failed:
            return
        data = line.encode()[: SIZE // 4] + b"\n"
        size = len(data)
        try:
            with self.lock:
                if self.at + size > len(self.file):
                    self.open_next()
                at = self.at
                self.at = at + size  # before the copy, because a signal handler may write a line
                self.file[at : at + size] = data
        except OSError as error:  # for example, the disk is full: the program must go on
            self.failed = True
            why = f"rpctrace: process {os.getpid()} is not recorded any more: {error.strerror}"
            with contextlib.suppress(Exception):
                if os.path.isdir(os.path.dirname(self.base)):  # or the command has ended before this process
                    print(why, file=sys.stderr)

    def open_next(self):
        """Begin the next file, or use the oldest one again.

        It has its whole length at once, filled with zeros: if the disk is full, this fails, and not the program.
        """
        first, path = "\n".join(self.first_lines()).encode()[: SIZE // 2] + b"\n", self.path(self.count)
        if len(self.maps) == FILES:
            os.rename(self.path(self.count - FILES), path)
            self.file = self.maps[self.count % FILES]
            self.file[:] = bytes(SIZE)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                allocate(file, 0, SIZE)
                self.maps.append(mmap.mmap(file, SIZE))
            finally:
                os.close(file)
            self.file = self.maps[-1]
        self.file[: len(first)], self.at, self.count = first, len(first), self.count + 1

    def path(self, number):
        return f"{self.base}.{number:06}.jsonl"
