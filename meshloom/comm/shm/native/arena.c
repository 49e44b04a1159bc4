/* Allocation of payloads in a rank's arena, until all ranks have read them. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

uint64_t ml_all_finished(const ml_group *group) {
    uint64_t least = UINT64_MAX;
    for (int rank = 0; rank < group->size; rank++) {
        uint64_t finished = rank == group->rank ? group->executed : atomic_load_explicit(&seat_of(group, rank)->finished, memory_order_acquire);
        if (finished < least) least = finished;
    }
    return least;
}

static void remove_block(ml_group *group, size_t index) {
    memmove(group->blocks + index, group->blocks + index + 1, (--group->num_blocks - index) * sizeof(block));
}

/* Returns the number of bytes freed. */
static uint64_t free_at(ml_group *group, uint64_t offset) {
    for (size_t index = 0; index < group->num_blocks; index++)
        if (group->blocks[index].offset == offset) {
            uint64_t length = group->blocks[index].length;
            remove_block(group, index);
            return length;
        }
    return 0;
}

void ml_sweep(ml_group *group) {
    uint64_t finished = ml_all_finished(group);
    size_t kept = 0;
    for (size_t index = 0; index < group->num_blocks; index++)
        if (group->blocks[index].number >= finished) group->blocks[kept++] = group->blocks[index];
    group->num_blocks = kept;
}

void ml_sweep_letters(ml_group *group) {
    for (int rank = 0; group->letters_posted && rank < group->size; rank++)
        for (int slot = 0; slot < MAIL; slot++) {
            uint64_t *lies = &group->letter_blocks[rank * MAIL + slot];
            const letter *posted = &mail_between(group, group->rank, rank)->letters[slot];
            if (*lies && !atomic_load_explicit(&posted->full, memory_order_acquire)) {
                group->message_bytes -= free_at(group, *lies - 1);
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
            if (result && errno == ENOSPC && wanted > end) wanted = end, errno = EINTR; /* the needed bytes may fit where twice as many do not */
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

bool ml_allocate(ml_group *group, uint64_t length, uint64_t number, uint64_t *offset) {
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
