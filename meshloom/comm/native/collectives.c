/* What becomes of a piece that all ranks have started: each takes its result, and computes chunks of large sums for all. */
#include "internal.h"

#include <string.h>

#include "reduce.h"

static uint8_t *output_of(const operation *operation, int rank) {
    const ml_call *call = &operation->call;
    if (operation->outs) return operation->outs[rank];
    return (uint8_t *)call->out + (uint64_t)rank * call->count * ml_element_bytes(call->dtype);
}

static bool all_started(const ml_group *group, uint64_t number) {
    for (int rank = 0; rank < group->size; rank++)
        if (atomic_load_explicit(&seat_of(group, rank)->started, memory_order_acquire) <= number) return false;
    return true;
}

static bool all_alike(ml_group *group, uint64_t number) {
    const ml_descriptor *own = descriptor_of(group, group->rank, number);
    for (int rank = 0; rank < group->size; rank++) {
        const ml_descriptor *other = descriptor_of(group, rank, number);
        bool alike = own->kind == other->kind && own->op == other->op && own->dtype == other->dtype && own->root == other->root &&
                     own->count == other->count && own->first == other->first && own->length == other->length && own->ndim == other->ndim &&
                     !memcmp(own->shape, other->shape, sizeof own->shape);
        if (!alike) {
            group->mismatch = rank;
            group->mismatch_number = number;
            group->failure = ML_MISMATCH;
            return false;
        }
    }
    return true;
}

/* What a rank has handed in: of the place for `of` where there is one for each rank. */
static uint8_t *handed_in(ml_group *group, int rank, uint64_t number, int of) {
    const ml_descriptor *descriptor = descriptor_of(group, rank, number);
    size_t element = ml_element_bytes(descriptor->dtype);
    bool one_place = has_one_place(descriptor->kind);
    if (descriptor->window) {
        uint64_t skipped = one_place ? 0 : ((uint64_t)of * descriptor->count + descriptor->first) * element;
        return group->windows[descriptor->window - 1].bases[rank] + descriptor->offset + skipped;
    }
    return group->arenas[rank] + descriptor->offset + (one_place ? 0 : (uint64_t)of * rounded(descriptor->length * element));
}

static bool any_in_window(ml_group *group, uint64_t number) {
    for (int rank = 0; rank < group->size; rank++)
        if (descriptor_of(group, rank, number)->window) return true;
    return false;
}

/* Whether an all-reduce is computed in chunks that are claimed. All ranks decide alike: they see the same descriptors. */
static bool is_claimed(ml_group *group, uint64_t number) {
    const ml_descriptor *own = descriptor_of(group, group->rank, number);
    if (own->kind != ML_ALL_REDUCE) return false;
    return own->length * ml_element_bytes(own->dtype) > group->settings.small_bytes || any_in_window(group, number);
}

static uint64_t chunk_length(ml_group *group, const ml_descriptor *descriptor) {
    size_t element = ml_element_bytes(descriptor->dtype);
    uint64_t length = group->settings.chunk_bytes / element, least = (descriptor->length + 64 * CLAIMS - 1) / (64 * CLAIMS);
    length = length > least ? length : least;
    return (length + LINE - 1) / LINE * LINE;
}

/* Compute chunks of a piece until all have been claimed. The sum goes to all ranks' windows, and over the payload of the first rank without one. */
static void compute_chunks(ml_group *group, uint64_t number) {
    const ml_descriptor *own = descriptor_of(group, group->rank, number);
    piece *piece = &group->queue[number % group->room];
    claim *claim = &group->control->claims[number % RING];
    size_t element = ml_element_bytes(own->dtype);
    uint64_t length = chunk_length(group, own), num_chunks = (own->length + length - 1) / length, chunk;
    uint8_t *payloads[ML_MAX_RANKS];
    int first_without = -1;
    for (int rank = 0; rank < group->size; rank++) {
        payloads[rank] = handed_in(group, rank, number, 0);
        if (first_without < 0 && !descriptor_of(group, rank, number)->window) first_without = rank;
    }
    if (!piece->own_chunks_known) {
        memset(piece->own_chunks, 0, sizeof piece->own_chunks);
        piece->own_chunks_known = true;
    }
    while ((chunk = atomic_fetch_add_explicit(&claim->next, 1, memory_order_relaxed)) < num_chunks) {
        uint64_t start = chunk * length, count = own->length - start < length ? own->length - start : length;
        const void *sources[ML_MAX_RANKS];
        for (int rank = 0; rank < group->size; rank++) sources[rank] = payloads[rank] + start * element;
        uint8_t *to = payloads[first_without < 0 ? 0 : first_without] + start * element;
        ml_reduce(own->dtype, own->op, to, sources, group->size, count);
        for (int rank = 0; rank < group->size; rank++)
            if (descriptor_of(group, rank, number)->window && payloads[rank] + start * element != to) memcpy(payloads[rank] + start * element, to, count * element);
        if (!own->window) memcpy((uint8_t *)piece->operation->call.out + (own->first + start) * element, to, count * element);
        piece->own_chunks[chunk / 64] |= (uint64_t)1 << (chunk % 64);
        if (atomic_fetch_add_explicit(&claim->done, 1, memory_order_acq_rel) + 1 == num_chunks) ring_all(group);
    }
}

/* Take over the chunks that others have computed. Returns false if some are not done. */
static bool take_chunks(ml_group *group, uint64_t number) {
    const ml_descriptor *own = descriptor_of(group, group->rank, number);
    piece *piece = &group->queue[number % group->room];
    size_t element = ml_element_bytes(own->dtype);
    uint64_t length = chunk_length(group, own), num_chunks = (own->length + length - 1) / length;
    if (atomic_load_explicit(&group->control->claims[number % RING].done, memory_order_acquire) < num_chunks) return false;
    if (own->window) return true;
    int from = 0;
    while (descriptor_of(group, from, number)->window) from++;
    const uint8_t *sums = handed_in(group, from, number, 0);
    uint8_t *out = (uint8_t *)piece->operation->call.out + own->first * element;
    for (uint64_t chunk = 0; chunk < num_chunks;) {
        uint64_t end = chunk;
        while (end < num_chunks && !(piece->own_chunks[end / 64] >> (end % 64) & 1)) end++;
        if (end > chunk) {
            uint64_t stop = end * length < own->length ? end * length : own->length;
            memcpy(out + chunk * length * element, sums + chunk * length * element, (stop - chunk * length) * element);
        }
        chunk = end + 1;
    }
    return true;
}

static bool sizes_agree(ml_group *group, uint64_t number, const operation *operation) {
    for (int rank = 0; rank < group->size; rank++) {
        const int64_t *theirs = (const int64_t *)(void *)handed_in(group, rank, number, 0);
        if (theirs[group->rank] != operation->sizes[group->size + rank]) {
            group->mismatch = rank;
            group->mismatch_number = number;
            group->failure = ML_MISMATCH;
            return false;
        }
    }
    return true;
}

/* Take the result of a piece that all ranks have started. Returns false if some of it is not there yet, or if ranks do not agree. */
static bool execute(ml_group *group, uint64_t number) {
    const ml_descriptor *own = descriptor_of(group, group->rank, number);
    piece *piece = &group->queue[number % group->room];
    const operation *operation = piece->operation;
    const ml_call *call = &operation->call;
    size_t element = ml_element_bytes(own->dtype);
    uint64_t bytes = own->length * element;
    const void *sources[ML_MAX_RANKS];
    switch (own->kind) {
    case ML_BARRIER: break;
    case ML_ALL_REDUCE:
        if (is_claimed(group, number)) return take_chunks(group, number);
        for (int rank = 0; rank < group->size; rank++) sources[rank] = handed_in(group, rank, number, 0);
        ml_reduce(own->dtype, own->op, (uint8_t *)call->out + own->first * element, sources, group->size, own->length);
        break;
    case ML_REDUCE:
        if (group->rank == own->root) {
            for (int rank = 0; rank < group->size; rank++) sources[rank] = handed_in(group, rank, number, 0);
            ml_reduce(own->dtype, own->op, (uint8_t *)call->out + own->first * element, sources, group->size, own->length);
        }
        break;
    case ML_BROADCAST:
        if (group->rank != own->root) memcpy((uint8_t *)call->out + own->first * element, handed_in(group, own->root, number, 0), bytes);
        break;
    case ML_ALL_GATHER:
    case ML_GATHER:
        if (own->kind == ML_GATHER && group->rank != own->root) break;
        for (int rank = 0; rank < group->size; rank++) {
            const uint8_t *from = rank == group->rank ? (const uint8_t *)call->in + own->first * element : handed_in(group, rank, number, 0);
            uint8_t *to = output_of(operation, rank) + own->first * element;
            if (to != from) memmove(to, from, bytes);
        }
        break;
    case ML_REDUCE_SCATTER:
        for (int rank = 0; rank < group->size; rank++)
            sources[rank] = rank == group->rank ? input_of(operation, rank) + own->first * element : handed_in(group, rank, number, group->rank);
        ml_reduce(own->dtype, own->op, (uint8_t *)call->out + own->first * element, sources, group->size, own->length);
        break;
    case ML_SCATTER: {
        const uint8_t *from = group->rank == own->root ? input_of(operation, group->rank) + own->first * element : handed_in(group, own->root, number, group->rank);
        uint8_t *to = (uint8_t *)call->out + own->first * element;
        if (to != from) memmove(to, from, bytes);
        break;
    }
    case ML_ALL_TO_ALL: {
        if (!sizes_agree(group, number, operation)) return false;
        uint8_t *to = call->out;
        for (int rank = 0; rank < group->size; rank++) {
            const uint8_t *theirs = handed_in(group, rank, number, 0);
            const int64_t *sizes = (const int64_t *)(const void *)theirs;
            uint64_t skipped = (uint64_t)group->size * sizeof(int64_t) + (uint64_t)total(sizes, group->rank) * element;
            uint64_t taken = (uint64_t)sizes[group->rank] * element;
            memcpy(to, theirs + skipped, taken);
            to += taken;
        }
        break;
    }
    }
    return true;
}

bool advance(ml_group *group) {
    bool moved = false;
    while (!group->failure) {
        bool again = false;
        if (group->executed < group->published && all_started(group, group->executed)) {
            uint64_t number = group->executed;
            if (group->claimed == number) {
                if (!all_alike(group, number)) break;
                if (is_claimed(group, number)) compute_chunks(group, number);
                group->claimed = number + 1;
            }
            if (execute(group, number)) {
                piece *piece = &group->queue[number % group->room];
                group->eager -= piece->bytes;
                let_go(piece->operation);
                group->executed = number + 1;
                atomic_store_explicit(&seat_of(group, group->rank)->finished, number + 1, memory_order_release);
                ring_all(group);
                again = true;
            } else if (group->failure)
                break;
        }
        if (publish(group)) again = true;
        if (!again && group->claimed < group->published && all_started(group, group->claimed)) {
            /* while others are busy with their chunks of an earlier piece */
            if (!all_alike(group, group->claimed)) break;
            if (is_claimed(group, group->claimed)) compute_chunks(group, group->claimed);
            group->claimed++;
            again = true;
        }
        if (!again) break;
        moved = true;
    }
    return moved;
}
