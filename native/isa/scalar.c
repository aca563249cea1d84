// Plain C, one lane: the reference of every kernel, and what runs where nothing better does.
#include "body/prelude.h"

#define LANES 1
typedef float vf;
typedef int32_t vi;
typedef struct { int8_t values[4]; } w_group;
typedef int32_t dots;
struct w_pair {
    w_group low, high;
};

ALWAYS_INLINE vf vf_load(const float *p) { return *p; }
ALWAYS_INLINE void vf_store(float *p, vf a) { *p = a; }
ALWAYS_INLINE vf vf_set1(float a) { return a; }
ALWAYS_INLINE vf vf_add(vf a, vf b) { return a + b; }
ALWAYS_INLINE vf vf_sub(vf a, vf b) { return a - b; }
ALWAYS_INLINE vf vf_mul(vf a, vf b) { return a * b; }
ALWAYS_INLINE vf vf_div(vf a, vf b) { return a / b; }
ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
ALWAYS_INLINE float vf_reduce_add(vf a) { return a; }
ALWAYS_INLINE vf vf_of_vi(vi a) { return (float)a; }
ALWAYS_INLINE vf vf_load_f16(const uint16_t *p) { return f32_of_f16(*p); }
ALWAYS_INLINE void vf_store_f16(uint16_t *p, vf a) { *p = f16_of_f32(a); }
ALWAYS_INLINE vi vi_set1(int32_t a) { return a; }
ALWAYS_INLINE vi vi_add(vi a, vi b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
ALWAYS_INLINE vi vi_sub(vi a, vi b) { return a - b; }
ALWAYS_INLINE vi vi_load(const uint8_t *p) {
    int32_t a;
    memcpy(&a, p, 4);
    return a;
}
ALWAYS_INLINE void vi_store(int32_t *p, vi a) { *p = a; }
#define VF_EXP
ALWAYS_INLINE vf vf_exp(vf a) { return expf(a); }

ALWAYS_INLINE w_group byte_group(const uint8_t *bytes) {
    w_group w;
    memcpy(w.values, bytes, 4);
    return w;
}
ALWAYS_INLINE w_group four_of(const int8_t *a) { return byte_group((const uint8_t *)a); }
ALWAYS_INLINE struct w_pair nibble_groups(const uint8_t *bytes) {
    struct w_pair w;
    for (int i = 0; i < 4; i++) {
        w.low.values[i] = bytes[i] & 15;
        w.high.values[i] = (int8_t)(bytes[i] >> 4);
    }
    return w;
}
ALWAYS_INLINE dots dots_zero(void) { return 0; }
ALWAYS_INLINE dots add_bytes(dots d, w_group w, w_group four) {
    for (int i = 0; i < 4; i++) d += w.values[i] * four.values[i];
    return d;
}
#define add_nibbles add_bytes
ALWAYS_INLINE vi nibble_sums(dots d) { return d; }
ALWAYS_INLINE vi byte_sums(dots d) { return d; }

#include "body/bodies.h"
KERNELS_TABLE(kernels_scalar, "scalar")
