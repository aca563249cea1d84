// Matrix products over panels. Included by an ISA file after its primitives: LANES, the rows of a panel; vf, vi: LANES floats, LANES
// int32; and dot_blocks(sums, format, groups, w_step, values, a_step, n, first, last): sums[i] = the exact dots of block i of a panel's
// weights with 32 activations i, i < n <= TILE, of both halves (0 to 2) or of one; blocks w_step bytes apart, activations a_step. One of the
// steps is 0, and its loads are shared.
//
// out[t][row] = sum over blocks of scale_a[t] * what the format makes of the dot and of the activations' sum: see add_scaled. Offsets leave
// through that sum, so nibbles stay unsigned. No horizontal sum anywhere. A loop runs over up to TILE chains, so that all of it stays in
// registers: one token on two panels (decode), or one panel on up to TILE tokens, its weights unpacked once for all of them.
//
// Decode reads two long streams of memory, the first half of its panels and the second. Two neighbours side by side would be as good to
// the arithmetic, but what each fetches ahead at its end is then what the other has read: 15 instead of 31 GB/s on Zen 4.
#define TOKENS 64     // of a pass over the panels: their activations stay in the second cache
#define PREFETCH 2048 // bytes ahead

struct q8_tile { // activations of up to TILE tokens
    const int8_t *values;
    const float *scales;
    const int32_t *sums;
    size_t n_blocks; // of a token
};

ALWAYS_INLINE size_t tile_of(size_t n_tokens, size_t most) { return n_tokens >= most ? most : n_tokens > 4 ? 4 : n_tokens; } // to do at once

ALWAYS_INLINE bool has_scale_of_16(uint32_t format) { return format == MESHLLM_Q6_K || format == MESHLLM_Q3_K || format == MESHLLM_Q2_K; }

// head: the f16 numbers of the super-block; sub: its bytes for these 32 columns.
ALWAYS_INLINE vf add_scaled(vf acc, uint32_t format, const uint8_t *head, const uint8_t *sub, vi dot, float scale, const int32_t *sum) {
    vf scales = vf_load_f16((const uint16_t *)head), mins;
    switch (format) {
    case MESHLLM_Q4_1: case MESHLLM_Q5_1:
        mins = vf_load_f16((const uint16_t *)head + LANES);
        return vf_fma(vf_fma(vf_of_vi(dot), scales, vf_mul(mins, vf_set1((float)*sum))), vf_set1(scale), acc);
    case MESHLLM_Q4_K: case MESHLLM_Q5_K:
        scales = vf_mul(scales, vf_of_vi(vi_load_u8(sub)));
        mins = vf_mul(vf_load_f16((const uint16_t *)head + LANES), vf_of_vi(vi_load_u8(sub + LANES)));
        return vf_fma(vf_fma(vf_of_vi(dot), scales, vf_mul(mins, vf_set1(-(float)*sum))), vf_set1(scale), acc);
    case MESHLLM_Q4_0: dot = vi_sub(dot, vi_set1_times8(sum)); break;
    case MESHLLM_Q5_0: dot = vi_sub(dot, vi_set1(16 * *sum)); break;
    default: break;
    }
    return vf_fma(vf_of_vi(dot), vf_mul(scales, vf_set1(scale)), acc);
}

ALWAYS_INLINE int32_t first_half_sum(const int8_t *values) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += values[i];
    return sum;
}

// The same for formats with a scale for each 16 columns; dots: of both halves.
ALWAYS_INLINE vf add_halves(vf acc, uint32_t format, const uint8_t *head, const uint8_t *sub, vi first, vi second, float scale, int32_t sum,
                            const int8_t *values) {
    vf scales = vf_mul(vf_load_f16((const uint16_t *)head), vf_set1(scale));
    if (format != MESHLLM_Q2_K) {
        vf both = vf_fma(vf_of_vi(first), vf_of_vi(vi_load_i8(sub)), vf_mul(vf_of_vi(second), vf_of_vi(vi_load_i8(sub + LANES))));
        return vf_fma(both, scales, acc);
    }
    const vi low = vi_set1(15);
    vi b0 = vi_load_u8(sub), b1 = vi_load_u8(sub + LANES);
    vf both = vf_fma(vf_of_vi(first), vf_of_vi(vi_and(b0, low)), vf_mul(vf_of_vi(second), vf_of_vi(vi_and(b1, low))));
    int32_t half = first_half_sum(values);
    vf offset = vf_fma(vf_set1((float)half), vf_of_vi(vi_and(vi_shift_right(b0, 4), low)),
                       vf_mul(vf_set1((float)(sum - half)), vf_of_vi(vi_and(vi_shift_right(b1, 4), low))));
    vf mins = vf_mul(vf_load_f16((const uint16_t *)head + LANES), vf_set1(-scale));
    return vf_fma(both, scales, vf_fma(offset, mins, acc));
}

// acc[i] += block i times token i; w_step is 0 (a block for all tokens) or a_step is (a token for all blocks).
ALWAYS_INLINE void add_blocks(vf *acc, uint32_t format, const uint8_t *head, const uint8_t *sub, size_t w_step, const struct q8_tile *a,
                              size_t b, size_t a_step, size_t n) {
    const struct packing p = packing_of(format);
    const size_t size = LANES * (packed_sub_bytes(p) + (p.span == MESHLLM_BLOCK ? 2 * p.n_heads : 0));
    const uint8_t *groups = sub + LANES * p.n_bytes;
    const int8_t *values = a->values + b * MESHLLM_BLOCK;
    vi sums[TILE], second[TILE];
    for (size_t i = 0; i < (w_step ? n : 1); i++)
        for (size_t line = 0; line < size; line += 64) __builtin_prefetch(sub + i * w_step + PREFETCH + line, 0, 3);
    dot_blocks(sums, format, groups, w_step, values, a_step * MESHLLM_BLOCK, n, 0, has_scale_of_16(format) ? 1 : 2);
    if (has_scale_of_16(format)) dot_blocks(second, format, groups, w_step, values, a_step * MESHLLM_BLOCK, n, 1, 2);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *h = head + i * w_step, *s = sub + i * w_step;
        const size_t at = b + i * a_step;
        if (!has_scale_of_16(format)) acc[i] = add_scaled(acc[i], format, h, s, sums[i], a->scales[at], a->sums + at);
        else acc[i] = add_halves(acc[i], format, h, s, sums[i], second[i], a->scales[at], a->sums[at], a->values + at * MESHLLM_BLOCK);
    }
}

// A panel's row of super-blocks, its step; the same panel `w_step` bytes farther for each i.
ALWAYS_INLINE void add_panel(vf *acc, uint32_t format, const uint8_t *head, size_t w_step, const struct q8_tile *a, size_t a_step, size_t n) {
    const struct packing p = packing_of(format);
    const size_t size = LANES * packed_row_bytes(p), sub_size = LANES * packed_sub_bytes(p);
    for (size_t b = 0; b < a->n_blocks; head += size) {
        const uint8_t *sub = head + 2 * p.n_heads * LANES;
        for (size_t s = 0; s < p.span / MESHLLM_BLOCK; s++, b++, sub += sub_size) add_blocks(acc, format, head, sub, w_step, a, b, a_step, n);
    }
}

ALWAYS_INLINE size_t panel_bytes(uint32_t format, size_t n_blocks) {
    const struct packing p = packing_of(format);
    return n_blocks / (p.span / MESHLLM_BLOCK) * LANES * packed_row_bytes(p);
}

static void store_rows(float *out, size_t row, size_t n_rows, vf value) {
    if (row + LANES <= n_rows) {
        vf_store(out + row, value);
        return;
    }
    float rows[LANES];
    vf_store(rows, value);
    for (size_t r = 0; row + r < n_rows; r++) out[row + r] = rows[r];
}

// n tokens on a panel.
ALWAYS_INLINE void multiply_tile(float *out, size_t out_stride, const struct matrix *w, size_t panel, uint32_t format,
                                 const struct q8_tile *a, size_t n) {
    vf acc[TILE];
    for (size_t t = 0; t < n; t++) acc[t] = vf_set1(0);
    add_panel(acc, format, w->data + panel * panel_bytes(format, a->n_blocks), 0, a, a->n_blocks, n);
#pragma GCC unroll 4 // what stays a loop keeps acc in memory
    for (size_t t = 0; t < n; t++) store_rows(out + t * out_stride, panel * LANES, w->n_rows, acc[t]);
}

// One token on two panels, `apart` panels from each other.
ALWAYS_INLINE void multiply_pair(float *out, const struct matrix *w, size_t panel, size_t apart, uint32_t format, const struct q8_tile *a) {
    size_t size = panel_bytes(format, a->n_blocks);
    vf acc[2] = {vf_set1(0), vf_set1(0)};
    add_panel(acc, format, w->data + panel * size, apart * size, a, 0, 2);
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; i++) store_rows(out, (panel + i * apart) * LANES, w->n_rows, acc[i]);
}

ALWAYS_INLINE void multiply_panel(float *out, size_t out_stride, const struct matrix *w, size_t panel, uint32_t format, size_t n_tokens,
                                  const struct q8_rows *q8) {
    size_t n_blocks = w->n_cols / MESHLLM_BLOCK;
    for (size_t t = 0, n; t < n_tokens; t += n) {
        struct q8_tile tile = {q8->values + t * w->n_cols, q8->scales + t * n_blocks, q8->sums + t * n_blocks, n_blocks};
        float *to = out + t * out_stride;
        n = tile_of(n_tokens - t, TILE);
        switch (n) { // a constant count in each call
        case 1: multiply_tile(to, out_stride, w, panel, format, &tile, 1); break;
        case 2: multiply_tile(to, out_stride, w, panel, format, &tile, 2); break;
        case 3: multiply_tile(to, out_stride, w, panel, format, &tile, 3); break;
        case 4: multiply_tile(to, out_stride, w, panel, format, &tile, 4); break;
        default: multiply_tile(to, out_stride, w, panel, format, &tile, TILE);
        }
    }
}

ALWAYS_INLINE void multiply_q8(float *out, size_t out_stride, const struct matrix *w, uint32_t format, size_t first, size_t last,
                               size_t n_tokens, const struct q8_rows *q8) {
    size_t n_blocks = w->n_cols / MESHLLM_BLOCK;
    const struct q8_tile one = {q8->values, q8->scales, q8->sums, n_blocks};
    if (n_tokens == 1) {
        size_t half = (last - first) / 2;
        for (size_t i = 0; i < half; i++) multiply_pair(out, w, first + i, half, format, &one);
        first += 2 * half;
    }
    for (size_t t = 0; t < n_tokens; t += TOKENS) {
        const struct q8_rows rows = {q8->values + t * w->n_cols, q8->scales + t * n_blocks, q8->sums + t * n_blocks};
        size_t n = n_tokens - t < TOKENS ? n_tokens - t : TOKENS;
        for (size_t panel = first; panel < last; panel++) multiply_panel(out + t * out_stride, out_stride, w, panel, format, n, &rows);
    }
}

#include "body/matmul_float.h"

static void matmul(float *out, size_t out_stride, const struct matrix *w, size_t first, size_t last, size_t n_tokens,
                   const struct q8_rows *q8, const float *f32, size_t in_stride) {
    switch (w->format) { // a constant format in each call: the compiler makes a loop of its own for each
    case MESHLLM_Q4_0: multiply_q8(out, out_stride, w, MESHLLM_Q4_0, first, last, n_tokens, q8); break;
    case MESHLLM_Q4_1: multiply_q8(out, out_stride, w, MESHLLM_Q4_1, first, last, n_tokens, q8); break;
    case MESHLLM_Q5_0: multiply_q8(out, out_stride, w, MESHLLM_Q5_0, first, last, n_tokens, q8); break;
    case MESHLLM_Q5_1: multiply_q8(out, out_stride, w, MESHLLM_Q5_1, first, last, n_tokens, q8); break;
    case MESHLLM_Q8_0: multiply_q8(out, out_stride, w, MESHLLM_Q8_0, first, last, n_tokens, q8); break;
    case MESHLLM_Q2_K: multiply_q8(out, out_stride, w, MESHLLM_Q2_K, first, last, n_tokens, q8); break;
    case MESHLLM_Q3_K: multiply_q8(out, out_stride, w, MESHLLM_Q3_K, first, last, n_tokens, q8); break;
    case MESHLLM_Q4_K: multiply_q8(out, out_stride, w, MESHLLM_Q4_K, first, last, n_tokens, q8); break;
    case MESHLLM_Q5_K: multiply_q8(out, out_stride, w, MESHLLM_Q5_K, first, last, n_tokens, q8); break;
    case MESHLLM_Q6_K: multiply_q8(out, out_stride, w, MESHLLM_Q6_K, first, last, n_tokens, q8); break;
    case MESHLLM_IQ4_NL: multiply_q8(out, out_stride, w, MESHLLM_IQ4_NL, first, last, n_tokens, q8); break;
    case MESHLLM_F16: multiply_float(out, out_stride, w, MESHLLM_F16, first, last, n_tokens, f32, in_stride); break;
    case MESHLLM_BF16: multiply_float(out, out_stride, w, MESHLLM_BF16, first, last, n_tokens, f32, in_stride); break;
    default: multiply_float(out, out_stride, w, MESHLLM_F32, first, last, n_tokens, f32, in_stride);
    }
}
