// One query head against the cache, blockwise with an online softmax (Milakov and Gimelshein 2018): the sum and the output are
// rescaled when a block brings a larger score, so no memory grows with the number of positions.
#define POSITIONS 64 // of a block: their scores stay in the first cache

ALWAYS_INLINE float dot_f16(const float *q, const uint16_t *k, size_t n) {
    vf sums[2] = {vf_set1(0), vf_set1(0)};
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        sums[0] = vf_fma(vf_load(q + i), vf_load_f16(k + i), sums[0]);
        sums[1] = vf_fma(vf_load(q + i + LANES), vf_load_f16(k + i + LANES), sums[1]);
    }
    float sum = vf_reduce_add(vf_add(sums[0], sums[1]));
    for (; i < n; i++) sum += q[i] * f32_of_f16(k[i]);
    return sum;
}

ALWAYS_INLINE void add_values(float *out, const uint16_t *values, size_t head_dim, const float *weights, size_t n) {
    size_t i = 0;
    for (; i + LANES <= head_dim; i += LANES) {
        vf sum = vf_load(out + i);
        for (size_t p = 0; p < n; p++) sum = vf_fma(vf_set1(weights[p]), vf_load_f16(values + p * head_dim + i), sum);
        vf_store(out + i, sum);
    }
    for (; i < head_dim; i++)
        for (size_t p = 0; p < n; p++) out[i] += weights[p] * f32_of_f16(values[p * head_dim + i]);
}

static float exp_block(float *scores, size_t n, float largest) { // scores become exp(score - largest); returns their sum
    for (size_t p = n; p % LANES; p++) scores[p] = -INFINITY;
    float sum = 0;
    for (size_t p = 0; p < n; p += LANES) {
        vf weights = vf_exp(vf_sub(vf_load(scores + p), vf_set1(largest)));
        vf_store(scores + p, weights);
        sum += vf_reduce_add(weights);
    }
    return sum;
}

static void attention(float *out, size_t head_dim, const float *q, const uint16_t *keys, const uint16_t *values, size_t n_positions,
                      float scale, float soft_cap) {
    float scores[POSITIONS], largest = -INFINITY, sum = 0;
    memset(out, 0, head_dim * sizeof *out);
    for (size_t start = 0; start < n_positions; start += POSITIONS) {
        size_t n = n_positions - start < POSITIONS ? n_positions - start : POSITIONS;
        float before = largest;
        for (size_t p = 0; p < n; p++) {
            float score = scale * dot_f16(q, keys + (start + p) * head_dim, head_dim);
            if (soft_cap > 0) score = soft_cap * tanhf(score / soft_cap);
            scores[p] = score;
            largest = score > largest ? score : largest;
        }
        if (before < largest && start) {
            float factor = expf(before - largest);
            sum *= factor;
            for (size_t i = 0; i < head_dim; i++) out[i] *= factor;
        }
        sum += exp_block(scores, n, largest);
        add_values(out, values + start * head_dim, head_dim, scores, n);
    }
    for (size_t i = 0; i < head_dim; i++) out[i] /= sum;
}
