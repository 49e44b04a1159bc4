/* Declarations that the engine's files share: shared memory, private memory, and the functions of each file.
 *
 *     engine.c       a group: opened, queried, closed    collectives.c  pieces that all ranks have started
 *     pieces.c       a call, published piece by piece    messages.c     point-to-point messages
 *     arena.c        allocation of payloads              waiting.c      waiting, and waking other ranks
 *     reduce.c       sums
 *
 * Functions declared here are called with the group's lock held, unless the comment says otherwise.
 */
#ifndef MESHLOOM_INTERNAL_H
#define MESHLOOM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "engine.h"

enum {
    LINE = 64,   /* bytes of a cache line */
    RING = 256,  /* descriptors of a rank that are stored: maximum number of pieces under way */
    MAIL = 64,   /* maximum number of messages of a pair of ranks under way */
    CLAIMS = 64, /* words of the bitmap of chunks of a piece; with 64 bits each */
};

/* ------------------------------------------------------------------ mapped by all ranks */

typedef struct {
    _Alignas(LINE) _Atomic uint64_t started;  /* pieces whose descriptors are published */
    _Alignas(LINE) _Atomic uint64_t finished; /* pieces that this rank has finished */
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
    _Alignas(LINE) _Atomic uint32_t aborted; /* 1 + the rank that has aborted */
    _Alignas(LINE) claim claims[RING];
    seat seats[]; /* then the mailboxes: from rank s to rank d at s * size + d */
} control_area;

/* ------------------------------------------------------------------ private to a rank */

typedef struct {
    uint64_t offset, length; /* of the arena */
    uint64_t number;         /* of the piece stored there; UINT64_MAX: a message */
} block;

/* Address of a rank's payload, checked. */
typedef struct {
    uint64_t offset;
    uint32_t window; /* 0: the arena; w + 1: window w */
} place;

/* A call, shared by its pieces. */
typedef struct {
    ml_call call;
    int64_t *sizes; /* of all_to_all: to each rank, then from each */
    void **outs;
    const void **ins;
    uint32_t window;        /* w + 1 if its payload is in window w; 0: it is copied to the arena */
    uint64_t window_offset; /* of the payload's start */
    int pieces;             /* that are not finished */
} operation;

typedef struct {
    operation *operation;
    uint64_t first, length;
    uint64_t bytes; /* of payload in the arena */
    bool own_chunks_known;
    uint64_t own_chunks[CLAIMS]; /* chunks that this rank has computed and written to its own output */
} piece;

typedef struct {
    int64_t id;
    bool sends, over, failed;
    int peer, found; /* the requested rank, and the actual sender */
    int64_t tag;
    ml_call call;
    uint64_t next; /* first element that was not posted or received */
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
    uint64_t eager; /* bytes of published pieces that are not finished */
    place *places; /* [RING][size] of published pieces: the own one's, and the others' once all have started it */
    uint64_t drain[RING]; /* 1 + number of a piece whose payload is in a window of this rank */

    block *blocks; /* sorted by offset */
    size_t num_blocks, room_blocks;

    struct {
        uint8_t **bases;
        uint64_t num_bytes;
    } *windows;
    int num_windows;

    message **messages; /* in order of their start */
    size_t num_messages, room_messages;
    int64_t next_id;
    uint64_t letters_posted;
    uint64_t *sent; /* [size] letters to each rank so far */
    uint64_t message_bytes;
    uint64_t *letter_blocks; /* [size][MAIL] 1 + offset in the arena of a posted payload that may still be there */
    uint64_t *head;          /* [size] first letter from that rank that was not received */
    uint64_t *taken;         /* [size] a bit per letter from head on */

    int mismatch;
    uint64_t mismatch_number;
    uint64_t missing_bytes;
    enum ml_status failure;
};

static inline uint64_t rounded(uint64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static inline seat *seat_of(const ml_group *group, int rank) { return &group->control->seats[rank]; }

static inline mailbox *mail_between(const ml_group *group, int source, int destination) { return &group->mail[source * group->size + destination]; }

static inline const ml_descriptor *descriptor_of(const ml_group *group, int rank, uint64_t number) { return &seat_of(group, rank)->ring[number % RING]; }

static inline place *place_of(const ml_group *group, int rank, uint64_t number) { return &group->places[number % RING * group->size + rank]; }

static inline piece *piece_of(const ml_group *group, uint64_t number) { return &group->queue[number % group->room]; }

/* Copy from shared memory what will be checked. It is not read there a second time, neither by this code nor by the compiler. */
static inline void copy_once(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    atomic_signal_fence(memory_order_seq_cst);
}

/* memcpy of 0 bytes still requires valid addresses. */
static inline void copy(void *to, const void *from, uint64_t bytes) {
    if (bytes && to != from) memmove(to, from, bytes);
}

/* Whether `bytes` bytes from `offset` are within `all` bytes. */
static inline bool is_within(uint64_t offset, uint64_t bytes, uint64_t all) { return offset <= all && bytes <= all - offset; }

/* Whether elements of so many bytes can be reduced in place at this offset of a window. Sender and readers decide equally. */
static inline bool is_aligned(uint64_t offset, uint64_t element) { return offset % (element < 8 ? element : 8) == 0; }

/* Whether a rank's input is one block, rather than one for each rank. */
static inline bool has_one_place(int kind) {
    return kind == ML_ALL_REDUCE || kind == ML_REDUCE || kind == ML_BROADCAST || kind == ML_ALL_GATHER || kind == ML_GATHER;
}

static inline int64_t total(const int64_t *sizes, int size) {
    int64_t sum = 0;
    for (int rank = 0; rank < size; rank++) sum += sizes[rank];
    return sum;
}

/* ------------------------------------------------------------------ waiting.c */

/* The groups of this process are listed: one that waits advances the others. Without a lock. */
void ml_join_groups(ml_group *group);
void ml_leave_groups(ml_group *group);

/* After publishing something: wake sleeping ranks. Without a lock. */
void ml_ring_all(ml_group *group);
void ml_ring_one(ml_group *group, int rank);

/* ------------------------------------------------------------------ arena.c */

uint64_t ml_all_finished(const ml_group *group); /* pieces that all ranks have finished */
void ml_sweep(ml_group *group);                  /* free payloads that all ranks have read */
void ml_sweep_letters(ml_group *group);          /* free messages that were received */
/* Allocates the lowest gap that is large enough: recently used memory is still in the caches. Returns false if there is none. */
bool ml_allocate(ml_group *group, uint64_t length, uint64_t number, uint64_t *offset);

/* ------------------------------------------------------------------ pieces.c */

bool ml_hands_in(const ml_call *call, int rank);
const uint8_t *ml_input_of(const operation *operation, int rank); /* the block for `rank` */
bool ml_publish(ml_group *group);                                  /* the next piece, if there is space for it */
void ml_let_go(operation *operation);                              /* one piece less needs it */

/* ------------------------------------------------------------------ collectives.c */

bool ml_advance(ml_group *group); /* does what can be done; returns whether that was anything */

/* ------------------------------------------------------------------ messages.c */

bool ml_advance_messages(ml_group *group); /* likewise */
message *ml_message_of(ml_group *group, int64_t id);

#endif
