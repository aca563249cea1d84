// How fast the kernels are here: GB/s of what is streamed, Gop/s of products (a multiplication and an addition are two), the best of
// the repeats that fit in the time given to each line, so that a busy machine blurs little. Beside it the read bandwidth, the limit of decode.
// usage: bench_kernels [-i ISA] [-t THREADS] [-m MILLISECONDS] [-c] [WORD: only lines whose name holds it]
// -c counts the processor time of one thread instead of the time on the wall: for comparisons on a machine in use.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "blocks.h"
#include "kernels.h"
#include "pool.h"

#define MEMORY ((size_t)256 << 20) // well past every cache
enum { HUGE_PAGE = 2 << 20 };

struct bench {
    struct meshllm_engine *engine;
    double seconds; // for a line
    clockid_t clock;
    const char *word;
    uint8_t *memory; // MEMORY bytes
    double read;     // bytes a second
};

static double seconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static uint8_t *huge_memory(size_t size) {
    uint8_t *raw = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) exit(1);
    uint8_t *memory = raw + (HUGE_PAGE - (uintptr_t)raw % HUGE_PAGE) % HUGE_PAGE;
    madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 0x11, size); // as f16 a small scale, as nibbles and bytes a value like another
    return memory;
}

typedef void work(const struct bench *bench, void *context);

static double best_time(const struct bench *bench, work *run, void *context) {
    double best = 1e9;
    for (double begun = seconds_of(bench->clock), last = begun; last - begun < bench->seconds;) {
        double start = seconds_of(bench->clock);
        run(bench, context);
        last = seconds_of(bench->clock);
        if (last - start < best) best = last - start;
    }
    return best;
}

static void line(const struct bench *bench, const char *name, work *run, void *context, double bytes, double ops) {
    if (!strstr(name, bench->word)) return;
    double time = best_time(bench, run, context);
    printf("%-34s %10.1f us %7.2f GB/s", name, time * 1e6, bytes / time / 1e9);
    if (ops > 0) printf(" %8.1f Gop/s", ops / time / 1e9);
    else if (bytes >= (double)MEMORY / 8) printf(" %7.0f %% of read", bytes / time / bench->read * 100);
    putchar('\n');
}

static void read_all(const struct bench *bench, void *context) {
    (void)context;
    bench->engine->kernels->read(MEMORY, bench->memory);
}

// --- products ------------------------------------------------------------------------------------------------------------

struct product {
    struct meshllm_weight weight;
    uint32_t n_tokens;
    float *in, *out;
};

static void multiply(const struct bench *bench, void *context) {
    const struct product *p = context;
    if (meshllm_matmul(bench->engine, p->out, &p->weight, p->n_tokens, p->in)) exit(1);
}

static void bench_product(const struct bench *bench, const char *format_name, uint32_t format, uint32_t n_rows, uint32_t n_cols, uint32_t n_tokens) {
    struct product p = {.n_tokens = n_tokens, .in = calloc((size_t)n_tokens * n_cols, 4), .out = malloc((size_t)n_tokens * n_rows * 4)};
    size_t size = meshllm_packed_size(bench->engine, format, n_rows, n_cols);
    p.weight = (struct meshllm_weight){MESHLLM_WEIGHT_PACKED, format, n_rows, n_cols, size, bench->memory};
    for (size_t i = 0; i < (size_t)n_tokens * n_cols; i++) p.in[i] = (float)(i % 255) - 127;
    char name[64];
    snprintf(name, sizeof name, "matmul %s %ux%u n=%u", format_name, n_rows, n_cols, n_tokens);
    line(bench, name, multiply, &p, (double)size, n_tokens == 1 ? 0 : 2.0 * n_rows * n_cols * n_tokens);
    free(p.in), free(p.out);
}

static void bench_products(const struct bench *bench) {
    static const struct { const char *name; uint32_t format; } formats[] = {
        {"q4_0", MESHLLM_Q4_0}, {"q4_1", MESHLLM_Q4_1}, {"q5_0", MESHLLM_Q5_0}, {"q5_1", MESHLLM_Q5_1}, {"q8_0", MESHLLM_Q8_0},
        {"iq4_nl", MESHLLM_IQ4_NL}, {"q2_k", MESHLLM_Q2_K}, {"q3_k", MESHLLM_Q3_K}, {"q4_k", MESHLLM_Q4_K}, {"q5_k", MESHLLM_Q5_K},
        {"q6_k", MESHLLM_Q6_K}, {"f16", MESHLLM_F16}, {"bf16", MESHLLM_BF16}, {"f32", MESHLLM_F32}};
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        uint32_t n_rows = (uint32_t)(MEMORY / format_row_size(formats[f].format, 2048) / 2) & ~15u; // half the memory: a decode's stream
        for (uint32_t n = 1; n <= 8; n *= 2) bench_product(bench, formats[f].name, formats[f].format, n_rows, 2048, n);
        for (uint32_t n = 32; n <= 512; n *= 4) bench_product(bench, formats[f].name, formats[f].format, 2048, 2048, n);
    }
}

// --- rows ----------------------------------------------------------------------------------------------------------------

enum { WIDTH = 2048, HEAD_DIM = 64, POSITIONS = 4096 };
struct rows {
    float x[WIDTH], y[WIDTH], z[WIDTH];
    int8_t values[WIDTH];
    float scales[WIDTH / MESHLLM_BLOCK];
    int32_t sums[WIDTH / MESHLLM_BLOCK];
    uint16_t half[WIDTH];
};

static void run_norm(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->rms_norm(r->z, WIDTH, r->x, r->y, 1e-5f); }
static void run_quantize(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->quantize(r->values, r->scales, r->sums, WIDTH, r->x); }
static void run_rope(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->rope(r->z, WIDTH / HEAD_DIM, HEAD_DIM, HEAD_DIM / 2, r->y, 0); }
static void run_rope_halves(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->rope(r->z, WIDTH / HEAD_DIM, HEAD_DIM, HEAD_DIM / 2, r->y, 1); }
static void run_silu(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->gate(r->z, WIDTH, r->x, r->y, 0); }
static void run_gelu(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->gate(r->z, WIDTH, r->x, r->y, 1); }
static void run_add(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->add(r->z, WIDTH, r->x); }
static void run_to_f16(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->to_f16(r->half, WIDTH, r->x); }
static void run_from_f16(const struct bench *b, void *c) { struct rows *r = c; b->engine->kernels->from_f16(r->z, WIDTH, r->half); }
static void attend(const struct bench *b, struct rows *r, size_t n_heads) {
    const uint16_t *cache = (const uint16_t *)b->memory;
    b->engine->kernels->attention(r->z, HEAD_DIM, n_heads, r->x, cache, cache + POSITIONS * HEAD_DIM, POSITIONS, 0.125f, 0);
}
static void run_attention(const struct bench *b, void *c) { attend(b, c, 1); }
static void run_attention_4(const struct bench *b, void *c) { attend(b, c, 4); }

static void bench_rows(const struct bench *bench) {
    static struct rows rows;
    for (size_t i = 0; i < WIDTH; i++) rows.x[i] = (float)(i % 17) - 8, rows.y[i] = 0.5f, rows.z[i] = 0;
    double bytes = WIDTH * 4;
    line(bench, "rms_norm 2048", run_norm, &rows, 2 * bytes, 0);
    line(bench, "quantize 2048", run_quantize, &rows, bytes, 0);
    line(bench, "rope 32x64 pairs", run_rope, &rows, bytes, 0);
    line(bench, "rope 32x64 halves", run_rope_halves, &rows, bytes, 0);
    line(bench, "silu 2048", run_silu, &rows, 2 * bytes, 0);
    line(bench, "gelu 2048", run_gelu, &rows, 2 * bytes, 0);
    line(bench, "add 2048", run_add, &rows, 2 * bytes, 0);
    line(bench, "to_f16 2048", run_to_f16, &rows, bytes, 0);
    line(bench, "from_f16 2048", run_from_f16, &rows, bytes, 0);
    line(bench, "attention 1 head 64x4096", run_attention, &rows, 4.0 * POSITIONS * HEAD_DIM, 4.0 * POSITIONS * HEAD_DIM);
    line(bench, "attention 4 heads 64x4096", run_attention_4, &rows, 4.0 * POSITIONS * HEAD_DIM, 16.0 * POSITIONS * HEAD_DIM);
}

// --- the pool ------------------------------------------------------------------------------------------------------------

static void twenty_us(void *context, size_t item) {
    (void)item;
    for (double end = seconds_of(CLOCK_MONOTONIC) + *(double *)context; seconds_of(CLOCK_MONOTONIC) < end;) {}
}

static void bench_pool(const struct bench *bench) { // mean, not best: what a crowded machine costs is in the tail
    enum { JOBS = 2000 };
    if (!strstr("pool", bench->word)) return;
    for (uint32_t n = 1; n <= 4; n *= 2) {
        struct pool *pool = pool_new(n);
        double work = 20e-6, begun = seconds_of(CLOCK_MONOTONIC);
        for (int i = 0; i < JOBS; i++) pool_run(pool, twenty_us, &work, n);
        printf("pool of %u: fork, 20 us on each, join  %8.1f us\n", n, (seconds_of(CLOCK_MONOTONIC) - begun) / JOBS * 1e6);
        pool_free(pool);
    }
}

int main(int argc, char **argv) {
    struct bench bench = {.seconds = 0.3, .clock = CLOCK_MONOTONIC, .word = ""};
    const char *isa = "";
    uint32_t n_threads = 1;
    for (int option; (option = getopt(argc, argv, "i:t:m:c")) != -1;) {
        if (option == 'i') isa = optarg;
        else if (option == 't') n_threads = (uint32_t)atoi(optarg);
        else if (option == 'm') bench.seconds = atoi(optarg) * 1e-3;
        else if (option == 'c') bench.clock = CLOCK_THREAD_CPUTIME_ID;
        else return 2;
    }
    if (optind < argc) bench.word = argv[optind];
    if (meshllm_engine_new(&bench.engine, isa, n_threads)) {
        fprintf(stderr, "bench_kernels: %s does not run here on %u threads\n", isa, n_threads);
        return 1;
    }
    bench.memory = huge_memory(MEMORY);
    bench.read = bench.clock == CLOCK_MONOTONIC ? meshllm_measure_bandwidth(bench.engine, MEMORY, bench.memory, bench.seconds)
                                                : MEMORY / best_time(&bench, read_all, NULL);
    printf("isa %s, %u threads, read %.2f GB/s\n", meshllm_engine_isa(bench.engine), n_threads, bench.read / 1e9);
    bench_products(&bench);
    bench_rows(&bench);
    bench_pool(&bench);
    meshllm_engine_free(bench.engine);
    return 0;
}
