// Engines: which instruction sets they take, products by a pool of threads, and the arguments they refuse.
#include <math.h>
#include <stdbool.h>

#include "check.h"
#include "meshllm.h"

static void check_isas(void) {
    struct meshllm_engine *engine;
    bool best = true; // the first that runs is the one taken for ""
    for (uint32_t i = 0; meshllm_isa_name(i); i++) {
        const char *name = meshllm_isa_name(i);
        int status = meshllm_engine_new(&engine, name, 1);
        CHECK(status == (meshllm_isa_runs(i) ? MESHLLM_OK : MESHLLM_NO_ISA), "%s", name);
        printf("engine %s: %s\n", name, meshllm_isa_runs(i) ? "runs" : "does not run here");
        if (status) continue;
        CHECK(!strcmp(meshllm_engine_isa(engine), name));
        meshllm_engine_free(engine);
        if (!best) continue;
        CHECK(!meshllm_engine_new(&engine, "", 1) && !strcmp(meshllm_engine_isa(engine), name));
        meshllm_engine_free(engine);
        best = false;
    }
    CHECK(!meshllm_isa_runs(1000) && !meshllm_isa_name(1000));
    CHECK(meshllm_engine_new(&engine, "avx1024", 1) == MESHLLM_NO_ISA && !engine);
    CHECK(meshllm_engine_new(&engine, "", 0) == MESHLLM_BAD_ARGUMENT && !engine);
    meshllm_engine_free(NULL);
}

static void check_products(uint32_t n_threads) {
    enum { ROWS = 203, COLS = 96, TOKENS = 3 };
    static float in[TOKENS * COLS], alone[TOKENS * ROWS], together[TOKENS * ROWS];
    static uint8_t tensor[ROWS * (COLS / 32) * 34];
    uint64_t seed = 5;
    for (size_t i = 0; i < sizeof in / sizeof *in; i++) in[i] = noise_float(&seed);
    for (size_t i = 0; i < sizeof tensor; i++) tensor[i] = (uint8_t)(i % 34 == 1 ? 0x1c : noise(&seed)); // scales of some 1/256
    struct meshllm_engine *one, *many;
    CHECK(!meshllm_engine_new(&one, "", 1) && !meshllm_engine_new(&many, "", n_threads) && meshllm_engine_threads(many) == n_threads);
    size_t size = meshllm_packed_size(one, MESHLLM_Q8_0, ROWS, COLS);
    void *packed = aligned_alloc(64, (size + 63) / 64 * 64);
    CHECK(!meshllm_pack(one, packed, MESHLLM_Q8_0, 0, ROWS, 0, COLS, COLS, sizeof tensor, tensor));
    struct meshllm_weight weight = {MESHLLM_WEIGHT_PACKED, MESHLLM_Q8_0, ROWS, COLS, size, packed};
    CHECK(!meshllm_matmul(one, alone, &weight, TOKENS, in));
    for (int i = 0; i < 50; i++) {
        memset(together, CANARY, sizeof together);
        CHECK(!meshllm_matmul(many, together, &weight, TOKENS, in) && !memcmp(alone, together, sizeof alone));
    }
    CHECK(meshllm_measure_bandwidth(many, size & ~(size_t)63, packed, 0.001) > 0);
    CHECK(meshllm_matmul(one, alone, &weight, 0, in) == MESHLLM_BAD_ARGUMENT);
    weight.size--;
    CHECK(meshllm_matmul(one, alone, &weight, 1, in) == MESHLLM_BAD_ARGUMENT, "a matrix cut short");
    weight.size++, weight.format = 9;
    CHECK(meshllm_matmul(one, alone, &weight, 1, in) == MESHLLM_BAD_ARGUMENT, "an unknown format");
    meshllm_engine_free(one), meshllm_engine_free(many);
    free(packed);
}

int main(void) {
    check_isas();
    for (uint32_t n = 1; n <= 5; n++) check_products(n);
    puts("engine: the same on any number of threads");
    return 0;
}
