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
# # Primer: what one token costs
#
# This page explains what a GPU has to do to serve a language model. It judges no server yet. At the end you will have a
# bound on paper: the most that one particular card could do. Part 1 then measures how much of it is left.
#
# The card in the examples is the one of the original series, an NVIDIA A10G with the model Qwen3.5-4B. Rest on a number
# to see where it comes from. Two pieces of the page are not text: a calculator of bytes, which needs nothing but the shape
# of a model, and a picture of real steps, drawn from a record.

# %% tags=["parameters"]
rig = "auto"  # whose records are drawn; see experiments/rigs
mode = "recorded"  # this page starts no server: live is the same
base_url = ""  # not used here
scale = 1.0  # not used here
model = "Qwen/Qwen3.5-4B"  # the model of the calculator; bytes_per_step.models() lists them
batch = 8  # a batch of your own, beside those that are always drawn

# %%
from IPython.display import Markdown, display

from inference_wall import bytes_per_step, primer_figures, published
from inference_wall.widgets import dial

run = primer_figures.newest_run(rig)  # null when this machine has no record yet

# %% [markdown]
# ## One memory, many cores
#
# A trained model is a large heap of numbers, its {term}`weights`. In 16-bit format the example's weights take
# {num}`published.a10g.weights_gib:.2f unit`. They are loaded once, into the roomy memory on the card ({term}`HBM`), and
# do not change after that.
#
# The cores that do arithmetic sit on a chip beside that memory and can hold only a sliver of it. So to use a weight, the
# card must first carry it from memory to a core. Two speeds matter:
#
# - **Carrying:** {num}`published.a10g.copy_bandwidth_gb_s:.0f` billion bytes a second on the example card, where the
#   author of the series timed a large copy.
# - **Calculating:** {num}`published.a10g.fp16_tflop_s:.0f` trillion operations a second in 16-bit numbers, as the author
#   quotes for this card.
#
# Divide the second by the first: for each byte that arrives, the cores have time for
# {num}`published.a10g.operations_per_byte:.0f` operations. Keep that ratio in mind. If your work offers fewer operations
# for each byte, the cores wait for the memory. If it offers more, the memory waits for the cores.
#
# ## One token, one stream
#
# A model writes text one {term}`token` at a time, a token being a word or a part of one. To find the next token, the
# current one passes through all {num}`published.a10g.layers` layers, and each layer multiplies it with that layer's
# weights. Every weight takes part once, in about two operations: one multiplication, one addition.
#
# So a single token needs the whole stream of weights. Not quite every loaded byte: about
# {num}`published.a10g.not_streamed_gb:.1f` of the {num}`published.a10g.weights_gb:.1f unit` belong to the part that looks
# at pictures, and text leaves it alone. The rest, {num}`published.a10g.streamed_gb:.2f unit`, has to move.
#
# | For one token | Amount | At full speed |
# | --- | --- | --- |
# | bytes to carry | {num}`published.a10g.streamed_gb:.2f unit` | {num}`published.a10g.stream_ms:.1f unit` |
# | operations | two for each weight | {num}`published.a10g.arithmetic_ms:.2f unit` |
#
# Each weight is two bytes and gives two operations: one operation for each byte, where the card has time for
# {num}`published.a10g.operations_per_byte:.0f`. The cores are idle nearly all the time. What a token costs is the trip,
# not the arithmetic.
#
# That is the first bound. One request alone cannot get more than {num}`published.a10g.stream_tok_s:.0f` tokens a second
# out of this card at that bandwidth, however good the software is. (It is the bandwidth of a careful copy, not a law of
# nature. The data sheet says {num}`published.a10g.nominal_bandwidth_gb_s:.0f`.)
#
# ## Reading is not writing
#
# Serving a request has two phases, and they use the card in opposite ways.
#
# **{term}`Prefill <prefill>`: reading the prompt.** All the prompt's tokens are known, so they can go through the model
# side by side. A weight that has made the trip to a core is used for every one of them. With
# {num}`published.a10g.input_tokens` tokens it gives {num}`published.a10g.input_tokens` times the operations for the same
# bytes. That is past the ratio above, and now the cores are the limit. The prompt goes through in one dense burst. At the
# quoted speed it would take {num}`published.a10g.bound_prompt_ms:.0f unit`.
#
# A burst has a size limit, the {term}`step budget`: here {num}`published.a10g.step_budget_tokens:,` tokens. Up to
# {num}`published.a10g.prompts_per_step` such prompts fit into one burst. A longer prompt than the budget is read in
# several.
#
# **{term}`Decode <decode>`: writing the answer.** The next token depends on the one before, so the tokens of an answer
# cannot be side by side. An answer of {num}`published.a10g.output_tokens` tokens takes as many passes, each with its own
# stream of weights.
#
# ## Not reading it all again
#
# To choose the next token, the model looks back at the whole text so far. Working all of that out again at each pass
# would make every token dearer than the one before. So each layer keeps notes on the tokens it has seen.
#
# In a classic model every layer keeps a {term}`KV cache`: for each token one *key* (what it can be found by) and one
# *value* (what it has to say). The notes grow with each token, of the prompt and of the answer.
#
# The example is a {term}`hybrid model`, and here it differs. Only {num}`published.a10g.full_attention_layers` of its
# {num}`published.a10g.layers` layers keep notes that grow. The other {num}`published.a10g.linear_attention_layers` keep a
# {term}`recurrent state`: a table of fixed size that each new token rewrites.
#
# | For one request | Size |
# | --- | --- |
# | growing notes, for each token | {num}`published.a10g.kv_growth_kb:.1f unit` |
# | growing notes of {num}`published.a10g.request_tokens` tokens (prompt and answer) | {num}`published.a10g.request_cache_mb:.1f unit` |
# | fixed state, at any length | {num}`published.a10g.state_mb:.1f unit` |
#
# For short conversations the fixed part is by far the larger. The growing notes catch up only after
# {num}`published.a10g.state_in_tokens:,.0f` tokens.
#
# :::{dropdown} Where the two sizes come from
# A layer that keeps a growing cache stores, for each token, a key and a value for {num}`published.a10g.kv_heads` heads of
# {num}`published.a10g.head_dim` numbers each, at {num}`published.a10g.cache_bytes_per_value` bytes a number:
# {num}`published.a10g.kv_growth_layer_bytes:,` bytes. Times {num}`published.a10g.full_attention_layers` layers.
#
# A layer with a fixed state stores a table of {num}`published.a10g.linear_key_dim` by
# {num}`published.a10g.linear_value_dim` numbers for each of {num}`published.a10g.linear_value_heads` heads, at
# {num}`published.a10g.state_bytes_per_value` bytes a number. Times {num}`published.a10g.linear_attention_layers` layers.
#
# These numbers are in the model's configuration file. No measurement is needed.
# :::
#
# ### Why you will also read "130 kB a token"
#
# The original primer of the series, and a quick division of what the server prints, give a figure four times as large.
# Both figures are right, for different questions.
#
# At start the server sets aside whatever memory is left for notes: here a pool of
# {num}`published.a10g.kv_pool_gib:.2f unit`. It prints that this pool holds {num}`published.a10g.kv_tokens:,` tokens.
# Divide, and you get **{num}`published.a10g.pool_kb_per_token:.0f unit` of pool for each token printed**. Yet a longer
# text adds only **{num}`published.a10g.kv_growth_kb:.1f unit` for each token**.
#
# The gap comes from how the pool is shared. vLLM sorts the layers into {num}`published.a10g.layer_groups` groups of
# {num}`published.a10g.full_attention_layers`: one that grows, three with fixed state. All of them draw equal
# {term}`blocks <block>` from the one pool. The printed count deals the blocks out evenly, as if all
# {num}`published.a10g.layer_groups` groups grew with the text. A model in which they all did would indeed take
# {num}`published.a10g.kv_growth_all_layers_kb:.0f unit` a token.
#
# So use the small figure to ask what a longer text costs. Use neither to ask how many requests fit. That has its own
# rule, and Part 4 tests it.
#
# ## A step: sharing the trip
#
# A lone answer wastes the trip: billions of weights are carried and used once. But the stream does not care whose token
# it meets. If eight answers are being written, the server stacks the newest token of each, and one stream serves all
# eight. That is a {term}`step`.
#
# ```{raw} html
# <figure class="wall-step" style="margin:1.5rem 0">
# <svg viewBox="0 0 480 330" role="img" aria-labelledby="step-title step-desc"
#   style="width:100%;max-width:620px;height:auto;display:block;margin:0 auto" font-family="inherit" font-size="15" fill="currentColor">
# <title id="step-title">One step of the server</title>
# <desc id="step-desc">Memory on the left holds the weights and the notes of requests A, B and C.
# In one step the weights travel to the cores once, for all three requests. The notes of each request travel for that request alone.
# Each request gets one new token.
# Below, a bar shows the time of the step: a long shared part, then a short part for each request.</desc>
# <rect x="8" y="34" width="150" height="190" rx="8" fill="none" stroke="currentColor" stroke-opacity=".5"/>
# <text x="83" y="24" text-anchor="middle" font-weight="600">memory</text>
# <rect x="20" y="46" width="126" height="84" rx="5" fill="#2f7ed8" fill-opacity=".28" stroke="#2f7ed8"/>
# <text x="83" y="93" text-anchor="middle">weights</text>
# <g stroke-width="1">
# <rect x="20" y="140" width="126" height="22" rx="4" fill="#e07b39" fill-opacity=".28" stroke="#e07b39"/>
# <rect x="20" y="167" width="126" height="22" rx="4" fill="#3a9d5d" fill-opacity=".28" stroke="#3a9d5d"/>
# <rect x="20" y="194" width="126" height="22" rx="4" fill="#9b59b6" fill-opacity=".28" stroke="#9b59b6"/>
# </g>
# <text x="83" y="156" text-anchor="middle">notes of A</text>
# <text x="83" y="183" text-anchor="middle">notes of B</text>
# <text x="83" y="210" text-anchor="middle">notes of C</text>
# <g stroke="currentColor" fill="none">
# <path d="M150 88 H286" stroke="#2f7ed8" stroke-width="9"/>
# <path d="M150 151 H286" stroke="#e07b39" stroke-width="3"/>
# <path d="M150 178 H286" stroke="#3a9d5d" stroke-width="3"/>
# <path d="M150 205 H286" stroke="#9b59b6" stroke-width="3"/>
# </g>
# <path d="M284 76 L302 88 L284 100 Z" fill="#2f7ed8"/>
# <path d="M284 145 L296 151 L284 157 Z" fill="#e07b39"/>
# <path d="M284 172 L296 178 L284 184 Z" fill="#3a9d5d"/>
# <path d="M284 199 L296 205 L284 211 Z" fill="#9b59b6"/>
# <text x="218" y="72" text-anchor="middle" font-size="13">once, for all</text>
# <text x="218" y="143" text-anchor="middle" font-size="13">each its own</text>
# <rect x="306" y="34" width="76" height="190" rx="8" fill="none" stroke="currentColor" stroke-opacity=".5"/>
# <text x="344" y="24" text-anchor="middle" font-weight="600">cores</text>
# <text x="430" y="116" text-anchor="middle" font-size="13">one new</text>
# <text x="430" y="132" text-anchor="middle" font-size="13">token each</text>
# <g text-anchor="middle">
# <text x="344" y="156">A</text><text x="344" y="183">B</text><text x="344" y="210">C</text>
# </g>
# <path d="M386 151 H404 M386 178 H404 M386 205 H404" stroke="currentColor" stroke-opacity=".6"/>
# <circle cx="416" cy="151" r="6" fill="#e07b39"/><circle cx="416" cy="178" r="6" fill="#3a9d5d"/><circle cx="416" cy="205" r="6" fill="#9b59b6"/>
# <text x="8" y="262" font-weight="600">time of the step</text>
# <rect x="8" y="272" width="300" height="26" rx="4" fill="#2f7ed8" fill-opacity=".28" stroke="#2f7ed8"/>
# <rect x="310" y="272" width="30" height="26" rx="3" fill="#e07b39" fill-opacity=".28" stroke="#e07b39"/>
# <rect x="342" y="272" width="30" height="26" rx="3" fill="#3a9d5d" fill-opacity=".28" stroke="#3a9d5d"/>
# <rect x="374" y="272" width="30" height="26" rx="3" fill="#9b59b6" fill-opacity=".28" stroke="#9b59b6"/>
# <text x="158" y="290" text-anchor="middle">the shared stream</text>
# <g text-anchor="middle"><text x="325" y="290">A</text><text x="357" y="290">B</text><text x="389" y="290">C</text></g>
# <text x="8" y="320" font-size="13">Not to scale: the parts of A, B and C are far shorter than drawn.</text>
# </svg>
# <figcaption style="text-align:center;font-weight:400;font-size:.95rem;color:var(--pst-color-text-muted)">
# A step carries the weights once for everybody, and the notes of each request for that request alone.</figcaption>
# </figure>
# ```
#
# What cannot be shared is each request's own notes. In every step the fixed state is read and written back, and the
# growing cache is read. For a request with a {num}`published.a10g.input_tokens`-token prompt that is
# {num}`published.a10g.own_traffic_mb:.0f unit` a step, or {num}`published.a10g.own_ms:.2f unit` of carrying.
#
# This gives the second bound. A step with a batch of requests takes at least
#
# > *step time* = *shared stream* + *batch* × *own traffic*
#
# | Requests in the step | Step, at least | Tokens a second, at most |
# | --- | --- | --- |
# | 1 | {num}`published.a10g.stream_ms:.1f unit` and its own {num}`published.a10g.own_ms:.2f` | {num}`published.a10g.stream_tok_s:.0f` |
# | 8 | {num}`published.a10g.bound_batch_8_step_ms:.1f unit` | {num}`published.a10g.bound_batch_8_tok_s:,.0f` |
# | 64 | {num}`published.a10g.bound_batch_64_step_ms:.1f unit` | {num}`published.a10g.bound_batch_64_tok_s:,.0f` |
# | 256 | {num}`published.a10g.bound_batch_256_step_ms:.1f unit` | {num}`published.a10g.bound_batch_256_tok_s:,.0f` |

# %% [markdown]
# Eight requests are served for little more than the price of one. At 256 the shared trip is no longer the larger part.
#
# ### A calculator of bytes
#
# The bound is a sum of bytes, and bytes follow from the shape of the model. So the sum can be made for any batch and any
# length of text without a machine. The dial sets how much text each request has behind it: its prompt and what is
# written so far.

# %%
display(Markdown(bytes_per_step.sentence(model, batch, bytes_per_step.contexts(model)[0])))
lengths = {}
for length in bytes_per_step.contexts(model):
    rows = bytes_per_step.frame(model, bytes_per_step.batches(batch), length)
    lengths[f"{length:,}"] = [primer_figures.bytes_bars(rows), bytes_per_step.table(rows, bytes_per_step.machine(model, run))]
dial(lengths, "Tokens of text behind each request", slider=True)

# %% [markdown]
# The blue part is the same in every bar: that is the shared trip. Divided among the tokens of a step it becomes small,
# which the table shows in the column *a token*. All the rest grows with the batch, and no sharing makes it smaller.

# %%
display(Markdown(bytes_per_step.own_bytes(model)))
display(Markdown(bytes_per_step.left_out(model)))

# %% [markdown]
# *Notes to keep*, in the table, is what memory must hold for all requests of the step. Where a dash stands for the time,
# that is more than the server set aside, and such a step cannot be run on that machine at all. Fitting by bytes is not yet
# a promise: memory is dealt out in {term}`blocks <block>`, which rounds up.
#
# ### The same step in another model
#
# Would a far smaller model be cheaper in every way? Guess before you turn to it. This one runs on any processor, and it
# is the one that `make book` measures where there is no GPU.

# %%
others = {}
for name in bytes_per_step.models():
    rows = bytes_per_step.frame(name, bytes_per_step.batches(batch), bytes_per_step.CONTEXTS[0])
    others[bytes_per_step.short(name)] = [primer_figures.bytes_bars(rows), bytes_per_step.table(rows, bytes_per_step.machine(name, run))]
others[bytes_per_step.short(bytes_per_step.EVERYWHERE)].append(bytes_per_step.contrast(published.MODEL, bytes_per_step.EVERYWHERE))
dial(others, "Model", value=bytes_per_step.short(model))

# %% [markdown]
# How many bytes a model *has* and how many bytes a token of text *adds* are two different properties. The first follows
# from all its layers, the second only from those that keep a growing cache, and from how many heads they keep it for.
#
# ## Steps that happened
#
# All this says something that can be seen from outside. If running requests share their steps, then their tokens must
# arrive together, in beats. And a prompt has to be read in some step. Whoever is in that step has to wait for it.
#
# Here is what a client saw. A row is a request, a mark is a token that arrived, a stripe is a step. A bar runs from the
# moment at which a request was sent to its first token.

# %%
pictures = primer_figures.sources(rig)
if pictures:
    dial({name: primer_figures.shown(source) for name, source in pictures.items()}, "Load")
else:
    display(Markdown(primer_figures.NOTHING_TO_DRAW))

# %% [markdown]
# The picture takes the stretch of its record that shows most; most steps are plainer. The stripes are found from outside:
# tokens that arrive together are taken to be of one step. What the engine itself did in a step needs a trace.
#
# ## Who decides the batch
#
# Nobody sets the size of the batch. **The load makes it.** Requests arrive, each stays for as long as its answer takes,
# and those that are in the house at the same time form the {term}`running batch`. If two arrive each second and each
# stays three seconds, about six are in flight. That is {term}`Little's law`: rate times stay.
#
# Note the loop in it. More requests in flight make each step longer. Longer steps make each request stay longer. So more
# are in flight. While the loop settles, all is well.
#
# `max_num_seqs` is a ceiling on the batch, not a target: {num}`published.a10g.max_num_seqs` in the example. Memory is
# another ceiling, since each request needs room for its notes. Requests beyond either wait in a queue. A request that was
# let in too boldly can be thrown out again; that is a {term}`preemption`.

# %% [markdown]
# ## Three levers
#
# | Lever | What it changes | What to ask of it |
# | --- | --- | --- |
# | `max_num_seqs` | how many requests may share a stream | how large a batch still pays? |
# | {term}`chunked prefill` | how prompts are cut before they are mixed with running answers | who waits while a long prompt is read? |
# | {term}`quantization` | how many bytes each weight has | which bytes does it shrink, and are those the ones that cost? |
#
# Each has a part of this book, where it is pulled on a real server.
#
# ## The bound on the wall
#
# You now know enough to bound a whole server before you start one. Take requests of {num}`published.a10g.input_tokens`
# tokens in and {num}`published.a10g.output_tokens` out.
#
# :::{dropdown} Guess first: how many of them a second could this card answer at the very best?
# Reading one prompt takes the cores at least {num}`published.a10g.bound_prompt_ms:.1f unit`.
#
# Writing one answer takes {num}`published.a10g.output_tokens` steps. In the largest batch allowed,
# {num}`published.a10g.max_num_seqs`, a step takes at least {num}`published.a10g.bound_batch_256_step_ms:.1f unit`, and
# the request's share of it is one in {num}`published.a10g.max_num_seqs`. Over the whole answer that makes
# {num}`published.a10g.bound_answer_ms:.1f unit`.
#
# If the two cannot overlap, each request costs the sum. One second divided by the sum is
# **{num}`published.a10g.bound_wall_req_s:.1f` requests a second**. No more than that, if memory can seat the whole batch,
# the quoted arithmetic speed is reached, and no time is lost between the two.
# :::
#
# Which of these conditions fails first, and what is left of the bound when it does, is
# [Part 1](part_1.ipynb).
#
# ## What to take away
#
# - **A token costs a trip.** All weights travel once for each step, and the cores mostly wait for them.
# - **Sharing is what makes serving cheap.** A step moves the weights once for everybody in it.
# - **Some bytes are nobody else's.** Each request's state and cache travel for that request alone. They set the end of
#   what sharing can bring.
# - **Reading is dense, writing is thin.** A prompt keeps the cores busy, an answer keeps the memory busy, and both have to
#   go through the same steps.
# - **The load makes the batch.** A setting can only cap it.
#
# ## What this page does not show
#
# Bounds here are bytes over bandwidth and operations over arithmetic. They leave out all software, the launching of work on
# the card, the looking up of blocks, and the attention's arithmetic, which grows with the text. The picture of steps is one
# short stretch of one load. No sentence of this page compares two machines.
#
# ## Reproduce
#
# ```bash
# wall site --again      # this page and all others, from the records that are there
# ```
#
# It starts no server. For another model or a batch of your own, open `notebooks/primer.py` as a notebook and change its
# parameters: the dials are controls of the kernel there. The shapes are in `benchmarks/published/model_shapes.json` and,
# for the model that runs everywhere, in `inference_wall/bytes_per_step.py`.
