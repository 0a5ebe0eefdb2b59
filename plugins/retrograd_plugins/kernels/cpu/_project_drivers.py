"""The parallel loops of several products of one input, with their adapters.

All memory is given by address; `plan` and `jobs` hold addresses and sizes, in the order of `Sizes` and `Job`
of `_project`. The functions are those of `_gemm_kernels`; `copy` is the decoder of F32. Each driver has two
parallel regions: over blocks of tokens, what depends on a token alone; then over panels of results.

Every element is one sum in a fixed order, whatever the blocks and threads.
"""

from __future__ import annotations

from typing import Any

from numba import njit, prange

from ._project_parts import (
    BLOCK_BYTES,
    BLOCK_VALUES,
    DA,
    DATA,
    DB,
    DECODE,
    HIDDEN,
    JOB_ROWS,
    LEFT,
    LEFT_STRIDE,
    LOW,
    LOW_STRIDE,
    OUT,
    PACKED,
    PACKED_STRIDE,
    RANK,
    ROW_BYTES,
    STEP,
    TASKS,
    TURNED,
    TURNED_HIDDEN,
    A,
    B,
    convert_blocks,
    convert_turned,
    job_of,
    pack_factors,
    pack_floats_as_columns,
    pack_floats_as_rows,
    scale_floats,
    unpack_panel,
)
from ._simd_memory import call, peek, poke, take_ticket


@njit(nogil=True, cache=True, parallel=True)
def project_parallel(
    convert: Any, pack: Any, multiply: Any, copy: Any, plan: Any, jobs: Any, scales: Any, counter: Any
) -> None:
    """out = x · Wᵀ + scale · hidden · bᵀ and hidden = x · aᵀ for each job; one without data adds to out."""
    tokens, columns, width, per_float, a_step = plan[0], plan[1], plan[2], plan[3], plan[4]
    token_block, block, panel, chunk, depth = plan[5], plan[6], plan[7], plan[8], plan[9]
    threads, x, sub_stride, scratch, thread_bytes = plan[10], plan[11], plan[13], plan[16], plan[17]
    panel_at, spare_at, piece, a, a_stride = plan[18], plan[19], plan[21], plan[22], plan[23]
    low_at, low_sub, ranks, factors, factors_stride = plan[24], plan[25], plan[26], plan[27], plan[28]
    total = 0
    for j in range(jobs.shape[0]):
        total += jobs[j, TASKS]
    if ranks:
        pack_factors(
            copy, pack, jobs, ranks, columns, width, per_float, factors, factors_stride, scratch, piece
        )
    counter[0] = 0
    for thread in prange(threads):
        spare = scratch + thread * thread_bytes
        t = take_ticket(counter) * block
        while t < tokens:
            count = min(block, tokens - t)
            left = a + 4 * t * a_stride
            convert_blocks(convert, x + 4 * t * columns, columns, count, columns, left, a_stride, token_block)
            if ranks:
                # The rows of all a are the columns of one product.
                found, scaled = spare + panel_at, spare + panel_at + 4 * block * ranks
                edge = spare + spare_at
                call(
                    multiply,
                    left,
                    a_stride,
                    factors,
                    factors_stride,
                    found,
                    ranks,
                    count,
                    ranks,
                    columns,
                    0,
                    edge,
                    0,
                    0,
                    0,
                    0,
                    0,
                )
                for j in range(jobs.shape[0]):
                    rank = jobs[j, RANK]
                    if rank:
                        hidden = jobs[j, HIDDEN] + 4 * t * rank
                        for i in range(count):
                            for r in range(rank):
                                value = peek(found + 4 * (i * ranks + r))
                                poke(hidden + 4 * (i * rank + r), value)
                                poke(scaled + 4 * (i * rank + r), scales[j] * value)
                        low, low_stride = jobs[j, LOW], jobs[j, LOW_STRIDE]
                        target = low + 4 * t * low_stride
                        convert_blocks(convert, scaled, rank, count, rank, target, low_stride, token_block)
                        found += 4 * rank
            t = take_ticket(counter) * block
    counter[0] = 0
    for thread in prange(threads):
        spare = scratch + thread * thread_bytes
        packed, edge = spare + panel_at, spare + spare_at
        task = take_ticket(counter)
        while task < total:
            j, number = job_of(jobs, task)
            rows, rank = jobs[j, JOB_ROWS], jobs[j, RANK]
            panels = (rows + panel - 1) // panel
            n0, t0 = number % panels * panel, number // panels * chunk
            n_count, t_count = min(panel, rows - n0), min(chunk, tokens - t0)
            out = jobs[j, OUT] + 4 * (t0 * rows + n0)
            low, low_stride, low_packed = 0, 0, 0
            if rank:
                low, low_stride, low_packed = jobs[j, LOW], jobs[j, LOW_STRIDE], spare + low_at
                low += 4 * t0 * low_stride
                source = jobs[j, B] + 4 * n0 * rank
                pack_floats_as_columns(
                    copy, pack, source, n_count, rank, width, per_float, low_packed, low_sub, spare, piece
                )
            if jobs[j, DATA]:
                for k0 in range(0, columns, depth):
                    k_count = min(depth, columns - k0)
                    unpack_panel(pack, plan, jobs, j, n0, n_count, k0, k_count, packed, spare)
                    call(
                        multiply,
                        a + 4 * (t0 * a_stride + k0 * a_step // 2),
                        a_stride,
                        packed,
                        sub_stride,
                        out,
                        rows,
                        t_count,
                        n_count,
                        k_count,
                        1 if k0 > 0 else 0,
                        edge,
                        low,
                        low_stride,
                        low_packed,
                        low_sub,
                        rank if k0 + depth >= columns else 0,
                    )
            else:
                call(
                    multiply,
                    low,
                    low_stride,
                    low_packed,
                    low_sub,
                    out,
                    rows,
                    t_count,
                    n_count,
                    rank,
                    1,
                    edge,
                    0,
                    0,
                    0,
                    0,
                    0,
                )
            task = take_ticket(counter)


@njit(nogil=True, cache=True, parallel=True)
def project_backward_parallel(
    convert: Any, pack: Any, multiply: Any, copy: Any, plan: Any, jobs: Any, scales: Any, counter: Any
) -> None:
    """dx = or += the sum of dout · W + scale · dout · b · a; adds to da and db, of each job."""
    tokens, columns, width, per_float, a_step = plan[0], plan[1], plan[2], plan[3], plan[4]
    token_block, block, panel, chunk, depth = plan[5], plan[6], plan[7], plan[8], plan[9]
    threads, x, dx, sub_stride, accumulate = plan[10], plan[11], plan[12], plan[13], plan[14]
    turned_stride, scratch, thread_bytes = plan[15], plan[16], plan[17]
    panel_at, spare_at, result_at, low_at, low_sub = plan[18], plan[19], plan[20], plan[24], plan[25]
    panels = (columns + panel - 1) // panel
    dx_tasks = panels * ((tokens + chunk - 1) // chunk)
    adapted = 0
    db_tasks = 0
    for j in range(jobs.shape[0]):
        rank = jobs[j, RANK]
        if rank:
            adapted = 1
            db_tasks += jobs[j, TASKS]
            pack_floats_as_rows(
                copy,
                pack,
                jobs[j, B],
                rank,
                jobs[j, JOB_ROWS],
                rank,
                width,
                per_float,
                jobs[j, PACKED],
                jobs[j, PACKED_STRIDE],
                scratch,
            )
    counter[0] = 0
    for thread in prange(threads):
        spare = scratch + thread * thread_bytes
        edge = spare + spare_at
        t = take_ticket(counter) * block
        while t < tokens:
            count = min(block, tokens - t)
            for j in range(jobs.shape[0]):
                rows, rank, stride = jobs[j, JOB_ROWS], jobs[j, RANK], jobs[j, LEFT_STRIDE]
                dout, left = jobs[j, OUT] + 4 * t * rows, jobs[j, LEFT] + 4 * t * stride
                convert_blocks(convert, dout, rows, count, rows, left, stride, token_block)
                if rank:
                    hidden = spare + panel_at
                    call(
                        multiply,
                        left,
                        stride,
                        jobs[j, PACKED],
                        jobs[j, PACKED_STRIDE],
                        hidden,
                        rank,
                        count,
                        rank,
                        rows,
                        0,
                        edge,
                        0,
                        0,
                        0,
                        0,
                        0,
                    )
                    scale_floats(hidden, hidden, count * rank, scales[j])
                    low, low_stride = jobs[j, LOW], jobs[j, LOW_STRIDE]
                    target = low + 4 * t * low_stride
                    convert_blocks(convert, hidden, rank, count, rank, target, low_stride, token_block)
                    convert_turned(
                        convert,
                        hidden,
                        count,
                        rank,
                        jobs[j, TURNED],
                        turned_stride,
                        a_step,
                        t,
                        token_block,
                        spare,
                    )
                    scale_floats(jobs[j, HIDDEN] + 4 * t * rank, hidden, count * rank, scales[j])
                    convert_turned(
                        convert,
                        hidden,
                        count,
                        rank,
                        jobs[j, TURNED_HIDDEN],
                        turned_stride,
                        a_step,
                        t,
                        token_block,
                        spare,
                    )
            t = take_ticket(counter) * block
    counter[0] = 0
    total = dx_tasks + adapted * panels + db_tasks
    for thread in prange(threads):
        spare = scratch + thread * thread_bytes
        packed, edge, result = spare + panel_at, spare + spare_at, spare + result_at
        task = take_ticket(counter)
        while task < total:
            if task < dx_tasks:
                k0, t0 = task % panels * panel, task // panels * chunk
                k_count, t_count = min(panel, columns - k0), min(chunk, tokens - t0)
                out = dx + 4 * (t0 * columns + k0)
                add = accumulate
                for j in range(jobs.shape[0]):
                    stride, rank, job_rows = jobs[j, LEFT_STRIDE], jobs[j, RANK], jobs[j, JOB_ROWS]
                    low, low_stride, low_packed = 0, 0, 0
                    if rank:
                        low, low_stride, low_packed = jobs[j, LOW], jobs[j, LOW_STRIDE], spare + low_at
                        low += 4 * t0 * low_stride
                        source = jobs[j, A] + 4 * k0
                        pack_floats_as_rows(
                            copy,
                            pack,
                            source,
                            columns,
                            rank,
                            k_count,
                            width,
                            per_float,
                            low_packed,
                            low_sub,
                            spare,
                        )
                    for n0 in range(0, job_rows, depth):
                        n_count = min(depth, job_rows - n0)
                        place = (
                            jobs[j, DATA]
                            + n0 * jobs[j, ROW_BYTES]
                            + k0 // jobs[j, BLOCK_VALUES] * jobs[j, BLOCK_BYTES]
                        )
                        for p in range(0, n_count, STEP):
                            steps = min(STEP, n_count - p)
                            blocks = k_count // jobs[j, BLOCK_VALUES]
                            source = place + p * jobs[j, ROW_BYTES]
                            call(jobs[j, DECODE], source, jobs[j, ROW_BYTES], steps, blocks, spare, panel)
                            target = packed + 4 * (p * width // per_float)
                            call(pack, spare, panel, steps, k_count, target, sub_stride)
                        left = jobs[j, LEFT] + 4 * (t0 * stride + n0 * a_step // 2)
                        call(
                            multiply,
                            left,
                            stride,
                            packed,
                            sub_stride,
                            out,
                            columns,
                            t_count,
                            k_count,
                            n_count,
                            add,
                            edge,
                            low,
                            low_stride,
                            low_packed,
                            low_sub,
                            rank if n0 + depth >= job_rows else 0,
                        )
                        add = 1
            elif task < dx_tasks + adapted * panels:
                k0 = (task - dx_tasks) * panel
                k_count = min(panel, columns - k0)
                for t0 in range(0, tokens, depth):
                    t_count = min(depth, tokens - t0)
                    source = x + 4 * (t0 * columns + k0)
                    pack_floats_as_rows(
                        copy,
                        pack,
                        source,
                        columns,
                        t_count,
                        k_count,
                        width,
                        per_float,
                        packed,
                        sub_stride,
                        spare,
                    )
                    for j in range(jobs.shape[0]):
                        if jobs[j, RANK]:
                            left = jobs[j, TURNED] + 4 * (t0 * a_step // 2)
                            call(
                                multiply,
                                left,
                                turned_stride,
                                packed,
                                sub_stride,
                                jobs[j, DA] + 4 * k0,
                                columns,
                                jobs[j, RANK],
                                k_count,
                                t_count,
                                1,
                                edge,
                                0,
                                0,
                                0,
                                0,
                                0,
                            )
            else:
                j, number = job_of(jobs, task - dx_tasks - adapted * panels)
                rows, rank, n0 = jobs[j, JOB_ROWS], jobs[j, RANK], number * panel
                n_count = min(panel, rows - n0)
                for t0 in range(0, tokens, depth):
                    t_count = min(depth, tokens - t0)
                    source = jobs[j, OUT] + 4 * (t0 * rows + n0)
                    pack_floats_as_rows(
                        copy,
                        pack,
                        source,
                        rows,
                        t_count,
                        n_count,
                        width,
                        per_float,
                        packed,
                        sub_stride,
                        spare,
                    )
                    left = jobs[j, TURNED_HIDDEN] + 4 * (t0 * a_step // 2)
                    call(
                        multiply,
                        left,
                        turned_stride,
                        packed,
                        sub_stride,
                        result,
                        panel,
                        rank,
                        n_count,
                        t_count,
                        1 if t0 > 0 else 0,
                        edge,
                        0,
                        0,
                        0,
                        0,
                        0,
                    )
                for n in range(n_count):
                    place = jobs[j, DB] + 4 * (n0 + n) * rank
                    for i in range(rank):
                        total_so_far = peek(place + 4 * i)
                        poke(place + 4 * i, total_so_far + peek(result + 4 * (i * panel + n)))
            task = take_ticket(counter)
