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
# # Part 3: The batching cliff
#
# A server can answer its users one after the other, or many at a time. It seems that the work should be the same.
# **What does a server lose when it answers one request at a time, and how large must a batch be before a larger one gains
# nothing?**
#
# We turn one switch, the number of requests that may share a {term}`step`, and look at three things: how much comes out,
# how long a step takes, and who waits.

# %% tags=["parameters"]
rig = "auto"  # the machine and model; see experiments/rigs
mode = "recorded"  # or "live": start servers, measure, then read the records
base_url = ""  # a server that already runs
scale = 1.0  # multiplies every prompt count
caps = ""  # values of max_num_seqs, such as "1,4,16"; empty: those of the rig
concurrency = ""  # requests in flight of the closed loops
batches = ""  # equal streams at once, for the step times
repeats = ""
port = ""

# %%
from IPython.display import HTML, Markdown, display

from inference_wall import card_power, cliff_figures, cliff_words, headline, held_up, laid_over, part_3, post, step_families, tables

arms = post.open_runs("part_3", rig=rig, mode=mode, base_url=base_url, scale=scale, caps=caps, concurrency=concurrency, batches=batches,
                      repeats=repeats, port=port)
found = part_3.look(arms)
numbers = part_3.numbers(arms)

# %% [markdown]
# ## Setup
#
# One model, one kind of request, several servers. They differ in one flag, `max_num_seqs`: the most requests that may be
# in a step. We call it the *cap*. The table shows the server with the largest one.

# %%
display(HTML(tables.setup_table(found.run, numbers)))

# %%
display(Markdown(" ".join([cliff_words.arms_sentence(found), cliff_words.weights_sentence(found)])))

# %% [markdown]
# Every prompt has {num}`part_3.here.input_len` random tokens, every answer exactly {num}`part_3.here.output_len`. There are
# three loads:
#
# - A **flood** at each cap: all prompts are sent at once, and the server takes as many as it may.
# - A **{term}`closed loop`** on the server with the largest cap: a fixed number of users, each waiting for an answer before
#   asking again.
# - **Equal streams**, on that server too: a known number of answers decode together and nothing else arrives. This is
#   how we time a step.
#
# ## The bound, before we measure
#
# To write one token the server moves the {term}`weights` that a step needs through the processor once. We count
# {num}`part_3.here.weights_gb:.2f unit`, {num}`part_3.here.weights_are`. The memory was tested
# {num}`part_3.here.bandwidth_with`. So a step takes at least {num}`part_3.here.weights_gb:.2f unit` ÷
# {num}`part_3.here.best_bandwidth_gb_s:.1f unit` = {num}`part_3.here.stream_ms:.1f unit`. With one request in the step, this
# whole stream yields one token.
#
# But the weights are the same for everybody. Once they flow, they can serve every request in the step. What a request
# needs for itself is its {term}`KV cache` (and in a {term}`hybrid model` its {term}`recurrent state`).

# %%
display(Markdown(cliff_words.own_sentence(found)))

# %% [markdown]
# The batch at which the two parts are equal is the {term}`crossover`. Well below it a further request in the batch is nearly
# free, and throughput grows like B. At the crossover a further seat brings about a quarter of what the first one brought. Far
# beyond it throughput levels off.

# %%
display(Markdown(cliff_words.gain_sentence(found)))

# %% [markdown]
# That counts bytes. Arithmetic is not in it, and arithmetic cannot be shared: each sequence needs its own.
#
# ## The cliff

# %%
display(Markdown(cliff_words.factor_sentence(found)))
display(HTML(cliff_words.caps_table(found)))

# %%
display(cliff_figures.throughput(found.caps, found.closed, found.fit, found.rig, numbers["held_up_tok_s_high"]["value"]))

# %% [markdown]
# Marks are caps, the line is the closed loop. Look at the lower panel too: a cap is only a permission. What counts is the
# {term}`running batch`, how many requests were in the step.

# %%
display(Markdown(cliff_words.batch_sentence(found)))

# %% [markdown]
# *In proportion* is theory: what free seats would give. *Decode alone* is what the step times below allow when no prompt is read.

# %%
display(Markdown(cliff_words.served_sentence(found)))

# %% [markdown]
# ## A shortcut, and whether it is allowed
#
# Each cap costs a server start. A closed loop costs none: with n users there are n requests in the server, whatever the cap.
# So we started few caps and let closed loops stand in for those between. That is only right if the two agree
# where both were measured. We call them equal within {num}`part_3.here.agree_limit_percent:.0f` percent.

# %%
display(Markdown(cliff_words.agreement_sentence(found)))
if len(found.agreed):
    display(HTML(cliff_words.agreement_table(found)))
    display(Markdown("""
The last two rows of each size are not judged. The server's gauge of running requests is refreshed when a step ends, so it misses those whose
prompt is being read. And TTFT *must* differ: a flood leaves its prompts standing in a queue, and in a closed loop nobody asks before there is a
seat. The loops tell about work in progress. About waiting they say nothing."""))

# %% [markdown]
# ## What a step costs

# %%
display(Markdown(cliff_words.fit_sentence(found)))
display(cliff_figures.step_line(found.steps, found.fit, found.rig, found.bound["stream_ms"], found.bound["own_ms"]))

# %% [markdown]
# A point is the median gap between two tokens, from the moment when the last stream had its first token to the moment when
# the first one ended. In that stretch every step holds the whole batch and no prompt.

# %%
if held_up.surely(found.batches):
    display(Markdown(held_up.sentence(found.batches, found.fit)), HTML(held_up.table(found.batches)))

# %%
display(Markdown(card_power.sentence(card_power.by_load(arms.first, card_power.steps_and_floods), arms.first)))

# %%
display(Markdown(cliff_words.fixed_sentence(found)))
display(Markdown(cliff_words.slope_sentence(found)))

# %% [markdown]
# If a step is a straight line, this is the cliff in two numbers. A server that takes one request at a time pays the fixed part
# for every single token. And the crossover, where the points determine one, says from where on adding seats helps little: at
# that batch, decode has reached half of its ceiling.
#
# ## What fills a step
#
# The profiler looks at steps from inside. It slows the server down, so read shares here, not times.

# %%
if found.traces:
    from inference_wall import trace, trace_figures, widgets

    widgets.dial({f"batch {batch}": [trace.words(path), trace_figures.step_strip(path), trace_figures.operator_bars(path)]
                  for batch, path in found.traces}, "Requests in the step")
else:
    display(Markdown("No trace was kept with these records."))

# %%
if len(found.families):
    display(Markdown("""Side by side, in milliseconds. The profiler stretches the launching of kernels, which shows as time in no operator where there
are few streams. The kernels themselves take as long as without it."""))
    display(HTML(step_families.families_table(found.families, found.batches)), Markdown(step_families.families_sentence(found.families)))
if len(found.state):
    display(Markdown("""The {term}`recurrent state` of a sequence has a fixed size, is read and written in every step, and cannot be shared. Is its
time that of its bytes?"""))
    display(HTML(step_families.state_table(found.state)), Markdown(step_families.state_sentence(found.state)))

# %% [markdown]
# ## Who waits
#
# A cap of 1 does something else beside what it does to throughput: everybody waits for all of those before them.
# Is that fair? First come, first served is a fair order. What is unfair is the size of the wait. All prompts of a flood arrive
# together, and whoever is first in the queue waits for nobody. The second waits for one whole answer, the third for two. So
# theory says: a wait is the place in the queue × the time of one answer.

# %%
if 1 not in found.queues:
    display(Markdown(cliff_words.queue_sentence(found)))
else:
    display(Markdown("""The places are those that the server gave, by first tokens. That a later place waits longer is then no finding. By how much
is one."""))
    display(cliff_figures.queue(found.queues, found.fair["service_s"], found.fair["alone_s"], found.rig))
    display(Markdown(cliff_words.queue_sentence(found)))
    display(Markdown(cliff_words.order_sentence(found)))
    display(Markdown("""Nobody in this queue asked for anything difficult. The first token came after {num}`part_3.here.queue_first_ttft_s:.2f unit`
for the first and after {num}`part_3.here.queue_last_ttft_s:.1f unit` for the last. With many seats the queue moves on in waves, each as long as
an answer in a full batch, and every wave takes many places at once."""))
    display(Markdown(cliff_words.place_sentence(found)))

# %%
if found.small:
    display(Markdown(""":::{warning}
**Do not compare the TTFT of two floods.** It depends on how many prompts were queued, and we queue more for a larger cap:
{num}`part_3.here.small_num_prompts:.0f` at cap {num}`part_3.here.small_cap`, {num}`part_3.here.large_num_prompts:.0f` at cap
{num}`part_3.here.large_cap`. Send twice as many and the median wait doubles, on the very same server. What can be compared
is what a place in the queue costs.
:::"""))

# %% [markdown]
# ## The price
#
# Nothing is free. Every answer in the batch gets its next token when the whole step is done, and a step
# with more in it can take longer.

# %%
display(Markdown(cliff_words.price_sentence(found)))
display(cliff_figures.price(found.caps, found.closed, found.rig))

# %% [markdown]
# So the switch trades two kinds of patience. A small cap makes people wait outside, one after the other. A large one lets
# everybody in and serves each more slowly. The tail of the ITL holds the moments in which somebody else's
# prompt was read: that is the subject of Part 2.
#
# ## The published A10G beside it
#
# {bdg-warning-line}`published by the author, not re-measured here`
#
# The author's caps went from {num}`published.a10g.cliff_small_cap` to {num}`published.a10g.cliff_large_cap`, and the output
# rate from {num}`published.a10g.cliff_cap_1_output_tok_s:.0f` to {num}`published.a10g.cliff_cap_256_output_tok_s:,.0f` tokens a
# second: **{num}`published.a10g.cliff_factor:.1f` times**. The machines have nothing in common, so the figure divides each
# batch by the crossover of its own machine, and each throughput by the ceiling of its own fit. If a step is a straight line,
# decode must then lie on one curve, on any machine. Every {term}`rig` that has records of this part and whose points bound its
# crossover is drawn.

# %%
display(Markdown(cliff_words.curve_sentence(found)))
display(cliff_figures.on_one_curve(laid_over.part_3(laid_over.beside(arms))))

# %%
display(Markdown(cliff_words.shape_sentence(found)))

# %% [markdown]
# Five things to know before you quote the published numbers:
#
# - **At cap {num}`published.a10g.cliff_large_cap` there were {num}`published.a10g.cliff_running:.0f` in the step.** That is not where
#   computing ran out. It is the number of requests for which the cache had {term}`blocks <block>`:
#   {num}`published.a10g.room_flood_requests` by our count. The batch ended where the room ended.
# - **Most of the slope can be state.** A step grew by {num}`published.a10g.step_per_request_ms:.2f unit` for each sequence. Reading and
#   writing its recurrent state, and reading its cache, takes {num}`published.a10g.cliff_own_ms:.2f unit` by bytes:
#   {num}`published.a10g.cliff_own_of_slope_percent:.0f` percent of that. So traffic alone can account for most of
#   the work that cannot be shared.
# - **The text's {num}`published.a10g.cliff_plateau_ms:.1f unit` for each sequence is another quantity.** It is one over the
#   throughput of the flood, so it holds the reading of prompts. The flood reached
#   {num}`published.a10g.cliff_served_of_decode_percent:.0f` percent of what decode alone did at that batch.
# - **The last seats were expensive.** From cap {num}`published.a10g.cliff_before_cap` to
#   {num}`published.a10g.cliff_large_cap` throughput rose by {num}`published.a10g.cliff_last_gain_percent:.1f` percent, while the
#   median ITL grew {num}`published.a10g.cliff_last_itl_growth:.1f` times.
# - **The smaller model's {num}`published.a10g.cliff_foil_factor:.0f` times cannot be checked.** Only the ratio was published, without a log.
#   That model is also of another generation, so size is not the only difference. It does say where to look: on a straight line a gain is
#   bounded by crossover + 1, which for the card's larger model is {num}`published.a10g.cliff_most_gain:.0f`. (Four points bear a
#   crossover between {num}`published.a10g.cliff_crossover_low:.0f` and {num}`published.a10g.cliff_crossover_high:.0f`.)
#
# The queue is there too. Half of the {num}`published.a10g.cliff_cap_1_num_prompts` prompts at a cap of 1 take
# {num}`published.a10g.cliff_half_flood_s:.1f unit`, and the published median TTFT is
# {num}`published.a10g.cliff_cap_1_ttft_p50_ms:,.0f unit`.
#
# ## What to take away
#
# - **A step has a shared part and an own part.** Batching divides the shared one. That is where its whole gain comes from.
# - **Measure two numbers, fixed and slope, and their intervals.** Their ratio, the crossover, says how large a batch is worth
#   having, and crossover + 1 is the most that any batch can gain: if the step is a straight line, and if the points determine it.
# - **Look at the running batch, not at the cap.** Room in the cache may end it long before the cap does. And count it at the
#   client: a gauge that is refreshed when steps end misses prompts that are being read.
# - **One at a time, everybody waits for all of those before them.** The order is fair. The wait is the place in the queue times a
#   whole answer.
# - **Never compare the TTFT of floods** with different numbers of prompts.
#
# ## What this page does not show
#
# One machine and one length of prompt and answer, {num}`part_3.here.repeats` repeat(s). {num}`part_3.here.invalid_points` of
# {num}`part_3.here.points` points failed a validity check; the [provenance page](../pages/provenance.md) lists each check.
# Longer contexts make the own part larger, and they were not varied. All sequences of a batch were equal, which real ones never
# are. The interval of the fit assumes that its {num}`part_3.here.fit_points` points scatter independently about a straight line.
# With few of them it is wide, and it does not know that a step may be bent.
#
# ## Reproduce

# %%
display(Markdown(headline.reproduce(arms)))
