"""What each kernel of a compiled module takes, read from the machine code's own ELF file.

The compiler's log says the same, but only if the compiler really ran: NVRTC keeps a cache, and an
answer from there has no log. The file always holds the numbers, because the driver needs them.

A cubin is an ELF64 file. Kernels are the functions marked as entries in its symbol table; the
section `.nv.info` is a list of attributes, some of which belong to a symbol; static shared
memory is the size of `.nv.shared.<kernel>`. NVIDIA documents the attributes by name only, in the
listings of its disassembler; tests compare what is read here with the assembler's own report.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

_MAGIC: Final = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE: Final = 2  # section type
_FUNCTION: Final = 2  # a symbol's type, the low half of `info`
_KERNEL: Final = 0x10  # flag in a symbol's `other`

_SIZED: Final = 4  # format of an attribute: a payload follows; else its value is in the header
_FRAME_SIZE, _STACK_SIZE, _REGISTERS = 0x11, 0x12, 0x2F
_RESERVED_SHARED: Final = ".nv.shared.reserved.0"
_RESERVED_BYTES: Final = 1024


class NotACubin(ValueError):
    """The bytes are no cubin that this module can read; the message says why."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes.

    registers: per thread. stack_bytes: local memory per thread, called functions included;
    registers that did not fit are spilled there; 2^32 - 1 if recursion leaves it open.
    shared_bytes: static shared memory per block, without what the driver keeps for itself.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int


class _Section(NamedTuple):
    name: str
    kind: int
    size: int
    link: int
    content: bytes


def kernel_usage(cubin: bytes) -> dict[str, Usage]:
    """Return what every kernel of `cubin` takes, by name; NotACubin if it cannot be told."""
    try:
        return _kernel_usage(cubin)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise NotACubin(f"the machine code is cut off or damaged: {error}") from error


def _kernel_usage(cubin: bytes) -> dict[str, Usage]:
    sections = _sections(cubin)
    sizes = {section.name: section.size for section in sections}
    found = {}
    attributes = _attributes(sections)
    for index, name in _kernels(sections):
        registers = attributes.get((_REGISTERS, index))
        own_frame = attributes.get((_FRAME_SIZE, index))
        if registers is None or own_frame is None:
            raise NotACubin(f"the machine code states no registers or stack frame for {name}")
        shared = sizes.get(f".nv.shared.{name}", 0)
        if shared and _RESERVED_SHARED in sizes:
            shared -= _RESERVED_BYTES
        stack = max(own_frame, attributes.get((_STACK_SIZE, index), 0))
        found[name] = Usage(registers, stack, shared)
    return found


def _sections(cubin: bytes) -> list[_Section]:
    if not cubin.startswith(_MAGIC):
        raise NotACubin("the machine code is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION.unpack_from(cubin, table + i * entry_bytes) for i in range(count)]

    def content(header: tuple[int, ...]) -> bytes:
        return cubin[header[4] : header[4] + header[5]]

    names = content(headers[names_index])
    return [_Section(_name(names, h[0]), h[1], h[5], h[6], content(h)) for h in headers]


def _kernels(sections: list[_Section]) -> Iterator[tuple[int, str]]:
    """Index in the symbol table, and name, of every kernel."""
    for section in sections:
        if section.kind != _SYMBOL_TABLE:
            continue
        names = sections[section.link].content
        for index, symbol in enumerate(_SYMBOL.iter_unpack(section.content)):
            name, info, other = symbol[:3]
            if info & 0xF == _FUNCTION and other & _KERNEL:
                yield index, _name(names, name)


def _attributes(sections: list[_Section]) -> dict[tuple[int, int], int]:
    """Value of every attribute of a symbol in `.nv.info`, by attribute and symbol."""
    found = {}
    for section in sections:
        if section.name != ".nv.info":
            continue
        at = 0
        while at < len(section.content):
            form, attribute, size = struct.unpack_from("<BBH", section.content, at)
            at += 4
            if form == _SIZED:
                if size == 8:
                    symbol, value = struct.unpack_from("<II", section.content, at)
                    found[attribute, symbol] = value
                at += size
    return found


def _name(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
