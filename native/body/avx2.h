// The primitives that the files with AVX2, FMA and F16C share: eight lanes, panels of eight rows.
#include <immintrin.h>

#define FLOAT_TILE 6 // twelve sums, two weights and an activation: 15 of 16 registers
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
ALWAYS_INLINE vf add_fours(const vf *s) { // lanes 0 to 3: of s[0] to s[3], their first halves; 4 to 7: their second
    vf a = _mm256_add_ps(_mm256_unpacklo_ps(s[0], s[1]), _mm256_unpackhi_ps(s[0], s[1]));
    vf b = _mm256_add_ps(_mm256_unpacklo_ps(s[2], s[3]), _mm256_unpackhi_ps(s[2], s[3]));
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}
ALWAYS_INLINE vf vf_reduce_each(const vf *s) { // lane i: the sum of s[i]
    vf a = add_fours(s), b = add_fours(s + 4);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
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

#include "body/unpack.h"
