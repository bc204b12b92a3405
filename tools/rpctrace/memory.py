"""What py-spy's dumps leave out, read from the memory of a process that runs: names of workers, owners of RRefs.

torch keeps the agent of RPC in a variable of its library, whose place in the file is in the file's table of symbols.
The layouts are those of torch 2.11 to 2.14 and of CPython 3.10 to 3.14. Each value is checked: a worker has a name of
the letters that torch allows, twice. Where something is not as expected, it is not known, and that is all.
"""

import contextlib
import functools
import mmap
import os
import re
import struct

AGENT = b"_ZN5torch11distributed3rpc8RpcAgent16currentRpcAgent_E"  # RpcAgent::currentRpcAgent_, a shared_ptr
NAME = re.compile(r"[\w:-]{1,128}", re.ASCII)  # of a worker
DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
# Offsets in bytes. A WorkerInfo has a table of its methods, its counts, the name, and the number (16 bits).
INFO_NAME, INFO_RANK, AGENT_INFO, AGENT_TIMEOUT = 16, 48, 8, 72
RREF_OWNER, RREF_CREATED_ON, RREF_NUMBER = 16, 24, 32
GROUP_RANK, GROUP_SIZE = 24, 28
ATTRIBUTES = 48  # of an object that are looked at
NODE_NAME, NODE_INFO = 8, 40  # of a node of {name: WorkerInfo}, after a pointer to the next one
CLASS, OF_C, FUNCTION_NAME, FUNCTION_CODE, CLASS_NAME, CELL, BOUND = 8, 16, 32, 48, 24, 16, 16  # of Python's objects


class Memory:
    def __init__(self, pid):
        self.file = open(f"/proc/{pid}/mem", "rb", 0)
        self.base = self.library = None
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                start, _, offset, _, _, *path = line.split(maxsplit=5)
                if path and path[0].rstrip().endswith("/libtorch_cpu.so"):
                    self.library = path[0].rstrip()
                    self.base = int(start.partition("-")[0], 16) - int(offset, 16)
                    break

    def bytes(self, address, count):
        try:
            found = os.pread(self.file.fileno(), count, address)
        except (OSError, OverflowError):
            found = b""
        if len(found) < count:
            raise LookupError(f"nothing at {address:#x}")
        return found

    def number(self, address, form="Q"):
        return struct.unpack(f"<{form}", self.bytes(address, struct.calcsize(form)))[0]

    # ----------------------------------------------------------------------------------------------------- of C++

    def worker(self):
        """Return (name, rank, {rank: name} of all workers, default time limit), or None without an agent of RPC."""
        place = symbol(self.library, AGENT) if self.library else None
        agent = self.number(self.base + place) if place else 0
        if not agent:
            return None
        name, rank = self.info(agent + AGENT_INFO)
        return name, rank, self.peers(agent, (rank, name)), self.number(agent + AGENT_TIMEOUT, "q") / 1e3

    def peers(self, agent, myself):
        """Look through the agent for its {name: WorkerInfo}: the count follows the pointer to the first node."""
        for at in range(0, 4096, 8):
            try:
                found, node, count = {}, self.number(agent + at), self.number(agent + at + 8)
                while node and len(found) < count:
                    name, rank = self.info(node + NODE_INFO)
                    if self.text(node + NODE_NAME) != name:
                        break
                    found[rank], node = name, self.number(node)
                if not node and len(found) == count and myself in found.items():
                    return found
            except LookupError:
                continue
        return {}

    def info(self, address):
        """Return the (name, rank) in a WorkerInfo."""
        return self.text(address + INFO_NAME), self.number(address + INFO_RANK, "h")

    def text(self, address):
        """Return a std::string that is the name of a worker."""
        start, length = self.number(address), self.number(address + 8)
        found = self.bytes(start, length).decode("ascii", "replace") if length <= 128 else ""
        if not NAME.fullmatch(found):
            raise LookupError("no name of a worker")
        return found

    def worker_of(self, thing):
        """Return the name in the Python object of a WorkerInfo."""
        return self.info(self.number(thing + OF_C))[0]

    def rref_of(self, thing):
        """Return (rank of the owner, number of the RRef) of the Python object of an RRef."""
        rref = self.number(self.number(thing + OF_C))
        number = self.number(rref + RREF_CREATED_ON, "h"), self.number(rref + RREF_NUMBER)
        return self.number(rref + RREF_OWNER, "h"), "{}.{}".format(*number)

    def rref_in(self, thing):
        """Return the RRef among the attributes of an object of Python, if there is exactly one.

        Where they are depends on Python's version: in a list of values before the object, behind it, or in a dict.
        """
        lists = [thing + 16]
        for place in (thing - 32, thing - 24, thing + 16):
            with contextlib.suppress(LookupError):
                start = self.number(place) & ~1
                lists.append(start)
                lists += struct.unpack("<2Q", self.bytes(start + 32, 16))  # the keys, and the values, of a dict
        found = set()
        for start in lists:
            for at in range(start, start + 8 * ATTRIBUTES, 8):
                with contextlib.suppress(LookupError):
                    if self.class_of(value := self.number(at)) == "PyRRef":
                        found.add(value)
        if len(found) != 1:
            raise LookupError("none, or several")
        return found.pop()

    def group_of(self, thing):
        """Return (rank of this process, size) of the Python object of a process group."""
        group = self.number(thing + OF_C)
        rank, size = self.number(group + GROUP_RANK, "i"), self.number(group + GROUP_SIZE, "i")
        if not 0 <= rank < size < 1 << 20:
            raise LookupError("no process group")
        return rank, size

    # -------------------------------------------------------------------------------------------------- of Python

    def class_of(self, thing):
        return self.c_text(self.number(self.number(thing + CLASS) + CLASS_NAME)).rpartition(".")[2]

    def in_cell(self, thing):
        """Return what a variable contains that several functions share."""
        return self.number(thing + CELL)

    def callable_name(self, thing):
        """Return the name of a function, a method or a class."""
        kind = self.class_of(thing)
        if kind == "type":
            return self.c_text(self.number(thing + CLASS_NAME)).rpartition(".")[2]
        if kind == "builtin_function_or_method":
            return self.c_text(self.number(self.number(thing + OF_C)))
        if kind == "method":
            return self.callable_name(self.number(thing + BOUND))
        return self.python_text(self.number(thing + FUNCTION_NAME)) if kind == "function" else None

    def is_async(self, function):
        """Return whether a function has been made by rpc.functions.async_execution: its code stands in that file."""
        if self.class_of(function) != "function":
            return False
        code = self.number(function + FUNCTION_CODE)
        for at in range(0, 200, 8):
            try:
                if "distributed/rpc/functions." in self.python_text(self.number(code + at)):
                    return True
            except LookupError:
                continue
        return False

    def c_text(self, address):
        found = b""
        while b"\0" not in found and len(found) < 256:
            found += self.bytes(address + len(found), 16)
        return found.partition(b"\0")[0].decode("utf-8", "replace")

    def python_text(self, thing):
        """Return a str of ASCII letters. Before Python 3.12, a pointer stands before them, which is nothing here."""
        length = self.number(thing + 16)
        if not 0 < length < 1000 or self.class_of(thing) != "str":
            raise LookupError("no str")
        found = self.bytes(thing + 40, length + 8)
        return (found[8:] if found.startswith(bytes(8)) else found[:length]).decode("ascii", "replace")


@functools.cache
def symbol(path, name):
    """Return where a variable of a library is, as the ELF file tells, or None."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
            start, (size, count) = struct.unpack_from("<Q", elf, 0x28)[0], struct.unpack_from("<HH", elf, 0x3A)
            sections = [struct.unpack_from("<IIQQQQII", elf, start + number * size) for number in range(count)]
            (table,) = [one for one in sections if one[1] == DYNAMIC_SYMBOLS]
            texts = sections[table[6]]
            wanted = elf.find(b"\0" + name + b"\0", texts[4], texts[4] + texts[5]) + 1 - texts[4]
            for entry in struct.iter_unpack("<IBBHQQ", elf[table[4] : table[4] + table[5]]):
                if entry[0] == wanted:
                    return entry[4]
    except (OSError, ValueError, struct.error):
        pass
    return None
