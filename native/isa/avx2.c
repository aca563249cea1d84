// AVX2 with FMA and F16C: eight lanes, panels of eight rows. Compiled with -mavx2 -mfma -mf16c, this file alone.
#if defined(__x86_64__)
#include <immintrin.h>

#include "body/prelude.h"

#define LANES 8
typedef __m256 vf;
typedef __m256i vi;

ALWAYS_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
ALWAYS_INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
ALWAYS_INLINE vf vf_set1(float a) { return _mm256_set1_ps(a); }
ALWAYS_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
ALWAYS_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
ALWAYS_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
ALWAYS_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
ALWAYS_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
ALWAYS_INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ALWAYS_INLINE vf vf_pow2(vf n) { // 2^n for whole n in [-126, 127]
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
ALWAYS_INLINE vf vf_select_special(vf x, vf y) { // of exp: 0 below -87, infinity above 88.72, NaN for NaN
    y = _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ), y);
    y = _mm256_blendv_ps(y, _mm256_set1_ps(INFINITY), _mm256_cmp_ps(x, _mm256_set1_ps(88.72f), _CMP_GT_OQ));
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
ALWAYS_INLINE float vf_reduce_add(vf a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
ALWAYS_INLINE float vf_reduce_max(vf a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
ALWAYS_INLINE vf vf_of_vi(vi a) { return _mm256_cvtepi32_ps(a); }
ALWAYS_INLINE vf vf_load_f16(const uint16_t *p) {
    __m128i halves = _mm_loadu_si128((const __m128i *)p);
    __asm__("" : "+x"(halves)); // a load of its own: with an operand in memory vcvtph2ps takes Zen 1 three cycles, else two
    return _mm256_cvtph_ps(halves);
}
ALWAYS_INLINE void vf_store_f16(uint16_t *p, vf a) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
ALWAYS_INLINE vi vi_set1(int32_t a) { return _mm256_set1_epi32(a); }
ALWAYS_INLINE vi vi_set1_times8(const int32_t *p) { return _mm256_slli_epi32(_mm256_set1_epi32(*p), 3); }
ALWAYS_INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
ALWAYS_INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
ALWAYS_INLINE vi vi_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
ALWAYS_INLINE void vi_store(int32_t *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }

ALWAYS_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
ALWAYS_INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
ALWAYS_INLINE vi vi_sub_bytes(vi a, vi b) { return _mm256_sub_epi8(a, b); }
ALWAYS_INLINE vi vi_set1_bytes(uint8_t a) { return _mm256_set1_epi8((char)a); }
ALWAYS_INLINE vi vi_shift_left(vi a, int n) { return _mm256_slli_epi16(a, n); }
ALWAYS_INLINE vi vi_shift_right(vi a, int n) { return _mm256_srli_epi16(a, n); }
ALWAYS_INLINE vi vi_lookup(vi indices, const int8_t *table) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), indices);
}
ALWAYS_INLINE vi vi_load_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
ALWAYS_INLINE vi vi_load_i8(const uint8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

ALWAYS_INLINE vi four_of(const int8_t *a) { // four activations, in every lane
    int32_t four;
    memcpy(&four, a, 4);
    return _mm256_set1_epi32(four);
}

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

#include "body/unpack.h"

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
