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

// Plain C that compilers vectorize: magnitudes are compared as their bits, and x + 1.5 * 2^23 has round-half-even(x) in its last bits.
// Scales are rounded to f16, so that a block is one of GGUF's q8_0: activations round as llama.cpp's do, whose answers the golden
// facts are. It costs nothing in quality (SmolLM2 Q4_1, mean KL to float32 over 512 positions: 4.0e-3, with f32 scales 4.2e-3).
// The bits of an infinity and of NaN are larger than a number's: such a block gets that scale and zeros, so the fault stays visible.
#define F16_MAX 65504.0f
static void quantize(int8_t *values, float *scales, int32_t *sums, size_t n, const float *in) {
    const float magic = 0x1.8p23f;
    for (size_t b = 0; b < n / MESHLLM_BLOCK; b++, in += MESHLLM_BLOCK, values += MESHLLM_BLOCK) {
        uint32_t bits[MESHLLM_BLOCK], magic_bits, largest_bits = 0;
        memcpy(bits, in, sizeof bits);
        for (size_t i = 0; i < MESHLLM_BLOCK; i++) largest_bits = (bits[i] & 0x7fffffff) > largest_bits ? bits[i] & 0x7fffffff : largest_bits;
        float largest, rounded[MESHLLM_BLOCK];
        memcpy(&largest, &largest_bits, 4);
        float inverse = largest > 0 && largest <= FLT_MAX ? 127.0f / largest : 0.0f;
        float scale = inverse > FLT_MAX ? 0 : largest / 127.0f; // a block of denormals rounds to zero
        scales[b] = scale > F16_MAX && scale <= FLT_MAX ? F16_MAX : f32_of_f16(f16_of_f32(scale));
        if (inverse == 0 || inverse > FLT_MAX) {
            memset(values, 0, MESHLLM_BLOCK);
            sums[b] = 0;
            continue;
        }
        for (size_t i = 0; i < MESHLLM_BLOCK; i++) rounded[i] = in[i] * inverse + magic;
        memcpy(bits, rounded, sizeof bits);
        memcpy(&magic_bits, &magic, 4);
        int32_t sum = 0;
        for (size_t i = 0; i < MESHLLM_BLOCK; i++) {
            int32_t q = (int32_t)(bits[i] - magic_bits);
            values[i] = (int8_t)q;
            sum += q;
        }
        sums[b] = sum;
    }
}
