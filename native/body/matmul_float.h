// Products with weights that are F16, BF16 or F32, on f32 activations; see matmul.h, which includes it.
#define STRIP 128 // columns that all tokens of a pass go through: two panels take 8 KB with eight lanes

ALWAYS_INLINE vf load_column(const uint8_t *panel, size_t k, uint32_t format) {
    if (format == MESHLLM_F32) return vf_load((const float *)panel + k * LANES);
    if (format == MESHLLM_BF16) return vf_load_bf16((const uint16_t *)panel + k * LANES);
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
    vf acc[2][FLOAT_TILE];
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
        n = tile_of(n_tokens - t, FLOAT_TILE);
        switch (n) { // a constant count in each call
        case 1: add_strip_tile(sums, strip, n_cols, in, in_stride, 1); break;
        case 2: add_strip_tile(sums, strip, n_cols, in, in_stride, 2); break;
        case 3: add_strip_tile(sums, strip, n_cols, in, in_stride, 3); break;
        case 4: add_strip_tile(sums, strip, n_cols, in, in_stride, 4); break;
        default: add_strip_tile(sums, strip, n_cols, in, in_stride, FLOAT_TILE);
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
            else if (format == MESHLLM_BF16)
                for (size_t c = 0; c < n; c++) vf_store(converted[i] + c * LANES, vf_load_bf16((const uint16_t *)w->data + at + c * LANES));
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
