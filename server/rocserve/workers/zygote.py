"""The zygote: a small process that imports the CPU engines when models need them, and forks workers from itself.

It is started by exec before the server imports grpc, has one thread and none of the server's state. So forking it is
safe, and takes milliseconds, while importing an engine takes seconds. Unless the server expects models, it imports
nothing before the first launch. Workers that must not be forked are started by exec. The zygote answers Spawn messages
in their order, and reports Exited for every worker, one message per datagram. Spawned comes with descriptors: the
server's ends of the worker's reception and output pipe. The zygote ends with the server.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Sequence

from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.workers.preload import Preload, importing


def main(arguments: Sequence[str]) -> int:
    """Serve until the connection is closed. Arguments: connection, server's pipe, the modules to import at once."""
    connection, parent_pipe, *preload = arguments
    # These signals may go to the whole process group, but the zygote ends with its connection.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept = exit_with_parent(int(parent_pipe))
    if not preload:
        # The first launch, or the server's end. A server without models needs none of the imports.
        select.select([int(connection)], [], [])
    with importing():
        # It imports numpy, which reads the number of threads then.
        from rocserve.workers.spawner import Spawner
    modules = Preload()
    modules.load(preload)
    Spawner(socket.socket(fileno=int(connection)), int(parent_pipe), kept, modules).run()
    return 0
