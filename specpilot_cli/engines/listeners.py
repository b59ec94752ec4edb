"""Who listens on a port: a stranger that answers first would be measured as if it were ours.

Linux tells it through `/proc`; elsewhere nothing is known, and nothing is claimed.
"""

from __future__ import annotations

import os
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"
_ADDRESS, _STATE, _INODE = 1, 3, 9


def listens(port: int, session: int) -> bool | None:
    """Whether a process of `session` listens on TCP `port`; None where the system does not tell.

    A socket is inherited, so any process of the session may hold it.
    """
    inodes = _listening_inodes(port)
    if inodes is None:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return any(wanted & _open_files(pid) for pid in _session_members(session))


def _listening_inodes(port: int) -> set[str] | None:
    found, readable = set(), False
    for table in _TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        readable = True
        for line in lines:
            cells = line.split()
            if cells[_STATE] == _LISTEN and int(cells[_ADDRESS].rpartition(":")[2], 16) == port:
                found.add(cells[_INODE])
    return found if readable else None


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) == session:
                members.append(int(entry.name))
        except (ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or not ours to ask about
    return members


def _open_files(pid: int) -> set[str]:
    names = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                names.add(str(link.readlink()))
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return set()
    return names
