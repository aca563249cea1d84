// Says whether a program may run. Everything the interpreter relies on is checked here, once: a program that passes can touch no
// byte outside its buffers, weights and cache, whatever its numbers are. The rules stand in two tables (which operands and which
// numbers an op has) and one function an op (how their shapes fit).
#include "program.h"

enum operand { ABSENT, F32, Q8, F32_OR_NONE, F32_OR_Q8 }; // of out, in, in2
enum number { A = 1, B = 2, C = 4, F0 = 8, F1 = 16 };     // of the numbers that an op uses

struct rule {
    enum operand out, in, in2;
    uint32_t weight;  // its kind, or MESHLLM_NONE
    uint32_t numbers; // flags of enum number
    bool by_position; // needs tokens, positions or slots: only before SELECT
};

static const struct rule rules[] = {
    [MESHLLM_OP_EMBED] = {F32, ABSENT, ABSENT, MESHLLM_WEIGHT_TABLE, 0, true},
    [MESHLLM_OP_RMSNORM] = {F32, F32, ABSENT, MESHLLM_WEIGHT_VECTOR, A | F0, false},
    [MESHLLM_OP_QUANTIZE] = {Q8, F32, ABSENT, MESHLLM_NONE, 0, false},
    [MESHLLM_OP_MATMUL] = {F32, F32_OR_Q8, ABSENT, MESHLLM_WEIGHT_PACKED, 0, false},
    [MESHLLM_OP_BIAS] = {F32, ABSENT, ABSENT, MESHLLM_WEIGHT_VECTOR, 0, false},
    [MESHLLM_OP_ROPE] = {F32, ABSENT, ABSENT, MESHLLM_WEIGHT_VECTOR, A | B | C | F0, true},
    [MESHLLM_OP_KV_APPEND] = {ABSENT, F32, F32, MESHLLM_NONE, A, true},
    [MESHLLM_OP_ATTENTION] = {F32, F32, ABSENT, MESHLLM_NONE, A | B | C | F0 | F1, true},
    [MESHLLM_OP_GATE] = {F32, F32, F32, MESHLLM_NONE, A, false},
    [MESHLLM_OP_ADD] = {F32, F32, ABSENT, MESHLLM_NONE, 0, false},
    [MESHLLM_OP_SCALE] = {F32, ABSENT, ABSENT, MESHLLM_NONE, F0 | F1, false},
    [MESHLLM_OP_EXCHANGE] = {F32, F32_OR_NONE, ABSENT, MESHLLM_NONE, A, false},
    [MESHLLM_OP_SELECT] = {F32, F32, ABSENT, MESHLLM_NONE, 0, false},
};
#define N_OPCODES (sizeof rules / sizeof *rules)

struct checked { // what the ops are checked against
    uint32_t n_buffers, n_weights, precision;
    const struct meshllm_buffer *buffers;
    const struct meshllm_weight *weights;
    const struct meshllm_cache_shape *cache;
};

static const char *operand_fault(const struct checked *c, enum operand expected, uint32_t index) {
    if (index == MESHLLM_NONE) return expected == ABSENT || expected == F32_OR_NONE ? NULL : "a buffer is missing";
    if (expected == ABSENT) return "a buffer that this op does not use";
    if (index >= c->n_buffers) return "no such buffer";
    bool is_q8 = c->buffers[index].kind == MESHLLM_BUFFER_Q8;
    if (expected == F32_OR_Q8 || is_q8 == (expected == Q8)) return NULL;
    return "a buffer of the wrong kind";
}

static const char *numbers_fault(uint32_t used, const struct meshllm_op *op) {
    bool extra = (!(used & A) && op->a) || (!(used & B) && op->b) || (!(used & C) && op->c);
    extra = extra || (!(used & F0) && op->f0 != 0) || (!(used & F1) && op->f1 != 0);
    return extra ? "a number that this op does not use" : NULL;
}

static const char *operands_fault(const struct checked *c, const struct meshllm_op *op) {
    const struct rule *rule = &rules[op->opcode];
    const char *fault = operand_fault(c, rule->out, op->out);
    if (!fault) fault = operand_fault(c, rule->in, op->in);
    if (!fault) fault = operand_fault(c, rule->in2, op->in2);
    if (!fault) fault = numbers_fault(rule->numbers, op);
    if (fault) return fault;
    if (rule->weight == MESHLLM_NONE) return op->weight == MESHLLM_NONE ? NULL : "a weight that this op does not use";
    if (op->weight >= c->n_weights) return "no such weight";
    return c->weights[op->weight].kind == rule->weight ? NULL : "a weight of the wrong kind";
}

static const char *matmul_fault(const struct checked *c, const struct meshllm_op *op) {
    const struct meshllm_weight *w = &c->weights[op->weight];
    bool is_float = format_is_float(w->format);
    if (is_float != (c->buffers[op->in].kind == MESHLLM_BUFFER_F32)) return "the input's kind does not fit the weight's format";
    if (op->in == op->out) return "a product cannot overwrite its input";
    if (w->n_cols != c->buffers[op->in].width) return "the weight's columns are not the input's width";
    return w->n_rows == c->buffers[op->out].width ? NULL : "the weight's rows are not the output's width";
}

static const char *rope_fault(const struct checked *c, const struct meshllm_op *op) {
    if ((uint64_t)op->a * op->b != c->buffers[op->out].width) return "heads times width of a head is not the buffer's width";
    if ((uint64_t)2 * c->weights[op->weight].n_cols > op->b) return "more frequencies than pairs in a head";
    return op->c <= 1 ? NULL : "no such style of rope";
}

static const char *append_fault(const struct checked *c, const struct meshllm_op *op) {
    uint64_t width = (uint64_t)c->cache->n_kv_heads * c->cache->head_dim;
    if (op->a >= c->cache->n_layers) return "no such layer in the cache";
    return c->buffers[op->in].width == width && c->buffers[op->in2].width == width ? NULL : "width is not the cache's";
}

static const char *attention_fault(const struct checked *c, const struct meshllm_op *op) {
    const struct meshllm_cache_shape *cache = c->cache;
    uint32_t width = c->buffers[op->out].width;
    if (op->a >= cache->n_layers) return "no such layer in the cache";
    if (op->in == op->out) return "attention cannot overwrite its queries";
    if (width != c->buffers[op->in].width || !cache->head_dim || width % cache->head_dim) return "width is no number of heads";
    uint64_t last_head = width / cache->head_dim - 1;
    return (last_head + op->b) / cache->group < cache->n_kv_heads ? NULL : "a query head without a KV head";
}

static const char *same_width_fault(const struct checked *c, const struct meshllm_op *op) {
    uint32_t width = c->buffers[op->out].width;
    bool same = (op->in == MESHLLM_NONE || c->buffers[op->in].width == width) &&
                (op->in2 == MESHLLM_NONE || c->buffers[op->in2].width == width);
    return same ? NULL : "buffers of different width";
}

static const char *norm_fault(const struct checked *c, const struct meshllm_op *op) {
    if (!op->a || c->buffers[op->out].width % op->a) return "the width is no number of groups";
    if (c->weights[op->weight].n_cols != op->a) return "the weight's length is not the group's";
    return same_width_fault(c, op);
}

static const char *shape_fault(const struct checked *c, const struct meshllm_op *op) {
    switch ((enum meshllm_opcode)op->opcode) {
    case MESHLLM_OP_EMBED:
    case MESHLLM_OP_BIAS:
        return c->weights[op->weight].n_cols == c->buffers[op->out].width ? NULL : "the weight's columns are not the buffer's width";
    case MESHLLM_OP_RMSNORM: return norm_fault(c, op);
    case MESHLLM_OP_MATMUL: return matmul_fault(c, op);
    case MESHLLM_OP_ROPE: return rope_fault(c, op);
    case MESHLLM_OP_KV_APPEND: return append_fault(c, op);
    case MESHLLM_OP_ATTENTION: return attention_fault(c, op);
    case MESHLLM_OP_GATE: return op->a <= 1 ? same_width_fault(c, op) : "no such activation";
    case MESHLLM_OP_EXCHANGE:
        if (c->precision == MESHLLM_PARTIAL_Q8_0 && c->buffers[op->out].width % MESHLLM_BLOCK) return "width is no multiple of 32";
        return op->a <= 1 ? same_width_fault(c, op) : "no such way to take a sum";
    case MESHLLM_OP_QUANTIZE:
    case MESHLLM_OP_ADD:
    case MESHLLM_OP_SELECT: return same_width_fault(c, op);
    case MESHLLM_OP_SCALE: return NULL;
    }
    return "no such op";
}

static const char *weight_fault(const struct meshllm_weight *w, uint32_t panel_rows) {
    if (!w->n_rows || !w->n_cols || !w->data) return "a weight without values";
    size_t row_size = format_row_size(w->format, w->n_cols);
    if (!row_size) return "a weight whose format is unknown or whose columns are no number of blocks";
    if ((uint64_t)w->n_rows * w->n_cols >> 56) return "a weight of impossible size"; // so that no size below overflows
    size_t size = 0;
    uintptr_t address = (uintptr_t)w->data;
    switch (w->kind) {
    case MESHLLM_WEIGHT_PACKED:
        size = packed_size(panel_rows, w->format, w->n_rows, w->n_cols);
        if (address % 64) return "a packed weight not at a multiple of 64 bytes";
        break;
    case MESHLLM_WEIGHT_VECTOR:
        if (w->n_rows != 1 || w->format != MESHLLM_F32) return "a vector that is not one row of f32";
        if (address % sizeof(float)) return "a vector not at a multiple of 4 bytes";
        size = row_size;
        break;
    case MESHLLM_WEIGHT_TABLE:
        size = row_size * w->n_rows;
        break;
    default: return "a weight of unknown kind";
    }
    return size && w->size >= size ? NULL : "a weight with fewer bytes than its shape needs";
}

static const char *buffer_fault(const struct meshllm_buffer *b) {
    if (b->kind > MESHLLM_BUFFER_Q8 || !b->width) return "a buffer of unknown kind or without width";
    return b->kind == MESHLLM_BUFFER_Q8 && b->width % MESHLLM_BLOCK ? "a q8 buffer whose width is no multiple of 32" : NULL;
}

static const char *op_fault(const struct checked *c, const struct meshllm_op *op, bool selected) {
    if (op->opcode >= N_OPCODES) return "no such op";
    if (selected && (rules[op->opcode].by_position || op->opcode == MESHLLM_OP_SELECT)) return "an op that cannot follow SELECT";
    const char *fault = operands_fault(c, op);
    return fault ? fault : shape_fault(c, op);
}

static bool refuse(struct meshllm_fault *fault, uint32_t op, const char *reason) {
    *fault = (struct meshllm_fault){.op = op, .reason = reason};
    return false;
}

bool program_validate(struct meshllm_fault *fault, uint32_t n_ops, const struct meshllm_op *ops, uint32_t n_buffers,
                      const struct meshllm_buffer *buffers, uint32_t n_weights, const struct meshllm_weight *weights,
                      const struct meshllm_cache_shape *cache, uint32_t panel_rows, uint32_t precision) {
    const struct checked checked = {n_buffers, n_weights, precision, buffers, weights, cache};
    const char *reason = NULL;
    bool selected = false;
    if (precision > MESHLLM_PARTIAL_Q8_0) return refuse(fault, MESHLLM_NONE, "no such precision of partial sums");
    if (cache->n_layers && (!cache->n_slots || !cache->n_positions || !cache->n_kv_heads || !cache->head_dim || !cache->group))
        return refuse(fault, MESHLLM_NONE, "a cache with layers and nothing in them");
    for (uint32_t i = 0; i < n_buffers && !reason; i++) reason = buffer_fault(&buffers[i]);
    for (uint32_t i = 0; i < n_weights && !reason; i++) reason = weight_fault(&weights[i], panel_rows);
    if (reason) return refuse(fault, MESHLLM_NONE, reason);
    for (uint32_t i = 0; i < n_ops; i++) {
        if ((reason = op_fault(&checked, &ops[i], selected))) return refuse(fault, i, reason);
        selected = selected || ops[i].opcode == MESHLLM_OP_SELECT;
    }
    return true;
}
