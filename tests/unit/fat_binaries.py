"""Small shared libraries with GPU code, as prune_fatbin.py reads them: valid as ELF files, but not loadable."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_KINDS = {"ptx": 1, "code": 2}


@dataclass(frozen=True)
class Container:
    """Images of one fat binary by architecture, and zeros after its last one."""

    code: Mapping[int, bytes]
    ptx: Mapping[int, bytes] = field(default_factory=dict)
    padding: int = 0

    def runs_on(self, architecture: int) -> bool:
        """Return whether it has code for a GPU, or code from which the driver compiles some."""
        return architecture in self.code or any(its <= architecture for its in self.ptx)

    def only(self, architecture: int) -> "Container":
        """Return it with zeros in place of what a GPU of an architecture does not use."""
        has_own = architecture in self.code or architecture in self.ptx

        def left(images: Mapping[int, bytes], is_ptx: bool) -> dict[int, bytes]:
            kept = {a for a in images if a == architecture or (is_ptx and not has_own and a < architecture)}
            return {a: image if a in kept else bytes(len(image)) for a, image in images.items()}

        return Container(left(self.code, is_ptx=False), left(self.ptx, is_ptx=True), self.padding)

    def written(self) -> bytes:
        entries = b"".join(
            struct.pack("<HHIQ12xI8x", _KINDS[kind], 0, 40, len(image), architecture) + image
            for kind in _KINDS
            for architecture, image in getattr(self, kind).items()
        )
        entries += bytes(self.padding)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def cuda_library(containers: Sequence[Container] | None, sections: Mapping[str, bytes] | None = None) -> bytes:
    """Return an ELF file with these sections, and .nv_fatbin unless there are no containers (None)."""
    parts = dict(sections or {})
    if containers is not None:
        parts[".nv_fatbin"] = b"".join(bytes(8) + container.written() for container in containers)
    names = "\0".join(["", *parts, ".shstrtab", ".bss"]) + "\0"
    parts[".shstrtab"] = names.encode()
    start, body, heads = 64, b"", bytes(64)
    for name, content in parts.items():
        heads += _head(names.index(f"\0{name}\0") + 1, 1, start + len(body), len(content))
        body += content
    heads += _head(names.index("\0.bss\0") + 1, 8, start + len(body), 1 << 40)  # has no bytes in the file
    num = len(parts) + 2  # with an empty first one and .bss
    rest = (3, 62, 1, 0, 0, start + len(body), 0, 64, 0, 0, 64, num, num - 2)
    elf = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", *rest)
    return elf + body + heads


def _head(name: int, kind: int, start: int, size: int) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, start, size, 0, 0, 1, 0)
