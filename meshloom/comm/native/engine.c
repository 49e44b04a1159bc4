/* The ranks of one host exchange tensors through mapped memory (engine.h says how). */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "reduce.h"

enum {
    LINE = 64,   /* bytes of a cache line */
    RING = 256,  /* descriptors of a rank that are kept: pieces under way at a time */
    MAIL = 64,   /* messages of a pair of ranks under way at a time */
    CLAIMS = 64, /* words of the bitmap of chunks of a piece; with 64 bits each */
};

/* ------------------------------------------------------------------ what all ranks map */

typedef struct {
    _Alignas(LINE) _Atomic uint64_t started;  /* pieces whose descriptors are there */
    _Alignas(LINE) _Atomic uint64_t finished; /* pieces that this rank has left for good */
    _Alignas(LINE) _Atomic uint32_t bell;     /* a futex */
    _Atomic uint32_t sleeping;
    _Alignas(LINE) ml_descriptor ring[RING];
} seat;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t next; /* chunk to be claimed */
    _Atomic uint64_t done;
} claim;

typedef struct {
    _Atomic uint32_t full; /* set by the sender, cleared by the receiver */
    uint32_t window;
    int64_t tag;
    uint64_t offset;
    uint64_t first, length; /* this piece: elements */
    uint64_t count;         /* elements of the message */
    uint8_t dtype, ndim, reserved[6];
    int64_t shape[ML_DIMS];
} letter;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t posted;
    _Alignas(LINE) letter letters[MAIL];
} mailbox;

typedef struct {
    _Alignas(LINE) _Atomic uint32_t aborted; /* 1 + the rank that has left */
    _Alignas(LINE) claim claims[RING];
    seat seats[]; /* then the mailboxes: from rank s to rank d at s * size + d */
} control_area;

/* ------------------------------------------------------------------ what a rank keeps to itself */

typedef struct {
    uint64_t offset, length; /* of the arena */
    uint64_t number;         /* of the piece that lies there; UINT64_MAX: a message */
} block;

/* A call, shared by its pieces. */
typedef struct {
    ml_call call;
    int64_t *sizes; /* of all_to_all: to each rank, then from each */
    void **outs;
    const void **ins;
    int pieces; /* that are not over */
} operation;

typedef struct {
    operation *operation;
    uint64_t first, length;
    uint64_t bytes; /* of payload */
    bool own_chunks_known;
    uint64_t own_chunks[CLAIMS]; /* which chunks this rank has computed, and written to its own output already */
} piece;

typedef struct {
    int64_t id;
    bool sends, over, failed;
    int peer, found; /* asked for, and whom it came from */
    int64_t tag;
    ml_call call;
    uint64_t next; /* element that is still to be posted or to be taken */
    bool began;
} message;

struct ml_group {
    int rank, size;
    ml_settings settings;
    control_area *control;
    mailbox *mail;
    uint8_t **arenas;
    uint64_t capacity, backed;
    int arena_file;
    pthread_mutex_t lock;
    struct ml_group *next; /* of this process */

    piece *queue; /* a ring of `room` pieces: those numbered executed .. planned - 1 */
    uint64_t room;
    uint64_t planned, published, claimed, executed;
    uint64_t eager; /* bytes of published pieces that are not over */
    uint64_t drain[RING]; /* 1 + number of a piece whose payload lies in a window of this rank */

    block *blocks; /* sorted by offset */
    size_t num_blocks, room_blocks;

    struct {
        uint8_t **bases;
        uint64_t num_bytes;
    } *windows;
    int num_windows;

    message **messages; /* in the order in which they were started */
    size_t num_messages, room_messages;
    int64_t next_id;
    uint64_t letters_posted;
    uint64_t message_bytes;
    uint64_t *letter_blocks; /* [size][MAIL] 1 + offset in the arena of what was posted and may lie there */
    uint64_t *head;          /* [size] first letter from there that was not taken */
    uint64_t *taken;         /* [size] a bit per letter from head on */

    int mismatch;
    uint64_t mismatch_number;
    uint64_t missing_bytes;
    enum ml_status failure;
};

/* Groups of this process: one that waits lets the others go on. */
static pthread_mutex_t groups_lock = PTHREAD_MUTEX_INITIALIZER;
static ml_group *groups;

static const uint8_t ELEMENT_BYTES[ML_DTYPES] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1, 8, 16, 1, 2, 4, 8, 16};

size_t ml_element_bytes(int dtype) { return ELEMENT_BYTES[dtype]; }

static uint64_t rounded(uint64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static size_t seats_bytes(int size) { return sizeof(control_area) + (size_t)size * sizeof(seat); }

size_t ml_control_bytes(int size) { return seats_bytes(size) + (size_t)size * size * sizeof(mailbox); }

static seat *seat_of(ml_group *group, int rank) { return &group->control->seats[rank]; }

static mailbox *mail_between(ml_group *group, int source, int destination) { return &group->mail[source * group->size + destination]; }

/* ------------------------------------------------------------------ waiting and waking */

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_microseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

static void sleep_on(_Atomic uint32_t *bell, uint32_t seen, int64_t microseconds) {
    struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
#ifdef __linux__
    syscall(SYS_futex, (uint32_t *)bell, FUTEX_WAIT, seen, &time, NULL, 0);
#else
    (void)bell, (void)seen;
    if (microseconds > 200) time = (struct timespec){0, 200000};
    nanosleep(&time, NULL);
#endif
}

static void ring(ml_group *group, int rank) {
    seat *theirs = seat_of(group, rank);
    if (atomic_load_explicit(&theirs->sleeping, memory_order_seq_cst)) {
        atomic_fetch_add_explicit(&theirs->bell, 1, memory_order_seq_cst);
#ifdef __linux__
        syscall(SYS_futex, (uint32_t *)&theirs->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
    }
}

/* After something was published: whoever sleeps looks again. The fence orders what was published before the look at `sleeping`;
 * a sleeper sets `sleeping`, with a fence behind it, before its last look at what is published. One of the two sees the other. */
static void ring_all(ml_group *group) {
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < group->size; rank++)
        if (rank != group->rank) ring(group, rank);
}

static void ring_one(ml_group *group, int rank) {
    atomic_thread_fence(memory_order_seq_cst);
    ring(group, rank);
}

/* ------------------------------------------------------------------ the arena */

static uint64_t all_finished(ml_group *group) {
    uint64_t least = UINT64_MAX;
    for (int rank = 0; rank < group->size; rank++) {
        uint64_t finished = atomic_load_explicit(&seat_of(group, rank)->finished, memory_order_acquire);
        if (finished < least) least = finished;
    }
    return least;
}

static void remove_block(ml_group *group, size_t index) {
    memmove(group->blocks + index, group->blocks + index + 1, (--group->num_blocks - index) * sizeof(block));
}

static void free_at(ml_group *group, uint64_t offset) {
    for (size_t index = 0; index < group->num_blocks; index++)
        if (group->blocks[index].offset == offset) {
            remove_block(group, index);
            return;
        }
}

/* Let go of what all ranks have taken. */
static void sweep(ml_group *group) {
    uint64_t finished = all_finished(group);
    size_t kept = 0;
    for (size_t index = 0; index < group->num_blocks; index++)
        if (group->blocks[index].number >= finished) group->blocks[kept++] = group->blocks[index];
    group->num_blocks = kept;
}

static void sweep_letters(ml_group *group) {
    for (int rank = 0; group->letters_posted && rank < group->size; rank++)
        for (int slot = 0; slot < MAIL; slot++) {
            uint64_t *lies = &group->letter_blocks[rank * MAIL + slot];
            letter *posted = &mail_between(group, group->rank, rank)->letters[slot];
            if (*lies && !atomic_load_explicit(&posted->full, memory_order_acquire)) {
                free_at(group, *lies - 1);
                group->message_bytes -= rounded(posted->length * ml_element_bytes(posted->dtype));
                group->letters_posted--;
                *lies = 0;
            }
        }
}

static bool grown_to(ml_group *group, uint64_t end) {
    if (end <= group->backed) return true;
    if (end > group->capacity) {
        group->missing_bytes = end;
        return false;
    }
    uint64_t wanted = group->backed * 2 > end ? group->backed * 2 : end;
    wanted = (wanted + (1 << 20) - 1) >> 20 << 20;
    if (wanted > group->capacity) wanted = group->capacity;
#ifdef __linux__
    if (group->arena_file >= 0) {
        int result;
        do {
            result = fallocate(group->arena_file, 0, (off_t)group->backed, (off_t)(wanted - group->backed));
            if (result && errno == ENOSPC && wanted > end) wanted = end, errno = EINTR; /* what is needed may fit where twice as much does not */
        } while (result && errno == EINTR);
        if (result && errno != EOPNOTSUPP) {
            group->missing_bytes = end;
            return false;
        }
    }
#endif
    group->backed = wanted;
    return true;
}

/* The lowest gap that is large enough: what was used last is still in the caches. Returns false if there is none. */
static bool allocate(ml_group *group, uint64_t length, uint64_t number, uint64_t *offset) {
    length = rounded(length);
    if (group->num_blocks == group->room_blocks) {
        size_t room = group->room_blocks ? 2 * group->room_blocks : 64;
        block *larger = realloc(group->blocks, room * sizeof(block));
        if (!larger) {
            group->failure = ML_NO_MEMORY;
            return false;
        }
        group->blocks = larger, group->room_blocks = room;
    }
    uint64_t start = 0;
    size_t index = 0;
    for (; index < group->num_blocks && group->blocks[index].offset - start < length; index++)
        start = group->blocks[index].offset + group->blocks[index].length;
    if (!grown_to(group, start + length)) return false;
    memmove(group->blocks + index + 1, group->blocks + index, (group->num_blocks++ - index) * sizeof(block));
    group->blocks[index] = (block){start, length, number};
    *offset = start;
    return true;
}

/* ------------------------------------------------------------------ pieces of operations */

static bool has_one_place(int kind) { return kind == ML_ALL_REDUCE || kind == ML_REDUCE || kind == ML_BROADCAST || kind == ML_ALL_GATHER || kind == ML_GATHER; }

static bool hands_in(const ml_group *group, const ml_call *call) {
    switch (call->kind) {
    case ML_BARRIER: return false;
    case ML_BROADCAST:
    case ML_SCATTER: return group->rank == call->root;
    case ML_GATHER: return group->rank != call->root; /* the destination's own lies where it reads it */
    case ML_REDUCE:
    default: return true;
    }
}

static const uint8_t *input_of(const ml_group *group, const operation *operation, int rank) {
    const ml_call *call = &operation->call;
    if (operation->ins) return operation->ins[rank];
    (void)group;
    return (const uint8_t *)call->in + (has_one_place(call->kind) ? 0 : (uint64_t)rank * call->count * ml_element_bytes(call->dtype));
}

static uint8_t *output_of(const operation *operation, int rank) {
    const ml_call *call = &operation->call;
    if (operation->outs) return operation->outs[rank];
    return (uint8_t *)call->out + (uint64_t)rank * call->count * ml_element_bytes(call->dtype);
}

static int64_t total(const int64_t *sizes, int size) {
    int64_t sum = 0;
    for (int rank = 0; rank < size; rank++) sum += sizes[rank];
    return sum;
}

static uint64_t payload_bytes(const ml_group *group, const operation *operation, uint64_t length) {
    const ml_call *call = &operation->call;
    if (!hands_in(group, call)) return 0;
    size_t element = ml_element_bytes(call->dtype);
    if (call->kind == ML_ALL_TO_ALL) return (uint64_t)group->size * sizeof(int64_t) + (uint64_t)total(operation->sizes, group->size) * element;
    return (has_one_place(call->kind) ? 1 : (uint64_t)group->size) * rounded(length * element);
}

/* Where a payload lies for good, if it does. */
static bool in_window(const ml_group *group, const operation *operation, uint64_t first, uint32_t *window, uint64_t *offset) {
    const ml_call *call = &operation->call;
    if (operation->ins || call->kind == ML_ALL_TO_ALL || call->kind == ML_SCATTER || (call->kind == ML_ALL_REDUCE && call->in != call->out)) return false;
    uint64_t bytes = call->count * ml_element_bytes(call->dtype) * (has_one_place(call->kind) ? 1 : (uint64_t)group->size);
    for (int index = 0; index < group->num_windows; index++) {
        const uint8_t *base = group->windows[index].bases[group->rank], *in = call->in;
        if (in >= base && in + bytes <= base + group->windows[index].num_bytes) {
            *window = (uint32_t)index + 1;
            *offset = (uint64_t)(in - base) + (has_one_place(call->kind) ? first * ml_element_bytes(call->dtype) : 0);
            return true;
        }
    }
    return false;
}

static void let_go(operation *operation) {
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
    piece->bytes = payload_bytes(group, operation, length);
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
        memcpy(to + table, call->in, (uint64_t)total(operation->sizes, group->size) * element);
    } else if (has_one_place(call->kind)) {
        memcpy(to, input_of(group, operation, group->rank) + piece->first * element, bytes);
    } else {
        for (int rank = 0; rank < group->size; rank++)
            if (rank != group->rank) memcpy(to + (uint64_t)rank * rounded(bytes), input_of(group, operation, rank) + piece->first * element, bytes);
    }
}

/* Publish the next piece, if there is room for it. */
static bool publish(ml_group *group) {
    uint64_t number = group->published;
    if (number == group->planned) return false;
    piece *piece = &group->queue[number % group->room];
    const ml_call *call = &piece->operation->call;
    if (group->eager && group->eager + piece->bytes > group->settings.eager_bytes) return false;
    if (number >= RING && all_finished(group) <= number - RING) return false; /* the descriptor's place is still in use */
    seat *own = seat_of(group, group->rank);
    ml_descriptor *descriptor = &own->ring[number % RING];
    uint32_t window = 0;
    uint64_t offset = 0;
    uint64_t *drain = &group->drain[number % RING];
    *drain = 0;
    if (piece->bytes) {
        if (in_window(group, piece->operation, piece->first, &window, &offset)) {
            if (call->kind != ML_ALL_REDUCE) *drain = number + 1; /* there nobody reads or writes any more once all chunks are done */
            piece->bytes = 0;
        } else {
            sweep(group);
            if (!allocate(group, piece->bytes, number, &offset)) {
                sweep_letters(group);
                if (!group->num_blocks && !group->failure) group->failure = ML_NO_SPACE; /* otherwise there will be room */
                return false;
            }
            copy_in(group, piece, group->arenas[group->rank] + offset);
        }
    }
    group->eager += piece->bytes;
    *descriptor = (ml_descriptor){
        .number = number, .count = call->count, .first = piece->first, .length = piece->length, .offset = offset, .window = window,
        .root = call->root, .kind = call->kind, .op = call->op, .dtype = call->dtype, .ndim = call->ndim,
    };
    memcpy(descriptor->shape, call->shape, sizeof call->shape);
    if (group->rank == 0) { /* nobody has looked at this claim since all have finished piece number - RING, nor will before this one is published */
        atomic_store_explicit(&group->control->claims[number % RING].next, 0, memory_order_relaxed);
        atomic_store_explicit(&group->control->claims[number % RING].done, 0, memory_order_relaxed);
    }
    group->published = number + 1;
    atomic_store_explicit(&own->started, number + 1, memory_order_release);
    ring_all(group);
    return true;
}

static bool all_started(ml_group *group, uint64_t number) {
    for (int rank = 0; rank < group->size; rank++)
        if (atomic_load_explicit(&seat_of(group, rank)->started, memory_order_acquire) <= number) return false;
    return true;
}

static const ml_descriptor *descriptor_of(ml_group *group, int rank, uint64_t number) { return &seat_of(group, rank)->ring[number % RING]; }

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
            sources[rank] = rank == group->rank ? input_of(group, operation, rank) + own->first * element : handed_in(group, rank, number, group->rank);
        ml_reduce(own->dtype, own->op, (uint8_t *)call->out + own->first * element, sources, group->size, own->length);
        break;
    case ML_SCATTER: {
        const uint8_t *from = group->rank == own->root ? input_of(group, operation, group->rank) + own->first * element : handed_in(group, own->root, number, group->rank);
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

/* Do what can be done. Returns whether something was. */
static bool advance(ml_group *group) {
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

/* ------------------------------------------------------------------ messages */

static bool post(ml_group *group, message *message) {
    const ml_call *call = &message->call;
    size_t element = ml_element_bytes(call->dtype);
    mailbox *mail = mail_between(group, group->rank, message->peer);
    uint64_t piece = group->settings.message_piece_bytes / element, left = call->count - message->next, length = left < piece ? left : piece;
    uint64_t posted = atomic_load_explicit(&mail->posted, memory_order_relaxed), slot = posted % MAIL;
    letter *letter = &mail->letters[slot];
    if (atomic_load_explicit(&letter->full, memory_order_acquire)) return false;
    sweep(group);
    sweep_letters(group);
    uint64_t offset = 0, bytes = rounded(length * element);
    if (bytes) {
        if (group->message_bytes && group->message_bytes + bytes > group->settings.message_bytes) return false;
        if (!allocate(group, bytes, UINT64_MAX, &offset)) {
            if (!group->num_blocks && !group->failure) group->failure = ML_NO_SPACE;
            return false;
        }
        memcpy(group->arenas[group->rank] + offset, (const uint8_t *)call->in + message->next * element, length * element);
        group->letter_blocks[message->peer * MAIL + slot] = offset + 1;
        group->letters_posted++;
        group->message_bytes += bytes;
    }
    letter->tag = message->tag;
    letter->offset = offset;
    letter->first = message->next;
    letter->length = length;
    letter->count = call->count;
    letter->dtype = call->dtype;
    letter->ndim = call->ndim;
    memcpy(letter->shape, call->shape, sizeof call->shape);
    message->next += length;
    message->over = message->next == call->count;
    atomic_store_explicit(&letter->full, 1, memory_order_release);
    atomic_store_explicit(&mail->posted, posted + 1, memory_order_release);
    ring_one(group, message->peer);
    return true;
}

/* The first letter from a rank under a tag that was not taken; its number, or -1. */
static int64_t letter_from(ml_group *group, int source, int64_t tag) {
    mailbox *mail = mail_between(group, source, group->rank);
    uint64_t posted = atomic_load_explicit(&mail->posted, memory_order_acquire);
    for (uint64_t number = group->head[source]; number < posted; number++)
        if (!(group->taken[source] >> (number - group->head[source]) & 1) && mail->letters[number % MAIL].tag == tag) return (int64_t)number;
    return -1;
}

static bool take(ml_group *group, message *message) {
    int source = message->peer;
    int64_t number = -1;
    if (source < 0 && message->began) source = message->found;
    if (source >= 0)
        number = letter_from(group, source, message->tag);
    else
        for (int rank = 0; rank < group->size && number < 0; rank++)
            if ((number = letter_from(group, rank, message->tag)) >= 0) source = rank;
    if (number < 0) return false;
    mailbox *mail = mail_between(group, source, group->rank);
    letter *letter = &mail->letters[number % MAIL];
    const ml_call *call = &message->call;
    message->found = source;
    message->began = true;
    if (letter->count != call->count || letter->dtype != call->dtype) {
        message->failed = true;
        group->mismatch = source;
        group->mismatch_number = (uint64_t)number;
        return true;
    }
    size_t element = ml_element_bytes(call->dtype);
    memcpy((uint8_t *)call->out + letter->first * element, group->arenas[source] + letter->offset, letter->length * element);
    message->next += letter->length;
    message->over = message->next == call->count;
    uint64_t bit = (uint64_t)number - group->head[source];
    group->taken[source] |= (uint64_t)1 << bit;
    while (group->taken[source] & 1) group->taken[source] >>= 1, group->head[source]++;
    atomic_store_explicit(&letter->full, 0, memory_order_release);
    ring_one(group, source);
    return true;
}

/* Messages of one pair go in the order in which they were started; a message that cannot go on holds up the later ones of its pair. */
static bool is_held_up(ml_group *group, size_t index) {
    const message *message = group->messages[index];
    for (size_t before = 0; before < index; before++) {
        if (group->messages[before]->over || group->messages[before]->failed || group->messages[before]->sends != message->sends) continue;
        if (message->sends ? group->messages[before]->peer == message->peer
                           : group->messages[before]->tag == message->tag &&
                                 (group->messages[before]->peer == message->peer || group->messages[before]->peer < 0 || message->peer < 0))
            return true;
    }
    return false;
}

static void forget_message(ml_group *group, size_t index) {
    free(group->messages[index]);
    memmove(group->messages + index, group->messages + index + 1, (--group->num_messages - index) * sizeof(message *));
}

/* What was sent is forgotten at once; what has come when it is released. */
static bool advance_messages(ml_group *group) {
    bool moved = false;
    for (size_t index = 0; index < group->num_messages && !group->failure;) {
        message *message = group->messages[index];
        while (!message->over && !message->failed && !is_held_up(group, index) && (message->sends ? post(group, message) : take(group, message))) moved = true;
        if (message->sends && message->over)
            forget_message(group, index);
        else
            index++;
    }
    return moved;
}

static message *message_of(ml_group *group, int64_t id) {
    for (size_t index = 0; index < group->num_messages; index++)
        if (group->messages[index]->id == id) return group->messages[index];
    return NULL;
}

static int64_t add_message(ml_group *group, bool sends, int peer, int64_t tag, const ml_call *call) {
    message *added = malloc(sizeof(message));
    if (!added) return -1;
    pthread_mutex_lock(&group->lock);
    if (group->num_messages == group->room_messages) {
        size_t room = group->room_messages ? 2 * group->room_messages : 16;
        message **larger = realloc(group->messages, room * sizeof(message *));
        if (!larger) {
            pthread_mutex_unlock(&group->lock);
            free(added);
            return -1;
        }
        group->messages = larger, group->room_messages = room;
    }
    *added = (message){.id = group->next_id++, .sends = sends, .peer = peer, .found = peer, .tag = tag, .call = *call};
    int64_t id = added->id;
    group->messages[group->num_messages++] = added;
    advance_messages(group);
    pthread_mutex_unlock(&group->lock);
    return id;
}

/* ------------------------------------------------------------------ what is called from outside */

ml_group *ml_open(int rank, int size, void *control, void *const *arenas, uint64_t capacity, int arena_file, const ml_settings *settings) {
    ml_group *group = calloc(1, sizeof(ml_group));
    if (!group) return NULL;
    group->rank = rank, group->size = size;
    group->settings = *settings;
    group->control = control;
    group->mail = (mailbox *)(void *)((uint8_t *)control + seats_bytes(size));
    group->capacity = capacity;
    group->backed = arena_file < 0 ? capacity : 0;
    group->arena_file = arena_file;
    group->mismatch = -1;
    group->arenas = malloc((size_t)size * sizeof(uint8_t *));
    group->letter_blocks = calloc((size_t)size * MAIL, sizeof(uint64_t));
    group->head = calloc((size_t)size, sizeof(uint64_t));
    group->taken = calloc((size_t)size, sizeof(uint64_t));
    pthread_mutex_init(&group->lock, NULL);
    if (!group->arenas || !group->letter_blocks || !group->head || !group->taken) {
        free(group->arenas), free(group->letter_blocks), free(group->head), free(group->taken), free(group);
        return NULL;
    }
    memcpy(group->arenas, arenas, (size_t)size * sizeof(uint8_t *));
    pthread_mutex_lock(&groups_lock);
    group->next = groups;
    groups = group;
    pthread_mutex_unlock(&groups_lock);
    return group;
}

void ml_close(ml_group *group) {
    pthread_mutex_lock(&groups_lock);
    for (ml_group **link = &groups; *link; link = &(*link)->next)
        if (*link == group) {
            *link = group->next;
            break;
        }
    pthread_mutex_unlock(&groups_lock);
    for (uint64_t number = group->executed; number < group->planned; number++) let_go(group->queue[number % group->room].operation);
    for (size_t index = 0; index < group->num_messages; index++) free(group->messages[index]);
    for (int index = 0; index < group->num_windows; index++) free(group->windows[index].bases);
    free(group->queue), free(group->blocks), free(group->windows), free(group->messages);
    free(group->arenas), free(group->letter_blocks), free(group->head), free(group->taken);
    pthread_mutex_destroy(&group->lock);
    free(group);
}

int ml_add_window(ml_group *group, void *const *bases, uint64_t num_bytes) {
    uint8_t **kept = malloc((size_t)group->size * sizeof(uint8_t *));
    if (!kept) return -1;
    memcpy(kept, bases, (size_t)group->size * sizeof(uint8_t *));
    pthread_mutex_lock(&group->lock);
    void *larger = realloc(group->windows, (size_t)(group->num_windows + 1) * sizeof(*group->windows));
    int index = -1;
    if (larger) {
        group->windows = larger;
        index = group->num_windows++;
        group->windows[index].bases = kept;
        group->windows[index].num_bytes = num_bytes;
    } else
        free(kept);
    pthread_mutex_unlock(&group->lock);
    return index;
}

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
    operation->pieces = 1; /* so that it lives until all are planned */
    for (uint64_t first = 0; planned && (first < call->count || first == 0); first += length) {
        planned = plan(group, operation, first, call->count - first < length ? call->count - first : length);
        if (!length) break;
    }
    let_go(operation);
    int64_t number = planned ? (int64_t)group->planned - 1 : -1;
    while (!group->failure && publish(group)) {}
    pthread_mutex_unlock(&group->lock);
    return number;
}

/* Let other groups of this process go on. Returns whether one of them has something left to do. */
static bool advance_others(ml_group *group) {
    bool left = false;
    pthread_mutex_lock(&groups_lock);
    for (ml_group *other = groups; other; other = other->next) {
        if (other == group || pthread_mutex_trylock(&other->lock)) continue;
        if (other->executed < other->planned || other->num_messages) {
            advance(other);
            advance_messages(other);
            left = left || other->executed < other->planned;
            for (size_t index = 0; index < other->num_messages; index++) left = left || !other->messages[index]->over;
        }
        pthread_mutex_unlock(&other->lock);
    }
    pthread_mutex_unlock(&groups_lock);
    return left;
}

typedef bool condition(ml_group *group, int64_t which);

static bool is_over(ml_group *group, int64_t number) {
    if (group->executed <= (uint64_t)number) return false;
    /* Peers may still read or write what lies in a window of this rank. Where the mark was overwritten they have all finished. */
    return group->drain[number % RING] != (uint64_t)number + 1 || all_finished(group) > (uint64_t)number;
}

static bool has_come(ml_group *group, int64_t id) {
    message *message = message_of(group, id);
    return !message || message->over || message->failed;
}

static enum ml_status state(ml_group *group) {
    if (group->failure) return group->failure;
    return atomic_load_explicit(&group->control->aborted, memory_order_acquire) ? ML_ABORTED : ML_WAITING;
}

static enum ml_status wait_until(ml_group *group, condition *met, int64_t which, int64_t microseconds) {
    seat *own = seat_of(group, group->rank);
    int64_t end = 0;
    uint32_t looks = 0;
    for (;;) {
        pthread_mutex_lock(&group->lock);
        bool moved = advance(group);
        moved = advance_messages(group) || moved;
        bool over = met(group, which);
        enum ml_status status = over ? ML_DONE : state(group);
        pthread_mutex_unlock(&group->lock);
        if (status != ML_WAITING) return status;
        if (moved) {
            looks = 0;
            continue;
        }
        if (++looks <= group->settings.spins) {
            relax();
            continue;
        }
        if (!end) end = now_microseconds() + microseconds;
        int64_t left = end - now_microseconds();
        if (left <= 0) return ML_WAITING;
        if (looks <= group->settings.spins + group->settings.yields) {
            sched_yield();
            continue;
        }
        if (advance_others(group)) left = left < 500 ? left : 500;
        uint32_t seen = atomic_load_explicit(&own->bell, memory_order_seq_cst);
        atomic_fetch_add_explicit(&own->sleeping, 1, memory_order_seq_cst);
        atomic_thread_fence(memory_order_seq_cst);
        pthread_mutex_lock(&group->lock);
        moved = advance(group);
        moved = advance_messages(group) || moved;
        over = met(group, which) || state(group) != ML_WAITING;
        pthread_mutex_unlock(&group->lock);
        if (!moved && !over) sleep_on(&own->bell, seen, left);
        atomic_fetch_sub_explicit(&own->sleeping, 1, memory_order_seq_cst);
    }
}

enum ml_status ml_wait(ml_group *group, int64_t number, int64_t microseconds) { return wait_until(group, is_over, number, microseconds); }

int64_t ml_send(ml_group *group, int destination, int64_t tag, const ml_call *call) { return add_message(group, true, destination, tag, call); }

int64_t ml_receive(ml_group *group, int source, int64_t tag, const ml_call *call) { return add_message(group, false, source, tag, call); }

enum ml_status ml_wait_message(ml_group *group, int64_t id, int64_t microseconds) {
    enum ml_status status = wait_until(group, has_come, id, microseconds);
    if (status != ML_DONE) return status;
    pthread_mutex_lock(&group->lock);
    message *message = message_of(group, id);
    bool failed = message && message->failed;
    pthread_mutex_unlock(&group->lock);
    return failed ? ML_MISMATCH : ML_DONE;
}

int ml_message_source(ml_group *group, int64_t id) {
    pthread_mutex_lock(&group->lock);
    message *message = message_of(group, id);
    int source = message ? message->found : -1;
    pthread_mutex_unlock(&group->lock);
    return source;
}

void ml_release_message(ml_group *group, int64_t id) {
    pthread_mutex_lock(&group->lock);
    for (size_t index = 0; index < group->num_messages; index++)
        if (group->messages[index]->id == id) {
            forget_message(group, index);
            break;
        }
    pthread_mutex_unlock(&group->lock);
}

void ml_abort(ml_group *group) {
    uint32_t nobody = 0;
    atomic_compare_exchange_strong(&group->control->aborted, &nobody, (uint32_t)group->rank + 1);
    ring_all(group);
}

int ml_aborted_by(ml_group *group) { return (int)atomic_load_explicit(&group->control->aborted, memory_order_acquire) - 1; }

uint64_t ml_started(ml_group *group, int rank) { return atomic_load_explicit(&seat_of(group, rank)->started, memory_order_acquire); }

uint64_t ml_finished(ml_group *group) {
    pthread_mutex_lock(&group->lock);
    uint64_t executed = group->executed;
    pthread_mutex_unlock(&group->lock);
    return executed;
}

int ml_mismatch(ml_group *group, uint64_t *number) {
    pthread_mutex_lock(&group->lock);
    int rank = group->mismatch;
    *number = group->mismatch_number;
    pthread_mutex_unlock(&group->lock);
    return rank;
}

void ml_letter_of(ml_group *group, int source, uint64_t number, ml_descriptor *found) {
    const letter *posted = &mail_between(group, source, group->rank)->letters[number % MAIL];
    *found = (ml_descriptor){.number = number, .count = posted->count, .dtype = posted->dtype, .ndim = posted->ndim};
    memcpy(found->shape, posted->shape, sizeof found->shape);
}

int ml_descriptor_of(ml_group *group, int rank, uint64_t number, ml_descriptor *found) {
    if (ml_started(group, rank) <= number) return 0;
    *found = *descriptor_of(group, rank, number);
    return found->number == number;
}

uint64_t ml_missing_bytes(ml_group *group) { return group->missing_bytes; }
