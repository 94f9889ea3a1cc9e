"""Fills the int32 arrays of a step from what the scheduler chose."""

import numpy as np


def fill(list scheduled, int block_size):
    """One step for [(request, num_tokens), ...]: its arrays, in the order StepArrays takes them, and who reads what.

    A request's tokens from num_computed_tokens on are computed. Its last known one gives logits, unless it has a
    pooler, and so does each prompt token whose successor's log-probability is wanted and not known yet.
    Returns ((input_ids[T], positions[T], slot_mapping[G, T], query_start_loc[B+1], context_lens[B],
    block_tables[G, B, max_blocks], logits_indices[B']), requests[B'], readers[B'], [(pooler, begin, end), ...]);
    a reader is a sampler or (token id, number of alternatives).
    """
    cdef int num_requests = len(scheduled), num_groups = len(scheduled[0][0].block_tables)
    cdef int num_tokens = 0, max_blocks = 1, count, blocks, start, position, t = 0, b, g, i
    cdef list token_ids, block_table, scores, requests = [], readers = [], pooled = []
    for request, count in scheduled:
        num_tokens += count
        blocks = (request.num_computed_tokens + count + block_size - 1) // block_size
        max_blocks = max(max_blocks, blocks)

    shapes = (num_tokens, num_tokens, (num_groups, num_tokens), num_requests + 1, num_requests)
    arrays = tuple(np.empty(shape, np.int32) for shape in shapes)
    tables = np.zeros((num_groups, num_requests, max_blocks), np.int32)
    cdef int[::1] input_ids = arrays[0]
    cdef int[::1] positions = arrays[1]
    cdef int[:, ::1] slot_mapping = arrays[2]
    cdef int[::1] query_start_loc = arrays[3]
    cdef int[::1] context_lens = arrays[4]
    cdef int[:, :, ::1] block_tables = tables
    cdef list logits_indices = []

    query_start_loc[0] = 0
    for b in range(num_requests):
        request, count = scheduled[b]
        start = request.num_computed_tokens
        token_ids = request.token_ids
        blocks = (start + count + block_size - 1) // block_size
        for g in range(num_groups):
            block_table = request.block_tables[g]
            for i in range(blocks):
                block_tables[g, b, i] = block_table[i]
            for i in range(count):
                position = start + i
                slot_mapping[g, t + i] = block_tables[g, b, position // block_size] * block_size + position % block_size
        for position in range(start, start + count):
            input_ids[t] = token_ids[position]
            positions[t] = position
            t += 1
        query_start_loc[b + 1] = t
        context_lens[b] = start + count
        if request.pooler is not None:
            pooled.append((request.pooler, t - count, t))
            continue
        scores = request.prompt_logprobs
        if scores is not None:
            num_best = request.params.prompt_logprobs
            for position in range(
                max(start, <int>len(scores) - 1), min(start + count, <int>request.num_prompt_tokens - 1)
            ):
                logits_indices.append(t - count + position - start)
                requests.append(request)
                readers.append((token_ids[position + 1], num_best))
        if start + count == len(token_ids):
            logits_indices.append(t - 1)
            requests.append(request)
            readers.append(request.sampler)
    return (*arrays, tables, np.array(logits_indices, np.int32)), requests, readers, pooled
