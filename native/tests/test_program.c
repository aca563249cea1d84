// Programs: what is refused and why, what each state allows, what an exchange adds, and what sampling promises. Values of the ops
// themselves are compared with numpy in tests/engine, kernels with scalar in test_kernels.c.
#include <math.h>

#include "../program.h"
#include "check.h"

#define NO MESHLLM_NONE
#define N(array) (sizeof(array) / sizeof *(array))
enum { WIDTH = 64, ROWS = 40, HEAD = 16, N_TOKENS = 5, X = 0, H = 1, Q = 2, KV = 3, LOGITS = 4 };
enum { TABLE = 0, NORM = 1, MATRIX = 2, FREQUENCIES = 3, KV_MATRIX = 4, HEAD_MATRIX = 5 };

struct rig { // a small model in f32, its operands and an engine
    struct meshllm_engine *engine;
    float *data[6];
    struct meshllm_weight weights[6];
    struct meshllm_buffer buffers[5];
    struct meshllm_cache_shape cache;
};

static const struct meshllm_op good[] = {
    {MESHLLM_OP_EMBED, X, NO, NO, TABLE, 0, 0, 0, 0, 0},
    {MESHLLM_OP_RMSNORM, H, X, NO, NORM, WIDTH, 0, 0, 1e-5f, 0},
    {MESHLLM_OP_MATMUL, KV, H, NO, KV_MATRIX, 0, 0, 0, 0, 0},
    {MESHLLM_OP_ROPE, KV, NO, NO, FREQUENCIES, 2, HEAD, 0, 1, 0},
    {MESHLLM_OP_ROPE, H, NO, NO, FREQUENCIES, 4, HEAD, 1, 1, 0},
    {MESHLLM_OP_KV_APPEND, NO, KV, KV, NO, 0, 0, 0, 0, 0},
    {MESHLLM_OP_ATTENTION, Q, H, NO, NO, 0, 0, 0, 0.25f, 0},
    {MESHLLM_OP_BIAS, Q, NO, NO, NORM, 0, 0, 0, 0, 0},
    {MESHLLM_OP_GATE, H, Q, H, NO, 1, 0, 0, 0, 0},
    {MESHLLM_OP_SCALE, H, NO, NO, NO, 0, 0, 0, 0.5f, 0},
    {MESHLLM_OP_EXCHANGE, X, H, NO, NO, 0, 0, 0, 0, 0},
    {MESHLLM_OP_EXCHANGE, X, NO, NO, NO, 0, 0, 0, 0, 0},
    {MESHLLM_OP_ADD, X, H, NO, NO, 0, 0, 0, 0, 0},
    {MESHLLM_OP_SELECT, X, X, NO, NO, 0, 0, 0, 0, 0},
    {MESHLLM_OP_MATMUL, LOGITS, X, NO, HEAD_MATRIX, 0, 0, 0, 0, 0},
};

static void add_weight(struct rig *r, uint32_t i, uint32_t kind, uint32_t n_rows, uint32_t n_cols) {
    size_t n = (size_t)n_rows * n_cols, stored = n * sizeof(float);
    float *values = malloc(stored);
    uint64_t seed = i;
    for (size_t k = 0; k < n; k++) values[k] = noise_float(&seed);
    size_t size = kind == MESHLLM_WEIGHT_PACKED ? meshllm_packed_size(r->engine, MESHLLM_F32, n_rows, n_cols) : stored;
    r->data[i] = aligned_alloc(64, (size + 63) & ~(size_t)63);
    if (kind == MESHLLM_WEIGHT_PACKED)
        CHECK(meshllm_pack(r->engine, r->data[i], MESHLLM_F32, 0, n_rows, 0, n_cols, n_cols, stored, values) == MESHLLM_OK);
    else memcpy(r->data[i], values, stored);
    free(values);
    r->weights[i] = (struct meshllm_weight){kind, MESHLLM_F32, n_rows, n_cols, size, r->data[i]};
}

static struct rig rig_new(const char *isa) {
    struct rig r = {.buffers = {{0, WIDTH}, {0, WIDTH}, {0, WIDTH}, {0, 2 * HEAD}, {0, ROWS}}, .cache = {1, 2, 8, 2, HEAD, 2}};
    CHECK(meshllm_engine_new(&r.engine, isa, 2) == MESHLLM_OK);
    add_weight(&r, TABLE, MESHLLM_WEIGHT_TABLE, ROWS, WIDTH);
    add_weight(&r, NORM, MESHLLM_WEIGHT_VECTOR, 1, WIDTH);
    add_weight(&r, MATRIX, MESHLLM_WEIGHT_PACKED, WIDTH, WIDTH);
    add_weight(&r, FREQUENCIES, MESHLLM_WEIGHT_VECTOR, 1, HEAD / 2);
    add_weight(&r, KV_MATRIX, MESHLLM_WEIGHT_PACKED, 2 * HEAD, WIDTH);
    add_weight(&r, HEAD_MATRIX, MESHLLM_WEIGHT_PACKED, ROWS, WIDTH);
    return r;
}

static void rig_free(struct rig *r) {
    for (size_t i = 0; i < N(r->data); i++) free(r->data[i]);
    meshllm_engine_free(r->engine);
}

static int try_new(struct meshllm_program **p, struct rig *r, uint32_t n_ops, const struct meshllm_op *ops, uint32_t precision,
                   struct meshllm_fault *fault) {
    return meshllm_program_new(p, r->engine, n_ops, ops, N(r->buffers), r->buffers, N(r->weights), r->weights, &r->cache, N_TOKENS,
                               precision, fault);
}

static struct meshllm_program *program_of(struct rig *r, uint32_t n_ops, const struct meshllm_op *ops, uint32_t precision) {
    struct meshllm_program *p;
    struct meshllm_fault fault;
    int status = try_new(&p, r, n_ops, ops, precision, &fault);
    CHECK(status == MESHLLM_OK, "op %u: %s", fault.op, fault.reason ? fault.reason : "");
    return p;
}

static void test_what_is_wrong_in_an_op_is_named(struct rig *r) {
    static const struct { uint32_t op; struct meshllm_op changed; } cases[] = {
        {0, {13, X, NO, NO, TABLE, 0, 0, 0, 0, 0}},
        {0, {MESHLLM_OP_EMBED, 5, NO, NO, TABLE, 0, 0, 0, 0, 0}},
        {0, {MESHLLM_OP_EMBED, NO, NO, NO, TABLE, 0, 0, 0, 0, 0}},
        {0, {MESHLLM_OP_EMBED, X, NO, NO, NORM, 0, 0, 0, 0, 0}},
        {0, {MESHLLM_OP_EMBED, X, NO, NO, 6, 0, 0, 0, 0, 0}},
        {0, {MESHLLM_OP_EMBED, KV, NO, NO, TABLE, 0, 0, 0, 0, 0}},
        {0, {MESHLLM_OP_EMBED, X, H, NO, TABLE, 0, 0, 0, 0, 0}},
        {0, {MESHLLM_OP_EMBED, X, NO, NO, TABLE, 1, 0, 0, 0, 0}},
        {1, {MESHLLM_OP_RMSNORM, H, X, NO, NORM, 0, 0, 0, 0, 0}},
        {1, {MESHLLM_OP_RMSNORM, H, X, NO, NORM, 48, 0, 0, 0, 0}},
        {1, {MESHLLM_OP_RMSNORM, H, KV, NO, NORM, WIDTH, 0, 0, 0, 0}},
        {1, {MESHLLM_OP_QUANTIZE, H, X, NO, NO, 0, 0, 0, 0, 0}},
        {2, {MESHLLM_OP_MATMUL, KV, H, NO, MATRIX, 0, 0, 0, 0, 0}},
        {2, {MESHLLM_OP_MATMUL, H, H, NO, MATRIX, 0, 0, 0, 0, 0}},
        {2, {MESHLLM_OP_MATMUL, KV, LOGITS, NO, KV_MATRIX, 0, 0, 0, 0, 0}},
        {3, {MESHLLM_OP_ROPE, KV, NO, NO, FREQUENCIES, 3, HEAD, 0, 1, 0}},
        {3, {MESHLLM_OP_ROPE, KV, NO, NO, FREQUENCIES, 4, HEAD / 2, 0, 1, 0}},
        {3, {MESHLLM_OP_ROPE, KV, NO, NO, FREQUENCIES, 2, HEAD, 2, 1, 0}},
        {5, {MESHLLM_OP_KV_APPEND, NO, KV, KV, NO, 1, 0, 0, 0, 0}},
        {5, {MESHLLM_OP_KV_APPEND, NO, KV, H, NO, 0, 0, 0, 0, 0}},
        {6, {MESHLLM_OP_ATTENTION, H, H, NO, NO, 0, 0, 0, 1, 0}},
        {6, {MESHLLM_OP_ATTENTION, Q, H, NO, NO, 0, 1, 0, 1, 0}},
        {6, {MESHLLM_OP_ATTENTION, Q, H, NO, NO, 0, UINT32_MAX, 0, 1, 0}},
        {8, {MESHLLM_OP_GATE, H, Q, H, NO, 2, 0, 0, 0, 0}},
        {10, {MESHLLM_OP_EXCHANGE, X, KV, NO, NO, 0, 0, 0, 0, 0}},
        {14, {MESHLLM_OP_SELECT, X, X, NO, NO, 0, 0, 0, 0, 0}},
        {14, {MESHLLM_OP_ROPE, H, NO, NO, FREQUENCIES, 4, HEAD, 0, 1, 0}},
    };
    struct meshllm_program *p;
    struct meshllm_fault fault;
    for (size_t i = 0; i < N(cases); i++) {
        struct meshllm_op ops[N(good)];
        memcpy(ops, good, sizeof good);
        ops[cases[i].op] = cases[i].changed;
        CHECK(try_new(&p, r, N(ops), ops, MESHLLM_PARTIAL_F32, &fault) == MESHLLM_BAD_PROGRAM && !p, "case %zu", i);
        CHECK(fault.op == cases[i].op && fault.reason, "case %zu: op %u", i, fault.op);
    }
}

static void test_weights_and_buffers_must_be_what_they_say(struct rig *r) {
    struct meshllm_program *p;
    struct meshllm_fault fault;
    for (int i = 0; i < 9; i++) {
        struct rig bad = *r;
        if (i == 0) bad.weights[TABLE].size--;
        if (i == 1) bad.weights[MATRIX].data = (const char *)bad.weights[MATRIX].data + 4;
        if (i == 2) bad.weights[NORM].n_rows = 2;
        if (i == 3) bad.weights[MATRIX].format = 4;
        if (i == 4) bad.weights[MATRIX].n_rows = bad.weights[MATRIX].n_cols = UINT32_MAX;
        if (i == 5) bad.buffers[X].width = 0;
        if (i == 6) bad.buffers[X].kind = 2;
        if (i == 7) bad.cache.group = 0;
        if (i == 8) bad.weights[KV_MATRIX].format = MESHLLM_Q8_0; // then its input would have to be q8
        CHECK(try_new(&p, &bad, N(good), good, MESHLLM_PARTIAL_F32, &fault) == MESHLLM_BAD_PROGRAM, "case %d", i);
    }
    struct rig huge = *r;
    huge.cache = (struct meshllm_cache_shape){1, UINT32_MAX, UINT32_MAX, 2, HEAD, 2};
    CHECK(try_new(&p, &huge, N(good), good, MESHLLM_PARTIAL_F32, &fault) == MESHLLM_NO_MEMORY && !p);
    CHECK(try_new(&p, r, N(good), good, 3, &fault) == MESHLLM_BAD_PROGRAM);
}

static void test_states_allow_what_they_should(struct rig *r) {
    struct meshllm_program *p = program_of(r, N(good), good, MESHLLM_PARTIAL_F32);
    const int32_t tokens[] = {1, 2, ROWS, -1}, positions[] = {0, 1, 2, 8}, slots[] = {0, 0, 2, -1}, outputs[] = {1, 0, 2};
    size_t size;
    CHECK(meshllm_program_run(p) == MESHLLM_BAD_ARGUMENT);
    CHECK(meshllm_program_supply(p, 0, NULL) == MESHLLM_BAD_ARGUMENT && !meshllm_program_read_ahead(p));
    CHECK(meshllm_program_begin(p, 0, tokens, positions, slots, 0, outputs) == MESHLLM_BAD_ARGUMENT);
    CHECK(meshllm_program_begin(p, 1, tokens + 2, positions, slots, 0, outputs) == MESHLLM_BAD_ARGUMENT, "token past the table");
    CHECK(meshllm_program_begin(p, 1, tokens + 3, positions, slots, 0, outputs) == MESHLLM_BAD_ARGUMENT, "negative token");
    CHECK(meshllm_program_begin(p, 1, tokens, positions + 3, slots, 0, outputs) == MESHLLM_BAD_ARGUMENT, "position past the cache");
    CHECK(meshllm_program_begin(p, 1, tokens, positions, slots + 2, 0, outputs) == MESHLLM_BAD_ARGUMENT, "no such slot");
    CHECK(meshllm_program_begin(p, 2, tokens, positions, slots, 2, outputs) == MESHLLM_BAD_ARGUMENT, "outputs that do not grow");
    CHECK(meshllm_program_begin(p, 2, tokens, positions, slots, 1, outputs + 2) == MESHLLM_BAD_ARGUMENT, "output past the rows");
    CHECK(meshllm_program_begin(p, 2, tokens, positions, slots, 1, outputs) == MESHLLM_OK);
    CHECK(meshllm_program_run(p) == MESHLLM_EXCHANGE && meshllm_program_run(p) == MESHLLM_BAD_ARGUMENT);
    const void *own = meshllm_program_partial(p, &size);
    CHECK(size == 2 * WIDTH * sizeof(float) && meshllm_program_partial_size(p) == size);
    CHECK(meshllm_program_supply(p, 1, &own) == MESHLLM_OK && meshllm_program_supply(p, 1, &own) == MESHLLM_BAD_ARGUMENT);
    CHECK(meshllm_program_run(p) == MESHLLM_EXCHANGE);
    meshllm_program_partial(p, &size);
    CHECK(size == 0 && meshllm_program_read_ahead(p) && !meshllm_program_read_ahead(p), "adds nothing, reads ahead once");
    CHECK(meshllm_program_supply(p, 0, NULL) == MESHLLM_OK && meshllm_program_run(p) == MESHLLM_OK);
    CHECK(meshllm_program_buffer(p, LOGITS) && !meshllm_program_buffer(p, 99));
    CHECK(meshllm_program_begin(p, 2, tokens, positions, slots, 0, outputs) == MESHLLM_OK);
    meshllm_program_stop(p);
    CHECK(meshllm_program_run(p) == MESHLLM_STOPPED && meshllm_program_run(p) == MESHLLM_BAD_ARGUMENT);
    CHECK(meshllm_program_copy_slot(p, 1, 0, 8) == MESHLLM_OK && meshllm_program_copy_slot(p, 2, 0, 1) == MESHLLM_BAD_ARGUMENT);
    CHECK(meshllm_program_copy_slot(p, 1, 0, 9) == MESHLLM_BAD_ARGUMENT);
    CHECK(meshllm_program_cache_size(p) == 2 * sizeof(uint16_t) * 2 * 8 * 2 * HEAD);
    meshllm_program_free(p);
}

// x += p in each of many exchanges. All ranks must hold the same bits, and be off by the rounding of one exchange, not of all.
static void test_exchanges_agree_and_do_not_drift(struct rig *r, uint32_t precision, double tolerance) {
    enum { EXCHANGES = 60 };
    struct meshllm_op ops[1 + 2 * EXCHANGES] = {{MESHLLM_OP_EMBED, X, NO, NO, TABLE, 0, 0, 0, 0, 0}};
    for (int i = 0; i < EXCHANGES; i++) {
        ops[1 + 2 * i] = (struct meshllm_op){MESHLLM_OP_EMBED, H, NO, NO, TABLE, 0, 0, 0, 0, 0};
        ops[2 + 2 * i] = (struct meshllm_op){MESHLLM_OP_EXCHANGE, X, H, NO, NO, 0, 0, 0, 0, 0};
    }
    struct meshllm_program *ranks[2] = {program_of(r, N(ops), ops, precision), program_of(r, N(ops), ops, precision)};
    const int32_t tokens[2][2] = {{3, 4}, {3, 4}}, positions[] = {0, 1}, slots[] = {0, 0};
    for (int i = 0; i < 2; i++) CHECK(meshllm_program_begin(ranks[i], 2, tokens[i], positions, slots, 0, NULL) == MESHLLM_OK);
    const float *streams[2] = {meshllm_program_buffer(ranks[0], X), meshllm_program_buffer(ranks[1], X)};
    for (int i = 0; i < EXCHANGES; i++) {
        const void *partials[2];
        size_t size;
        for (int k = 0; k < 2; k++) {
            CHECK(meshllm_program_run(ranks[k]) == MESHLLM_EXCHANGE);
            partials[k] = meshllm_program_partial(ranks[k], &size);
        }
        for (int k = 0; k < 2; k++) CHECK(meshllm_program_supply(ranks[k], 2, partials) == MESHLLM_OK);
        CHECK(!memcmp(streams[0], streams[1], 2 * WIDTH * sizeof(float)), "exchange %d", i);
    }
    for (int i = 0; i < 2 * WIDTH; i++) {
        double right = (1 + 2.0 * EXCHANGES) * r->data[TABLE][3 * WIDTH + i];
        CHECK(fabs(streams[0][i] - right) < tolerance, "value %d: %g, not %g", i, streams[0][i], right);
    }
    for (int k = 0; k < 2; k++) {
        CHECK(meshllm_program_run(ranks[k]) == MESHLLM_OK);
        meshllm_program_free(ranks[k]);
    }
}

static void test_wide_exchange_needs_whole_blocks(struct rig *r) {
    const struct meshllm_op odd = {MESHLLM_OP_EXCHANGE, LOGITS, NO, NO, NO, 0, 0, 0, 0, 0};
    struct meshllm_program *p;
    struct meshllm_fault fault;
    CHECK(try_new(&p, r, 1, &odd, MESHLLM_PARTIAL_Q8_0, &fault) == MESHLLM_BAD_PROGRAM && fault.op == 0);
    CHECK(try_new(&p, r, 1, &odd, MESHLLM_PARTIAL_F16, &fault) == MESHLLM_OK);
    meshllm_program_free(p);
}

static void test_the_largest_come_first_and_ties_by_index(void) {
    enum { COUNT = 1000, K = 37 };
    float logits[COUNT], values[COUNT];
    uint32_t indices[COUNT];
    uint64_t seed = 7;
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < COUNT; i++) logits[i] = round % 2 ? noise_float(&seed) : (float)(noise(&seed) % 9);
        logits[noise(&seed) % COUNT] = NAN, logits[noise(&seed) % COUNT] = INFINITY, logits[noise(&seed) % COUNT] = -INFINITY;
        uint32_t n = meshllm_top_k(K, indices, values, COUNT, logits);
        CHECK(n == K);
        for (uint32_t i = 0; i < n; i++) {
            CHECK(values[i] == logits[indices[i]]);
            uint32_t better = 0;
            for (uint32_t j = 0; j < COUNT; j++)
                better += logits[j] > values[i] || (logits[j] == values[i] && j < indices[i]);
            CHECK(better == i, "place %u", i);
        }
    }
    for (int i = 0; i < 5; i++) logits[i] = NAN;
    CHECK(meshllm_top_k(3, indices, values, 5, logits) == 0 && meshllm_top_k(0, indices, values, 5, logits) == 0);
    CHECK(meshllm_top_k(9, indices, values, 7, logits) == 2, "as many as there are");
}

static void test_log_sum_exp_is_exact(void) {
    float logits[777];
    uint64_t seed = 3;
    for (uint32_t n = 1; n <= N(logits); n += 97) {
        double sum = 0;
        for (uint32_t i = 0; i < n; i++) logits[i] = 60 * noise_float(&seed) + 500;
        for (uint32_t i = 0; i < n; i++) sum += exp((double)logits[i] - 500);
        CHECK(fabs(meshllm_log_sum_exp(n, logits) - 500 - log(sum)) < 1e-6, "%u", n);
    }
    CHECK(meshllm_log_sum_exp(0, logits) == -INFINITY);
}

static void test_noise_is_gumbel_and_its_argmax_skips_nothing(void) {
    enum { COUNT = 5000 };
    static float logits[COUNT];
    static uint32_t ids[COUNT];
    static double noises[COUNT];
    uint64_t seed = 11;
    double mean = 0;
    for (uint32_t round = 0; round < 40; round++) {
        for (uint32_t i = 0; i < COUNT; i++) logits[i] = 8 * noise_float(&seed), ids[i] = 100 + i;
        meshllm_gumbel(round * 77, round, COUNT, ids, noises);
        uint32_t best = 0;
        for (uint32_t i = 0; i < COUNT; i++) {
            mean += noises[i] / COUNT / 40;
            if (logits[i] / 1.5 + noises[i] > logits[best] / 1.5 + noises[best]) best = i;
        }
        double value, left, right;
        CHECK(meshllm_gumbel_argmax(round * 77, round, 100, 1.5, COUNT, logits, &value) == best);
        CHECK(value == logits[best] / 1.5 + noises[best]);
        meshllm_gumbel_argmax(round * 77, round, 100, 1.5, 1234, logits, &left);
        meshllm_gumbel_argmax(round * 77, round, 1334, 1.5, COUNT - 1234, logits + 1234, &right);
        CHECK((left > right ? left : right) == value, "a split changes nothing");
    }
    CHECK(fabs(mean - 0.5772) < 0.02, "mean of Gumbel(0, 1) noise is Euler's constant, not %g", mean);
    for (uint32_t i = 0; i < COUNT; i++) logits[i] = NAN;
    double value;
    CHECK(meshllm_gumbel_argmax(1, 1, 0, 1, COUNT, logits, &value) == MESHLLM_NONE);
}

int main(void) {
    const char *isa;
    for (uint32_t i = 0; (isa = meshllm_isa_name(i)); i++) {
        if (!meshllm_isa_runs(i)) continue;
        struct rig r = rig_new(isa);
        test_what_is_wrong_in_an_op_is_named(&r);
        test_weights_and_buffers_must_be_what_they_say(&r);
        test_states_allow_what_they_should(&r);
        test_exchanges_agree_and_do_not_drift(&r, MESHLLM_PARTIAL_F32, 1e-3);
        test_exchanges_agree_and_do_not_drift(&r, MESHLLM_PARTIAL_F16, 4e-3);
        test_exchanges_agree_and_do_not_drift(&r, MESHLLM_PARTIAL_Q8_0, 3.0 / 127);
        test_wide_exchange_needs_whole_blocks(&r);
        rig_free(&r);
    }
    test_the_largest_come_first_and_ties_by_index();
    test_log_sum_exp_is_exact();
    test_noise_is_gumbel_and_its_argmax_skips_nothing();
    return 0;
}
