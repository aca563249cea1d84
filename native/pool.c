// A job is published by growing `job` number; workers that see it take items from a counter until none is left, and say so.
// A worker spins SPINS times for the next job, then sleeps on a futex of the job number; the publisher wakes sleepers only
// when there are any. The publisher works too, and spins, then yields, for the last item to end: it never sleeps while a worker
// is behind by less than a time slice, and never burns one that a worker needs (4 threads on 2 cores must not collapse).
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 4000 // some 50 to 100 us: a pause is 10 to 40 ns, a wake by futex 60 us

struct pool {
    uint32_t n_threads;
    pthread_t *threads; // [n_threads - 1]
    pool_job *job;
    void *context;
    size_t n_items;
    _Alignas(64) _Atomic uint32_t number; // of the job; a futex
    _Alignas(64) _Atomic uint32_t n_sleeping;
    _Alignas(64) _Atomic size_t next_item;
    _Alignas(64) _Atomic uint32_t n_busy; // workers that have not left the running job yet
    atomic_bool ending;
};

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_items(struct pool *pool) {
    pool_job *job = pool->job;
    void *context = pool->context;
    size_t n_items = pool->n_items;
    for (size_t item; (item = atomic_fetch_add_explicit(&pool->next_item, 1, memory_order_relaxed)) < n_items;) job(context, item);
}

static void wait_for_job(struct pool *pool, uint32_t seen) {
    for (uint32_t i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->number, memory_order_acquire) != seen) return;
        pause_cpu();
    }
    atomic_fetch_add(&pool->n_sleeping, 1);
    while (atomic_load(&pool->number) == seen) syscall(SYS_futex, &pool->number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool->n_sleeping, 1);
}

static void *work(void *argument) {
    struct pool *pool = argument;
    for (uint32_t seen = 0;; seen++) {
        wait_for_job(pool, seen);
        if (atomic_load(&pool->ending)) return NULL;
        take_items(pool);
        atomic_fetch_sub_explicit(&pool->n_busy, 1, memory_order_release);
    }
}

static void publish(struct pool *pool) {
    atomic_fetch_add(&pool->number, 1);
    if (atomic_load(&pool->n_sleeping)) syscall(SYS_futex, &pool->number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void pool_run(struct pool *pool, pool_job *job, void *context, size_t n_items) {
    if (pool->n_threads == 1 || n_items < 2) {
        for (size_t item = 0; item < n_items; item++) job(context, item);
        return;
    }
    pool->job = job;
    pool->context = context;
    pool->n_items = n_items;
    atomic_store_explicit(&pool->next_item, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->n_busy, pool->n_threads - 1, memory_order_relaxed);
    publish(pool);
    take_items(pool);
    for (uint32_t i = 0; atomic_load_explicit(&pool->n_busy, memory_order_acquire); i++) {
        if (i < SPINS) pause_cpu();
        else sched_yield();
    }
}

struct pool *pool_new(uint32_t n_threads) {
    struct pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    *pool = (struct pool){.n_threads = 1, .threads = calloc(n_threads, sizeof *pool->threads)};
    while (pool->threads && pool->n_threads < n_threads) {
        if (pthread_create(&pool->threads[pool->n_threads - 1], NULL, work, pool)) break;
        pool->n_threads++;
    }
    if (pool->n_threads == n_threads) return pool;
    pool_free(pool);
    return NULL;
}

void pool_free(struct pool *pool) {
    if (!pool) return;
    atomic_store(&pool->ending, true);
    publish(pool);
    for (uint32_t i = 0; i + 1 < pool->n_threads; i++) pthread_join(pool->threads[i], NULL);
    free(pool->threads);
    free(pool);
}

uint32_t pool_threads(const struct pool *pool) { return pool->n_threads; }
