"""The kernels compile for sm_90 and sm_100 without a GPU, spill no registers, and copy rows 128 bits at a time."""

import os

import pytest

from benchmarks import compile_report

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter never compiles: run without TRITON_INTERPRET"
)
on_each = pytest.mark.parametrize("arch", compile_report.ARCHITECTURES, ids=lambda arch: f"sm_{arch}")


@on_each
@pytest.mark.parametrize("static", [True, False], ids=["static", "ragged"])
@pytest.mark.parametrize(("num_groups", "num_aux", "dtype", "idx_dtype"), compile_report.PREPARE_SHAPES, ids=str)
def test_prepare_inputs(arch, static, num_groups, num_aux, dtype, idx_dtype):
    assembled = compile_report.prepare_inputs(arch, static, num_groups, num_aux, dtype, idx_dtype, compile_report.WIDTH)
    assert assembled.spill_bytes == 0
    # Whole rows only: the widest accesses copy, and none is narrower than an int32.
    assert ("128" in assembled.stores) == ("128" in assembled.loads) == (num_aux > 0)
    assert not {"8", "16"} & {*assembled.loads, *assembled.stores}


@on_each
@pytest.mark.parametrize("width", compile_report.WIDTHS.values(), ids=compile_report.WIDTHS)
@pytest.mark.parametrize("dtype", compile_report.DTYPES, ids=str)
def test_gather_hidden(arch, dtype, width):
    assembled = compile_report.gather_hidden(arch, dtype, width)
    assert assembled.spill_bytes == 0
    if width % 8 == 0:
        assert set(assembled.stores) == {"128"}
        assert assembled.loads.pop("32") == 1  # the row map
        assert set(assembled.loads) == {"128"}


@on_each
@pytest.mark.parametrize("static", [True, False], ids=["static", "ragged"])
def test_staging_of_a_width_that_only_8_divides(arch, static):
    shape = compile_report.PREPARE_SHAPES[1]
    assembled = compile_report.prepare_inputs(arch, static, *shape, compile_report.WIDTHS["multiple of 8"])
    assert "128" in assembled.stores
    assert not {"8", "16"} & {*assembled.loads, *assembled.stores}


@on_each
@pytest.mark.parametrize("shape", compile_report.WALK_SHAPES, ids=str)
def test_walk_edges(arch, shape):
    assembled = compile_report.walk_edges(arch, *shape)
    assert assembled.spill_bytes == 0
    assert "128" in assembled.loads  # rows of the tables


def test_widths_are_read_from_the_machine_code():
    sass = """
    /*0010*/ LDG.E R3, desc[UR4][R2.64] ;
    /*0020*/ @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
    /*0030*/ LDG.E.U16 R4, desc[UR4][R2.64] ;
    /*0040*/ STG.E.EF.64 desc[UR4][R2.64], R4 ;
    /*0050*/ LDGSTS.E.128 [R1], desc[UR4][R2.64] ;
    """
    assert compile_report.access_widths(sass) == ({"128": 1, "32": 1, "16": 1}, {"64": 1})
