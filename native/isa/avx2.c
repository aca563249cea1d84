// AVX2 with FMA and F16C: eight lanes, panels of eight rows. Compiled with -mavx2 -mfma -mf16c, this file alone.
#if defined(__x86_64__)
#include "body/avx2.h"

// Without it gcc makes all the products of a block before it adds them, and keeps them on the stack: 48 instead of 54 Gop/s.
ALWAYS_INLINE vi in_turn(vi a) {
    __asm__("" : "+x"(a));
    return a;
}

ALWAYS_INLINE vi add_unsigned(vi pairs, vi w, vi four) { return in_turn(_mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, four))); }

// maddubs wants one side unsigned: |w| * sign(w) a. |-128| is 128 as unsigned, and 2 * 128 * 127 = 32512 fits 16 bits.
ALWAYS_INLINE vi add_bytes(vi sum, vi w, vi four) {
    __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four, w));
    return in_turn(_mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1))));
}

// Products of nibbles fit 16 bits, eight pairs in a lane: 8 * 2 * 15 * 127 = 30480. One widening for a block. Those of five bits need one
// for each half: 4 * 2 * 31 * 127 = 31496.
ALWAYS_INLINE void dot_blocks(vi *sums, uint32_t format, const uint8_t *groups, size_t w_step, const int8_t *values, size_t a_step, size_t n,
                              size_t first, size_t last) {
    const bool five = format == MESHLLM_Q5_0 || format == MESHLLM_Q5_1 || format == MESHLLM_Q5_K;
    vi pairs[2][TILE];
    for (size_t i = 0; i < n; i++) sums[i] = pairs[0][i] = pairs[1][i] = _mm256_setzero_si256();
    for (size_t g = 0; g < 4; g++)
        for (size_t i = 0; i < n; i++) // group by group, so that weights unpacked for all tokens need no registers of their own
            for (size_t half = first; half < last; half++) {
                const size_t s = g + 4 * half;
                vi w = group_of(groups + i * w_step, format, s), a = four_of(values + i * a_step + 4 * s), *p = &pairs[five ? s / 4 : 0][i];
                if (has_signed_groups(format)) sums[i] = add_bytes(sums[i], w, a);
                else *p = add_unsigned(*p, w, a);
            }
    for (size_t i = 0; i < n && !has_signed_groups(format); i++) {
        sums[i] = _mm256_madd_epi16(pairs[0][i], _mm256_set1_epi16(1));
        if (five) sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs[1][i], _mm256_set1_epi16(1)));
    }
}

#include "body/bodies.h"
KERNELS_TABLE(kernels_avx2, "avx2")
#else
typedef int no_avx2_here; // ISO C forbids an empty file
#endif
