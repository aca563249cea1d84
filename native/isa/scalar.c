// Plain C, one lane: the reference of every kernel, and what runs where nothing better does.
#include "body/prelude.h"

#define LANES 1
typedef float vf;
typedef int32_t vi;
struct w_block {
    int8_t values[32];
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

ALWAYS_INLINE struct w_block w_of_nibbles(const uint8_t *bytes) {
    struct w_block w;
    for (int i = 0; i < 16; i++) {
        w.values[i] = bytes[i] & 15;
        w.values[i + 16] = (int8_t)(bytes[i] >> 4);
    }
    return w;
}
ALWAYS_INLINE struct w_block w_of_bytes(const uint8_t *bytes) {
    struct w_block w;
    memcpy(w.values, bytes, 32);
    return w;
}
ALWAYS_INLINE vi dot_bytes(const struct w_block *w, const int8_t *a) {
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) sum += w->values[i] * a[i];
    return sum;
}
#define dot_nibbles dot_bytes

#include "body/bodies.h"
KERNELS_TABLE(kernels_scalar, "scalar")
