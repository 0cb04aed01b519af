# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Part 1: Hit the wall
#
# A server that answers one person in half a second will not answer ten thousand at once. Somewhere between lies a wall.
# **How many requests a second can one server answer, and what does a user feel just before and just after that limit?**
#
# We raise the load step by step until the service breaks, say where it broke, and look at what the server was doing.

# %% tags=["parameters"]
rig = "auto"  # the machine and model; see experiments/rigs
mode = "recorded"  # or "live": start a server, measure, then read the record
base_url = ""  # a server that already runs
scale = 1.0  # multiplies every prompt count
rates = ""  # offered loads, such as "1,2,inf"; empty: those of the rig
num_prompts = ""
repeats = ""
slo_ttft_s = ""
slo_completed_ratio = ""
port = ""

# %%
from IPython.display import HTML, Markdown, display

from inference_wall import (
    card_power,
    figures,
    headline,
    knee_words,
    laid_over,
    laid_over_figures,
    part_1,
    post,
    published,
    reading_steps,
    records,
    stats,
    tables,
    trace,
    trace_figures,
)

arms = post.open_runs("part_1", rig=rig, mode=mode, base_url=base_url, scale=scale, rates=rates, num_prompts=num_prompts, repeats=repeats,
                      slo_ttft_s=slo_ttft_s, slo_completed_ratio=slo_completed_ratio, port=port)
run = arms.first
sweep = records.points_frame(run)
slo = run.document["settings"]["slo"]
knee = stats.knee(sweep, slo)
a10g = published.sweep_frame(passes="table")
numbers = part_1.numbers(arms)
reading = reading_steps.of_run(run)

# %% [markdown]
# ## Setup
#
# One server, one model, one kind of request. Only the load changes.

# %%
display(HTML(tables.setup_table(run, numbers)))
display(Markdown(part_1.weights_sentence(run)))

# %% [markdown]
# Every request brings a prompt of {num}`part_1.here.input_len` random tokens and wants exactly
# {num}`part_1.here.output_len` back. Requests arrive at random moments, as from independent users. The generator does
# not wait for answers before it sends the next one ({term}`open loop`): the public does not wait its turn either. Each
# load is one {term}`point <offered load>` of at most {num}`part_1.here.num_prompts` requests.
#
# ## What fits
#
# Before any load, the server says how much room it has. Its log on this machine: a cache for
# {num}`part_1.here.kv_cache_tokens:,` tokens, handed out in {term}`blocks <block>` of
# {num}`part_1.here.block_tokens`. One of our requests has {num}`part_1.here.request_tokens` tokens at most, and takes whole
# blocks: {num}`part_1.here.request_blocks` of the {num}`part_1.here.usable_blocks:,` that there are for requests. So there is
# {term}`room` for {num}`part_1.here.room_requests:,.0f` of them. (A model that keeps a {term}`recurrent state` takes blocks for that
# too, and the number of tokens that the log prints does not say how many requests fit: Part 4 has the rule.)
#
# There is also a cap that somebody chose: `max_num_seqs`, here {num}`part_1.here.max_num_seqs`. Of the two, the smaller
# one decides how many requests can run together. The others wait outside.
#
# On the author's A10G the two were close. The cap was {num}`published.a10g.max_num_seqs`; the blocks in the cache were
# enough for {num}`published.a10g.room_flood_requests`, and that is how many ran in that flood. Room was the limit there,
# although the text of the series says that memory was never the bottleneck.

# %% [markdown]
# ## The bound, before we measure
#
# One {term}`step` makes one token for each running request, and it must move the {term}`weights` through the
# processor once: {num}`part_1.here.weights_gb:.2f unit`, {num}`part_1.here.weights_are`. Just before this run the machine
# copied memory at {num}`part_1.here.copy_bandwidth_gb_s:.1f unit` and read it at
# {num}`part_1.here.read_bandwidth_gb_s:.1f unit`, {num}`part_1.here.bandwidth_with`. So a step takes at least
#
# > {num}`part_1.here.weights_gb:.2f unit` ÷ {num}`part_1.here.best_bandwidth_gb_s:.1f unit` =
# > **{num}`part_1.here.stream_ms:.1f unit`**.
#
# With {num}`part_1.here.max_num_seqs` requests sharing each step, and {num}`part_1.here.output_len` steps for an
# answer, no load on this server can be answered faster than {num}`part_1.here.bound_req_s:,.0f` requests a second. That
# leaves out the arithmetic, the reading of prompts and all software. It is a ceiling on paper. What remains of it?

# %% [markdown]
# ## Cold against warm
#
# The first requests on a fresh server pay for things that happen once: memory is touched, caches fill, kernels may be
# compiled or tuned. So the whole sweep runs once, short, and is thrown away. It stays in the record as the *cold* pass.

# %%
display(figures.cold_against_warm(sweep))

# %% [markdown]
# The first {num}`part_1.here.cold_requests` requests that this server ever answered came {num}`part_1.here.cold_how`. The slowest
# of their first tokens took {num}`part_1.here.cold_ttft_max_ms:,.0f unit`. Once warm, at the lightest load, the slowest of
# {num}`part_1.here.lightest_completed` took {num}`part_1.here.lightest_ttft_max_ms:,.0f unit`. The two are different loads with
# different numbers of requests, so only a large difference would mean something.

# %%
display(Markdown(part_1.cold_sentence(run, numbers)))

# %% [markdown]
# How much this matters depends on the machine. On the author's A10G the first point of a fresh server had a p99 of
# {num}`published.a10g.cold_ttft_p99_ms:,.0f unit`, against {num}`published.a10g.warm_ttft_p99_ms:,.0f unit` when warm:
# {num}`published.a10g.cold_over_warm_ttft_p99:.0f` times. Its *median* hardly differed. Whoever looks at medians alone
# would not notice.

# %% [markdown]
# ## The sweep

# %%
display(HTML(tables.sweep_table(sweep, caption=f"{run.document['rig']['title']}: one row an offered load. Rest on a dash to see why it is one.",
                                csv="part_1_sweep.csv")))

# %%
display(figures.percentile_curves([sweep], slo=slo, knee=knee))

# %% [markdown]
# Use the buttons to see the other latencies. TTFT counts from the moment a request was *due*, so it holds the time in
# the queue. A percentile is drawn only where enough requests stand behind it: a p90 needs 29, a p99 needs 299.
#
# At the lightest load, {num}`part_1.here.lightest_rate` requests a second, half of the first tokens came within
# {num}`part_1.here.lightest_ttft_p50_ms:,.0f unit`. At the heaviest finite load, {num}`part_1.here.heaviest_rate` a
# second, it was {num}`part_1.here.heaviest_ttft_p50_ms:,.0f unit`: {num}`part_1.here.ttft_growth:.1f` times as long.

# %% [markdown]
# ## The knee
#
# "Broken" needs a definition that can be argued with. Ours is a {term}`SLO`: the p{num}`part_1.here.slo_percentile` of
# TTFT stays within {num}`part_1.here.slo_ttft_s` s, and at least
# {num}`part_1.here.slo_completed_percent:.0f` percent of what arrives is answered, unless so few requests are missing that
# chance explains them. The {term}`knee` is a bracket: the last load that met this in every repeat, and the first that did
# not.

# %%
display(Markdown(knee_words.sentence(knee, sweep)))
display(HTML(tables.knee_table(knee)))

# %%
display(figures.completed_against_offered([sweep], knee=knee))

# %% [markdown]
# While the server keeps up, completed and offered agree but for chance: arrivals are random. Where it no longer does, the curve bends
# away from the diagonal: more is asked than is answered, and the difference piles up. Where it can be found, the rate counts in a
# {term}`steady window`, without the ramp at the start and most of the drain at the end.

# %%
display(Markdown(part_1.flood_sentence(run, numbers)))

# %% [markdown]
# ## Who was in the batch

# %%
cap = run.document["flags"].get("max-num-seqs")
display(figures.running_batch([sweep], caps={run.document["rig"]["name"]: cap} if cap else None))

# %% [markdown]
# Nobody sets the {term}`running batch`. It is what the load makes it: arrivals times stay ({term}`Little's law`). At the
# lightest load {num}`part_1.here.lightest_batch_mean:.1f` requests were in it on average; in the flood
# {num}`part_1.here.flood_batch_mean:.1f`, and never more than {num}`part_1.here.flood_running_max:.0f`. (We count at the client.
# The server's own gauge, in the figure, is refreshed when a step ends, so it misses requests whose prompt is being read: it
# says {num}`part_1.here.lightest_running_mean:.1f` and {num}`part_1.here.flood_running_mean:.1f`.)
#
# Everybody in the batch waits for the whole step. The median time per token was
# {num}`part_1.here.lightest_tpot_p50_ms:.0f unit` at the lightest load and {num}`part_1.here.flood_tpot_p50_ms:.0f unit`
# in the flood. At the lightest load that is {num}`part_1.here.tpot_over_stream:.1f` times the bound of one weight stream. The
# bound counts bytes of weights. It does not count arithmetic, the launching of kernels, scheduling, or the steps that read somebody's prompt.
#
# ## What the card drew

# %%
drew = card_power.by_load(run, card_power.offered)
if len(drew):
    display(Markdown("""A card has a {term}`power limit`. Where it reaches it, the driver lowers the clock, and all arithmetic takes longer. So beside
every load, this is what the card drew and how fast its clock ran."""))
    display(HTML(card_power.table(drew, "offered, requests/s")), Markdown(card_power.sentence(drew, run)))
else:
    display(Markdown("No card was at work here, or none that the harness could watch."))

# %% [markdown]
# ## One point, request by request

# %%
shown = part_1.point_for_timeline(run, knee)
display(figures.request_timeline(run.frame("requests", shown["point"]), run.frame("chunks", shown["point"]), run.frame("metrics", shown["point"]),
                                 what=f"rate {shown['rate_label']} on rig {run.document['rig']['name']}"))
display(Markdown(f"Every bar is one request at an offered rate of **{shown['rate_label']}** a second: one colour while it waits for its first "
                 "token, another while the answer streams. Below, on the same clock, what the server says it was running and had waiting."))

# %%
display(Markdown(part_1.inside_sentence(numbers)))

# %% [markdown]
# Where a new prompt is read, every running answer pauses: the marks of the worst stalls stand above one another. Part 2 is
# about them.
#
# ## What a prompt costs the others
#
# Everybody in a step waits for all of it. So the pause of the running answers, just before somebody's first token, tells how
# long the step was that read the prompt. Prompts whose first tokens come together were read together. Here are all steps of the sweep in
# which a prompt was read, by the number of prompts in it. No profiler ran. Steps full of prompts also hold more running answers.

# %%
display(HTML(reading_steps.table(reading, run.document["settings"]["input_len"])))
display(Markdown(reading_steps.price_sentence(reading, run.document["settings"]["input_len"], run.document["settings"]["output_len"], cap)))

# %%
display(Markdown(part_1.ceiling_sentence(reading, sweep, knee)))

# %% [markdown]
# ## A step from inside
#
# A {term}`profiler` writes down what the engine does, step by step. Here a few answers were under way when two more
# prompts arrived. The profiler slows the engine down, so read what is in a step, not how long it takes.

# %%
traced = part_1.trace_of(run)
if traced:
    display(Markdown(trace.words(traced)))
    display(trace_figures.step_strip(traced))
    display(Markdown(part_1.trace_sentence(traced, reading, run.document["settings"]["input_len"])))
    display(trace_figures.operator_bars(traced))
else:
    display(Markdown("No trace was taken with this record."))

# %% [markdown]
# ## The published A10G beside it
#
# {bdg-warning-line}`published by the author, not re-measured here`
#
# The author's card served a model with {num}`published.a10g.weights_gb:.1f unit` of weights and prompts of
# {num}`published.a10g.input_tokens` tokens. The machines differ, so absolute numbers cannot be compared. The second figure divides each
# load by the knee of its own machine, and each TTFT by that at the lightest load. It lays every {term}`rig` that has records of
# this part over the published curve; the [page of rigs](../../book/rigs.md) has their results in a table.

# %%
display(figures.completed_against_offered([sweep, a10g]))

# %%
display(laid_over_figures.draw(laid_over.part_1(laid_over.beside(arms))))

# %% [markdown]
# Our service level asks for the p{num}`part_1.here.slo_percentile` of TTFT, the published one for its p99, and the author's
# completed rate includes the drain, so it lies too low and is not judged. On the A10G a p99 TTFT of one second broke between
# {num}`published.a10g.knee_low_req_s:g` and {num}`published.a10g.knee_high_req_s:g` requests a second, and the flood reached
# {num}`published.a10g.flood_req_s:.2f`. Three things to know before you quote these numbers:
#
# - The printed table takes {num}`published.a10g.table_rows_main` rows from one pass and
#   {num}`published.a10g.table_rows_warm` from another.
# - With twice as many prompts the p99 at 8 requests a second was {num}`published.a10g.tail_growth_rate_8:.0f` times as
#   long. Past the knee the queue grows as long as the load lasts, so a tail there measures how long you looked.
# - At saturation, writing tokens explains {num}`published.a10g.flood_decode_ms_per_request:.0f unit` of the
#   {num}`published.a10g.flood_ms_per_request:.0f unit` that each request takes of the card. The rest is mostly the
#   reading of prompts. Faster decode alone could not double that wall.
#
# ## What to take away

# %%
display(Markdown(part_1.takeaways(reading, sweep, knee)))

# %% [markdown]
# ## What this page does not show

# %%
display(Markdown(f"One machine, and at most {numbers['num_prompts']['value']} requests a point. {part_1.repeats_sentence(sweep)}"))

# %% [markdown]
# {num}`part_1.here.invalid_points` of {num}`part_1.here.points` points failed a validity check; the
# [provenance page](../pages/provenance.md) lists each check. Percentiles near the knee depend on one another, so their
# intervals are too narrow there.
#
# ## Reproduce

# %%
display(Markdown(headline.reproduce(arms)))
