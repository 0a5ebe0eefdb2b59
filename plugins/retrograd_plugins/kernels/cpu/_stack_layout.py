"""Tables that tell the threads of `_stack_tasks` what to do: words (int64) by place.

A pass is a list of phases; a phase is a number of tasks that do not depend on each other. All threads go
through the phases in order.
"""

from __future__ import annotations

# State: one table a pass.
(
    TOKENS,
    RESIDUAL,
    SPANS,
    CONTROL,
    PROGRAM,
    PHASES,
    MEMBERS,
    YIELD,
    SCRATCH,
    SCRATCH_BYTES,
    UNPACK_F32,
    SCORES,
    TASKS,
    ATTEND_TASKS,
    ORDER,
    ROWS_TOGETHER,
    SHARES,
    STATE_WORDS,
) = range(18)
"""TOKENS of the pass and the address of their RESIDUAL stream (T, E); addresses of the tables SPANS, CONTROL,
PROGRAM (its number of PHASES) and MEMBERS; YIELD, a function that lets other threads run; SCRATCH_BYTES of
scratch a thread; UNPACK_F32, the function that multiplies with float32 weights; SCORES, elements for the
scores of a head; TASKS, the table of the ATTEND_TASKS tasks of attention; ORDER, the numbers of tokens by
task; ROWS_TOGETHER, tokens of a task of ROWS; SHARES, into how many the tasks of a phase
are split."""

# Spans: one a token.
CONTEXT_START, CONTEXT_LENGTH, OWN_START, OWN_INDEX, POSITION, SPAN_WORDS = range(6)
"""The rows of keys that a token sees: the context, and from OWN_START to its own, OWN_INDEX after that."""

# Tasks of attention.
TASK_FIRST, TASK_TOKENS, TASK_HEAD, TASK_HEAD_STOP, TASK_WORDS = range(5)
"""TASK_TOKENS tokens with one context, from TASK_FIRST of ORDER on, and a range of heads."""

# Control: for each phase a counter of finished tasks and a ticket counter for each share, a cache line each.
LINE_BYTES = 64

# Phases.
OP = 0
ROWS, PRODUCT, ROTATE, ATTEND = range(4)
PHASE_WORDS = 24

# ROWS: for some tokens, residual += (norm of) an earlier product; norm; rounding; x·Aᵀ of adapters.
(
    ROWS_SOURCE,
    ROWS_WIDTH,
    ROWS_DELTA,
    ROWS_DELTA_NORM,
    ROWS_NORM,
    ROWS_NORMED,
    ROWS_EPSILON,
    ROWS_FIRST_MEMBER,
    ROWS_MEMBERS,
    ROWS_CONVERSIONS,
    ROWS_CONVERSION,
) = range(1, 12)
"""ROWS_SOURCE 0 is the residual stream. ROWS_DELTA, ROWS_DELTA_NORM and ROWS_NORM are 0 where there is none.
From ROWS_CONVERSION on: pairs of a bias, or FLOAT_RECORDS, and the address of the records."""
FLOAT_RECORDS = -1
MOST_CONVERSIONS = 6

# PRODUCT: outputs of one to three projections of an input, in groups of 16 rows.
PRODUCT_FIRST_MEMBER, PRODUCT_MEMBERS, PRODUCT_GATE, PRODUCT_GROUPS, PRODUCT_TASK_GROUPS = range(1, 6)
"""PRODUCT_GATE is 0, or 1 + the kind of gated activation of two projections (see `_math_gated`), whose
product is then the output of the first."""

# ROTATE: norms and rotation of queries and keys of a token; its keys and values to the cache.
(
    ROTATE_Q,
    ROTATE_K,
    ROTATE_V,
    ROTATE_HEADS,
    ROTATE_KV_HEADS,
    ROTATE_SIZE,
    ROTATE_COS,
    ROTATE_SIN,
    ROTATE_HALF,
    ROTATE_INTERLEAVED,
    ROTATE_Q_NORM,
    ROTATE_K_NORM,
    ROTATE_EPSILON,
    ROTATE_KEYS,
    ROTATE_VALUES,
    ROTATE_NARROW,
) = range(1, 17)
"""ROTATE_NARROW is 1 for a cache of float16."""

# ATTEND: the queries of a token over the cache.
(
    ATTEND_Q,
    ATTEND_OUT,
    ATTEND_HEADS,
    ATTEND_KV_HEADS,
    ATTEND_SIZE,
    ATTEND_KEYS,
    ATTEND_VALUES,
    ATTEND_NARROW,
    ATTEND_ROWS,
    ATTEND_WINDOW,
    ATTEND_SCALE,
    ATTEND_SOFTCAP,
) = range(1, 13)
"""ATTEND_ROWS is the number of rows of the cache."""

# Members: one a projection.
(
    UNPACK,
    DATA,
    ROW_BYTES,
    BLOCKS,
    OUTPUTS,
    RECORDS,
    ADAPTER_A,
    ADAPTER_B,
    RANK,
    ADAPTER_SCALE,
    HIDDEN,
    BIAS,
    OUT,
    FIRST_GROUP,
    MEMBER_WORDS,
) = range(15)
