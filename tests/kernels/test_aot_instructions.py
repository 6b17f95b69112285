"""The readers of machine code, each on the few lines that it is about."""

from collections import Counter

import pytest
from kvferry.kernels.instructions import (
    Access,
    amd_accesses,
    amd_resources,
    bulk_locations,
    ptx_accesses,
    reconcile,
    resource_usage,
    sass_spills,
    sass_widths,
    split_bulk,
)

TTGIR = """
#loc1 = loc("/some/where/pages.py":10:5)
#loc2 = loc("/some/where/pages.py":20:9)
#loc3 = loc("/some/where/copy.py":30:3)
#loc4 = loc("tile"(#loc1))
#loc5 = loc(callsite(#loc4 at #loc3))
  %a = tt.load %p, %m : tensor<64x32x!tt.ptr<i64>, #blocked> loc(#loc5)
  tt.store %q, %a, %m : tensor<64x32x!tt.ptr<i64>, #blocked> loc(#loc2)
  %b = tt.load %r : tensor<64x!tt.ptr<i64>, #blocked> loc(#loc3)
  %c = tt.load %s : !tt.ptr<i64> loc(#loc3)
"""


def test_only_tiles_are_bulk_and_inlined_calls_count_where_they_were_written() -> None:
    assert bulk_locations(TTGIR) == {
        ("pages.py", 10, 5): "load",
        ("pages.py", 20, 9): "store",
    }


@pytest.mark.parametrize(
    "line",
    [
        "%v = ttg.async_copy_global_to_local %p, %b : tensor<4096x!tt.ptr<i32>, #b> -> <4096xi32>",
        "%v = amdg.buffer_load %p[%o] {contiguity = 4} : !tt.ptr<i32> -> tensor<4096xi32, #b>",
        "%v = amdgpu.buffer_load %p[%o] : tensor<4096xi32, #b>",
    ],
)
def test_every_kind_of_tile_load_is_known(line: str) -> None:
    ir = f'#loc1 = loc("k.py":1:2)\n  {line} loc(#loc1)\n'
    assert bulk_locations(ir) == {("k.py", 1, 2): "load"}


PTX = """
\t.file\t1 "/some/where/pages.py"
\t.loc\t1 10 5, function_name $L__info_string0, inlined_at 1 30 3 // pages.py:10:5
\t// begin inline asm
\t.loc\t1 10 5                          // pages.py:10:5
\tmov.u32 %r1, 0x0;
\t.loc\t1 11 5                          // pages.py:11:5
\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\t// end inline asm
\t.loc\t1 20 9
\t// begin inline asm
\tst.global.L1::no_allocate.v2.b64 [ %rd2 + 0 ], { %rd3, %rd4 };
\t// end inline asm
\t.loc\t1 40 1
\tld.global.u64 %rd5, [ %rd6 ];
\tcp.async.cg.shared.global [ %r7 + 0 ], [ %rd8 + 0 ], 0x10, %r9;
\tld.param.b64 %rd9, [k_param_0];
\tld.shared.b32 %r8, [%r9];
"""


def test_ptx_keeps_the_place_of_the_call_through_inline_assembly() -> None:
    assert ptx_accesses(PTX) == [
        Access("load", 16, ("pages.py", 10, 5)),
        Access("store", 16, ("pages.py", 20, 9)),
        Access("load", 8, ("pages.py", 40, 1)),
        Access("load", 16, ("pages.py", 40, 1)),
    ]


AMD = """
\t.file\t1 "/some/where" "pages.py"
\t.loc\t1 10 5                         ; pages.py:10:5 @[ copy.py:30:3 ]
\tbuffer_load_dwordx4 v[10:13], v4, s[20:23], 0 offen
\tglobal_load_dwordx2 v[2:3], v8, s[0:1]
\tglobal_load_ubyte v2, v8, s[0:1]
\ts_load_dwordx8 s[4:11], s[0:1], 0x8
\t.loc\t1 20 9
\tglobal_store_short v[2:3], v8, off
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 3
    .vgpr_count:     26
    .vgpr_spill_count: 5
"""


def test_amd_assembly() -> None:
    assert amd_accesses(AMD) == [
        Access("load", 16, ("pages.py", 10, 5)),
        Access("load", 8, ("pages.py", 10, 5)),
        Access("load", 1, ("pages.py", 10, 5)),
        Access("store", 2, ("pages.py", 20, 9)),
    ]
    assert amd_resources(AMD) == {
        "private_segment_fixed_size": 12,
        "sgpr_spill_count": 3,
        "vgpr_count": 26,
        "vgpr_spill_count": 5,
    }


SASS = """
        /*01e0*/                   LDG.E.128 R28, desc[UR8][R8.64+0x800] ;
        /*01f0*/              @!P0 LDG.E.64 R32, desc[UR8][R8.64] ;
        /*0200*/                   LDG.E.ENL2.256 R24, R20, desc[UR8][R8.64] ;
        /*0210*/                   LDG.E.U8 R20, desc[UR8][R8.64+0x1800] ;
        /*0220*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR10][R6.64], !P3 ;
        /*0230*/                   LDGSTS.E [R25], desc[UR10][R8.64], !P5 ;
        /*0240*/                   LDGDEPBAR ;
        /*0250*/                   STG.E.128 desc[UR8][R2.64+0x800], R28 ;
        /*0260*/                   STG.E desc[UR8][R2.64], R28 ;
        /*0270*/                   STL [R1+0x4], R12 ;
        /*0280*/                   LDL.64 R26, [R1+0x4] ;
"""


def test_sass() -> None:
    assert sass_widths(SASS) == Counter(
        {
            ("load", 16): 2,
            ("load", 8): 1,
            ("load", 32): 1,
            ("load", 1): 1,
            ("load", 4): 1,
            ("store", 16): 1,
            ("store", 4): 1,
        }
    )
    assert sass_spills(SASS) == 2


def test_resource_usage() -> None:
    report = " Function k:\n  REG:46 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:400 TEXTURE:0\n"
    assert resource_usage(report) == {
        "REG": 46, "STACK": 8, "SHARED": 1024, "LOCAL": 0, "TEXTURE": 0
    }  # fmt: skip


def test_an_access_that_lost_its_place_counts_as_bulk() -> None:
    here, there = ("k.py", 1, 2), ("k.py", 3, 4)
    bulk, rest = split_bulk(
        [
            Access("load", 16, here),
            Access("load", 8, there),
            Access("load", 4, ("k.py", 0, 0)),
            Access("store", 2, None),
        ],
        {here: "load"},
    )
    assert bulk == Counter({("load", 16): 1, ("load", 4): 1, ("store", 2): 1})
    assert rest == Counter({("load", 8): 1})


BULK = Counter({("load", 16): 8, ("store", 16): 8})
REST = Counter({("load", 8): 2})


@pytest.mark.parametrize("unrolled", [1, 2, 4])
def test_an_assembler_that_only_unrolls_is_believed(unrolled: int) -> None:
    sass = Counter({key: count * unrolled for key, count in (BULK + REST).items()})
    assert reconcile(BULK, REST, sass) == []


def test_an_assembler_that_splits_accesses_is_not() -> None:
    split = Counter({("load", 16): 7, ("load", 8): 4, ("store", 16): 8})
    assert reconcile(BULK, REST, split) == ["SASS has 7 of PTX's 8 loads of 16 bytes"]
    added = Counter({("load", 16): 8, ("load", 8): 2, ("store", 16): 8, ("store", 4): 1})
    assert reconcile(BULK, REST, added) == [
        "SASS has 1 stores under 16 bytes where PTX has 0"
    ]  # fmt: skip
