"""The file into which a process writes its lines."""

import contextlib
import mmap
import os
import sys
import threading

PIECE, MOST = 4 << 20, 40 << 20  # bytes by which the file grows, and of all of it: at least 100,000 bars
FULL = b'{"full": true}\n'
SIZE_OF_FULL = len(FULL)
# All mapped pieces. Python keeps a descriptor for each. If the program has closed all descriptors, and one of its files
# has got the same number, then closing the piece would close this file.
KEPT = []
allocate = getattr(os, "posix_fallocate", lambda file, at, size: os.ftruncate(file, at + size))  # macOS has the second


class File:
    """The file of one process. A line is copied into memory that is mapped to it."""

    def __init__(self, path, first):
        """`first`: the line with which the file begins."""
        self.path, self.first, self.size = path, first.encode() + b"\n", 0
        self.piece, self.at, self.ended = b"", 0, False
        self.lock = threading.RLock()  # a signal handler may make a call, while its thread is in write()

    def write(self, line):
        if self.ended:
            return
        data = line.encode()[: PIECE // 4] + b"\n"
        size = len(data)  # not below: a signal handler may run where a function is called, and write a line
        try:
            with self.lock:
                if self.ended:  # meanwhile
                    return
                if not self.piece or self.at + size > PIECE - SIZE_OF_FULL:
                    if self.size >= MOST:
                        data, size, self.ended = FULL, SIZE_OF_FULL, True
                    else:
                        self.grow()
                at, self.at = self.at, self.at + size  # before the copy, so that its line comes behind this one
                self.piece[at : at + size] = data
        except (OSError, ValueError, IndexError) as error:  # for example, the disk is full: the program must go on
            self.ended = True
            why = f"rpctrace: process {os.getpid()} is not recorded any more: {getattr(error, 'strerror', error)}"
            with contextlib.suppress(Exception):
                if os.path.isdir(os.path.dirname(self.path)):  # or the command has ended before this process
                    print(why, file=sys.stderr)

    def grow(self):
        """Map a further piece. It is allocated, and zero: if the disk is full, this fails, and not the program."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            allocate(file, self.size, PIECE)
            piece = mmap.mmap(file, PIECE, offset=self.size)
        finally:
            os.close(file)
        KEPT.append(piece)
        first = self.first if self.size == 0 else b""
        piece[: len(first)] = first
        self.piece, self.at, self.size = piece, len(first), self.size + PIECE  # all of it, as a signal may come
