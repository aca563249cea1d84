// Query heads that share a KV head against its cache, blockwise with an online softmax (Milakov and Gimelshein 2018): the sum and the
// output are rescaled when a block brings a larger score, so no memory grows with the number of positions. Up to HEADS heads go
// together: a key or value is converted to f32 once for all of them, half of what one head costs (vcvtph2ps: 2 cycles on Zen 1).
#define POSITIONS 64 // of a block: their scores stay in the first cache
#define HEADS 4

// scores[h * POSITIONS] = q of head h . key. Variables, no array: gcc keeps an array of sums in memory here, 32 cycles a key.
ALWAYS_INLINE void dot_heads(float *scores, const float *q, const uint16_t *key, size_t head_dim, size_t n) {
    vf s0 = vf_set1(0), s1 = s0, s2 = s0, s3 = s0;
    for (size_t i = 0; i + LANES <= head_dim; i += LANES) {
        vf k = vf_load_f16(key + i);
        s0 = vf_fma(vf_load(q + i), k, s0);
        if (n > 1) s1 = vf_fma(vf_load(q + head_dim + i), k, s1);
        if (n > 2) s2 = vf_fma(vf_load(q + 2 * head_dim + i), k, s2);
        if (n > 3) s3 = vf_fma(vf_load(q + 3 * head_dim + i), k, s3);
    }
    scores[0] = vf_reduce_add(s0);
    if (n > 1) scores[POSITIONS] = vf_reduce_add(s1);
    if (n > 2) scores[2 * POSITIONS] = vf_reduce_add(s2);
    if (n > 3) scores[3 * POSITIONS] = vf_reduce_add(s3);
}

// scores[h * POSITIONS + j] = q of head h . key j, j < LANES / n: one sum for each lane, added up across lanes all at once. One by one that
// took half the time of attention. Columns past the last whole vector are added by add_rest.
ALWAYS_INLINE void dot_keys(float *scores, const float *q, const uint16_t *keys, size_t head_dim, size_t n) {
    const size_t n_keys = LANES / n;
    vf sums[LANES];
    float each[LANES];
#pragma GCC unroll 16
    for (size_t s = 0; s < LANES; s++) sums[s] = vf_set1(0);
    for (size_t i = 0; i + LANES <= head_dim; i += LANES) {
        vf query[HEADS];
#pragma GCC unroll 4
        for (size_t h = 0; h < n; h++) query[h] = vf_load(q + h * head_dim + i);
#pragma GCC unroll 16
        for (size_t j = 0; j < n_keys; j++) {
            vf key = vf_load_f16(keys + j * head_dim + i);
#pragma GCC unroll 4
            for (size_t h = 0; h < n; h++) sums[h * n_keys + j] = vf_fma(query[h], key, sums[h * n_keys + j]);
        }
    }
    vf_store(each, vf_reduce_each(sums));
    for (size_t h = 0; h < n; h++) memcpy(scores + h * POSITIONS, each + h * n_keys, n_keys * sizeof *each);
}

ALWAYS_INLINE void add_rest(float *scores, const float *q, const uint16_t *keys, size_t head_dim, size_t n_positions, size_t n) {
    for (size_t i = head_dim - head_dim % LANES; i < head_dim; i++)
        for (size_t p = 0; p < n_positions; p++)
            for (size_t h = 0; h < n; h++) scores[h * POSITIONS + p] += q[h * head_dim + i] * f32_of_f16(keys[p * head_dim + i]);
}

// scores[h * POSITIONS + p] = q of head h . key p
ALWAYS_INLINE void dot_block(float *scores, const float *q, const uint16_t *keys, size_t head_dim, size_t n_positions, size_t n) {
    size_t p = 0;
    if (LANES >= HEADS)
        for (; p + LANES / n <= n_positions; p += LANES / n) dot_keys(scores + p, q, keys + p * head_dim, head_dim, n);
    for (; p < n_positions; p++) dot_heads(scores + p, q, keys + p * head_dim, head_dim, n);
    add_rest(scores, q, keys, head_dim, n_positions, n);
}

// Columns [i, i + v * LANES) of n heads' outputs += weighted values: n * v chains, enough to hide the latency of fma.
ALWAYS_INLINE void add_columns(float *out, const uint16_t *values, size_t head_dim, const float *weights, size_t n_positions, size_t n, size_t v) {
    vf sums[2 * HEADS];
    for (size_t h = 0; h < n; h++)
        for (size_t j = 0; j < v; j++) sums[h * v + j] = vf_load(out + h * head_dim + j * LANES);
    for (size_t p = 0; p < n_positions; p++, values += head_dim)
        for (size_t j = 0; j < v; j++) {
            vf value = vf_load_f16(values + j * LANES);
            for (size_t h = 0; h < n; h++) sums[h * v + j] = vf_fma(vf_set1(weights[h * POSITIONS + p]), value, sums[h * v + j]);
        }
    for (size_t h = 0; h < n; h++)
        for (size_t j = 0; j < v; j++) vf_store(out + h * head_dim + j * LANES, sums[h * v + j]);
}

ALWAYS_INLINE void add_values(float *out, const uint16_t *values, size_t head_dim, const float *weights, size_t n_positions, size_t n) {
    const size_t v = n > 2 ? 2 : 4;
    size_t i = 0;
    for (; i + v * LANES <= head_dim; i += v * LANES) add_columns(out + i, values + i, head_dim, weights, n_positions, n, v);
    for (; i + LANES <= head_dim; i += LANES) add_columns(out + i, values + i, head_dim, weights, n_positions, n, 1);
    for (; i < head_dim; i++)
        for (size_t p = 0; p < n_positions; p++)
            for (size_t h = 0; h < n; h++) out[h * head_dim + i] += weights[h * POSITIONS + p] * f32_of_f16(values[p * head_dim + i]);
}

struct softmax { // of one head, so far
    float largest, sum;
};

// Raw scores of n positions become weights exp(score - largest); what was summed before is rescaled to the largest score of all.
static void weigh(struct softmax *s, float *scores, size_t n, float *out, size_t head_dim, float factor, float soft_cap) {
    float before = s->largest;
    for (size_t p = 0; p < n && soft_cap > 0; p++) scores[p] = soft_cap * tanhf(factor * scores[p] / soft_cap);
    if (soft_cap > 0) factor = 1;
    for (size_t p = n; p % LANES; p++) scores[p] = scores[0];
    vf most = vf_set1(before), sum = vf_set1(0);
    for (size_t p = 0; p < n; p += LANES) {
        vf scaled = vf_mul(vf_load(scores + p), vf_set1(factor));
        vf_store(scores + p, scaled);
        most = vf_max(most, scaled);
    }
    s->largest = vf_reduce_max(most);
    if (before < s->largest && before > -INFINITY) {
        float shrink = expf(before - s->largest);
        s->sum *= shrink;
        for (size_t i = 0; i < head_dim; i++) out[i] *= shrink;
    }
    for (size_t p = n; p % LANES; p++) scores[p] = -INFINITY;
    for (size_t p = 0; p < n; p += LANES) {
        vf weights = vf_exp(vf_sub(vf_load(scores + p), vf_set1(s->largest)));
        vf_store(scores + p, weights);
        sum = vf_add(sum, weights);
    }
    s->sum += vf_reduce_add(sum);
}

ALWAYS_INLINE void attend(float *out, size_t head_dim, const float *q, const uint16_t *keys, const uint16_t *values, size_t n_positions,
                          float factor, float soft_cap, size_t n) {
    float scores[HEADS * POSITIONS];
    struct softmax softmax[HEADS];
    for (size_t h = 0; h < n; h++) softmax[h] = (struct softmax){-INFINITY, 0};
    memset(out, 0, n * head_dim * sizeof *out);
    for (size_t start = 0; start < n_positions; start += POSITIONS) {
        size_t n_block = n_positions - start < POSITIONS ? n_positions - start : POSITIONS;
        dot_block(scores, q, keys + start * head_dim, head_dim, n_block, n);
        for (size_t h = 0; h < n; h++)
            weigh(&softmax[h], scores + h * POSITIONS, n_block, out + h * head_dim, head_dim, factor, soft_cap);
        add_values(out, values + start * head_dim, head_dim, scores, n_block, n);
    }
    for (size_t h = 0; h < n; h++)
        for (size_t i = 0; i < head_dim; i++) out[h * head_dim + i] /= softmax[h].sum;
}

static void attention(float *out, size_t head_dim, size_t n_heads, const float *q, const uint16_t *keys, const uint16_t *values,
                      size_t n_positions, float factor, float soft_cap) {
    for (size_t h = 0; h < n_heads; h += HEADS, out += HEADS * head_dim, q += HEADS * head_dim)
        switch (n_heads - h) { // a constant count in each call
        case 1: attend(out, head_dim, q, keys, values, n_positions, factor, soft_cap, 1); break;
        case 2: attend(out, head_dim, q, keys, values, n_positions, factor, soft_cap, 2); break;
        case 3: attend(out, head_dim, q, keys, values, n_positions, factor, soft_cap, 3); break;
        default: attend(out, head_dim, q, keys, values, n_positions, factor, soft_cap, HEADS);
        }
}
