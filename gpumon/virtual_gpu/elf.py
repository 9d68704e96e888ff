"""Imports, exports and dependencies of a shared library, from its ELF dynamic section (64-bit little endian)."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_DT_NEEDED = 1


@dataclass(frozen=True)
class Library:
    """The dynamic symbols of one library, without versions (``foo@GLIBC_2.2``)."""

    needed: frozenset[str]
    imports: frozenset[str]
    exports: frozenset[str]


def read(path: Path) -> Library:
    """Read one library. Raises ValueError if it is not a 64-bit little-endian ELF file, OSError if unreadable.

    The file is mapped, since libtorch_cuda is too large to read for its names.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        sections = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
        needed: set[str] = set()
        imports: set[str] = set()
        exports: set[str] = set()
        for _, kind, _, _, offset, length, link, _, _, _ in sections:
            if kind not in (_SHT_DYNAMIC, _SHT_DYNSYM):
                continue
            strings = sections[link][4]
            if kind == _SHT_DYNAMIC:
                for tag, value in _DYNAMIC.iter_unpack(data[offset : offset + length]):
                    if tag == _DT_NEEDED:
                        needed.add(_string(data, strings + value))
            else:
                for name, _, _, section, _, _ in _SYMBOL.iter_unpack(data[offset : offset + length]):
                    # Only C names matter, and nearly all of torch's exports start with _Z (C++): skip them unread.
                    if name and data[strings + name : strings + name + 2] != b"_Z":
                        (exports if section else imports).add(_string(data, strings + name))
        return Library(frozenset(needed), frozenset(imports), frozenset(exports))


def _string(data: mmap.mmap, start: int) -> str:
    return data[start : data.find(b"\0", start)].decode()
