// AVX512 with VNNI: sixteen lanes, panels of sixteen rows, four products and their sum in one instruction. Compiled with the flags of
// these sets, this file alone.
#if defined(__x86_64__)
#include <immintrin.h>

#define TILE 8 // of 32 registers
#include "body/prelude.h"

#define LANES 16
typedef __m512 vf;
typedef __m512i vi;

ALWAYS_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
ALWAYS_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
ALWAYS_INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
ALWAYS_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
ALWAYS_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
ALWAYS_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
ALWAYS_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
ALWAYS_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
ALWAYS_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ALWAYS_INLINE vf vf_pow2(vf n) { // 2^n for whole n in [-126, 127]
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
ALWAYS_INLINE vf vf_select_special(vf x, vf y) { // of exp: 0 below -87, infinity above 88.72, NaN for NaN
    y = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), y);
    y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, _mm512_set1_ps(88.72f), _CMP_GT_OQ), _mm512_set1_ps(INFINITY));
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
ALWAYS_INLINE float vf_reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
ALWAYS_INLINE float vf_reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
ALWAYS_INLINE vf add_quarters(vf a, vf b) { // of 128 bits: a0 + a1, a2 + a3, b0 + b1, b2 + b3
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
ALWAYS_INLINE vf vf_reduce_each(const vf *s) { // lane i: the sum of s[i]
    vf four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, s += 4) {
        vf a = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
        vf b = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
        four[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    return add_quarters(add_quarters(four[0], four[1]), add_quarters(four[2], four[3]));
}
ALWAYS_INLINE vf vf_of_vi(vi a) { return _mm512_cvtepi32_ps(a); }
ALWAYS_INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
ALWAYS_INLINE void vf_store_f16(uint16_t *p, vf a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
ALWAYS_INLINE vi vi_set1(int32_t a) { return _mm512_set1_epi32(a); }
ALWAYS_INLINE vi vi_set1_times8(const int32_t *p) { return _mm512_slli_epi32(_mm512_set1_epi32(*p), 3); }
ALWAYS_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
ALWAYS_INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
ALWAYS_INLINE vi vi_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
ALWAYS_INLINE void vi_store(int32_t *p, vi a) { _mm512_storeu_si512(p, a); }

ALWAYS_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
ALWAYS_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
ALWAYS_INLINE vi vi_sub_bytes(vi a, vi b) { return _mm512_sub_epi8(a, b); }
ALWAYS_INLINE vi vi_set1_bytes(uint8_t a) { return _mm512_set1_epi8((char)a); }
ALWAYS_INLINE vi vi_shift_left(vi a, int n) { return _mm512_slli_epi16(a, (unsigned)n); }
ALWAYS_INLINE vi vi_shift_right(vi a, int n) { return _mm512_srli_epi16(a, (unsigned)n); }
ALWAYS_INLINE vi vi_lookup(vi indices, const int8_t *table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), indices);
}
ALWAYS_INLINE vi vi_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS_INLINE vi vi_load_i8(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

ALWAYS_INLINE vi four_of(const int8_t *a) { // four activations, in every lane
    int32_t four;
    memcpy(&four, a, 4);
    return _mm512_set1_epi32(four);
}

#define dpbusd _mm512_dpbusd_epi32

// dpbusd wants one side unsigned: |w| * sign(w) a; |-128| is 128 as unsigned.
ALWAYS_INLINE vi add_bytes(vi sum, vi w, vi four) {
    return dpbusd(sum, _mm512_abs_epi8(w), _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(w), _mm512_setzero_si512(), four));
}

#include "body/unpack.h"
#include "body/vnni.h"

#include "body/bodies.h"
KERNELS_TABLE(kernels_avx512_vnni, "avx512-vnni")
#else
typedef int no_avx512_here; // ISO C forbids an empty file
#endif
