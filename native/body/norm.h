// RMS norm (Zhang and Sennrich 2019) and the quantization of activations.
static void rms_norm(float *out, size_t n, const float *in, const float *weight, float eps) {
    vf sums[8];
    for (size_t i = 0; i < 8; i++) sums[i] = vf_set1(0);
    size_t k = 0;
    for (; k + 8 * LANES <= n; k += 8 * LANES)
        for (size_t i = 0; i < 8; i++) {
            vf x = vf_load(in + k + i * LANES);
            sums[i] = vf_fma(x, x, sums[i]);
        }
    double sum = 0;
    for (size_t i = 0; i < 8; i++) sum += (double)vf_reduce_add(sums[i]);
    for (; k < n; k++) sum += (double)in[k] * (double)in[k];
    float factor = 1.0f / sqrtf((float)(sum / (double)n) + eps);
    for (k = 0; k + LANES <= n; k += LANES) vf_store(out + k, vf_mul(vf_mul(vf_load(in + k), vf_set1(factor)), vf_load(weight + k)));
    for (; k < n; k++) out[k] = in[k] * factor * weight[k];
}

// |x| without NaN: a block with a NaN or infinity gets a NaN or infinite scale and zero values, so the fault stays visible.
static void quantize(int8_t *values, float *scales, int32_t *sums, size_t n, const float *in) {
    for (size_t b = 0; b < n / MESHLLM_BLOCK; b++, in += MESHLLM_BLOCK, values += MESHLLM_BLOCK) {
        float largest = 0;
        for (size_t i = 0; i < MESHLLM_BLOCK; i++) {
            float x = fabsf(in[i]);
            largest = x > largest || x != x ? x : largest;
            if (largest != largest) break;
        }
        float scale = largest / 127.0f, inverse = largest > 0 && largest <= FLT_MAX ? 127.0f / largest : 0.0f;
        if (inverse > FLT_MAX) inverse = scale = 0; // a block of denormals rounds to zero
        int32_t sum = 0;
        for (size_t i = 0; i < MESHLLM_BLOCK; i++) {
            int32_t q = inverse == 0 ? 0 : (int32_t)rintf(in[i] * inverse);
            values[i] = (int8_t)q;
            sum += q;
        }
        scales[b] = scale;
        sums[b] = sum;
    }
}
