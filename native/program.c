// Programs: made once from checked ops, then run for each batch from one EXCHANGE to the next.
//
// Buffers and cache are pages that the system gives when they are first touched, so a program that may take 256 rows costs the memory
// of one while it decodes. Nothing is allocated after program_new. Between two ops a stop flag is read.
#define _DEFAULT_SOURCE // MAP_ANONYMOUS
#include "program.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// --- memory ----------------------------------------------------------------------------------------------------------

struct cursor { // hands out parts of an arena; with base NULL it only counts
    uint8_t *base;
    size_t used;
    bool overflow;
};

static void *take(struct cursor *c, uint64_t n, uint64_t m, size_t item) {
    size_t size = 0, end = 0;
    c->overflow |= __builtin_mul_overflow(n, m, &size) || __builtin_mul_overflow(size, item, &size);
    c->overflow |= size > SIZE_MAX - 63 || __builtin_add_overflow(c->used, (size + 63) & ~(size_t)63, &end);
    if (c->overflow) return NULL;
    void *part = c->base ? c->base + c->used : NULL;
    c->used = end;
    return part;
}

static void take_q8(struct cursor *c, struct q8_rows *q8, uint64_t rows, uint64_t width) {
    q8->values = take(c, rows, width, 1);
    q8->scales = take(c, rows, width / MESHLLM_BLOCK, sizeof(float));
    q8->sums = take(c, rows, width / MESHLLM_BLOCK, sizeof(int32_t));
}

static void place_rows(struct meshllm_program *p, struct cursor *c) {
    uint64_t n = p->max_tokens;
    p->tokens = take(c, n, 1, sizeof(int32_t));
    p->positions = take(c, n, 1, sizeof(int32_t));
    p->slots = take(c, n, 1, sizeof(int32_t));
    p->outputs = take(c, n, 1, sizeof(int32_t));
    for (uint32_t i = 0; i < p->n_buffers; i++) {
        struct buffer *b = &p->buffers[i];
        if (b->kind == MESHLLM_BUFFER_F32) b->f32 = take(c, n, b->width, sizeof(float));
        else take_q8(c, &b->q8, n, b->width);
    }
    for (uint32_t i = 0; i < p->n_rope_tables; i++)
        p->rope_tables[i].cos_sin = take(c, n, p->weights[p->rope_tables[i].weight].n_cols, 2 * sizeof(float));
    p->wire = take(c, n, p->exchange_width, sizeof(float));
    p->f16 = take(c, n, p->exchange_width, sizeof(uint16_t));
    p->carry = take(c, n, p->exchange_width, sizeof(float));
    p->partial.values = take(c, n, p->exchange_width, 1);
    p->partial.scales = take(c, n, p->exchange_width, sizeof(float));
    p->partial.sums = take(c, n, p->exchange_width / MESHLLM_BLOCK, sizeof(int32_t));
}

static void place_cache(struct meshllm_program *p, struct cursor *c) {
    uint64_t positions = (uint64_t)p->cache.n_slots * p->cache.n_positions; // of 32 bits each
    uint64_t heads = (uint64_t)p->cache.n_layers * p->cache.n_kv_heads;
    size_t all;
    c->overflow |= __builtin_mul_overflow(positions, heads, &all);
    p->keys = take(c, all, p->cache.head_dim, sizeof(uint16_t));
    p->values = take(c, all, p->cache.head_dim, sizeof(uint16_t));
}

static bool arena_make(struct arena *arena, struct meshllm_program *p, void (*place)(struct meshllm_program *, struct cursor *)) {
    struct cursor count = {0};
    place(p, &count);
    if (count.overflow) return false;
    if (!count.used) return true;
    void *data = mmap(NULL, count.used, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return false;
    *arena = (struct arena){data, count.used};
    struct cursor real = {.base = data};
    place(p, &real);
    return true;
}

static void *copy_of(uint32_t n, size_t item, const void *from) {
    void *copy = calloc((size_t)n + 1, item); // one more, so that an empty array is no failure
    if (copy && n) memcpy(copy, from, n * item);
    return copy;
}

static uint32_t rope_table_of(struct meshllm_program *p, const struct meshllm_op *op) {
    for (uint32_t i = 0; i < p->n_rope_tables; i++)
        if (p->rope_tables[i].weight == op->weight && p->rope_tables[i].factor == op->f0) return i;
    p->rope_tables[p->n_rope_tables] = (struct rope_table){.weight = op->weight, .factor = op->f0};
    return p->n_rope_tables++;
}

static void read_ops(struct meshllm_program *p) {
    p->n_table_rows = UINT32_MAX;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const struct meshllm_op *op = &p->ops[i];
        if (op->opcode == MESHLLM_OP_ROPE) p->rope_of_op[i] = rope_table_of(p, op);
        if (op->opcode == MESHLLM_OP_EMBED && p->weights[op->weight].n_rows < p->n_table_rows)
            p->n_table_rows = p->weights[op->weight].n_rows;
        if (op->opcode == MESHLLM_OP_EXCHANGE && p->buffers[op->out].width > p->exchange_width)
            p->exchange_width = p->buffers[op->out].width;
    }
}

static bool program_fill(struct meshllm_program *p, const struct meshllm_op *ops, const struct meshllm_buffer *buffers,
                         const struct meshllm_weight *weights) {
    p->ops = copy_of(p->n_ops, sizeof *p->ops, ops);
    p->weights = copy_of(p->n_weights, sizeof *p->weights, weights);
    p->buffers = calloc((size_t)p->n_buffers + 1, sizeof *p->buffers);
    p->rope_of_op = calloc((size_t)p->n_ops + 1, sizeof *p->rope_of_op);
    p->rope_tables = calloc((size_t)p->n_ops + 1, sizeof *p->rope_tables);
    if (!p->ops || !p->weights || !p->buffers || !p->rope_of_op || !p->rope_tables) return false;
    for (uint32_t i = 0; i < p->n_buffers; i++) p->buffers[i] = (struct buffer){.kind = buffers[i].kind, .width = buffers[i].width};
    read_ops(p);
    return arena_make(&p->rows, p, place_rows) && arena_make(&p->cached, p, place_cache);
}

int meshllm_program_new(struct meshllm_program **program, struct meshllm_engine *engine, uint32_t n_ops, const struct meshllm_op *ops,
                        uint32_t n_buffers, const struct meshllm_buffer *buffers, uint32_t n_weights, const struct meshllm_weight *weights,
                        const struct meshllm_cache_shape *cache, uint32_t max_tokens, uint32_t precision, struct meshllm_fault *fault) {
    *program = NULL;
    *fault = (struct meshllm_fault){.op = MESHLLM_NONE};
    if (!max_tokens || max_tokens > INT32_MAX) return MESHLLM_BAD_ARGUMENT;
    if (!program_validate(fault, n_ops, ops, n_buffers, buffers, n_weights, weights, cache, engine->kernels->panel_rows, precision))
        return MESHLLM_BAD_PROGRAM;
    struct meshllm_program *p = calloc(1, sizeof *p);
    if (!p) return MESHLLM_NO_MEMORY;
    p->engine = engine;
    p->n_ops = n_ops, p->n_buffers = n_buffers, p->n_weights = n_weights;
    p->cache = *cache, p->max_tokens = max_tokens, p->precision = precision;
    if (!program_fill(p, ops, buffers, weights)) {
        meshllm_program_free(p);
        return MESHLLM_NO_MEMORY;
    }
    *program = p;
    return MESHLLM_OK;
}

void meshllm_program_free(struct meshllm_program *p) {
    if (!p) return;
    if (p->rows.data) munmap(p->rows.data, p->rows.size);
    if (p->cached.data) munmap(p->cached.data, p->cached.size);
    free(p->ops), free(p->weights), free(p->buffers), free(p->rope_of_op), free(p->rope_tables);
    free(p);
}

// --- batches ---------------------------------------------------------------------------------------------------------

static bool batch_fits(const struct meshllm_program *p, uint32_t n_tokens, const int32_t *tokens, const int32_t *positions,
                       const int32_t *slots, uint32_t n_outputs, const int32_t *outputs) {
    if (!n_tokens || n_tokens > p->max_tokens || n_outputs > n_tokens) return false;
    for (uint32_t i = 0; i < n_tokens; i++) {
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= p->n_table_rows || positions[i] < 0 || slots[i] < 0) return false;
        if (p->cache.n_layers && ((uint32_t)positions[i] >= p->cache.n_positions || (uint32_t)slots[i] >= p->cache.n_slots)) return false;
    }
    for (uint32_t i = 0; i < n_outputs; i++)
        if (outputs[i] < 0 || (uint32_t)outputs[i] >= n_tokens || (i && outputs[i] <= outputs[i - 1])) return false;
    return true;
}

int meshllm_program_begin(struct meshllm_program *p, uint32_t n_tokens, const int32_t *tokens, const int32_t *positions,
                          const int32_t *slots, uint32_t n_outputs, const int32_t *outputs) {
    if (!batch_fits(p, n_tokens, tokens, positions, slots, n_outputs, outputs)) return MESHLLM_BAD_ARGUMENT;
    memcpy(p->tokens, tokens, n_tokens * sizeof *tokens);
    memcpy(p->positions, positions, n_tokens * sizeof *positions);
    memcpy(p->slots, slots, n_tokens * sizeof *slots);
    if (n_outputs) memcpy(p->outputs, outputs, n_outputs * sizeof *outputs);
    p->n_tokens = p->n_rows = n_tokens;
    p->n_outputs = n_outputs;
    p->next_op = 0;
    p->carried_to = MESHLLM_NONE;
    for (uint32_t i = 0; i < p->n_rope_tables; i++) p->rope_tables[i].filled = false;
    atomic_store(&p->stopped, false);
    p->state = PROGRAM_READY;
    return MESHLLM_OK;
}

int meshllm_program_run(struct meshllm_program *p) {
    if (p->state != PROGRAM_READY) return MESHLLM_BAD_ARGUMENT;
    while (p->next_op < p->n_ops) {
        const struct meshllm_op *op = &p->ops[p->next_op];
        if (atomic_load_explicit(&p->stopped, memory_order_relaxed)) {
            p->state = PROGRAM_IDLE;
            return MESHLLM_STOPPED;
        }
        if (op->opcode == MESHLLM_OP_EXCHANGE) {
            if (op->in != MESHLLM_NONE) partial_encode(p, op->a ? MESHLLM_NONE : op->out, p->buffers[op->in].f32, p->buffers[op->in].width);
            p->state = PROGRAM_AT_EXCHANGE;
            p->ahead_op = p->next_op + 1;
            p->ahead_at = p->ahead_total = 0;
            return MESHLLM_EXCHANGE;
        }
        p->next_op += program_run_op(p, op);
    }
    p->state = PROGRAM_DONE;
    return MESHLLM_OK;
}

size_t meshllm_program_partial_size(const struct meshllm_program *p) {
    if (p->state != PROGRAM_AT_EXCHANGE) return 0;
    return p->n_rows * partial_row_size(p->precision, p->buffers[p->ops[p->next_op].out].width);
}

const void *meshllm_program_partial(struct meshllm_program *p, size_t *size) {
    bool adds = p->state == PROGRAM_AT_EXCHANGE && p->ops[p->next_op].in != MESHLLM_NONE;
    *size = adds ? meshllm_program_partial_size(p) : 0;
    return p->wire;
}

int meshllm_program_supply(struct meshllm_program *p, uint32_t n_partials, const void *const *partials) {
    if (p->state != PROGRAM_AT_EXCHANGE) return MESHLLM_BAD_ARGUMENT;
    const struct meshllm_op *op = &p->ops[p->next_op];
    const struct buffer *out = &p->buffers[op->out];
    if (op->a) memset(out->f32, 0, (size_t)p->n_rows * out->width * sizeof *out->f32);
    partials_add(p, out->f32, out->width, n_partials, partials);
    p->next_op++;
    p->state = PROGRAM_READY;
    return MESHLLM_OK;
}

float *meshllm_program_buffer(struct meshllm_program *p, uint32_t buffer) {
    if (buffer >= p->n_buffers || p->buffers[buffer].kind != MESHLLM_BUFFER_F32) return NULL;
    return p->buffers[buffer].f32;
}

void meshllm_program_stop(struct meshllm_program *p) { atomic_store(&p->stopped, true); }

size_t program_cache_offset(const struct meshllm_program *p, uint32_t layer, uint32_t slot, uint32_t head) {
    size_t plane = ((size_t)layer * p->cache.n_slots + slot) * p->cache.n_kv_heads + head;
    return plane * p->cache.n_positions * p->cache.head_dim;
}

int meshllm_program_copy_slot(struct meshllm_program *p, uint32_t to, uint32_t from, uint32_t n) {
    const struct meshllm_cache_shape *cache = &p->cache;
    if (to >= cache->n_slots || from >= cache->n_slots || n > cache->n_positions) return MESHLLM_BAD_ARGUMENT;
    if (to == from) return MESHLLM_OK;
    size_t size = (size_t)n * cache->head_dim * sizeof(uint16_t);
    for (uint32_t layer = 0; layer < cache->n_layers; layer++) {
        for (uint32_t head = 0; head < cache->n_kv_heads; head++) {
            size_t target = program_cache_offset(p, layer, to, head), source = program_cache_offset(p, layer, from, head);
            memcpy(p->keys + target, p->keys + source, size);
            memcpy(p->values + target, p->values + source, size);
        }
    }
    return MESHLLM_OK;
}

size_t meshllm_program_cache_size(const struct meshllm_program *p) { return p->cached.size; }
