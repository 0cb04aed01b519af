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
# # Part 5: Fewer bits
#
# A weight is a number, and a number can be stored in more or fewer bits. Fewer bits mean fewer bytes, and a {term}`step`
# has to move all {term}`weights` once. So a tempting sentence goes: bytes, not parameters, set the speed. If it is true,
# a model with twice the parameters at half the bits comes for free.
# **Does a step take as long as its bytes, or as its parameters? And what do the words lose?**
#
# We serve one model in its full width, then with fewer bits; and, where the rig has one,
# a bigger model with fewer bits.

# %% tags=["parameters"]
rig = "auto"  # the machine and model; see experiments/rigs
mode = "recorded"  # or "live": start servers, measure, then read the records
base_url = ""  # a server that already runs
scale = 1.0  # multiplies every prompt count
variants = ""  # names of the rig's variants, such as "float32,int8"; empty: all that are not optional
batches = ""  # equal streams at once, for the step times
repeats = ""
port = ""

# %%
from IPython.display import HTML, Markdown, display

from inference_wall import (
    card_power,
    headline,
    laid_over,
    laid_over_figures,
    part_5,
    post,
    quantization,
    quantization_figures,
    quantization_words,
    quantized_kernels,
    tables,
    trace_figures,
)

arms = post.open_runs("part_5", rig=rig, mode=mode, base_url=base_url, scale=scale, variants=variants, batches=batches, repeats=repeats, port=port)
found = part_5.look(arms)
numbers = part_5.numbers(arms)
traces = quantization.traced(arms)

# %% [markdown]
# ## Setup
#
# Each variant has a server of its own. Machine, engine and flags are the same; the model folder is not. The table shows
# the first one, which the others are compared with.

# %%
display(HTML(tables.setup_table(arms.first, numbers)))

# %%
display(Markdown(quantization_words.variants_sentence(found)))

# %% [markdown]
# {term}`Quantization <quantization>` takes few words. Take one row of a table of weights, or a piece of it. Find its
# largest weight. Spread the whole numbers that the bits can tell apart over that range, and replace each weight by the
# nearest of them. Keep one more number a row or piece, the *scale*, to turn whole numbers back into weights. The table of
# words at the model's entrance and exit stays as it is.

# %%
display(Markdown(quantization_words.formats_sentence(found)))

# %% [markdown]
# Three loads go to each server:
#
# - **Steps:** {num}`part_5.here.batches` equal streams at once, {num}`part_5.here.steps_output_len` tokens each, and
#   nothing else arrives. That shows what one step takes.
# - **A flood:** {num}`part_5.here.flood_num_prompts` prompts of {num}`part_5.here.flood_input_len` tokens at once, with
#   answers of {num}`part_5.here.flood_output_len`. That shows what a server gives when it also has to read prompts.
# - **A check of the words,** where the weights are real.
#
# ## How many bytes
#
# Two numbers are easily confused. *Loaded* bytes must fit into memory. {term}`Streamed bytes <streamed bytes>` are moved
# in every step. A table in which a step looks up a few rows is loaded and hardly streamed. Whether that is a large
# difference depends on the model: in some, the same table is also the output layer, and then it is streamed after all.

# %%
display(HTML(quantization_words.bytes_table(found)))

# %%
display(quantization_figures.bytes_bars(found.rows))

# %%
display(Markdown(quantization_words.width_sentence(found)))

# %% [markdown]
# ## The bound, before we measure

# %%
display(Markdown(quantization_words.floor_sentence(found)))

# %% [markdown]
# The step time of a batch is not one number. The simplest model of it is a line:
#
# > step time = fixed term + batch × slope
#
# The fixed term is what all share, above all the stream of weights. The slope is what each sequence adds. Fewer bits in
# the weights should shrink the fixed term. They have no hold on the slope as far as that is made of a sequence's own
# notes, which keep their format. Whether the steps lie on a line has to be seen first.
#
# Three rules compete for the fixed term: it could follow the streamed bytes, the loaded bytes, or the number of
# parameters.

# %%
display(Markdown(quantization_words.bound_sentence(found)))

# %% [markdown]
# There is a reason to doubt all of them. A step waits for whichever takes longest: for bytes, or for arithmetic. A GPU has
# hundreds of operations to spend on each byte that it moves, so a small batch waits for bytes. A processor has few, and
# with one thread fewer still. There, arithmetic may be the limit, and bytes that nobody waits for cost nothing.
#
# That also spoils the test. A format that multiplies whole numbers of 8 bits makes the arithmetic cheaper, perhaps by
# about the factor by which it shrinks the bytes. Then a ratio just as the bytes predict it proves nothing. It counts as
# proof only if the unquantized step really waits for its bytes, that is, if it uses most of the bandwidth.
#
# ## What ran
#
# A format is only as fast as the {term}`kernel` that multiplies by it. Some engines unpack the weights first and then do
# what they always did; that saves memory and no time. So before any speed: did the quantized weights run as such? The
# server's log names the kernel that it chose, and a trace names the operator that took the time.

# %%
display(HTML(quantized_kernels.kernels_table(found)))

# %%
display(Markdown(quantized_kernels.kernel_sentence(found)))

# %% [markdown]
# ## The steps

# %%
display(quantization_figures.step_lines(found.rows, found.steps, found.fits))

# %%
display(Markdown(quantization_words.line_sentence(found)))

# %%
display(HTML(quantization_words.steps_table(found)))

# %%
display(Markdown(quantization_words.same_sentence(found)))

# %%
for arm, run in arms.testable.items():
    text = card_power.sentence(card_power.by_load(run, card_power.steps_and_floods), run)
    if text:
        display(Markdown(f"`{arm}`: {text}"))

# %% [markdown]
# ## Bytes, or parameters?
#
# Now the predictions from above, and what came out.

# %%
display(quantization_figures.ratios(found.pairs, part_5.published_pairs()))

# %%
display(Markdown(quantization_words.thesis_sentence(found)))

# %%
display(Markdown(quantization_words.bandwidth_sentence(found)))

# %%
speeds = quantized_kernels.speeds(found.rows, traces)
display(HTML(quantized_kernels.table(speeds)))
display(Markdown(quantized_kernels.sentence(speeds, found.rows)))

# %% [markdown]
# ## The flood
#
# A step of pure {term}`decode` is not yet a service. A server also reads prompts, and reading is arithmetic: each prompt
# token passes through every parameter, whatever its format. So a bigger model pays for its size again, at a place where
# bytes do not help.

# %%
display(quantization_figures.throughput(found.rows, found.steps, found.fits))

# %%
display(Markdown(quantization_words.bigger_sentence(found)))

# %%
display(Markdown(quantization_words.room_sentence(found)))

# %% [markdown]
# ## What the words lose

# %%
display(Markdown(quantization_words.quality_intro(found)))

# %%
display(HTML(quantization_words.quality_table(found)))

# %%
display(Markdown(quantization_words.quality_sentence(found)))

# %%
display(Markdown(quantization_words.quality_limits(found)))

# %% [markdown]
# ## One step, from inside
#
# The profiler slows the engine down, and not evenly. From a trace we read names and shares, never a latency. On a card it
# stretches the launching of kernels and leaves the kernels as long as they are: their own times may be read, as above.

# %%
for path in traces.values():
    if path is not None:
        display(trace_figures.step_strip(path))
        break

# %%
for arm, path in traces.items():
    if path is not None:
        display(Markdown(f"Where the time of a step goes, variant `{arm}`:"))
        display(trace_figures.operator_bars(path))

# %%
display(Markdown(quantization_words.trace_words(found)))

# %% [markdown]
# Fewer bits act on one family of operators, the multiplication by weights. The larger the share of the others, the less
# there is to gain. A format may also add work, such as rounding the inputs.
#
# ## The published A10G beside it
#
# {bdg-warning-line}`published by the author, not re-measured here`
#
# The author served a 4B model with 16-bit weights, and a 9B model with 4-bit weights made by a method called AWQ. The
# second has {num}`published.a10g.awq_parameter_ratio:.2f` times the parameters, loads
# {num}`published.a10g.awq_loaded_ratio:.2f` times the bytes, and gave {num}`published.a10g.awq_flood_percent:.0f` percent
# of the tokens a second in a flood. (An early page of the series says {num}`published.a10g.awq_stated_share:.0%`; the
# logs and the later text say {num}`published.a10g.awq_flood_percent:.0f` percent.) The series explains the loss by the
# loaded bytes: one over {num}`published.a10g.awq_loaded_ratio:.2f` is {num}`published.a10g.awq_share_by_bytes:.0%`, which
# is close.
#
# Close, and by its own numbers not the reason. Loaded bytes would have to show in the fixed term, where the weights are.
# The published fixed terms are {num}`published.a10g.fp16_fixed_ms:.1f unit` and
# {num}`published.a10g.awq_fixed_ms:.1f unit`: a ratio of **{num}`published.a10g.awq_fixed_ratio:.2f`**, not of
# {num}`published.a10g.awq_loaded_ratio:.2f`.
#
# Streamed bytes would explain it, if only the largest matrices of each layer of the 9B have 4 bits. That is an assumption
# of ours, not something that the author printed. From the shape of the 4B, a step of it streams
# {num}`published.a10g.fp16_streamed_gb:.2f unit`. By the assumption, the 9B's text part loads
# {num}`published.a10g.awq_text_gib:.1f unit` of the {num}`published.a10g.awq_loaded_gib:.2f unit` that the log prints (the
# rest would be the part that sees images, which this server never runs), and a step streams
# {num}`published.a10g.awq_streamed_gb:.2f unit`. The ratio would be {num}`published.a10g.awq_streamed_ratio:.2f`. The
# difference to the loaded bytes would be mostly the 9B's table of words, which is looked up and not streamed. Both models
# would then have run at over {num}`published.a10g.fp16_of_bandwidth_percent:.0f` percent of the bandwidth that the author
# measured.
#
# Whatever the reason, the shared part of a step is nearly equal in the published fits, and the lost
# {num}`published.a10g.awq_lost_percent:.0f` percent must come from elsewhere: each sequence costs
# {num}`published.a10g.awq_slope_ratio:.2f` times as much, prompts are read by a larger model, and the cache seats fewer
# requests ({num}`published.a10g.awq_full_requests:.0f` of full length against
# {num}`published.a10g.fp16_full_requests:.0f`). The published figures do not tell these three apart.

# %%
display(quantization_figures.relative(found.rows, found.fits, part_5.published_frame()))

# %% [markdown]
# To the left the batch is small and the fixed terms decide; to the right the slopes do. The stars are floods, drawn at the
# right edge whatever their batch. A star lies off the end of its line where its batch was another, and where something that
# is not decode took part: the reading of prompts, or the number of seats.

# %%
display(Markdown(quantization_words.relative_sentence(found)))

# %% [markdown]
# ## All rigs, laid over one another
#
# On the diagonal a step takes as long as its bytes: there fewer bits pay in full. Above it something else holds a step up. Every
# {term}`rig` that has records of this part is drawn, each variant over the unquantized one of its own rig.

# %%
display(laid_over_figures.draw(laid_over.part_5(laid_over.beside(arms))))

# %% [markdown]
# ## What to take away
#
# - **Count what a step streams, not what a server loads.** A table that is looked up costs memory and no time.
# - **A format is a kernel.** Ask the log and the trace which one ran, before you believe a speed.
# - **Fewer bytes help where bytes are what a step waits for.** Divide streamed bytes by the time of a small step. If that
#   is near the machine's bandwidth, they are. If it is far below, look elsewhere first: a format may still be faster, by
#   its arithmetic.
# - **Fewer weight bits do not shrink a sequence's own notes.** Where arithmetic makes the slope, a format can change it
#   either way: look at the measured ratio.
# - **A bigger model pays again when it reads prompts,** and it may seat fewer requests.
# - **Look at the words.** A speed without a check of the words is half a result.
#
# ## What this page does not show
#
# One machine, {num}`part_5.here.repeats` repeat(s). {num}`part_5.here.invalid_points` of {num}`part_5.here.points` points
# failed a validity check; the [provenance page](../pages/provenance.md) lists each check.

# %%
display(Markdown(quantization_words.limits_sentence(found)))

# %% [markdown]
# ## Reproduce

# %%
display(Markdown(headline.reproduce(arms)))
