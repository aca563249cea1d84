// The pool: every item once, all of them done at return, whether its threads spin, sleep, or are more than there are cores.
#include <stdatomic.h>
#include <time.h>

#include "check.h"
#include "pool.h"

enum { MOST_ITEMS = 257 };

struct count {
    _Atomic uint32_t done[MOST_ITEMS];
    uint64_t plain[MOST_ITEMS]; // not atomic: TSan sees it if pool_run returns before an item has ended
};

static void count_item(void *context, size_t item) {
    struct count *count = context;
    atomic_fetch_add_explicit(&count->done[item], 1, memory_order_relaxed);
    count->plain[item] += item;
}

static void check_jobs(struct pool *pool, uint32_t n_jobs, long pause_ns) {
    static const size_t sizes[] = {0, 1, 2, 3, 7, 64, MOST_ITEMS};
    struct count count = {0};
    uint64_t expected[MOST_ITEMS] = {0};
    for (uint32_t job = 0; job < n_jobs; job++) {
        size_t n = sizes[job % (sizeof sizes / sizeof *sizes)];
        pool_run(pool, count_item, &count, n);
        for (size_t i = 0; i < n; i++) expected[i]++;
        for (size_t i = 0; i < MOST_ITEMS; i++)
            CHECK(count.done[i] == expected[i] && count.plain[i] == expected[i] * i, "job %u of %zu items, item %zu ran %u times, not %lu",
                  job, n, i, count.done[i], (unsigned long)expected[i]);
        if (pause_ns) nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
    }
}

int main(void) {
    static const uint32_t thread_counts[] = {1, 2, 3, 4, 9};
    for (size_t i = 0; i < sizeof thread_counts / sizeof *thread_counts; i++) {
        struct pool *pool = pool_new(thread_counts[i]);
        CHECK(pool && pool_threads(pool) == thread_counts[i]);
        check_jobs(pool, 2000, 0);    // threads spin from one job to the next
        check_jobs(pool, 100, 300000); // threads sleep
        check_jobs(pool, 200, 90000);  // threads are about to sleep
        pool_free(pool);
    }
    pool_free(NULL);
    for (int i = 0; i < 50; i++) pool_free(pool_new(3)); // freed before a thread has begun
    puts("pool: every item once");
    return 0;
}
