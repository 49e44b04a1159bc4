/* Collectives and messages of the ranks of one host, through memory that all of them map.
 *
 * A group has one control area, which all ranks map, and one arena per rank, which its owner writes and all read:
 *
 *     control    | rank 0: started, finished, bell, descriptors | rank 1: ... | claims | mailboxes |
 *     arena r    | payload of an operation | payload | ...        the inputs of rank r, until all ranks have read them
 *     windows    memory of each rank that all ranks map permanently; payloads there are used in place
 *
 * A rank starts an operation: it copies its payload into its arena and publishes a descriptor. Once all ranks have started an
 * operation, each can compute its result without further help from the others: every rank computes small sums for itself; chunks of large ones are
 * computed by the rank that claims them. Large operations are split into pieces, so that payloads stay in the caches.
 *
 * Nothing in shared memory is trusted. A rank keeps its own calls and all that it computes with in private memory. It copies others' descriptors and letters once and
 * checks the copies, so a hostile writer can end a run or corrupt its numbers, but cannot make a rank read or write outside of arenas, windows and its own tensors.
 *
 * Every function of a group may be called from several threads of its rank. Only ml_wait and ml_wait_message wait.
 */
#ifndef MESHLOOM_ENGINE_H
#define MESHLOOM_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#define ML_MAX_RANKS 256
#define ML_DIMS 8 /* of a shape that are stored, for error messages */

enum ml_kind {
    ML_BARRIER,
    ML_ALL_REDUCE,
    ML_REDUCE,
    ML_BROADCAST,
    ML_ALL_GATHER,
    ML_REDUCE_SCATTER,
    ML_GATHER,
    ML_SCATTER,
    ML_ALL_TO_ALL,
};

enum ml_op { ML_SUM, ML_AVG, ML_PRODUCT, ML_MIN, ML_MAX, ML_AND, ML_OR, ML_XOR };

enum ml_dtype {
    ML_F64, ML_F32, ML_F16, ML_BF16,
    ML_I64, ML_I32, ML_I16, ML_I8, ML_U64, ML_U32, ML_U16, ML_U8, ML_BOOL,
    ML_C64, ML_C128,
    ML_MOVED_1, ML_MOVED_2, ML_MOVED_4, ML_MOVED_8, ML_MOVED_16, /* other types of so many bytes, which are moved but not reduced */
    ML_DTYPES,
};

enum ml_status {
    ML_DONE,
    ML_WAITING,
    ML_MISMATCH,  /* ranks have made different calls: ml_mismatch says which rank */
    ML_ABORTED,   /* a rank has aborted: ml_aborted_by says which */
    ML_NO_SPACE,  /* the arena cannot grow: ml_missing_bytes says by how much */
    ML_NO_MEMORY, /* of this process */
    ML_OUTSIDE,   /* a rank has published an address outside of its memory: ml_mismatch says which rank */
};

/* One call of one rank.
 *
 * count: elements of the tensor that is compared between ranks: of the full tensor for all_reduce, reduce and broadcast; of one rank's part otherwise.
 * in, out: contiguous; those of several ranks are consecutive in rank order, unless ins or outs has an address for each.
 * in_sizes, out_sizes: of all_to_all, elements to and from each rank.
 */
typedef struct {
    uint8_t kind, op, dtype, ndim;
    int32_t root;
    uint64_t count;
    int64_t shape[ML_DIMS];
    const void *in;
    void *out;
    const void *const *ins;
    void *const *outs;
    const int64_t *in_sizes, *out_sizes;
} ml_call;

/* A started piece of a rank, as the others see it. */
typedef struct {
    uint64_t number;
    uint64_t count;
    uint64_t first, length; /* this piece: elements of each block */
    uint64_t offset;        /* of the payload, within the arena or window */
    uint32_t window;        /* 0: the arena; w + 1: window w */
    int32_t root;
    uint8_t kind, op, dtype, ndim;
    uint8_t reserved[4];
    int64_t shape[ML_DIMS];
} ml_descriptor;

/* small_bytes: up to this size every rank computes all of a sum. chunk_bytes: claimed at a time.
 * piece_bytes: payload of one piece. eager_bytes: of one rank's pieces that are published and not finished.
 * spins: polls before yielding the core; 0 if ranks outnumber cores. */
typedef struct {
    uint64_t small_bytes, chunk_bytes, piece_bytes, eager_bytes;
    uint64_t message_piece_bytes, message_bytes;
    uint32_t spins, yields;
} ml_settings;

typedef struct ml_group ml_group;

size_t ml_control_bytes(int size);
size_t ml_element_bytes(int dtype);
int ml_reduces(int dtype, int op);

/* control: zeroed, ml_control_bytes(size). arenas: all ranks', `capacity` bytes each, of which files grow by fallocate(arena_file) as needed
 * (arena_file < 0: all of it is allocated). */
ml_group *ml_open(int rank, int size, void *control, void *const *arenas, uint64_t capacity, int arena_file, const ml_settings *settings);
void ml_close(ml_group *group);
int ml_size(const ml_group *group);

/* Windows are added on all ranks in one order, between operations. bases: address of each rank's part in this process. Returns its number, or -1. */
int ml_add_window(ml_group *group, void *const *bases, uint64_t num_bytes);

/* Returns the number to wait for, or -1 without memory. */
int64_t ml_start(ml_group *group, const ml_call *call);
enum ml_status ml_wait(ml_group *group, int64_t number, int64_t microseconds);

/* Messages in order per pair of ranks and tag; source -1: from any rank. Returns an id, or -1 without memory. */
int64_t ml_send(ml_group *group, int destination, int64_t tag, const ml_call *call);
int64_t ml_receive(ml_group *group, int source, int64_t tag, const ml_call *call);
enum ml_status ml_wait_message(ml_group *group, int64_t id, int64_t microseconds);
int ml_message_source(ml_group *group, int64_t id);
void ml_release_message(ml_group *group, int64_t id);

void ml_abort(ml_group *group);
int ml_aborted_by(ml_group *group);                                     /* -1: none, or no rank of this group */
uint64_t ml_started(ml_group *group, int rank);                         /* pieces of operations */
uint64_t ml_finished(ml_group *group);                                  /* by this rank: it has finished the pieces below this number */
int ml_mismatch(ml_group *group, uint64_t *number);                     /* a rank whose call differs from this one's, and the call's number; -1: none */
int ml_letter_of(ml_group *group, int source, uint64_t number, ml_descriptor *found);   /* of a message that did not match; returns whether it is valid */
int ml_descriptor_of(ml_group *group, int rank, uint64_t number, ml_descriptor *found); /* returns whether it is still stored, and valid */
uint64_t ml_missing_bytes(ml_group *group);

#endif
