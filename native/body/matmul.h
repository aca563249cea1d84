// Matrix products over panels. Included by an ISA file after its primitives: LANES, the rows of a panel; vf, vi: LANES floats, LANES
// int32; and dot_blocks(sums, format, groups, w_step, values, a_step, n): sums[i] = the exact dots of block i of a panel's weights with
// 32 activations i, i < n <= TILE; blocks w_step bytes apart, activations a_step. One of the steps is 0, and its loads are shared.
// out[t][row] = sum over blocks of scale_w[row] * scale_a[t] * (dot[row][t] - 8 * sum_a[t])           Q4_0
//                                 scale_a[t] * (scale_w[row] * dot[row][t] + min_w[row] * sum_a[t])  Q4_1
//                                 scale_w[row] * scale_a[t] * dot[row][t]                            Q8_0
// The offset leaves through the activations' block sums, so nibbles stay unsigned. No horizontal sum anywhere. A loop runs over up to
// TILE chains, so that all of it stays in registers: one token on two panels (decode), or one panel on up to TILE tokens, its weights
// unpacked once for all of them.
//
// Decode reads two long streams of memory, the first half of its panels and the second. Two neighbours side by side would be as good to
// the arithmetic, but what each fetches ahead at its end is then what the other has read: 15 instead of 31 GB/s on Zen 4.
#define TOKENS 64     // of a pass over the panels: their activations stay in the second cache
#define PREFETCH 2048 // bytes ahead
#define STRIP 128     // columns of F16 and F32 that all tokens of a pass go through: two panels take 8 KB with eight lanes

struct q8_tile { // activations of up to TILE tokens
    const int8_t *values;
    const float *scales;
    const int32_t *sums;
    size_t n_blocks; // of a token
};

ALWAYS_INLINE size_t tile_of(size_t n_tokens) { return n_tokens >= TILE ? TILE : n_tokens > 4 ? 4 : n_tokens; } // to do at once

ALWAYS_INLINE vf add_scaled(vf acc, uint32_t format, const uint8_t *block, vi dot, float scale, const int32_t *sum) {
    vf scales = vf_load_f16((const uint16_t *)block);
    if (format == MESHLLM_Q4_1) {
        vf mins = vf_load_f16((const uint16_t *)block + LANES);
        return vf_fma(vf_fma(vf_of_vi(dot), scales, vf_mul(mins, vf_set1((float)*sum))), vf_set1(scale), acc);
    }
    if (format == MESHLLM_Q4_0) dot = vi_sub(dot, vi_set1_times8(sum));
    return vf_fma(vf_of_vi(dot), vf_mul(scales, vf_set1(scale)), acc);
}

// acc[i] += block i times token i; w_step is 0 (a block for all tokens) or a_step is (a token for all blocks).
ALWAYS_INLINE void add_blocks(vf *acc, uint32_t format, const uint8_t *block, size_t w_step, const struct q8_tile *a, size_t b, size_t a_step,
                              size_t n) {
    size_t head = format == MESHLLM_Q4_1 ? 4 * LANES : 2 * LANES;
    vi sums[TILE];
    for (size_t i = 0; i < (w_step ? n : 1); i++)
        for (size_t line = 0; line < LANES * format_block_size_of(format); line += 64)
            __builtin_prefetch(block + i * w_step + PREFETCH + line, 0, 3);
    dot_blocks(sums, format, block + head, w_step, a->values + b * MESHLLM_BLOCK, a_step * MESHLLM_BLOCK, n);
    for (size_t i = 0; i < n; i++)
        acc[i] = add_scaled(acc[i], format, block + i * w_step, sums[i], a->scales[b + i * a_step], a->sums + b + i * a_step);
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
    size_t block_size = LANES * format_block_size_of(format);
    const uint8_t *block = w->data + panel * a->n_blocks * block_size;
    vf acc[TILE];
    for (size_t t = 0; t < n; t++) acc[t] = vf_set1(0);
    for (size_t b = 0; b < a->n_blocks; b++, block += block_size) add_blocks(acc, format, block, 0, a, b, a->n_blocks, n);
#pragma GCC unroll 4 // what stays a loop keeps acc in memory
    for (size_t t = 0; t < n; t++) store_rows(out + t * out_stride, panel * LANES, w->n_rows, acc[t]);
}

// One token on two panels, `apart` panels from each other.
ALWAYS_INLINE void multiply_pair(float *out, const struct matrix *w, size_t panel, size_t apart, uint32_t format, const struct q8_tile *a) {
    size_t block_size = LANES * format_block_size_of(format);
    const uint8_t *block = w->data + panel * a->n_blocks * block_size;
    vf acc[2] = {vf_set1(0), vf_set1(0)};
    for (size_t b = 0; b < a->n_blocks; b++, block += block_size) add_blocks(acc, format, block, apart * a->n_blocks * block_size, a, b, 0, 2);
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; i++) store_rows(out, (panel + i * apart) * LANES, w->n_rows, acc[i]);
}

ALWAYS_INLINE void multiply_panel(float *out, size_t out_stride, const struct matrix *w, size_t panel, uint32_t format, size_t n_tokens,
                                  const struct q8_rows *q8) {
    size_t n_blocks = w->n_cols / MESHLLM_BLOCK;
    for (size_t t = 0, n; t < n_tokens; t += n) {
        struct q8_tile tile = {q8->values + t * w->n_cols, q8->scales + t * n_blocks, q8->sums + t * n_blocks, n_blocks};
        float *to = out + t * out_stride;
        n = tile_of(n_tokens - t);
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

// --- F16, F32 ------------------------------------------------------------------------------------------------------------

ALWAYS_INLINE vf load_column(const uint8_t *panel, size_t k, uint32_t format) {
    if (format == MESHLLM_F32) return vf_load((const float *)panel + k * LANES);
    return vf_load_f16((const uint16_t *)panel + k * LANES);
}

// One token on n panels, panel_size bytes apart: two sums a panel, to hide the latency of fma.
ALWAYS_INLINE void multiply_float_row(float *out, const struct matrix *w, size_t panel, uint32_t format, const float *in, size_t n) {
    size_t panel_size = LANES * (size_t)w->n_cols * (format == MESHLLM_F32 ? 4 : 2), k = 0;
    const uint8_t *data = w->data + panel * panel_size;
    vf even[2], odd[2];
    for (size_t i = 0; i < n; i++) even[i] = odd[i] = vf_set1(0);
    for (; k + 1 < w->n_cols; k += 2)
        for (size_t i = 0; i < n; i++) {
            even[i] = vf_fma(load_column(data + i * panel_size, k, format), vf_set1(in[k]), even[i]);
            odd[i] = vf_fma(load_column(data + i * panel_size, k + 1, format), vf_set1(in[k + 1]), odd[i]);
        }
    for (size_t i = 0; i < n && k < w->n_cols; i++) even[i] = vf_fma(load_column(data + i * panel_size, k, format), vf_set1(in[k]), even[i]);
    for (size_t i = 0; i < n; i++) store_rows(out, (panel + i) * LANES, w->n_rows, vf_add(even[i], odd[i]));
}

// sums[i][t] += strip[i][k] * in[t][k] over k < n_cols: n tokens on two panels.
ALWAYS_INLINE void add_strip_tile(float *sums, const float *const strip[2], size_t n_cols, const float *in, size_t in_stride, size_t n) {
    vf acc[2][TILE];
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < 2; i++) acc[i][t] = vf_load(sums + (t * 2 + i) * LANES);
    for (size_t k = 0; k < n_cols; k++) {
        vf w0 = vf_load(strip[0] + k * LANES), w1 = vf_load(strip[1] + k * LANES);
        for (size_t t = 0; t < n; t++) {
            vf x = vf_set1(in[t * in_stride + k]);
            acc[0][t] = vf_fma(w0, x, acc[0][t]);
            acc[1][t] = vf_fma(w1, x, acc[1][t]);
        }
    }
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < 2; i++) vf_store(sums + (t * 2 + i) * LANES, acc[i][t]);
}

ALWAYS_INLINE void add_strip(float *sums, const float *const strip[2], size_t n_cols, const float *in, size_t in_stride, size_t n_tokens) {
    for (size_t t = 0, n; t < n_tokens; t += n, sums += n * 2 * LANES, in += n * in_stride) {
        n = tile_of(n_tokens - t);
        switch (n) { // a constant count in each call
        case 1: add_strip_tile(sums, strip, n_cols, in, in_stride, 1); break;
        case 2: add_strip_tile(sums, strip, n_cols, in, in_stride, 2); break;
        case 3: add_strip_tile(sums, strip, n_cols, in, in_stride, 3); break;
        case 4: add_strip_tile(sums, strip, n_cols, in, in_stride, 4); break;
        default: add_strip_tile(sums, strip, n_cols, in, in_stride, TILE);
        }
    }
}

// Up to TOKENS tokens on two panels (one = two for the last of an odd number), STRIP columns at a time: they stay in the first cache
// while all tokens pass, as floats, so that a half is converted once for all of them.
ALWAYS_INLINE void multiply_float_pair(float *out, size_t out_stride, const struct matrix *w, size_t one, size_t two, uint32_t format,
                                       size_t n_tokens, const float *in, size_t in_stride) {
    float sums[TOKENS * 2 * LANES], converted[2][STRIP * LANES];
    for (size_t i = 0; i < n_tokens * 2 * LANES; i++) sums[i] = 0;
    for (size_t k = 0; k < w->n_cols; k += STRIP) {
        size_t n = w->n_cols - k < STRIP ? w->n_cols - k : STRIP;
        const float *strip[2] = {converted[0], converted[1]};
        for (size_t i = 0; i < 2; i++) {
            size_t at = ((i ? two : one) * w->n_cols + k) * LANES;
            if (format == MESHLLM_F32) strip[i] = (const float *)w->data + at;
            else from_f16(converted[i], n * LANES, (const uint16_t *)w->data + at);
        }
        add_strip(sums, strip, n, in + k, in_stride, n_tokens);
    }
    for (size_t t = 0; t < n_tokens; t++) {
        store_rows(out + t * out_stride, one * LANES, w->n_rows, vf_load(sums + t * 2 * LANES));
        store_rows(out + t * out_stride, two * LANES, w->n_rows, vf_load(sums + (t * 2 + 1) * LANES));
    }
}

ALWAYS_INLINE void multiply_float(float *out, size_t out_stride, const struct matrix *w, uint32_t format, size_t first, size_t last,
                                  size_t n_tokens, const float *in, size_t in_stride) {
    if (n_tokens == 1) {
        for (; first + 1 < last; first += 2) multiply_float_row(out, w, first, format, in, 2);
        if (first < last) multiply_float_row(out, w, first, format, in, 1);
        return;
    }
    for (size_t t = 0; t < n_tokens; t += TOKENS) {
        size_t n = n_tokens - t < TOKENS ? n_tokens - t : TOKENS;
        for (size_t panel = first; panel < last; panel += 2)
            multiply_float_pair(out + t * out_stride, out_stride, w, panel, panel + 1 < last ? panel + 1 : panel, format, n, in + t * in_stride,
                                in_stride);
    }
}

static void matmul(float *out, size_t out_stride, const struct matrix *w, size_t first, size_t last, size_t n_tokens,
                   const struct q8_rows *q8, const float *f32, size_t in_stride) {
    switch (w->format) { // a constant format in each call: the compiler makes a loop of its own for each
    case MESHLLM_Q4_0: multiply_q8(out, out_stride, w, MESHLLM_Q4_0, first, last, n_tokens, q8); break;
    case MESHLLM_Q4_1: multiply_q8(out, out_stride, w, MESHLLM_Q4_1, first, last, n_tokens, q8); break;
    case MESHLLM_Q8_0: multiply_q8(out, out_stride, w, MESHLLM_Q8_0, first, last, n_tokens, q8); break;
    case MESHLLM_F16: multiply_float(out, out_stride, w, MESHLLM_F16, first, last, n_tokens, f32, in_stride); break;
    default: multiply_float(out, out_stride, w, MESHLLM_F32, first, last, n_tokens, f32, in_stride);
    }
}
