// Matrix products over panels. Included by an ISA file after its primitives:
//   LANES, the rows of a panel; vf, vi: LANES floats, LANES int32;
//   struct w_block: a block of 32 columns of a panel's weights, unpacked to int8 in registers;
//   w_of_nibbles(groups), w_of_bytes(groups): unpack; dot_nibbles(w, a), dot_bytes(w, a): LANES sums over 32 products, exact.
// out[t][row] = sum over blocks of scale_w[row] * scale_a[t] * (dot[row][t] - 8 * sum_a[t])           Q4_0
//                                 scale_a[t] * (scale_w[row] * dot[row][t] + min_w[row] * sum_a[t])  Q4_1
//                                 scale_w[row] * scale_a[t] * dot[row][t]                            Q8_0
// The offset leaves through the activations' block sums, so nibbles stay unsigned. No horizontal sum anywhere. Decode streams
// two panels at once; prompts take tiles of TILE tokens, a block of weights unpacked once for all of them.
#define TILE 4
#define PREFETCH 2048 // bytes ahead: what hides a miss without running past the next panel too far

struct q8_tile { // activations of up to TILE tokens
    const int8_t *values;
    const float *scales;
    const int32_t *sums;
    size_t n_blocks; // of a token
};

ALWAYS_INLINE void add_block(vf *acc, const uint8_t *block, uint32_t format, const struct q8_tile *a, size_t b, size_t n) {
    __builtin_prefetch(block + PREFETCH, 0, 3);
    __builtin_prefetch(block + PREFETCH + 64, 0, 3);
    vf scale = vf_load_f16((const uint16_t *)block);
    if (format == MESHLLM_Q8_0) {
        struct w_block w = w_of_bytes(block + 2 * LANES);
        for (size_t t = 0; t < n; t++) {
            vi dot = dot_bytes(&w, a->values + (t * a->n_blocks + b) * MESHLLM_BLOCK);
            acc[t] = vf_fma(vf_of_vi(dot), vf_mul(scale, vf_set1(a->scales[t * a->n_blocks + b])), acc[t]);
        }
    } else if (format == MESHLLM_Q4_0) {
        struct w_block w = w_of_nibbles(block + 2 * LANES);
        for (size_t t = 0; t < n; t++) {
            vi dot = dot_nibbles(&w, a->values + (t * a->n_blocks + b) * MESHLLM_BLOCK);
            dot = vi_sub(dot, vi_set1(8 * a->sums[t * a->n_blocks + b]));
            acc[t] = vf_fma(vf_of_vi(dot), vf_mul(scale, vf_set1(a->scales[t * a->n_blocks + b])), acc[t]);
        }
    } else {
        vf min = vf_load_f16((const uint16_t *)block + LANES);
        struct w_block w = w_of_nibbles(block + 4 * LANES);
        for (size_t t = 0; t < n; t++) {
            vf dot = vf_of_vi(dot_nibbles(&w, a->values + (t * a->n_blocks + b) * MESHLLM_BLOCK));
            vf sum = vf_set1((float)a->sums[t * a->n_blocks + b]);
            acc[t] = vf_fma(vf_fma(dot, scale, vf_mul(min, sum)), vf_set1(a->scales[t * a->n_blocks + b]), acc[t]);
        }
    }
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

ALWAYS_INLINE void multiply_tile(float *out, size_t out_stride, const struct matrix *w, size_t panel, uint32_t format,
                                 const struct q8_tile *a, size_t n) {
    size_t block_size = LANES * format_block_size_of(format);
    const uint8_t *block = w->data + panel * a->n_blocks * block_size;
    vf acc[TILE] = {vf_set1(0)};
    for (size_t t = 1; t < n; t++) acc[t] = vf_set1(0);
    for (size_t b = 0; b < a->n_blocks; b++, block += block_size) add_block(acc, block, format, a, b, n);
    for (size_t t = 0; t < n; t++) store_rows(out + t * out_stride, panel * LANES, w->n_rows, acc[t]);
}

// One token, panels first and first + 1 in one loop: two streams of memory.
ALWAYS_INLINE void multiply_pair(float *out, const struct matrix *w, size_t panel, uint32_t format, const struct q8_tile *a) {
    size_t block_size = LANES * format_block_size_of(format);
    const uint8_t *one = w->data + panel * a->n_blocks * block_size, *two = one + a->n_blocks * block_size;
    vf acc_one = vf_set1(0), acc_two = vf_set1(0);
    for (size_t b = 0; b < a->n_blocks; b++, one += block_size, two += block_size) {
        add_block(&acc_one, one, format, a, b, 1);
        add_block(&acc_two, two, format, a, b, 1);
    }
    store_rows(out, panel * LANES, w->n_rows, acc_one);
    store_rows(out, (panel + 1) * LANES, w->n_rows, acc_two);
}

ALWAYS_INLINE void multiply_q8(float *out, size_t out_stride, const struct matrix *w, uint32_t format, size_t first, size_t last,
                               size_t n_tokens, const struct q8_rows *q8) {
    size_t n_blocks = w->n_cols / MESHLLM_BLOCK;
    struct q8_tile a = {q8->values, q8->scales, q8->sums, n_blocks};
    size_t panel = first;
    if (n_tokens == 1)
        for (; panel + 1 < last; panel += 2) multiply_pair(out, w, panel, format, &a);
    for (; panel < last; panel++) { // a panel stays in the first cache while all tokens pass
        for (size_t t = 0; t < n_tokens; t += TILE) {
            struct q8_tile tile = {a.values + t * w->n_cols, a.scales + t * n_blocks, a.sums + t * n_blocks, n_blocks};
            float *to = out + t * out_stride;
            if (n_tokens - t >= TILE) multiply_tile(to, out_stride, w, panel, format, &tile, TILE);
            else if (n_tokens - t == 3) multiply_tile(to, out_stride, w, panel, format, &tile, 3);
            else if (n_tokens - t == 2) multiply_tile(to, out_stride, w, panel, format, &tile, 2);
            else multiply_tile(to, out_stride, w, panel, format, &tile, 1);
        }
    }
}

ALWAYS_INLINE vf load_column(const uint8_t *panel, size_t k, uint32_t format) {
    if (format == MESHLLM_F32) return vf_load((const float *)panel + k * LANES);
    return vf_load_f16((const uint16_t *)panel + k * LANES);
}

// F16, F32: n tokens (1..TILE) against one panel; two sums a token where there is one token, to hide the latency of fma.
ALWAYS_INLINE void multiply_float_tile(float *out, size_t out_stride, const struct matrix *w, size_t panel, uint32_t format,
                                       const float *in, size_t in_stride, size_t n) {
    const uint8_t *data = w->data + panel * LANES * w->n_cols * (format == MESHLLM_F32 ? 4 : 2);
    vf even[TILE], odd[TILE];
    for (size_t t = 0; t < n; t++) even[t] = odd[t] = vf_set1(0);
    size_t k = 0;
    for (; k + 1 < w->n_cols; k += 2) {
        vf w0 = load_column(data, k, format), w1 = load_column(data, k + 1, format);
        for (size_t t = 0; t < n; t++) {
            even[t] = vf_fma(w0, vf_set1(in[t * in_stride + k]), even[t]);
            odd[t] = vf_fma(w1, vf_set1(in[t * in_stride + k + 1]), odd[t]);
        }
    }
    for (; k < w->n_cols; k++)
        for (size_t t = 0; t < n; t++) even[t] = vf_fma(load_column(data, k, format), vf_set1(in[t * in_stride + k]), even[t]);
    for (size_t t = 0; t < n; t++) store_rows(out + t * out_stride, panel * LANES, w->n_rows, vf_add(even[t], odd[t]));
}

ALWAYS_INLINE void multiply_float(float *out, size_t out_stride, const struct matrix *w, uint32_t format, size_t first, size_t last,
                                  size_t n_tokens, const float *in, size_t in_stride) {
    for (size_t panel = first; panel < last; panel++) {
        size_t t = 0;
        for (; t + TILE <= n_tokens; t += TILE)
            multiply_float_tile(out + t * out_stride, out_stride, w, panel, format, in + t * in_stride, in_stride, TILE);
        for (; t < n_tokens; t++)
            multiply_float_tile(out + t * out_stride, out_stride, w, panel, format, in + t * in_stride, in_stride, 1);
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
