// A job is published by setting the count of untaken items; whoever lowers that count by one owns an item, and while an item is
// not finished the job cannot change, so the owner may read it. Nobody waits for a thread that has nothing in hand: a worker
// that comes late, or not at all, costs nothing. So with more threads than cores the speed falls in proportion, no further.
//
// A worker spins for SPIN_NS before it sleeps, since a wake by futex costs some 60 us: a token has a hundred jobs. The publisher
// works too; then it spins, then yields its core, until the last item is finished. It never sleeps.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 100000       // measured in time: a pause takes 3 ns on one CPU and 40 on another
#define LOOKS 32             // pauses between two readings of the clock
#define CROWDED_SPIN_NS 5000 // the same where threads outnumber cores: a spinning thread keeps a working one off its core

struct pool {
    uint32_t n_threads;
    pthread_t *threads; // [n_threads - 1]
    int64_t spin_ns;
    pool_job *job;
    void *context;
    size_t n_items;
    _Alignas(64) _Atomic size_t n_untaken;
    _Alignas(64) _Atomic size_t n_unfinished;
    _Alignas(64) _Atomic uint32_t number; // of the job; what sleepers' futex watches
    _Atomic uint32_t n_sleeping;
    atomic_bool ending;
};

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); // "yield" is no pause on most cores; isb takes some 10 ns
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void take_items(struct pool *pool) {
    size_t left = atomic_load_explicit(&pool->n_untaken, memory_order_relaxed);
    while (left) {
        if (!atomic_compare_exchange_weak_explicit(&pool->n_untaken, &left, left - 1, memory_order_acquire, memory_order_relaxed)) continue;
        pool->job(pool->context, pool->n_items - left);
        atomic_fetch_sub_explicit(&pool->n_unfinished, 1, memory_order_release);
        left = atomic_load_explicit(&pool->n_untaken, memory_order_relaxed);
    }
}

static bool has_work(struct pool *pool) { return atomic_load(&pool->n_untaken) || atomic_load(&pool->ending); }

static void wait_for_work(struct pool *pool) {
    for (int64_t end = now_ns() + pool->spin_ns; now_ns() < end;)
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(&pool->n_untaken, memory_order_relaxed)) return;
            pause_cpu();
        }
    // Announced before the last look, as the publisher looks at n_sleeping after its last write: one of the two sees the other.
    atomic_fetch_add(&pool->n_sleeping, 1);
    for (;;) {
        uint32_t seen = atomic_load(&pool->number);
        if (has_work(pool)) break;
        syscall(SYS_futex, &pool->number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
    atomic_fetch_sub(&pool->n_sleeping, 1);
}

static void *work(void *argument) {
    struct pool *pool = argument;
    while (!atomic_load(&pool->ending)) {
        take_items(pool);
        wait_for_work(pool);
    }
    return NULL;
}

static void wake(struct pool *pool, size_t most) {
    atomic_fetch_add(&pool->number, 1);
    if (!atomic_load(&pool->n_sleeping)) return;
    syscall(SYS_futex, &pool->number, FUTEX_WAKE_PRIVATE, most < pool->n_threads ? (int)most : (int)pool->n_threads, NULL, NULL, 0);
}

void pool_run(struct pool *pool, pool_job *job, void *context, size_t n_items) {
    if (pool->n_threads == 1 || n_items < 2) {
        for (size_t item = 0; item < n_items; item++) job(context, item);
        return;
    }
    pool->job = job;
    pool->context = context;
    pool->n_items = n_items;
    atomic_store_explicit(&pool->n_unfinished, n_items, memory_order_relaxed);
    atomic_store(&pool->n_untaken, n_items);
    wake(pool, n_items - 1);
    take_items(pool);
    for (int64_t end = now_ns() + pool->spin_ns;; sched_yield()) {
        do {
            for (int i = 0; i < LOOKS; i++) {
                if (!atomic_load_explicit(&pool->n_unfinished, memory_order_acquire)) return;
                pause_cpu();
            }
        } while (now_ns() < end);
    }
}

static int64_t spin_for(uint32_t n_threads) {
    cpu_set_t set;
    bool crowded = !sched_getaffinity(0, sizeof set, &set) && n_threads > (uint32_t)CPU_COUNT(&set);
    return crowded ? CROWDED_SPIN_NS : SPIN_NS;
}

struct pool *pool_new(uint32_t n_threads) {
    struct pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    *pool = (struct pool){.n_threads = 1, .threads = calloc(n_threads, sizeof *pool->threads), .spin_ns = spin_for(n_threads)};
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
    wake(pool, SIZE_MAX);
    for (uint32_t i = 0; i + 1 < pool->n_threads; i++) pthread_join(pool->threads[i], NULL);
    free(pool->threads);
    free(pool);
}

uint32_t pool_threads(const struct pool *pool) { return pool->n_threads; }
