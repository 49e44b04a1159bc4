/* Waiting: a rank polls, yields its core, and sleeps until it is woken; meanwhile its other groups advance. */
#define _GNU_SOURCE
#include "internal.h"

#include <sched.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Of all functions that the engine uses this one alone has a version younger than glibc 2.17, which wheels are for. The older one is the same. */
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.17");
#endif

/* Groups of this process: one that waits advances the others. */
static pthread_mutex_t groups_lock = PTHREAD_MUTEX_INITIALIZER;
static ml_group *groups;

void ml_join_groups(ml_group *group) {
    pthread_mutex_lock(&groups_lock);
    group->next = groups;
    groups = group;
    pthread_mutex_unlock(&groups_lock);
}

void ml_leave_groups(ml_group *group) {
    pthread_mutex_lock(&groups_lock);
    for (ml_group **link = &groups; *link; link = &(*link)->next)
        if (*link == group) {
            *link = group->next;
            break;
        }
    pthread_mutex_unlock(&groups_lock);
}

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

/* Wake sleeping ranks after publishing. The fence orders the publication before the read of `sleeping`; a sleeper sets
 * `sleeping`, followed by a fence, before its last check of what is published. So one of the two sees the other. */
void ml_ring_all(ml_group *group) {
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < group->size; rank++)
        if (rank != group->rank) ring(group, rank);
}

void ml_ring_one(ml_group *group, int rank) {
    atomic_thread_fence(memory_order_seq_cst);
    ring(group, rank);
}

/* Advance the other groups of this process. Returns whether one of them has unfinished operations. */
static bool advance_others(ml_group *group) {
    bool left = false;
    pthread_mutex_lock(&groups_lock);
    for (ml_group *other = groups; other; other = other->next) {
        if (other == group || pthread_mutex_trylock(&other->lock)) continue;
        if (other->executed < other->planned || other->num_messages) {
            ml_advance(other);
            ml_advance_messages(other);
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
    /* Peers may still access a payload in a window of this rank. If the mark was overwritten, they have all finished. */
    return group->drain[number % RING] != (uint64_t)number + 1 || ml_all_finished(group) > (uint64_t)number;
}

static bool has_come(ml_group *group, int64_t id) {
    message *message = ml_message_of(group, id);
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
        bool moved = ml_advance(group);
        moved = ml_advance_messages(group) || moved;
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
        moved = ml_advance(group);
        moved = ml_advance_messages(group) || moved;
        over = met(group, which) || state(group) != ML_WAITING;
        pthread_mutex_unlock(&group->lock);
        if (!moved && !over) sleep_on(&own->bell, seen, left);
        atomic_fetch_sub_explicit(&own->sleeping, 1, memory_order_seq_cst);
    }
}

enum ml_status ml_wait(ml_group *group, int64_t number, int64_t microseconds) { return wait_until(group, is_over, number, microseconds); }

enum ml_status ml_wait_message(ml_group *group, int64_t id, int64_t microseconds) {
    enum ml_status status = wait_until(group, has_come, id, microseconds);
    if (status != ML_DONE) return status;
    pthread_mutex_lock(&group->lock);
    message *message = ml_message_of(group, id);
    bool failed = message && message->failed;
    pthread_mutex_unlock(&group->lock);
    return failed ? ML_MISMATCH : ML_DONE;
}
