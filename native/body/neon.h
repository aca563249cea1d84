// The primitives that the NEON files share: four lanes, panels of four rows.
#include <arm_neon.h>

#include "body/prelude.h"

#define LANES 4
typedef float32x4_t vf;
typedef int32x4_t vi;

ALWAYS_INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
ALWAYS_INLINE void vf_store(float *p, vf a) { vst1q_f32(p, a); }
ALWAYS_INLINE vf vf_set1(float a) { return vdupq_n_f32(a); }
ALWAYS_INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
ALWAYS_INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
ALWAYS_INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
ALWAYS_INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
ALWAYS_INLINE vf vf_min(vf a, vf b) { return vminq_f32(a, b); }
ALWAYS_INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
ALWAYS_INLINE vf vf_round(vf a) { return vrndnq_f32(a); }
ALWAYS_INLINE vf vf_pow2(vf n) { // 2^n for whole n in [-126, 127]
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
ALWAYS_INLINE vf vf_select_special(vf x, vf y) { // of exp: 0 below -87, infinity above 88.72, NaN for NaN
    y = vbslq_f32(vcltq_f32(x, vdupq_n_f32(-87.0f)), vdupq_n_f32(0), y);
    y = vbslq_f32(vcgtq_f32(x, vdupq_n_f32(88.72f)), vdupq_n_f32(INFINITY), y);
    return vbslq_f32(vceqq_f32(x, x), y, x);
}
ALWAYS_INLINE float vf_reduce_add(vf a) { return vaddvq_f32(a); }
ALWAYS_INLINE float vf_reduce_max(vf a) { return vmaxvq_f32(a); }
ALWAYS_INLINE vf vf_reduce_each(const vf *s) { return vpaddq_f32(vpaddq_f32(s[0], s[1]), vpaddq_f32(s[2], s[3])); } // lane i: the sum of s[i]
ALWAYS_INLINE vf vf_of_vi(vi a) { return vcvtq_f32_s32(a); }
ALWAYS_INLINE vf vf_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
ALWAYS_INLINE void vf_store_f16(uint16_t *p, vf a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
ALWAYS_INLINE vi vi_set1(int32_t a) { return vdupq_n_s32(a); }
ALWAYS_INLINE vi vi_set1_times8(const int32_t *p) { return vshlq_n_s32(vld1q_dup_s32(p), 3); }
ALWAYS_INLINE vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
ALWAYS_INLINE vi vi_sub(vi a, vi b) { return vsubq_s32(a, b); }
ALWAYS_INLINE vi vi_load(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
ALWAYS_INLINE void vi_store(int32_t *p, vi a) { vst1q_s32(p, a); }
ALWAYS_INLINE vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
ALWAYS_INLINE vi vi_or(vi a, vi b) { return vorrq_s32(a, b); }
ALWAYS_INLINE vi vi_sub_bytes(vi a, vi b) { return vreinterpretq_s32_s8(vsubq_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))); }
ALWAYS_INLINE vi vi_set1_bytes(uint8_t a) { return vreinterpretq_s32_u8(vdupq_n_u8(a)); }
ALWAYS_INLINE vi vi_shift_left(vi a, int n) { return vreinterpretq_s32_u8(vshlq_u8(vreinterpretq_u8_s32(a), vdupq_n_s8((int8_t)n))); }
ALWAYS_INLINE vi vi_shift_right(vi a, int n) { return vi_shift_left(a, -n); }
ALWAYS_INLINE vi vi_lookup(vi indices, const int8_t *table) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(indices)));
}
ALWAYS_INLINE vi vi_load_u8(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
ALWAYS_INLINE vi vi_load_i8(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

#include "body/unpack.h"

ALWAYS_INLINE int8x16_t bytes_of(const uint8_t *groups, uint32_t format, size_t s) { return vreinterpretq_s8_s32(group_of(groups, format, s)); }
