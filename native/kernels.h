// The table of functions that one instruction set fills in, and the nouns they work on. One file an ISA
// (isa/*.c) holds primitives, includes the shared bodies (body/*.h) and exports one `struct kernels`.
// Nothing here allocates, locks or fails: sizes are checked once when a program is made.
#ifndef MESHLLM_KERNELS_H
#define MESHLLM_KERNELS_H
#include "formats.h"

// Quantized activations, rows of n_cols values (a multiple of 32): value = scales[block] * values[k], |values| <= 127.
struct q8_rows {
    int8_t *values; // [rows][n_cols], 64-byte aligned
    float *scales;  // [rows][n_cols / 32]
    int32_t *sums;  // [rows][n_cols / 32]: sum of the 32 values, for formats with an offset
};

// A packed matrix: panels of `panel_rows` rows, each panel [n_cols / 32] packed blocks (quantized) or
// [n_cols][panel_rows] values (F16, F32). The last panel is padded with zero rows.
struct matrix {
    uint32_t format, n_rows, n_cols;
    const uint8_t *data; // 64-byte aligned
};

struct kernels {
    const char *name;
    uint32_t panel_rows; // rows of a panel of a packed matrix

    // Panels [first, last) of out[t * out_stride + row] = sum over k of w[row][k] * in[t][k], n_tokens rows.
    // q8 is read for quantized formats, f32 ([n_tokens][in_stride]) for F16 and F32. Rows past n_rows are not written.
    void (*matmul)(float *out, size_t out_stride, const struct matrix *w, size_t first, size_t last, size_t n_tokens,
                   const struct q8_rows *q8, const float *f32, size_t in_stride);
    // One row of n values (a multiple of 32) to int8: scale = max|x| / 127 rounded to f16, value = round-half-even(x / scale).
    void (*quantize)(int8_t *values, float *scales, int32_t *sums, size_t n, const float *in);
    // out[i] = in[i] / sqrt(mean(in^2) + eps) * weight[i]; sums in double or in eight or more float lanes.
    void (*rms_norm)(float *out, size_t n, const float *in, const float *weight, float eps);
    // Rotates n_heads heads of head_dim values in place by cos_sin [n_pairs][2]; style as in MESHLLM_OP_ROPE.
    void (*rope)(float *x, size_t n_heads, size_t head_dim, size_t n_pairs, const float *cos_sin, uint32_t style);
    // n_heads query heads that share a KV head, q and out [n_heads][head_dim]: out = softmax(scale * q . K[p]) V[p] over p < n_positions;
    // K, V: f16 [n_positions][head_dim]. soft_cap > 0: s = soft_cap * tanh(s / soft_cap). Online softmax: no memory in n_positions.
    void (*attention)(float *out, size_t head_dim, size_t n_heads, const float *q, const uint16_t *keys, const uint16_t *values,
                      size_t n_positions, float scale, float soft_cap);
    void (*to_f16)(uint16_t *out, size_t n, const float *in); // round to nearest even
    void (*from_f16)(float *out, size_t n, const uint16_t *in);
    void (*gate)(float *out, size_t n, const float *in, const float *up, uint32_t activation); // act(in) * up
    void (*add)(float *out, size_t n, const float *in);
    void (*scale)(float *out, size_t n, float factor, float soft_cap); // out *= factor; soft_cap > 0: then soft_cap * tanh(out / soft_cap)
    // Touches size bytes as matmul reads them; returns a sum so that the reads stay. For meshllm_measure_bandwidth.
    uint64_t (*read)(size_t size, const void *data);
};

extern const struct kernels kernels_scalar;
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx_vnni;
extern const struct kernels kernels_avx512_vnni;
extern const struct kernels kernels_neon;
extern const struct kernels kernels_neon_dotprod;
extern const struct kernels kernels_neon_i8mm;

struct pool;
struct meshllm_engine {
    const struct kernels *kernels;
    struct pool *pool;
};

// pack.c: meshllm_packed_size and meshllm_pack for a panel height.
size_t packed_size(uint32_t panel_rows, uint32_t format, uint32_t n_rows, uint32_t n_cols);
#endif
