"""Which kernels moved the weights of a format, and how fast: from toy traces, and from the real ones of the committed records."""

from types import SimpleNamespace

import pandas as pd
import pytest

from inference_wall import arms, part_5, quantization, quantized_kernels, records
from inference_wall.trace_families import family, short

MACHETE = ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>, machete::MacheteCollectiveMma<"
           "cute::tuple<cutlass::integer_subbyte<4, false> > > > >(cutlass::gemm::kernel::Params)")
MATRIX = "matrix multiplication"


@pytest.mark.parametrize(("name", "said"), [
    (MACHETE, "machete::MacheteCollectiveMma (in cutlass::device_kernel)"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int>(int)", "cublasLt::splitKreduce_kernel"),
    ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<int> >(int)", "at::native::elementwise_kernel"),
    ("void cutlass::device_kernel<cutlass::Params>(int)", "cutlass::device_kernel"),
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"),
    ("aten::linear", "aten::linear"),
])
def test_a_short_name_says_what_the_kernel_is_and_not_its_types(name, said):
    assert short(name) == said


def test_a_fused_kernel_that_feeds_a_product_is_no_product():
    assert family("triton_red_fused__to_copy_add_fused_add_rms_norm_machete_mm_3") == "normalisation and activation"
    assert family("triton_poi_fused_mm_0") != MATRIX and family("triton_tem_fused_mm_0") == MATRIX and family(MACHETE) == MATRIX


@pytest.fixture
def toy(monkeypatch):
    """Two steps of one sequence a trace. `base` moves 40 GB in 10 ms a step, `few` 20 GB in 5 ms and 5 GB in 2.5 ms."""
    steps = pd.DataFrame({"step": [0, 1, 2], "context_tokens": [0, 0, 9], "generation_requests": [1, 1, 1]})
    kernels = {"base": [("nvjet_a", MATRIX, 4, 20.0), ("attention", "attention", 2, 1.0)],
               "few": [("nvjet_a", MATRIX, 4, 10.0), (MACHETE, MATRIX, 8, 5.0)], "blind": [("nvjet_a", MATRIX, 4, 10.0)]}
    monkeypatch.setattr(quantized_kernels, "opened", lambda path: SimpleNamespace(on_device=path != "cpu"))
    monkeypatch.setattr(quantized_kernels.trace, "steps", lambda path: steps)
    monkeypatch.setattr(quantized_kernels.trace, "operators", lambda path, wanted=None: pd.DataFrame(
        kernels[path], columns=["name", "family", "calls", "self_ms"]).assign(share=0.1))

    def row(arm, role, streamed, formats, one):
        return {"arm": arm, "role": role, "streamed_gb": streamed, "formats": formats, "bandwidth_gb_s": 5_000.0, "one_ms": one}

    wide, packed = {"16-bit": {"bytes": 40e9}}, {"16-bit": {"bytes": 21e9}, "int4": {"bytes": 4e9}, "scales": {"bytes": 1e9}}
    return pd.DataFrame([row("base", "base", 40.0, wide, 12.0), row("few", "same", 25.0, packed, 9.0)]), packed, row


def test_bytes_of_each_format_over_the_time_of_its_kernels(toy):
    rows, _, _ = toy
    found = quantized_kernels.speeds(rows, {"base": "base", "few": "few"}).set_index(["arm", "format"])
    assert found["gb_s"].to_dict() == {("base", "16-bit"): 4_000.0, ("few", "16-bit"): 4_000.0, ("few", "fewer bits, with scales"): 2_000.0}
    assert found["percent"].tolist() == [80.0, 80.0, 40.0] and found["calls"].tolist() == [2.0, 2.0, 4.0]
    text = quantized_kernels.sentence(found.reset_index(), rows)
    # 2.5 ms for 5 GB would have been 1.25 ms: 9 - 1.25 of 12 ms.
    assert "0.50 times that speed" in text and "1.25 ms shorter" in text and "0.65 times as long as the unquantized one instead of 0.75" in text
    assert quantized_kernels.table(found.reset_index()).count("<tr>") == 4


def test_what_was_not_seen_has_no_speed(toy):
    rows, packed, row = toy
    traces = {"base": "base", "few": "few"}
    for broken in ({**traces, "few": None}, {**traces, "few": "cpu"}, {**traces, "few": "blind"}):  # no trace; a processor's; no such kernel in it
        found = quantized_kernels.speeds(rows, broken)
        assert found["arm"].tolist() == ["base"] and quantized_kernels.sentence(found, rows) == ""
    unknown = pd.DataFrame([row("few", "same", None, packed, 9.0)])
    assert quantized_kernels.table(quantized_kernels.speeds(unknown, traces)) == "" == quantized_kernels.sentence(
        quantized_kernels.speeds(unknown, traces), unknown)


@pytest.mark.parametrize("rig", sorted({path.parent.name for path in records.record_folders("part_5", committed_only=True)}))
def test_the_bytes_of_all_kinds_are_the_streamed_ones_in_every_record(rig):
    measured = arms.newest("part_5", rig, committed_only=True)
    rows = part_5.look(measured).rows
    found = quantized_kernels.speeds(rows, quantization.traced(measured))
    for arm, part in found.groupby("arm"):
        assert part["gb"].sum() == pytest.approx(rows.set_index("arm").loc[arm, "streamed_gb"])
        assert part["percent"].between(1, 110).all()  # no kernel is faster than the memory
    assert (rig == "cpu") == found.empty
