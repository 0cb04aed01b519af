"""Traces: what is a step, where its time went, what an excerpt keeps, and a profiler that may be missing."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
from aiohttp import web

from inference_wall import trace, trace_excerpt, trace_figures, trace_file
from inference_wall.errors import WallError
from inference_wall.site import mime
from inference_wall.trace_families import FAMILIES, NO_OPERATOR, family

FIXTURES = Path(__file__).parent / "fixtures" / "traces"
MIXED = FIXTURES / "mixed_0.32.0_cpu.json.gz"  # 4 requests decode, a fifth brings 1,500 prompt tokens
DECODE = FIXTURES / "decode_0.32.0_cpu.json.gz"


def event(name, ts, dur, cat="cpu_op", pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step(ts, dur, context=(0, 0), generation=(4, 4), cat="user_annotation", **where):
    return event(f"execute_context_{context[0]}({context[1]})_generation_{generation[0]}({generation[1]})", ts, dur, cat, **where)


def write(folder, events, name="raw.pt.trace.json.gz", **more):
    path = folder / name
    document = {"schemaVersion": 1, "host_name": "host", "traceName": "/secret/path.json", "vllm_version": "0.32.0", "traceEvents": events, **more}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


@pytest.fixture
def cpu(tmp_path):
    """Three steps of 100, 400 and 100 us; the second reads a prompt. Operators nest on thread 1; thread 9 is not the engine's."""
    return write(tmp_path, [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python /secret/serve.py"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 0, "args": {"name": "engine"}},
        step(1000.0, 100.0),
        event("aten::linear", 1010.0, 50.0), event("_C::onednn_mm", 1015.0, 30.0), event("aten::view", 1050.0, 5.0),
        event("vllm::attn", 1070.0, 20.0), event("aten::foreign", 1000.0, 100.0, tid=9),
        event("_C::greedy_argmax", 1105.0, 3.0),  # after the mark
        step(1110.0, 400.0, context=(1, 64), generation=(4, 4)), event("_C::onednn_mm", 1110.0, 300.0),
        step(1520.0, 100.0, generation=(5, 5)), event("_C::onednn_mm", 1520.0, 80.0),
    ])


@pytest.fixture
def gpu(tmp_path):
    """The host marks both steps before the device is through with the first; a second stream copies the next step's inputs early."""
    return write(tmp_path, [
        step(0.0, 20.0, **{"External id": 7}), event("cudaGraphLaunch", 5.0, 2.0, "cuda_runtime"),
        step(30.0, 20.0, context=(1, 512), **{"External id": 8}), event("cudaGraphLaunch", 35.0, 2.0, "cuda_runtime"),
        step(100.0, 50.0, cat="gpu_user_annotation", pid=0, tid=7, **{"External id": 7}),
        event("void cutlass::gemm_bf16", 100.0, 30.0, "kernel", pid=0, tid=7, grid=[1, 1, 1]),
        event("flash_fwd_splitkv_kernel", 120.0, 20.0, "kernel", pid=0, tid=8),
        event("argmax_kernel", 152.0, 2.0, "kernel", pid=0, tid=7),
        step(110.0, 90.0, context=(1, 512), cat="gpu_user_annotation", pid=0, tid=8, **{"External id": 8}),
        step(160.0, 200.0, context=(1, 512), cat="gpu_user_annotation", pid=0, tid=7, **{"External id": 8}),
        event("void cutlass::gemm_bf16", 160.0, 190.0, "kernel", pid=0, tid=7),
        event("Memcpy HtoD", 340.0, 15.0, "gpu_memcpy", pid=0, tid=8),
    ], deviceProperties=[{"id": 0, "name": "NVIDIA X", "regsPerBlock": 65536}])


# --- steps and operators ----------------------------------------------------------------------------------------------


def test_steps_of_a_cpu_by_hand(cpu):
    frame = trace.steps(cpu)
    assert frame["step"].tolist() == [0, 1, 2]
    assert frame["start_ms"].tolist() == [0.0, 0.11, 0.52]
    assert frame["duration_ms"].tolist() == [0.1, 0.4, 0.1]
    assert frame["context_requests"].tolist() == [0, 1, 0] and frame["context_tokens"].tolist() == [0, 64, 0]
    assert frame["generation_requests"].tolist() == [4, 4, 5] and frame["generation_tokens"].tolist() == [4, 4, 5]
    assert frame["busy_ms"].tolist() == pytest.approx([0.07, 0.3, 0.08])  # 50 + 20: what is nested counts once
    assert frame["busy_share"].tolist() == pytest.approx([0.7, 0.75, 0.8])
    assert pd.isna(frame["gap_before_ms"].iloc[0]) and frame["gap_before_ms"].tolist()[1:] == pytest.approx([0.01, 0.01])


def test_self_time_leaves_out_what_an_operator_calls(cpu):
    frame = trace.operators(cpu, 0).set_index("name")
    assert frame["self_ms"].to_dict() == pytest.approx(
        {"_C::onednn_mm": 0.03, NO_OPERATOR: 0.03, "vllm::attn": 0.02, "aten::linear": 0.015, "aten::view": 0.005})
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame.loc["aten::linear", "calls"] == 1 and pd.isna(frame.loc[NO_OPERATOR, "calls"])


def test_operators_of_all_and_of_some_steps(cpu):
    every = trace.operators(cpu).set_index("name")
    assert every.loc["_C::onednn_mm", "calls"] == 3 and every.loc["_C::onednn_mm", "self_ms"] == pytest.approx(0.41)
    assert "_C::greedy_argmax" not in every.index  # between two steps
    numbers = trace.steps(cpu)["step"].iloc[:2]
    assert trace.operators(cpu, numbers).set_index("name").loc["_C::onednn_mm", "calls"] == 2
    assert trace.operators(cpu, numbers.iloc[1])["name"].tolist() == ["_C::onednn_mm", NO_OPERATOR]
    with pytest.raises(ValueError, match="0 to 2"):
        trace.operators(cpu, 3)


def test_steps_of_a_gpu_are_those_of_its_busiest_stream(gpu):
    frame = trace.steps(gpu)
    assert frame["duration_ms"].tolist() == [0.05, 0.2] and frame["gap_before_ms"].iloc[1] == pytest.approx(0.01)
    # 100-130 and 120-140 overlap; 160-350 and 340-355 too.
    assert frame["busy_ms"].tolist() == pytest.approx([0.04, 0.195])
    kernels = trace.operators(gpu, 0).set_index("name")
    assert kernels.loc["void cutlass::gemm_bf16", "self_ms"] == pytest.approx(0.03)  # kernels do not nest
    assert kernels.loc["flash_fwd_splitkv_kernel", "family"] == "attention" and "cudaGraphLaunch" not in kernels.index


def test_a_gpu_trace_without_marks_on_the_device_is_refused(tmp_path):
    path = write(tmp_path, [step(0.0, 20.0), event("gemm", 100.0, 30.0, "kernel", pid=0, tid=7)])
    with pytest.raises(WallError, match="on the device's time line"):
        trace.steps(path)


def test_detailed_marks_are_read_alike(tmp_path):
    name = "execute_1504_context_1(sq1500sk1500sqsq2250000sqsk2250000)_generation_4(sq4sk400sqsq4sqsk400)"
    frame = trace.steps(write(tmp_path, [event(name, 0.0, 10.0, "user_annotation"), event("aten::mm", 1.0, 2.0)]))
    assert frame[["context_requests", "context_tokens", "generation_requests", "generation_tokens"]].iloc[0].tolist() == [1, 1500, 4, 4]


def test_a_file_that_changed_is_read_again(tmp_path):
    path = write(tmp_path, [step(0.0, 10.0)])
    assert len(trace.steps(path)) == 1
    write(tmp_path, [step(0.0, 10.0), step(20.0, 10.0)])
    assert len(trace.steps(path)) == 2


@pytest.mark.parametrize("name, expected", [
    ("_C::onednn_mm", "matrix multiplication"), ("aten::mm", "matrix multiplication"), ("aten::bmm", "matrix multiplication"),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", "matrix multiplication"), ("nvjet_tst_128x64", "matrix multiplication"),
    ("void marlin::Marlin<__nv_bfloat16, 256>", "matrix multiplication"), ("void gemv2T_kernel_val<int>", "matrix multiplication"),
    ("_C::cpu_attention_with_kv_cache", "attention"), ("flash_fwd_splitkv_kernel", "attention"),
    ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"), ("_C::rotary_embedding", "attention"),
    ("reshape_and_cache_flash_kernel", "KV cache write"), ("vllm::unified_kv_cache_update", "KV cache write"),
    ("_C::cpu_attn_reshape_and_cache", "KV cache write"), ("_C::compute_slot_mapping_kernel_impl", "KV cache write"),
    ("chunk_fwd_kernel_o", "recurrent state"), ("chunk_gated_delta_rule_fwd_kernel_h", "recurrent state"),
    ("recompute_w_u_fwd_kernel", "recurrent state"), ("merge_16x16_to_64x64_inverse_kernel", "recurrent state"),
    ("causal_conv1d_update_kernel", "recurrent state"), ("fused_recurrent_gated_delta_rule_packed_decode", "recurrent state"),
    ("ChunkGatedDeltaRuleFunction", "recurrent state"), ("chunk_scaled_dot_kkt_fwd_kernel", "recurrent state"),
    ("_C::greedy_argmax", "sampling"), ("aten::multinomial", "sampling"),
    ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16>", "normalisation and activation"), ("aten::silu", "normalisation and activation"),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "normalisation and activation"), ("aten::add", "normalisation and activation"),
    ("aten::view", "other"), ("aten::chunk", "other"), ("aten::addcmul_unheard", "other"), ("Memcpy HtoD (Pageable -> Device)", "other"),
    ("Lazy Function Loading", "other"), ("vectorized_elementwise_kernel (fill)", "other"), (NO_OPERATOR, NO_OPERATOR),
])
def test_families(name, expected):
    assert family(name) == expected and expected in (*FAMILIES, NO_OPERATOR)


# --- files that are no trace ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content, said", [
    (b"", "is empty"),
    (gzip.compress(b""), "is empty"),
    (gzip.compress(json.dumps({"traceEvents": [step(0.0, 1.0)] * 999}).encode())[:-20], "broken off"),
    (b"not gzip at all", "broken off"),
    (gzip.compress(b'{"traceEvents": ['), "not a trace"),
    (gzip.compress(b'{"events": []}'), "not a trace"),
    (gzip.compress(b"[1, 2]"), "not a trace"),
    (gzip.compress(json.dumps({"traceEvents": [event("aten::mm", 0.0, 1.0)]}).encode()), "marks no step"),
])
def test_what_is_no_trace_says_so_with_a_remedy(tmp_path, content, said):
    path = tmp_path / "raw.json.gz"
    path.write_bytes(content)
    for ask in (trace.steps, lambda path: trace.excerpt(path, tmp_path / "cut.json.gz")):
        with pytest.raises(WallError, match=said) as caught:
            ask(path)
        assert caught.value.remedy and str(tmp_path) not in str(caught.value)
    assert not (tmp_path / "cut.json.gz").exists()


def test_a_missing_or_too_large_trace(tmp_path, monkeypatch, cpu):
    with pytest.raises(WallError, match="there is no trace absent"):
        trace.steps(tmp_path / "absent.json.gz")
    monkeypatch.setattr(trace_file, "MOST_RAW_BYTES", 100)
    with pytest.raises(WallError, match="shorter stretch"):
        trace.excerpt(cpu, tmp_path / "cut.json.gz")


# --- the excerpt ------------------------------------------------------------------------------------------------------


def test_an_excerpt_answers_as_the_raw_trace_does(cpu, tmp_path):
    cut = tmp_path / "cut.json.gz"
    facts = trace.excerpt(cpu, cut)
    assert facts == {"steps_total": 3, "steps_kept": 3, "events_total": 11, "events_kept": 10, "left_out": None, "bytes": cut.stat().st_size}
    pd.testing.assert_frame_equal(trace.steps(cut), trace.steps(cpu))
    pd.testing.assert_frame_equal(trace.operators(cut), trace.operators(cpu))
    document = json.loads(gzip.decompress(cut.read_bytes()))
    assert "secret" not in json.dumps(document) and "host_name" not in document and document["otherData"]["steps_total"] == 3
    assert {one["name"] for one in document["traceEvents"] if one["ph"] == "M"} == {"thread_name"}
    assert "_C::greedy_argmax" in {one["name"] for one in document["traceEvents"]}  # what follows a step stays with it
    again = tmp_path / "again.json.gz"
    trace.excerpt(cpu, again)
    assert again.read_bytes() == cut.read_bytes()


def test_an_excerpt_of_a_gpu_trace(gpu, tmp_path):
    cut = tmp_path / "cut.json.gz"
    trace.excerpt(gpu, cut)
    pd.testing.assert_frame_equal(trace.steps(cut), trace.steps(gpu))
    pd.testing.assert_frame_equal(trace.operators(cut), trace.operators(gpu))
    assert json.loads(gzip.decompress(cut.read_bytes()))["deviceProperties"] == [{"id": 0, "name": "NVIDIA X"}]
    facts = trace.excerpt(gpu, cut, max_steps=1)
    kept = json.loads(gzip.decompress(cut.read_bytes()))["traceEvents"]
    assert facts["steps_kept"] == 1 and trace.steps(cut)["step"].tolist() == [1]
    # The host's window is that of its own mark: one launch, which came before the device was through with the step before.
    assert [one["name"] for one in kept if one["cat"] == "cuda_runtime"] == ["cudaGraphLaunch"]


@pytest.mark.parametrize("tokens, most, expected", [
    ([0] * 9, 5, (2, 7)),  # no prompt: the middle
    ([0] * 9 + [50, 0], 4, (7, 11)),  # the prompt near the end
    ([0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 900, 0, 0, 0, 0], 6, (8, 14)),  # the longer prompt, after a third
    ([0, 9, 9, 9, 9], 3, (0, 3)),  # with a step that reads none
    ([0, 0], 12, (0, 2)),
    ([0, 0, 7], 1, (2, 3)),
])
def test_which_steps_an_excerpt_keeps(tokens, most, expected):
    said = [(bool(count), count, 4, 4) for count in tokens]
    assert trace_excerpt._choose(said, most) == expected


def test_a_step_that_reads_beside_running_answers_comes_first():
    said = [(1, 900, 0, 0)] + [(0, 0, 4, 4)] * 5 + [(1, 10, 4, 4), (0, 0, 4, 4)]
    first, last = trace_excerpt._choose(said, 3)
    assert first <= 6 < last


def test_short_events_go_only_when_the_size_forces_it(tmp_path):
    names = [f"aten::op{number % 37}" for number in range(3000)]
    raw = write(tmp_path, [step(0.0, 40_000.0)] + [event(name, 10.0 * at, 0.3 if at % 3 else 7.0) for at, name in enumerate(names)])
    whole, cut = tmp_path / "whole.json.gz", tmp_path / "cut.json.gz"
    full = trace.excerpt(raw, whole)
    assert full["left_out"] is None and full["events_kept"] == 3001
    facts = trace.excerpt(raw, cut, max_bytes=full["bytes"] // 2)
    assert facts["left_out"] == "operators shorter than 0.5 us" and facts["events_kept"] == 1001 and facts["bytes"] <= full["bytes"] // 2
    assert json.loads(gzip.decompress(cut.read_bytes()))["otherData"]["left_out"] == facts["left_out"]
    assert trace.steps(cut)["busy_ms"].iloc[0] == pytest.approx(1000 * 7.0e-3 + 2000 * 0.3e-3)  # noted before the cut
    assert trace.operators(cut)["share"].sum() == pytest.approx(1.0)
    assert "operators shorter than 0.5 us" in trace.words(cut) and "leaves out" not in trace.words(whole)
    with pytest.raises(WallError, match="do not fit"):
        trace.excerpt(raw, cut, max_bytes=50)


def test_nested_stays_nested_after_rounding(tmp_path):
    raw = write(tmp_path, [step(5e12 + 0.004, 100.0)] + [event("aten::outer", 5e12 + at + 0.013, 0.556) for at in range(0, 90)]
                + [event("aten::inner", 5e12 + at + 0.314, 0.255) for at in range(0, 90)])
    cut = tmp_path / "cut.json.gz"
    trace.excerpt(raw, cut)
    events = json.loads(gzip.decompress(cut.read_bytes()))["traceEvents"]
    outer = [one for one in events if one["name"] == "aten::outer"]
    inner = [one for one in events if one["name"] == "aten::inner"]
    assert len(inner) == len(outer) == 90
    assert all(round(100 * (b["ts"] + b["dur"])) <= round(100 * (a["ts"] + a["dur"])) for a, b in zip(outer, inner, strict=True))


# --- real traces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MIXED, DECODE])
def test_fixtures_hold_together(path):
    assert path.stat().st_size < 150_000
    text = gzip.decompress(path.read_bytes()).decode()
    assert not re.search(r'"/(tmp|root|home|work)|host_name|traceName', text)
    frame = trace.steps(path)
    assert (frame["busy_share"].between(0.3, 1)).all() and (frame["gap_before_ms"].iloc[1:] > 0).all()
    assert trace.operators(path)["share"].sum() == pytest.approx(1.0, abs=1e-3)


def test_every_layer_of_the_model_is_in_every_step():
    """The model has 30 layers: each calls attention once a step, so steps x layers = calls."""
    for path in (MIXED, DECODE):
        frame = trace.operators(path).set_index("name")
        assert frame.loc["_C::cpu_attention_with_kv_cache", "calls"] == 30 * len(trace.steps(path))


def test_the_long_prompt_in_words():
    text = trace.words(MIXED)
    assert "In this excerpt of 12 steps" in text and "6 steps with 4 running requests took" in text
    assert "the step that also read 1,500 prompt tokens took 4,485 ms" in text
    assert "matrix multiplication" in text and "nan" not in text.lower() and "None" not in text


def test_words_of_other_outcomes(tmp_path, cpu):
    assert "No step read a prompt." in trace.words(DECODE) and "each had 4 running requests" in trace.words(DECODE)
    assert "a step with 4 running requests took 0.100 ms" in trace.words(cpu).replace("a step with 5", "a step with 4")
    reading = write(tmp_path, [step(0.0, 10.0, (1, 1), (0, 0)), step(20.0, 30.0, (2, 40), (0, 0)), step(60.0, 10.0, (1, 8), (1, 1))], "a.json.gz")
    text = trace.words(reading)
    assert "the step that also read 8 prompt tokens took 0.0100 ms" in text
    assert "2 steps that only read prompts took 0.0100 to 0.0300 ms each (41 prompt tokens in all, at most 40 in one step)" in text


def test_kinds_and_families(cpu):
    found = trace.kinds(trace.steps(cpu))
    assert {kind: part["step"].tolist() for kind, part in found.items()} == {trace.DECODE: [0, 2], trace.MIXED: [1]}
    frame = trace.families(cpu).set_index(["kind", "family"])
    assert frame.loc[(trace.DECODE, "matrix multiplication"), "self_ms"] == pytest.approx((0.03 + 0.015 + 0.08) / 2)
    assert frame.loc[(trace.DECODE, "matrix multiplication"), "share"] == pytest.approx(0.125 / 0.2)
    assert frame.loc[(trace.MIXED, "attention"), "self_ms"] == 0.0  # occurs, but not in this kind
    assert "sampling" not in frame.index.get_level_values("family")


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_strip_places_every_step(cpu):
    figure = trace_figures.step_strip(cpu)
    decode, mixed = figure.data
    assert (decode.name, mixed.name) == (trace.DECODE, trace.MIXED)
    assert list(decode.base) == [0.0, 0.52] and list(decode.x) == [0.1, 0.1] and list(mixed.base) == [0.11] and list(mixed.x) == [0.4]
    assert decode.marker.line.color != mixed.marker.line.color
    assert mixed.customdata[0][8] == "read 64 prompt tokens of 1 request<br>4 tokens for 4 running requests"
    assert decode.customdata[0][6] is None and len(mixed.customdata[0]) == len(figure.layout.meta["columns"])
    assert "decode and prefill: 1 step of 0.400 ms, which read 64 prompt tokens" in figure.layout.meta["alt"]
    assert trace_figures.step_strip(trace.steps(cpu)) == figure


def test_the_bars_show_shares_by_kind(cpu):
    figure = trace_figures.operator_bars(cpu)
    decode, mixed = figure.data
    assert dict(zip(decode.y, decode.x, strict=True))["matrix<br>multiplication"] == pytest.approx(62.5)
    assert dict(zip(mixed.y, mixed.x, strict=True))["in no<br>operator"] == pytest.approx(25.0)
    assert "decode only, 2 steps of 0.100 ms on average" in figure.layout.meta["alt"]


@pytest.mark.parametrize("path", [MIXED, DECODE])
def test_figures_are_fit_for_the_site(path):
    for figure in (trace_figures.step_strip(path), trace_figures.operator_bars(path)):
        document = json.loads(figure.to_json())
        assert not mime.unknown_trace_types(document) and "NaN" not in json.dumps(document)
        assert figure.layout.template.layout.to_plotly_json() == {} and figure.layout.meta["csv"].endswith(".csv")
        assert re.search(r"\d", figure.layout.meta["alt"]) and "aria-label" in mime.figure_html(document)
        assert not re.search(r"#(fff|000)", json.dumps(document), re.IGNORECASE)


# --- the profiler -----------------------------------------------------------------------------------------------------


def served(handlers, talk):
    """Run `talk(base_url)` against a server with these POST handlers."""
    async def main():
        app = web.Application()
        app.add_routes([web.post(path, handler) for path, handler in handlers.items()])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await talk(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_profiler_finds_the_trace_of_this_time(tmp_path):
    old = write(tmp_path, [step(0.0, 1.0)], "rank0.1.pt.trace.json.gz")

    async def ok(request):
        return web.Response()

    async def stop(request):
        write(tmp_path, [step(0.0, 1.0)], "rank0.2.pt.trace.json.gz")
        for other in ("rank1.3.pt.trace.json.gz", "host_1.async_llm.4.pt.trace.json.gz", "rank10.5.pt.trace.json.gz"):
            write(tmp_path, [step(0.0, 1.0)], other)
        (tmp_path / "rank0.profiler_out.txt").write_text("table")
        return web.Response()

    async def talk(url):
        profiler = trace.Profiler(url, tmp_path)
        assert profiler.result(0) is None and "no profile was started" in profiler.problem
        await profiler.start()
        await profiler.stop()
        return profiler

    profiler = served({"/start_profile": ok, "/stop_profile": stop}, talk)
    assert profiler.result(1) == tmp_path / "rank0.2.pt.trace.json.gz" != old and profiler.problem is None


def test_a_server_without_a_profiler_is_a_problem_and_no_exception(tmp_path):
    calls = []

    async def talk(url):
        profiler = trace.Profiler(url, tmp_path)
        await profiler.start()
        await profiler.stop()
        return profiler

    async def stop(request):
        calls.append(1)
        return web.Response()

    profiler = served({"/stop_profile": stop}, talk)
    assert profiler.problem == "the server has no profiler: it was started without profiler-config"
    assert profiler.result(5) is None and not calls

    async def broken(request):
        return web.Response(status=500)

    assert "status 500" in served({"/start_profile": broken}, talk).problem
    gone = trace.Profiler("http://127.0.0.1:9", tmp_path)
    asyncio.run(gone.start())
    assert "start_profile failed" in gone.problem


def test_a_trace_that_is_still_being_written_is_waited_for(tmp_path):
    profiler = trace.Profiler("http://127.0.0.1:9", tmp_path)
    profiler.problem = None
    whole = write(tmp_path, [step(0.0, 1.0)] * 500, "elsewhere.gz").read_bytes()
    path = tmp_path / "rank0.1.pt.trace.json.gz"
    path.write_bytes(whole[: len(whole) // 2])

    def finish():
        time.sleep(0.3)
        path.write_bytes(whole)

    writer = threading.Thread(target=finish)
    writer.start()
    started = time.monotonic()
    assert profiler.result(10) == path and time.monotonic() - started > 0.2
    writer.join()


def test_a_trace_that_never_comes_or_never_ends_has_a_reason(tmp_path):
    profiler = trace.Profiler("http://127.0.0.1:9", tmp_path)
    profiler.problem = None
    assert profiler.result(0.2) is None and profiler.problem == "the server wrote no trace"
    profiler.problem = None
    (tmp_path / "rank0.1.pt.trace.json.gz").write_bytes(b"")
    assert profiler.result(0.2) is None and profiler.problem == "the trace was not complete in time"


def test_plain_json_is_whole_when_it_ends(tmp_path):
    path = tmp_path / "rank0.1.pt.trace.json"
    path.write_text('{"traceEvents": [')
    assert not trace_file.is_whole(path)
    path.write_text('{"traceEvents": []}\n')
    assert trace_file.is_whole(path)


def test_profiler_config_is_one_that_the_installed_engine_takes(tmp_path):
    given = trace.profiler_config(tmp_path / "traces")
    assert os.path.isabs(given["torch_profiler_dir"]) and json.loads(json.dumps(given)) == given
    source = next(iter(Path(trace.pd.__file__).parents[1].glob("vllm/config/profiler.py")), None)
    if source is None:
        pytest.skip("no vLLM in this environment")
    fields = set(re.findall(r"^    (\w+): ", source.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(given) <= fields and given["profiler"] == "torch"
