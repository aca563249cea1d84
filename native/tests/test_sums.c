// Exchanges that take a sum instead of adding to a stream, and the soft cap of SCALE.
#include <math.h>
#include <string.h>

#include "../meshllm.h"
#include "check.h"

#define NO MESHLLM_NONE
enum { X = 0, H = 1, WIDTH = 64, N_TOKENS = 3 };

static struct meshllm_program *program_of(struct meshllm_engine *engine, uint32_t n_ops, const struct meshllm_op *ops, uint32_t precision) {
    const struct meshllm_buffer buffers[] = {{0, WIDTH}, {0, WIDTH}};
    const struct meshllm_cache_shape cache = {0};
    struct meshllm_program *p;
    struct meshllm_fault fault;
    CHECK(meshllm_program_new(&p, engine, n_ops, ops, 2, buffers, 0, NULL, &cache, N_TOKENS, precision, &fault) == MESHLLM_OK);
    const int32_t zeros[N_TOKENS] = {0};
    CHECK(meshllm_program_begin(p, N_TOKENS, zeros, zeros, zeros, 0, NULL) == MESHLLM_OK);
    return p;
}

// What stood in the buffer does not count, and what rounding left out of one sum is not added to the next.
static void test_a_sum_replaces_what_was_there(struct meshllm_engine *engine, uint32_t precision, float tolerance) {
    const struct meshllm_op sum = {MESHLLM_OP_EXCHANGE, X, H, NO, NO, 1, 0, 0, 0, 0}, ops[] = {sum, sum};
    struct meshllm_program *p = program_of(engine, 2, ops, precision);
    float *x = meshllm_program_buffer(p, X), *h = meshllm_program_buffer(p, H), first[N_TOKENS * WIDTH];
    uint64_t seed = 5;
    for (int i = 0; i < N_TOKENS * WIDTH; i++) h[i] = noise_float(&seed), x[i] = NAN;
    for (int turn = 0; turn < 2; turn++) {
        size_t size;
        CHECK(meshllm_program_run(p) == MESHLLM_EXCHANGE);
        const void *own = meshllm_program_partial(p, &size), *partials[] = {own, own};
        CHECK(meshllm_program_supply(p, 2, partials) == MESHLLM_OK);
        for (int i = 0; i < N_TOKENS * WIDTH; i++) CHECK(fabsf(x[i] - 2 * h[i]) <= tolerance, "value %d: %g", i, (double)x[i]);
        if (turn == 0) memcpy(first, x, sizeof first);
        else CHECK(!memcmp(first, x, sizeof first));
    }
    CHECK(meshllm_program_run(p) == MESHLLM_OK);
    meshllm_program_free(p);
}

static void test_a_scaled_value_is_capped_softly(struct meshllm_engine *engine) {
    const struct meshllm_op ops[] = {{MESHLLM_OP_SCALE, X, NO, NO, NO, 0, 0, 0, 3, 2}, {MESHLLM_OP_SCALE, H, NO, NO, NO, 0, 0, 0, 3, 0}};
    struct meshllm_program *p = program_of(engine, 2, ops, MESHLLM_PARTIAL_F32);
    float *x = meshllm_program_buffer(p, X), *h = meshllm_program_buffer(p, H), before[N_TOKENS * WIDTH];
    uint64_t seed = 6;
    for (int i = 0; i < N_TOKENS * WIDTH; i++) before[i] = x[i] = h[i] = 4 * noise_float(&seed);
    CHECK(meshllm_program_run(p) == MESHLLM_OK);
    for (int i = 0; i < N_TOKENS * WIDTH; i++) {
        CHECK(fabs((double)x[i] - 2 * tanh(3 * (double)before[i] / 2)) < 1e-5, "value %d", i);
        CHECK(h[i] == 3 * before[i], "value %d", i);
    }
    meshllm_program_free(p);
}

int main(void) {
    const char *isa;
    for (uint32_t i = 0; (isa = meshllm_isa_name(i)); i++) {
        struct meshllm_engine *engine;
        if (!meshllm_isa_runs(i)) continue;
        CHECK(meshllm_engine_new(&engine, isa, 2) == MESHLLM_OK);
        test_a_sum_replaces_what_was_there(engine, MESHLLM_PARTIAL_F32, 0);
        test_a_sum_replaces_what_was_there(engine, MESHLLM_PARTIAL_F16, 2e-3f);
        test_a_sum_replaces_what_was_there(engine, MESHLLM_PARTIAL_Q8_0, 2.0f / 127);
        test_a_scaled_value_is_capped_softly(engine);
        meshllm_engine_free(engine);
    }
    return 0;
}
