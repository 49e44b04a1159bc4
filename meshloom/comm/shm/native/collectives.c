/* Pieces that all ranks have started: each rank computes its result, and chunks of large sums for all. */
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

/* Whether the published address of a rank's payload is valid: all that will be read of it is within its arena or window, and aligned. */
static bool lies_within(const ml_group *group, const piece *piece, place place) {
    const ml_call *call = &piece->operation->call;
    uint64_t element = ml_element_bytes(call->dtype), bytes = piece->length * element, places = (uint64_t)group->size;
    if (place.window) {
        if (place.window > (uint32_t)group->num_windows || call->kind == ML_ALL_TO_ALL || !is_aligned(place.offset, element)) return false;
        uint64_t read = has_one_place(call->kind) ? bytes : ((places - 1) * call->count + piece->first + piece->length) * element;
        return is_within(place.offset, read, group->windows[place.window - 1].num_bytes);
    }
    uint64_t read = call->kind == ML_ALL_TO_ALL ? places * sizeof(int64_t) : has_one_place(call->kind) ? bytes : (places - 1) * rounded(bytes) + bytes;
    return place.offset % LINE == 0 && is_within(place.offset, read, group->capacity);
}

/* Check that all ranks have made the same call, and store where their payloads are. Their descriptors are not read afterwards. */
static bool learn(ml_group *group, uint64_t number) {
    const piece *piece = piece_of(group, number);
    const ml_call *call = &piece->operation->call;
    for (int rank = 0; rank < group->size; rank++) {
        if (rank == group->rank) continue;
        ml_descriptor other;
        copy_once(&other, descriptor_of(group, rank, number), sizeof other);
        place *place = place_of(group, rank, number);
        place->offset = other.offset, place->window = other.window;
        bool alike = call->kind == other.kind && call->op == other.op && call->dtype == other.dtype && call->root == other.root &&
                     call->count == other.count && piece->first == other.first && piece->length == other.length && call->ndim == other.ndim &&
                     !memcmp(call->shape, other.shape, sizeof call->shape);
        if (alike && (!ml_hands_in(call, rank) || lies_within(group, piece, *place))) continue;
        group->mismatch = rank;
        group->mismatch_number = number;
        group->failure = alike ? ML_OUTSIDE : ML_MISMATCH;
        return false;
    }
    return true;
}

/* A rank's input: its block for rank `of` if it has one for each rank. */
static uint8_t *handed_in(const ml_group *group, int rank, uint64_t number, int of) {
    const piece *piece = piece_of(group, number);
    const ml_call *call = &piece->operation->call;
    const place *place = place_of(group, rank, number);
    size_t element = ml_element_bytes(call->dtype);
    bool one_place = has_one_place(call->kind);
    if (place->window) {
        uint64_t skipped = one_place ? 0 : ((uint64_t)of * call->count + piece->first) * element;
        return group->windows[place->window - 1].bases[rank] + place->offset + skipped;
    }
    return group->arenas[rank] + place->offset + (one_place ? 0 : (uint64_t)of * rounded(piece->length * element));
}

static bool any_in_window(const ml_group *group, uint64_t number) {
    for (int rank = 0; rank < group->size; rank++)
        if (place_of(group, rank, number)->window) return true;
    return false;
}

/* Whether an all-reduce is computed in claimed chunks. All ranks decide equally, since they have read the same descriptors. */
static bool is_claimed(const ml_group *group, uint64_t number) {
    const piece *piece = piece_of(group, number);
    const ml_call *call = &piece->operation->call;
    if (call->kind != ML_ALL_REDUCE) return false;
    return piece->length * ml_element_bytes(call->dtype) > group->settings.small_bytes || any_in_window(group, number);
}

static uint64_t chunk_length(const ml_group *group, const piece *piece) {
    size_t element = ml_element_bytes(piece->operation->call.dtype);
    uint64_t length = group->settings.chunk_bytes / element, least = (piece->length + 64 * CLAIMS - 1) / (64 * CLAIMS);
    length = length > least ? length : least;
    return (length + LINE - 1) / LINE * LINE;
}

/* Claim and compute chunks of a piece until all are claimed. Sums are written to all ranks' windows, and over the payload of the first rank without one. */
static void compute_chunks(ml_group *group, uint64_t number) {
    piece *piece = piece_of(group, number);
    const ml_call *call = &piece->operation->call;
    claim *claim = &group->control->claims[number % RING];
    size_t element = ml_element_bytes(call->dtype);
    uint64_t length = chunk_length(group, piece), num_chunks = (piece->length + length - 1) / length, chunk;
    uint8_t *payloads[ML_MAX_RANKS];
    int first_without = -1;
    for (int rank = 0; rank < group->size; rank++) {
        payloads[rank] = handed_in(group, rank, number, 0);
        if (first_without < 0 && !place_of(group, rank, number)->window) first_without = rank;
    }
    if (!piece->own_chunks_known) {
        memset(piece->own_chunks, 0, sizeof piece->own_chunks);
        piece->own_chunks_known = true;
    }
    while ((chunk = atomic_fetch_add_explicit(&claim->next, 1, memory_order_relaxed)) < num_chunks) {
        uint64_t start = chunk * length, count = piece->length - start < length ? piece->length - start : length;
        const void *sources[ML_MAX_RANKS];
        for (int rank = 0; rank < group->size; rank++) sources[rank] = payloads[rank] + start * element;
        uint8_t *to = payloads[first_without < 0 ? 0 : first_without] + start * element;
        ml_reduce(call->dtype, call->op, to, sources, group->size, count);
        for (int rank = 0; rank < group->size; rank++)
            if (place_of(group, rank, number)->window) copy(payloads[rank] + start * element, to, count * element);
        if (!piece->operation->window) copy((uint8_t *)call->out + (piece->first + start) * element, to, count * element);
        piece->own_chunks[chunk / 64] |= (uint64_t)1 << (chunk % 64);
        if (atomic_fetch_add_explicit(&claim->done, 1, memory_order_acq_rel) + 1 == num_chunks) ml_ring_all(group);
    }
}

/* Copy the chunks that other ranks have computed. Returns false if some are not done. */
static bool take_chunks(ml_group *group, uint64_t number) {
    const piece *piece = piece_of(group, number);
    const ml_call *call = &piece->operation->call;
    size_t element = ml_element_bytes(call->dtype);
    uint64_t length = chunk_length(group, piece), num_chunks = (piece->length + length - 1) / length;
    if (atomic_load_explicit(&group->control->claims[number % RING].done, memory_order_acquire) < num_chunks) return false;
    if (piece->operation->window) return true;
    int from = 0;
    while (place_of(group, from, number)->window) from++; /* at most up to this rank */
    const uint8_t *sums = handed_in(group, from, number, 0);
    uint8_t *out = (uint8_t *)call->out + piece->first * element;
    for (uint64_t chunk = 0; chunk < num_chunks;) {
        uint64_t end = chunk;
        while (end < num_chunks && !(piece->own_chunks[end / 64] >> (end % 64) & 1)) end++;
        if (end > chunk) {
            uint64_t stop = end * length < piece->length ? end * length : piece->length;
            copy(out + chunk * length * element, sums + chunk * length * element, (stop - chunk * length) * element);
        }
        chunk = end + 1;
    }
    return true;
}

/* Whether the elements that a rank has for each rank, by `sizes`, are within its arena after that table. skipped: elements for ranks before this one. */
static bool sizes_lie_within(const ml_group *group, const int64_t *sizes, uint64_t offset, size_t element, uint64_t *skipped) {
    uint64_t most = (group->capacity - offset - (uint64_t)group->size * sizeof(int64_t)) / element, sum = 0;
    for (int rank = 0; rank < group->size; rank++) {
        if (sizes[rank] < 0 || (uint64_t)sizes[rank] > most - sum) return false;
        if (rank == group->rank) *skipped = sum;
        sum += (uint64_t)sizes[rank];
    }
    return true;
}

static bool exchange(ml_group *group, uint64_t number) {
    const operation *operation = piece_of(group, number)->operation;
    size_t element = ml_element_bytes(operation->call.dtype), table = (size_t)group->size * sizeof(int64_t);
    const uint8_t *from[ML_MAX_RANKS];
    const int64_t *expected = operation->sizes + group->size;
    for (int rank = 0; rank < group->size; rank++) {
        const uint8_t *theirs = handed_in(group, rank, number, 0);
        int64_t sizes[ML_MAX_RANKS];
        uint64_t skipped = 0;
        copy_once(sizes, theirs, table);
        bool is_inside = sizes_lie_within(group, sizes, place_of(group, rank, number)->offset, element, &skipped);
        if (!is_inside || sizes[group->rank] != expected[rank]) {
            group->mismatch = rank;
            group->mismatch_number = number;
            group->failure = is_inside ? ML_MISMATCH : ML_OUTSIDE;
            return false;
        }
        from[rank] = theirs + table + skipped * element;
    }
    uint64_t written = 0;
    for (int rank = 0; rank < group->size; rank++) {
        copy((uint8_t *)operation->call.out + written, from[rank], (uint64_t)expected[rank] * element);
        written += (uint64_t)expected[rank] * element;
    }
    return true;
}

/* Compute the result of a piece that all ranks have started. Returns false if some of it is not done yet, or if ranks disagree. */
static bool execute(ml_group *group, uint64_t number) {
    const piece *piece = piece_of(group, number);
    const operation *operation = piece->operation;
    const ml_call *call = &operation->call;
    size_t element = ml_element_bytes(call->dtype);
    uint64_t skipped = piece->first * element, bytes = piece->length * element;
    const void *sources[ML_MAX_RANKS];
    switch (call->kind) {
    case ML_BARRIER: break;
    case ML_ALL_REDUCE:
        if (is_claimed(group, number)) return take_chunks(group, number);
        for (int rank = 0; rank < group->size; rank++) sources[rank] = handed_in(group, rank, number, 0);
        ml_reduce(call->dtype, call->op, (uint8_t *)call->out + skipped, sources, group->size, piece->length);
        break;
    case ML_REDUCE:
        if (group->rank == call->root) {
            for (int rank = 0; rank < group->size; rank++) sources[rank] = handed_in(group, rank, number, 0);
            ml_reduce(call->dtype, call->op, (uint8_t *)call->out + skipped, sources, group->size, piece->length);
        }
        break;
    case ML_BROADCAST:
        if (group->rank != call->root) copy((uint8_t *)call->out + skipped, handed_in(group, call->root, number, 0), bytes);
        break;
    case ML_ALL_GATHER:
    case ML_GATHER:
        if (call->kind == ML_GATHER && group->rank != call->root) break;
        for (int rank = 0; rank < group->size; rank++) {
            const uint8_t *from = rank == group->rank ? (const uint8_t *)call->in + skipped : handed_in(group, rank, number, 0);
            copy(output_of(operation, rank) + skipped, from, bytes);
        }
        break;
    case ML_REDUCE_SCATTER:
        for (int rank = 0; rank < group->size; rank++)
            sources[rank] = rank == group->rank ? ml_input_of(operation, rank) + skipped : handed_in(group, rank, number, group->rank);
        ml_reduce(call->dtype, call->op, (uint8_t *)call->out + skipped, sources, group->size, piece->length);
        break;
    case ML_SCATTER: {
        const uint8_t *from = group->rank == call->root ? ml_input_of(operation, group->rank) + skipped : handed_in(group, call->root, number, group->rank);
        copy((uint8_t *)call->out + skipped, from, bytes);
        break;
    }
    case ML_ALL_TO_ALL: return exchange(group, number);
    }
    return true;
}

bool ml_advance(ml_group *group) {
    bool moved = false;
    while (!group->failure) {
        bool again = false;
        if (group->executed < group->published && all_started(group, group->executed)) {
            uint64_t number = group->executed;
            if (group->claimed == number) {
                if (!learn(group, number)) break;
                if (is_claimed(group, number)) compute_chunks(group, number);
                group->claimed = number + 1;
            }
            if (execute(group, number)) {
                piece *piece = piece_of(group, number);
                group->eager -= piece->bytes;
                ml_let_go(piece->operation);
                group->executed = number + 1;
                atomic_store_explicit(&seat_of(group, group->rank)->finished, number + 1, memory_order_release);
                ml_ring_all(group);
                again = true;
            } else if (group->failure)
                break;
        }
        if (ml_publish(group)) again = true;
        if (!again && group->claimed < group->published && all_started(group, group->claimed)) {
            /* while other ranks compute their chunks of an earlier piece */
            if (!learn(group, group->claimed)) break;
            if (is_claimed(group, group->claimed)) compute_chunks(group, group->claimed);
            group->claimed++;
            again = true;
        }
        if (!again) break;
        moved = true;
    }
    return moved;
}
