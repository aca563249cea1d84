// Invariant: any bytes as a program are refused, or run clean. Under ASan and UBSan every weight is an allocation of just its size.
//
//   fuzz_program [SEED [COUNT]]    COUNT programs from SEED; a failure prints nothing of its own: the sanitizer does
//
// Random bytes alone would be refused at the first op, so programs grow op by op from plausible ones that are accepted, and in half
// of them some bytes are changed afterwards.
#include "../program.h"
#include "check.h"

enum { MAX_OPS = 12, MAX_BUFFERS = 6, MAX_WEIGHTS = 8, MAX_TOKENS = 6, TRIES = 12, MAX_EXCHANGES = 64 };

struct fuzzed {
    struct meshllm_op ops[MAX_OPS];
    struct meshllm_buffer buffers[MAX_BUFFERS];
    struct meshllm_weight weights[MAX_WEIGHTS];
    struct meshllm_cache_shape cache;
    uint32_t n_ops, precision;
};

static uint32_t below(uint64_t *seed, uint32_t n) { return (uint32_t)(noise(seed) % n); }

static uint32_t any_width(uint64_t *seed) {
    static const uint32_t widths[] = {32, 32, 64, 64, 96, 256, 7, 1};
    return widths[below(seed, sizeof widths / sizeof *widths)];
}

static void make_weight(struct meshllm_weight *w, struct meshllm_engine *engine, uint64_t *seed) {
    static const uint32_t formats[] = {MESHLLM_F32, MESHLLM_F16, MESHLLM_BF16, MESHLLM_Q4_0, MESHLLM_Q4_1, MESHLLM_Q5_0, MESHLLM_Q8_0, MESHLLM_Q3_K,
                                       MESHLLM_Q4_K, MESHLLM_Q6_K, 9};
    size_t row = 0;
    for (int tries = 0; !row && tries < 4; tries++) { // one that cannot be would refuse the whole program
        w->kind = below(seed, 3);
        w->format = w->kind == MESHLLM_WEIGHT_VECTOR ? MESHLLM_F32 : formats[below(seed, sizeof formats / sizeof *formats)];
        w->n_rows = w->kind == MESHLLM_WEIGHT_VECTOR ? 1 : any_width(seed);
        w->n_cols = w->kind == MESHLLM_WEIGHT_VECTOR && below(seed, 2) ? 1 + below(seed, 16) : any_width(seed);
        row = format_row_size(w->format, w->n_cols);
    }
    w->size = w->kind == MESHLLM_WEIGHT_PACKED ? meshllm_packed_size(engine, w->format, w->n_rows, w->n_cols) : row * w->n_rows;
    void *data = NULL;
    CHECK(!posix_memalign(&data, 64, w->size ? w->size : 1));
    for (size_t i = 0; i < w->size; i++) ((uint8_t *)data)[i] = (uint8_t)noise(seed);
    w->data = data;
}

static uint32_t any_operand(uint64_t *seed, uint32_t n, uint32_t none_in) {
    return below(seed, none_in) ? below(seed, n) : MESHLLM_NONE;
}

static struct meshllm_op any_op(uint64_t *seed) {
    struct meshllm_op op = {.opcode = below(seed, 13)};
    bool in = op.opcode != MESHLLM_OP_EMBED && op.opcode != MESHLLM_OP_BIAS && op.opcode != MESHLLM_OP_ROPE && op.opcode != MESHLLM_OP_SCALE;
    bool two = op.opcode == MESHLLM_OP_KV_APPEND || op.opcode == MESHLLM_OP_GATE;
    bool weight = op.opcode <= MESHLLM_OP_ROPE && op.opcode != MESHLLM_OP_QUANTIZE;
    op.out = op.opcode == MESHLLM_OP_KV_APPEND ? MESHLLM_NONE : any_operand(seed, MAX_BUFFERS, 20);
    op.in = in ? any_operand(seed, MAX_BUFFERS, 8) : MESHLLM_NONE;
    op.in2 = two ? any_operand(seed, MAX_BUFFERS, 20) : MESHLLM_NONE;
    op.weight = weight ? any_operand(seed, MAX_WEIGHTS, 20) : MESHLLM_NONE;
    if (op.opcode == MESHLLM_OP_RMSNORM) op.a = any_width(seed), op.f0 = noise_float(seed);
    if (op.opcode == MESHLLM_OP_ROPE) op.a = 1 + below(seed, 6), op.b = any_width(seed), op.c = below(seed, 3), op.f0 = 1;
    if (op.opcode == MESHLLM_OP_KV_APPEND || op.opcode == MESHLLM_OP_GATE) op.a = below(seed, 3);
    if (op.opcode == MESHLLM_OP_ATTENTION)
        op = (struct meshllm_op){op.opcode, op.out, op.in, MESHLLM_NONE, MESHLLM_NONE, below(seed, 3), below(seed, 3), below(seed, 5), 1, (float)below(seed, 2)};
    if (op.opcode == MESHLLM_OP_SCALE) op.f0 = noise_float(seed), op.f1 = (float)below(seed, 2);
    if (op.opcode == MESHLLM_OP_EXCHANGE) op.a = below(seed, 3);
    return op;
}

static struct meshllm_program *build(struct fuzzed *f, struct meshllm_engine *engine) {
    struct meshllm_program *p = NULL;
    struct meshllm_fault fault;
    int status = meshllm_program_new(&p, engine, f->n_ops, f->ops, MAX_BUFFERS, f->buffers, MAX_WEIGHTS, f->weights, &f->cache,
                                     MAX_TOKENS, f->precision, &fault);
    CHECK((status == MESHLLM_OK) == (p != NULL));
    return p;
}

static void make(struct fuzzed *f, struct meshllm_engine *engine, uint64_t *seed) {
    for (int i = 0; i < MAX_BUFFERS; i++) {
        uint32_t width = any_width(seed);
        f->buffers[i] = (struct meshllm_buffer){width % 32 ? 0 : below(seed, 3) == 0, width};
    }
    for (int i = 0; i < MAX_WEIGHTS; i++) make_weight(&f->weights[i], engine, seed);
    f->cache = (struct meshllm_cache_shape){below(seed, 3), 2, 4, 1 + below(seed, 3), 32 >> below(seed, 3), 1 + below(seed, 3)};
    f->precision = below(seed, 3);
    f->n_ops = 0;
    for (int i = 0; i < MAX_OPS; i++) {
        for (int tries = 0; tries < TRIES; tries++) {
            f->ops[f->n_ops++] = any_op(seed);
            struct meshllm_program *p = build(f, engine);
            if (!p) f->n_ops--;
            meshllm_program_free(p);
            if (p) break;
        }
    }
}

// Weights keep their data and size: they are what the caller vouches for.
static void change_bytes(struct fuzzed *f, uint64_t *seed) {
    uint8_t *targets[] = {(uint8_t *)f->ops, (uint8_t *)f->buffers, (uint8_t *)&f->cache};
    size_t sizes[] = {f->n_ops * sizeof *f->ops, sizeof f->buffers, sizeof f->cache};
    for (uint32_t n = 1 + below(seed, 4); n; n--) {
        uint32_t which = below(seed, 8) ? 0 : 1 + below(seed, 2);
        if (sizes[which]) targets[which][noise(seed) % sizes[which]] = (uint8_t)(below(seed, 2) ? below(seed, 8) : noise(seed));
    }
    uint32_t w = below(seed, MAX_WEIGHTS);
    uint32_t *fields[] = {&f->weights[w].kind, &f->weights[w].format, &f->weights[w].n_rows, &f->weights[w].n_cols};
    if (!below(seed, 4)) *fields[below(seed, 4)] = below(seed, 2) ? below(seed, 200) : (uint32_t)noise(seed);
}

static void run(struct meshllm_program *p, uint64_t *seed) {
    int32_t tokens[MAX_TOKENS], positions[MAX_TOKENS], slots[MAX_TOKENS], outputs[MAX_TOKENS];
    uint32_t n = 1 + below(seed, MAX_TOKENS), n_outputs = 0;
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)below(seed, below(seed, 9) ? 2 : 200);
        positions[i] = (int32_t)below(seed, below(seed, 9) ? 4 : 9), slots[i] = (int32_t)below(seed, below(seed, 9) ? 2 : 5);
        if (below(seed, 2)) outputs[n_outputs++] = (int32_t)i;
    }
    if (meshllm_program_begin(p, n, tokens, positions, slots, n_outputs, outputs) != MESHLLM_OK) return;
    int status = meshllm_program_run(p);
    for (int i = 0; status == MESHLLM_EXCHANGE; i++) {
        size_t size, own_size, wanted = meshllm_program_partial_size(p);
        const uint8_t *own = meshllm_program_partial(p, &own_size);
        CHECK(i < MAX_EXCHANGES && (own_size == 0 || own_size == wanted));
        uint8_t *other = malloc(wanted ? wanted : 1);
        for (size = 0; size < wanted; size++) other[size] = own_size ? own[size] : (uint8_t)noise(seed);
        const void *partials[] = {own, other};
        uint32_t n_partials = own_size ? 2 : 1;
        CHECK(meshllm_program_supply(p, n_partials, partials + 2 - n_partials) == MESHLLM_OK);
        free(other);
        status = meshllm_program_run(p);
    }
    CHECK(status == MESHLLM_OK);
    meshllm_program_copy_slot(p, below(seed, 3), below(seed, 3), below(seed, 6));
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    unsigned long count = argc > 2 ? strtoul(argv[2], NULL, 10) : 3000, ran = 0;
    struct meshllm_engine *engine;
    CHECK(meshllm_engine_new(&engine, "", 2) == MESHLLM_OK);
    for (unsigned long i = 0; i < count; i++) {
        struct fuzzed f;
        make(&f, engine, &seed);
        if (below(&seed, 2)) change_bytes(&f, &seed);
        uint64_t cache = (uint64_t)f.cache.n_layers * f.cache.n_slots * f.cache.n_positions; // a sanitizer's memory has an end
        struct meshllm_program *p = cache < 1 << 20 && f.cache.n_kv_heads < 256 && f.cache.head_dim < 4096 ? build(&f, engine) : NULL;
        if (p) {
            for (int k = 0; k < 3; k++) run(p, &seed);
            meshllm_program_free(p);
            ran++;
        }
        for (int k = 0; k < MAX_WEIGHTS; k++) free((void *)(uintptr_t)f.weights[k].data);
    }
    meshllm_engine_free(engine);
    CHECK(ran * 4 > count, "only %lu of %lu programs ran: the fuzzer makes nearly nothing that runs", ran, count);
    return 0;
}
