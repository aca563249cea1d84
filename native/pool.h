// A pool of threads, made once: they spin briefly for the next job, then sleep on a futex. Without global state.
#ifndef MESHLLM_POOL_H
#define MESHLLM_POOL_H
#include <stddef.h>
#include <stdint.h>

struct pool;
// Runs one item of a job; called with each item in [0, n_items) exactly once, on any of the pool's threads.
typedef void pool_job(void *context, size_t item);

struct pool *pool_new(uint32_t n_threads); // the caller counts as one; NULL if a thread cannot be made
void pool_free(struct pool *pool);
uint32_t pool_threads(const struct pool *pool);
// Runs all items and returns when the last has ended. One caller at a time. Items are taken one by one from a counter.
void pool_run(struct pool *pool, pool_job *job, void *context, size_t n_items);
#endif
