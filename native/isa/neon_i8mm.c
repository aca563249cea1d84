// Advanced SIMD with SMMLA (most ARMv8.6 and later): two rows by two tokens by eight columns in one instruction. Compiled with
// -march=armv8.2-a+dotprod+i8mm, this file alone.
#if defined(__aarch64__)
#include "body/neon_sdot.h"

ALWAYS_INLINE int8x16_t token_pair(const int8_t *one, const int8_t *two) { return vcombine_s8(vld1_s8(one), vld1_s8(two)); }

// Two neighbouring groups hold eight columns of each of four rows; zipped by fours of bytes they are rows 0 and 1, and 2 and 3. An odd
// token is paired with itself. One token has no partner, on one panel or two: SDOT does as much for it.
ALWAYS_INLINE void dot_blocks(vi *sums, uint32_t format, const uint8_t *groups, size_t w_step, const int8_t *values, size_t a_step, size_t n,
                              size_t first, size_t last) {
    if (w_step || n == 1) {
        sdot_blocks(sums, format, groups, w_step, values, a_step, n, first, last);
        return;
    }
    vi upper[(TILE + 1) / 2], lower[(TILE + 1) / 2]; // rows 0 and 1, 2 and 3: row, token of the pair
    for (size_t i = 0; i < (n + 1) / 2; i++) upper[i] = lower[i] = vdupq_n_s32(0);
    for (size_t s = 4 * first; s < 4 * last; s += 2) {
        int32x4_t w0 = vreinterpretq_s32_s8(bytes_of(groups, format, s)), w1 = vreinterpretq_s32_s8(bytes_of(groups, format, s + 1));
        int8x16_t rows01 = vreinterpretq_s8_s32(vzip1q_s32(w0, w1)), rows23 = vreinterpretq_s8_s32(vzip2q_s32(w0, w1));
        for (size_t i = 0; i < (n + 1) / 2; i++) {
            const int8_t *one = values + 2 * i * a_step + 4 * s;
            int8x16_t pair = token_pair(one, 2 * i + 1 < n ? one + a_step : one);
            upper[i] = vmmlaq_s32(upper[i], rows01, pair);
            lower[i] = vmmlaq_s32(lower[i], rows23, pair);
        }
    }
    for (size_t i = 0; i < n; i++) sums[i] = i % 2 ? vuzp2q_s32(upper[i / 2], lower[i / 2]) : vuzp1q_s32(upper[i / 2], lower[i / 2]);
}

#include "body/bodies.h"
KERNELS_TABLE(kernels_neon_i8mm, "neon-i8mm")
#else
typedef int no_neon_i8mm_here; // ISO C forbids an empty file
#endif
