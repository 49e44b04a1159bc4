/* Point-to-point messages: letters in the mailbox of a pair of ranks, in order, with payloads in the sender's arena. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static bool post(ml_group *group, message *message) {
    const ml_call *call = &message->call;
    size_t element = ml_element_bytes(call->dtype);
    mailbox *mail = mail_between(group, group->rank, message->peer);
    uint64_t piece = group->settings.message_piece_bytes / element, left = call->count - message->next, length = left < piece ? left : piece;
    uint64_t posted = group->sent[message->peer], slot = posted % MAIL;
    letter *letter = &mail->letters[slot];
    if (atomic_load_explicit(&letter->full, memory_order_acquire)) return false;
    ml_sweep(group);
    ml_sweep_letters(group);
    uint64_t offset = 0, bytes = rounded(length * element);
    if (bytes) {
        if (group->message_bytes && group->message_bytes + bytes > group->settings.message_bytes) return false;
        if (!ml_allocate(group, bytes, UINT64_MAX, &offset)) {
            if (!group->num_blocks && !group->failure) group->failure = ML_NO_SPACE;
            return false;
        }
        copy(group->arenas[group->rank] + offset, (const uint8_t *)call->in + message->next * element, length * element);
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
    group->sent[message->peer] = posted + 1;
    atomic_store_explicit(&mail->posted, posted + 1, memory_order_release);
    ml_ring_one(group, message->peer);
    return true;
}

/* The number of the first letter from a rank under a tag that was not received, or -1. */
static int64_t letter_from(ml_group *group, int source, int64_t tag) {
    mailbox *mail = mail_between(group, source, group->rank);
    uint64_t posted = atomic_load_explicit(&mail->posted, memory_order_acquire);
    uint64_t head = group->head[source];
    if (posted < head || posted - head > MAIL) posted = head; /* no honest sender has such a count */
    for (uint64_t number = head; number < posted; number++)
        if (!(group->taken[source] >> (number - head) & 1) && mail->letters[number % MAIL].tag == tag) return (int64_t)number;
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
    letter *letter = &mail->letters[number % MAIL], read;
    copy_once(&read, letter, sizeof read);
    const ml_call *call = &message->call;
    message->found = source;
    message->began = true;
    if (read.count != call->count || read.dtype != call->dtype) {
        message->failed = true;
        group->mismatch = source;
        group->mismatch_number = (uint64_t)number;
        return true;
    }
    size_t element = ml_element_bytes(call->dtype);
    bool is_next = read.first == message->next && read.length <= call->count - message->next && (read.length || !call->count);
    if (!is_next || !is_within(read.offset, read.length * element, group->capacity)) {
        group->mismatch = source;
        group->mismatch_number = (uint64_t)number;
        group->failure = ML_OUTSIDE;
        return false;
    }
    copy((uint8_t *)call->out + read.first * element, group->arenas[source] + read.offset, read.length * element);
    message->next += read.length;
    message->over = message->next == call->count;
    uint64_t bit = (uint64_t)number - group->head[source];
    group->taken[source] |= (uint64_t)1 << bit;
    while (group->taken[source] & 1) group->taken[source] >>= 1, group->head[source]++;
    atomic_store_explicit(&letter->full, 0, memory_order_release);
    ml_ring_one(group, source);
    return true;
}

/* Messages of one pair keep the order of their start: one that cannot proceed blocks the later ones of its pair. */
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

/* A sent message is freed immediately; a received one when it is released. */
bool ml_advance_messages(ml_group *group) {
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

message *ml_message_of(ml_group *group, int64_t id) {
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
    ml_advance_messages(group);
    pthread_mutex_unlock(&group->lock);
    return id;
}

int64_t ml_send(ml_group *group, int destination, int64_t tag, const ml_call *call) { return add_message(group, true, destination, tag, call); }

int64_t ml_receive(ml_group *group, int source, int64_t tag, const ml_call *call) { return add_message(group, false, source, tag, call); }

int ml_message_source(ml_group *group, int64_t id) {
    pthread_mutex_lock(&group->lock);
    message *message = ml_message_of(group, id);
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

int ml_letter_of(ml_group *group, int source, uint64_t number, ml_descriptor *found) {
    letter posted;
    copy_once(&posted, &mail_between(group, source, group->rank)->letters[number % MAIL], sizeof posted);
    *found = (ml_descriptor){.number = number, .count = posted.count, .dtype = posted.dtype, .ndim = posted.ndim};
    memcpy(found->shape, posted.shape, sizeof found->shape);
    return posted.dtype < ML_DTYPES;
}
