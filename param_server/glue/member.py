"""What every rank but rank 0 does for the job: join it, say which barrier it has reached, and hear rank 0."""

import socket
import threading

from glue import PACKAGE, UserError, meet, sockets
from glue.job import DONE, Job
from glue.scenario import adopt, check_rank


class Member(Job):  # in every rank but rank 0
    """The Job of a rank that rank 0 coordinates. A thread of its own reads what rank 0 says."""

    def _meet(self, scenario, waiting):
        """Connect to rank 0, and take the flags of the job; return this rank's own address."""
        if self.spawned:
            self.listener.close()  # otherwise who connects after the end of rank 0 would wait for an answer
            self.listener = None
        hello = {"join": self.rank, "host": socket.gethostname(), "given": {"package": PACKAGE, **self.args.given}}
        connection, lines, answer = meet.connect(hello, self.args, waiting)
        self.links[0] = connection
        self.host = connection.getpeername()[0]
        if "end" in answer:
            self.leave(answer["end"], answer["status"])
        adopt(answer["flags"], self.args)
        self.know_scenario(scenario)
        try:
            check_rank(self.args, self.scenario)
        except UserError as error:  # rank 0 goes on waiting for this rank, so it can be started again
            self.leave(str(error), status=2)
        sockets.send(connection, **self.about())
        threading.Thread(target=self._listen, args=(lines,), daemon=True).start()
        return connection.getsockname()[0]

    def _listen(self, lines):
        """Take in what rank 0 says, until its connection ends."""
        why = sockets.read(lines, self._take_in)
        if self.state["passed"] < DONE:
            self.leave(f"lost {self.names[0]}: {why}")

    def _take_in(self, message):
        if "end" in message:
            self.leave(message["end"], message["status"])
        with self.changed:
            self.state |= message
            self.changed.notify_all()

    def _reach(self, barrier):
        sockets.send(self.links[0], at=barrier)

    def _fail(self, line, status):
        self.changed.acquire()  # first, because rank 0 answers that all ranks must end
        for connection in self.links.values():  # none if it has not reached rank 0
            sockets.send(connection, failed=line, status=status)
        self.leave(line, status, failed=True)
