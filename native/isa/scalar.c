// Plain C, one lane: the reference of every kernel, and what runs where nothing better does.
#include "body/prelude.h"

#define LANES 1
typedef float vf;
typedef int32_t vi;

ALWAYS_INLINE vf vf_load(const float *p) { return *p; }
ALWAYS_INLINE void vf_store(float *p, vf a) { *p = a; }
ALWAYS_INLINE vf vf_set1(float a) { return a; }
ALWAYS_INLINE vf vf_add(vf a, vf b) { return a + b; }
ALWAYS_INLINE vf vf_sub(vf a, vf b) { return a - b; }
ALWAYS_INLINE vf vf_mul(vf a, vf b) { return a * b; }
ALWAYS_INLINE vf vf_div(vf a, vf b) { return a / b; }
ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
ALWAYS_INLINE vf vf_max(vf a, vf b) { return a > b ? a : b; }
ALWAYS_INLINE float vf_reduce_max(vf a) { return a; }
ALWAYS_INLINE float vf_reduce_add(vf a) { return a; }
ALWAYS_INLINE vf vf_reduce_each(const vf *s) { return *s; }
ALWAYS_INLINE vf vf_of_vi(vi a) { return (float)a; }
ALWAYS_INLINE vf vf_load_f16(const uint16_t *p) { return f32_of_f16(*p); }
ALWAYS_INLINE void vf_store_f16(uint16_t *p, vf a) { *p = f16_of_f32(a); }
ALWAYS_INLINE vi vi_set1(int32_t a) { return a; }
ALWAYS_INLINE vi vi_set1_times8(const int32_t *p) { return 8 * *p; }
ALWAYS_INLINE vi vi_add(vi a, vi b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
ALWAYS_INLINE vi vi_sub(vi a, vi b) { return a - b; }
ALWAYS_INLINE vi vi_load(const uint8_t *p) {
    int32_t a;
    memcpy(&a, p, 4);
    return a;
}
ALWAYS_INLINE void vi_store(int32_t *p, vi a) { *p = a; }
// Four bytes in an int: what shifts move over a byte's end is masked out.
ALWAYS_INLINE vi vi_and(vi a, vi b) { return a & b; }
ALWAYS_INLINE vi vi_or(vi a, vi b) { return a | b; }
ALWAYS_INLINE vi vi_set1_bytes(uint8_t a) { return (int32_t)(a * 0x01010101u); }
ALWAYS_INLINE vi vi_shift_left(vi a, int n) { return (int32_t)((uint32_t)a << n); }
ALWAYS_INLINE vi vi_shift_right(vi a, int n) { return (int32_t)((uint32_t)a >> n); }
ALWAYS_INLINE vi vi_sub_bytes(vi a, vi b) { // no borrow from the next byte: Warren, Hacker's Delight, 2-18
    uint32_t x = (uint32_t)a, y = (uint32_t)b, top = 0x80808080u;
    return (int32_t)(((x | top) - (y & ~top)) ^ ((x ^ ~y) & top));
}
ALWAYS_INLINE vi vi_lookup(vi indices, const int8_t *table) {
    uint8_t bytes[4];
    memcpy(bytes, &indices, 4);
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)table[bytes[i]];
    return vi_load(bytes);
}
ALWAYS_INLINE vi vi_load_u8(const uint8_t *p) { return *p; }
ALWAYS_INLINE vi vi_load_i8(const uint8_t *p) { return (int8_t)*p; }
ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p) { return f32_of_bf16(*p); }
#define VF_EXP
ALWAYS_INLINE vf vf_exp(vf a) { return expf(a); }

#include "body/unpack.h"

// One loop over the block's products, which compilers vectorize: 6.9 Gop/s, group by group 1.6.
ALWAYS_INLINE void dot_blocks(vi *sums, uint32_t format, const uint8_t *groups, size_t w_step, const int8_t *values, size_t a_step, size_t n,
                              size_t first, size_t last) {
    int8_t w[MESHLLM_BLOCK];
    for (size_t i = 0; i < n; i++) {
        for (size_t s = 4 * first; s < 4 * last; s++) {
            vi four = group_of(groups + i * w_step, format, s);
            memcpy(w + 4 * s, &four, 4);
        }
        int32_t sum = 0;
        for (size_t k = 16 * first; k < 16 * last; k++) sum += w[k] * values[i * a_step + k];
        sums[i] = sum;
    }
}

#include "body/bodies.h"
KERNELS_TABLE(kernels_scalar, "scalar")
