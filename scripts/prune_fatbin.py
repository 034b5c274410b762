"""Clear the GPU code of all architectures but one in a shared library, so that it compresses to a fraction.

Example: prune(Path("libnccl.so.2"), 90, cleared=("__nv_relfatbin", ".debug"))

The file keeps its size and every offset: headers stay, and the driver finds the images that are left. On other GPUs,
the library has no code.

A CUDA library has its GPU code in the ELF section .nv_fatbin: containers, each with images ("entries") for
several architectures. Little-endian, offsets in bytes, read off libraries of CUDA 13:

    container   0: magic 0xBA55ED50 (u32)   4: version (u16)   6: header size (u16)   8: size of all entries (u64)
    entry       0: kind, 1 PTX, 2 machine code (u16)   4: header size (u32)   8: size of the image (u64)
                28: architecture, such as 90 (u32)

The section __nv_relfatbin has code that only a linker reads, and .debug* only a debugger.
"""

import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SECTION = b".nv_fatbin"
_MAGIC = struct.pack("<I", 0xBA55ED50)
_ELF64 = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_NOBITS = 8  # type of a section without bytes in the file
_PTX = 1  # kind of an image


class Image(NamedTuple):
    """Code for one architecture, from byte `start` of the file to byte `stop`, exclusive."""

    architecture: int
    is_ptx: bool
    start: int
    stop: int


def prune(library: Path, architecture: int, cleared: Sequence[str] = ()) -> dict[int, int]:
    """Clear other architectures' images in place, and the sections whose names begin with one of `cleared`.

    Returns:
        bytes of images that the library had, by architecture, for example {80: 1000, 90: 2000}

    Raises:
        ValueError: the file is another one, is damaged, or has nothing for this architecture. It is unchanged then.
    """
    with _opened(library, "r+b") as content:
        found = list(sections(content, library))
        bounds = [(start, start + size) for name, start, size in found if name == SECTION]
        if not bounds:
            raise ValueError(f"{library} has no section {SECTION.decode()}: it is not a CUDA library")
        containers = [images for start, end in bounds for images in containers_in(content, start, end, library)]
        images = {image for container in containers for image in container}
        kept = {image for container in containers for image in kept_of(container, architecture)}
        if not kept:
            has = ", ".join(f"sm_{its}" for its in sorted({i.architecture for i in images}))
            raise ValueError(f"{library} has code for {has or 'nothing'}, not for sm_{architecture}")
        others = [(image.start, image.stop) for image in images - kept]
        prefixes = tuple(name.encode() for name in cleared)
        others += [(start, start + size) for name, start, size in found if prefixes and name.startswith(prefixes)]
        for start, stop in others:
            content[start:stop] = bytes(stop - start)
    sizes = Counter[int]()
    for image in images:
        sizes[image.architecture] += image.stop - image.start
    return dict(sizes)


def kept_of(container: Sequence[Image], architecture: int) -> list[Image]:
    """Return the images that a GPU of this architecture can use: its own, or else what the driver compiles for it."""
    own = [image for image in container if image.architecture == architecture]
    return own or [image for image in container if image.is_ptx and image.architecture < architecture]


def has_gpu_code(library: Path) -> bool:
    """Tell a CUDA library from any other shared library."""
    with _opened(library, "rb") as content:
        return any(name == SECTION for name, _, _ in sections(content, library))


@contextmanager
def _opened(library: Path, mode: str) -> Iterator[mmap.mmap]:
    access = mmap.ACCESS_READ if mode == "rb" else mmap.ACCESS_WRITE
    with library.open(mode) as file:
        if not library.stat().st_size:
            raise ValueError(f"{library} is empty")
        with mmap.mmap(file.fileno(), 0, access=access) as content:
            yield content


def sections(content: mmap.mmap, library: Path) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, first byte and size of each section that has bytes in an ELF file."""
    if content[: len(_ELF64)] != _ELF64:
        raise ValueError(f"{library} is not an ELF file of 64 bits")
    try:
        (table,) = struct.unpack_from("<Q", content, 0x28)
        head_size, num, of_names = struct.unpack_from("<HHH", content, 0x3A)
        heads = [struct.unpack_from("<IIQQQQ", content, table + i * head_size) for i in range(num)]
    except struct.error as error:
        raise ValueError(f"{library} is cut off: {error}") from error
    if table + num * head_size > len(content):
        raise ValueError(f"{library} is cut off: its table of sections ends at byte {table + num * head_size}")
    if of_names >= num:
        raise ValueError(f"{library} has no names of sections")
    names = heads[of_names][4]
    for name, kind, _, _, start, size in heads:
        if kind == _NOBITS:
            continue
        if start + size > len(content):
            raise ValueError(f"{library} is cut off: a section ends at byte {start + size} of {len(content)}")
        yield content[names + name : content.find(b"\0", names + name)], start, size


def containers_in(content: mmap.mmap, start: int, end: int, library: Path) -> Iterator[list[Image]]:
    """Yield the images of each container between two bytes of the file."""
    while (start := content.find(_MAGIC, start, end)) >= 0:
        if start + 16 > end:
            raise ValueError(f"{library} has a damaged container at byte {start}")
        _, _, header, size = struct.unpack_from("<IHHQ", content, start)
        entry, stop = start + header, start + header + size
        if header < 16 or stop > end:
            raise ValueError(f"{library} has a damaged container at byte {start}")
        images = []
        while entry + 32 <= stop:
            kind, _, entry_header, image_size = struct.unpack_from("<HHIQ", content, entry)
            if entry_header == 0:  # padding
                break
            first = entry + entry_header
            if entry_header < 32 or first + image_size > stop:
                raise ValueError(f"{library} has a damaged image at byte {entry}")
            (architecture,) = struct.unpack_from("<I", content, entry + 28)
            images.append(Image(architecture, kind == _PTX, first, first + image_size))
            entry = first + image_size
        yield images
        start = stop
