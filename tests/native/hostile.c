/* One honest rank among hostile ones, for AddressSanitizer and UndefinedBehaviorSanitizer: whatever they write into the memory that ranks share, it
 * reads and writes nothing but arenas, windows and its own tensors.
 *
 *     hostile TRIALS SEED
 *
 * One rank runs the engine; all others are this program, which first writes what an honest rank would write of a random call, and then spoils some of it: offsets,
 * lengths, counts, windows, counters, tables of sizes, letters, claims, and the honest rank's own descriptors. In every fourth trial nothing is spoilt, in another a thread goes on spoiling meanwhile, so that what
 * was checked is another value when it is read again. Arenas, windows, inputs and outputs are allocations of their exact sizes: a byte beside them is noticed. Calls that
 * nobody has spoilt must end well; others may end as they like. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { MESSAGE = ML_ALL_TO_ALL + 1 };
enum { MOST = 4, ARENA = 1 << 15, WINDOW = 1 << 12, LOOKS = 6 };
static const ml_settings SETTINGS = {
    .small_bytes = 256, .chunk_bytes = 512, .piece_bytes = 2048, .eager_bytes = 8192, .message_piece_bytes = 1024, .message_bytes = 4096,
    .spins = 0, .yields = 0,
};
static uint64_t state;
static int size, honest, peer; /* ranks: all, the one that runs the engine, and the one that it has messages with */
static int kind;               /* of the trial's call: one of ml_kind, or MESSAGE */
static control_area *control;
static uint8_t *arenas[MOST], *windows[MOST];
static _Atomic int is_over;

static uint64_t next(uint64_t *from) { /* splitmix64 (Steele, Lea & Flood, 2014) */
    uint64_t z = *from += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* A number as an attacker would choose it: just past an end, enormous, negative, or such that sums and products wrap around. */
static uint64_t evil(uint64_t *from, uint64_t honest) {
    static const uint64_t ENDS[] = {0, 1, 64, 255, 256, WINDOW, ARENA, 1u << 31, (uint64_t)1 << 61, (uint64_t)1 << 62, (uint64_t)1 << 63, UINT64_MAX};
    switch (next(from) % 5) {
    case 0: return next(from);
    case 1: return honest + next(from) % 129 - 64;
    case 2: return ENDS[next(from) % (sizeof ENDS / sizeof *ENDS)] - next(from) % 65;
    case 3: return ENDS[next(from) % (sizeof ENDS / sizeof *ENDS)] / 64 * 64;
    default: return honest ^ (uint64_t)1 << next(from) % 64;
    }
}

static mailbox *mail(int source, int destination) {
    return (mailbox *)(void *)((uint8_t *)control + sizeof(control_area) + (size_t)size * sizeof(seat)) + source * size + destination;
}

static void spoil_descriptor(uint64_t *from, ml_descriptor *found) {
    switch (next(from) % 10) {
    case 0: found->offset = evil(from, found->offset); break;
    case 1: found->offset = (ARENA - next(from) % 3000) / 64 * 64; break;
    case 2: found->length = evil(from, found->length); break;
    case 3: found->first = evil(from, found->first); break;
    case 4: found->count = evil(from, found->count); break;
    case 5: found->window = (uint32_t)(next(from) % 3); break;
    case 6: found->window = (uint32_t)evil(from, found->window); break;
    case 7: found->dtype = (uint8_t)next(from); break;
    case 8: found->kind = (uint8_t)next(from), found->op = (uint8_t)next(from); break;
    default: found->root = (int32_t)evil(from, 0);
    }
}

static void spoil_letter(uint64_t *from, letter *found) {
    switch (next(from) % 7) {
    case 0: found->offset = evil(from, found->offset); break;
    case 1: found->length = evil(from, found->length); break;
    case 2: found->first = evil(from, found->first); break;
    case 3: found->count = evil(from, found->count); break;
    case 4: found->dtype = (uint8_t)next(from); break;
    case 5: found->tag = (int64_t)(next(from) % 3); break;
    default: atomic_store(&found->full, (uint32_t)next(from));
    }
}

static void spoil(uint64_t *from) {
    int rank = (int)(next(from) % (uint64_t)size), other = (int)(next(from) % (uint64_t)size);
    seat *theirs = &control->seats[rank];
    if (next(from) % 2) { /* what the call reads first */
        if (kind == MESSAGE)
            spoil_letter(from, &mail(peer, honest)->letters[next(from) % 3]);
        else if (kind == ML_ALL_TO_ALL)
            ((uint64_t *)(void *)arenas[rank])[next(from) % MOST] = evil(from, 3);
        else
            spoil_descriptor(from, &control->seats[next(from) % (uint64_t)size].ring[next(from) % 2]);
        return;
    }
    switch (next(from) % 12) {
    case 0: atomic_store(&theirs->finished, evil(from, 0)); break;
    case 1: atomic_store(&theirs->started, evil(from, 1)); break;
    case 2: atomic_store(&control->claims[next(from) % RING].next, evil(from, 0)); break;
    case 3: atomic_store(&control->claims[next(from) % RING].done, evil(from, 0)); break;
    case 4: atomic_store(&mail(rank, other)->posted, evil(from, 0)); break;
    case 5: spoil_letter(from, &mail(rank, other)->letters[next(from) % 4]); break;
    case 6: ((uint64_t *)(void *)arenas[rank])[next(from) % 8] = evil(from, 3); break;
    case 7: atomic_store(&theirs->bell, (uint32_t)next(from)); break;
    default: spoil_descriptor(from, &theirs->ring[next(from) % 4]);
    }
    if (next(from) % 500 == 0) atomic_store(&control->aborted, (uint32_t)evil(from, 1));
}

static void *spoil_on(void *argument) {
    uint64_t own = (uint64_t)(uintptr_t)argument;
    while (!atomic_load(&is_over)) spoil(&own);
    return NULL;
}

/* What an honest rank would publish of this piece: in the same window, or in its arena. */
static void answer(int rank, const ml_descriptor *own, const int64_t *sizes) {
    seat *theirs = &control->seats[rank];
    uint64_t number = atomic_load(&theirs->started);
    ml_descriptor *made = &theirs->ring[number % RING];
    *made = *own;
    if (next(&state) % 2) made->window = 0, made->offset = own->kind == ML_ALL_TO_ALL ? 0 : 64 * (next(&state) % 16);
    if (own->kind == ML_ALL_TO_ALL) memcpy(arenas[rank], sizes, (size_t)size * sizeof *sizes);
    if (own->kind == ML_REDUCE_SCATTER || own->kind == ML_SCATTER) made->offset = 0;
    atomic_store(&theirs->started, number + 1);
}

static void post(const ml_call *call, int64_t tag) {
    mailbox *box = mail(peer, honest);
    uint64_t element = ml_element_bytes(call->dtype), piece = SETTINGS.message_piece_bytes / element, posted = 0;
    for (uint64_t first = 0; first < call->count || first == 0; first += piece, posted++) {
        uint64_t length = call->count - first < piece ? call->count - first : piece;
        letter *made = &box->letters[posted % MAIL];
        made->tag = tag, made->offset = 0, made->first = first, made->length = length, made->count = call->count, made->dtype = call->dtype, made->ndim = 1;
        atomic_store(&made->full, 1);
    }
    atomic_store(&box->posted, posted);
}

static void run(int is_spoilt, int by_thread) {
    static const uint64_t COUNTS[] = {0, 1, 5, 64, 300};
    static const uint8_t TYPES[] = {ML_F32, ML_I64, ML_U8, ML_C128, ML_BF16};
    size = 2 + (int)(next(&state) % (MOST - 1)), honest = (int)(next(&state) % (uint64_t)size), peer = (honest + 1) % size;
    size_t bytes = (ml_control_bytes(size) + 63) / 64 * 64;
    control = memset(aligned_alloc(64, bytes), 0, bytes);
    void *bases[MOST];
    for (int rank = 0; rank < size; rank++) {
        arenas[rank] = memset(aligned_alloc(64, ARENA), rank + 1, ARENA);
        windows[rank] = memset(aligned_alloc(64, WINDOW), rank + 1, WINDOW);
        bases[rank] = arenas[rank];
    }
    ml_group *group = ml_open(honest, size, control, bases, ARENA, -1, &SETTINGS);
    for (int rank = 0; rank < size; rank++) bases[rank] = windows[rank];
    ml_add_window(group, bases, WINDOW);

    kind = (int)(next(&state) % (MESSAGE + 1));
    int is_message = kind == MESSAGE, in_window = next(&state) % 3 == 0;
    uint64_t count = COUNTS[next(&state) % 5];
    uint8_t dtype = TYPES[next(&state) % 5];
    size_t element = ml_element_bytes(dtype), share = count * element, all = share * (size_t)size;
    if (in_window && all > WINDOW) in_window = 0;
    void *in = in_window ? windows[honest] : all ? calloc(1, all) : NULL, *out = all ? calloc(1, all) : NULL; /* nothing has no address */
    int64_t sizes[MOST];
    for (int rank = 0; rank < size; rank++) sizes[rank] = (int64_t)count;
    ml_call call = {
        .kind = (uint8_t)(is_message ? 0 : kind), .op = ML_SUM, .dtype = dtype, .ndim = 1, .root = (int32_t)(next(&state) % (uint64_t)size),
        .count = kind == ML_ALL_TO_ALL || kind == ML_BARRIER ? 0 : count, .shape = {(int64_t)count}, .in = in, .out = out,
        .in_sizes = kind == ML_ALL_TO_ALL ? sizes : NULL, .out_sizes = kind == ML_ALL_TO_ALL ? sizes : NULL,
    };
    if (kind == ML_ALL_REDUCE && next(&state) % 2) call.in = call.out;
    int64_t number = is_message ? ml_receive(group, next(&state) % 2 ? -1 : peer, 1, &call) : ml_start(group, &call);
    if (is_message) ml_send(group, peer, 1, &call);
    pthread_t thread;
    atomic_store(&is_over, 0);
    if (by_thread) pthread_create(&thread, NULL, spoil_on, (void *)(uintptr_t)next(&state));
    enum ml_status status = ML_WAITING;
    for (int look = 0; look < LOOKS + 20 && status == ML_WAITING; look++) {
        if (is_message && look == 0) post(&call, 1);
        for (int rank = 0; rank < size && !is_message; rank++) {
            if (rank == honest) continue;
            uint64_t started = atomic_load(&control->seats[rank].started), published = group->published;
            if (started < published) {
                answer(rank, &control->seats[honest].ring[started % RING], sizes);
                if (!is_spoilt) atomic_store(&control->seats[rank].finished, started + 1);
            }
        }
        for (uint64_t times = is_spoilt ? next(&state) % 4 : 0; times; times--) spoil(&state);
        status = is_message ? ml_wait_message(group, number, 0) : ml_wait(group, number, 0);
    }
    if (by_thread) {
        atomic_store(&is_over, 1);
        pthread_join(thread, NULL);
    }
    uint64_t mismatch;
    ml_descriptor found;
    int who = ml_mismatch(group, &mismatch);
    if (who >= 0 && is_message) ml_letter_of(group, who, mismatch, &found);
    if (who >= 0 && !is_message) ml_descriptor_of(group, who, mismatch, &found);
    if (!is_spoilt && status != ML_DONE) {
        fprintf(stderr, "An honest call (kind %d, %lu elements, %d ranks) ended with status %d.\n", kind, (unsigned long)count, size, (int)status);
        exit(1);
    }
    ml_close(group);
    if (!in_window) free(in);
    free(out), free(control);
    for (int rank = 0; rank < size; rank++) free(arenas[rank]), free(windows[rank]);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int trials = atoi(argv[1]);
    state = (uint64_t)atoll(argv[2]);
    for (int trial = 0; trial < trials; trial++) run(trial % 4 != 0, trial % 4 == 1);
    printf("%d trials: nothing outside was touched.\n", trials);
    return 0;
}
