/* Ranks as threads over one engine, for ThreadSanitizer: random collectives and messages, several under way, waited for in any order.
 *
 *     stress RANKS BATCHES SEED
 *
 * All ranks derive the same calls from the seed. Element i of what rank r hands in to call n is value(n, r, i), so that every result is
 * known without asking anybody. Sizes of pieces are tiny, so that operations of a few kilobytes go in many. After a wait, what was handed in and what was
 * received is overwritten: a rank that still needed it would race. Exits with 1 at the first wrong element or operation that does not end. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum {
    MOST_RANKS = 8,
    GROUPS = 3, /* all ranks; all but the last; all but the first */
    CALLS = 6,  /* of a batch */
    LONGEST = 3000, /* elements of a rank's block */
    WINDOW = 2 * CALLS * LONGEST * MOST_RANKS, /* elements */
    SECONDS = 60,
};
static const uint64_t ARENA = 1 << 18;

typedef struct {
    int kind, group, root, in_window, tag, any_source;
    uint64_t number, count;
} a_call;

typedef struct {
    int first, size; /* of the ranks */
    void *control;
    void *arenas[MOST_RANKS], *windows[MOST_RANKS];
} a_group;

static const ml_settings SETTINGS = {
    .small_bytes = 512, .chunk_bytes = 1024, .piece_bytes = 4096, .eager_bytes = 16384, .message_piece_bytes = 2048, .message_bytes = 8192,
    .spins = 4, .yields = 4,
};
static a_group shared[GROUPS];
static int num_ranks, num_batches;
static uint64_t seed;

enum { MESSAGE = ML_ALL_TO_ALL + 1, KINDS };

static uint64_t next(uint64_t *state) { /* splitmix64 (Steele, Lea & Flood, 2014) */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int32_t value(uint64_t number, int rank, uint64_t index) { return (int32_t)((number * 31 + (uint64_t)rank * 7 + index) % 1000); }

static void fail(const a_call *call, int rank, const char *what) {
    fprintf(stderr, "Call %lu (kind %d, %lu elements, group %d, window %d) on rank %d of it: %s.\n", (unsigned long)call->number, call->kind,
            (unsigned long)call->count, call->group, call->in_window, rank, what);
    exit(1);
}

static int gives_blocks(int kind) { return kind == ML_REDUCE_SCATTER || kind == ML_SCATTER || kind == ML_ALL_TO_ALL; }
static int takes_blocks(int kind) { return kind == ML_ALL_GATHER || kind == ML_GATHER || kind == ML_ALL_TO_ALL; }

/* What rank `rank` of `size` is to have at `index`; nothing: it receives nothing. */
static int wanted(const a_call *call, int rank, int size, uint64_t index, int32_t *found) {
    uint64_t n = call->number, block = call->count ? index / call->count : 0, within = call->count ? index % call->count : 0;
    int32_t sum = 0;
    switch (call->kind) {
    case ML_ALL_REDUCE:
    case ML_REDUCE:
    case ML_REDUCE_SCATTER:
        for (int other = 0; other < size; other++) sum += value(n, other, index + (call->kind == ML_REDUCE_SCATTER ? (uint64_t)rank * call->count : 0));
        *found = sum;
        return call->kind != ML_REDUCE || rank == call->root;
    case ML_BROADCAST: *found = value(n, call->root, index); return 1;
    case ML_ALL_GATHER:
    case ML_GATHER: *found = value(n, (int)block, within); return call->kind == ML_ALL_GATHER || rank == call->root;
    case ML_SCATTER: *found = value(n, call->root, (uint64_t)rank * call->count + index); return 1;
    case ML_ALL_TO_ALL: *found = value(n, (int)block, (uint64_t)rank * call->count + within); return 1;
    case MESSAGE: *found = value(n, (rank + size - 1) % size, index); return 1;
    default: return 0;
    }
}

static a_call drawn(uint64_t *state, uint64_t number) {
    static const uint64_t COUNTS[] = {0, 1, 7, 64, 500, LONGEST};
    a_call call = {.number = number, .kind = (int)(next(state) % KINDS), .group = (int)(next(state) % GROUPS)};
    call.root = (int)(next(state) % (uint64_t)shared[call.group].size);
    call.count = COUNTS[next(state) % (sizeof COUNTS / sizeof *COUNTS)];
    call.in_window = next(state) % 3 == 0;
    call.any_source = next(state) % 2 == 0;
    call.tag = call.any_source ? (int)number + 10 : (int)(number % 2);
    return call;
}

static void *run_rank(void *argument) {
    int me = (int)(intptr_t)argument;
    ml_group *groups[GROUPS];
    for (int each = 0; each < GROUPS; each++) {
        a_group *group = &shared[each];
        int member = me >= group->first && me < group->first + group->size;
        groups[each] = member ? ml_open(me - group->first, group->size, group->control, group->arenas, ARENA, -1, &SETTINGS) : NULL;
        if (member && ml_add_window(groups[each], group->windows, WINDOW * sizeof(int32_t)) < 0) exit(1);
    }
    uint64_t calls_state = seed, own_state = seed * 100 + (uint64_t)me;
    int32_t *memory = malloc(WINDOW * sizeof(int32_t));
    for (int batch = 0; batch < num_batches; batch++) {
        a_call calls[CALLS];
        int64_t handles[CALLS], received[CALLS];
        int32_t *ins[CALLS], *outs[CALLS];
        int order[CALLS];
        for (int each = 0; each < CALLS; each++) {
            a_call *call = &calls[each];
            *call = drawn(&calls_state, (uint64_t)(batch * CALLS + each));
            a_group *group = &shared[call->group];
            int rank = me - group->first, size = group->size;
            order[each] = each;
            if (!groups[call->group]) continue;
            int32_t *base = (call->in_window ? group->windows[rank] : memory);
            uint64_t given = call->count * (gives_blocks(call->kind) ? (uint64_t)size : 1);
            ins[each] = base + 2 * (uint64_t)each * LONGEST * MOST_RANKS;
            outs[each] = call->kind == ML_ALL_REDUCE || call->kind == ML_REDUCE || call->kind == ML_BROADCAST ? ins[each] : ins[each] + LONGEST * MOST_RANKS;
            for (uint64_t index = 0; index < given; index++) ins[each][index] = value(call->number, rank, index);
            int64_t sizes[MOST_RANKS];
            for (int other = 0; other < size; other++) sizes[other] = (int64_t)call->count;
            ml_call made = {
                .kind = (uint8_t)call->kind, .op = ML_SUM, .dtype = ML_I32, .ndim = 1, .root = call->root, .count = call->count, .shape = {(int64_t)call->count},
                .in = call->count ? ins[each] : NULL, .out = call->count ? outs[each] : NULL, .in_sizes = sizes, .out_sizes = sizes,
            };
            if (call->kind != ML_ALL_TO_ALL) made.in_sizes = made.out_sizes = NULL;
            if (call->kind == MESSAGE) {
                made.kind = 0;
                handles[each] = ml_send(groups[call->group], (rank + 1) % size, call->tag, &made);
                received[each] = ml_receive(groups[call->group], call->any_source ? -1 : (rank + size - 1) % size, call->tag, &made);
            } else
                handles[each] = ml_start(groups[call->group], &made);
        }
        for (int each = CALLS - 1; each > 0; each--) { /* Fisher-Yates; every rank in its own order */
            int other = (int)(next(&own_state) % (uint64_t)(each + 1)), kept = order[each];
            order[each] = order[other], order[other] = kept;
        }
        for (int place = 0; place < CALLS; place++) {
            int each = order[place];
            a_call *call = &calls[each];
            ml_group *group = groups[call->group];
            int rank = me - shared[call->group].first, size = shared[call->group].size;
            if (!group) continue;
            enum ml_status status;
            if (call->kind == MESSAGE) {
                status = ml_wait_message(group, received[each], SECONDS * 1000000ll);
                if (status == ML_DONE) status = ml_wait_message(group, handles[each], SECONDS * 1000000ll);
                if (ml_message_source(group, received[each]) != (rank + size - 1) % size) fail(call, rank, "comes from another rank");
                ml_release_message(group, received[each]);
                ml_release_message(group, handles[each]);
            } else
                status = ml_wait(group, handles[each], SECONDS * 1000000ll);
            if (status != ML_DONE) fail(call, rank, status == ML_WAITING ? "does not end" : "failed");
            uint64_t taken = call->count * (takes_blocks(call->kind) ? (uint64_t)size : 1);
            int32_t expected;
            for (uint64_t index = 0; index < taken; index++)
                if (wanted(call, rank, size, index, &expected) && outs[each][index] != expected) fail(call, rank, "is wrong");
            memset(ins[each], 0xff, 2 * LONGEST * MOST_RANKS * sizeof(int32_t));
        }
    }
    for (int each = 0; each < GROUPS; each++)
        if (groups[each]) { /* a rank may leave as soon as nobody needs it: this barrier is not part of the engine's contract, but of the memory's */
            ml_call barrier = {.kind = ML_BARRIER, .dtype = ML_I32};
            if (ml_wait(groups[each], ml_start(groups[each], &barrier), SECONDS * 1000000ll) != ML_DONE) exit(1);
        }
    for (int each = 0; each < GROUPS; each++)
        if (groups[each]) ml_close(groups[each]);
    free(memory);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    num_ranks = atoi(argv[1]), num_batches = atoi(argv[2]), seed = (uint64_t)atoll(argv[3]);
    pthread_t threads[MOST_RANKS];
    for (int each = 0; each < GROUPS; each++) {
        a_group *group = &shared[each];
        group->first = each == 2;
        group->size = num_ranks - (each > 0);
        size_t bytes = (ml_control_bytes(group->size) + 63) / 64 * 64;
        group->control = memset(aligned_alloc(64, bytes), 0, bytes);
        for (int rank = 0; rank < group->size; rank++) {
            group->arenas[rank] = aligned_alloc(64, ARENA);
            group->windows[rank] = aligned_alloc(64, WINDOW * sizeof(int32_t));
        }
    }
    for (int rank = 0; rank < num_ranks; rank++) pthread_create(&threads[rank], NULL, run_rank, (void *)(intptr_t)rank);
    for (int rank = 0; rank < num_ranks; rank++) pthread_join(threads[rank], NULL);
    for (int each = 0; each < GROUPS; each++) {
        free(shared[each].control);
        for (int rank = 0; rank < shared[each].size; rank++) free(shared[each].arenas[rank]), free(shared[each].windows[rank]);
    }
    printf("%d ranks, %d calls: as computed.\n", num_ranks, num_batches * CALLS);
    return 0;
}
