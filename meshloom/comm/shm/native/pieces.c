/* A call, published piece by piece: a payload in the arena, or its address in a window, and a descriptor that all ranks can read. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static operation *copied(const ml_group *group, const ml_call *call) {
    operation *operation = calloc(1, sizeof *operation);
    size_t pointers = (size_t)group->size * sizeof(void *), numbers = (size_t)group->size * sizeof(int64_t);
    if (!operation) return NULL;
    operation->call = *call;
    if (call->ins && (operation->ins = malloc(pointers))) memcpy((void *)operation->ins, call->ins, pointers);
    if (call->outs && (operation->outs = malloc(pointers))) memcpy(operation->outs, call->outs, pointers);
    if (call->in_sizes && (operation->sizes = malloc(2 * numbers))) {
        memcpy(operation->sizes, call->in_sizes, numbers);
        memcpy(operation->sizes + group->size, call->out_sizes, numbers);
    }
    if ((call->ins && !operation->ins) || (call->outs && !operation->outs) || (call->in_sizes && !operation->sizes)) {
        free((void *)operation->ins), free(operation->outs), free(operation->sizes), free(operation);
        return NULL;
    }
    return operation;
}

bool ml_hands_in(const ml_call *call, int rank) {
    switch (call->kind) {
    case ML_BARRIER: return false;
    case ML_BROADCAST:
    case ML_SCATTER: return rank == call->root;
    case ML_GATHER: return rank != call->root; /* the destination reads its own in place */
    case ML_REDUCE:
    default: return true;
    }
}

const uint8_t *ml_input_of(const operation *operation, int rank) {
    const ml_call *call = &operation->call;
    if (operation->ins) return operation->ins[rank];
    return (const uint8_t *)call->in + (has_one_place(call->kind) ? 0 : (uint64_t)rank * call->count * ml_element_bytes(call->dtype));
}

static uint64_t payload_bytes(const ml_group *group, const operation *operation, uint64_t length) {
    const ml_call *call = &operation->call;
    if (!ml_hands_in(call, group->rank)) return 0;
    size_t element = ml_element_bytes(call->dtype);
    if (call->kind == ML_ALL_TO_ALL) return (uint64_t)group->size * sizeof(int64_t) + (uint64_t)total(operation->sizes, group->size) * element;
    return (has_one_place(call->kind) ? 1 : (uint64_t)group->size) * rounded(length * element);
}

/* Whether the payload is in a window, where all ranks can read it. */
static void find_window(const ml_group *group, operation *operation) {
    const ml_call *call = &operation->call;
    if (!call->count || !ml_hands_in(call, group->rank) || operation->ins || call->kind == ML_ALL_TO_ALL || call->kind == ML_SCATTER) return;
    if (call->kind == ML_ALL_REDUCE && call->in != call->out) return;
    uint64_t bytes = call->count * ml_element_bytes(call->dtype) * (has_one_place(call->kind) ? 1 : (uint64_t)group->size);
    for (int index = 0; index < group->num_windows; index++) {
        uint64_t offset = (uint64_t)((uintptr_t)call->in - (uintptr_t)group->windows[index].bases[group->rank]);
        if (is_within(offset, bytes, group->windows[index].num_bytes) && is_aligned(offset, ml_element_bytes(call->dtype))) {
            operation->window = (uint32_t)index + 1;
            operation->window_offset = offset;
            return;
        }
    }
}

void ml_let_go(operation *operation) {
    if (--operation->pieces) return;
    free(operation->sizes);
    free(operation->outs);
    free((void *)operation->ins);
    free(operation);
}

static bool plan(ml_group *group, operation *operation, uint64_t first, uint64_t length) {
    if (group->planned - group->executed == group->room) {
        uint64_t room = group->room ? 2 * group->room : 16;
        piece *larger = malloc(room * sizeof(piece));
        if (!larger) return false;
        for (uint64_t number = group->executed; number < group->planned; number++) larger[number % room] = group->queue[number % group->room];
        free(group->queue);
        group->queue = larger, group->room = room;
    }
    piece *piece = &group->queue[group->planned++ % group->room];
    piece->operation = operation;
    piece->first = first;
    piece->length = length;
    piece->bytes = operation->window ? 0 : payload_bytes(group, operation, length);
    piece->own_chunks_known = false;
    operation->pieces++;
    return true;
}

static void copy_in(ml_group *group, const piece *piece, uint8_t *to) {
    const operation *operation = piece->operation;
    const ml_call *call = &operation->call;
    size_t element = ml_element_bytes(call->dtype);
    uint64_t bytes = piece->length * element;
    if (call->kind == ML_ALL_TO_ALL) {
        uint64_t table = (uint64_t)group->size * sizeof(int64_t);
        memcpy(to, operation->sizes, table);
        copy(to + table, call->in, (uint64_t)total(operation->sizes, group->size) * element);
    } else if (has_one_place(call->kind)) {
        copy(to, ml_input_of(operation, group->rank) + piece->first * element, bytes);
    } else {
        for (int rank = 0; rank < group->size; rank++)
            if (rank != group->rank) copy(to + (uint64_t)rank * rounded(bytes), ml_input_of(operation, rank) + piece->first * element, bytes);
    }
}

bool ml_publish(ml_group *group) {
    uint64_t number = group->published;
    if (number == group->planned) return false;
    piece *piece = piece_of(group, number);
    const operation *operation = piece->operation;
    const ml_call *call = &operation->call;
    if (group->eager && group->eager + piece->bytes > group->settings.eager_bytes) return false;
    if (number - group->executed >= RING || (number >= RING && ml_all_finished(group) <= number - RING)) return false; /* the descriptor's place is still in use */
    seat *own = seat_of(group, group->rank);
    ml_descriptor *descriptor = &own->ring[number % RING];
    uint64_t offset = 0;
    uint64_t *drain = &group->drain[number % RING];
    *drain = 0;
    if (operation->window) {
        offset = operation->window_offset + (has_one_place(call->kind) ? piece->first * ml_element_bytes(call->dtype) : 0);
        if (call->kind != ML_ALL_REDUCE) *drain = number + 1; /* of an all-reduce, no rank accesses it once all chunks are done */
    } else if (piece->bytes) {
        ml_sweep(group);
        if (!ml_allocate(group, piece->bytes, number, &offset)) {
            ml_sweep_letters(group);
            if (!group->num_blocks && !group->failure) group->failure = ML_NO_SPACE; /* otherwise space will become free */
            return false;
        }
        copy_in(group, piece, group->arenas[group->rank] + offset);
    }
    group->eager += piece->bytes;
    *place_of(group, group->rank, number) = (place){offset, operation->window};
    *descriptor = (ml_descriptor){
        .number = number, .count = call->count, .first = piece->first, .length = piece->length, .offset = offset, .window = operation->window,
        .root = call->root, .kind = call->kind, .op = call->op, .dtype = call->dtype, .ndim = call->ndim,
    };
    memcpy(descriptor->shape, call->shape, sizeof call->shape);
    if (group->rank == 0) { /* no rank accesses this claim between the end of piece number - RING on all ranks and this publication */
        atomic_store_explicit(&group->control->claims[number % RING].next, 0, memory_order_relaxed);
        atomic_store_explicit(&group->control->claims[number % RING].done, 0, memory_order_relaxed);
    }
    group->published = number + 1;
    atomic_store_explicit(&own->started, number + 1, memory_order_release);
    ml_ring_all(group);
    return true;
}

int64_t ml_start(ml_group *group, const ml_call *call) {
    operation *operation = copied(group, call);
    if (!operation) return -1;
    size_t element = ml_element_bytes(call->dtype);
    uint64_t places = has_one_place(call->kind) ? 1 : (uint64_t)group->size;
    uint64_t length = group->settings.piece_bytes / element / places;
    length = length > LINE ? length / LINE * LINE : LINE;
    if (call->kind == ML_ALL_TO_ALL || call->kind == ML_BARRIER) length = call->count;
    pthread_mutex_lock(&group->lock);
    bool planned = true;
    operation->pieces = 1; /* keeps it alive until all are planned */
    find_window(group, operation);
    for (uint64_t first = 0; planned && (first < call->count || first == 0); first += length) {
        planned = plan(group, operation, first, call->count - first < length ? call->count - first : length);
        if (!length) break;
    }
    ml_let_go(operation);
    int64_t number = planned ? (int64_t)group->planned - 1 : -1;
    while (!group->failure && ml_publish(group)) {}
    pthread_mutex_unlock(&group->lock);
    return number;
}
