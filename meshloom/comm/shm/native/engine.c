/* A group: opened and closed, its windows, and queries about it (engine.h has an overview). */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static const uint8_t ELEMENT_BYTES[ML_DTYPES] = {8, 4, 2, 2, 8, 4, 2, 1, 8, 4, 2, 1, 1, 8, 16, 1, 2, 4, 8, 16};

size_t ml_element_bytes(int dtype) { return ELEMENT_BYTES[dtype]; } /* dtype: this rank's own, or checked */

static size_t seats_bytes(int size) { return sizeof(control_area) + (size_t)size * sizeof(seat); }

size_t ml_control_bytes(int size) { return seats_bytes(size) + (size_t)size * size * sizeof(mailbox); }

static void free_tables(ml_group *group) {
    free(group->arenas), free(group->letter_blocks), free(group->head), free(group->taken), free(group->sent), free(group->places);
    free(group);
}

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
    group->sent = calloc((size_t)size, sizeof(uint64_t));
    group->places = calloc((size_t)size * RING, sizeof(place));
    pthread_mutex_init(&group->lock, NULL);
    if (!group->arenas || !group->letter_blocks || !group->head || !group->taken || !group->sent || !group->places) {
        free_tables(group);
        return NULL;
    }
    memcpy(group->arenas, arenas, (size_t)size * sizeof(uint8_t *));
    ml_join_groups(group);
    return group;
}

void ml_close(ml_group *group) {
    ml_leave_groups(group);
    for (uint64_t number = group->executed; number < group->planned; number++) ml_let_go(group->queue[number % group->room].operation);
    for (size_t index = 0; index < group->num_messages; index++) free(group->messages[index]);
    for (int index = 0; index < group->num_windows; index++) free(group->windows[index].bases);
    free(group->queue), free(group->blocks), free(group->windows), free(group->messages);
    pthread_mutex_destroy(&group->lock);
    free_tables(group);
}

int ml_size(const ml_group *group) { return group->size; }

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

void ml_abort(ml_group *group) {
    uint32_t nobody = 0;
    atomic_compare_exchange_strong(&group->control->aborted, &nobody, (uint32_t)group->rank + 1);
    ml_ring_all(group);
}

int ml_aborted_by(ml_group *group) {
    uint32_t by = atomic_load_explicit(&group->control->aborted, memory_order_acquire);
    return by <= (uint32_t)group->size ? (int)by - 1 : -1;
}

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

int ml_descriptor_of(ml_group *group, int rank, uint64_t number, ml_descriptor *found) {
    if (ml_started(group, rank) <= number) return 0;
    copy_once(found, descriptor_of(group, rank, number), sizeof *found);
    bool is_sense = found->kind <= ML_ALL_TO_ALL && found->op <= ML_XOR && found->dtype < ML_DTYPES;
    return found->number == number && is_sense;
}

uint64_t ml_missing_bytes(ml_group *group) { return group->missing_bytes; }
