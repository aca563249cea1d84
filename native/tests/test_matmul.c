// Matrix products of every instruction set that runs here, of every format, at odd sizes, on buffers that end at guard pages.
// With scales that are powers of two the sums are whole numbers below 2^24 and must be exact; else they may differ from sums in
// double by SUM_ERROR of the sum of magnitudes: a float sum of n terms errs by at most n * 2^-24, on average its square root.
#include <math.h>
#include <stdbool.h>

#include "blocks.h"
#include "check.h"
#include "cpu_features.h"
#include "dispatch.h"
#include "packing.h"

static const double SUM_ERROR = 1e-5;
static const uint32_t formats[] = {MESHLLM_F32, MESHLLM_F16, MESHLLM_Q4_0, MESHLLM_Q4_1, MESHLLM_Q8_0, MESHLLM_BF16, MESHLLM_Q5_0, MESHLLM_Q5_1,
                                   MESHLLM_IQ4_NL, MESHLLM_Q2_K, MESHLLM_Q3_K, MESHLLM_Q4_K, MESHLLM_Q5_K, MESHLLM_Q6_K};
enum { N_FORMATS = sizeof formats / sizeof *formats, MARGIN = 3, N_THOROUGH = 5 }; // MARGIN: floats between rows that must stay untouched; of
// the first N_THOROUGH formats all cases are tried, of the others a fifth: they share what depends on the sizes

enum scales { WHOLE, REAL, WILD }; // of weights: 1 or 2; up to 1; any bits at all

static bool is_float(uint32_t format) { return format_is_float(format); }

static size_t scale_of(uint32_t format) { // where a block's f16 numbers stand
    return format == MESHLLM_Q2_K ? 80 : format == MESHLLM_Q3_K ? 108 : format == MESHLLM_Q6_K ? 208 : 0;
}

static void fill_blocks(uint8_t *tensor, size_t size, uint32_t format, enum scales scales, uint64_t *seed) {
    for (size_t i = 0; i < size; i++) tensor[i] = (uint8_t)noise(seed); // values of Q8_0: -128 among them
    if (scales == WILD) return;
    for (size_t at = 0, block = format_block_size(format); at < size; at += block)
        for (size_t i = 0; i < packing_of(format).n_heads; i++) {
            uint16_t scale = f16_of_f32(scales == WHOLE ? (float)(1 + noise(seed) % 2) : noise_float(seed));
            memcpy(tensor + at + scale_of(format) + 2 * i, &scale, 2);
        }
}

static void fill_values(uint8_t *tensor, size_t n, uint32_t format, enum scales scales, uint64_t *seed) {
    for (size_t i = 0; i < n; i++) {
        float value = scales == WHOLE ? (float)((int)(noise(seed) % 31) - 15) : noise_float(seed);
        uint16_t half = scales == WILD ? (uint16_t)noise(seed) : f16_of_f32(value);
        if (format == MESHLLM_BF16 && scales != WILD) memcpy(&half, (uint8_t *)&value + 2, 2); // little-endian
        if (format != MESHLLM_F32) memcpy(tensor + 2 * i, &half, 2);
        else memcpy(tensor + 4 * i, &value, 4);
    }
}

extern const struct kernels kernels_avx_vnni_evex; // avx_vnni.c with instructions that machines with AVX512-VNNI have

struct product { // one case and its operands
    const struct kernels *kernels;
    uint32_t format, n_rows, n_cols;
    size_t n_tokens, out_stride, in_stride;
    enum scales scales;
    struct guarded tensor, packed, in, values, block_scales, sums, out;
};

static void make_input(struct product *p, uint64_t *seed) {
    size_t n_blocks = p->n_tokens * p->n_cols / MESHLLM_BLOCK, n = p->n_tokens * p->in_stride - (p->in_stride - p->n_cols);
    p->in = guarded_new(n * 4);
    p->values = guarded_new(is_float(p->format) ? 0 : p->n_tokens * p->n_cols);
    p->block_scales = guarded_new(n_blocks * 4);
    p->sums = guarded_new(n_blocks * 4);
    for (size_t i = 0; i < n; i++) ((float *)p->in.data)[i] = p->scales == WHOLE ? (float)((int)(noise(seed) % 31) - 15) : noise_float(seed);
    if (is_float(p->format)) return;
    for (size_t b = 0; b < n_blocks; b++) {
        int32_t sum = 0;
        bool extreme = noise(seed) % 4 == 0; // a block of the largest magnitudes: what 16-bit sums must hold
        for (size_t i = 0; i < MESHLLM_BLOCK; i++) {
            int value = extreme ? 127 : (int)(noise(seed) % 255) - 127;
            ((int8_t *)p->values.data)[b * MESHLLM_BLOCK + i] = (int8_t)value;
            sum += value;
        }
        ((int32_t *)p->sums.data)[b] = sum;
        ((float *)p->block_scales.data)[b] = p->scales == WHOLE ? 0.5f : noise_float(seed);
    }
}

static void make_product(struct product *p, uint64_t *seed) {
    size_t size = format_row_size(p->format, p->n_cols) * p->n_rows;
    struct meshllm_engine engine = {p->kernels, NULL};
    p->tensor = guarded_new(size);
    if (is_float(p->format)) fill_values(p->tensor.data, (size_t)p->n_rows * p->n_cols, p->format, p->scales, seed);
    else fill_blocks(p->tensor.data, size, p->format, p->scales, seed);
    p->packed = guarded_new(meshllm_packed_size(&engine, p->format, p->n_rows, p->n_cols));
    CHECK(!meshllm_pack(&engine, p->packed.data, p->format, 0, p->n_rows, 0, p->n_cols, p->n_cols, size, p->tensor.data));
    make_input(p, seed);
    p->out = guarded_new((p->n_tokens * p->out_stride - (p->out_stride - p->n_rows)) * 4);
}

static void free_product(struct product *p) {
    struct guarded *all[] = {&p->tensor, &p->packed, &p->in, &p->values, &p->block_scales, &p->sums, &p->out};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) guarded_free(all[i]);
}

static double input_value(const struct product *p, size_t t, size_t k) {
    if (is_float(p->format)) return (double)((float *)p->in.data)[t * p->in_stride + k];
    size_t at = t * p->n_cols + k;
    return (double)((float *)p->block_scales.data)[at / MESHLLM_BLOCK] * ((int8_t *)p->values.data)[at];
}

static void check_value(const struct product *p, size_t t, size_t row, const float *weights, bool written) {
    uint32_t canary = CANARY * 0x01010101u;
    float got = ((float *)p->out.data)[t * p->out_stride + row];
    if (!written) {
        CHECK(!memcmp(&got, &canary, 4), "%s format %u: row %zu is not of these panels", p->kernels->name, p->format, row);
        return;
    }
    if (p->scales == WILD) return; // it ran, within its bounds
    double sum = 0, magnitudes = 0;
    for (size_t k = 0; k < p->n_cols; k++) {
        double term = (double)weights[k] * input_value(p, t, k);
        sum += term;
        magnitudes += fabs(term);
    }
    bool exact = p->scales == WHOLE && format_block_values(p->format) != SUPER_BLOCK; // scales of scales leave 24 bits
    double allowed = exact ? 0 : SUM_ERROR * magnitudes;
    CHECK(fabs((double)got - sum) <= allowed, "%s format %u, %u x %u, token %zu of %zu, row %zu: %g, expected %g", p->kernels->name, p->format,
          p->n_rows, p->n_cols, t, p->n_tokens, row, (double)got, sum);
}

static void check_product(const struct product *p, size_t first, size_t last) {
    memset(p->out.data, CANARY, p->out.size);
    const struct matrix matrix = {p->format, p->n_rows, p->n_cols, p->packed.data};
    const struct q8_rows q8 = {(int8_t *)p->values.data, (float *)p->block_scales.data, (int32_t *)p->sums.data};
    p->kernels->matmul((float *)p->out.data, p->out_stride, &matrix, first, last, p->n_tokens, &q8, (float *)p->in.data, p->in_stride);
    size_t from = first * p->kernels->panel_rows, to = last * p->kernels->panel_rows, row_size = format_row_size(p->format, p->n_cols);
    float *weights = malloc(sizeof *weights * p->n_cols);
    for (size_t row = 0; row < p->n_rows; row++) {
        meshllm_dequantize_row(p->format, weights, p->n_cols, p->tensor.data + row * row_size);
        for (size_t t = 0; t < p->n_tokens; t++) check_value(p, t, row, weights, from <= row && row < to);
    }
    for (size_t t = 0; t + 1 < p->n_tokens; t++)
        for (size_t row = p->n_rows; row < p->out_stride; row++) check_value(p, t, row, NULL, false);
    free(weights);
}

static void check_case(const struct kernels *kernels, uint32_t format, uint32_t n_rows, uint32_t n_cols, size_t n_tokens, uint64_t *seed) {
    size_t n_panels = (n_rows + kernels->panel_rows - 1) / kernels->panel_rows;
    for (enum scales scales = WHOLE; scales <= WILD; scales++) {
        struct product p = {.kernels = kernels, .format = format, .n_rows = n_rows, .n_cols = n_cols, .n_tokens = n_tokens,
                            .out_stride = n_rows + MARGIN, .in_stride = n_cols + MARGIN, .scales = scales};
        make_product(&p, seed);
        check_product(&p, 0, n_panels);
        if (n_panels > 1) check_product(&p, 1, n_panels);
        if (n_panels > 2) check_product(&p, 1, n_panels - 1);
        free_product(&p);
    }
}

static void check_products(const struct kernels *kernels, uint64_t *seed) {
    static const uint32_t row_counts[] = {1, 3, 4, 5, 8, 9, 16, 17, 33};
    static const uint32_t col_counts[] = {1, 2, 31, 32, 33, 160, 256, 768}; // of them the multiples of a format's block
    static const size_t token_counts[] = {1, 2, 3, 4, 5, 8, 11};
    for (size_t f = 0; f < N_FORMATS; f++)
        for (size_t r = 0; r < sizeof row_counts / sizeof *row_counts; r++)
            for (size_t c = 0; c < sizeof col_counts / sizeof *col_counts; c++)
                for (size_t t = 0; t < sizeof token_counts / sizeof *token_counts; t++)
                    if (format_row_size(formats[f], col_counts[c]) && (f < N_THOROUGH || (r + 2 * c + 3 * t) % 5 == 0))
                        check_case(kernels, formats[f], row_counts[r], col_counts[c], token_counts[t], seed);
    for (size_t f = 0; f < N_FORMATS; f++) // more than a pass or a strip holds
        check_case(kernels, formats[f], 20, format_block_values(formats[f]) == SUPER_BLOCK ? 512 : 288, 67, seed);
    printf("matmul %s: all products right\n", kernels->name);
}

int main(void) {
    uint64_t seed = 1;
    for (uint32_t isa = 0; meshllm_isa_name(isa); isa++)
        if (meshllm_isa_runs(isa)) check_products(dispatch_kernels(meshllm_isa_name(isa)), &seed);
#if defined(__x86_64__)
    if (cpu_has_avx512_vnni() && !cpu_has_avx_vnni()) check_products(&kernels_avx_vnni_evex, &seed);
#endif
    return 0;
}
