"""What a compiled kernel does to memory: readers of Triton's IR, PTX, SASS and AMD assembly.

Text in, facts out; nothing here compiles or runs anything, so a reader can be tested on a line.

Which accesses are bulk is known only in Triton's IR, where a load of a tile is a load of a tensor
and a load of a block id is not. What is in the machine code is known only there. The two are joined
by source location (file, line, column), which AMD's assembly keeps for every instruction. NVIDIA's
does not: a load is one block of inline assembly, whose lines are counted on from the call's, and
the disassembler prints the last of them. PTX marks where each such block begins, so locations are
read from PTX and the widths found there are then counted again in SASS (`reconcile`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Direction = Literal["load", "store"]
Location = tuple[str, int, int]  # file name without its folder, line, column
Widths = Counter[tuple[Direction, int]]  # (direction, bytes per thread) -> instructions

_IR_ACCESS = re.compile(
    r"(?P<load>tt\.load|async_copy_global_to_local|buffer_load(?:_to_local)?)\b"
    r"|(?P<store>tt\.store|buffer_store)\b"
)
_IR_TENSOR = re.compile(r"tensor<(?P<shape>(?:\d+x)+)(?:!tt\.ptr<)?(?P<kind>[a-z]+)(?P<bits>\d+)")
_IR_USE = re.compile(r"loc\((?P<alias>#loc\d*)\)\s*$")
_IR_ALIAS = re.compile(r"^(?P<alias>#loc\d*) = loc\((?P<body>.*)\)\s*$", re.M)
_IR_PLACE = re.compile(r'^"(?P<path>[^"]*)":(?P<line>\d+):(?P<column>\d+)')
_LOC = re.compile(r"^\s*\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)\s+(?P<column>\d+)")
_FILE = re.compile(
    r'^\s*\.file\s+(?P<number>\d+)\s+"(?P<path>[^"]*)"(?:\s+"(?P<name>[^"]*)")?', re.M
)
_PTX_ACCESS = re.compile(
    r"\b(?P<op>ld|st)\.(?:\w+\.)*?global(?P<suffix>[\w.:]*?)"
    r"(?:\.v(?P<lanes>\d))?\.(?P<kind>[bsuf])(?P<bits>\d+)\s"
)
_PTX_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global.*?,\s*\[[^]]*\],\s*(?P<bytes>\w+)")
_SASS_ACCESS = re.compile(r"\b(?P<op>LDGSTS|LDG|STG)(?P<suffix>(?:\.\w+)*)\s")
_AMD_ACCESS = re.compile(
    r"^\s*(?:global|buffer|flat)_(?P<op>load|store)_(?:lds_)?"
    r"(?P<kind>dwordx(?P<words>\d)|dword|b(?P<bits>\d+)|[us]?short|[us]?byte|d16)\w*\s"
)
_WIDTH_SUFFIXES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True, slots=True)
class Access:
    """One global memory instruction: bytes one thread moves, and where the source asks for it."""

    direction: Direction
    width_bytes: int
    location: Location | None


def bulk_locations(ttgir: str) -> dict[Location, Direction]:
    """Where Triton GPU IR loads or stores a tile.

    A tile is a tensor of at least a quarter of the bytes of the largest one that is loaded or
    stored: the other tensors are lists of ids and sizes, one element a row of a tile.
    """
    aliases = {m["alias"]: m["body"] for m in _IR_ALIAS.finditer(ttgir)}
    accesses: list[tuple[int, Direction, Location]] = []
    for line in ttgir.splitlines():
        access, tensor, use = _IR_ACCESS.search(line), _IR_TENSOR.search(line), _IR_USE.search(line)
        if access is None or tensor is None or use is None:
            continue
        num_elements = math.prod(int(extent) for extent in tensor["shape"].split("x")[:-1])
        location = _resolve(use["alias"], aliases)
        if location is not None:
            num_bytes = num_elements * int(tensor["bits"]) // 8
            accesses.append((num_bytes, "load" if access["load"] else "store", location))
    largest_bytes = max((num_bytes for num_bytes, _, _ in accesses), default=0)
    return {place: way for num_bytes, way, place in accesses if num_bytes * 4 >= largest_bytes}


def _resolve(body: str, aliases: Mapping[str, str]) -> Location | None:
    """The innermost source place of an IR location: a name's child, an inlined call's callee."""
    place = _IR_PLACE.match(body)
    if place is not None:
        return place["path"].rsplit("/", 1)[-1], int(place["line"]), int(place["column"])
    inner = re.search(r"#loc\d*", body)
    if inner is None:
        return None
    return _resolve(aliases[inner[0]], aliases) if inner[0] in aliases else None


def ptx_accesses(ptx: str) -> list[Access]:
    """Every global load, store and asynchronous copy in PTX."""
    files = _files(ptx)
    accesses: list[Access] = []
    location: Location | None = None
    in_block = frozen = False
    for line in ptx.splitlines():
        if "// begin inline asm" in line:
            in_block, frozen = True, False
        elif "// end inline asm" in line:
            in_block = False
        loc = _LOC.match(line)
        if loc is not None:
            if not (in_block and frozen):
                location = _location(loc, files)
            frozen = in_block
            continue
        plain = _PTX_ACCESS.search(line)
        if plain is not None:
            width_bytes = int(plain["lanes"] or 1) * int(plain["bits"]) // 8
            direction: Direction = "load" if plain["op"] == "ld" else "store"
            accesses.append(Access(direction, width_bytes, location))
            continue
        copy = _PTX_ASYNC.search(line)
        if copy is not None:
            accesses.append(Access("load", int(copy["bytes"], 0), location))
    return accesses


def amd_accesses(assembly: str) -> list[Access]:
    """Every vector load and store in AMD assembly (scalar ones go through another cache)."""
    files = _files(assembly)
    accesses: list[Access] = []
    location: Location | None = None
    for line in assembly.splitlines():
        loc = _LOC.match(line)
        if loc is not None:
            location = _location(loc, files)
            continue
        access = _AMD_ACCESS.match(line)
        if access is not None:
            direction: Direction = "load" if access["op"] == "load" else "store"
            accesses.append(Access(direction, _amd_width(access), location))
    return accesses


def sass_widths(sass: str) -> Widths:
    """Global loads, asynchronous copies (as loads) and stores in SASS, counted by width."""
    widths: Widths = Counter()
    for match in _SASS_ACCESS.finditer(sass):
        direction: Direction = "store" if match["op"] == "STG" else "load"
        named = [_WIDTH_SUFFIXES[s] for s in match["suffix"].split(".") if s in _WIDTH_SUFFIXES]
        widths[direction, named[0] if named else 4] += 1
    return widths


def sass_spills(sass: str) -> int:
    """Instructions that store to or load from local memory, where spilled registers go."""
    return len(re.findall(r"\b(?:STL|LDL)(?:\.\w+)*\s", sass))


def split_bulk(
    accesses: Iterable[Access], bulk: Mapping[Location, Direction]
) -> tuple[Widths, Widths]:
    """(widths of the bulk accesses, widths of the others).

    An access that the compiler left without a place (line 0, after merging two) counts as bulk, so
    that nothing escapes the check by losing its location.
    """
    wide, rest = Counter[tuple[Direction, int]](), Counter[tuple[Direction, int]]()
    for access in accesses:
        known = access.location is not None and access.location[1] > 0
        target = rest if known and access.location not in bulk else wide
        target[access.direction, access.width_bytes] += 1
    return wide, rest


def reconcile(bulk: Widths, rest: Widths, sass: Widths) -> list[str]:
    """What in SASS contradicts the widths read from PTX; empty when the assembler kept them.

    The assembler may unroll a loop, which multiplies all counts alike. It must not hold fewer bulk
    accesses of any width than PTX, nor narrow ones that unrolling does not explain.
    """
    problems = []
    for direction in ("load", "store"):
        total_bulk = sum(n for (d, _), n in bulk.items() if d == direction)
        if total_bulk == 0:
            continue
        widest = max(w for d, w in bulk if d == direction)
        asked, kept = bulk[direction, widest], sass[direction, widest]
        if kept < asked:
            problems.append(f"SASS has {kept} of PTX's {asked} {direction}s of {widest} bytes")
            continue
        narrow = sum(n for (d, w), n in sass.items() if d == direction and w < widest)
        allowed = sum(
            n for c in (bulk, rest) for (d, w), n in c.items() if d == direction and w < widest
        )
        if narrow > allowed * -(-kept // asked):
            problems.append(
                f"SASS has {narrow} {direction}s under {widest} bytes where PTX has {allowed}"
            )
    return problems


def resource_usage(report: str) -> dict[str, int]:
    """Registers, stack, static shared and local bytes of one function in a `-res-usage` report."""
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", report)}


def amd_resources(assembly: str) -> dict[str, int]:
    """Registers, spills and scratch bytes from the metadata at the end of AMD assembly."""
    pattern = r"\.((?:vgpr|sgpr)(?:_spill)?_count|private_segment_fixed_size):\s+(\d+)"
    return {name: int(value) for name, value in re.findall(pattern, assembly)}


def _files(text: str) -> dict[str, str]:
    return {m["number"]: (m["name"] or m["path"]).rsplit("/", 1)[-1] for m in _FILE.finditer(text)}


def _location(loc: re.Match[str], files: Mapping[str, str]) -> Location:
    return files.get(loc["file"], loc["file"]), int(loc["line"]), int(loc["column"])


def _amd_width(access: re.Match[str]) -> int:
    if access["words"]:
        return 4 * int(access["words"])
    if access["bits"]:
        return int(access["bits"]) // 8
    if access["kind"] == "dword":
        return 4
    return 1 if "byte" in access["kind"] else 2
