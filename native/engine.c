// The engine handle: kernels of one instruction set and a pool of threads; and what needs no program: a single product,
// the measure of read bandwidth.
#include <stdlib.h>
#include <time.h>

#include "dispatch.h"
#include "pool.h"

int meshllm_engine_new(struct meshllm_engine **engine, const char *isa, uint32_t n_threads) {
    *engine = NULL;
    if (!n_threads || n_threads > 1024) return MESHLLM_BAD_ARGUMENT;
    const struct kernels *kernels = dispatch_kernels(isa);
    if (!kernels) return MESHLLM_NO_ISA;
    struct meshllm_engine *e = malloc(sizeof *e);
    struct pool *pool = pool_new(n_threads);
    if (!e || !pool) {
        pool_free(pool);
        free(e);
        return MESHLLM_NO_MEMORY;
    }
    *e = (struct meshllm_engine){kernels, pool};
    *engine = e;
    return MESHLLM_OK;
}

void meshllm_engine_free(struct meshllm_engine *engine) {
    if (!engine) return;
    pool_free(engine->pool);
    free(engine);
}

const char *meshllm_engine_isa(const struct meshllm_engine *engine) { return engine->kernels->name; }

uint32_t meshllm_engine_threads(const struct meshllm_engine *engine) { return pool_threads(engine->pool); }

struct product {
    const struct kernels *kernels;
    float *out;
    struct matrix matrix;
    struct q8_rows q8;
    const float *in;
    size_t n_tokens, chunk, n_panels;
};

static void multiply_chunk(void *context, size_t item) {
    struct product *p = context;
    size_t first = item * p->chunk, last = first + p->chunk < p->n_panels ? first + p->chunk : p->n_panels;
    p->kernels->matmul(p->out, p->matrix.n_rows, &p->matrix, first, last, p->n_tokens, &p->q8, p->in, p->matrix.n_cols);
}

static void multiply(struct meshllm_engine *engine, struct product *p) {
    size_t panel_rows = engine->kernels->panel_rows, n_items = 8 * (size_t)pool_threads(engine->pool);
    p->n_panels = (p->matrix.n_rows + panel_rows - 1) / panel_rows;
    p->chunk = ((p->n_panels + n_items - 1) / n_items + 1) & ~(size_t)1; // even: kernels stream two panels at once
    pool_run(engine->pool, multiply_chunk, p, (p->n_panels + p->chunk - 1) / p->chunk);
}

int meshllm_matmul(struct meshllm_engine *engine, float *out, const struct meshllm_weight *weight, uint32_t n_tokens, const float *in) {
    size_t n_cols = weight->n_cols, n_blocks = n_cols / MESHLLM_BLOCK;
    if (weight->kind != MESHLLM_WEIGHT_PACKED || !n_tokens || !n_cols || !weight->n_rows ||
        weight->size < meshllm_packed_size(engine, weight->format, weight->n_rows, weight->n_cols) ||
        !meshllm_packed_size(engine, weight->format, weight->n_rows, weight->n_cols))
        return MESHLLM_BAD_ARGUMENT;
    struct product p = {.kernels = engine->kernels, .out = out, .in = in, .n_tokens = n_tokens,
                        .matrix = {weight->format, weight->n_rows, weight->n_cols, weight->data}};
    if (format_is_float(weight->format)) {
        multiply(engine, &p);
        return MESHLLM_OK;
    }
    size_t values = (n_tokens * n_cols + 63) / 64 * 64, scales = (n_tokens * n_blocks * 4 + 63) / 64 * 64;
    uint8_t *memory = aligned_alloc(64, values + 2 * scales);
    if (!memory) return MESHLLM_NO_MEMORY;
    p.q8 = (struct q8_rows){(int8_t *)memory, (float *)(memory + values), (int32_t *)(memory + values + scales)};
    for (size_t t = 0; t < n_tokens; t++)
        engine->kernels->quantize(p.q8.values + t * n_cols, p.q8.scales + t * n_blocks, p.q8.sums + t * n_blocks, n_cols, in + t * n_cols);
    multiply(engine, &p);
    free(memory);
    return MESHLLM_OK;
}

#define READ_CHUNK ((size_t)1 << 20)

struct reading {
    const struct kernels *kernels;
    const uint8_t *data;
    size_t size;
};

static void read_chunk(void *context, size_t item) {
    struct reading *r = context;
    size_t start = item * READ_CHUNK, left = r->size - start;
    volatile uint64_t sum = r->kernels->read(left < READ_CHUNK ? left : READ_CHUNK, r->data + start);
    (void)sum;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double meshllm_measure_bandwidth(struct meshllm_engine *engine, size_t size, const void *data, double min_seconds) {
    struct reading reading = {engine->kernels, data, size};
    double best = 0;
    for (double begun = seconds_now(), last = begun; last - begun < min_seconds || best == 0;) {
        pool_run(engine->pool, read_chunk, &reading, (size + READ_CHUNK - 1) / READ_CHUNK);
        double now = seconds_now();
        if (now > last && (double)size / (now - last) > best) best = (double)size / (now - last);
        last = now;
    }
    return best;
}
