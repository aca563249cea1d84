// Rotary embedding (Su et al. 2021): pair (a, b) -> (a cos - b sin, a sin + b cos).
static void rope(float *x, size_t n_heads, size_t head_dim, size_t n_pairs, const float *cos_sin, uint32_t style) {
    size_t step = style ? 1 : 2, apart = style ? n_pairs : 1;
    for (size_t h = 0; h < n_heads; h++, x += head_dim)
        for (size_t i = 0; i < n_pairs; i++) {
            float *a = x + i * step, *b = a + apart, c = cos_sin[2 * i], s = cos_sin[2 * i + 1], old = *a;
            *a = old * c - *b * s;
            *b = old * s + *b * c;
        }
}
