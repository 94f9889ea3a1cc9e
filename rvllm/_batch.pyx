"""Fills the int32 arrays of a step from what the scheduler chose."""

import numpy as np


def fill(list scheduled, int block_size):
    """Arrays of one step for [(request, num_tokens), ...], in the order StepArrays takes them.

    A request's tokens from num_computed_tokens on are computed; its last one gives logits when it is the last known.
    Returns (input_ids[T], positions[T], slot_mapping[T], query_start_loc[B+1], context_lens[B],
    block_tables[B, max_blocks], logits_indices[B'], indices of the requests that sample).
    """
    cdef int num_requests = len(scheduled)
    cdef int num_tokens = 0, max_blocks = 1, count, blocks, start, position, t = 0, b, i
    cdef list token_ids, block_table, sampling = []
    for request, count in scheduled:
        num_tokens += count
        blocks = (request.num_computed_tokens + count + block_size - 1) // block_size
        max_blocks = max(max_blocks, blocks)

    arrays = tuple(np.empty(n, np.int32) for n in (num_tokens, num_tokens, num_tokens, num_requests + 1, num_requests))
    tables = np.zeros((num_requests, max_blocks), np.int32)
    cdef int[::1] input_ids = arrays[0]
    cdef int[::1] positions = arrays[1]
    cdef int[::1] slot_mapping = arrays[2]
    cdef int[::1] query_start_loc = arrays[3]
    cdef int[::1] context_lens = arrays[4]
    cdef int[:, ::1] block_tables = tables
    cdef list logits_indices = []

    query_start_loc[0] = 0
    for b in range(num_requests):
        request, count = scheduled[b]
        start = request.num_computed_tokens
        token_ids = request.token_ids
        block_table = request.block_table
        for position in range(start, start + count):
            input_ids[t] = token_ids[position]
            positions[t] = position
            slot_mapping[t] = <int>block_table[position // block_size] * block_size + position % block_size
            t += 1
        blocks = (start + count + block_size - 1) // block_size
        for i in range(blocks):
            block_tables[b, i] = block_table[i]
        query_start_loc[b + 1] = t
        context_lens[b] = start + count
        if start + count == len(token_ids):
            logits_indices.append(t - 1)
            sampling.append(b)
    return (*arrays, tables, np.array(logits_indices, np.int32), sampling)
