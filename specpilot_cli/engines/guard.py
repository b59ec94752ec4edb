"""Runs one server and makes sure it never outlives the process that asked for it.

Started by `process.py` as a plain script: `python -I guard.py FD -- COMMAND...`. FD is the read
end of a pipe whose write end only the parent holds, so it reads end-of-file the moment the parent
is gone, however it died. The guard then ends the whole process group, and should the guard itself
be killed, the kernel kills the server (PR_SET_PDEATHSIG). The kernel's signal alone would not do:
it follows the *thread* that forked, and it does not reach a server's own children.

Standard library only, and nothing of this package: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_S = 0.1
GRACE_S = 3.0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere no effect)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the pipe closes; returns the command's exit status."""
    pipe, command = int(arguments[0]), arguments[2:]
    os.set_inheritable(pipe, False)
    # the group gets the signal too: the guard stays to report how the server ended
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = os.getpid()

    def in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent()
        if os.getppid() != guard:  # the guard died between fork and the line above
            os._exit(1)

    environment = {**os.environ, "SPECPILOT_PARENT_PID": str(guard)}
    try:
        server = subprocess.Popen(command, preexec_fn=in_child, env=environment)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        return 127
    while server.poll() is None:
        if select.select([pipe], [], [], POLL_S)[0]:
            _end(server)
            break
    status = server.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGTERM)  # whatever the server left running
    return status if status >= 0 else 128 - status


def _end(server: subprocess.Popen[bytes]) -> None:
    """Terminate the process group politely, then without asking; the guard dies with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 4)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
