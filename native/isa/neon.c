// Advanced SIMD of ARMv8.0 (Raspberry Pi 3 and 4): products in 16 bits, as many as fit, then widened.
#if defined(__aarch64__)
#include "body/neon.h"

struct products { // of the four rows: two rows in a half
    int16x8_t low, high;
};

ALWAYS_INLINE struct products add_products(struct products p, int8x16_t w, const int8_t *a) {
    int32_t four;
    memcpy(&four, a, 4);
    int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return (struct products){vmlal_s8(p.low, vget_low_s8(w), vget_low_s8(all)), vmlal_high_s8(p.high, w, all)};
}

// Values up to 32: the products of all eight groups fit 16 bits, 8 * 32 * 127 = 32512. Bytes: those of two groups, 2 * 128 * 127 = 32512.
ALWAYS_INLINE void dot_blocks(vi *sums, uint32_t format, const uint8_t *groups, size_t w_step, const int8_t *values, size_t a_step, size_t n,
                              size_t first, size_t last) {
    const struct products none = {vdupq_n_s16(0), vdupq_n_s16(0)};
    size_t at_once = format == MESHLLM_Q8_0 || format == MESHLLM_IQ4_NL ? 2 : 8;
    vi low[TILE], high[TILE];
    for (size_t i = 0; i < n; i++) low[i] = high[i] = vdupq_n_s32(0);
    for (size_t start = 4 * first; start < 4 * last; start += at_once) {
        struct products p[TILE];
        for (size_t i = 0; i < n; i++) p[i] = none;
        for (size_t s = start; s < start + at_once && s < 4 * last; s++)
            for (size_t i = 0; i < n; i++) p[i] = add_products(p[i], bytes_of(groups + i * w_step, format, s), values + i * a_step + 4 * s);
        for (size_t i = 0; i < n; i++) low[i] = vpadalq_s16(low[i], p[i].low), high[i] = vpadalq_s16(high[i], p[i].high);
    }
    for (size_t i = 0; i < n; i++) sums[i] = vpaddq_s32(low[i], high[i]);
}

#include "body/bodies.h"
KERNELS_TABLE(kernels_neon, "neon")
#else
typedef int no_neon_here; // ISO C forbids an empty file
#endif
