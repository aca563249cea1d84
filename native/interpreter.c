// The interpreter: from an op to the kernels that do it, on one thread or all.
//
// It checks nothing: validate.c has checked the program and program.c the batch. Small ops run on the caller's thread, since waking
// the others costs more than they would save.
#include <math.h>
#include <string.h>

#include "program.h"

enum {
    PARALLEL_VALUES = 16384, // rows x width below which an elementwise op stays on one thread: some 4 us of work
    ITEMS_PER_THREAD = 4,    // of a matmul: enough for a thread that is held up to be helped, few enough for long streams
    MAX_GROUP = 4,           // MATMULs that run as one job
};

// --- rows and jobs ---------------------------------------------------------------------------------------------------

struct op_job {
    struct meshllm_program *p;
    const struct meshllm_op *op;
};

void program_for_rows(struct meshllm_program *p, pool_job *job, void *context, size_t width) {
    if (p->n_rows > 1 && p->n_rows * width >= PARALLEL_VALUES) pool_run(p->engine->pool, job, context, p->n_rows);
    else for (size_t row = 0; row < p->n_rows; row++) job(context, row);
}

static float *row_of(const struct meshllm_program *p, uint32_t buffer, size_t row) {
    return p->buffers[buffer].f32 + row * p->buffers[buffer].width;
}

static const float *vector_of(const struct meshllm_program *p, const struct meshllm_op *op) { return p->weights[op->weight].data; }

static void embed_row(void *context, size_t row) {
    const struct op_job *job = context;
    const struct meshllm_weight *w = &job->p->weights[job->op->weight];
    const uint8_t *stored = (const uint8_t *)w->data + format_row_size(w->format, w->n_cols) * (size_t)job->p->tokens[row];
    meshllm_dequantize_row(w->format, row_of(job->p, job->op->out, row), w->n_cols, stored);
}

static void norm_row(void *context, size_t row) {
    const struct op_job *job = context;
    const struct meshllm_op *op = job->op;
    uint32_t width = job->p->buffers[op->out].width;
    float *out = row_of(job->p, op->out, row);
    const float *in = row_of(job->p, op->in, row);
    for (uint32_t i = 0; i < width; i += op->a) job->p->engine->kernels->rms_norm(out + i, op->a, in + i, vector_of(job->p, op), op->f0);
}

static void quantize_row(void *context, size_t row) {
    const struct op_job *job = context;
    const struct buffer *out = &job->p->buffers[job->op->out];
    size_t block = row * (out->width / MESHLLM_BLOCK);
    job->p->engine->kernels->quantize(out->q8.values + row * out->width, out->q8.scales + block, out->q8.sums + block, out->width,
                                      row_of(job->p, job->op->in, row));
}

static void rope_row(void *context, size_t row) {
    const struct op_job *job = context;
    const struct meshllm_op *op = job->op;
    size_t n_pairs = job->p->weights[op->weight].n_cols;
    const float *cos_sin = job->p->rope_tables[job->p->rope_of_op[op - job->p->ops]].cos_sin + row * 2 * n_pairs;
    job->p->engine->kernels->rope(row_of(job->p, op->out, row), op->a, op->b, n_pairs, cos_sin, op->c);
}

static void gate_row(void *context, size_t row) {
    const struct op_job *job = context;
    const struct meshllm_op *op = job->op;
    job->p->engine->kernels->gate(row_of(job->p, op->out, row), job->p->buffers[op->out].width, row_of(job->p, op->in, row),
                                  row_of(job->p, op->in2, row), op->a);
}

static void add_op_row(void *context, size_t row) {
    const struct op_job *job = context;
    const struct meshllm_op *op = job->op;
    const float *in = op->opcode == MESHLLM_OP_BIAS ? vector_of(job->p, op) : row_of(job->p, op->in, row);
    job->p->engine->kernels->add(row_of(job->p, op->out, row), job->p->buffers[op->out].width, in);
}

static void scale_row(void *context, size_t row) {
    const struct op_job *job = context;
    job->p->engine->kernels->scale(row_of(job->p, job->op->out, row), job->p->buffers[job->op->out].width, job->op->f0, job->op->f1);
}

// --- attention -------------------------------------------------------------------------------------------------------

// Rows one after the other, so that two rows of one slot and position, which the caller may give, do not race.
static void append(struct meshllm_program *p, const struct meshllm_op *op) {
    size_t head_dim = p->cache.head_dim;
    for (uint32_t row = 0; row < p->n_rows; row++) {
        for (uint32_t head = 0; head < p->cache.n_kv_heads; head++) {
            size_t at = program_cache_offset(p, op->a, (uint32_t)p->slots[row], head) + (size_t)p->positions[row] * head_dim;
            p->engine->kernels->to_f16(p->keys + at, head_dim, row_of(p, op->in, row) + head * head_dim);
            p->engine->kernels->to_f16(p->values + at, head_dim, row_of(p, op->in2, row) + head * head_dim);
        }
    }
}

struct attend_job {
    const struct meshllm_program *p;
    const struct meshllm_op *op;
    size_t n_parts; // of a KV head's query heads
};

// A row's query heads of one KV head, or a part of them: the kernel reads the cache once for all of them.
static void attend_part(void *context, size_t item) {
    const struct attend_job *job = context;
    const struct meshllm_op *op = job->op;
    const struct meshllm_program *p = job->p;
    size_t head_dim = p->cache.head_dim, n_heads = p->buffers[op->out].width / head_dim, group = p->cache.group;
    size_t part = item % job->n_parts, kv_head = item / job->n_parts % p->cache.n_kv_heads, row = item / job->n_parts / p->cache.n_kv_heads;
    size_t first = kv_head * group + part * group / job->n_parts, last = kv_head * group + (part + 1) * group / job->n_parts;
    first = first > op->b ? first - op->b : 0; // in this rank's heads: the first may stand inside a group
    last = last > op->b ? last - op->b : 0;
    if (last > n_heads) last = n_heads;
    if (first >= last) return;
    size_t end = (size_t)p->positions[row] + 1, start = op->c && end > op->c ? end - op->c : 0;
    size_t at = program_cache_offset(p, op->a, (uint32_t)p->slots[row], (uint32_t)kv_head) + start * head_dim;
    p->engine->kernels->attention(row_of(p, op->out, row) + first * head_dim, head_dim, last - first, row_of(p, op->in, row) + first * head_dim,
                                  p->keys + at, p->values + at, end - start, op->f0, op->f1);
}

static void attend(struct meshllm_program *p, const struct meshllm_op *op) {
    size_t n_threads = pool_threads(p->engine->pool), n_groups = (size_t)p->n_rows * p->cache.n_kv_heads, work = 0;
    struct attend_job job = {p, op, 1};
    for (uint32_t row = 0; row < p->n_rows; row++) work += (size_t)p->positions[row] + 1;
    bool together = work * p->buffers[op->out].width >= PARALLEL_VALUES && n_threads > 1;
    if (together && n_groups < 2 * n_threads) job.n_parts = (2 * n_threads + n_groups - 1) / n_groups; // else threads would stand idle
    if (job.n_parts > p->cache.group) job.n_parts = p->cache.group;
    if (together) pool_run(p->engine->pool, attend_part, &job, n_groups * job.n_parts);
    else for (size_t i = 0; i < n_groups; i++) attend_part(&job, i);
}

static void fill_rope_table(struct meshllm_program *p, struct rope_table *table) {
    const struct meshllm_weight *w = &p->weights[table->weight];
    const float *frequencies = w->data;
    float *out = table->cos_sin;
    for (uint32_t row = 0; row < p->n_rows; row++) {
        for (uint32_t i = 0; i < w->n_cols; i++, out += 2) {
            double angle = (double)p->positions[row] * (double)frequencies[i];
            out[0] = (float)cos(angle) * table->factor;
            out[1] = (float)sin(angle) * table->factor;
        }
    }
    table->filled = true;
}

static void rope(struct meshllm_program *p, const struct meshllm_op *op) {
    struct rope_table *table = &p->rope_tables[p->rope_of_op[op - p->ops]];
    if (!table->filled) fill_rope_table(p, table);
    struct op_job job = {p, op};
    program_for_rows(p, rope_row, &job, p->buffers[op->out].width);
}

// --- products --------------------------------------------------------------------------------------------------------

struct matmul_job {
    struct meshllm_program *p;
    const struct meshllm_op *ops;
    uint32_t n_ops;
    size_t chunk; // panels of an item
};

static size_t panels_of(const struct meshllm_program *p, const struct meshllm_op *op) {
    size_t panel_rows = p->engine->kernels->panel_rows;
    return ((size_t)p->weights[op->weight].n_rows + panel_rows - 1) / panel_rows;
}

static size_t items_of(const struct matmul_job *job, const struct meshllm_op *op) {
    return (panels_of(job->p, op) + job->chunk - 1) / job->chunk;
}

static void matmul_item(void *context, size_t item) {
    const struct matmul_job *job = context;
    const struct meshllm_program *p = job->p;
    const struct meshllm_op *op = job->ops;
    for (; item >= items_of(job, op); op++) item -= items_of(job, op);
    const struct meshllm_weight *w = &p->weights[op->weight];
    const struct buffer *in = &p->buffers[op->in], *out = &p->buffers[op->out];
    const struct matrix matrix = {w->format, w->n_rows, w->n_cols, w->data};
    size_t first = item * job->chunk, n_panels = panels_of(p, op);
    size_t last = n_panels - first < job->chunk ? n_panels : first + job->chunk;
    p->engine->kernels->matmul(out->f32, out->width, &matrix, first, last, p->n_rows, &in->q8, in->f32, in->width);
}

// How many MATMULs from op on touch none of each other's outputs, so that they may run side by side.
static uint32_t independent_matmuls(const struct meshllm_program *p, const struct meshllm_op *op) {
    uint32_t n = 1, left = (uint32_t)(p->ops + p->n_ops - op);
    for (; n < left && n < MAX_GROUP && op[n].opcode == MESHLLM_OP_MATMUL; n++)
        for (uint32_t i = 0; i < n; i++)
            if (op[n].in == op[i].out || op[n].out == op[i].out || op[n].out == op[i].in) return n;
    return n;
}

static uint32_t multiply(struct meshllm_program *p, const struct meshllm_op *op) {
    struct matmul_job job = {.p = p, .ops = op, .n_ops = independent_matmuls(p, op)};
    size_t n_threads = pool_threads(p->engine->pool), n_panels = 0, n_items = 0;
    for (uint32_t i = 0; i < job.n_ops; i++) n_panels += panels_of(p, &op[i]);
    size_t wanted = n_threads == 1 ? 1 : n_threads * ITEMS_PER_THREAD;
    job.chunk = ((n_panels + wanted - 1) / wanted + 1) & ~(size_t)1; // even: kernels stream two panels at once
    for (uint32_t i = 0; i < job.n_ops; i++) n_items += items_of(&job, &op[i]);
    pool_run(p->engine->pool, matmul_item, &job, n_items);
    return job.n_ops;
}

// --- the interpreter -------------------------------------------------------------------------------------------------

static void select_rows(struct meshllm_program *p, const struct meshllm_op *op) {
    size_t size = p->buffers[op->out].width * sizeof(float);
    for (uint32_t i = 0; i < p->n_outputs; i++) // outputs grow, so a row is read before it is overwritten
        memmove(row_of(p, op->out, i), row_of(p, op->in, (size_t)p->outputs[i]), size);
    p->n_rows = p->n_outputs;
    p->carried_to = MESHLLM_NONE;
}

static void run_rows(struct meshllm_program *p, const struct meshllm_op *op, pool_job *row) {
    struct op_job job = {p, op};
    program_for_rows(p, row, &job, p->buffers[op->out].width);
}

uint32_t program_run_op(struct meshllm_program *p, const struct meshllm_op *op) {
    switch ((enum meshllm_opcode)op->opcode) {
    case MESHLLM_OP_EMBED: run_rows(p, op, embed_row); break;
    case MESHLLM_OP_RMSNORM: run_rows(p, op, norm_row); break;
    case MESHLLM_OP_QUANTIZE: run_rows(p, op, quantize_row); break;
    case MESHLLM_OP_MATMUL: return p->n_rows ? multiply(p, op) : 1;
    case MESHLLM_OP_ROPE: rope(p, op); break;
    case MESHLLM_OP_KV_APPEND: append(p, op); break;
    case MESHLLM_OP_ATTENTION: attend(p, op); break;
    case MESHLLM_OP_GATE: run_rows(p, op, gate_row); break;
    case MESHLLM_OP_BIAS:
    case MESHLLM_OP_ADD: run_rows(p, op, add_op_row); break;
    case MESHLLM_OP_SCALE: run_rows(p, op, scale_row); break;
    case MESHLLM_OP_SELECT: select_rows(p, op); break;
    case MESHLLM_OP_EXCHANGE: break; // program_run stops before it
    }
    return 1;
}
