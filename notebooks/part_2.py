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
# # Part 2: The prefill freeze
#
# Your answer is streaming, a word at a time. Then somebody else pastes a whole document into the same server, and your
# text stops. After a moment it goes on as if nothing had been.
# **How long does a long prompt stop everybody else, what does chunked prefill do about it, and who pays for that?**
#
# We let a few short answers stream, throw long prompts among them, and look at every single pause.

# %% tags=["parameters"]
rig = "auto"  # the machine and model; see experiments/rigs
mode = "recorded"  # or "live": start servers, measure, then read the records
base_url = ""  # a server that already runs
scale = 1.0  # multiplies the number of injections
budgets = ""  # tokens of a step with chunked prefill, such as "2048,512,128"; empty: those of the rig
victims = ""  # how many short streams
injected_len = ""  # tokens of a long prompt
rounds = ""  # injections
port = ""

# %%
from IPython.display import HTML, Markdown, display

from inference_wall import (
    freeze,
    freeze_figures,
    freeze_floor,
    freeze_tables,
    freeze_words,
    headline,
    laid_over,
    laid_over_figures,
    launch_bound,
    part_1,
    part_2,
    post,
    tables,
    trace,
    trace_figures,
)
from inference_wall.widgets import dial

arms = post.open_runs("part_2", rig=rig, mode=mode, base_url=base_url, scale=scale, budgets=budgets, victims=victims, injected_len=injected_len,
                      rounds=rounds, port=port)
cases = freeze.read(arms)
numbers = part_2.numbers(arms, cases)
loads = {load: load for _, load in cases}


def per_load(draw):
    """The same figure for each load, behind one control."""
    dial({load: draw(cases, load) for load in loads or ["light"]}, "Load", value="light" if "light" in loads else None)


# %% [markdown]
# ## Setup
#
# One model and several servers. They differ in how much of a prompt one {term}`step` may read. The first table shows what
# they have in common, read from the first of them.

# %%
display(HTML(tables.setup_table(arms.first, numbers)))
display(Markdown(part_1.weights_sentence(arms.first)))

# %% [markdown]
# With {term}`chunked prefill` on, a step takes at most a fixed number of tokens, the {term}`step budget`. Running answers
# take one token each of it, and what is left is filled with a piece of a waiting prompt. We try several budgets. In
# the last arm chunking is off: a prompt is read whole, in one step, or waits. A budget above the length of all that waits cuts
# nothing: the flag may be on, and the prompt is still read whole.
#
# A flag that was asked for is not yet a flag that took effect. So the next table puts beside it what each server said in
# its own log.

# %%
display(HTML(freeze_tables.settings_table(arms)))
display(Markdown(freeze_words.arms_sentence(arms, cases)))

# %% [markdown]
# The load has two kinds of request.
#
# - **Victims:** {num}`part_2.here.victims` streams, each looping a short request of {num}`part_2.here.victim_input_len`
#   prompt tokens and {num}`part_2.here.victim_output_len` answer tokens. They are the people who were already reading.
# - **Injected prompts:** we asked for {num}`part_2.here.asked_prompt_tokens:,` tokens, and the server counted
#   {num}`part_2.here.prompt_tokens:,`. The *light* load injects {num}`part_2.here.light_copies` at once,
#   {num}`part_2.here.light_rounds` times; the *heavy* load {num}`part_2.here.heavy_copies` at once,
#   {num}`part_2.here.heavy_rounds` times. Each writes {num}`part_2.here.injected_output_len` tokens of answer. After each
#   injection the victims have time to become calm again.
#
# ## What counts, and where
#
# The pause from one token of a victim to its next is a *gap*, one {term}`ITL`. The wait for a first token is
# {term}`TTFT` and never a gap. Each gap gets one place, by a rule that was fixed before we looked:
#
# - It is in the **window** of an injection when its later token came after the injection was sent, and its earlier token
#   before the last injected prompt had its first token. Long prompts were being read.
# - It is in the **tail** when it began after that, but before the last injected answer ended. Window and tail together we
#   call *to the end*. The published window is nearly that wider stretch: all tokens that came between the injection and the end
#   of the last injected answer.
# - It is **calm** otherwise.
#
# A token is **hurt** when its gap is longer than {num}`part_2.here.hurt_times:.0f` times the calm median.
#
# ## What we expect, before we look at the stalls
#
# A step ends for everybody at the same moment. If a piece of a prompt is in it, the victims' next tokens wait until that
# piece has been read. So a step with k prompt tokens should take about
#
# > **an ordinary step + k × the cost of a prompt token.**
#
# What does a prompt token cost? Ask those who wait for it, but ask them on *one* server, and predict the *others*. Where a prompt
# fits into one step, its own wait and the victims' stall are the same moment twice, and a forecast from it would agree with
# itself. So we read the cost where the pieces are smallest, and never use it to judge a step of that size.

# %%
display(Markdown(freeze_words.expectation_sentence(cases)))

# %% [markdown]
# Where several prompts fit into one step, we expect more. With chunking the same sum, with the piece in place of the prompt, gives
# the stall of each piece. But then there are as many pieces as it takes. If nothing else happens, chunking moves the
# work and does not remove any. One thing is left out: what a step that reads costs however little it reads. If that is much, the
# sum takes it for a price of tokens, and expects too much of large steps. We shall look.
#
# ## One victim, token by token

# %%
per_load(freeze_figures.token_beats)

# %% [markdown]
# Each line climbs by one whenever the victim gets a token. A steady slope is calm. A flat piece is a stall: the reader
# stares at an unfinished sentence. The bar at the foot shows how long the long prompts were being read.
# Where a prompt is read whole, expect a long flat piece for each step that reads; where it is cut up, a staircase of shorter ones.
#
# ## The worst stall

# %%
display(Markdown(freeze_words.stall_sentence(arms, cases)))
display(HTML(freeze_tables.bound_table(cases)))

# %% [markdown]
# "Same step, no test" marks the rows whose fullest step is as large as the one that the cost was read from. The other rows are a test.
# "Worst stall of a round" is the median over the injections.

# %%
display(Markdown(freeze_words.division_sentence(cases)))

# %% [markdown]
# A ratio above one says that a step costs more than its prompt tokens and an ordinary step. For the last piece of a prompt, its tokens
# are one candidate: they look back at all that came before. For a whole prompt they are not, because the cost is already an
# average over one. A ratio below one says that large steps are cheaper than the small ones made us think. The row's range over the
# injections says how far to believe a difference.

# %%
display(Markdown(freeze_floor.floor_sentence(cases)))

# %% [markdown]
# ## The price

# %%
display(Markdown(freeze_words.trade_sentence(arms, cases)))
display(HTML(freeze_tables.trade_table(cases)))

# %% [markdown]
# No single column tells the story. The *worst* gap is what a user remembers. The *median* while the injection lasts says how the
# ordinary token fared. The *tokens hurt* say how many were touched at all. The *time lost* adds up what one victim was held back in
# the window of one injection: every gap beyond the calm median, and every wait for a first token beyond the calm median wait,
# divided over all victims. (Point at a cell to see the two parts.)
#
# The waits belong to it. A victim that asks anew during the freeze stands behind the long prompts. It has no gap then, so the
# worst stall, the medians and the tokens hurt do not know of it, although it may have lost the most of all.

# %%
display(Markdown(freeze_words.wait_sentence(cases)))

# %%
per_load(freeze_figures.gap_percentiles)

# %% [markdown]
# The buttons choose the population. The scale is stretched to the right, so that the step from p90 to p99 takes as much room as the
# one from p0 to p90. A percentile appears only where enough gaps stand behind it; the cross is the longest gap.
#
# ## The same stall in two populations
#
# A percentile belongs to the set of samples it was taken from. Here is one stall, first among the gaps of its own
# window, then among all gaps of the test.

# %%
display(Markdown(freeze_words.population_sentence(cases)))
trap = part_2.trap_case(cases)
if trap is not None:
    display(freeze_figures.population_trap(trap))

# %% [markdown]
# From left to right nothing more happens on the server. We only count more of the calm tokens around the injections, as a longer
# test would. A curve that falls to the calm level on the way has forgotten the stall. So a p99 over all tokens says as much about
# *how long somebody watched* as about the stall. Ask of every p99: of which tokens?
#
# ## The budget as a dial

# %%
per_load(freeze_figures.budget_dial)

# %%
display(Markdown(freeze_words.dial_sentence(cases)))
display(Markdown(freeze_words.cost_sentence(cases)))

# %% [markdown]
# Turn the dial down far enough and each step is mostly what a step costs anyway: there is less and less to gain, and the prompt
# needs more and more steps. So whoever sent it should wait longer.

# %%
display(Markdown(freeze_words.payer_sentence(cases)))

# %% [markdown]
# ## Inside the steps
#
# The profiler of the engine shows the steps themselves. It slows the engine's process down, so no step of this section is held
# against a measured stall. On a card it leaves the kernels as long as they are: the card's own busy time may be compared.

# %%
found_traces = freeze_floor.traces(arms)
for arm, path in found_traces:
    display(Markdown(f"**Arm `{arm}`.** {trace.words(path)}"))
    display(trace_figures.step_strip(path))
    display(Markdown(launch_bound.sentence(path)))
if found_traces:
    display(Markdown(freeze_floor.inside_sentence(cases, found_traces)))
    display(trace_figures.operator_bars(found_traces[0][1]))
else:
    display(Markdown("No trace was taken with these records."))

# %% [markdown]
# Steps are read from the engine's own marks, which say how many prompt tokens and how many running answers were in each.
# They are not guessed from pauses: within a step that reads a prompt, the layers themselves lie far apart.
#
# ## The published A10G beside it
#
# {bdg-warning-line}`published by the author, not re-measured here`
#
# The author let {num}`published.a10g.freeze_victims` victims stream on an A10G and injected
# {num}`published.a10g.freeze_light_copies` long prompts (light) or {num}`published.a10g.freeze_heavy_copies` (heavy). The
# times are another machine's. So the figure divides each gap by the calm median of its own machine.

# %%
dial({load: freeze_figures.beside_published(cases, part_2.published_rows(), load) for load in ("heavy", "light")}, "Load")

# %%
display(Markdown(freeze_words.verdict_sentence(arms, cases)))

# %% [markdown]
# On the A10G, heavy load, the longest gap without chunking was {num}`published.a10g.off_heavy_all_max_ms:.0f unit`, and with
# it {num}`published.a10g.on_heavy_all_max_ms:.0f unit`. Over both runs the ratio is
# **{num}`published.a10g.freeze_ratio:.1f`**. That is a fact about one prompt and one budget: a step of
# {num}`published.a10g.freeze_budget:,` tokens holds {num}`published.a10g.freeze_slice_tokens:,` of the prompt's
# {num}`published.a10g.freeze_prompt_tokens:,`, {num}`published.a10g.freeze_token_ratio:.1f` times fewer. Another length or another
# budget gives another ratio.
#
# The division works on those figures, and trace and client are two measurements. In the author's trace the last piece of a
# prompt, {num}`published.a10g.freeze_last_slice_tokens:,` tokens, took
# {num}`published.a10g.freeze_last_slice_ms:.0f unit`; a step without a prompt took
# {num}`published.a10g.freeze_decode_step_ms:.0f unit`. From these two follow
# {num}`published.a10g.freeze_expected_on_ms:.0f unit` for a full piece and
# {num}`published.a10g.freeze_expected_off_ms:.0f unit` for the whole prompt, to be held against the two longest gaps above.
#
# Some claims of the published page moved once its own files were read closely:
#
# - **"The median does not move."** Over all tokens it does not: {num}`published.a10g.on_heavy_all_p50_ms:.1f` and
#   {num}`published.a10g.off_heavy_all_p50_ms:.1f unit`. In the author's window it is
#   {num}`published.a10g.on_heavy_window_p50_ms:.0f unit` with chunking and
#   {num}`published.a10g.off_heavy_window_p50_ms:.1f unit` without:
#   **{num}`published.a10g.median_in_window_ratio:.1f` times worse with it.** That window lasts until the injected answers end,
#   so its median also depends on how long those answers are. And it holds waits for a first token, which we keep apart.
# - **The trap is real.** At the light load the p99 of all tokens is {num}`published.a10g.on_light_all_p99_ms:.0f unit` with
#   chunking and {num}`published.a10g.off_light_all_p99_ms:.0f unit` without, as if chunking did harm. In the window it is
#   {num}`published.a10g.on_light_window_p99_ms:.0f` against {num}`published.a10g.off_light_window_p99_ms:.0f unit`. (Those
#   windows hold {num}`published.a10g.on_light_window_n` and {num}`published.a10g.off_light_window_n` gaps, fewer than our
#   rule asks for a p99.)
# - **The prompt** of {num}`published.a10g.freeze_claimed_prompt_tokens:,` tokens had
#   {num}`published.a10g.freeze_prompt_tokens:,`, and it was read in {num}`published.a10g.freeze_slices` pieces, not
#   {num}`published.a10g.freeze_claimed_slices`.
# - **"The beat goes on every {num}`published.a10g.freeze_claimed_beat_ms:.0f unit`."** Those beats are layers within one step,
#   cut apart by a rule that takes a pause for the end of a step. The author's own client saw gaps of
#   {num}`published.a10g.on_heavy_all_p99_ms:.0f unit` with chunking on.
# - **"{num}`published.a10g.freeze_claimed_launch_ratio:.0f` times the launches."** One kernel was launched
#   {num}`published.a10g.freeze_tuned_launches:,` times where its siblings needed
#   {num}`published.a10g.freeze_needed_launches`. That is tuning on first use, caught by the profile, and not work for the prompt.
# - **First gaps.** {num}`published.a10g.freeze_first_gaps` gaps of a run are waits for a first token,
#   {num}`published.a10g.freeze_first_gaps_percent:.1f` percent of all, which is more than a p99 leaves out. We keep them apart.
# - **Two runs** agree within {num}`published.a10g.freeze_run_difference_ms:.1f unit`. Two are few to call it stable, and
#   the engine warned that it does not officially support this model without chunking.
#
# ## All rigs, laid over one another
#
# If a stall is a step, it grows with the prompt tokens in that step. So the figure divides those tokens by the length of one long
# prompt, and each worst stall by the calm median gap of its own machine, for every {term}`rig` that has records of this part. How
# steeply a line rises says how dear reading is there, next to a step that only writes.

# %%
display(laid_over_figures.draw(laid_over.part_2(laid_over.beside(arms))))

# %% [markdown]
# ## What to take away

# %%
display(Markdown(freeze_words.takeaways(arms, cases)))

# %% [markdown]
# ## What this page does not show
#
# One length of long prompt, one number of victims, and {num}`part_2.here.light_rounds` and
# {num}`part_2.here.heavy_rounds` injections an arm, less those of points that failed a validity check
# ({num}`part_2.here.invalid_points` of {num}`part_2.here.points` measured points): they are left out of the comparison. The
# [provenance page](../pages/provenance.md) lists each check. The gaps of victims in one step are not independent of one
# another: they wait for the same step. So n counts tokens, and the number of *events* is the number of injections. Whether a
# prompt token costs more late in a long prompt, as attention would have it, is not separated from the fixed part here. And
# nobody compared the words of the answers between the arms.
#
# ## Reproduce

# %%
display(Markdown(headline.reproduce(arms)))
